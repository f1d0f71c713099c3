"""Forward passes with a known tape: which calls are its entries, which results agree, what is asked, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capturing.test_recorded_tapes import attend, begun, call, last, tensor
from visattn.core.capturing.trace.call_tensors import SWITCH
from visattn.core.capturing.trace.tape import TAPES, Entry, Outside, Tape, Tapes, forget
from visattn.core.capturing.trace.tracer import Tracer

Program = Callable[[Tracer, Tensor], Any]  # makes the calls of a forward pass of an image


def recorded(*programs: Program, model: nn.Module | None = None, x: Tensor | None = None) -> list[Tape]:
    """Return a tape of each program. The model has no output."""
    tapes = []
    for program in programs:
        image = tensor() if x is None else x
        tracer = begun(image, model=model)
        program(tracer, image)
        tapes.append(tracer.finished([]))
    return tapes


def twice(tracer: Tracer, x: Tensor) -> Tensor:
    first = call(tracer, torch.neg, x)
    out: Tensor = call(tracer, torch.add, first, x, alpha=2)
    return out


def follow(tracer: Tracer, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make the call that comes next on the known tape."""
    entry = tracer.expected(func, args, kwargs)
    assert entry is not None
    out = func(*args, **kwargs)
    tracer.confirm(entry, args, kwargs, out)
    return out


def names(entry: Entry) -> list[str]:
    """Return the operations of an entry; the name of what was noted for a step that is none."""
    return [next(iter(step.given)) if step.op is None else str(step.op).split(".")[1] for step in entry.steps]


# --- the tape that a forward pass begins with


def test_forward_pass_begins_with_the_first_tape_of_the_same_inputs() -> None:
    x, model = tensor(), nn.Linear(3, 3)
    wide, first, second = Tape(), *recorded(twice, twice)
    wide.outside = {0: Outside("pixels", "", torch.Size((2, 4)), True)}
    tracer = begun(x, model=model, candidates=(tape for tape in (wide, first, second)))
    assert tracer.tape is first
    assert (tracer.known, tracer.at, tracer.slot_of(x)) == (True, 0, 0)
    assert tracer._candidates == [second]
    assert tracer.comparison.tape is first
    without = begun(x, model=model, candidates=[wide])
    assert (without.known, without.tape is wide, without._candidates) == (False, False, [])


def test_known_tape_is_not_changed_by_a_forward_pass_that_agrees() -> None:
    model = nn.Linear(3, 3)

    (tape,) = recorded(lambda tracer, x: call(tracer, F.linear, call(tracer, torch.neg, x), model.weight), model=model)
    before = len(tape.facts), dict(tape.outside), dict(tape.nodes), set(tape.descends), dict(tape.origins)
    tracer = begun(x := tensor(), model=model, candidates=[tape])
    out = follow(tracer, F.linear, follow(tracer, torch.neg, x), model.weight)
    assert tracer.slot_of(out) == 3
    assert tracer.finished([]) is tape
    assert (len(tape.facts), tape.outside, tape.nodes, tape.descends, tape.origins) == before


# --- the next call


