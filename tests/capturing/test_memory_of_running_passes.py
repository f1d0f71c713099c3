"""Memory that other code shares with a running forward pass: from which call on it is watched, and which writes are noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.capturing.test_recorded_tapes import SHAPE, begun, call, last, tensor
from tests.capturing.test_tapes_that_are_known import follow, names
from visattn.core.capturing.trace.call_tensors import memory_of
from visattn.core.capturing.trace.tracer import Tracer


class Sharing(nn.Module):
    """Model with a mask in memory of NumPy, and a weight that nobody shares."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.array = nn.Parameter(tensor()), np.zeros(SHAPE, np.float32)
        self.register_buffer("mask", torch.from_numpy(self.array))


def exposed(tracer: Tracer, *tensors: Tensor) -> list[bool]:
    return [memory_of(one) in tracer._living.exposed for one in tensors]


def sharing(*, known: bool) -> tuple[Tracer, Tensor, Any]:
    """Begin a forward pass in which one call of the image, the weight and the mask has been made; return its result and the model."""
    model: Any = Sharing()
    tracer = begun(x := tensor(), model=model)
    made = call(tracer, torch.addcmul, x, model.weight, model.mask)
    if known:
        tracer = begun(x, model=model, candidates=[tracer.finished([made])])
        made = follow(tracer, torch.addcmul, x, model.weight, model.mask)
    assert [tracer.slot_of(one) for one in (x, model.weight, model.mask, made)] == [0, 1, 2, 3]
    return tracer, made, model


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("ask", "watched"),
    [
        (lambda made, _: (Tensor.tolist, made), True),
        (lambda made, _: (Tensor.numpy, made.detach()), True),
        (lambda made, _: (Tensor.item, made[0, 0]), True),
        (lambda made, _: (Tensor.tolist, made > 0), False),
        (lambda _, model: (Tensor.tolist, model.weight), False),
        (lambda _, model: (Tensor.tolist, model.mask), False),
        (lambda made, _: (torch.sum, made), False),
        (lambda made, model: (Tensor.add_, model.mask, made), True),
        (lambda made, model: (Tensor.add_, made, model.mask), False),
    ],
)
def test_shared_memory_is_watched_once_numbers_of_the_image_leave(ask: Callable[..., Any], watched: bool, known: bool) -> None:
    tracer, made, model = sharing(known=known)
    func, *args = ask(made, model)
    assert exposed(tracer, model.mask) == [False]
    tracer.run(func, tuple(args), {})
    assert exposed(tracer, model.mask, model.weight) == [watched, False]


@pytest.mark.parametrize(("name", "watched"), [("mask", True), ("weight", False)])
def test_result_in_memory_of_other_code_makes_shared_memory_watched(name: str, watched: bool) -> None:
    tracer, made, model = sharing(known=False)
    with torch.no_grad():
        tracer.run(torch.exp, (made,), {"out": getattr(model, name)})
    assert exposed(tracer, model.mask, model.weight) == [watched, False]


def test_tensors_of_the_forward_pass_are_watched_as_those_of_the_model() -> None:
    given, own = torch.from_numpy(np.zeros(SHAPE, np.float32)), tensor()
    tracer = begun(x := tensor(), [("given", given), ("own", own)])
    made = call(tracer, torch.neg, x)
    tracer.run(Tensor.tolist, (made,), {})
    assert exposed(tracer, given, own) == [True, False]
    other = torch.from_numpy(np.zeros(SHAPE, np.float32))
    tracer.place_of(other)
    tracer.run(Tensor.tolist, (made,), {})
    assert exposed(tracer, other) == [False]  # numbers had already left when it came


def test_write_of_other_code_is_noticed_before_the_next_call() -> None:
    tracer, made, model = sharing(known=True)
    tracer.run(Tensor.tolist, (made,), {})
    assert tracer.slot_of(model.mask) == 2
    model.array[1, 2] = 5
    tracer.run(torch.add, (made,), {"other": model.mask})
    assert memory_of(model.mask) in tracer._living.exposed.changed
    assert tracer._living.slot(model.mask) is None


def test_array_of_another_type_may_still_be_memory_of_the_tensor() -> None:
    tracer, made, _ = sharing(known=False)
    made = made.detach()
    call(tracer, Tensor.__array__, made, np.float32)
    assert exposed(tracer, made) == [True]
    assert [next(iter(step.given)) for step in tracer._noting.taken()][-1] == "read"


def test_write_into_memory_that_other_code_has_may_be_read_there() -> None:
    tracer = begun(x := tensor())
    made, free = call(tracer, torch.neg, x), call(tracer, torch.exp, x)
    call(tracer, Tensor.numpy, made)
    for target in (free, made, free):
        call(tracer, Tensor.add_, target, 1)
    call(tracer, torch.neg, x)
    assert [names(entry) for entry in tracer.tape.entries[2:]] == [
        ["detach", "read", "add_"],
        ["add_"],
        ["read", "add_"],
        ["neg"],
    ]
    assert tracer.slot_of(made) is not None


def test_function_of_other_code_may_have_the_name_of_one_that_tells() -> None:
    def tolist(values: list[Tensor]) -> Tensor:
        return values[0] + 1

    tracer = begun(x := tensor())
    assert call(tracer, tolist, [x]).tolist() == [[2.0] * 3] * 2
    assert names(last(tracer)) == ["add"]
