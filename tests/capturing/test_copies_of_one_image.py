"""Copies of one image stay copies behind every kind of operation: they are passes over the image, never heads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visattn

Change = Callable[[Tensor], Tensor]  # takes two passes over one image, (2, 64, 16)
CELLS, WIDTH = (8, 8), 16


class Passes(nn.Module):
    """Model that attends twice to one image, with the passes where heads would be."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.embed, self.change = nn.Conv2d(3, WIDTH, 4, 4), change

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tensor([1.0, 2.0])[:, None, None]
        passes = self.change(self.embed(x).flatten(2).mT.repeat(2, 1, 1) * scale)[None]
        return F.scaled_dot_product_attention(passes, passes, passes).mean()


def maps(passes: Tensor) -> Tensor:
    return passes.mT.reshape(len(passes), -1, *CELLS)


def tokens(found: Tensor) -> Tensor:
    return found.flatten(2).mT


def written_out(passes: Tensor) -> Tensor:
    return (passes @ passes.mT).softmax(-1) @ passes


def scattered(passes: Tensor) -> Tensor:
    order = torch.arange(63, -1, -1)[None, :, None].expand_as(passes)
    return torch.zeros_like(passes).scatter_(1, order, passes)


def sampled(passes: Tensor) -> Tensor:
    points = F.affine_grid(torch.eye(2, 3).expand(2, 2, 3), [2, WIDTH, *CELLS], align_corners=False)
    return tokens(F.grid_sample(maps(passes), points, align_corners=False))


CHANGES: dict[str, Change] = {
    "nothing": lambda p: p,
    "padding with zeros": lambda p: F.pad(p, (0, 0, 1, 0)),
    "padding with copies of the border": lambda p: tokens(F.pad(maps(p), (1, 1, 1, 1), mode="replicate")[..., 1:-1, 1:-1]),
    "conv1d": lambda p: F.conv1d(p.mT, torch.eye(WIDTH)[..., None]).mT,
    "conv2d": lambda p: tokens(F.conv2d(maps(p), torch.ones(WIDTH, 1, 3, 3), padding=1, groups=WIDTH)),
    "conv2d with a stride": lambda p: tokens(F.conv2d(maps(p), torch.ones(WIDTH, 1, 2, 2), stride=2, groups=WIDTH)),
    "conv2d that shifts": lambda p: tokens(
        F.conv2d(maps(p), torch.eye(3)[2].outer(torch.eye(3)[1]).expand(WIDTH, 1, 3, 3), padding=1, groups=WIDTH)
    ),
    "pooling": lambda p: tokens(F.avg_pool2d(maps(p), 2)),
    "adaptive pooling": lambda p: tokens(F.adaptive_max_pool2d(maps(p), 4)),
    "resizing": lambda p: tokens(F.interpolate(maps(p), scale_factor=2, mode="bilinear")),
    "resizing to the nearest": lambda p: tokens(F.interpolate(maps(p), scale_factor=2)),
    "sorting channels": lambda p: p.sort(-1).values,
    "a layer": lambda p: F.linear(p, torch.eye(WIDTH)),
    "a product": lambda p: p @ torch.eye(WIDTH),
    "a sum with one of them": lambda p: p + p[:1],
    "a layer norm": lambda p: F.layer_norm(p, (WIDTH,)),
    "a scatter": scattered,
    "fused attention": lambda p: F.scaled_dot_product_attention(p, p, p),
    "attention that is written out": written_out,
    "unfold and fold": lambda p: tokens(F.fold(F.unfold(maps(p), 2, stride=2), CELLS, 2, stride=2)),
    "sampling": sampled,
}


@pytest.mark.parametrize("name", CHANGES)
def test_passes_over_one_image_are_no_heads(name: str) -> None:
    with torch.no_grad(), visattn.capture(model := Passes(CHANGES[name]).eval()) as recording:
        model(torch.randn(1, 3, 32, 32))
    assert recording[-1].reason is not None


def test_heads_beside_copies_are_heads() -> None:
    """Check a gate that is copied for all heads: it does not make them copies."""

    def change(passes: Tensor) -> Tensor:
        heads = passes[0].view(-1, 2, WIDTH // 2).transpose(0, 1)  # of one pass
        return heads * passes[:1].mean(-1, keepdim=True).expand(2, -1, -1)

    with torch.no_grad(), visattn.capture(model := Passes(change).eval()) as recording:
        model(torch.randn(1, 3, 32, 32))
    assert recording[-1].reason is None
    assert recording[-1].operator.shape[1] == 2
