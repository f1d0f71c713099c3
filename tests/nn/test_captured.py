"""Every module of `visattn.nn` in a small network under `capture`: placed, or a gate, or left out with a reason that is true."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import visattn
from tests.nn.cases import GATES, PLACES, with_nonzero_parameters
from visattn import nn as ours
from visattn.errors import NoAttentionCaptured

GRID = (5, 7)
Build = Callable[[], nn.Module]


class Along(nn.Module):
    """Linear function of the mean over all positions of a map or of tokens."""

    def __init__(self, size: int, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(8, size), activation or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean((2, 3)) if x.ndim == 4 else x.mean(1)
        return self.activation(self.linear(x))  # type: ignore[no-any-return]


class OnMaps(nn.Module):
    """Network of a patch embedding and a module on its maps; `beside` makes the further inputs of the module from the maps."""

    def __init__(self, module: nn.Module, *beside: nn.Module) -> None:
        super().__init__()
        self.stem, self.module, self.beside = nn.Conv2d(3, 8, 4, 4), module, nn.ModuleList(beside)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.module(x, *(part(x) for part in self.beside)).flatten(2).mean(2)  # type: ignore[no-any-return]


class OnTokens(nn.Module):
    """Network of a patch embedding and an attention between its tokens, behind some learned tokens if `prefix` is not 0."""

    def __init__(self, module: nn.Module, attend: Callable[[Any, Tensor], Any], prefix: int = 0) -> None:
        super().__init__()
        self.stem, self.module, self.attend = nn.Conv2d(3, 8, 4, 4), module, attend
        self.value, self.query, self.start = nn.Linear(8, 8), nn.Linear(8, 8), Along(6)
        self.cls_token = nn.Parameter(torch.randn(1, prefix, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).mT
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) if self.cls_token.shape[1] else x
        out = self.attend(self, x)
        out = out[0] if isinstance(out, tuple) else out
        return out.mean(1) if out.ndim == 3 else out  # type: ignore[no-any-return]


def plain(net: Any, x: Tensor) -> Any:
    return net.module(x)


def on_grid(net: Any, x: Tensor) -> Any:
    return net.module(x, GRID)


def scored(net: Any, x: Tensor) -> Any:
    return ours.attend(net.module(net.query(x), x), net.value(x))


def addressed(net: Any, x: Tensor) -> Any:
    return ours.attend(net.module(net.query(x), x, GRID), net.value(x))


def monotonic(net: Any, x: Tensor) -> Any:
    return net.module(net.query(x) @ x.mT, net.value(x), GRID)


def predictive(net: Any, x: Tensor) -> Any:
    return net.module(net.query(x), net.query(x) @ x.mT, net.value(x), GRID[: net.module.axes] if net.module.axes == 2 else (35,))


def decoded(net: Any, x: Tensor) -> Any:
    return net.module(net.value(x), net.start(x))[0]


def network(make: Build, attend: Callable[[Any, Tensor], Any], prefix: int = 0) -> Build:
    return lambda: OnTokens(make(), attend, prefix)


def on_maps(make: Build, beside: Callable[[], list[nn.Module]]) -> Build:
    return lambda: OnMaps(make(), *beside())


BESIDE: dict[str, Callable[[], list[nn.Module]]] = {
    "attention gate": lambda: [nn.Conv2d(8, 6, 3, 2, 1)],
    "retina": lambda: [Along(2, nn.Tanh())],
    "DRAW read": lambda: [Along(6)],
    "DRAW write": lambda: [Along(6)],
}
NETWORKS: dict[str, Build] = {
    **{name: on_maps(make, BESIDE.get(name, list)) for name, (make, _) in {**GATES, **PLACES}.items()},
    "multi-head": network(lambda: ours.MultiHeadAttention(8, 2), plain),
    "multi-head cross": network(lambda: ours.MultiHeadAttention(8, 2), lambda net, x: net.module(x[:, :2], x[:, 2:]), 2),
    "class attention": network(lambda: ours.ClassAttention(8, 2), plain, 1),
    "talking heads": network(lambda: ours.TalkingHeadsAttention(8, 2), plain),
    "cross-covariance": network(lambda: ours.CrossCovarianceAttention(8, 2), plain),
    "window": network(lambda: ours.WindowAttention(8, 2, window_size=(5, 7)), on_grid),
    "window shifted": network(lambda: ours.WindowAttention(8, 2, window_size=4, shift_size=2), on_grid),
    "sliding window": network(lambda: ours.SlidingWindowAttention(8, 2, radius=1), on_grid),
    "sliding window, dilated": network(lambda: ours.SlidingWindowAttention(8, 2, radius=1, dilation=(1, 2)), on_grid),
    "sliding window with global tokens": network(
        lambda: ours.SlidingWindowAttention(8, 2, radius=1, global_tokens=3), on_grid, 3
    ),
    "additive score": network(lambda: ours.AdditiveScore(8, 8), scored),
    "dot score": network(lambda: ours.DotScore(), scored),
    "scaled dot score": network(lambda: ours.ScaledDotScore(), scored),
    "general score": network(lambda: ours.GeneralScore(8, 8), scored),
    "cosine score": network(lambda: ours.CosineScore(3.0, learned=True), scored),
    "location score": network(lambda: ours.LocationScore(8, 35), scored),
    "content and location": network(lambda: ours.ContentLocationAddressing(8, 8, axes=2), addressed),
    "local-m": network(lambda: ours.LocalMonotonic(1), monotonic),
    "local-p": network(lambda: ours.LocalPredictive(8, 2), predictive),
    "local-p, renormalized": network(lambda: ours.LocalPredictive(8, 2, renormalize=True), predictive),
    "local-p without window": network(lambda: ours.LocalPredictive(8, 2, truncate=False), predictive),
    "local-p of a sequence": network(lambda: ours.LocalPredictive(8, 2, axes=1), predictive),
    "soft attention": network(lambda: ours.SoftAttention(8, 6), decoded),
    "hard attention": network(lambda: ours.HardAttention(8, 6), decoded),
    "hard attention, argmax": network(lambda: ours.HardAttention(8, 6, eval_mode="argmax"), decoded),
}

NO_SOFTMAX = "no layer of OnMaps multiplied a softmax with values"
REASONS = {  # why no attention is recorded
    "NL dot": "multiplies scores by values with matmul",
    "NL concat": "multiplies scores by values with matmul",
    "external": "softmax over tokens whose product with values is not recognized",  # it is normalized once more, over the slots
    "external official": "softmax over tokens whose product with values is not recognized",
    "hard attention, argmax": "softmax over tokens whose product with values is not recognized",  # one value is read by its index
}
PUBLISHED = {  # roles of what a module publishes; other gates are listed by their modules' own tests
    "STN": "transform",
    "STN attention": "transform",
    "retina": "glimpse",
    "DRAW read": "glimpse",
    "DRAW write": "window",
    **dict.fromkeys(GATES, ""),
}
WINDOWED = {"local-m", "local-p", "local-p, renormalized"}  # the others have no border
CHANNELS = {"cross-covariance"}


def image() -> Tensor:
    return torch.randn(2, 3, 20, 28, generator=torch.Generator().manual_seed(0))


def seen(net: nn.Module) -> visattn.Recording:
    with torch.no_grad(), visattn.capture(net) as recording:
        net(image())
    return recording


@pytest.mark.parametrize("name", list(NETWORKS))
def test_a_module_under_capture_is_placed_or_a_gate_or_left_out_for_a_true_reason(name: str) -> None:
    net = with_nonzero_parameters(NETWORKS[name])
    for _ in range(2):  # traced, and on the tape that is known
        if name in REASONS:
            with pytest.raises(NoAttentionCaptured, match=re.escape(REASONS[name])):
                seen(net)
            continue
        recording = seen(net)
        roles = {feature.role for feature in recording.features if feature.role not in ("tokens", "activation")}
        if name in PUBLISHED:
            assert roles if PUBLISHED[name] == "" else roles == {PUBLISHED[name]}
            assert not recording.records
            continue
        assert recording.records
        assert not recording.unseen
        assert roles == ({"window"} if name in WINDOWED else {"channel_gate"} if name == "GC scale" else set())
        for record in recording:
            assert record.reason is None
            assert record.keys.grid or name in CHANNELS


def test_every_module_is_in_the_sweep() -> None:
    kinds = {type(module) for build in NETWORKS.values() for module in build().modules()}
    public = {kind for name in ours.__all__ if inspect.isclass(kind := getattr(ours, name)) and issubclass(kind, nn.Module)}
    assert public - kinds == {ours.WithAttention}  # attached ones have tests of their own


@pytest.mark.parametrize(
    "name",
    [
        "additive score",
        "location score",
        "content and location",
        "local-m",
        "local-p",
        "local-p without window",
        "sliding window",
    ],
)
def test_the_weights_recorded_are_those_that_the_module_returns(name: str) -> None:
    net: Any = with_nonzero_parameters(NETWORKS[name])
    recording = seen(net)
    with torch.no_grad():
        x = net.stem(image()).flatten(2).mT
        is_dense = name == "sliding window"
        weights = net.module(x, GRID, need_weights=True)[1] if is_dense else net.attend(net, x)[1][:, None]
    assert torch.allclose(recording.attention(), weights, atol=1e-6)


@pytest.mark.parametrize("name", sorted(WINDOWED))
def test_windows_are_the_cells_that_have_weight(name: str) -> None:
    net: Any = with_nonzero_parameters(NETWORKS[name])
    recording = seen(net)
    (window,) = (feature for feature in recording.features if feature.role == "window")
    assert window.layout == recording[0].keys
    weights = torch.unflatten(recording.attention()[:, 0], 2, GRID)  # (B, 35, rows, columns)
    for image_number in range(2):
        for query in range(35):
            top, left, bottom, right, row, column = window.value[image_number, query].tolist()
            outside = weights[image_number, query].clone()
            outside[int(top) : int(bottom), int(left) : int(right)] = 0
            assert not outside.any()
            assert (weights[image_number, query, int(top) : int(bottom), int(left) : int(right)] > 0).all()
            assert top <= row <= bottom
            assert left <= column <= right


def test_windows_of_a_grid_that_is_not_the_image_have_no_place() -> None:
    net: Any = with_nonzero_parameters(NETWORKS["local-m"])
    net.attend = lambda net, x: net.module(net.query(x) @ x.mT, net.value(x), (7, 5))
    (window,) = (feature for feature in seen(net).features if feature.role == "window")
    assert window.layout is None


@pytest.mark.parametrize("role", ["glimpse", "window"])
def test_filters_of_draw_are_published_where_they_lie(role: str) -> None:
    """The box is compared with the filters themselves: the means of the outer ones, half a spacing further out."""
    name = "DRAW read" if role == "glimpse" else "DRAW write"
    net: Any = with_nonzero_parameters(NETWORKS[name])
    (feature,) = (feature for feature in seen(net).features if feature.role == role)
    assert feature.layout is not None
    assert feature.layout.grid == GRID
    with torch.no_grad():
        net.module.window.weight.mul_(0.1)  # a small window of wide filters, so that their means over pixels are exact
        net.module.window.bias.copy_(torch.tensor([0.1, -0.1, 1.5, -2.0, 0.0]))
        state = net.beside[0](net.stem(image()))
        (boxed,) = (feature for feature in seen(net).features if feature.role == role)
        reader = ours.DrawRead(6, patch_size=3)
        reader.window.load_state_dict(net.module.window.state_dict())
        _, weights = reader(torch.zeros(2, 1, 50, 70), state, need_weights=True)
        box = net.module.boxes(state, (50, 70))
    weights = weights.view(2, 3, 3, 50, 70)
    rows = (weights.sum(4) * (torch.arange(50) + 0.5)).sum(3)[:, :, 0]  # (B, 3): mean row of each filter
    columns = (weights.sum(3) * (torch.arange(70) + 0.5)).sum(3)[:, 0]
    spacing = rows[:, 1] - rows[:, 0]
    expected = torch.stack([rows[:, 0], columns[:, 0], rows[:, 2], columns[:, 2]], 1) + spacing[:, None] / 2 * torch.tensor(
        [-1, -1, 1, 1]
    )
    assert torch.allclose(box[:, 0, :4], expected, atol=1e-2)
    assert boxed.value.shape == (2, 1, 4 if role == "glimpse" else 6)
