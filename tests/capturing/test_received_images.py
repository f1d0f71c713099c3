"""Images, clips and packed patches that a model receives, and the places of their numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from visattn.core.capturing.following.received import Images, batch_of, cells_of, color_axis, packed_size
from visattn.core.capturing.placing.places import Places
from visattn.core.capturing.tokens.planes import PADDING
from visattn.core.capturing.trace.operations import operation_of
from visattn.core.capturing.trace.tape import Entry, Outside, Ref, Tape
from visattn.core.geometry import Box


def outside(kind: str, *shape: int) -> Outside:
    return Outside(kind, "x", torch.Size(shape), True)


def tape(*shape: int, packed: tuple[tuple[int, ...], ...] = (), positions: tuple[Tensor, ...] = (), first: str = "") -> Tape:
    """Return a tape of pixels in slot 3, which `first` reads, behind another input."""
    entries = [called("relu", 0), *([called(first, 3)] if first else []), called("relu", 3)]
    received = {0: outside("input", 9, 9, 9, 9), 3: outside("pixels", *shape), 4: outside("pixels", 1, 1, 1, 1)}
    return Tape(entries, received, packed=packed, positions=list(positions))


def called(name: str, slot: int) -> Entry:
    function = getattr(torch, name)
    return Entry(function, operation_of(function), (Ref(slot),), {}, (), "")


def row_columns(rows: int, columns: int) -> Tensor:
    return torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), -1).flatten(0, 1)


def test_pixels_are_cells_for_all_their_colors() -> None:
    images = Images(tape(2, 3, 4, 5))
    planes = images.planes
    assert images.given
    assert (planes.images, planes.input, planes.frames) == (2, Box(0, 0, 4, 5), 0)
    places = images.places(torch.Size((2, 3, 4, 5)))
    assert (places.kind, places.columns) == ("placed", None)
    assert torch.equal(places.codes, torch.arange(40).view(2, 1, 4, 5).expand(2, 3, 4, 5))
    assert planes.of(places.codes)[0].grid == (4, 5)


def test_a_forward_pass_may_receive_no_images() -> None:
    images = Images(Tape(outside={0: outside("input", 2, 3, 4, 5)}))
    assert not images.given
    assert (images.planes.images, images.planes.input, images.planes.frames) == (1, Box(0, 0, 1, 1), 0)


@pytest.mark.parametrize(
    ("shape", "first", "frames", "axis"),
    [
        ((2, 3, 1, 4, 5), "", 1, 1),
        ((2, 7, 3, 4, 5), "", 7, 2),
        ((2, 3, 7, 4, 5), "", 7, 1),
        ((2, 3, 3, 4, 5), "conv3d", 3, 1),
        ((2, 3, 3, 4, 5), "relu", 3, 2),
    ],
)
def test_pixels_of_clips_are_cells_of_frames(shape: tuple[int, ...], first: str, frames: int, axis: int) -> None:
    images = Images(tape(*shape, first=first))
    planes = images.planes
    assert (planes.images, planes.input, planes.frames) == (2, Box(0, 0, 4, 5), frames)
    codes = images.places(torch.Size(shape)).codes
    assert torch.equal(codes, torch.arange(2 * frames * 20).view(2, frames, 4, 5).unsqueeze(axis).expand(shape))
    assert planes.of(codes)[0].grid == (frames, 4, 5)


@pytest.mark.parametrize(
    ("shape", "first", "axis"),
    [
        ((2, 3, 4, 5), "", 1),
        ((2, 7, 3, 4, 5), "", 2),
        ((2, 7, 3, 4, 5), "conv3d", 2),
        ((2, 3, 7, 4, 5), "", 1),
        ((2, 3, 3, 4, 5), "", 2),
        ((2, 3, 3, 4, 5), "conv3d", 1),
        ((2, 7, 7, 4, 5), "conv3d", 1),
        ((2, 7, 7, 4, 5), "", 2),
        ((2, 1, 7, 4, 5), "", 1),
        ((2, 1, 3, 4, 5), "", 2),
        ((2, 2, 7, 4, 5), "", 2),
        ((2, 7, 1, 4, 5), "", 2),
    ],
)
def test_the_axis_with_three_entries_has_the_colors(shape: tuple[int, ...], first: str, axis: int) -> None:
    assert color_axis(shape, first) == axis
    assert first or color_axis(shape) == axis


def test_packed_patches_come_in_one_sequence_or_one_for_each_image() -> None:
    assert [batch_of(shape) for shape in ((7, 48), (7, 3, 4, 4), (2, 7, 48))] == [1, 1, 2]
    grids = [(1, 2, 3), (1, 9, 9)]
    assert packed_size((7, 3, 4, 4), grids) == (8, 12)
    assert packed_size((7, 48), grids) == (8, 12)
    assert packed_size((7, 96), grids) == (8, 12)  # two frames of four by four
    assert packed_size((2, 7, 3 * 25), grids) == (10, 15)
    assert packed_size((7, 3), grids) == (2, 3)
    assert packed_size((7, 50), grids) == (2, 3)  # no square
    assert packed_size((7, 6 * 9 + 3), grids) == (2, 3)


def test_cells_of_patches_are_those_of_their_positions() -> None:
    shuffled = torch.tensor([4, 0, 5, 1, 3, 2])
    positions = row_columns(2, 3)[shuffled]
    grids = (1, 2, 3), (1, 2, 3)
    two = torch.cat([positions, row_columns(2, 3)])
    found = cells_of(Tape(packed=grids, positions=[two]))
    assert found is not None
    assert found.tolist() == [4, 0, 5, 1, 3, 2, *range(6, 12)]
    with_time = torch.cat([torch.full((12, 1), 9), two], 1)
    found = cells_of(Tape(packed=grids, positions=[with_time]))
    assert found is not None
    assert found.tolist() == [4, 0, 5, 1, 3, 2, *range(6, 12)]
    frames = cells_of(Tape(packed=((2, 2, 3),), positions=[two]))
    assert frames is not None
    assert frames.tolist() == [4, 0, 5, 1, 3, 2, *range(6, 12)]
    assert cells_of(Tape(packed=((1, 2, 3), (1, 3, 2)), positions=[two])) is None
    assert cells_of(Tape(packed=grids, positions=[])) is None


def test_positions_that_are_not_each_cell_once_are_passed_over() -> None:
    grids, right = ((1, 2, 3),), row_columns(2, 3)
    twice = right[[0, 1, 2, 3, 4, 4]]
    transposed = row_columns(3, 2)
    too_few = right[:5]
    wide = torch.tensor([[0, 0], [0, 1], [0, 2], [0, 3], [1, 1], [1, 2]])  # column 3 would be the next row
    for wrong in (twice, transposed, wide, too_few):
        assert cells_of(Tape(packed=grids, positions=[wrong])) is None
        found = cells_of(Tape(packed=grids, positions=[wrong, right]))
        assert found is not None
        assert found.tolist() == list(range(6))
    assert cells_of(Tape(packed=((1, 2, 3), (1, 2, 3)), positions=[torch.cat([right, twice])])) is None


def test_padded_sequences_have_the_same_cells_in_each_image() -> None:
    grids, shuffled = ((1, 2, 3), (1, 2, 3)), torch.tensor([4, 0, 5, 1, 3, 2])
    positions = torch.zeros(2, 8, 2, dtype=torch.long)
    positions[:, :6] = row_columns(2, 3)[shuffled]
    found = cells_of(Tape(packed=grids, positions=[positions]))
    assert found is not None
    assert found.tolist() == [4, 0, 5, 1, 3, 2, -1, -1]
    different = positions.clone()
    different[1, :6] = row_columns(2, 3)
    assert cells_of(Tape(packed=grids, positions=[different])) is None
    found = cells_of(Tape(packed=grids, positions=[different, positions[:, :6]]))
    assert found is not None
    assert found.tolist() == [4, 0, 5, 1, 3, 2]


def packed(*shape: int, grids: tuple[tuple[int, ...], ...], positions: Tensor) -> tuple[Images, Places]:
    images = Images(tape(*shape, packed=grids, positions=(positions,)))
    return images, images.places(torch.Size(shape))


def test_packed_patches_lie_at_their_cells() -> None:
    shuffled = torch.tensor([4, 0, 5, 1, 3, 2])
    two = torch.cat([row_columns(2, 3)[shuffled], row_columns(2, 3)])
    images, places = packed(12, 48, grids=((1, 2, 3), (1, 2, 3)), positions=two)
    planes = images.planes
    assert (planes.images, planes.input, planes.frames) == (1, Box(0, 0, 8, 12), 2)
    assert places.kind == "placed"
    assert torch.equal(places.codes, torch.tensor([4, 0, 5, 1, 3, 2, *range(6, 12)])[:, None].expand(12, 48))
    assert planes.of(places.codes)[0].grid == (2, 2, 3)
    assert places.codes.dtype == torch.int32
    alone, places = packed(6, 3, 4, 4, grids=((1, 2, 3),), positions=row_columns(2, 3)[shuffled])
    assert (alone.planes.images, alone.planes.input, alone.planes.frames) == (1, Box(0, 0, 8, 12), 0)
    assert torch.equal(places.codes, shuffled[:, None, None, None].expand(6, 3, 4, 4))
    assert alone.planes.of(places.codes)[0].grid == (2, 3)
    clip, places = packed(12, 96, grids=((2, 2, 3),), positions=two)
    assert (clip.planes.images, clip.planes.frames) == (1, 2)
    assert places.codes[:, 0].tolist() == [4, 0, 5, 1, 3, 2, *range(6, 12)]


def test_packed_patches_of_padded_sequences_lie_in_their_images() -> None:
    positions = torch.zeros(2, 7, 2, dtype=torch.long)
    positions[:, :6] = row_columns(2, 3)
    images, places = packed(2, 7, 48, grids=((1, 2, 3), (1, 2, 3)), positions=positions)
    assert (images.planes.images, images.planes.frames) == (2, 0)
    expected = torch.tensor([[0, 1, 2, 3, 4, 5, PADDING], [6, 7, 8, 9, 10, 11, PADDING]])
    assert torch.equal(places.codes, expected[:, :, None].expand(2, 7, 48))


def test_packed_patches_without_known_places_are_lost() -> None:
    _, places = packed(12, 48, grids=((1, 2, 3), (1, 3, 2)), positions=row_columns(2, 3))
    assert (places.kind, places.name) == ("lost", "packed patches of images with different grids")
    assert places.shape == (12, 48)
    _, places = packed(12, 48, grids=((1, 2, 3), (1, 2, 3)), positions=row_columns(3, 4))
    assert (places.kind, places.name) == ("lost", "packed patches whose places the model does not compute")
