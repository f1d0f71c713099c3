"""Results of calls that match an entry of a known tape: which agree with it, and which slots they get."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capturing.test_comparison_of_calls import Scene, entry, scene
from visattn.core.capturing.trace.tape import Entry, Made, Ref

SHAPE = torch.Size((2, 3))


def agrees(at: Scene, known: Entry, out: Any, *args: Any, **kwargs: Any) -> bool:
    """Compare the result of a call; one that differs gets no slot."""
    count = len(at.living.refs)
    answer = at.comparison.is_result(known, args, kwargs, out)
    assert answer or len(at.living.refs) == count
    return answer


def single(slot_before: int | None) -> Entry:
    """Return an entry of a call of slot 0 that returned one tensor."""
    known = entry(Ref(0), outs=[Made(2, SHAPE, True)])
    known.shapes, known.before = (SHAPE,), (slot_before,)
    return known


def test_new_tensor_agrees_if_it_has_the_shape_of_the_tape() -> None:
    at, known, out = scene(), single(None), torch.zeros(SHAPE)
    for other in (torch.zeros(3, 2), (out,), None, nn.Parameter(out)):
        assert not agrees(at, known, other, at.x)
    assert agrees(at, known, out, at.x)
    assert at.living.slot(out) == 2
    other = torch.zeros(SHAPE)
    assert agrees(at, known, other, input=at.x)
    assert at.living.slot(other) == 3


def test_argument_is_not_returned_in_place_of_a_new_tensor() -> None:
    at, known = scene(), single(None)
    assert not agrees(at, known, at.x, at.x)
    assert not agrees(at, known, at.y, at.x, at.y)
    assert not agrees(at, known, at.y, at.x, other=at.y)
    assert not agrees(at, known, at.x, input=at.x, other=at.y)


def test_argument_that_the_tape_returned_is_returned_again() -> None:
    at, known = scene(), single(1)
    for other in (at.x, torch.zeros(SHAPE)):
        assert not agrees(at, known, other, at.x, at.y)
    assert agrees(at, known, at.y, at.x, at.y)
    assert (at.living.slot(at.x), at.living.slot(at.y)) == (0, 2)


def several(*slots_before: int | None) -> Entry:
    """Return an entry of a call that returned two tensors and a number between them."""
    known = entry(Ref(0), outs=[Made(2, SHAPE, True), None, Made(3, torch.Size((5,)), True)])
    known.before = slots_before
    return known


def test_several_results_agree_each_with_its_own() -> None:
    at, a, b = scene(), torch.zeros(SHAPE), torch.zeros(5)
    known = several(None, None, None)
    for other in ((a, 4), (a, 4, b, b), (a, b, b), (4, 4, b), (a, 4, 4), (b, 4, a), (a, 4, a), (b, 4, b), a, (at.x, 4, b)):
        assert not agrees(at, known, other, at.x)
    assert agrees(at, known, (a, 4, b), at.x)
    assert at.living.slots([a, 4, b]) == (2, None, 3)
    assert agrees(scene(), known, [torch.zeros(SHAPE), 7, torch.zeros(5)])
    empty = entry(Ref(0))
    assert agrees(at, empty, None, at.x)
    assert not agrees(at, empty, torch.zeros(1), at.x)


def test_argument_among_several_results_is_the_same_one() -> None:
    at, b = scene(), torch.zeros(5)
    known = several(1, None, None)
    for other in (at.x, torch.zeros(SHAPE)):
        assert not agrees(at, known, (other, 4, b), at.x, at.y)
    assert agrees(at, known, (at.y, 4, b), at.x, at.y)
    assert at.living.slots([at.x, at.y, b]) == (0, 2, 3)


@pytest.mark.parametrize(
    ("rewritten", "expected"), [(((2, 3),), True), ((), False), (((1, 3),), False), (((2, 3), (1, 4)), False)]
)
def test_write_must_reach_the_same_views(rewritten: tuple[tuple[int, int], ...], expected: bool) -> None:
    at = scene(outside={})
    view = at.x[0]
    assert at.living.enlist(view) == 2
    known = entry(Ref(0), 1, func=Tensor.add_, outs=[Made(4, SHAPE, True)])
    known.before, known.rewritten = (0,), rewritten
    at.x.add_(1)
    assert agrees(at, known, at.x, at.x, 1) is expected
    assert at.living.slots([at.x, view, at.y]) == ((4, 3, 1) if expected else (0, 2, 1))


def test_number_that_equals_nothing_is_known_if_it_is_the_same_object() -> None:
    at, known = scene(), entry(Ref(0), math.nan)
    assert at.comparison.is_simple_call(known, torch.add, (at.x, math.nan), {})
    assert not at.comparison.is_simple_call(known, torch.add, (at.x, float("nan")), {})
