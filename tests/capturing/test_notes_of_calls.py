"""Notes of the operations inside calls: which steps a call leaves, and which numbers tensors have after a known beginning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from visattn.core.capturing.placing.modes_around import apart
from visattn.core.capturing.placing.nodes import Facts, Node
from visattn.core.capturing.placing.steps import Step
from visattn.core.capturing.trace.living import Living
from visattn.core.capturing.trace.noting import Noting, plainly
from visattn.core.capturing.trace.operations import operation_of
from visattn.core.capturing.trace.tape import Entry, Made, Tape

SHAPE = torch.Size((2, 3))


def noting() -> Noting:
    """Return notes of a model that holds no tensors."""
    return Noting(lambda _: None)


def ran(notes: Noting, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return notes.run(func, args, kwargs)


def operations(steps: Sequence[Step]) -> list[str]:
    """Return the names of operations; `None` stands for none."""
    return ["None" if step.op is None else step.op._schema.name.removeprefix("aten::") for step in steps]


def facts(count: int, dynamic: Sequence[int] = ()) -> list[Facts]:
    """Return the forms of tensors, each in a memory of its own."""
    return [Facts(SHAPE, (3, 1), 0, number, True, True, number in dynamic) for number in range(count)]


# --- calls


class Log(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode of code around a capture that logs the operations it sees."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def test_plain_call_runs_in_the_modes_that_were_taken_off() -> None:
    x, log = torch.ones(2), Log()
    with log, apart():
        torch.sub(x, 1)
        assert torch.equal(plainly(torch.mul, (x, 3), {}), torch.full((2,), 3.0))
        assert torch.equal(plainly(torch.add, (x,), {"other": x, "alpha": 4}), torch.full((2,), 5.0))
    assert log.seen == ["mul", "add"]
    plainly(torch.exp, (x,), {})
    assert log.seen == ["mul", "add"]


def test_operations_of_a_call_are_noted_until_they_are_taken() -> None:
    notes, x = noting(), torch.ones(2, 3)
    out = ran(notes, F.linear, x, torch.ones(4, 3), torch.zeros(4))
    assert torch.equal(out, torch.full((2, 4), 3.0))
    steps = notes.taken()
    assert operations(steps) == ["t", "addmm"]
    assert steps[1].outs == (notes._recorder.nodes.of(out),)
    assert notes.taken() == ()


def test_pooling_of_vectors_is_noted_as_one_operation() -> None:
    notes, x = noting(), torch.arange(8.0).reshape(1, 2, 4)
    out = ran(notes, F.max_pool1d, input=x, kernel_size=2, return_indices=False)
    assert out.tolist() == [[[1, 3], [5, 7]]]
    assert torch.equal(ran(notes, torch.max_pool1d, x, 2, 1), x[..., 1:])
    by_name, by_position = notes.taken()
    assert operations([by_name, by_position]) == ["max_pool1d", "max_pool1d"]
    node = notes._recorder.nodes.of(x)
    assert by_name.given == {"self": node, "kernel_size": 2}
    assert by_position.given == {"self": node, "kernel_size": 2, "stride": 1}


def test_function_of_other_code_is_noted_by_what_it_does() -> None:
    def max_pool1d(x: Tensor) -> Tensor:
        return x + 1

    notes = noting()
    ran(notes, max_pool1d, torch.zeros(1, 2, 4))
    assert operations(notes.taken()) == ["add"]


def test_rank_leaves_no_operation_but_what_it_overwrites_is_unknown() -> None:
    notes = noting()
    with torch.inference_mode():
        out, matrix = torch.zeros((), dtype=torch.long), torch.eye(3)
        ran(notes, torch.neg, out)
        assert int(ran(notes, torch.linalg.matrix_rank, matrix)) == 3
        assert operations(notes.taken()) == ["neg"]
        ran(notes, torch.linalg.matrix_rank, matrix, out=out)
        ran(notes, torch.neg, out)
    unseen, after = notes.taken()
    assert int(out) == 3
    assert (unseen.op, unseen.given) == (None, {"memory": 0})
    assert operations([after]) == ["neg"]


def test_write_of_a_call_that_fails_is_settled() -> None:
    notes, x = noting(), torch.zeros(2)

    def fails(x: Tensor) -> None:
        x.add_(1)
        raise ValueError

    ran(notes, torch.neg, x)
    with pytest.raises(ValueError, match=r"^$"):
        ran(notes, fails, x)
    ran(notes, torch.neg, x)
    assert operations(notes.taken()) == ["neg", "add_", "neg"]


def test_function_that_returned_no_tensor_only_asks() -> None:
    def query(_: Tensor) -> None:
        pass

    notes = noting()
    assert not notes.asks(query)
    notes.asked(query)
    assert notes.asks(query)
    assert noting().asks(query)


# --- tensors that a tape begins with, or that a call makes


def test_tensors_from_outside_have_their_kind_and_name() -> None:
    weight = torch.zeros(4)
    notes, tape = Noting(lambda tensor: ("parameter", "scale") if tensor is weight else None), Tape()
    notes.share(tape)
    for slot, (tensor, kind) in enumerate([(torch.zeros(2), "pixels"), (weight, "input"), (torch.zeros(3), "unknown")]):
        notes.outside(tape, slot, tensor, kind, "given")
    other = torch.zeros(5)
    notes.outside(tape, 7, other, "parameter", "given")
    notes.outside(tape, 8, weight, "parameter", "given")
    assert tape.origins == {0: ("pixels", "given"), 1: ("input", "given"), 2: ("unknown", ""), 3: ("unknown", "")}
    assert tape.nodes == {0: 0, 1: 1, 2: 2, 7: 3, 8: 1}
    assert [form.shape[0] for form in tape.facts] == [2, 4, 3, 5]
    fresh, without = Noting(lambda _: ("buffer", "mask")), Tape()
    fresh.share(without)
    fresh.outside(without, 0, weight, "buffer", "given")
    assert without.origins == {0: ("buffer", "mask")}


def test_results_and_rewritten_tensors_get_their_numbers() -> None:
    notes, tape = noting(), Tape()
    a, b, view = (torch.zeros(2) for _ in range(3))
    numbers = [notes._recorder.nodes.of(tensor) for tensor in (view, b, a)]
    assert numbers == [0, 1, 2]
    outs = Made(5, SHAPE, True), None, Made(7, SHAPE, True)
    entry = Entry(torch.add, operation_of(torch.add), (), {}, outs, "", rewritten=((3, 8),))
    notes.number(tape, entry, (a, 4, b), [(3, view)])
    assert tape.nodes == {5: 2, 7: 1, 8: 0}


# --- a forward pass that leaves a known tape


def slots(*tensors: Tensor) -> Living:
    living = Living(lambda _: None)
    for tensor in tensors:
        living.enlist(tensor)
    return living


def resumed(at: int, tape: Tape, living: Living, notes: Noting | None = None) -> Noting:
    notes = notes or noting()
    notes.resume(tape, at, living)
    return notes


@pytest.mark.parametrize("at", [0, 1, 4])
def test_tensors_take_over_their_last_numbers(at: int) -> None:
    x, y, z = (torch.zeros(SHAPE) for _ in range(3))
    gone = torch.zeros(SHAPE)
    living = slots(z, x, gone, y, x)
    del gone
    tape = Tape(nodes={slot: Node(slot + 20) for slot in (1, 2, 3, 4)}, facts=facts(26))
    tape.origins[23] = "buffer", "mask"
    notes = resumed(at, tape, living)
    nodes = notes._recorder.nodes
    assert (nodes.of(x), nodes.of(y)) == (24, 23)
    assert nodes.of(z) == 26  # it is new
    assert nodes.outside == {23: ("buffer", "mask"), 26: ("unknown", "")}
    assert [len(nodes._live(memory)) for memory in (21, 22, 23, 24)] == [0, 0, 1, 1]
    assert len(tape.facts) == 26


def test_numbers_are_taken_over_once_for_each_place_on_the_tape() -> None:
    x, y = torch.zeros(SHAPE), torch.zeros(SHAPE)
    tape, living = Tape(nodes={0: Node(2), 1: Node(1)}, facts=facts(3)), slots(x, y)
    notes = resumed(3, tape, living)
    assert notes._recorder.nodes.of(torch.zeros(1)) == 3
    resumed(3, tape, living, notes)
    assert notes._recorder.nodes.of(torch.zeros(1)) == 4
    resumed(4, tape, living, notes)
    assert notes._recorder.nodes.of(torch.zeros(1)) == 3
    assert notes._recorder.nodes.of(x) == 2


def test_lengths_that_the_model_has_read_before_are_steps() -> None:
    tape = Tape(nodes={0: Node(2), 1: Node(1), 2: Node(0)}, facts=facts(3, dynamic=(1, 2)))
    notes = noting()
    for slot in (0, 1, 2, None, 8, 0):
        notes.keep_length(tape, slot)
    assert notes.taken() == ()
    resumed(2, tape, slots(), notes)
    assert [(step.op, step.given) for step in notes.taken()] == [(None, {"length": 1}), (None, {"length": 2})]


# --- lengths, numbers and memory that other code reads


def test_shapes_depend_on_values_once_elements_were_counted() -> None:
    notes, x = noting(), torch.tensor([0.0, 2.0, 3.0])
    ran(notes, torch.neg, x)
    notes.read_length(x)
    before = notes.dynamic
    found = ran(notes, torch.nonzero, x)
    assert (before, notes.dynamic) == (False, True)
    notes.taken()
    notes.read_length(x)
    notes.read_length(found)
    assert [step.given for step in notes.taken()] == [{"length": notes._recorder.nodes.of(found)}]


def test_tensor_with_other_memory_is_new_and_one_that_tells_is_read() -> None:
    notes, x = noting(), torch.zeros(2)
    nodes = notes._recorder.nodes
    assert nodes.of(x) == 0
    notes.handed_out(operation_of(torch.add), x)
    assert (nodes.of(x), notes.taken()) == (0, ())
    notes.handed_out(operation_of(Tensor.item), x)
    assert [(step.op, step.given) for step in notes.taken()] == [(None, {"read": 0})]
    notes.handed_out(operation_of(Tensor.data.__set__), x)  # type: ignore[attr-defined]
    assert (nodes.of(x), notes.taken()) == (1, ())
    notes.exchanged(x)
    assert nodes.of(x) == 2
    notes.read(x)
    assert [step.given for step in notes.taken()] == [{"read": 2}]
    notes.overwritten(x)
    assert nodes.unseen == [nodes.facts[2].memory]
    notes.clear()
    assert nodes.of(x) == 3


def test_results_of_a_second_run_give_their_numbers_to_those_of_the_first() -> None:
    notes = noting()
    a, b, c, d = (torch.zeros(2) for _ in range(4))
    nodes = notes._recorder.nodes
    assert [nodes.of(tensor) for tensor in (a, b)] == [0, 1]
    notes.stands_for([a, b, 3, a, 4], [c, b, 3, 5, d, d])
    assert (nodes.of(c), nodes.of(b)) == (0, 1)
    assert nodes.of(a) == 2
    assert nodes.of(d) == 3
