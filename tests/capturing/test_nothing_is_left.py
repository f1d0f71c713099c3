"""Models after a capture: nothing of it may be left."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import visattn
from tests import tiny
from tests.capturing.written_out import run
from visattn import data
from visattn.core.pipeline.passes import look
from visattn.errors import CaptureError, ModelError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def traces(model: nn.Module) -> dict[str, Any]:
    """Return all state that a capture could have changed."""
    return {
        "hooks": {name: [len(getattr(module, hook)) for hook in _HOOKS] for name, module in model.named_modules()},
        "training": {name: module.training for name, module in model.named_modules()},
        "fused": {name: getattr(module, "fused_attn", None) for name, module in model.named_modules()},
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "forwards": {name: "forward" in vars(module) for name, module in model.named_modules()},
        "requires_grad": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "grad": {name: None if p.grad is None else p.grad.tolist() for name, p in model.named_parameters()},
        "state": {name: tensor.tolist() for name, tensor in model.state_dict().items()},
        "kernel": F.scaled_dot_product_attention,
    }


def marked() -> nn.Module:
    """Build a model with mixed training modes, a frozen parameter, gradients and its own hook."""
    model = tiny.vit()
    model(tiny.pixels()).sum().backward()
    model.get_submodule("blocks.1").train()
    model.get_parameter("head.weight").requires_grad_(False)
    model.get_submodule("norm").register_forward_hook(lambda *_: None)
    return model


class Broken(Exception):
    """Error that tests raise on purpose."""


def leave_normally(model: nn.Module) -> None:
    with visattn.capture(model, values=True, features="all"):
        model(tiny.pixels())


def leave_by_the_body(model: nn.Module) -> None:
    with visattn.capture(model):
        model(tiny.pixels())
        raise Broken


def leave_by_the_forward(model: nn.Module) -> None:
    def fail(*_: object) -> None:
        raise Broken

    handle = model.get_submodule("blocks.1.mlp").register_forward_hook(fail)
    try:
        with visattn.capture(model):
            model(tiny.pixels())
    finally:
        handle.remove()


def leave_without_a_forward(model: nn.Module) -> None:
    with visattn.capture(model):
        pass


def leave_by_a_wrong_input(model: nn.Module) -> None:
    with visattn.capture(model):
        model(torch.zeros(1, 3, 5, 5))


EXITS: dict[str, tuple[Callable[[nn.Module], None], type[BaseException] | None]] = {
    "normal": (leave_normally, None),
    "the body raises": (leave_by_the_body, Broken),
    "the forward raises": (leave_by_the_forward, Broken),
    "the input does not fit": (leave_by_a_wrong_input, AssertionError),
    "the model was not run": (leave_without_a_forward, CaptureError),
}


@pytest.mark.parametrize("way", list(EXITS))
@pytest.mark.parametrize("what", list(traces(nn.Identity())))
def test_capture_leaves_the_model_as_it_was(way: str, what: str) -> None:
    act, error = EXITS[way]
    model = marked()
    before = traces(model)[what]
    with nullcontext() if error is None else pytest.raises(error):
        act(model)
    assert traces(model)[what] == before


@pytest.mark.parametrize("way", ["the body raises", "the forward raises"])
def test_model_records_again_after_an_error(way: str) -> None:
    act, error = EXITS[way]
    model = tiny.vit()
    assert error is not None
    with pytest.raises(error):
        act(model)
    assert len(run(model, tiny.pixels())[1]) == 2


def test_look_restores_training_flags() -> None:
    model = marked()
    before = traces(model)["training"]
    look(model, visattn.prepare(visattn.load_image(data.photo_path("coffee")), model))
    assert traces(model)["training"] == before


def test_explain_restores_training_flags_and_runs_in_evaluation_mode() -> None:
    model = tiny.vit(pos_drop_rate=0.9).train()
    first, second = (visattn.explain(model, data.photo_path("coffee")).map.values for _ in range(2))
    assert all(module.training for module in model.modules())
    assert torch.equal(first, second)


def test_explain_restores_training_flags_when_the_forward_fails() -> None:
    model = tiny.vit().train()

    def fail(*_: object) -> None:
        raise Broken

    model.get_submodule("blocks.1").register_forward_hook(fail)
    with pytest.raises(ModelError, match=r"blocks\.1 fails for pixels .*: Broken: ") as caught:
        visattn.explain(model, data.photo_path("coffee"))
    assert isinstance(caught.value.__cause__, Broken)
    assert all(module.training for module in model.modules())
