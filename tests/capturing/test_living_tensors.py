"""Tensors of a running forward pass by slot, tensors among the arguments of calls, and memory that other code can write to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from visattn.core.capturing.trace.call_tensors import (
    SWITCH,
    changes,
    lead_of,
    memory_of,
    positions_among,
    results_of,
    tensors_in,
    transformed,
)
from visattn.core.capturing.trace.exposed import ExposedMemory, is_foreign, is_only_owner, is_shared
from visattn.core.capturing.trace.living import Living
from visattn.core.capturing.trace.operations import operation_of
from visattn.core.capturing.trace.tape import Outside

SHAPE = torch.Size((2, 3))


def living() -> tuple[Living, list[Tensor]]:
    """Return a table, and the tensors that it has reported as overwritten."""
    told: list[Tensor] = []
    return Living(told.append), told


def tensors(count: int) -> list[Tensor]:
    return [torch.zeros(SHAPE) for _ in range(count)]


# --- slots


def test_slots_are_numbered_and_the_last_one_of_a_tensor_counts() -> None:
    table, _ = living()
    a, b, c = tensors(3)
    assert [table.enlist(a), table.enlist(b)] == [0, 1]
    assert (table.slot(a), table.slot(b), table.slot(c)) == (0, 1, None)
    assert table.enlist(a) == 2
    assert table.slot(a) == 2
    assert table.slots([b, 5, c, a]) == (1, None, None, 2)
    assert len(table.tensors()) == 3
    table.forget(a)
    assert table.slot(a) is None
    table.clear()
    assert (table.slot(b), table.refs, table.versions) == (None, [], [])
    assert table.enlist(b) == 0
    assert table.slot(b) == 0


def test_dropped_slots_are_free_again() -> None:
    table, _ = living()
    made = tensors(4)
    for tensor in made:
        table.enlist(tensor)
    assert table.slot(made[3]) == 3
    table.back_to(2)
    assert (len(table.refs), len(table.versions)) == (2, 2)
    assert table.slots(made) == (0, 1, None, None)
    assert table.enlist(made[3]) == 2
    assert table.slots(made) == (0, 1, None, 2)
    table.enlist(made[2])
    table.back_to(4)
    assert table.slots(made) == (0, 1, 3, 2)
    table.back_to(3)
    assert table.slots(made) == (0, 1, None, 2)


def test_tensor_that_is_gone_has_no_slot() -> None:
    table, _ = living()
    kept, gone = tensors(2)
    table.enlist(gone)
    table.enlist(kept)
    del gone
    assert table.slot(kept) == 1
    assert [tensor is kept for tensor in table.tensors()] == [True]
    table._index()[id(kept)] = 0
    table._has_forgotten = True  # so that slots are found by `id` alone
    assert table.slot(kept) is None


def test_overwritten_tensor_is_new_unless_no_call_made_it() -> None:
    table, told = living()
    a, b = tensors(2)
    table.enlist(a)
    table.enlist(b)
    a.add_(1)
    b.add_(1)
    assert table.is_written(0, a)
    assert table.current(a, ()) is None
    assert table.slot(a) is None
    assert table.current(b, {1}) == 1
    assert table.current(torch.zeros(1), ()) is None
    table.versions[1] = None
    assert not table.is_written(1, b)
    assert table.current(b, ()) == 1
    assert told == []


def test_versions_are_not_tracked_in_inference_mode() -> None:
    with torch.inference_mode():
        table, _ = living()
        assert table.enlist(torch.zeros(2)) == 0
    assert table.versions == [None]
    other, (a,) = living()[0], tensors(1)
    a.add_(1)
    with torch.inference_mode():
        inference = torch.zeros(2)
    other.enlist(a)
    other.enlist(inference)
    assert other.versions == [1, None]


def test_tensor_whose_memory_other_code_has_written_is_forgotten_with_its_views() -> None:
    table, told = living()
    a, b = tensors(2)
    view = a[0]
    for tensor in (a, view, b):
        table.enlist(tensor)
    table.exposed.add(a)
    assert table.current(a, ()) == 0
    a.numpy()[1, 2] = 5
    assert table.current(a, ()) is None
    assert [tensor is a for tensor in told] == [True]
    assert table.slots([a, view, b]) == (None, None, 2)
    assert table.current(b, ()) == 2


def test_exchanged_tensor_has_no_slot_at_all() -> None:
    table, _ = living()
    a, b = tensors(2)
    for tensor in (a, b, a):
        table.enlist(tensor)
    assert table.slot(a) == 2
    table.exchanged(a)
    assert [ref() is b for ref in table.refs] == [False, True, False]
    assert [ref() is None for ref in table.refs] == [True, False, True]
    assert table.slots([a, b]) == (None, 1)


# --- overwritten tensors


def targets(table: Living, func: Any, args: tuple[Any, ...], result: Any, **kwargs: Any) -> list[int]:
    return [id(tensor) for tensor in table.targets(operation_of(func), args, kwargs, result)]


def test_targets_are_what_a_call_overwrites() -> None:
    table, _ = living()
    a, b, c = tensors(3)
    assert targets(table, Tensor.add_, (a, b), a) == [id(a)]
    assert targets(table, torch.add, (a, b), c, out=c) == [id(c)]
    assert targets(table, torch.sort, (a,), (b, c), out=(b, c)) == [id(b), id(c)]
    assert targets(table, torch.relu, (a,), a, inplace=True) == [id(a)]
    assert targets(table, torch.relu, (a,), b, inplace=False) == []
    assert targets(table, torch.add, (a, b), c) == []
    assert targets(table, torch.add, (a, b), b) == []
    assert targets(table, torch.zeros, (), c) == []


def test_returned_argument_was_overwritten_if_its_version_has_changed() -> None:
    table, _ = living()
    a, b = tensors(2)
    assert targets(table, torch.relu, (a,), a) == []
    table.enlist(a)
    table.enlist(b)
    assert targets(table, torch.relu, (a,), a) == []
    a.add_(1)
    assert targets(table, torch.relu, (a,), a) == [id(a)]
    assert targets(table, torch.cat, ([a, b],), a) == [id(a)]
    assert targets(table, torch.relu, (b,), a) == []


def outside(kind: str) -> Outside:
    return Outside(kind, "", SHAPE, True)


def test_views_lie_beside_an_overwritten_tensor() -> None:
    table, _ = living()
    a, other = tensors(2)
    views = [a[0], a[1], a.mT, a[:, 0]]
    for tensor in (a, views[0], other, views[1], views[2], views[3], views[0]):
        table.enlist(tensor)
    known = {3: outside("parameter"), 4: outside("buffer"), 5: outside("attribute")}
    beside = table.beside([a], known)
    assert [(slot, id(tensor)) for slot, tensor in beside] == [(5, id(views[3])), (6, id(views[0]))]
    assert [slot for slot, _ in table.sharing([memory_of(other)])] == [2]


def test_views_are_found_again_when_slots_are_dropped_or_added() -> None:
    table, _ = living()
    a, b = tensors(2)
    views = a[0], a[1], b[0]
    for tensor in (a, b, views[0], views[2]):
        table.enlist(tensor)
    assert [slot for slot, _ in table.beside([a], {})] == [2]
    table.back_to(3)
    table.enlist(views[1])
    assert [slot for slot, _ in table.beside([a], {})] == [2, 3]
    assert table.beside([b], {}) == []
    del views, tensor
    assert table.beside([a], {}) == []


def test_views_are_found_where_their_memory_has_moved() -> None:
    table, _ = living()
    a, other = tensors(2)
    view = a[0]
    for tensor in (a, view, other):
        table.enlist(tensor)
    assert [slot for slot, _ in table.beside([a], {})] == [1]
    address = memory_of(a)
    a.untyped_storage().resize_(1 << 20)
    assert memory_of(a) != address
    assert [slot for slot, _ in table.beside([a], {})] == [1]
    assert table.beside([other], {}) == []


def test_memory_of_an_intercepted_write_is_copied_again() -> None:
    table, _ = living()
    a, b = tensors(2)
    table.exposed.add(a)
    table.exposed.add(b)
    a.add_(1)
    b.add_(1)
    table.beside([a], {})
    assert not table.exposed.overwritten(a)
    assert table.exposed.overwritten(b)


# --- exposed memory


def test_write_of_other_code_is_noticed_anywhere_in_the_memory() -> None:
    memory = ExposedMemory()
    a = torch.zeros(2, 3)
    assert not memory.is_changed(a)
    memory.add(a[:1])
    assert not memory.overwritten(a)
    ((view, copy),) = memory.values()
    assert view.shape == copy.shape == (24,)
    a.numpy()[1, 2] = 1
    assert memory.overwritten(a[:1])
    assert memory.changed == {memory_of(a)}
    memory.refresh([memory_of(a), 7])
    assert not memory.overwritten(a)
    assert memory.is_changed(a)
    assert not memory.is_changed(torch.zeros(2))
    memory.add(a)
    assert len(memory) == 1


def test_copy_is_made_once_for_a_memory() -> None:
    memory, a = ExposedMemory(), torch.zeros(3)
    memory.add(a)
    a.numpy()[0] = 1
    memory.add(a)
    assert memory.overwritten(a)
    memory.add(torch.eye(2).to_sparse())
    assert len(memory) == 1


def test_memory_of_numpy_is_foreign_and_shared() -> None:
    given, own = torch.from_numpy(np.zeros(3)), torch.zeros(3)
    assert is_foreign(given)
    assert is_shared(given)
    assert not is_foreign(own)
    assert not is_shared(own)
    for empty in (torch.zeros(0), torch.from_numpy(np.zeros(0)), torch.zeros(3, device="meta")):
        assert not is_foreign(empty)
        assert not is_shared(empty)
    for empty in (torch.zeros(0), torch.zeros(3, device="meta")):
        beside = empty[:]
        assert not is_shared(empty)
        assert not is_shared(beside)
    sparse = torch.eye(2).to_sparse()
    assert not is_foreign(sparse)
    assert not is_shared(sparse)


def test_memory_with_other_owners_is_shared() -> None:
    own = torch.zeros(3)
    view = own[1:]
    assert is_shared(own)
    assert is_shared(view)
    weight, saved = torch.zeros(3, requires_grad=True), torch.zeros(3)
    product = weight * saved
    assert is_shared(saved)
    saved_weight = weight.detach().clone().requires_grad_()
    squared = saved_weight * saved_weight
    assert not is_shared(saved_weight)
    del product, squared
    assert not is_shared(saved)


# --- tensors among arguments and results


def test_results_of_a_call_are_listed() -> None:
    a, b = tensors(2)
    assert results_of((b,), a, True) == (a,)
    assert results_of((b,), [a, 1], False) == (a, 1)
    assert results_of((b,), (a, b), True) == (a, b)
    assert results_of((), torch.Size((2, 3)), False) == ()
    assert [id(one) for one in results_of((b, a), None, True)] == [id(b)]
    assert results_of((b, a), None, False) == ()
    assert results_of((), None, True) == ()
    assert [id(one) for one in results_of(([a, b],), None, True)] == [id(a), id(b)]
    assert changes(torch.add, (a, b), a)
    assert not changes(Tensor.size, (a,), a.shape)
    assert changes(SWITCH, (False,), None)
    assert changes(Tensor.__setitem__, (a, 0, 1), None)


def test_tensors_are_found_in_nested_values() -> None:
    a, b, c, d = tensors(4)
    nested = [a, (1, {"x": b}), slice(c, 2, d), "text"]
    assert [id(tensor) for tensor in tensors_in(nested)] == list(map(id, (a, b, c, d)))
    assert [id(tensor) for tensor in tensors_in(slice(None, a))] == [id(a)]
    assert tensors_in(SimpleNamespace(a=a)) == []


@pytest.mark.parametrize(("shape", "lead"), [((5, 7), (5,)), ((2, 5, 7), (2, 5)), ((2, 5, 7, 4), (2,)), ((5,), (5,))])
def test_axes_that_count_patches_are_those_before_the_channels(shape: tuple[int, ...], lead: tuple[int, ...]) -> None:
    assert lead_of(shape) == lead


def test_positions_are_whole_numbers_in_twos_or_threes() -> None:
    pairs, triples = torch.arange(10).reshape(5, 2), torch.arange(15.0).reshape(5, 3)
    others = [torch.zeros(5, 1), torch.zeros(5, 4), torch.zeros(4, 2), torch.zeros(2, 5, 2), pairs + 0.5, torch.zeros(5)]
    found = positions_among([pairs, 1, triples, *others], (5,))
    assert [tensor.tolist() for tensor in found] == [pairs.tolist(), triples.tolist()]
    assert found[0] is not pairs
    halves = triples.clone()
    halves[4, 2] += 0.5
    assert positions_among([halves], (5,)) == []


def test_positions_may_have_an_axis_of_images_and_one_of_patches() -> None:
    pairs = torch.arange(20).reshape(2, 5, 2)
    others = [pairs.reshape(5, 2, 2), pairs.mT.contiguous(), pairs[..., :1], torch.zeros(2, 2), torch.zeros(5, 2)]
    assert [found.tolist() for found in positions_among([pairs, *others], (2, 5))] == [pairs.tolist()]


def test_tensor_inside_a_transform_is_noticed_in_lists() -> None:
    plain, answers = torch.zeros(2), []

    def see(x: Tensor) -> Tensor:
        answers.extend([transformed([1, x]), transformed([plain, (x,)]), transformed([[plain, x]]), transformed([plain, x])])
        answers.extend([transformed([plain, (1, x)]), transformed([plain]), transformed([(), [plain]]), transformed([])])
        return x

    torch.vmap(see)(torch.zeros(3, 2))
    assert answers == [True] * 4 + [False] * 4


def test_tensors_without_storage_have_a_negative_address() -> None:
    a = torch.zeros(4)
    assert memory_of(a) == memory_of(a[2:]) == a.data_ptr()
    sparse = torch.eye(2).to_sparse()
    assert memory_of(sparse) == -id(sparse)


def test_memory_of_a_numpy_array_may_have_another_owner() -> None:
    array = np.zeros(4, np.float32)
    one, other = torch.from_numpy(array), torch.from_numpy(array)
    assert not is_only_owner(one)
    assert not is_only_owner(other)


def test_a_view_is_an_owner_too() -> None:
    alone = torch.zeros(3)
    assert is_only_owner(alone)
    view = alone[1:]
    assert not is_only_owner(alone)
    assert not is_only_owner(view)
    assert not is_only_owner(torch.zeros(3).to_sparse())
    assert not is_only_owner(nn.Parameter(torch.zeros(3)))
