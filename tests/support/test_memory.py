# mypy: disable-error-code="no-untyped-call"
"""Memory of what was found out about models: it is forgotten once what it depends on has changed."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import visattn
from visattn._support.memory import OfStructure, OfWeights
from visattn._support.sampled_weights import sampled_weights
from visattn.core.families.feature_maps import last_feature_map
from visattn.core.families.sizes import first_size
from visattn.errors import OptionError

PHOTO = "photo:chelsea"


class Network(nn.Module):
    """CNN with settings of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1), nn.Linear(4, 3)
        self.plain, self.steps, self.named = 1, [1, 2], {"a": 1}
        self.function: Callable[..., Tensor] = torch.relu
        self.config = types.SimpleNamespace(deep=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(self.function(self.second(x) if self.config.deep else x).mean((2, 3)))  # type: ignore[no-any-return]


def shallow(self: Network, x: Tensor) -> Tensor:
    return self.head(self.first(x).mean((2, 3)))  # type: ignore[no-any-return]


def attribute(name: str, value: object) -> Callable[[Network], Any]:
    return lambda model: setattr(model, name, value)


CHANGES: dict[str, Callable[[Network], Any]] = {
    "a number": attribute("plain", 2),
    "a function": attribute("function", torch.sigmoid),
    "a list": lambda model: model.steps.append(3),
    "a dictionary": lambda model: model.named.update(a=2),
    "an object": lambda model: setattr(model.config, "deep", False),
    "the forward of one module": lambda model: setattr(model, "forward", types.MethodType(shallow, model)),
    "another class": attribute("__class__", type("Other", (Network,), {})),
    "a hook": lambda model: model.second.register_forward_hook(lambda _module, _args, output: output + 1),
    "a module that contains another": lambda model: setattr(model.first, "owner", model),
    "a shape": attribute("head", nn.Linear(4, 5)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_structure_is_asked_again(what: str) -> None:
    model, answers = Network(), iter(range(9))
    memory: OfStructure[int | None] = OfStructure()
    assert [memory.of(model, "it", lambda: next(answers)) for _ in range(2)] == [0, 0]
    CHANGES[what](model)
    assert [memory.of(model, "it", lambda: next(answers)) for _ in range(2)] == [1, 1]


def test_a_function_in_the_place_of_another_is_not_the_same() -> None:
    model, answers = Network(), iter(range(99))
    memory: OfStructure[int | None] = OfStructure()
    for turn in range(20):
        model.forward = lambda x, turn=turn: x + turn  # type: ignore[method-assign, misc]
        assert memory.of(model, "it", lambda: next(answers)) == turn  # the one before is gone, and its address is free


def test_the_type_of_new_tensors_is_part_of_the_question() -> None:
    model, answers = Network(), iter(range(9))
    memory: OfStructure[int | None] = OfStructure()
    assert memory.of(model, "it", lambda: next(answers)) == 0
    torch.set_default_dtype(torch.float64)
    try:
        assert memory.of(model, "it", lambda: next(answers)) == 1
    finally:
        torch.set_default_dtype(torch.float32)
    assert memory.of(model, "it", lambda: next(answers)) == 0


def test_no_answer_is_not_kept() -> None:
    model, answers = Network(), iter([None, 1, 2])
    memory: OfStructure[int | None] = OfStructure()
    assert [memory.of(model, "it", lambda: next(answers)) for _ in range(3)] == [None, 1, 1]


@pytest.mark.parametrize("how", ["in place", "through .data", "through NumPy"])
def test_written_weights_are_asked_again(how: str) -> None:
    model, answers = Network(), iter(range(9))
    memory: OfWeights[int] = OfWeights()
    assert [memory.of(model, "it", lambda: next(answers)) for _ in range(2)] == [0, 0]
    weight = model.head.weight
    with torch.no_grad():
        if how == "in place":
            weight.mul_(2)
        elif how == "through .data":
            weight.data.mul_(2)
        else:
            weight.detach().numpy()[:] = 7
    assert memory.of(model, "it", lambda: next(answers)) == 1


def test_the_sample_does_not_depend_on_the_order_in_memory() -> None:
    model = timm.create_model("resnet18", num_classes=5)
    before = sampled_weights(model)
    assert len(before["fc.weight"]) == 64
    assert sampled_weights(model.to(memory_format=torch.channels_last)) == before


# --- what users see of it


def test_the_layer_of_grad_cam_follows_the_forward_pass() -> None:
    model = Network().eval()
    assert last_feature_map(model, 3, (32, 32)) == "second"
    model.config.deep = False
    assert last_feature_map(model, 3, (32, 32)) == "first"


def test_a_failed_dry_run_does_not_decide_the_next() -> None:
    model = Network().eval()
    model.first.owner = model
    with pytest.raises(OptionError, match="the layer for Grad-CAM is unknown"):
        visattn.explain(model, PHOTO, method="gradcam", img_size=32)
    with visattn.capture(model, features=["second"], gradients=True):
        model(torch.rand(1, 3, 32, 32))
    del model.first.owner
    provenance = visattn.explain(model, PHOTO, method="gradcam", img_size=32).map.provenance
    assert provenance.parameters["layer"] == "second"


def test_too_little_memory_does_not_decide_the_size() -> None:
    class Short(Network):
        lacks = True

        def forward(self, x: Tensor) -> Tensor:
            if self.lacks:
                raise MemoryError
            assert x.shape[-1] == 64
            return super().forward(x)

    model = Short().eval()
    assert first_size(model, 3) == (224, 224)
    Short.lacks = False  # unseen: an attribute of the class
    assert first_size(model, 3) == (64, 64)


@pytest.mark.parametrize("how", ["in place", "through .data"])
def test_names_of_classes_are_lost_with_the_weights_of_the_head(how: str) -> None:
    model = visattn.load_model("scenes_cnn")

    def score() -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # weights that have changed warn of their preprocessing
            return visattn.explain(model, PHOTO, method="gradcam").map.provenance.scores[0]

    assert score()["name"]
    head = list(model.parameters())[-2]
    with torch.no_grad():
        (head if how == "in place" else head.data).neg_()
    assert score()["name"] is None
