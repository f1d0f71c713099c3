"""Forward passes that leave a known tape: to another one with the same beginning, or to a new one; outputs, and lengths that are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capturing.test_recorded_tapes import SHAPE, attend, begun, call, last, tensor
from tests.capturing.test_tapes_that_are_known import follow, names
from visattn.core.capturing.trace.tape import Tape
from visattn.core.capturing.trace.tracer import Tracer

Calls = tuple[Callable[..., Any], ...]  # functions of one tensor; each gets the result of the one before
NEG, EXP, SIN, COS = torch.neg, torch.exp, torch.sin, torch.cos


def branches(*calls: Calls) -> list[Tape]:
    """Return tapes that share the entries of common beginnings, because each forward pass begins with the tapes before it."""
    tapes: list[Tape] = []
    for functions in calls:
        tracer = begun(x := tensor(), candidates=tapes)
        for func in functions:
            entry = tracer.expected(func, (x,), {}) or (tracer.elsewhere(func, (x,), {}) if tracer.known else None)
            x = call(tracer, func, x) if entry is None else follow(tracer, func, x)
        tapes.append(tracer.finished([x]))
    return tapes


def functions(tape: Tape) -> Calls:
    return tuple(entry.func for entry in tape.entries)


def test_branches_share_the_entries_of_their_common_beginning() -> None:
    first, second, third = branches((NEG, EXP, SIN), (NEG, EXP, COS, NEG), (NEG, SIN))
    assert [functions(tape) for tape in (first, second, third)] == [(NEG, EXP, SIN), (NEG, EXP, COS, NEG), (NEG, SIN)]
    assert second.entries[:2] == first.entries[:2]
    assert third.entries[:1] == first.entries[:1]
    assert (first.output, second.output, third.output) == ((3,), (4,), (2,))
    (again,) = branches((NEG, EXP, SIN))
    assert again.entries[0] is not first.entries[0]


# --- another tape


def test_call_of_another_branch_leads_to_its_tape() -> None:
    tapes = branches((NEG, EXP, SIN), (NEG, EXP, COS, NEG), (NEG, SIN))
    tracer = begun(x := tensor(), candidates=tapes)
    first = follow(tracer, NEG, x)
    second = follow(tracer, EXP, first)
    assert tracer.tape is tapes[0]
    assert tracer.elsewhere(COS, (second,), {}) is tapes[1].entries[2]
    assert (tracer.tape, tracer.known, tracer.at) == (tapes[1], True, 2)
    assert tracer.comparison.tape is tapes[1]
    assert tracer._candidates == [tapes[2]]
    out = follow(tracer, NEG, follow(tracer, COS, second))
    assert tracer.slot_of(out) == 4
    assert tracer.finished([out]) is tapes[1]


def test_tape_with_another_beginning_is_passed_over() -> None:
    tapes = branches((NEG, EXP, SIN), (NEG, SIN), (COS, EXP, NEG))
    (other,) = branches((NEG, EXP, COS))  # the same calls, but of another recording
    tracer = begun(x := tensor(), candidates=[*tapes, other])
    second = follow(tracer, EXP, follow(tracer, NEG, x))
    assert tracer.elsewhere(COS, (second,), {}) is None
    assert (tracer.known, tracer._candidates) == (False, [])
    third = begun(x, candidates=tapes)
    first = follow(third, NEG, x)
    assert third.elsewhere(SIN, (first,), {}) is tapes[1].entries[1]
    assert third.tape is tapes[1]


def test_new_call_begins_a_new_tape_behind_the_common_part() -> None:
    model = nn.Linear(3, 3)

    def program(tracer: Tracer, x: Tensor) -> None:
        call(tracer, F.linear, call(tracer, torch.neg, x), model.weight)

    tracer = begun(x := tensor(), model=model)
    program(tracer, x)
    tape = tracer.finished([])
    assert tape.nodes.keys() == {0, 1, 2, 3}
    count = len(tape.facts)
    tracer = begun(x, model=model, candidates=[tape])
    first = follow(tracer, torch.neg, x)
    assert tracer.elsewhere(torch.exp, (first,), {}) is None
    new = tracer.tape
    assert new is not tape
    assert (tracer.known, new.whole) == (False, True)
    assert new.entries == tape.entries[:1]
    assert (set(new.outside), set(new.nodes), new.descends) == ({0}, {0, 1}, {0, 1})
    out = call(tracer, torch.exp, first)
    assert tracer.slot_of(out) == 2
    assert names(last(tracer)) == ["exp"]
    assert last(tracer).steps[0].given == {"self": tape.nodes[1]}
    assert new.facts is tracer._noting._recorder.nodes.facts
    assert new.origins is tracer._noting._recorder.nodes.outside
    assert tracer.place_of(model.weight) == 3
    assert new.origins[new.nodes[3]] == ("parameter", "proj")
    assert len(tape.facts) == count
    assert len(tape.entries) == 2


def test_tensors_that_are_gone_keep_their_slots_in_a_new_tape() -> None:
    (tape,) = branches((NEG, EXP, SIN))
    tracer = begun(x := tensor(), candidates=[tape])
    second = follow(tracer, EXP, follow(tracer, NEG, x))
    assert tracer.elsewhere(NEG, (second,), {}) is None
    assert tracer.tape.nodes.keys() == {0, 1, 2}
    assert tracer.slot_of(call(tracer, NEG, second)) == 3


@pytest.mark.parametrize("attends", [False, True])
def test_call_that_has_run_may_be_one_of_another_tape(attends: bool) -> None:
    """Only a call that is no attention can be taken from another tape once it has run."""
    first = begun(x := tensor(2, 2))
    call(first, torch.exp, call(first, torch.neg, x))
    one = first.finished([])
    second = begun(x, candidates=[one])
    made = follow(second, torch.neg, x)
    assert second.elsewhere(torch.matmul, (made, made), {}) is None
    if attends:
        attend(second, made, made)
    else:
        call(second, torch.matmul, made, made)
    other = second.finished([])
    tracer = begun(x, candidates=[one, other])
    made = follow(tracer, torch.neg, x)
    out = tracer.run(torch.matmul, (made, made), {})
    entry = tracer.met(torch.matmul, (made, made), {}, out)
    assert (entry is None, tracer.tape is other, tracer.known) == (not attends, not attends, not attends)
    assert (tracer.at, tracer.slot_of(out)) == (2, 2)
    if entry is not None:
        assert entry.attention is None
        assert names(entry) == ["mm"]


def test_result_that_differs_from_all_tapes_is_recorded() -> None:
    tapes = branches((NEG, EXP), (NEG, SIN))
    tapes[1].entries[1].shapes = (torch.Size((9,)),)
    tracer = begun(x := tensor(), candidates=tapes)
    first = follow(tracer, NEG, x)
    out = tracer.run(SIN, (first,), {})
    entry = tracer.met(SIN, (first,), {}, out)
    assert entry is last(tracer)
    assert entry.shapes == (SHAPE,)
    assert (tracer.known, tracer.at, len(tracer.tape.entries)) == (False, 2, 2)


# --- tapes that no other forward pass may rely on


def test_known_tape_is_left_if_code_cannot_be_trusted() -> None:
    tapes = branches((NEG, EXP), (NEG, SIN))
    tracer = begun(x := tensor(), candidates=tapes)
    first = follow(tracer, NEG, x)
    tracer.distrust()
    assert (tracer.known, tracer._candidates, tracer.tape.whole) == (False, [], False)
    assert tracer.tape.entries == tapes[0].entries[:1]
    tape = tracer.tape
    call(tracer, SIN, first)
    tracer.distrust()
    assert tracer.finished([]) is tape
    assert functions(tape) == (NEG, SIN)
    assert [one.whole for one in tapes] == [True, True]


@pytest.mark.parametrize("where", ["argument", "keyword", "result"])
def test_call_inside_a_transform_leaves_the_known_tape(where: str) -> None:
    tapes = branches((NEG, EXP), (NEG, SIN))
    tracer = begun(x := tensor(), candidates=tapes)
    first = follow(tracer, NEG, x)

    def inside(one: Tensor) -> Tensor:
        args, kwargs, out = {
            "argument": ((one,), {}, None),
            "keyword": ((first,), {"other": one}, None),
            "result": ((), {}, one),
        }[where]
        assert tracer.met(torch.add, args, kwargs, out) is None
        return one

    torch.vmap(inside)(x)
    assert (tracer.known, tracer.at, tracer.tape.whole, tracer._candidates) == (False, 1, False, [])


# --- the end of a forward pass


def test_forward_pass_ends_with_the_known_tape_only_if_its_output_agrees() -> None:
    tapes = branches((NEG, EXP))
    for output, known in ((2, True), (1, False), (0, False), (None, False)):
        tracer = begun(x := tensor(), candidates=tapes)
        made = [x, first := follow(tracer, NEG, x), follow(tracer, EXP, first)]
        ended = tracer.finished([] if output is None else [made[output]])
        assert (ended is tapes[0], tracer.known) == (known, known)
        assert ended.output == (() if output is None else (output,))
        assert ended.entries == tapes[0].entries
    assert tapes[0].output == (2,)


def test_forward_pass_that_ends_early_has_a_tape_of_its_own() -> None:
    tapes = branches((NEG, EXP, SIN), (NEG, EXP))
    tracer = begun(x := tensor(), candidates=tapes)
    out = follow(tracer, EXP, follow(tracer, NEG, x))
    assert tracer.finished([out]) is tapes[1]
    tracer = begun(x, candidates=tapes)
    out = follow(tracer, NEG, x)
    ended = tracer.finished([out])
    assert ended not in tapes
    assert (ended.entries, ended.output, ended.whole) == (tapes[0].entries[:1], (1,), True)


def test_outputs_without_slots_are_unknown_or_of_the_model() -> None:
    model = nn.Linear(3, 3)
    tracer = begun(x := tensor(), model=model)
    first = call(tracer, NEG, x)
    written = call(tracer, EXP, x)
    call(tracer, F.linear, x, model.weight)
    written.add_(1)
    tape = tracer.finished([first, tensor(), model.bias, model.weight, x, written])
    assert tape.output == (1, -1, -2, 3, 0, -1)
    assert tape.dynamic is False


def test_tensors_from_outside_are_told_until_all_is_released() -> None:
    model, other = nn.Linear(3, 3), tensor()
    x, gone = tensor(), tensor(4)
    tapes: list[Tape] = []
    for _ in range(2):
        tracer = begun(x, [("given", other)], model, tapes)
        func, args = F.linear, (x, model.weight)
        if tracer.known:
            follow(tracer, func, *args)
        else:
            call(tracer, func, *args)
        tapes.append(tracer.finished([]))
        assert {slot: ref() for slot, ref in tracer.used.items()}.keys() == {0, 1, 2}
        assert [tracer.used[slot]() is one for slot, one in enumerate((x, other, model.weight))] == [True] * 3
        assert tracer.slot_of(x) is None
        tracer.release()
        assert tracer.used == {}
    assert tapes[1] is tapes[0]
    new = begun(None, [("given", gone)])
    new.finished([])
    del gone
    assert new.used[0]() is None


def test_tape_tells_whether_shapes_depend_on_values() -> None:
    plain, dynamic = branches((NEG, EXP), (NEG, torch.nonzero))
    assert (plain.dynamic, dynamic.dynamic) == (False, True)
    tracer = begun(x := tensor(), candidates=[dynamic])
    assert tracer.finished([follow(tracer, torch.nonzero, follow(tracer, NEG, x))]) is dynamic
    assert dynamic.dynamic is True


# --- lengths that the model reads


def test_lengths_read_on_a_known_tape_are_noted_when_it_is_left() -> None:
    (tape,) = branches((NEG, torch.nonzero, NEG))
    tracer = begun(x := tensor(), candidates=[tape])
    first = follow(tracer, NEG, x)
    found = follow(tracer, torch.nonzero, first)
    for read in (first, found, tensor(), None, 3):
        tracer.read_length(read)
    call(tracer, EXP, found)
    assert not tracer.known
    assert names(last(tracer)) == ["length", "exp"]
    assert last(tracer).steps[0].given == {"length": tape.nodes[2]}
    tracer.read_length(found)
    tracer.read_length(x)
    tracer.read_length(None)
    call(tracer, SIN, found)
    assert names(last(tracer)) == ["length", "sin"]


def test_lengths_that_depend_on_no_values_are_not_noted() -> None:
    (tape,) = branches((NEG, EXP))
    tracer = begun(x := tensor(), candidates=[tape])
    follow(tracer, NEG, x)
    tracer.read_length(x)
    assert tracer._noting._lengths == set()
    call(tracer, SIN, x)
    tracer.read_length(x)
    call(tracer, SIN, x)
    assert names(last(tracer)) == ["sin"]
