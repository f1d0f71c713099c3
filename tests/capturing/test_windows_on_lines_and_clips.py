"""Windows over lines of tokens, clips and parts of maps, and windows that are cut out and put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capturing.steps import at_work, grid, placed, two_images
from visattn.core.capturing.placing import windows
from visattn.core.capturing.placing.places import Places
from visattn.core.capturing.placing.work import Unproven
from visattn.core.capturing.tokens.planes import Planes
from visattn.core.geometry import Box


def lines(codes: Tensor, channels: int = 5, **fields: Any) -> Places:
    """Return places of lines of tokens, `(images, channels, tokens)`, from codes `(images, tokens)`."""
    return placed(codes[:, None].expand(len(codes), channels, codes.shape[1]), **fields)


def pool_line(planes: Planes, source: Places, count: int, kernel: int | None, stride: int | None = None) -> Places:
    """Pool lines of tokens to `count`: with a kernel, or adaptively."""
    shape = (*source.shape[:-1], count)
    if kernel is None:
        result = windows.adapted(at_work(planes, "adaptive_avg_pool1d", shape, self=source, output_size=[count]))
    else:
        result = windows.pooled(
            at_work(planes, "avg_pool1d", shape, self=source, kernel_size=[kernel], stride=[stride or kernel])
        )
    assert isinstance(result, list)
    return result[0]


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize(("count", "rows", "columns"), [(3, 3, 1), (6, 3, 2), (1, 1, 1)])
def test_windows_on_a_line_of_tokens_are_the_cells_that_they_merge(kernel: bool, count: int, rows: int, columns: int) -> None:
    planes = two_images()
    source = lines(grid(planes, 3, 4).flatten(1))
    pooled = pool_line(planes, source, count, 12 // count if kernel else None)
    assert torch.equal(pooled.codes, grid(planes, rows, columns).flatten(1)[:, None].expand(2, 5, count))


@pytest.mark.parametrize(("count", "kernel", "stride"), [(5, None, None), (2, 5, 5), (3, 3, 3), (3, 4, 3), (2, 6, 5)])
def test_windows_that_overlap_or_leave_tokens_out_are_unproven(count: int, kernel: int | None, stride: int | None) -> None:
    planes = two_images()
    with pytest.raises(Unproven, match=r"pool1d$"):
        pool_line(planes, lines(grid(planes, 3, 4).flatten(1)), count, kernel, stride)


def test_a_mean_over_all_tokens_is_unproven_only_if_some_occur_more_often() -> None:
    planes = two_images()
    row, column = torch.arange(3)[:, None], torch.tensor([0, 0, 0, 1, 2, 3, 3, 3])
    repeated = grid(planes, 3, 4)[:, row, column].flatten(1)
    assert torch.equal(pool_line(planes, lines(repeated), 3, 8).codes, grid(planes, 3, 1).flatten(1)[:, None].expand(2, 5, 3))
    with pytest.raises(Unproven, match=r"^avg_pool1d$"):
        pool_line(planes, lines(repeated), 1, 24)


def test_a_map_of_one_cell_stays_where_it_is_whatever_pads_it() -> None:
    planes = two_images()
    codes = grid(planes, 3, 4)[:, 1:2, 2:3]
    source = placed(codes[:, None].expand(2, 5, 1, 1))
    given = {"kernel_size": [3, 3], "stride": [2], "padding": [1]}
    (pooled,) = windows.pooled(at_work(planes, "avg_pool2d", (2, 5, 1, 1), self=source, **given))  # type: ignore[misc]
    assert torch.equal(pooled.codes, source.codes)


# --- what is noted of mixed cells


def pool(planes: Planes, source: Places, rows: int, columns: int, kernel: list[int], **given: Any) -> Places:
    work = at_work(planes, "avg_pool2d", (*source.shape[:2], rows, columns), self=source, kernel_size=kernel, **given)
    (pooled,) = windows.pooled(work)  # type: ignore[misc]
    assert isinstance(pooled, Places)
    return pooled


def test_weighted_cells_lean_where_they_are_merged() -> None:
    planes = two_images()
    codes = grid(planes, 6, 8)[:, None].expand(2, 5, 6, 8)
    for weighted in (False, True):
        source = placed(codes, weighted=weighted)
        assert pool(planes, source, 3, 4, [2, 2]).leaning is weighted
        assert not pool(planes, source, 6, 8, [3, 3], stride=[1], padding=[1]).leaning
    leaning = placed(codes, leaning=True)
    assert pool(planes, leaning, 6, 8, [3, 3], stride=[1], padding=[1]).leaning


def test_numbers_of_copies_stay_if_they_are_the_same_all_over_a_map() -> None:
    planes = two_images()
    codes = grid(planes, 6, 8)[:, None].expand(2, 5, 6, 8)
    copies = torch.tensor([4, 9], dtype=torch.int32)[:, None, None, None].expand(2, 5, 6, 8)
    pooled = pool(planes, placed(codes, copies=copies), 3, 4, [2, 2])
    assert pooled.copies is not None
    assert torch.equal(pooled.copies, copies[..., :3, :4])
    for axis in (1, 2, 3):
        shape = [1, 1, 1, 1]
        shape[axis] = codes.shape[axis]
        varying = torch.arange(shape[axis], dtype=torch.int32).view(shape).expand(codes.shape)
        assert pool(planes, placed(codes, copies=varying), 3, 4, [2, 2]).copies is None


def test_channels_from_different_cells_are_not_pooled() -> None:
    planes = two_images()
    codes = torch.stack([grid(planes, 6, 8), grid(planes, 6, 8).flip(1)], 1)
    with pytest.raises(Unproven, match=r"^avg_pool2d$"):
        pool(planes, placed(codes), 3, 4, [2, 2])


# --- parts of maps and maps with a border


def test_windows_within_parts_of_a_map_are_the_cells_that_they_merge() -> None:
    planes = two_images()
    parts = grid(planes, 6, 8).view(2, 2, 3, 2, 4).transpose(2, 3).reshape(8, 1, 3, 4).expand(8, 5, 3, 4)
    pooled = pool(planes, placed(parts), 1, 2, [3, 2])
    expected = grid(planes, 2, 4).view(2, 2, 2, 2).reshape(8, 1, 1, 2)
    assert torch.equal(pooled.codes, expected.expand(8, 5, 1, 2))
    for size, kernel, stride in (((1, 2), [2, 2], [2, 2]), ((1, 1), [3, 3], [3, 3]), ((1, 1), [2, 4], [2, 4])):
        with pytest.raises(Unproven, match=r"^avg_pool2d$"):
            pool(planes, placed(parts), *size, kernel, stride=stride)


def test_a_border_of_repeated_cells_and_one_of_zeros_keep_the_grid() -> None:
    planes = two_images()
    codes = grid(planes, 6, 8)
    rows, columns = [0, 0, 1, 2, 3, 4, 5, 5], [0, 0, 1, 2, 3, 4, 5, 6, 7, 7]
    repeated = codes[:, rows][:, :, columns][:, None].expand(2, 5, 8, 10)
    assert torch.equal(pool(planes, placed(repeated), 6, 8, [3, 3], stride=[1]).codes, codes[:, None].expand(2, 5, 6, 8))
    rows = [1, 0, 1, 2, 3, 4, 5, 4]  # the window at the end reads the line beside its own twice
    reflected = codes[:, rows][:, :, columns][:, None].expand(2, 5, 8, 10)
    with pytest.raises(Unproven, match=r"^avg_pool2d$"):
        pool(planes, placed(reflected), 6, 8, [3, 3], stride=[1])
    zeros = torch.nn.functional.pad(codes, (1, 1, 1, 1), value=-1)[:, None].expand(2, 5, 8, 10)
    assert torch.equal(pool(planes, placed(zeros), 6, 8, [3, 3], stride=[1]).codes, codes[:, None].expand(2, 5, 6, 8))
    given = {"stride": [1], "padding": [0], "transposed": True, "weight": Places("learned", torch.full((5, 5, 3, 3), -2))}
    work = at_work(planes, "convolution", (2, 5, 10, 12), input=placed(repeated), **given)
    with pytest.raises(Unproven, match=r"^convolution$"):
        windows.convolved(work)


def test_zeros_around_a_map_that_is_resized_must_not_move_it() -> None:
    planes = two_images()
    codes = grid(planes, 6, 8)
    settings = {"align_corners": False, "scales_h": None, "scales_w": None}
    for border, proven in ((1, True), (6, False)):
        zeros = torch.nn.functional.pad(codes, (0, 0, border, border), value=-1)[:, None].expand(2, 5, 6 + 2 * border, 8)
        work = at_work(planes, "upsample_bilinear2d", (2, 5, 4, 8), self=placed(zeros), output_size=[4, 8], **settings)
        if not proven:
            with pytest.raises(Unproven, match=r"^upsample_bilinear2d$"):
                windows.adapted(work)
            continue
        (resized,) = windows.adapted(work)  # type: ignore[misc]
        assert torch.equal(resized.codes, grid(planes, 4, 8)[:, None].expand(2, 5, 4, 8))


# --- clips


def pool_clip(
    planes: Planes, codes: Tensor, size: tuple[int, ...], kernel: list[int], name: str = "avg_pool3d", **given: Any
) -> Tensor:
    """Return the codes of pooled clips, `(clips, frames, rows, columns)`, from codes in the same form."""
    source = placed(codes[:, None].expand(len(codes), 5, *codes.shape[1:]))
    work = at_work(planes, name, (len(codes), 5, *size), self=source, kernel_size=kernel, **given)
    result = windows.pooled(work)
    assert isinstance(result, list)
    assert torch.equal(result[0].codes, result[0].codes[:, :1].expand(len(codes), 5, *size))
    return result[0].codes[:, 0]


@pytest.mark.parametrize(
    ("frames", "size", "kernel", "given"),
    [
        (4, (2, 3, 2), [2, 2, 4], {}),
        (4, (1, 6, 8), [4, 1, 1], {}),
        (4, (4, 3, 4), [1, 2, 2], {}),
        (5, (3, 3, 4), [3, 3, 3], {"stride": [2], "padding": [1]}),
        (5, (2, 6, 8), [3, 1, 1], {"stride": [3, 1, 1], "padding": [1, 0, 0]}),
        (5, (5, 6, 8), [3, 3, 3], {"stride": [1], "padding": [1]}),
    ],
)
def test_pooled_clips_have_frames_rows_and_columns(frames: int, size: tuple[int, ...], kernel: list[int], given: Any) -> None:
    planes = two_images(frames)
    rows, columns = size[1:]
    codes = grid(planes, 6, 8, frames=frames)
    for name in ("avg_pool3d", "max_pool3d_with_indices"):
        pooled = pool_clip(planes, codes[[1, 0, 1]], size, kernel, name, **given)
        assert torch.equal(pooled, grid(planes, rows, columns, frames=size[0])[[1, 0, 1]])


@pytest.mark.parametrize(("count", "step"), [(3, 2), (1, 2), (1, 3), (4, 2)])
def test_frames_that_are_left_out_or_read_from_outside_make_no_clip(count: int, step: int) -> None:
    planes = two_images(4)
    with pytest.raises(Unproven, match=r"^avg_pool3d$"):
        pool_clip(planes, grid(planes, 6, 8, frames=4), (count, 3, 4), [1, 2, 2], stride=[step, 2, 2])


def test_frames_in_another_order_and_a_part_of_the_frames_make_no_clip() -> None:
    planes = two_images(4)
    codes = grid(planes, 6, 8, frames=4)
    for others in (codes.flip(1), codes[:, :3], codes[:, [0, 1, 3, 2]]):
        with pytest.raises(Unproven, match=r"^avg_pool3d$"):
            pool_clip(planes, others, (2, 3, 4), [2, 2, 2])


def test_a_patch_of_its_own_lies_where_the_cells_that_it_holds_do() -> None:
    planes = two_images(4)
    codes = grid(planes, 6, 8, frames=4)
    patches = codes.view(2, 4, 2, 3, 2, 4).permute(0, 2, 4, 1, 3, 5).reshape(8, 4, 3, 4)
    merged = pool_clip(planes, patches, (1, 1, 1), [4, 3, 4])
    assert torch.equal(merged.flatten(), grid(planes, 2, 2, frames=1).flatten())
    with pytest.raises(Unproven, match=r"^avg_pool3d$"):
        pool_clip(planes, patches, (1, 1, 1), [4, 3, 3])


def test_weighted_frames_lean_where_they_are_merged() -> None:
    planes = two_images(4)
    source = placed(grid(planes, 6, 8, frames=4)[:, None].expand(2, 5, 4, 6, 8), weighted=True)
    for frames in (2, 4):
        work = at_work(planes, "avg_pool3d", (2, 5, frames, 6, 8), self=source, kernel_size=[4 // frames, 1, 1])
        (pooled,) = windows.pooled(work)  # type: ignore[misc]
        assert isinstance(pooled, Places)
        assert pooled.leaning is (frames == 2)


def test_clips_are_not_resized() -> None:
    planes = two_images(4)
    source = placed(grid(planes, 6, 8, frames=4)[:, None].expand(2, 5, 4, 6, 8))
    work = at_work(planes, "_adaptive_avg_pool3d", (2, 5, 2, 3, 4), self=source, output_size=[2, 3, 4])
    with pytest.raises(Unproven, match=r"^_adaptive_avg_pool3d$"):
        windows.adapted(work)


# --- windows that are cut out and put back


def test_windows_that_are_cut_out_keep_the_code_of_each_element() -> None:
    planes = two_images()
    codes = grid(planes, 3, 4)
    copies = torch.tensor([4, 9], dtype=torch.int32)[:, None, None, None].expand(2, 2, 3, 4)
    source = placed(codes[:, None].expand(2, 2, 3, 4), copies=copies)
    given = {"kernel_size": [2, 3], "dilation": [1, 1], "padding": [1, 0], "stride": [2, 1]}
    work = at_work(planes, "im2col", (2, 12, 4), self=source, **given)
    work.step.op = torch.ops.aten.im2col.default
    cut = windows.unfolded(work)
    assert isinstance(cut, Places)
    for window, (top, left) in enumerate([(-1, 0), (-1, 1), (1, 0), (1, 1)]):
        for tap, (down, right) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]):
            row, column = top + down, left + right
            expected = codes[:, row, column] if 0 <= row < 3 else torch.tensor([-1, -1])
            for channel in range(2):
                assert torch.equal(cut.codes[:, channel * 6 + tap, window], expected)
    assert cut.copies is not None
    assert torch.equal(cut.copies, torch.tensor([4, 9])[:, None, None].expand(2, 12, 4))


FOLDS: dict[str, tuple[tuple[int, int], tuple[int, int], dict[str, Any], bool]] = {
    "patches": ((3, 2), (12, 8), {"kernel_size": 4, "stride": 4}, True),
    "patches of the pixels": ((3, 2), (24, 40), {"kernel_size": [8, 20], "stride": [8, 20]}, True),
    "centers at the edge of their cells": ((4, 2), (12, 8), {"kernel_size": [4, 4], "stride": [4, 4], "padding": [2, 0]}, True),
    "centers beside their cells": ((4, 2), (12, 8), {"kernel_size": [6, 4], "stride": [4, 4], "padding": [4, 0]}, False),
    "pixels of broken sizes": ((4, 4), (15, 16), {"kernel_size": [4, 4], "stride": [4, 4], "padding": [2, 0]}, True),
    "padding beside": ((2, 4), (6, 6), {"kernel_size": [4, 4], "stride": [2, 2], "padding": [0, 2]}, True),
    "windows that overlap": ((3, 2), (12, 8), {"kernel_size": [6, 4], "stride": [4, 4], "padding": [1, 0]}, True),
    "gaps": ((3, 2), (12, 8), {"kernel_size": [4, 4], "stride": [4, 4], "dilation": [1, 2]}, False),
    "another number of windows in a row": ((3, 2), (8, 12), {"kernel_size": [4, 4], "stride": [4, 4]}, False),
}


@pytest.mark.parametrize("name", FOLDS)
def test_windows_that_are_put_back_at_their_cells_make_a_map_of_the_same_box(name: str) -> None:
    (rows, columns), size, given, proven = FOLDS[name]
    planes = two_images()
    box = Box(0, 0, 24, 40) if size[0] == 24 else Box(4, 10, 28, 50)
    codes = grid(planes, rows, columns, box).flatten(1)[[1, 0, 1], None].expand(3, 20, rows * columns)
    copies = torch.tensor([4, 9, 2], dtype=torch.int32)[:, None, None].expand(3, 20, rows * columns)
    work = at_work(planes, "col2im", (3, 5, *size), self=placed(codes, copies=copies), output_size=list(size), **given)
    if not proven:
        with pytest.raises(Unproven, match=r"^col2im$"):
            windows.folded(work)
        return
    folded = windows.folded(work)
    assert isinstance(folded, Places)
    assert torch.equal(folded.codes, grid(planes, *size, box)[[1, 0, 1], None].expand(3, 5, *size))
    assert folded.copies is not None
    assert torch.equal(folded.copies, torch.tensor([4, 9, 2])[:, None, None, None].expand(3, 5, *size))


def test_windows_in_another_order_and_taps_from_several_cells_are_not_put_back() -> None:
    planes = two_images()
    codes = grid(planes, 3, 2).flatten(1)[:, None].expand(2, 20, 6)
    given: dict[str, Any] = {"output_size": [12, 8], "kernel_size": [4, 4], "stride": [4, 4]}
    two_grids = torch.cat([codes[..., :3], grid(planes, 3, 1).flatten(1)[:, None].expand(2, 20, 3)], 2)
    second_tap = codes.clone()
    second_tap[:, 1] = codes[:, 1].flip(1)
    two_images_in_one = torch.cat([codes[..., :3], codes.flip(0)[..., 3:]], 2)
    for others in (codes.flip(2), codes.mT.reshape(2, 20, 6), two_grids, second_tap, two_images_in_one):
        with pytest.raises(Unproven, match=r"^col2im$"):
            windows.folded(at_work(planes, "col2im", (2, 5, 12, 8), self=placed(others), **given))
    with pytest.raises(Unproven, match=r"^col2im$"):
        windows.folded(at_work(planes, "col2im", (5, 12, 8), self=placed(codes[0]), **given))
