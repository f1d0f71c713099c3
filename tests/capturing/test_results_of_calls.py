"""Results of calls that match an entry of a known tape: shapes, tensors that existed before, overwritten ones, and index tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.capturing.test_comparison_of_calls import Scene, entry, scene
from visattn.core.capturing.trace.tape import Entry, Made, Ref

SHAPE = torch.Size((2, 3))


def agrees(at: Scene, known: Entry, args: Sequence[Any], out: Any, **kwargs: Any) -> bool:
    """Check a result; if it does not agree, no slot is left behind."""
    count = len(at.living.refs)
    answer = at.comparison.is_result(known, args, kwargs, out)
    assert answer or len(at.living.refs) == count
    return answer


def single(before: int | None = None) -> Entry:
    known = entry(Ref(0), 1, outs=(Made(2, SHAPE, True),))
    known.shapes, known.before = (SHAPE,), (before,)
    return known


def test_single_new_result_gets_the_next_slot() -> None:
    at, out = scene(), torch.zeros(SHAPE)
    assert agrees(at, single(), (at.x, 1), out)
    assert at.living.slot(out) == 2
    assert not agrees(at, single(), (at.x, 1), torch.zeros(3, 2))
    assert not agrees(at, single(), (at.x, 1), torch.nn.Parameter(torch.zeros(SHAPE)))
    assert not agrees(at, single(), (at.x, 1), (out,))


def test_single_result_is_an_argument_if_it_was_one() -> None:
    at = scene()
    assert agrees(at, single(0), (at.x, 1), at.x)
    assert not agrees(at, single(0), (at.x, 1), at.y)
    assert not agrees(at, single(0), (at.x, 1), torch.zeros(SHAPE))
    assert not agrees(at, single(), (at.x, 1), at.x)
    assert not agrees(at, single(), (1, at.y), at.y)
    assert not agrees(at, single(), (at.x,), at.y, other=at.y)
    assert agrees(at, single(), (at.x,), torch.zeros(SHAPE), other=at.y)


def several(*outs: Made | None, before: tuple[int | None, ...] | None = None, func: Callable[..., Any] = torch.sort) -> Entry:
    known = entry(Ref(0), outs=outs, func=func)
    known.before = (None,) * len(outs) if before is None else before
    return known


def test_results_have_number_kinds_and_shapes_of_the_tape() -> None:
    at = scene()
    made = Made(2, SHAPE, True)
    first, second = torch.zeros(SHAPE), torch.zeros(SHAPE)
    assert not agrees(at, several(made, made), (at.x,), (first,))
    assert not agrees(at, several(made), (at.x,), (first, second))
    assert not agrees(at, several(made, None), (at.x,), (first, second))
    assert not agrees(at, several(made, made), (at.x,), (first, 7))
    assert not agrees(at, several(made, made), (at.x,), (first, torch.zeros(3, 2)))
    assert not agrees(at, several(made, made), (at.x,), (first, at.y))
    assert not agrees(at, several(made, made, before=(None, 0)), (at.x,), (first, at.y))
    assert agrees(at, several(made, None), (at.x,), (first, 7))
    assert at.living.slot(first) == 2
    assert agrees(at, several(made, made, before=(None, 1)), (at.x,), (second, at.y))
    assert (at.living.slot(second), at.living.slot(at.y)) == (3, 4)


def test_views_of_an_overwritten_tensor_get_new_slots() -> None:
    at = scene(outside={})
    view = at.x[0]
    slot = at.living.enlist(view)
    known = several(Made(4, SHAPE, True), before=(0,), func=Tensor.add_)
    assert not agrees(at, known, (at.x,), at.x)
    known.rewritten = ((1, 3),)
    assert not agrees(at, known, (at.x,), at.x)
    known.rewritten = ((slot, 3),)
    assert agrees(at, known, (at.x,), at.x)
    assert (at.living.slot(view), at.living.slot(at.x)) == (3, 4)


def test_written_argument_is_the_result_of_a_call_that_returns_none() -> None:
    at = scene()
    known = several(Made(2, SHAPE, True), before=(0,), func=Tensor.__setitem__)
    assert agrees(at, known, (at.x, 0, 1.0), None)
    assert at.living.slot(at.x) == 2


def picking(index: Tensor, choice: int | None = None) -> Entry:
    known = several(Made(3, SHAPE, True), func=Tensor.gather)
    known.contents, known.choice = {2: index}, choice
    return known


def test_index_tensors_have_the_values_of_the_tape() -> None:
    at = scene()
    index = torch.tensor([[[1, 1], [4, 4]]])
    at.living.enlist(index)
    out = torch.zeros(SHAPE)
    assert not agrees(at, picking(index + 1), (at.x, 1, index), out)
    assert not agrees(at, picking(index.int()), (at.x, 1, index), out)
    assert not agrees(at, picking(index.clone()), (at.x, 1, at.y), out)
    assert agrees(at, picking(index.clone()), (at.x, 1, index), out)
    assert agrees(at, picking(index.clone()), (at.x, 1), torch.zeros(SHAPE), index=index)


def test_tokens_of_a_choice_may_be_others_if_all_its_calls_agree() -> None:
    at = scene()
    index, other = torch.tensor([[[1, 1], [4, 4]]]), torch.tensor([[[2, 2], [3, 3]]])
    at.living.enlist(index)
    at.living.enlist(other)
    assert agrees(at, picking(index + 5, choice=0), (at.x, 1, index), torch.zeros(SHAPE))
    known = picking(index, choice=0)
    known.contents = {3: index}
    assert not agrees(at, known, (at.x, 1, other), torch.zeros(SHAPE))
    assert agrees(at, picking(index + 7, choice=0), (at.x, 1, index), torch.zeros(SHAPE))
    renewed = picking(index + 7, choice=0)
    at.comparison.renew([renewed])
    assert torch.equal(renewed.contents[2], index)
