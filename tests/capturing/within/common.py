"""Programs that add the same to all tokens: lengths that depend on the image, and sums with weights that leave one token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.capturing.moving import GRID, WIDTH
from tests.capturing.within.model import TOKENS, Change, Program, planes, programs, raster


def lit(t: Tensor) -> Tensor:
    return t[0, :, 0] > 0


def picked(t: Tensor) -> Tensor:
    return t[0][lit(t)]


def length(t: Tensor) -> int:
    return int(abs(t[0, 5, 0]) * 100) + 2


def added(number: Callable[[Tensor], Any]) -> Change:
    return lambda _, t: 0.01 * t + number(t)


LENGTHS: dict[str, Change] = {
    "len": added(lambda t: len(picked(t))),
    "shape": added(lambda t: picked(t).shape[0]),
    "size": added(lambda t: picked(t).size(0)),
    "numel": added(lambda t: picked(t).numel()),
    "stride": added(lambda t: picked(t).T.contiguous().stride(0)),
    "one for each": added(lambda t: sum(1 for _ in picked(t))),
    "nonzero": added(lambda t: torch.nonzero(lit(t)).shape[0]),
    "where": added(lambda t: torch.where(lit(t))[0].shape[0]),
    "argwhere": added(lambda t: len(torch.argwhere(lit(t)))),
    "unique": added(lambda t: len(torch.unique((t[0, :, 0] * 3).long()))),
    "masked_select": added(lambda t: torch.masked_select(t[0, :, 0], lit(t)).shape[0]),
    "repeat_interleave": added(lambda t: torch.repeat_interleave(torch.ones(1), (t[0, 5:6, 0] * 100).abs().long()).shape[0]),
    "the end of a range": added(lambda t: torch.arange(length(t))[-1]),
    "a sum of ones": added(lambda t: torch.ones(length(t)).sum()),
    "a sum of a one for each": added(lambda t: torch.ones_like(picked(t)).sum()),
    "a sum of as many ones": added(lambda t: t.new_ones(len(picked(t))).sum()),
    "a sum of zeros and one": added(lambda t: (torch.zeros_like(picked(t)) + 1).sum()),
    "the last that is not zero": added(lambda t: torch.ones_like(picked(t)[:, 0]).nonzero().amax()),
    "a running sum": added(lambda t: torch.ones_like(picked(t)[:, 0]).cumsum(0)[-1]),
}


def fifth() -> Tensor:
    return torch.arange(TOKENS) == 5


def alone(t: Tensor) -> Tensor:
    """Return token 5 as a sum over all tokens."""
    return (t * fifth()[None, :, None]).sum(1, keepdim=True)


WEIGHTED: dict[str, Change] = {
    "a sum times a table of one": added(lambda t: (t * fifth()[None, :, None]).sum(1, keepdim=True)),
    "a sum of where": added(lambda t: torch.where(fifth()[None, :, None], t, 0.0).sum(1, keepdim=True)),
    "a sum of masked_fill": added(lambda t: t.masked_fill(~fifth()[None, :, None], 0.0).sum(1, keepdim=True)),
    "a sum of tokens divided": added(lambda t: (t / torch.where(fifth(), 1.0, 1e4)[None, :, None]).sum(1, keepdim=True)),
    "a largest of tokens weighted": added(lambda t: (t * fifth()[None, :, None]).amax(1, keepdim=True)),
    "a product with a vector": added(lambda t: torch.mv(t[0].mT.contiguous(), fifth().float())),
    "a product with a matrix": added(lambda t: fifth().float()[None, None] @ t),
    "a product by einsum": added(lambda t: torch.einsum("bnc,n->bc", t, fifth().float())[:, None]),
    "a product by a layer": added(lambda t: F.linear(t.mT, fifth().float()[None]).mT),
    "a product by a kernel": added(lambda t: F.conv1d(t.mT, fifth().float().expand(WIDTH, 1, -1).contiguous(), groups=WIDTH).mT),
    "a mean in which one token is repeated": added(
        lambda t: torch.cat([t[:, 5:6].expand(-1, 1000, -1), t], 1).mean(1, keepdim=True)
    ),
    "a mean of an index that repeats": added(lambda t: t[:, [5] * 900 + list(range(TOKENS))].mean(1, keepdim=True)),
    "a mean of a repeated border": added(lambda t: F.pad(t.mT, (900, 0), mode="replicate").mean(2, keepdim=True).mT),
    "a pooling of a repeated border": added(lambda t: F.adaptive_avg_pool1d(F.pad(t.mT, (960, 0), mode="replicate"), 1).mT),
    "a product in front of tokens": lambda _, t: torch.cat([fifth().float()[None, None] @ t, t], 1),
    "a pooling of weighted tokens": added(lambda t: F.adaptive_avg_pool1d((t * fifth()[None, :, None]).mT, 1).mT * TOKENS),
    "a kernel over tokens": added(lambda t: F.conv1d(t, fifth().float()[None, :, None])),
    "the first of two kernels over tokens": added(lambda t: F.conv1d(t, fifth().float()[None, :, None].repeat(2, 1, 1))[:, :1]),
    "a group norm with weights of tokens": added(lambda t: F.group_norm(t, TOKENS, fifth().float()).sum(1, keepdim=True)),
    "a batch norm with weights of tokens": added(
        lambda t: F.batch_norm(t, torch.zeros(TOKENS), torch.ones(TOKENS), fifth().float()).sum(1, keepdim=True)
    ),
    "a PReLU with weights of tokens": added(lambda t: F.prelu(t, fifth().float()).sum(1, keepdim=True)),
    "a resizing to one": added(lambda t: F.interpolate(t.mT, size=1).mT),
    "a sum that is resized": added(lambda t: raster(F.interpolate(alone(t).mT[..., None], size=GRID, mode="bilinear"))),
    "a weight of a layer norm": lambda _, t: F.layer_norm(0.01 * t, (WIDTH,), alone(t)[0, 0]),
    "a weight of a group norm": lambda _, t: F.group_norm(0.01 * t.mT, 4, t[0, 5]).mT,
    "a mean of a batch norm": lambda _, t: F.batch_norm(0.01 * t.mT, t[0, 5], torch.ones(WIDTH)).mT,
    "a bias of a convolution": lambda _, t: raster(F.conv2d(0.01 * planes(t), torch.ones(WIDTH, 1, 1, 1), t[0, 5], groups=WIDTH)),
    "a kernel of a convolution": lambda _, t: raster(F.conv2d(planes(t), t[0, 5].view(WIDTH, 1, 1, 1) * 99, groups=WIDTH)),
    "a weight of a layer": lambda _, t: F.linear(0.01 * t, torch.diag(alone(t)[0, 0])),
    "a gate of a sum": lambda _, t: t * (1 + 100 * (t * fifth()[None, :, None]).sum(1, keepdim=True).tanh()),
    "a sum in place": added(lambda t: t.clone().mul_(fifth()[None, :, None]).sum(1, keepdim=True)),
    "a sum of a part that was zeroed": added(
        lambda t: t.clone().index_fill_(1, (~fifth()).nonzero()[:, 0], 0).sum(1, keepdim=True)
    ),
}


def common() -> Iterator[Program]:
    yield from programs("numbers", LENGTHS)
    yield from programs("mixing", WEIGHTED)