def quickly(tracer: Tracer, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Entry | None:
    """Return the upcoming entry if a call is found to be it by the fast comparison."""
    entry = tracer.comparison.upcoming
    return entry if entry is not None and tracer.comparison.is_simple_call(entry, func, args, kwargs) else None


def test_next_entry_is_the_expected_one() -> None:
    (tape,) = recorded(twice)
    x = tensor()
    for ask in (Tracer.expected, quickly):
        tracer = begun(x, candidates=[tape])
        assert ask(tracer, torch.neg, (x,), {}) is tape.entries[0]
        assert ask(tracer, torch.exp, (x,), {}) is None
        first = follow(tracer, torch.neg, x)
        assert (tracer.at, tracer.slot_of(first)) == (1, 1)
        assert ask(tracer, torch.neg, (x,), {}) is None
        assert ask(tracer, torch.add, (first, x), {"alpha": 2}) is tape.entries[1]
        assert ask(tracer, torch.add, (first, first), {"alpha": 2}) is None
        follow(tracer, torch.add, first, x, alpha=2)
        assert (tracer.at, tracer.known) == (2, True)
        assert ask(tracer, torch.neg, (x,), {}) is None
    assert quickly(begun(x, candidates=[tape]), torch.neg, (x,), None) is tape.entries[0]


def test_call_with_a_list_is_only_found_by_the_thorough_comparison() -> None:
    (tape,) = recorded(lambda tracer, x: call(tracer, torch.cat, [x, x]))
    tracer = begun(x := tensor(), candidates=[tape])
    assert quickly(tracer, torch.cat, ([x, x],), {}) is None
    assert tracer.expected(torch.cat, ([x, x],), {}) is tape.entries[0]


# --- results


def test_confirmed_results_have_the_slots_of_the_tape() -> None:
    (tape,) = recorded(lambda tracer, x: call(tracer, torch.max, call(tracer, torch.neg, x), 1))
    tracer = begun(x := tensor(), candidates=[tape])
    values, indices = follow(tracer, torch.max, follow(tracer, torch.neg, x), 1)
    assert (tracer.slot_of(values), tracer.slot_of(indices)) == (2, 3)
    assert tracer.descends(values)
    assert (tracer.known, tracer.at, tracer.tape is tape) == (True, 2, True)


def test_call_whose_result_differs_is_repeated_for_its_operations() -> None:
    """A call that returned its argument on the tape returns a copy, because the image has other strides."""
    (tape,) = recorded(lambda tracer, x: call(tracer, Tensor.contiguous, x), x=tensor(2, 3))
    x = torch.ones(3, 2).mT.requires_grad_()
    tracer = begun(x, candidates=[tape])
    made = follow(tracer, Tensor.contiguous, x)
    assert made is not x
    assert (tracer.known, tracer.at, tracer.slot_of(made)) == (False, 1, 1)
    assert names(last(tracer)) == ["clone"]
    assert last(tracer).before == (None,)
    assert tracer.tape.nodes[1] == last(tracer).steps[0].outs[0]
    call(tracer, torch.neg, made)
    assert last(tracer).steps[0].given == {"self": tracer.tape.nodes[1]}
    assert tape.entries[0].before == (0,)


def test_call_that_draws_random_numbers_is_not_repeated() -> None:
    (tape,) = recorded(lambda tracer, x: call(tracer, torch.bernoulli, x), x=tensor(2, 3))
    tape.entries[0].shapes = (torch.Size((9,)),)
    tracer, state = begun(x := tensor(), candidates=[tape]), torch.get_rng_state()
    made = follow(tracer, torch.bernoulli, x)
    assert (tracer.known, tracer.slot_of(made), last(tracer).steps) == (False, 1, ())
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.bernoulli(x)
    assert torch.equal(torch.get_rng_state(), after)


def test_write_that_reaches_another_view_is_not_repeated() -> None:
    def program(tracer: Tracer, x: Tensor, *, kept: list[Tensor]) -> None:
        made = call(tracer, torch.neg, x)
        kept.append(call(tracer, Tensor.select, made, 0, 1))
        kept.clear()
        call(tracer, Tensor.add_, made, 1)

    (tape,) = recorded(lambda tracer, x: program(tracer, x, kept=[]))
    tracer = begun(x := tensor(), candidates=[tape])
    made = follow(tracer, torch.neg, x)
    view = follow(tracer, Tensor.select, made, 0, 1)
    assert follow(tracer, Tensor.add_, made, 1).tolist() == [[0.0] * 3] * 2
    assert not tracer.known
    assert (last(tracer).rewritten, last(tracer).writes, last(tracer).steps) == (((2, 3),), True, ())
    assert (tracer.slot_of(view), tracer.slot_of(made)) == (3, 4)
    assert tape.entries[2].rewritten == ()


def test_notes_of_a_confirmed_call_are_forgotten() -> None:
    index = torch.tensor([1, 0])
    (tape,) = recorded(lambda tracer, x: call(tracer, Tensor.__getitem__, x, index))
    assert [content.tolist() for content in tape.entries[0].contents.values()] == [[1, 0]]
    tracer = begun(x := tensor(), candidates=[tape])
    entry = tracer.expected(Tensor.__getitem__, (x, index), {})
    assert entry is tape.entries[0]
    out = tracer.run(Tensor.__getitem__, (x, index), {})
    tracer.confirm(entry, (x, index), {}, out)
    assert tracer.known
    call(tracer, torch.neg, out)
    assert (tracer.known, names(last(tracer))) == (False, ["neg"])


def picked(tape: Tape, x: Tensor, index: Tensor, *, known: bool) -> Tracer:
    """Follow a tape by a call that picks elements, whose operations are noted; `known` tells whether it agrees."""
    args = (x, index) if tape.entries[0].func is Tensor.__getitem__ else (x, 0, index)
    tracer = begun(x, candidates=[tape])
    entry = tracer.expected(tape.entries[0].func, args, {})
    assert entry is tape.entries[0]
    tracer.confirm(entry, args, {}, tracer.run(entry.func, args, {}))
    assert (tracer.known, tracer.at) == (known, 1)
    return tracer


def test_other_elements_are_another_call() -> None:
    index = torch.tensor([1, 0])
    (tape,) = recorded(lambda tracer, x: call(tracer, Tensor.__getitem__, x, index))
    picked(tape, tensor(), torch.tensor([1, 0]), known=True)
    tracer = picked(tape, tensor(), torch.tensor([0, 1]), known=False)
    (content,) = last(tracer).contents.values()
    assert (content.tolist(), names(last(tracer))) == ([0, 1], ["index"])
    mask = torch.tensor([True, True])
    (tape,) = recorded(lambda tracer, x: call(tracer, Tensor.__getitem__, x, mask))
    picked(tape, tensor(), mask.clone(), known=True)
    picked(tape, tensor(), torch.tensor([1, 1]), known=False)


def test_tokens_that_are_picked_by_content_may_be_others() -> None:
    best, others = torch.tensor([[1, 1, 1], [0, 0, 0]]), torch.tensor([[0, 0, 0], [1, 1, 1]])
    (tape,) = recorded(lambda tracer, x: call(tracer, torch.gather, x, 0, best))
    picked(tape, tensor(), others, known=False)
    tape.entries[0].choice = 0
    tracer = picked(tape, tensor(), others, known=True)
    assert [content.tolist() for content in tape.entries[0].contents.values()] == [best.tolist()]
    call(tracer, torch.neg, tensor())
    assert tracer.tape.entries[0] is tape.entries[0]
    assert [content.tolist() for content in tape.entries[0].contents.values()] == [others.tolist()]


# --- calls that only ask


def test_call_that_returns_no_tensor_leaves_the_known_tape_where_it_is() -> None:
    def count(x: Tensor) -> int:
        return int(x.numel())

    (tape,) = recorded(twice)
    tracer = begun(x := tensor(), candidates=[tape])
    assert tracer.met(count, (x,), {}, 6) is None
    assert (tracer.known, tracer.at) == (True, 0)
    assert call(tracer, Tensor.tolist, x) == [[1.0] * 3] * 2
    assert tracer.known
    follow(tracer, torch.neg, x)
    assert call(tracer, SWITCH, torch.is_grad_enabled()) is None
    assert (tracer.known, tracer.at, last(tracer).func) == (False, 2, SWITCH)
    new = begun(x)
    assert new.met(count, (x,), {}, 6) is None
    assert new.tape.whole is False  # a function of other code may have done anything


def test_function_that_has_returned_no_tensor_runs_without_notes() -> None:
    def query(x: Tensor) -> None:
        seen.append((x + 1).shape)

    (tape,) = recorded(twice)
    seen: list[torch.Size] = []
    tracer = begun(x := tensor(), candidates=[tape])
    for count in (1, 1):
        call(tracer, query, x)
        assert len(tracer._noting._recorder.steps) == count
    assert len(seen) == 2
    assert tracer.known
    new = begun(x)
    call(new, query, x)
    assert [str(step.op) for step in new._noting.taken()] == ["aten.add.Tensor"]


def test_call_that_hands_memory_to_other_code_ends_the_known_tape() -> None:
    (tape,) = recorded(twice)
    tracer = begun(x := tensor(), candidates=[tape])
    first = follow(tracer, torch.neg, x)
    array = call(tracer, Tensor.numpy, first)
    assert (tracer.known, tracer.at, len(tracer.tape.entries)) == (False, 1, 1)
    array[0, 0] = 5
    assert tracer.slot_of(first) is None
    assert tape.whole


# --- what is kept


def test_results_behind_the_last_attention_of_a_known_tape_are_kept() -> None:
    def program(doubtful: bool, tracer: Tracer, x: Tensor) -> None:
        first = call(tracer, torch.neg, x)
        call(tracer, torch.max, attend(tracer, first, first, doubtful=doubtful), 1)

    for doubtful in (True, False):
        (tape,) = recorded(partial(program, doubtful), x=tensor(2, 2))
        for keep in (False, True):
            tracer = begun(x := tensor(2, 2), candidates=[tape], keep=keep)
            first = follow(tracer, torch.neg, x)
            values, _ = follow(tracer, torch.max, attended := follow(tracer, torch.matmul, first, first), 1)
            assert sorted(tracer.kept) == ([2, 3, 4] if keep else [])
            if keep:
                assert tracer.kept[2] is attended
                assert tracer.kept[3] is values
            assert tracer.finished([]) is tape


def test_item_that_is_set_is_kept() -> None:
    def program(tracer: Tracer, x: Tensor) -> None:
        call(tracer, Tensor.__setitem__, attend(tracer, x, x), 0, 5.0)

    (tape,) = recorded(program, x=tensor(2, 2))
    tracer = begun(x := tensor(2, 2), candidates=[tape], keep=True)
    attended = follow(tracer, torch.matmul, x, x)
    follow(tracer, Tensor.__setitem__, attended, 0, 5.0)
    assert tracer.known
    assert [(slot, kept is attended) for slot, kept in tracer.kept.items()] == [(1, True), (2, True)]


def test_nothing_is_kept_of_a_known_tape_without_attention() -> None:
    def program(tracer: Tracer, x: Tensor) -> None:
        call(tracer, torch.max, call(tracer, torch.neg, x), 1)

    (tape,) = recorded(program, x=tensor(2, 2))
    tracer = begun(x := tensor(2, 2), candidates=[tape], keep=True)
    follow(tracer, torch.max, follow(tracer, torch.neg, x), 1)
    assert tracer.known
    assert tracer.kept == {}


# --- tapes of all models


def test_tapes_of_all_models_can_be_forgotten() -> None:
    model, tape = nn.Identity(), Tape()
    TAPES.keep(model, tape)
    assert TAPES.of(model) == [tape]
    forget()
    assert TAPES.of(model) == []


def test_tapes_go_with_their_model() -> None:
    kept, model = Tapes(), nn.Identity()
    kept.keep(model, Tape())
    found = kept.of(model)
    found.clear()
    assert len(kept.of(model)) == 1
    del model
    assert len(kept._by_model) == 0


@pytest.mark.parametrize("again", [0, 1, 2])
def test_tape_that_is_kept_again_is_the_latest(again: int) -> None:
    kept, model, made = Tapes(), nn.Identity(), [Tape() for _ in range(3)]
    for tape in (*made, made[again]):
        kept.keep(model, tape)
    assert kept.of(model) == [made[again], *(tape for tape in reversed(made) if tape is not made[again])]
