# mypy: disable-error-code="no-untyped-call"
"""`torch.utils.swap_tensors`, and other exchanges of memory: they work during and after a capture, and no status survives them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

import visattn
from tests import tiny
from tests.capturing.moving import Moving, image, judged, see
from visattn.core.capturing.placing import weak


def _tokens(_: nn.Module, t: Tensor) -> Tensor:
    one, other = t * 1.0, t.flip(1) * 1.0
    swap_tensors(one, other)
    return one


def _both(_: nn.Module, t: Tensor) -> Tensor:
    one, other = t * 1.0, t.flip(1) * 1.0
    swap_tensors(one, other)
    return one + other


def _constant(_: nn.Module, t: Tensor) -> Tensor:
    one, other = torch.zeros_like(t), t * 1.0
    swap_tensors(one, other)
    return one


def _back(_: nn.Module, t: Tensor) -> Tensor:
    one, other = t * 1.0, t.flip(1) * 1.0
    swap_tensors(one, other)
    swap_tensors(one, other)
    return one


def _parameter(model: Any, t: Tensor) -> Tensor:
    other = nn.Parameter(model.part.weight.detach() * 2)
    swap_tensors(model.part.weight, other)
    out = model.part(t)
    swap_tensors(model.part.weight, other)
    return out + model.part(t)  # type: ignore[no-any-return]


def _into_a_parameter(model: Any, t: Tensor) -> Tensor:
    rows = nn.Parameter(t[0, :16].detach() * 1.0)
    swap_tensors(model.part.weight, rows)
    try:
        rows_of_tokens: Tensor = model.part.weight.flip(0).repeat(6, 1)[None] * 1.0 + 0 * t
        return rows_of_tokens
    finally:
        swap_tensors(model.part.weight, rows)


EXCHANGES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "tokens": _tokens,
    "tokens that are added": _both,
    "a constant": _constant,
    "tokens and back": _back,
    "a parameter": _parameter,
    "tokens into a parameter": _into_a_parameter,
}


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", EXCHANGES)
def test_tensors_can_be_exchanged_and_are_lost(name: str, context: Any) -> None:
    model = Moving(EXCHANGES[name])
    for seed in (0, 1, 0):
        with context():
            expected = model(image(seed))
            with visattn.capture(model) as recording:
                assert torch.equal(model(image(seed)), expected)
        assert recording[0].reason is not None or name == "a parameter"
    assert judged(model, image(), probes=4) == "right" or name != "a parameter"


def test_a_model_that_begins_to_exchange_tensors_leaves_what_is_known() -> None:
    swaps = [False]
    model = Moving(lambda m, t: _tokens(m, t) if swaps[0] else t * 1.0)
    for swaps[0], lost in ((False, False), (True, True), (True, True), (False, False)):
        assert (see(model, image())[0].reason is not None) == lost


def test_errors_of_an_exchange_are_those_without_a_capture() -> None:
    def failing(_: nn.Module, t: Tensor) -> Tensor:
        one, kept = t * 1.0, []
        kept.append(weakref.ref(one))
        swap_tensors(one, t * 2.0)
        return one

    model = Moving(failing)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Cannot swap t1 because it has weakref associated with it"):
            see(model, image())


def test_a_capture_leaves_no_weak_references_to_parameters() -> None:
    model = tiny.vit()
    see(model, tiny.pixels())
    see(model, tiny.pixels())
    gc.collect()
    assert not any(weakref.getweakrefs(one) for one in (*model.parameters(), *model.buffers()))
    assert torch.utils.weakref is weakref  # type: ignore[attr-defined]
    assert not weak._listening
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
        with visattn.capture(model) as recording, torch.no_grad():
            model(tiny.pixels().double())
            model.float()
            model(tiny.pixels())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert [record.reason for record in recording] == [None] * len(recording)


def test_memory_that_was_exchanged_by_its_data_does_not_break_later_writes() -> None:
    def body(_: nn.Module, t: Tensor) -> Tensor:
        one = (t * 1.0).contiguous()
        view = one.view(-1)
        one.data = (t.flip(1) * 1.0).contiguous()
        view.mul_(2.0)
        return one

    assert not judged(Moving(body), image(), probes=4).startswith("wrong")
