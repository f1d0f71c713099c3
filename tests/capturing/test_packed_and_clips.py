"""Clips, patches in one sequence, several images of one sample; and constants that the code of a model keeps."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from torch import Tensor, nn

from tests.capturing.moving import GRID, PATCH, SIZE, WIDTH, Moving, image, see
from visattn.core.operators import SoftmaxOperator
from visattn.core.records import AttentionRecord
from visattn.errors import CaptureError

FRAMES = 4


def attended(t: Tensor) -> Tensor:
    heads = t[:, None]
    return F.scaled_dot_product_attention(heads, heads, heads)[:, 0]


def moved(before: AttentionRecord, after: AttentionRecord) -> list[int]:
    """Return the tokens whose keys differ between two recordings, in canonical order."""
    assert isinstance(before.operator, SoftmaxOperator)
    assert isinstance(after.operator, SoftmaxOperator)
    change = (after.operator.key - before.operator.key).abs().amax((1, -1))  # (B, blocks, k)
    index = before.operator.key_index
    tokens = torch.arange(change.shape[-1])[None] if index is None else index
    return sorted({int(tokens[block, k]) for _, block, k in change.view(len(change), *tokens.shape).nonzero().tolist()})


class Tubelets(nn.Module):
    """Attention over tubelets."""

    def __init__(self, channels_first: bool, time: int = 2) -> None:
        super().__init__()
        self.embed, self.channels_first = nn.Conv3d(3, WIDTH, (time, PATCH, PATCH), (time, PATCH, PATCH)), channels_first

    def forward(self, clip: Tensor) -> Tensor:
        clip = clip if self.channels_first else clip.transpose(1, 2)
        return attended(self.embed(clip).flatten(2).mT)


class FrameByFrame(Moving):
    """Attention within each frame; or over the mean of all frames."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.pooled = pooled

    def forward(self, clip: Tensor) -> Tensor:
        t = self.tokens(clip.flatten(0, 1))
        return attended(t.unflatten(0, clip.shape[:2]).mean(1) if self.pooled else t)  # type: ignore[no-untyped-call]


def clip(channels_first: bool = False, batch: int = 2) -> Tensor:
    shape = (batch, 3, FRAMES, *SIZE) if channels_first else (batch, FRAMES, 3, *SIZE)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("channels_first", [False, True])
