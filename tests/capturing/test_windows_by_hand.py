"""Boxes that convolutions, poolings and resizings cover, worked out by hand, and up to which distance a grid stays the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capturing.steps import CPU, at_work, grid, learned, placed, two_images
from visattn.core.capturing.placing import windows
from visattn.core.capturing.placing.kernels import Kernel
from visattn.core.capturing.placing.places import Places, whole
from visattn.core.capturing.placing.work import Unproven, Work
from visattn.core.capturing.tokens.codes import Geometry2d
from visattn.core.capturing.tokens.planes import Planes
from visattn.core.geometry import Box


def maps(planes: Planes, rows: int, columns: int, channels: int, box: Box | None = None, **fields: Any) -> Places:
    return placed(grid(planes, rows, columns, box)[:, None].expand(2, channels, rows, columns), **fields)


def only(result: Any) -> Places:
    """Return the places of the single result of a rule."""
    (places,) = result
    assert isinstance(places, Places)
    return places


def pool(planes: Planes, source: Places, rows: int, columns: int, **given: Any) -> Places:
    shape = (*source.shape[:-2], rows, columns)
    return only(windows.pooled(at_work(planes, "avg_pool2d", shape, self=source, **given)))


@pytest.mark.parametrize(
    ("kernel", "given", "size", "box"),
    [
        ((2, 4), {}, (3, 2), Box(0, 0, 24, 40)),
        ((2, 4), {"stride": []}, (3, 2), Box(0, 0, 24, 40)),
        ((4, 3), {"stride": [4, 3]}, (1, 2), Box(0, 0, 16, 30)),
        ((3, 3), {"stride": [2], "padding": [1]}, (3, 4), Box(0, 0, 24, 40)),
        ((2, 2), {"stride": [2], "padding": [1]}, (4, 5), Box(0, 0, 24, 40)),
        ((4, 6), {"stride": 1}, (3, 3), Box(0, 12.5, 24, 27.5)),
        ((1, 5), {"stride": 1, "padding": [0, 1]}, (6, 6), Box(0, 5, 24, 35)),
        ((2, 2), {"stride": 1, "dilation": 5}, (1, 3), Box(0, 12.5, 24, 27.5)),
    ],
)
def test_a_pooling_covers_the_cells_that_it_reads_or_the_whole_image(
    kernel: tuple[int, int], given: dict[str, Any], size: tuple[int, int], box: Box
) -> None:
    planes = two_images()
    pooled = pool(planes, maps(planes, 6, 8, 3), *size, kernel_size=list(kernel), **given)
    assert torch.equal(pooled.codes, maps(planes, *size, 3, box).codes)


COVERED: dict[str, tuple[Geometry2d | None, tuple[int, int], tuple[int, int], bool, Box]] = {  # of cells of 4 x 5 pixels
    "resizing": (None, (1, 2), (3, 2), False, Box(4, 5, 28, 45)),
    "kernels that overlap": (Geometry2d((3, 5), (2, 3), (1, 2)), (1, 2), (3, 2), False, Box(-2, -10, 22, 20)),
    "patches": (Geometry2d((2, 4), (2, 4), (0, 0)), (1, 2), (3, 2), False, Box(0, -5, 24, 35)),
    "patches that are padded along one axis": (Geometry2d((2, 4), (2, 4), (0, 1)), (1, 2), (3, 2), False, Box(0, -10, 24, 30)),
    "transposed": (Geometry2d((4, 3), (2, 3), (1, 0)), (1, 2), (12, 24), True, Box(0, -5, 24, 35)),
    "transposed to even shares": (Geometry2d((4, 3), (2, 3), (1, 0)), (0, 0), (12, 24), True, Box(4, 5, 28, 45)),
}


@pytest.mark.parametrize("name", COVERED)
def test_new_cells_cover_the_box_that_follows_from_reach_stride_and_padding(name: str) -> None:
    geometry, lines_before, (rows, columns), transposed, box = COVERED[name]
    plane = two_images().grid(6, 8, Box(4, 5, 28, 45))
    covered = windows._covered(plane, lines_before, rows, columns, geometry=geometry, transposed=transposed)
    assert covered == pytest.approx(box, abs=1e-9)


def test_cells_of_broken_sizes_are_covered_by_their_sizes() -> None:
    plane = two_images().grid(6, 8, Box(4, 5, 25, 47))  # cells of 3.5 x 5.25 pixels
    patches = Geometry2d((2, 4), (2, 4), (0, 0))
    assert windows._covered(plane, (0, 0), 2, 1, patches, transposed=False) == Box(4, 5, 18, 26)
    transposed = windows._covered(plane, (0, 0), 3, 4, Geometry2d((1, 1), (2, 2), (0, 0)), transposed=True)
    assert transposed == pytest.approx(Box(4 + 1.75 - 0.875, 5 + 2.625 - 1.3125, 4 + 1.75 + 4.375, 5 + 2.625 + 9.1875), abs=1e-9)


def test_a_resampling_takes_all_that_it_knows_by_name() -> None:
    planes = two_images()
    source = maps(planes, 6, 8, 1)
    work = at_work(planes, "convolution", (2, 1, 12, 16), input=source)
    made = windows.resampled(work=work, codes=source.codes, axes=2, reach=(2, 2), stride=(2, 2), padding=(0, 0), transposed=True)
    assert torch.equal(made, maps(planes, 12, 16, 1).codes)
    geometry = Geometry2d((2, 2), (2, 2), (0, 0))
    assert torch.equal(windows._resampled_maps(work=work, codes=source.codes, geometry=geometry, transposed=True), made)


@pytest.mark.parametrize(
    ("rows", "columns", "down", "right"),
    [(4, 6, 4, 5), (2, 6, 8, 5), (4, 3, 4, 10), (8, 6, 3, 5), (4, 12, 4, 3.75)],
)
def test_centers_of_new_cells_may_lie_half_a_coarser_cell_outside(rows: int, columns: int, down: float, right: float) -> None:
    plane = two_images().grid(4, 6, Box(4, 5, 20, 35))  # cells of 4 x 5 pixels
    for vertical, horizontal, inside in (
        (down, 0, True),
        (-down, 0, True),
        (0, right, True),
        (0, -right, True),
        (down, -right, True),
        (down + 0.01, 0, False),
        (-down - 0.01, 0, False),
        (0, right + 0.01, False),
        (0, -right - 0.01, False),
        (down + 5e-7, -right - 5e-7, True),
        (down + 1e-6, -right - 1e-6, True),
    ):
        box = Box(4 + vertical, 5 + horizontal, 20 + vertical, 35 + horizontal)
        assert windows._stays_inside(plane, box, rows, columns) is inside


@pytest.mark.parametrize(
    ("reach", "stride", "padding", "stays"),
    [
        ((3,), (1,), (1,), True),
        ((3,), (1,), (0,), False),
        ((3,), (1,), (2,), False),
        ((2,), (1,), (0,), True),
        ((2,), (1,), (1,), True),
        ((4,), (1,), (1,), True),
        ((4,), (1,), (0,), False),
        ((3,), (2,), (1,), False),
        ((3,), (0,), (1,), False),
        ((3, 5), (1, 1), (1, 2), True),
        ((3, 5), (1, 2), (1, 2), False),
        ((3, 5), (1, 1), (1, 1), False),
        ((3, 5), (1, 1), (0, 2), False),
    ],
)
def test_a_grid_stays_behind_kernels_that_are_centered_within_half_a_cell(
    reach: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...], stays: bool
) -> None:
    assert windows._stays(reach, stride, padding) is stays


def resizing(planes: Planes, source: Places, rows: int, columns: int, name: str = "upsample_bilinear2d", **given: Any) -> Work:
    settings = {"output_size": [rows, columns], "align_corners": False, "scales_h": None, "scales_w": None} | given
    if "nearest" in name:
        del settings["align_corners"]
    if "adaptive" in name:
        settings = {"output_size": [rows, columns]}
    return at_work(planes, name, (*source.shape[:-2], rows, columns), self=source, **settings)


@pytest.mark.parametrize(
    ("plane_rows", "before", "rows", "in_cells", "in_pixels"),
    [
        (6, 1, 4, True, True),  # 0.75 of a line beside the center, where new cells have 1.5
        (6, 0, 4, False, False),
        (6, 2, 4, False, False),
        (7, 0, 4, True, True),
        (7, 0, 16, False, True),  # 0.72 of a line where new cells have less than one
        (8, 0, 16, True, True),
        (7, 1, 16, False, True),
    ],
)
def test_a_resizing_reads_each_new_cell_from_half_a_cell_or_one_pixel_around_its_center(
    plane_rows: int, before: int, rows: int, in_cells: bool, in_pixels: bool
) -> None:
    planes = Planes(2, (8, 9), CPU)
    pixels, cells = grid(planes, 8, 9), grid(planes, 8, 9, Box(0, 0, 7, 8))
    work = resizing(planes, placed(cells[:, None]), rows, 9)
    assert windows._reads_own(work, cells, (plane_rows, 9), (before, 0)) is in_cells
    assert windows._reads_own(work, pixels, (plane_rows, 9), (before, 0)) is in_pixels
    turned = resizing(planes, placed(cells.mT[:, None]), 9, rows)
    assert windows._reads_own(turned, cells.mT, (9, plane_rows), (0, before)) is in_cells


@pytest.mark.parametrize(
    "name",
    [
        "upsample_bilinear2d",
        "_upsample_bilinear2d_aa",
        "upsample_nearest2d",
        "_adaptive_avg_pool2d",
        "mkldnn_adaptive_avg_pool2d",
    ],
)
def test_a_resized_grid_covers_the_same_box(name: str) -> None:
    planes = two_images()
    box = Box(4, 5, 20, 35)
    source = maps(planes, 6, 8, 3, box)
    resized = only(windows.adapted(resizing(planes, source, 3, 4, name)))
    assert torch.equal(resized.codes, maps(planes, 3, 4, 3, box).codes)
    assert resized.leaning == (name in ("upsample_bilinear2d", "upsample_nearest2d"))
    same = only(windows.adapted(resizing(planes, source, 6, 8, name)))
    assert torch.equal(same.codes, source.codes)
    assert not same.leaning


def test_a_maximum_over_areas_lies_where_the_mean_does_and_its_indices_nowhere() -> None:
    planes = two_images()
    work = at_work(planes, "adaptive_max_pool2d", (2, 3, 3, 4), (2, 3, 3, 4), self=maps(planes, 6, 8, 3), output_size=[3, 4])
    result = windows.adapted(work)
    assert isinstance(result, list)
    assert [places.kind for places in result] == ["placed", "lost"]
    assert torch.equal(result[0].codes, maps(planes, 3, 4, 3).codes)


def test_maps_without_a_batch_are_pooled_over_all_their_channels() -> None:
    planes = two_images()
    source = placed(grid(planes, 6, 8)[1:].expand(3, 6, 8))
    assert torch.equal(pool(planes, source, 3, 2, kernel_size=[2, 4]).codes, grid(planes, 3, 2)[1:].expand(3, 3, 2))


def test_each_map_keeps_its_own_image() -> None:
    planes = two_images()
    source = placed(grid(planes, 6, 8)[[1, 0, 1, 1, 0]][:, None].expand(5, 3, 6, 8))
    pooled = pool(planes, source, 3, 2, kernel_size=[2, 4])
    assert torch.equal(pooled.codes, grid(planes, 3, 2)[[1, 0, 1, 1, 0]][:, None].expand(5, 3, 3, 2))


def test_the_nearest_of_cells_in_disorder_is_a_choice_whose_repetitions_are_copies() -> None:
    planes = two_images()
    codes = grid(planes, 3, 4).flip(2)[:, None].expand(2, 5, 3, 4)
    taken = only(windows.adapted(resizing(planes, placed(codes), 6, 4, "upsample_nearest2d")))
    assert torch.equal(taken.codes, codes.repeat_interleave(2, 2))
    number = torch.tensor([0, 1, 0, 1, 0, 1])[:, None].expand(2, 5, 6, 4)
    assert taken.copies is not None
    assert torch.equal(taken.copies, number)
    earlier = torch.tensor([3, 8])[:, None, None, None].expand(2, 5, 3, 4)
    again = only(windows.adapted(resizing(planes, placed(codes, copies=earlier), 6, 4, "upsample_nearest2d")))
    assert again.copies is not None
    assert torch.equal(again.copies, torch.tensor([6, 16])[:, None, None, None] + number)


def test_a_choice_without_repetitions_and_one_of_members_makes_no_copies() -> None:
    planes = two_images()
    codes = grid(planes, 4, 6).flip(2)[:, None].expand(2, 5, 4, 6)
    fewer = only(windows.adapted(resizing(planes, placed(codes), 2, 3, "upsample_nearest2d")))
    assert torch.equal(fewer.codes, codes[:, :, ::2, ::2])
    assert fewer.copies is None
    words = Places("learned", codes)
    more = only(windows.adapted(resizing(planes, words, 8, 6, "upsample_nearest2d")))
    assert torch.equal(more.codes, codes.repeat_interleave(2, 2))
    assert more.copies is None


def test_cells_in_disorder_are_not_resized_by_means() -> None:
    planes = two_images()
    source = placed(grid(planes, 3, 4).flip(2)[:, None])
    for name in ("upsample_bilinear2d", "_adaptive_avg_pool2d"):
        with pytest.raises(Unproven, match=f"^{name}$"):
            windows.adapted(resizing(planes, source, 6, 8, name))


@pytest.mark.parametrize(("value", "axes", "sides"), [(3, 2, (3, 3)), ([4], 3, (4, 4, 4)), ([4, 5], 2, (4, 5)), ((6,), 1, (6,))])
def test_one_number_holds_for_all_axes(value: Any, axes: int, sides: tuple[int, ...]) -> None:
    assert windows._sides(value, axes) == sides


# --- convolutions


def convolve(
    planes: Planes, source: Places, shape: tuple[int, ...], taps: tuple[int, ...], kernel: Kernel | None = None, **given: Any
) -> Places:
    weight = given.pop("weight", None) or learned(shape[1], source.shape[1], *taps)
    work = at_work(planes, "convolution", shape, input=source, weight=weight, **given)
    work.step.kernel = kernel
    return only(windows.convolved(work))


def shifted(codes: Tensor, down: int, right: int, rows: int, columns: int) -> Tensor:
    """Return a map whose element `(r, c)` is that at `(r + down, c + right)` of another; -1 beside it."""
    result = torch.full((*codes.shape[:-2], rows, columns), -1, dtype=codes.dtype)
    for r in range(rows):
        for c in range(columns):
            if 0 <= r + down < codes.shape[-2] and 0 <= c + right < codes.shape[-1]:
                result[..., r, c] = codes[..., r + down, c + right]
    return result


def test_a_kernel_with_one_tap_moves_cells() -> None:
    planes = two_images()
    source, codes = maps(planes, 6, 8, 3), grid(planes, 6, 8)[:, None]
    kernel = Kernel(centered=False, tap=(2, 0))
    moved = convolve(planes, source, (2, 7, 6, 8), (3, 5), kernel, padding=[1, 2])
    assert torch.equal(moved.codes, shifted(codes, 1, -2, 6, 8).expand(2, 7, 6, 8))
    moved = convolve(planes, source, (2, 7, 4, 4), (3, 5), kernel)
    assert torch.equal(moved.codes, shifted(codes, 2, 0, 4, 4).expand(2, 7, 4, 4))
    moved = convolve(planes, source, (2, 7, 2, 4), (3, 5), kernel, dilation=[2, 1])
    assert torch.equal(moved.codes, shifted(codes, 4, 0, 2, 4).expand(2, 7, 2, 4))
    moved = convolve(planes, source, (2, 7, 8, 12), (3, 5), kernel, transposed=True)
    assert torch.equal(moved.codes, shifted(codes, -2, 0, 8, 12).expand(2, 7, 8, 12))
    moved = convolve(planes, source, (2, 7, 6, 8), (3, 5), kernel, transposed=True, padding=[1, 2], stride=[1, 1])
    assert torch.equal(moved.codes, shifted(codes, -1, 2, 6, 8).expand(2, 7, 6, 8))


def test_a_kernel_that_leans_is_refused_unless_it_moves_cells_one_by_one() -> None:
    planes = two_images()
    source, reason = maps(planes, 6, 8, 3), "^convolution by a kernel that leans to one side$"
    for kernel, stride in ((Kernel(centered=False), 1), (Kernel(centered=False, tap=(0, 0)), 2)):
        with pytest.raises(Unproven, match=reason):
            convolve(planes, source, (2, 7, 6 // stride, 8 // stride), (3, 3), kernel, padding=[1], stride=[stride])
    with pytest.raises(Unproven, match=reason):
        convolve(planes, source, (2, 7, 6, 4), (3, 3), Kernel(centered=False, tap=(0, 0)), padding=[1], stride=[1, 2])


@pytest.mark.parametrize("kernel", [None, Kernel(centered=True), Kernel(centered=True, tap=(1, 1))])
def test_a_kernel_that_is_centered_makes_a_coarser_grid_of_the_same_box(kernel: Kernel | None) -> None:
    planes = two_images()
    made = convolve(planes, maps(planes, 6, 8, 3), (2, 7, 3, 4), (3, 3), kernel, padding=[1], stride=[2])
    assert torch.equal(made.codes, maps(planes, 3, 4, 7).codes)
    assert not made.leaning
    assert not made.mixture


def test_transposed_kernels_make_a_finer_grid() -> None:
    planes = two_images()
    box = Box(4, 5, 20, 35)
    source = maps(planes, 4, 6, 3, box)
    made = convolve(planes, source, (2, 7, 8, 12), (2, 2), None, stride=[2], transposed=True)
    assert torch.equal(made.codes, maps(planes, 8, 12, 7, box).codes)
    with pytest.raises(Unproven, match=r"^convolution$"):
        convolve(planes, source._replace(leaning=True), (2, 7, 8, 12), (2, 2), None, stride=[2], transposed=True)


def test_a_line_of_channels_of_one_token_has_one_place_whatever_the_kernel() -> None:
    planes = two_images()
    image = grid(planes, 1, 1)
    leaning = Kernel(centered=False)
    made = convolve(planes, placed(image.expand(2, 1, 5)), (2, 1, 5), (3,), leaning, padding=[1])
    assert torch.equal(made.codes, image.expand(2, 1, 5))
    for codes in (grid(planes, 4, 1)[:, None].expand(2, 3, 4, 5), grid(planes, 1, 5)[:, None].expand(2, 3, 4, 5)):
        for images in (1, 2):
            with pytest.raises(Unproven, match="leans to one side"):
                convolve(planes, placed(codes[:images]), (images, 3, 4, 5), (3, 3), leaning, padding=[1])


@pytest.mark.parametrize("channels", [1, 2, 7])
def test_tokens_that_are_channels_are_mixed_into_one_cell_that_may_lean(channels: int) -> None:
    planes = two_images()
    tokens = placed(grid(planes, 3, 4).flatten(1)[..., None].expand(2, 12, 5))
    made = convolve(planes, tokens, (2, channels, 5), (1,))
    assert torch.equal(made.codes, grid(planes, 1, 1).expand(2, channels, 5))
    assert made.leaning
    assert made.mixture == (channels > 1)


def test_a_kernel_from_the_image_is_refused_and_so_is_a_bias() -> None:
    planes = two_images()
    source = maps(planes, 6, 8, 3)
    with pytest.raises(Unproven, match=r"^a kernel that comes from the image$"):
        convolve(planes, learned(2, 3, 6, 8), (2, 3, 6, 8), (1, 1), weight=maps(planes, 1, 1, 3))
    lost = whole("lost", (3, 3, 1, 1), CPU, "roll")
    with pytest.raises(Unproven, match=r"^roll$"):
        convolve(planes, source, (2, 3, 6, 8), (1, 1), weight=lost)
    with pytest.raises(Unproven, match=r"^roll$"):
        convolve(planes, source, (2, 3, 6, 8), (1, 1), bias=lost)
