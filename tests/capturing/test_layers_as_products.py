"""Layers that a model, or a version of torch, writes as a product with an expanded weight, and the convolution that follows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visattn

LAYERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "bmm of an expanded weight": lambda x, weight, bias: torch.bmm(x, weight.t().expand(len(x), -1, -1)) + bias,
    "baddbmm": lambda x, weight, bias: torch.baddbmm(bias.expand(len(x), 1, -1), x, weight.t().expand(len(x), -1, -1)),
    "matmul": lambda x, weight, bias: x @ weight.t() + bias,
    "linear": F.linear,
}


class Layered(nn.Module):
    """Tokens behind a layer that lie on a map again, a convolution, and attention."""

    def __init__(self, layer: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.stem, self.linear, self.point = nn.Conv2d(3, 8, 8, 8), nn.Linear(8, 16), nn.Conv2d(16, 8, 1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.stem(x)
        tokens = self.layer(maps.flatten(2).mT, self.linear.weight, self.linear.bias)
        seen = self.point(tokens.mT.reshape(len(x), 16, *maps.shape[2:])).flatten(2).mT
        return self.attention(seen, seen, seen, need_weights=False)[0].mean(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_tokens_are_followed_through_the_layer_and_the_convolution(name: str, batch: int, frozen: bool) -> None:
    torch.manual_seed(0)
    model, images = Layered(LAYERS[name]).eval().requires_grad_(not frozen), torch.randn(batch, 3, 32, 48)
    with torch.no_grad(), visattn.capture(model, remember=False) as recording:
        model(images)
    assert [(record.kind, record.keys.grid, record.reason) for record in recording] == [("self", (4, 6), None)]
    lit = images.clone()
    lit[-1, :, 8:16, 32:40] += 1  # the pixels of patch 1,4
    with torch.no_grad(), visattn.capture(model, remember=False) as after:
        model(lit)
    changed = (after.keys(0) - recording.keys(0)).abs().amax((1, -1))  # (B, tokens)
    assert changed.nonzero().tolist() == [[batch - 1, 1 * 6 + 4]]