def test_tubelets_lie_in_their_frames(channels_first: bool) -> None:
    model, x = Tubelets(channels_first).eval(), clip(channels_first)
    record = see(model, x)[0]
    assert (record.kind, record.keys.grid, record.reason) == ("self", (FRAMES // 2, *GRID), None)
    lit = x.clone()
    part = lit[:, :, 3] if channels_first else lit[:, 3]
    part[..., 5 * PATCH, 7 * PATCH] += 1
    assert moved(record, see(model, lit)[0]) == [(1 * GRID[0] + 5) * GRID[1] + 7]


@pytest.mark.parametrize("channels_first", [False, True])
def test_three_frames_are_not_taken_for_channels(channels_first: bool) -> None:
    model, x = Tubelets(channels_first, 1).eval(), clip(channels_first)
    x = x[:, :, :3] if channels_first else x[:, :3]
    record = see(model, x)[0]
    assert record.keys.grid == (3, *GRID)
    lit = x.clone()
    part = lit[:, :, 2] if channels_first else lit[:, 2]
    part[..., 5 * PATCH, 7 * PATCH] += 1
    assert moved(record, see(model, lit)[0]) == [(2 * GRID[0] + 5) * GRID[1] + 7]


def test_frames_that_are_run_apart_are_windows_of_the_clip() -> None:
    model, x = FrameByFrame(False), clip()
    record = see(model, x)[0]
    assert (record.kind, record.keys.grid) == ("self", (FRAMES, *GRID))
    lit = x.clone()
    lit[:, 2, :, 1 * PATCH, 3 * PATCH] += 1
    assert moved(record, see(model, lit)[0]) == [(2 * GRID[0] + 1) * GRID[1] + 3]


def test_the_mean_over_frames_is_one_frame() -> None:
    assert see(FrameByFrame(True), clip())[0].keys.grid == (1, *GRID)


class Packed(nn.Module):
    """Patches of all images in one sequence, in blocks of 2 x 2, with a position embedding by row and column, as in Qwen-VL."""

    def __init__(self, places: bool = True, merged: bool = False) -> None:
        super().__init__()
        self.embed, self.rows, self.columns = nn.Linear(3 * PATCH**2, WIDTH), nn.Embedding(20, WIDTH), nn.Embedding(20, WIDTH)
        self.merge, self.places, self.merged = nn.Linear(4 * WIDTH, WIDTH), places, merged

    def forward(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        t = self.embed(pixel_values)
        if self.places:
            places = torch.cat([positions(rows, columns) for _, rows, columns in image_grid_thw.tolist()])
            t = t + self.rows(places[:, 0]) + self.columns(places[:, 1])
        if self.merged:
            return attended(self.merge(t.view(1, -1, 4 * WIDTH)))
        counts = image_grid_thw.prod(1).tolist()
        return torch.cat([attended(part[None]) for part in t.split(counts)], 1)


def positions(rows: int, columns: int) -> Tensor:
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    blocks = (rows // 2, 2, columns // 2, 2)
    return torch.stack([x.reshape(blocks).transpose(1, 2).flatten() for x in (row, column)], -1)


def patches(count: int) -> Tensor:
    return torch.randn(count, 3 * PATCH**2, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("merged", [False, True])
def test_packed_patches_lie_where_the_model_says(merged: bool) -> None:
    model, x, grid = Packed(merged=merged), patches(24), torch.tensor([[1, 4, 6]])
    record = see(model, pixel_values=x, image_grid_thw=grid)[0]
    assert (record.kind, record.keys.grid, record.reason) == ("self", (2, 3) if merged else (4, 6), None)
    assert tuple(record.keys.box) == (0, 0, 4 * PATCH, 6 * PATCH)
    lit = x.clone()
    lit[13] += 1
    row, column = positions(4, 6)[13].tolist()
    expected = row // 2 * 3 + column // 2 if merged else row * 6 + column
    assert moved(record, see(model, pixel_values=lit, image_grid_thw=grid)[0]) == [expected]


def test_packed_images_of_one_size_are_told_apart() -> None:
    first, second = see(Packed(), pixel_values=patches(48), image_grid_thw=torch.tensor([[1, 4, 6], [1, 4, 6]]))
    assert first.keys.grid == second.keys.grid == (2, 4, 6)
    assert first.keys.holes == tuple(range(24, 48))
    assert second.keys.holes == tuple(range(24))


@pytest.mark.parametrize(
    ("places", "grid", "reason"),
    [
        pytest.param(False, [[1, 4, 6]], "packed patches whose places the model does not compute", id="no positions"),
        pytest.param(True, [[1, 4, 6], [1, 2, 12]], "packed patches of images with different grids", id="images of two sizes"),
    ],
)
def test_packed_patches_without_proof_are_not_placed(places: bool, grid: list[list[int]], reason: str) -> None:
    record = see(Packed(places), pixel_values=patches(24 * len(grid)), image_grid_thw=torch.tensor(grid))[0]
    assert record.reason == f"its tokens could not be traced from the pixels beyond {reason}"


class Padded(nn.Module):
    """A padded sequence of patches for each image, with a position embedding by row and column, as in SigLIP 2."""

    def __init__(self, order: str = "rows") -> None:
        super().__init__()
        self.embed, self.rows, self.columns = nn.Linear(3 * PATCH**2, WIDTH), nn.Embedding(20, WIDTH), nn.Embedding(20, WIDTH)
        self.order = order

    def forward(self, pixel_values: Tensor, spatial_shapes: Tensor, mask: Tensor) -> Tensor:
        t = self.embed(pixel_values)
        if self.order != "none":
            number = torch.arange(t.shape[1])[None].expand(len(t), -1)
            real = number < spatial_shapes.prod(1, keepdim=True)
            by_rows = self.order == "rows"
            length = spatial_shapes[:, 1:] if by_rows else spatial_shapes[:, :1]
            place = (number // length * real, number % length * real)
            row, column = torch.stack(place if by_rows else place[::-1], -1).unbind(-1)
            t = t + self.rows(row) + self.columns(column)
        heads = t[:, None]
        return F.scaled_dot_product_attention(heads, heads, heads, mask[:, None, None].bool())[:, 0]


def padded(grids: list[list[int]], count: int = 30) -> dict[str, Tensor]:
    shapes = torch.tensor(grids)
    mask = torch.arange(count)[None] < shapes.prod(1, keepdim=True)
    x = torch.randn(len(grids), count, 3 * PATCH**2, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": x, "spatial_shapes": shapes, "mask": mask}


@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("image", [0, 1])
@pytest.mark.parametrize("number", [0, 9, 23])
def test_padded_patches_lie_where_the_model_says_and_padding_is_left_out(order: str, image: int, number: int) -> None:
    model, given = Padded(order), padded([[4, 6], [4, 6]])
    record = see(model, **given)[0]
    assert (record.kind, record.keys.grid, record.queries.grid, record.reason) == ("self", (4, 6), (4, 6), None)
    assert tuple(record.keys.box) == (0, 0, 4 * PATCH, 6 * PATCH)
    lit = given["pixel_values"].clone()
    lit[image, number] += 1
    after = see(model, **{**given, "pixel_values": lit})[0]
    change = (after.operator.keys() - record.operator.keys()).abs().amax((1, -1))
    cell = number if order == "rows" else number % 4 * 6 + number // 4
    assert change.nonzero().tolist() == [[image, cell]]


@pytest.mark.parametrize(
    ("order", "grids", "reason"),
    [
        ("none", [[4, 6]], "packed patches whose places the model does not compute"),
        ("rows", [[4, 6], [2, 12]], "packed patches of images with different grids"),
    ],
)
def test_padded_patches_without_proof_are_not_placed(order: str, grids: list[list[int]], reason: str) -> None:
    record = see(Padded(order), **padded(grids))[0]
    assert record.reason == f"its tokens could not be traced from the pixels beyond {reason}"


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="transformers 5.22 computes no places of its patches"
)
def test_siglip_2_of_transformers_is_placed() -> None:
    from transformers import Siglip2VisionConfig, Siglip2VisionModel

    config = Siglip2VisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_patches=16, patch_size=PATCH
    )
    torch.manual_seed(0)
    model, given = Siglip2VisionModel(config).train(False), padded([[4, 6], [4, 6]])
    given["pixel_attention_mask"] = given.pop("mask").long()
    recording = see(model, **given)
    assert [(record.kind, record.keys.grid) for record in recording] == [("self", (4, 6)), ("self", (4, 6)), ("pool", (4, 6))]
    lit = given["pixel_values"].clone()
    lit[1, 13] += 1
    after = see(model, **{**given, "pixel_values": lit})
    change = (after.keys(0) - recording.keys(0)).abs().amax((1, -1))
    assert change.nonzero().tolist() == [[1, 13]]
    assert torch.allclose(recording.attention(1).sum(-1), torch.ones(()))


def test_patches_without_a_grid_are_no_image() -> None:
    with pytest.raises(CaptureError, match="no floating-point tensor of shape"):
        see(nn.Sequential(nn.Linear(3 * PATCH**2, WIDTH)), patches(24))


@functools.lru_cache(maxsize=4)
def kept_embedding(count: int) -> Tensor:
    return torch.linspace(0, 1, count * WIDTH).view(1, count, WIDTH)


class Keeping(Moving):
    """Position embedding that a cache keeps between forward passes."""

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def kept(count: int) -> tuple[Tensor, ...]:
        return (torch.linspace(1, 2, count * WIDTH).view(1, count, WIDTH),)

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        return attended(t + kept_embedding(t.shape[1]) + self.kept(t.shape[1])[0])


def test_constants_kept_from_an_earlier_forward_pass_hide_no_token() -> None:
    model = Keeping()
    with torch.no_grad():
        model(image())
    assert see(model, image())[0].keys.grid == GRID


def test_a_part_that_is_scaled_and_written_back_is_followed() -> None:
    def between(_: Moving, t: Tensor) -> Tensor:
        grid = torch.stack(torch.meshgrid(torch.arange(8.0), torch.arange(12.0), indexing="ij"), -1)
        grid[..., 0] /= 8  # a view that is divided in place and assigned to its own place
        return t + grid.flatten(0, 1).sum(-1)[None, :, None]

    assert see(Moving(between), image())[0].keys.grid == GRID


def test_a_position_embedding_of_the_tokens_type_is_followed() -> None:
    class Typed(Moving):
        def __init__(self) -> None:
            super().__init__()
            self.where = nn.Parameter(torch.randn(1, GRID[0] * GRID[1], WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            t = self.tokens(x)
            return attended(t + self.where.detach().type_as(t).to(t))

    assert see(Typed(), image())[0].keys.grid == GRID
