"""Places of tensors that share memory, a part of which is overwritten."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.capturing.steps import CPU, grid, learned, placed, two_images
from visattn.core.capturing.placing.nodes import Facts
from visattn.core.capturing.placing.places import FOREIGN, LEARNED, LOST, Places, whole, zeros
from visattn.core.capturing.placing.shadows import Shadows, _Memory
from visattn.core.capturing.tokens.planes import PADDING
from visattn.core.capturing.tokens.points import Drift


def facts(shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, memory: int = 0) -> Facts:
    return Facts(torch.Size(shape), stride, offset, memory, True, True)


def codes_of(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def shadows(*forms: Facts, first: Callable[[int], Places] | None = None) -> Shadows:
    return Shadows(two_images(), list(forms), first or (lambda node: learned(*forms[node].shape, name=f"tensor {node}")))


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        ((LEARNED, LEARNED), "learned"),
        ((LEARNED, PADDING), "learned"),
        ((PADDING, PADDING), "learned"),
        ((LEARNED, 0), "placed"),
        ((PADDING, 7), "placed"),
        ((LOST, LOST), "lost"),
        ((FOREIGN, FOREIGN), "foreign"),
        ((FOREIGN, LEARNED), "placed"),
        ((LOST, FOREIGN), "placed"),
        ((LOST, 3), "placed"),
        ((5, 5), "placed"),
        ((0, 0), "placed"),
    ],
)
def test_the_kind_of_a_view_follows_from_the_codes_in_it(codes: tuple[int, ...], kind: str) -> None:
    memory = _Memory(placed(codes_of(9)), codes_of(3, *codes, 4))
    view = memory.of(facts((2,), (1,), 1))
    assert view.kind == kind
    assert view.codes.tolist() == list(codes)


def test_an_empty_view_keeps_the_kind_of_its_memory() -> None:
    memory = _Memory(whole("foreign", (3,), CPU), codes_of(1, 2, 3))
    assert memory.of(facts((0,), (1,))).kind == "foreign"


def test_a_memory_that_has_grown_holds_nothing_known_behind_its_end() -> None:
    memory = _Memory(placed(codes_of(9)), codes_of(3, 4), codes_of(5, 6), codes_of(7, 8))
    memory.reach(2)
    assert len(memory.codes) == 2
    memory.reach(5)
    assert memory.codes.tolist() == [3, 4, LOST, LOST, LOST]
    assert memory.columns is not None
    assert memory.columns.tolist() == [5, 6, LOST, LOST, LOST]
    assert memory.copies is not None
    assert memory.copies.tolist() == [7, 8, 0, 0, 0]
    memory.reach(4)
    assert len(memory.codes) == 5


def test_a_view_is_picked_by_strides_and_offset() -> None:
    numbers = torch.arange(24, dtype=torch.int32)
    memory = _Memory(placed(codes_of(9)), numbers, numbers + 100, numbers + 200)
    view = memory.of(facts((2, 3), (12, 2), 1))
    assert view.codes.tolist() == [[1, 3, 5], [13, 15, 17]]
    assert view.columns is not None
    assert view.columns.tolist() == [[101, 103, 105], [113, 115, 117]]
    assert view.copies is not None
    assert view.copies.tolist() == [[201, 203, 205], [213, 215, 217]]
    grown = memory.of(facts((3,), (5,), 14))
    assert grown.codes.tolist() == [14, 19, LOST]
    assert len(memory.codes) == 25


def test_codes_that_are_stored_go_where_the_strides_point() -> None:
    memory = _Memory(placed(codes_of(9)), torch.full((6,), LOST, dtype=torch.int32))
    memory.store(facts((2, 2), (4, 1), 1), placed(torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)))
    assert memory.codes.tolist() == [LOST, 1, 2, LOST, LOST, 3, 4]
    assert memory.columns is None
    assert memory.copies is None


def test_an_expanded_tensor_stores_one_code_for_each_element_of_its_memory_or_loses_it() -> None:
    memory = _Memory(placed(codes_of(9)), codes_of(0, 0, 0))
    memory.store(facts((2, 3), (0, 1)), placed(codes_of(1, 2, 3).expand(2, 3)))
    assert memory.codes.tolist() == [1, 2, 3]
    memory.store(facts((2, 3), (0, 1)), placed(torch.tensor([[4, 5, 6], [4, 5, 7]], dtype=torch.int32)))
    assert memory.codes.tolist() == [LOST, LOST, LOST]
    memory.store(facts((1, 2), (0, 1), 1), placed(codes_of(8, 9)[None]))
    assert memory.codes.tolist() == [LOST, 8, 9]


def test_scores_and_copies_in_a_memory_get_columns_and_numbers_everywhere() -> None:
    memory = _Memory(placed(codes_of(9)), codes_of(1, 2, 3))
    memory.store(facts((1,), (1,), 1), placed(codes_of(5), columns=codes_of(6), copies=codes_of(7)))
    assert memory.codes.tolist() == [1, 5, 3]
    assert memory.columns is not None
    assert memory.columns.tolist() == [1, 6, 3]
    assert memory.copies is not None
    assert memory.copies.tolist() == [0, 7, 0]
    memory.store(facts((2,), (1,), 1), placed(codes_of(8, 9)))
    assert memory.columns.tolist() == [1, 8, 9]
    assert memory.copies.tolist() == [0, 0, 0]
    memory.store(facts((1,), (1,)), placed(codes_of(4), columns=codes_of(3), copies=codes_of(2)))
    assert (memory.codes.tolist(), memory.columns.tolist(), memory.copies.tolist()) == ([4, 8, 9], [3, 8, 9], [2, 0, 0])


@pytest.mark.parametrize("field", ["mixture", "summed", "weighted", "leaning"])
def test_a_memory_has_the_notes_of_all_that_it_holds(field: str) -> None:
    for earlier, later in ((False, False), (False, True), (True, False), (True, True)):
        memory = _Memory(placed(codes_of(9), **{field: earlier}), codes_of(1, 2))
        memory.store(facts((1,), (1,)), placed(codes_of(5), **{field: later}))
        assert getattr(memory.template, field) is (earlier or later)


def test_the_places_of_image_tokens_speak_for_a_memory() -> None:
    image, constant = placed(codes_of(5), name="image", behind=(3, "a", 0)), learned(1, name="bias")._replace(behind=(4, "b", 0))
    for first, second, name in ((image, constant, "image"), (constant, image, "image"), (constant, learned(1, name="b"), "b")):
        memory = _Memory(first, codes_of(1, 2))
        memory.store(facts((1,), (1,)), second)
        assert memory.template.name == name
    memory = _Memory(image._replace(name="first"), codes_of(1, 2))
    memory.store(facts((1,), (1,)), constant)
    assert memory.template.behind == (4, "b", 0)
    memory.store(facts((1,), (1,)), image._replace(others=codes_of(1)))
    assert (memory.template.name, memory.template.others) == ("image", None)


# --- shadows of several tensors


def test_the_first_look_at_a_tensor_asks_where_it_comes_from_and_remembers() -> None:
    asked = list[int]()

    def first(node: int) -> Places:
        asked.append(node)
        return learned(3)

    seen = shadows(facts((3,), (1,)), first=first)
    assert seen.of(0) is seen.of(0)
    assert asked == [0]


def test_a_new_view_of_a_known_memory_is_read_there() -> None:
    seen = shadows(facts((2, 3), (3, 1)), facts((3,), (1,), 3), facts((3,), (), 3), facts((2,), (1,), 0, 1))
    seen.put(0, placed(torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)))
    assert seen.of(1).codes.tolist() == [4, 5, 6]
    assert seen.of(2).name == "tensor 2"  # it has no strides
    assert seen.of(3).name == "tensor 3"  # another memory


def test_a_view_is_read_from_the_smallest_tensors_that_hold_it_and_not_from_gates() -> None:
    seen = shadows(facts((2,), (1,), 0), facts((4,), (1,)), facts((2, 4), (0, 1)), facts((4,), (1,)), facts((5,), (1,)))
    seen.put(1, placed(codes_of(5, 6, 7, 8)))
    seen.put(0, placed(codes_of(1, 2)))
    seen.put(2, placed(torch.tensor([[1, 2, 3, 4], [9, 9, 9, 9]], dtype=torch.int32)))  # several places for each element
    assert seen.of(3).codes.tolist() == [5, 6, 7, 8]
    assert seen.of(4).codes.tolist() == [5, 6, 7, 8, LOST]


def test_a_write_to_all_of_a_memory_holds_for_the_views_of_the_same_form() -> None:
    seen = shadows(*[facts((3,), (1,))] * 3, facts((3,), (1,), 1))
    seen.put(0, learned(3))
    seen.put(1, learned(3))
    seen.write(0, 2, placed(codes_of(4, 5, 6)), [1])
    assert seen.of(2).codes.tolist() == seen.of(1).codes.tolist() == [4, 5, 6]
    assert seen.of(0).kind == "learned"
    assert seen.overwritten == {0}


def test_a_write_to_a_part_is_seen_by_all_other_views() -> None:
    seen = shadows(facts((4,), (1,)), facts((2,), (1,), 1), facts((2,), (1,), 1), facts((2,), (1,), 2))
    seen.put(0, placed(codes_of(1, 2, 3, 4)))
    seen.put(1, placed(codes_of(2, 3)))
    seen.write(1, 2, placed(codes_of(8, 9)), [0])
    assert seen.of(0).codes.tolist() == [1, 8, 9, 4]
    assert seen.of(2).codes.tolist() == [8, 9]
    assert seen.of(3).kind == "placed"
    seen.write(0, 3, placed(codes_of(6, 7)), [0, 2])
    assert seen.of(0).codes.tolist() == [1, 8, 6, 7]
    assert seen.of(2).codes.tolist() == [8, 6]


def test_a_write_to_a_tensor_without_strides_loses_its_other_views() -> None:
    seen = shadows(facts((3,), ()), facts((3,), ()), facts((2,), ()))
    seen.put(2, learned(2))
    seen.write(0, 1, placed(codes_of(4, 5, 6)), [2])
    assert seen.of(1).codes.tolist() == [4, 5, 6]
    assert (seen.of(2).kind, seen.of(2).name) == ("lost", "a write to its memory")


def test_a_memory_that_is_lost_is_lost_for_all_tensors_in_it_and_only_these() -> None:
    seen = shadows(facts((4,), (1,)), facts((2,), (1,), 1), facts((2,), (1,), 1), facts((3,), (1,), 0, 1))
    seen.put(0, placed(codes_of(1, 2, 3, 4)))
    seen.put(3, placed(codes_of(1, 2, 3)))
    seen.write(1, 2, placed(codes_of(8, 9)), [0])
    seen.lose_memory(0, "NumPy")
    assert [(seen.of(node).kind, seen.of(node).name) for node in (0, 2)] == [("lost", "NumPy")] * 2
    assert seen.of(0).shape == (4,)
    assert seen.of(3).kind == "placed"
    assert seen.overwritten == {0}
    seen.lose(3, "roll")
    assert (seen.of(3).kind, seen.of(3).name, seen.of(3).shape) == ("lost", "roll", (3,))


def test_even_axes_hold_until_the_memory_is_overwritten() -> None:
    seen = shadows(facts((4,), (1,)), facts((4,), (1,), 0, 1))
    seen.note_even(0, frozenset({1}))
    assert (seen.even(0), seen.even(1)) == (frozenset({1}), frozenset())
    seen.overwritten.add(1)
    assert seen.even(0) == frozenset({1})
    seen.overwritten.add(0)
    assert seen.even(0) == frozenset()


def test_numbers_have_not_left_at_the_start() -> None:
    seen = shadows(facts((2,), (1,)))
    assert (seen.told, seen.overwritten) == (False, set())


def test_zeros_are_learned_padding_and_whole_tensors_have_one_code() -> None:
    assert zeros((2, 3), CPU).kind == "learned"
    assert zeros((2, 3), CPU).codes.tolist() == [[PADDING] * 3] * 2
    for kind, code in (("learned", -2), ("foreign", -3), ("lost", -4)):
        made = whole(kind, (2, 3), CPU, "name")  # type: ignore[arg-type]
        assert (made.kind, made.name, made.codes.tolist()) == (kind, "name", [[code] * 3] * 2)


# --- places themselves


def test_places_tell_nothing_that_was_not_found() -> None:
    plain = Places("placed", codes_of(1))
    assert plain[2:] == (
        None,
        None,
        "",
        None,
        None,
        True,
        False,
        False,
        Drift(),
        None,
        False,
        None,
        False,
        False,
        False,
        False,
        "",
    )
    assert (plain.placed, plain.located, plain.shape) == (True, True, (1,))
    assert plain.after((3, "a", 1)).behind == (3, "a", 1)
    assert plain._replace(embedding=4).stream != plain.stream != plain.after((3, "a", 1)).stream


def test_a_change_that_does_nothing_returns_the_same_places_and_one_that_fails_none() -> None:
    planes = two_images()
    codes = grid(planes, 3, 4)
    scores = placed(codes, columns=codes + 1, copies=codes + 2, others=codes + 3, parts=codes)
    assert scores.each(lambda tensor: tensor) is scores
    flipped = scores.each(lambda tensor: tensor.flip(1))
    assert flipped is not None
    for field, more in (("codes", 0), ("columns", 1), ("copies", 2), ("others", 3)):
        assert torch.equal(getattr(flipped, field), codes.flip(1) + more)
    assert flipped.parts is None
    assert scores.each(lambda _: None) is None
    for field in ("codes", "columns", "copies"):
        failing = getattr(scores, field)
        assert scores.each(lambda tensor, failing=failing: None if tensor is failing else tensor.flip(1)) is None  # type: ignore[misc]
        changed = scores.each(lambda tensor, failing=failing: tensor.flip(1) if tensor is failing else tensor)  # type: ignore[misc]
        assert changed is not None
        assert torch.equal(getattr(changed, field), failing.flip(1))
    other_form = placed(codes, others=codes[0]).each(lambda tensor: tensor.flip(1))
    assert other_form is not None
    assert other_form.others is None


def test_places_are_the_same_only_in_all_rows_and_columns() -> None:
    codes = grid(two_images(), 3, 4)
    plain, scores = placed(codes), placed(codes, columns=codes + 1)
    assert plain.same(placed(codes.clone()))
    assert scores.same(placed(codes.clone(), columns=codes + 1))
    assert not plain.same(placed(codes[:, :2]))
    assert not plain.same(placed(codes.flip(1)))
    assert not plain.same(scores)
    assert not scores.same(plain)
    assert not scores.same(placed(codes, columns=codes))
    assert not scores.same(placed(codes + 1, columns=codes + 1))
