"""Reuse of traced token locations: they are never reused for a forward pass that differs."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn

import visattn
from tests import tiny
from tests.capturing import own
from visattn.core.records import Recording


def run(model: nn.Module, x: Tensor, **given: Any) -> Recording:
    with torch.no_grad(), visattn.capture(model) as recording:
        model(x, **given)
    return recording


def same(one: Recording, other: Recording) -> None:
    """Check that two recordings have the same calls, weights and token locations."""
    assert [(r.layer, r.call, r.kind, r.queries, r.keys) for r in one] == [
        (r.layer, r.call, r.kind, r.queries, r.keys) for r in other
    ]
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine.operator.dense(), theirs.operator.dense(), rtol=0, atol=0)


def anew(model: nn.Module, x: Tensor, **given: Any) -> Recording:
    """Record a copy of the model, which has no known tapes."""
    return run(copy.deepcopy(model), x, **given)


def swin() -> Any:
    """Build a Swin with windows of 4 x 4 on an 8 x 8 grid; every other block is shifted."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 16, "num_classes": 3}
    return SwinTransformer(**sizes, depths=(2,), num_heads=(2,)).eval()


def unshift(model: Any) -> None:
    block = model.layers[0].blocks[1]
    block.shift_size, block.attn_mask = (0, 0), None


def shift_another_way(model: Any) -> None:
    model.layers[0].blocks[0].shift_size = (2, 2)


def replace_a_block(model: Any) -> None:
    model.layers[0].blocks[1] = copy.deepcopy(model.layers[0].blocks[0])


def patch_a_forward(model: Any) -> None:
    block = model.layers[0].blocks[0]
    block.forward = types.MethodType(lambda self, x: type(self).forward(self, x.flip(1)), block)


def hook_a_block(model: Any) -> None:
    model.layers[0].blocks[0].register_forward_hook(lambda _, __, x: x.flip(1))


def hook_before_a_block(model: Any) -> None:
    model.layers[0].blocks[0].register_forward_pre_hook(lambda _, args: (args[0].flip(2),))


CHANGES: dict[str, Callable[[Any], None]] = {
    "setting": unshift,
    "another attribute": shift_another_way,
    "a block replaced": replace_a_block,
    "a forward patched": patch_a_forward,
    "a hook": hook_a_block,
    "a hook before": hook_before_a_block,
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_changed_model_is_traced_again(name: str) -> None:
    model, x = swin(), tiny.pixels(2, (32, 32))
    before = run(model, x)
    same(run(model, x), before)
    CHANGES[name](model)
    after = run(model, x)
    same(after, anew(model, x))


def test_model_with_a_patched_class_is_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = swin(), tiny.pixels(2, (32, 32))
    run(model, x)
    kind = type(model.layers[0].blocks[0])
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: forward(self, x.flip(1)))
    same(run(model, x), anew(model, x))


def test_patched_functions_at_one_address_are_distinguished() -> None:
    """Check functions that reuse the memory address of a function that was deleted."""
    model, x = own.vit(), tiny.pixels(2)
    block = model.get_submodule("blocks.0")

    def drop(first: int) -> Callable[[Tensor], Tensor]:
        return lambda tokens: type(block).forward(block, torch.cat([tokens[:, :1], tokens[:, 1:].roll(first, 1)], 1))

    for shift in range(6):
        block.forward = drop(shift)
        same(run(model, x), anew_by_hand(model, x))
        del block.forward


def anew_by_hand(model: nn.Module, x: Tensor) -> Recording:
    """Record the model inside a new wrapper, which has no known tapes."""
    recording = run(nn.Sequential(model), x)
    for i, record in enumerate(recording):
        object.__setattr__(record, "layer", own.LAYERS[i])
    return recording


class Rolling(nn.Module):
    """Model that moves its patches before attention, by an argument, its own state, its configuration or its input."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by, self.vit, self.count = by, own.vit(), 0
        self.config = types.SimpleNamespace(move=0)

    def forward(self, x: Tensor, move: int = 0) -> Tensor:
        if self.by == "state":
            self.count, move = 1 - self.count, self.count
        elif self.by == "data":
            move = int(x.mean() > 0)
        elif self.by == "branch":
            move = 1 if x.mean() > 0 else 0
        elif self.by == "config":
            move = self.config.move
        return self.vit(x.roll(move * tiny.PATCH, -1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("by", ["caller", "state", "config", "data", "branch"])
def test_moving_patches_are_traced_in_each_forward_pass(by: str) -> None:
    model = Rolling(by)
    for i in (0, 1, 1, 0, 1):
        x = tiny.pixels(2) + (100 if i else -100)
        given = {"move": i} if by == "caller" else {}
        model.config.move = i
        fresh = anew(model, x, **given)
        same(run(model, x, **given), fresh)


def test_sizes_batches_and_dtypes_are_cached_separately() -> None:
    model = tiny.vit(dynamic_img_size=True)
    inputs = [
        tiny.pixels(batch, size, seed).to(dtype)
        for seed, (batch, size, dtype) in enumerate(
            [
                (2, tiny.INPUT, torch.float32),
                (1, (80, 112), torch.float32),
                (3, tiny.INPUT, torch.float32),
                (2, (48, 32), torch.float32),
                (2, tiny.INPUT, torch.float32),
            ]
        )
    ]
    expected = [anew(model, x) for x in inputs]
    with torch.no_grad(), visattn.capture(model) as recording:
        for x in inputs:
            model(x)
    for i, fresh in enumerate(expected):
        same(recording.select(forward=i), fresh)
        same(run(model, inputs[i]), fresh)
    same(run(model.double(), inputs[0].double()), anew(model, inputs[0].double()))


@pytest.mark.parametrize("make", [tiny.vit, own.vit, swin], ids=["vit", "own", "swin"])
def test_tokens_of_an_unchanged_model_are_traced_once(make: Callable[[], nn.Module], followed: list[None]) -> None:
    model = make()
    x = tiny.pixels(2, (32, 32) if make is swin else tiny.INPUT)
    for _ in range(3):
        run(model, x)
    assert len(followed) == 1


@pytest.mark.parametrize(("first", "then"), [("last", "all"), ("none", "last"), ("all", "last")])
def test_newly_requested_features_are_kept(first: str, then: str) -> None:
    model, x = tiny.vit(), tiny.pixels(2)
    found = []
    for features in (first, then):
        with torch.no_grad(), visattn.capture(model, features=features) as recording:
            model(x)
        found.append({feature.layer: feature.layout for feature in recording.features})
    everything = {layer: tiny.layout() for layer in ("blocks.0", "blocks.1", "norm")}
    assert found[1] == (everything if then == "all" else {"norm": tiny.layout()})


def test_newly_requested_layers_are_kept() -> None:
    model, x = tiny.vit(), tiny.pixels(2)
    for layers in ("blocks.0.*", "*", "blocks.1.*"):
        with torch.no_grad(), visattn.capture(model, layers=layers) as recording:
            model(x)
        assert {record.keys for record in recording} == {tiny.layout()}
        assert len(recording) == (2 if layers == "*" else 1)


def test_failed_forward_pass_is_not_cached() -> None:
    model, x, failures = tiny.vit(), tiny.pixels(2), [MemoryError()]

    def fail_once(*_: object) -> None:
        if failures:
            raise failures.pop()

    model.get_submodule("blocks.0").register_forward_hook(fail_once)
    with pytest.raises(MemoryError):
        run(model, x)
    same(run(model, x), anew(model, x))
