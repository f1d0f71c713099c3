# mypy: disable-error-code="no-untyped-call"
"""Attached attention and checkpoints of modules: the advice of messages, followed literally."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.layers import global_context, non_local_attn
from torch import nn

from tests.advice.tensors import same
from tests.nn.small import Net, example
from tests.nn.test_layouts import authors_cbam
from visattn import nn as ours
from visattn.errors import ModelError, WeightsError
from visattn.nn import attach, load_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::visattn.errors.VisattnNote")


def test_attention_is_attached_again() -> None:
    net = Net().eval()
    handle = attach(net, "se", example=example())
    handle.detach()
    with pytest.raises(ModelError, match=r"nothing is attached: it was already detached, .*\. Call attach again"):
        handle.detach()
    assert attach(net, "se", example=example()).detach() is net


def test_attention_is_detached_once_a_change_is_undone() -> None:
    net = Net().eval()
    before = [*net.modules()]
    handle = attach(net, "se", example=example())
    place = net.layer1[0].bn2
    net.layer1[0].bn2 = nn.BatchNorm2d(8)
    with pytest.raises(ModelError, match=r"has been replaced since attach, so nothing was detached\. Undo that change first"):
        handle.detach()
    net.layer1[0].bn2 = place
    assert [*handle.detach().modules()] == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
def test_attention_that_is_attached_first_is_traced() -> None:
    def fixed(model: nn.Module) -> Any:
        return torch.jit.trace(model, example())

    with pytest.raises(
        ModelError, match=r"must be a Python module, .*, whose code is fixed\. Attach first, then use torch\.jit\.trace"
    ):
        attach(fixed(Net().eval()), "se")
    net = Net().eval()
    attach(net, "se", example=example(), init=0.5)
    expected = net(example())
    assert torch.allclose(fixed(net)(example()), expected)


Case = tuple[Callable[[], nn.Module], Callable[[], nn.Module], Callable[[], Any], Callable[[], Any], str]
CHECKPOINTS: dict[str, Case] = {
    "width": (
        lambda: ours.CBAM(32, 8),
        lambda: ours.CBAM(32, 16),
        authors_cbam,
        authors_cbam,
        r"must be given fc1\.weight of 4x32x1x1, got 2x32 .*\. Build it with the settings of the checkpoint",
    ),
    "names": (
        lambda: ours.MultiHeadAttention(32, 4),
        lambda: ours.MultiHeadAttention(32, 4, qkv_bias=False),
        lambda: ours.MultiHeadAttention(32, 4, qkv_bias=False).state_dict(),
        lambda: ours.MultiHeadAttention(32, 4, qkv_bias=False).state_dict(),
        r"got 1 missing: qkv\.bias\. Build it with the settings of the checkpoint",
    ),
    "a module": (
        lambda: ours.CBAM(32),
        lambda: ours.CBAM(32),
        lambda: ours.CBAM(32),
        lambda: ours.CBAM(32).state_dict(),
        r"must map names to tensors, got CBAM\. Pass the result of state_dict\(\)",
    ),
    "options": (
        lambda: ours.GlobalContext(32, 8),
        lambda: ours.GlobalContext(32, 8, fusion="scale", eps=1e-6),
        lambda: dict(global_context.GlobalContext(32).state_dict()),
        lambda: dict(global_context.GlobalContext(32).state_dict()),
        r'must be built with (fusion="scale", eps=1e-6|eps=1e-6, fusion="scale") to match ',
    ),
}


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_a_module_with_the_settings_of_the_checkpoint_loads_it(how: str) -> None:
    wrong, right, state, mended, message = CHECKPOINTS[how]
    with pytest.raises(WeightsError, match=message):
        load_checkpoint(wrong(), state())
    module = right()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    load_checkpoint(module, mended())
    assert not same(module, before)


def test_a_layout_that_is_named_is_loaded() -> None:
    state = non_local_attn.NonLocalAttn(32).state_dict()
    module = ours.NonLocal(32, width=8, scale="channels")
    with pytest.raises(WeightsError, match=r"names and shapes fit (.*)\. Pass layout= with one of these names") as caught:
        load_checkpoint(module, state)
    assert "timm.NonLocalAttn(use_scale=True)" in str(caught.value)
    load_checkpoint(module, state, layout="timm.NonLocalAttn(use_scale=True)")
    assert any(torch.equal(tensor, state["t.weight"]) for tensor in module.state_dict().values())


def test_what_a_network_says_of_a_checkpoint_is_told_in_one_line() -> None:
    class Refuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.se = ours.SqueezeExcite(8)

        def _load_from_state_dict(self, *given: Any) -> None:
            given[-1].append("too\nold")

    with pytest.raises(
        WeightsError, match=r"^Refuses refuses the checkpoint: Error\(s\) in loading state_dict for Refuses: too old$"
    ):
        load_checkpoint(Refuses(), Refuses().state_dict())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_a_checkpoint_without_the_prefix_of_a_wrapper_loads(prefix: str) -> None:
    module, state = ours.CBAM(32), ours.CBAM(32).state_dict()
    with pytest.raises(WeightsError, match=rf"unexpected: .*\. Remove the prefix '{re.escape(prefix)}' from its names\.$"):
        load_checkpoint(module, {prefix + name: tensor for name, tensor in state.items()})
    load_checkpoint(module, state)
    assert same(module, state)


def test_a_network_that_asks_for_versions_is_given_its_own_state() -> None:
    class Versioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.se = ours.SqueezeExcite(8)

        def _load_from_state_dict(self, _state: Any, _prefix: str, metadata: dict[str, Any], *_: Any) -> None:
            if metadata.get("version") != 1:
                raise ValueError("version must be 1")

    state = Versioned().state_dict()
    with pytest.raises(WeightsError, match=r"^Versioned refuses the checkpoint: version must be 1$"):
        load_checkpoint(Versioned(), dict(state))
    load_checkpoint(Versioned(), state)
