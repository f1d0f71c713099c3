"""Modules of a model: listed as PyTorch does, compared with those of the last time, and never kept alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from visattn._support.memory import OfStructure
from visattn._support.parts import Parts, parts_of


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(2, 2)
        self.stem = nn.Sequential(nn.ReLU(), self.shared)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.GELU()) for _ in range(2)])
        self.register_module("nothing", None)
        self.width, self.one, self.sizes, self.act = 3, 1, [1, 2], torch.relu
        self.parent = [self]  # models may refer to themselves


def test_modules_are_listed_as_by_torch() -> None:
    model = Model()
    for _ in range(2):
        parts = parts_of(model)
        assert [*zip(parts.names, parts.modules, strict=True)] == [*model.named_modules()]
        assert {*map(id, parts.parameters())} == {*map(id, model.parameters())}


CHANGES: dict[str, Callable[[Any], object]] = {
    "a child is another": lambda m: setattr(m, "stem", nn.Identity()),
    "a grandchild is another": lambda m: m.blocks[1].__setitem__(0, nn.Linear(2, 2)),
    "a child is added": lambda m: m.blocks.append(nn.Identity()),
    "a child is added to a leaf": lambda m: m.shared.add_module("more", nn.Identity()),
    "a child is removed": lambda m: delattr(m, "stem"),
    "children are exchanged": lambda m: m.blocks[0].__setitem__(0, m.blocks[1][0]),
    "a child comes to an empty place": lambda m: setattr(m, "nothing", nn.Identity()),
    "a child leaves its place empty": lambda m: setattr(m, "stem", None),
    "a child has another name": lambda m: m._modules.__setitem__("other", m._modules.pop("stem")),
    "a child has another class": lambda m: setattr(m.shared, "__class__", nn.Identity),
    "parametrized": lambda m: torch.nn.utils.parametrizations.weight_norm(m.shared),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_follows_from_the_build_is_found_again_when_it_changes(name: str) -> None:
    model, found = Model(), list[Any]()

    def find(parts: Parts) -> int:
        found.append(parts.names)
        return len(found)

    def fact() -> int:
        return parts_of(model).fact("question", find)

    assert (fact(), fact()) == (1, 1)
    CHANGES[name](model)
    assert (fact(), fact()) == (2, 2)
    assert [*found[-1]] == [name for name, _ in model.named_modules()]


SETTINGS: dict[str, Callable[[Any], object]] = CHANGES | {
    "a number": lambda m: setattr(m, "width", 4),
    "a truth that equals it": lambda m: setattr(m, "one", True),
    "an item of a list": lambda m: m.sizes.append(3),
    "a function": lambda m: setattr(m, "act", torch.tanh),
    "a new attribute": lambda m: setattr(m, "more", 1),
    "an attribute less": lambda m: delattr(m, "act"),
    "a hook": lambda m: m.stem.register_forward_hook(lambda *_: None),
    "a hook before": lambda m: m.stem.register_forward_pre_hook(lambda *_: None),
    "a shape": lambda m: setattr(m.shared.weight, "data", torch.zeros(5, 2)),
    "a parameter more": lambda m: setattr(m, "extra", nn.Parameter(torch.zeros(1))),
    "a buffer": lambda m: m.register_buffer("extra", torch.zeros(1)),
    "no bias": lambda m: setattr(m.shared, "bias", None),
    "a method of one object": lambda m: setattr(m.shared, "forward", lambda x: x),
}
_memory: OfStructure[int] = OfStructure()
_count = 0


def kept(model: nn.Module) -> int:
    """Return a number that is new if the model is not as before."""
    global _count
    _count += 1
    return _memory.of(model, "question", lambda: _count)


@pytest.mark.parametrize("name", SETTINGS)
def test_results_of_the_structure_are_found_again_when_it_changes(name: str) -> None:
    model = Model()
    first = kept(model)
    assert kept(model) == first
    SETTINGS[name](model)
    second = kept(model)
    assert second > first
    assert kept(model) == second


def test_results_stay_where_values_of_weights_change() -> None:
    model = Model()
    first = kept(model)
    model.shared.weight.data.add_(1)
    model.shared.weight = nn.Parameter(torch.zeros(2, 2))
    model.eval()
    assert kept(model) == first


def test_no_model_is_kept_alive() -> None:
    model = Model()
    kept(model)
    parts_of(model).fact("question", lambda parts: len(parts.modules))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
