"""Heads that read the mean or the sum of tokens: of all patches, of all tokens, and of some patches in many spellings."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.capturing.heads.model import GRID, PATCHES, Head


def _loop(_: Any, t: Tensor) -> Tensor:
    total = torch.zeros_like(t[:, 0])
    for i in range(1, t.shape[1]):
        total = total + t[:, i]
    return total / PATCHES


def _in_place(_: Any, t: Tensor) -> Tensor:
    total = torch.zeros_like(t[:, 0])
    for token in t[:, 1:].unbind(1):
        total += token
    return total.div_(PATCHES)


def _running(_: Any, t: Tensor) -> Tensor:
    mean = t[:, 1]
    for i in range(2, t.shape[1]):
        mean = mean + (t[:, i] - mean) / i
    return mean


def _fading(_: Any, t: Tensor) -> Tensor:
    mean = t[:, 1]
    for i in range(2, t.shape[1]):
        mean = 0.9 * mean + 0.1 * t[:, i]
    return mean


def _written(_: Any, t: Tensor) -> Tensor:
    copy = t.clone()
    copy[:, 0] = t[:, 1:].mean(1)
    return copy[:, 0]


def _added(_: Any, t: Tensor) -> Tensor:
    copy = t.clone()
    copy[:, 0] += t[:, 1:].mean(1)
    return copy[:, 0]


def _nan(_: Any, t: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask[..., None] > 0, t[:, 1:], torch.nan).nanmean(1)


def _scatter(k: Any, t: Tensor) -> Any:
    into = torch.zeros_like(t[:, :2])
    return into.index_add(1, k.part.long(), t[:, 1:])[:, 1] / k.part.sum()


MEANS: dict[str, Head] = {
    "mean": Head(lambda k, t: t[:, 1:].mean(1)),
    "mean, no class token": Head(lambda k, t: t.mean(1), prefix=0),
    "mean beside registers": Head(lambda k, t: t[:, 5:].mean(1), prefix=5),
    "mean, class token at the end": Head(lambda k, t: t[:, :-1].mean(1), end=True),
    "sum": Head(lambda k, t: t[:, 1:].sum(1)),
    "sum divided": Head(lambda k, t: t[:, 1:].sum(1) / 96),
    "mean, einsum": Head(lambda k, t: torch.einsum("bnc->bc", t[:, 1:])),
    "mean, einsum with weights": Head(lambda k, t: torch.einsum("bnc,n->bc", t[:, 1:], k.ones / 96)),
    "mean, matmul with ones": Head(lambda k, t: (k.ones / 96) @ t[:, 1:]),
    "mean, bmm": Head(lambda k, t: torch.bmm((k.ones / 96).expand(len(t), 1, -1), t[:, 1:])[:, 0]),
    "mean, tensordot": Head(lambda k, t: torch.tensordot(t[:, 1:], k.ones / 96, ([1], [0]))),
    "mean, linear with equal weights": Head(lambda k, t: F.linear(t[:, 1:].mT, k.ones[None] / 96)[..., 0]),
    "mean, avg_pool1d": Head(lambda k, t: F.avg_pool1d(t[:, 1:].mT, 96).flatten(1)),
    "mean, adaptive 1d": Head(lambda k, t: F.adaptive_avg_pool1d(t[:, 1:].mT, 1).flatten(1)),
    "mean, adaptive 2d": Head(lambda k, t: F.adaptive_avg_pool2d(k.map(t), 1).flatten(1)),
    "mean, avg_pool2d": Head(lambda k, t: F.avg_pool2d(k.map(t), GRID).flatten(1)),
    "mean over rows and columns": Head(lambda k, t: k.map(t).mean((2, 3))),
    "mean of column means": Head(lambda k, t: k.map(t).mean(-1).mean(-1)),
    "mean of a 2 x 2 pooling": Head(lambda k, t: F.avg_pool2d(k.map(t), 2).mean((2, 3))),
    "mean of an adaptive 2 x 2 pooling": Head(lambda k, t: F.adaptive_avg_pool2d(k.map(t), 2).mean((2, 3))),
    "mean, area": Head(lambda k, t: F.interpolate(k.map(t), (1, 1), mode="area").flatten(1)),
    "mean, convolution with equal weights": Head(
        lambda k, t: F.conv2d(k.map(t), k.ones.view(1, 1, *GRID).expand(16, 1, *GRID) / 96, groups=16).flatten(1)
    ),
    "mean, loop": Head(_loop),
    "mean, loop in place": Head(_in_place),
    "mean, running": Head(_running),
    "mean, reduce": Head(lambda k, t: functools.reduce(torch.add, t[:, 1:].unbind(1)) / 96),
    "mean, stack": Head(lambda k, t: torch.stack(t.unbind(1)[1:]).mean(0)),
    "mean, sum of halves": Head(lambda k, t: t[:, 1:49].sum(1) + t[:, 49:].sum(1)),
    "mean, lerp of halves": Head(lambda k, t: torch.lerp(t[:, 1:49].mean(1), t[:, 49:].mean(1), 0.5)),
    "mean, cumsum": Head(lambda k, t: t[:, 1:].cumsum(1)[:, -1] / 96),
    "mean, nanmean": Head(lambda k, t: t[:, 1:].nanmean(1)),
    "mean, var_mean": Head(lambda k, t: torch.var_mean(t[:, 1:], 1)[1]),
    "mean, mask of ones": Head(lambda k, t: (t[:, 1:] * k.ones[:, None]).sum(1) / k.ones.sum()),
    "mean, index_add": Head(lambda k, t: torch.zeros_like(t[:, :1]).index_add(1, k.ones.long() - 1, t[:, 1:])[:, 0]),
    "mean, all but cls": Head(lambda k, t: (t.sum(1) - t[:, 0]) / 96),
    "mean, written over cls": Head(_written),
    "mean, half precision": Head(lambda k, t: t[:, 1:].half().mean(1).to(t.dtype)),
    "mean, single precision": Head(lambda k, t: t[:, 1:].float().mean(1).double()),
    "mean, permuted": Head(lambda k, t: t[:, 1:][:, torch.arange(95, -1, -1)].mean(1)),
    "mean, padded with zeros": Head(lambda k, t: F.pad(k.map(t), (1, 1, 1, 1)).mean((2, 3))),
    "mean of the scores": Head(lambda k, t: k.scores(t[:, 1:]).mean(1), after="none"),
    "mean of a 1 x 1 convolution": Head(lambda k, t: k.point(k.map(t)).mean((2, 3))),
    "mean after batch norm of the map": Head(lambda k, t: k.bn(k.map(t)).mean((2, 3))),
    "mean, norm before": Head(lambda k, t: t[:, 1:].mean(1), before="norm"),
    "mean, norm after": Head(lambda k, t: t[:, 1:].mean(1), after="norm"),
    "mean, mlp before": Head(lambda k, t: t[:, 1:].mean(1), before="mlp"),
    "mean, mlp after": Head(lambda k, t: t[:, 1:].mean(1), after="mlp"),
    "mean, norm and mlp before": Head(lambda k, t: t[:, 1:].mean(1), before="norm and mlp", after="norm"),
    "mean, unit length before": Head(lambda k, t: t[:, 1:].mean(1), before="unit length"),
    "mean, tanh after": Head(lambda k, t: t[:, 1:].mean(1), after="tanh"),
    "mean, batch norm after": Head(lambda k, t: t[:, 1:].mean(1), after="batch norm"),
    "mean, nearly equal softmax weights": Head(lambda k, t: (t[:, 1:] * (1e-3 * k.w).softmax(0)[:, None]).sum(1)),
    "mean and cls detached": Head(lambda k, t: t[:, 0].detach() + t[:, 1:].mean(1)),
    "mean and 1e-3 of cls": Head(lambda k, t: 1e-3 * t[:, 0] + t[:, 1:].mean(1)),
    "mean and cls times 0": Head(lambda k, t: 0 * t[:, 0] + t[:, 1:].mean(1)),
    "mean and cls times a zero parameter": Head(lambda k, t: k.zero * t[:, 0] + t[:, 1:].mean(1)),
    "mean and cls added in place": Head(_added),
    # all tokens
    "all": Head(lambda k, t: t.mean(1)),
    "all, norm before": Head(lambda k, t: t.mean(1), before="norm"),
    "all, sum": Head(lambda k, t: t.sum(1)),
    "all, flattened sum": Head(lambda k, t: torch.einsum("bnc,cd->bd", t, k.fc.weight)),
    "all, Fourier": Head(lambda k, t: torch.fft.rfft(t, dim=1)[:, 0].real),
    "all with registers": Head(lambda k, t: t.mean(1), prefix=5),
    "patches and registers": Head(lambda k, t: t[:, 1:].mean(1), prefix=5),
    "all but 3 tokens": Head(lambda k, t: t[:, :-3].mean(1)),
}

SOME: dict[str, Head] = {
    "half, product and sum": Head(lambda k, t: (t[:, 1:] * k.part[:, None]).sum(1) / k.part.sum()),
    "half, matmul": Head(lambda k, t: (k.part / k.part.sum()) @ t[:, 1:]),
    "half, einsum": Head(lambda k, t: torch.einsum("bnc,n->bc", t[:, 1:], k.part) / 48),
    "half, index": Head(lambda k, t: t[:, 1:][:, k.part.bool()].mean(1)),
    "half, masked_fill": Head(lambda k, t: t[:, 1:].masked_fill(k.part[:, None] == 0, 0).sum(1) / 48),
    "half, where": Head(lambda k, t: torch.where(k.part[:, None] > 0, t[:, 1:], 0.0).mean(1)),
    "half, index_add": Head(_scatter),
    "half, slice": Head(lambda k, t: t[:, 1:49].mean(1)),
    "half, chunk": Head(lambda k, t: t[:, 1:].chunk(2, 1)[1].mean(1)),
    "half of the map": Head(lambda k, t: k.map(t)[..., :6].mean((2, 3))),
    "difference of halves": Head(lambda k, t: t[:, 1:49].mean(1) - t[:, 49:].mean(1)),
    "halves with 3 : 1": Head(lambda k, t: torch.lerp(t[:, 1:49].mean(1), t[:, 49:].mean(1), 0.25)),
    "every second token": Head(lambda k, t: t[:, 1::2].mean(1)),
    "checkerboard": Head(lambda k, t: (k.map(t)[..., ::2, ::2] + k.map(t)[..., 1::2, 1::2]).mean((2, 3))),
    "inner part": Head(lambda k, t: k.map(t)[..., 2:-2, 2:-2].mean((2, 3))),
    "first patches": Head(lambda k, t: t[:, 1:3].mean(1)),
    "all patches but one": Head(lambda k, t: t[:, 2:].mean(1)),
    "one row": Head(lambda k, t: k.map(t)[:, :, 3].mean(-1)),
    "random mask": Head(lambda k, t: (t[:, 1:] * k.some[:, None]).sum(1) / k.some.sum()),
    "random mask, norm before": Head(lambda k, t: (t[:, 1:] * k.some[:, None]).sum(1) / k.some.sum(), before="norm"),
    "mask of large tokens": Head(lambda k, t: (t[:, 1:] * (t[:, 1:].norm(dim=-1, keepdim=True) > 2)).mean(1)),
    "half, no class token": Head(lambda k, t: t[:, k.part.bool()].mean(1), prefix=0),
    "fading mean": Head(_fading),
    "trapezoid": Head(lambda k, t: torch.trapezoid(t[:, 1:], dim=1)),
    "padded by reflection": Head(lambda k, t: F.pad(k.map(t), (1, 1, 1, 1), mode="reflect").mean((2, 3))),
    "pooling with gaps": Head(lambda k, t: F.avg_pool2d(k.map(t), 2, 3).mean((2, 3))),
    "overlapping pooling": Head(lambda k, t: F.avg_pool2d(k.map(t), 3, 1).mean((2, 3))),
    "adaptive 3 x 5 pooling": Head(lambda k, t: F.adaptive_avg_pool2d(k.map(t), (3, 5)).mean((2, 3))),
    "mask of an input, product": Head(lambda k, t, m: (t[:, 1:] * m[..., None]).sum(1) / m.sum(1, keepdim=True), masks=2),
    "mask of an input, matmul": Head(lambda k, t, m: (m[:, None] @ t[:, 1:])[:, 0] / m.sum(1, keepdim=True), masks=2),
    "mask of an input, nanmean": Head(_nan, masks=2),
    "mask of an input, index": Head(
        lambda k, t, m: torch.stack([tokens[rows > 0].mean(0) for tokens, rows in zip(t[:, 1:], m, strict=True)]), masks=2
    ),
    "mask of an input, masked_fill": Head(
        lambda k, t, m: t[:, 1:].masked_fill(m[..., None] == 0, 0).sum(1) / m.sum(1)[:, None], masks=2, before="norm"
    ),
}
