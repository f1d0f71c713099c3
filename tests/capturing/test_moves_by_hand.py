"""Elements that are moved, chosen, repeated, padded and joined: their codes, and the numbers of their copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capturing.steps import CPU, at_work, grid, learned, members, placed, two_images
from visattn.core.capturing.placing import moves
from visattn.core.capturing.placing.copies import copies_behind, numbered, occurrences
from visattn.core.capturing.placing.places import FOREIGN, LEARNED, LOST, Places, whole
from visattn.core.capturing.placing.work import Result, Unproven, Work
from visattn.core.capturing.tokens.planes import PADDING, Planes


def single(result: Result) -> Places:
    assert isinstance(result, Places)
    return result


def four_tensors(*shape: int) -> Places:
    """Return places whose codes, columns, copies and other codes are four different ranges of numbers."""
    count = torch.Size(shape).numel()
    codes, columns, copies, others = (torch.arange(count, dtype=torch.int32).view(shape) + 1000 * i for i in range(4))
    return placed(codes, columns=columns, copies=copies, others=others)


def check_four(moved: Places, expected: Tensor) -> None:
    """Check that all four tensors of places were moved alike; `expected` are the codes."""
    for number, field in enumerate(("codes", "columns", "copies", "others")):
        assert torch.equal(getattr(moved, field), expected + 1000 * number)


def test_the_same_places_hold_for_results_of_the_same_shape() -> None:
    source = four_tensors(2, 3)
    result = moves.same(at_work(two_images(), "native_dropout", (2, 3), (2, 3), (3, 2), input=source, p=0.5))
    assert isinstance(result, list)
    assert result[0] is result[1] is source
    assert (result[2].kind, result[2].shape, result[2].name) == ("lost", (3, 2), "native_dropout")


MOVES: dict[str, tuple[dict[str, Any], Any]] = {
    "permute": ({"dims": [2, 0, 1]}, lambda codes: codes.permute(2, 0, 1)),
    "roll": ({"shifts": [1, 2], "dims": [0, 2]}, lambda codes: torch.cat([codes[1:], codes[:1]])[..., [2, 3, 0, 1]]),
    "flip": ({"dims": [1]}, lambda codes: codes[:, [2, 1, 0]]),
    "select": ({"dim": 1, "index": 2}, lambda codes: codes[:, 2]),
    "slice": ({"dim": 2, "start": 1, "end": 3}, lambda codes: codes[..., 1:3]),
}


@pytest.mark.parametrize("name", MOVES)
def test_codes_move_as_the_elements_do(name: str) -> None:
    given, change = MOVES[name]
    source = four_tensors(2, 3, 4)
    expected = change(source.codes)
    out = learned(1)
    moved = single(moves.moved(at_work(two_images(), name, expected.shape, self=source, out=out, **given)))
    check_four(moved, expected)


def test_several_results_move_each_for_itself() -> None:
    source = four_tensors(2, 5)
    result = moves.moved(at_work(two_images(), "split", (2, 3), (2, 2), self=source, split_size=3, dim=1))
    assert isinstance(result, list)
    assert len(result) == 2
    check_four(result[0], source.codes[:, :3])
    check_four(result[1], source.codes[:, 3:])


@pytest.mark.parametrize(
    ("name", "given", "axis"),
    [
        ("roll", {"shifts": [1], "dims": [1]}, 1),
        ("roll", {"shifts": [1], "dims": [-2]}, 1),
        ("flip", {"dims": [1]}, 1),
        ("index_select", {"dim": 1, "index": torch.tensor([2, 0, 1])}, 1),
        ("slice", {"dim": 1, "start": 1, "end": 3}, 1),
    ],
)
def test_expanded_axes_that_an_operation_leaves_alone_stay_expanded(name: str, given: dict[str, Any], axis: int) -> None:
    codes = torch.arange(6, dtype=torch.int32).view(2, 3, 1).expand(2, 3, 4)
    moved = moves._run_on_codes(name, {"self": codes, **given}, "self")
    assert torch.equal(moved, getattr(torch.ops.aten, name)(codes.contiguous(), **given))
    assert moved.stride(2) == 0
    along = torch.arange(8, dtype=torch.int32).view(2, 1, 4).expand(2, 3, 4)  # expanded along the axis that changes
    moved = moves._run_on_codes(name, {"self": along, **given}, "self")
    assert torch.equal(moved, getattr(torch.ops.aten, name)(along.contiguous(), **given))


def test_a_roll_without_axes_moves_elements_across_all() -> None:
    codes = torch.arange(2, dtype=torch.int32)[:, None].expand(2, 3)
    assert moves._run_on_codes("roll", {"self": codes, "shifts": [1], "dims": []}, "self").tolist() == [[1, 0, 0], [0, 1, 1]]
    assert moves._run_on_codes("flip", {"self": torch.tensor(3), "dims": []}, "self").tolist() == 3


def test_a_view_has_the_codes_in_the_same_order_unless_it_reads_another_dtype() -> None:
    source = four_tensors(2, 6)
    viewed = moves.shaped(at_work(two_images(), "view", (3, 4), self=source, size=[3, 4]))
    assert isinstance(viewed, Places)
    for number, field in enumerate(("codes", "columns", "copies", "others")):
        assert torch.equal(getattr(viewed, field), torch.arange(12).view(3, 4) + 1000 * number)
    assert (
        single(moves.shaped(at_work(two_images(), "view", (3, 4), self=source._replace(others=None), size=[3, 4]))).others is None
    )
    with pytest.raises(Unproven, match=r"^view$"):
        moves.shaped(at_work(two_images(), "view", (2, 6), self=source, dtype=torch.int32))


def test_strided_views_reach_elements_of_the_memory_that_the_source_does_not_hold() -> None:
    planes = two_images()
    source = placed(torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32))
    work = at_work(planes, "as_strided", (2, 3), self=source, size=[2, 3], stride=[1, 2], storage_offset=1)
    assert single(moves.strided(work)).codes.tolist() == [[2, 4, 6], [3, 5, LOST]]
    (form,) = work.shadows.facts
    work.shadows.facts = [form._replace(stride=(4, 1), offset=2)]  # elements 2, 3, 4 and 6, 7, 8
    assert single(moves.strided(work)).codes.tolist() == [[LOST, 2, LOST], [1, 3, 4]]
    del work.step.given["storage_offset"]
    assert single(moves.strided(work)).codes.tolist() == [[1, 3, 4], [2, LOST, 5]]


# --- repetition


def test_copies_are_numbered_in_the_order_of_the_axes_behind_earlier_ones() -> None:
    number = numbered(None, (2, 3, 4), [0, 2], CPU)
    assert torch.equal(number, torch.arange(2)[:, None, None] * 4 + torch.arange(4).expand(2, 3, 4))
    earlier = torch.tensor([5, 6], dtype=torch.int32)[:, None].expand(2, 3)
    assert numbered(earlier, (2, 3), [1], CPU).tolist() == [[15, 16, 17], [18, 19, 20]]
    assert numbered(None, (2, 3), [], CPU).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_occurrences_count_the_equal_numbers_before() -> None:
    assert occurrences(torch.tensor([[5, 7, 5], [7, 5, 1]])).tolist() == [[0, 0, 1], [1, 2, 0]]
    assert occurrences(torch.tensor([2, 2, 1, 1])).tolist() == [0, 1, 0, 1]


def test_copies_stay_behind_a_change_of_axes_along_which_they_are_the_same() -> None:
    copies = torch.tensor([4, 9])[:, None, None].expand(2, 3, 5)
    kept = copies_behind(copies, [1, -1], (2, 7, 1))
    assert kept is not None
    assert kept.tolist() == [[[4]] * 7, [[9]] * 7]
    assert copies_behind(copies[:, :1], [1], (2, 7, 5)) is not None
    assert copies_behind(copies, [0, 1], (2, 7, 5)) is None
    assert copies_behind(copies, [1, 0], (2, 7, 5)) is None
    assert copies_behind(None, [1], (2, 7, 5)) is None


def test_an_expanded_tensor_numbers_copies_along_axes_that_grow() -> None:
    planes = two_images()
    source = placed(torch.arange(3, dtype=torch.int32)[:, None], parts=torch.zeros(3, 1))
    grown = single(moves.expanded(at_work(planes, "expand", (2, 3, 4), self=source, size=[2, 3, 4])))
    assert torch.equal(grown.codes, torch.arange(3)[None, :, None].expand(2, 3, 4))
    assert grown.copies is not None
    assert torch.equal(grown.copies, torch.arange(2)[:, None, None] * 4 + torch.arange(4).expand(2, 3, 4))
    assert grown.parts is None
    same = single(moves.expanded(at_work(planes, "expand", (1, 3, 1), self=source, size=[1, 3, 1])))
    assert same.copies is None
    parts = torch.zeros(2, 3, 4)
    for others in (source._replace(columns=source.codes), source._replace(kind="learned")):
        plain = single(moves.expanded(at_work(planes, "expand", (2, 3, 4), self=others._replace(parts=parts), size=[2, 3, 4])))
        assert plain.copies is None
        assert plain.parts is parts


def repeat(source: Places, *repeats: int) -> Places:
    shape = source.codes.repeat(repeats).shape
    return single(moves.repeated(at_work(two_images(), "repeat", shape, self=source, repeats=list(repeats))))


def test_repeated_tokens_are_numbered_copies() -> None:
    source = placed(torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32))
    twice = repeat(source, 1, 2)
    assert twice.codes.tolist() == [[1, 2, 3, 1, 2, 3], [4, 5, 6, 4, 5, 6]]
    assert twice.copies is not None
    assert twice.copies.tolist() == [[0, 0, 0, 1, 1, 1]] * 2
    more = repeat(source, 3, 2, 1)
    assert more.copies is not None
    assert torch.equal(more.copies, (torch.arange(3)[:, None] * 2 + torch.tensor([0, 0, 1, 1]))[..., None].expand(3, 4, 3))
    again = repeat(twice, 2, 1)
    assert again.copies is not None
    assert again.copies.tolist() == [[0, 0, 0, 2, 2, 2]] * 2 + [[1, 1, 1, 3, 3, 3]] * 2
    assert repeat(source, 1, 1, 1).copies is None
    assert repeat(source._replace(columns=source.codes), 1, 2).copies is None
    assert repeat(source._replace(kind="foreign"), 1, 2).copies is None


def index(planes: Planes, name: str, source: Places, shape: Sequence[int], contents: dict[str, Any], **given: Any) -> Places:
    work = at_work(planes, name, shape, self=source, **given)
    work.step.contents = contents
    return single(moves.indexed(work))


def test_elements_that_are_picked_again_are_copies() -> None:
    planes = two_images()
    source = placed(torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32))
    picked = index(planes, "index_select", source, (2, 4), {"index": torch.tensor([2, 0, 2, 2])}, dim=1, index=learned(4))
    assert picked.codes.tolist() == [[3, 1, 3, 3], [6, 4, 6, 6]]
    assert picked.copies is not None
    assert picked.copies.tolist() == [[0, 0, 1, 2]] * 2
    copied = source._replace(copies=torch.tensor([[3], [5]], dtype=torch.int32).expand(2, 3))
    again = index(planes, "index_select", copied, (2, 4), {"index": torch.tensor([2, 0, 2, 2])}, dim=1, index=learned(4))
    assert again.copies is not None
    assert again.copies.tolist() == [[9, 9, 10, 11], [15, 15, 16, 17]]
    once = index(planes, "index_select", copied, (2, 2), {"index": torch.tensor([2, 0])}, dim=1, index=learned(2))
    assert once.copies is not None
    assert once.copies.tolist() == [[3, 3], [5, 5]]
    one = index(planes, "index_select", source, (2, 1), {"index": torch.tensor([2])}, dim=1, index=learned(1))
    assert one.copies is None
    none = index(planes, "index_select", source, (2, 0), {"index": torch.tensor([], dtype=torch.int64)}, dim=1, index=learned(0))
    assert none.copies is None
    for other in (source._replace(columns=source.codes), source._replace(kind="foreign")):
        plain = index(planes, "index_select", other, (2, 4), {"index": torch.tensor([2, 0, 2, 2])}, dim=1, index=learned(4))
        assert plain.copies is None


def two_stages(planes: Planes) -> Places:
    codes = torch.cat([grid(planes, 3, 4).flatten(1), grid(planes, 2, 2).flatten(1)], 1)
    return placed(codes[..., None].expand(2, 16, 5))


def choose(
    planes: Planes, source: Places, picked: Tensor, index: Any, *, name: str = "gather", sets: bool = False
) -> tuple[Places | None, Work]:
    work = at_work(planes, name, picked.shape, self=source, dim=1, index=index)
    work.step.contents, work.sets = {"index": picked}, sets
    return moves.chosen(work), work


def test_tokens_that_are_picked_by_content_from_several_grids_form_a_set() -> None:
    planes = two_images()
    source = two_stages(planes)
    picked = torch.tensor([[5, 13, 0], [15, 2, 7]])[..., None].expand(2, 3, 5)
    by_content = (placed(grid(planes, 1, 1).expand(2, 3, 5)), whole("lost", (2, 3, 5), CPU))
    for index in by_content:
        result, work = choose(planes, source, picked, index)
        assert result is not None
        queries = planes.set_of("query#0", 3)
        assert torch.equal(result.codes, planes.codes(queries)[..., None].expand(2, 3, 5))
        assert work.step.choice == 0
    _, work = choose(planes, source, picked.flip(1), by_content[0])
    assert work.step.choice == 1
    one_grid = placed(grid(planes, 4, 4).flatten(1)[..., None].expand(2, 16, 5))
    differing = picked.clone()
    differing[1, 2, 4] = 3
    refused: list[tuple[Any, ...]] = [
        (source, picked, learned(2, 3, 5)),
        (source, picked, 3),
        (one_grid, picked, by_content[0]),
        (source._replace(columns=source.codes), picked, by_content[0]),
        (source, differing, by_content[0]),
        (source, picked[..., None], by_content[0]),
        (source, picked[:1], by_content[0]),
    ]
    for given in refused:
        assert choose(planes, *given)[0] is None
    assert choose(planes, source, picked, by_content[0], sets=True)[0] is None
    assert choose(planes, source, picked, by_content[0], name="take")[0] is None


# --- padding and pairs


def test_padding_has_no_code_and_the_number_of_the_first_copy() -> None:
    planes = two_images()
    source = placed(torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), copies=torch.tensor([[5, 6], [7, 8]], dtype=torch.int32))
    for name in ("pad", "padding"):
        made = single(moves.padded_by(at_work(planes, "constant_pad_nd", (2, 5), self=source, **{name: [1, 2]})))
        assert made.codes.tolist() == [[-1, 1, 2, -1, -1], [-1, 3, 4, -1, -1]]
        assert made.copies is not None
        assert made.copies.tolist() == [[0, 5, 6, 0, 0], [0, 7, 8, 0, 0]]
    assert (
        single(moves.padded_by(at_work(planes, "constant_pad_nd", (2, 3), self=source._replace(copies=None), pad=[1, 0]))).copies
        is None
    )
    for name, first in (("reflection_pad1d", [2, 4]), ("replication_pad1d", [1, 3])):
        made = single(moves.mirrored(at_work(planes, name, (2, 3), self=source, padding=[1, 0])))
        assert made.codes.tolist() == [[first[0], 1, 2], [first[1], 3, 4]]
        assert made.copies is not None
        assert made.copies.tolist() == [[first[0] + 4, 5, 6], [first[1] + 4, 7, 8]]


def test_pairs_of_one_cell_become_complex_numbers_and_back() -> None:
    planes = two_images()
    codes = torch.tensor([1, 2, 3], dtype=torch.int32)
    made = moves.as_complex(at_work(planes, "view_as_complex", (3,), self=placed(codes[:, None].expand(3, 2))))
    assert torch.equal(single(made).codes, codes)
    real = moves.as_real(at_work(planes, "view_as_real", (3, 2), self=placed(codes)))
    assert torch.equal(single(real).codes, codes[:, None].expand(3, 2))
    with pytest.raises(Unproven, match=r"^view_as_complex$"):
        moves.as_complex(at_work(planes, "view_as_complex", (1,), self=placed(codes[None, :2])))


def test_unplaced_codes_are_settled_as_members_along_the_last_axis() -> None:
    planes = Planes(1, (24, 40), CPU)
    codes = torch.tensor([[LEARNED, 5, FOREIGN], [LOST, LEARNED, PADDING]], dtype=torch.int32)
    settled = moves.settled(planes, codes, "words")
    tokens, foreign = members(planes, "token", 3).tolist(), members(planes, "foreign words", 3).tolist()
    assert settled.tolist() == [[tokens[0], 5, foreign[2]], [LOST, tokens[1], PADDING]]
    assert moves.settled(planes, codes[:, 2:], "").tolist() == [[planes.members(planes.set_of("foreign", 1)).item()], [PADDING]]
