"""`WithAttention`: its computation, its attributes and its checkpoints."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from visattn.nn import SqueezeExcite, WithAttention, attach


class Add(nn.Module):
    """Attention with a known result."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(number))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.number


class ByHeight(nn.Module):
    """Module that adds 0, 1, ... to the rows of `(B, C, H, W)`, so a wrong layout shows."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[2])[:, None]


def plugged(**options: Any) -> Any:
    return WithAttention(nn.BatchNorm2d(8), SqueezeExcite(8), **options)


@pytest.mark.parametrize(("gate", "expected"), [(0.0, 1.0), (0.25, 1.5), (1.0, 3.0)])
def test_gate_interpolates_between_the_module_and_its_attention(gate: float, expected: float) -> None:
    module = WithAttention(nn.Identity(), Add(2.0), gate=torch.tensor(gate))
    assert (module(torch.ones(1, 2, 3, 3)) == expected).all()


def test_without_a_gate_the_output_is_the_attention_times_the_scale() -> None:
    assert (WithAttention(nn.Identity(), Add(2.0))(torch.ones(1, 1, 2, 2)) == 3).all()
    assert (WithAttention(nn.Identity(), Add(2.0), scale=2.0)(torch.ones(1, 1, 2, 2)) == 6).all()


def test_channels_last_layout_is_permuted_for_the_attention_and_back() -> None:
    found = WithAttention(nn.Identity(), ByHeight(), layout="NHWC")(torch.zeros(1, 4, 3, 2))
    assert torch.equal(found, torch.arange(4.0)[None, :, None, None].expand(1, 4, 3, 2))


def test_memory_format_is_kept() -> None:
    x = torch.randn(2, 8, 5, 7).to(memory_format=torch.channels_last)
    assert plugged(gate=torch.tensor(0.0)).eval()(x).is_contiguous(memory_format=torch.channels_last)


class Turned(nn.Module):
    """Layer whose output has other strides along axes of length 1 than PyTorch's own operations give it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return y.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).reshape(y.shape)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["se", "cbam", "scse", "eca", "gc"])
def test_unusual_strides_are_kept_so_outputs_stay_the_same_to_the_bit(name: str, batch: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Turned(), nn.Conv2d(8, 8, 3, padding=1)).eval(), torch.randn(batch, 4, 9, 9)
    plain, strides = model(x), model[0](x).stride()
    attach(model, name, where=["0"], example=x)
    assert torch.equal(model(x), plain)
    assert model[0](x).stride() == strides


def test_gradients_pass_through_kept_strides() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Turned(), nn.Conv2d(8, 8, 3, padding=1)), torch.randn(1, 4, 9, 9, requires_grad=True)
    (plain,) = torch.autograd.grad(model(x).square().sum(), x)
    attach(model, "se", where=["0"], example=x.detach())
    (slope,) = torch.autograd.grad(model(x).square().sum(), x)
    assert torch.allclose(slope, plain, atol=1e-6)


def test_attributes_of_the_module_inside_are_shown() -> None:
    module = plugged(gate=torch.tensor(0.0))
    assert module.num_features == 8
    assert module.weight is module.base.weight
    assert [name for name, _ in module.named_parameters()].count("base.weight") == 1
    assert not hasattr(module, "stride")


def test_the_wrapped_module_may_use_the_same_attribute_names() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.attention = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
            self.gate = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(self.base(x)) * self.gate  # type: ignore[no-any-return]

    plain: Any = Named()
    module: Any = WithAttention(Named(), Add(1.0), gate=torch.tensor(0.0))
    module.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(module.base.attention.weight, plain.attention.weight)
    assert module.gate == 0
    other = WithAttention(Named(), Add(2.0), gate=torch.tensor(0.5))
    other.load_state_dict(module.state_dict(), strict=True)
    assert all(torch.equal(one, two) for one, two in zip(module.state_dict().values(), other.state_dict().values(), strict=True))
    assert other.supplied == ()


def test_items_of_a_wrapped_sequential_stay_accessible() -> None:
    net: Any = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Tanh()), nn.ReLU())
    attach(net, "se", where=["0"], layout="NCHW", example=torch.ones(1, 2, 3, 3))
    assert isinstance(net[0][1], nn.Tanh)
    assert [type(part) for part in net[0]] == [nn.ReLU, nn.Tanh]
    assert len(net[0]) == 2
    assert net[0][0] in net[0]
    assert isinstance(net[0], WithAttention)


def test_plain_checkpoint_loads_and_the_missing_attention_keys_are_listed() -> None:
    module, plain = plugged(gate=torch.tensor(0.5)), nn.BatchNorm2d(8)
    nn.init.normal_(plain.weight)
    before = module.attention.fc1.weight.clone()
    module.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(module.base.weight, plain.weight)
    assert torch.equal(module.attention.fc1.weight, before)
    assert module.gate == 0.5
    assert set(module.supplied) == {"gate", *(f"attention.{key}" for key in module.attention.state_dict())}


def test_parameters_stay_the_same_objects_when_a_plain_checkpoint_is_assigned() -> None:
    module, plain = plugged(gate=torch.tensor(0.5)), nn.BatchNorm2d(8)
    gate, weight = module.gate, module.attention.fc1.weight
    module.load_state_dict(plain.state_dict(), strict=True, assign=True)
    assert module.gate is gate
    assert module.attention.fc1.weight is weight


def test_strict_attention_reports_a_plain_checkpoint() -> None:
    module = plugged(gate=torch.tensor(0.5), strict_attention=True)
    with pytest.raises(RuntimeError, match=r"Missing key.*attention\.fc1\.weight"):
        module.load_state_dict(nn.BatchNorm2d(8).state_dict(), strict=True)


def test_a_checkpoint_that_lacks_part_of_the_attention_is_refused() -> None:
    module = plugged(gate=torch.tensor(0.5))
    state = module.state_dict()
    del state["attention.fc2.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"attention.fc2.bias\""):
        module.load_state_dict(state, strict=True)
    assert module.supplied == ()


@pytest.mark.parametrize("lost", ["weight", "running_mean"])
def test_a_plain_checkpoint_that_lacks_something_is_reported(lost: str) -> None:
    state = nn.BatchNorm2d(8).state_dict()
    del state[lost]
    with pytest.raises(RuntimeError, match=rf"Missing key\(s\) in state_dict: \"base.{lost}\""):
        plugged().load_state_dict(state, strict=True)


def test_unexpected_keys_are_reported_by_name() -> None:
    state = nn.BatchNorm2d(8).state_dict()
    state["stray"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"stray\""):
        plugged().load_state_dict(state, strict=True)


def test_copied_and_saved_modules_give_the_same_output() -> None:
    module = plugged(gate=torch.tensor(0.5)).eval()
    x = torch.randn(2, 8, 4, 3)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(module), torch.load(buffer, weights_only=False)):  # our own bytes
        assert type(other) is WithAttention
        assert torch.equal(other(x), module(x))
        other.load_state_dict(nn.BatchNorm2d(8).state_dict(), strict=True)


def test_deepcopy_copies_the_wrapper_and_not_only_the_module_inside() -> None:
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 3, 1)))  # has its own copy method
    assert type(copy.deepcopy(WithAttention(graph, Add(1.0)))) is WithAttention
