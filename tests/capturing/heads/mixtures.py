"""Heads that read the class token and the patches together: sums, products, gates, branches, and detached parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.capturing.heads.model import Head


def _both(t: Tensor) -> tuple[Tensor, Tensor]:
    return t[:, 0], t[:, 1:].mean(1)


def _without_cls(k: Any, t: Tensor) -> Tensor:
    cls, mean = _both(t)
    weight = torch.cat([torch.zeros_like(k.fc.weight), k.fc.weight], 1)
    return F.linear(torch.cat([cls, mean], -1), weight)


def _little_cls(k: Any, t: Tensor) -> Tensor:
    weight = torch.cat([0.1 * k.fc.weight, k.fc.weight], 1)
    return F.linear(torch.cat([*_both(t)], -1), weight)


def _no_grad(_: Any, t: Tensor) -> Tensor:
    with torch.no_grad():
        cls = 3 * t[:, 0]
    return cls + t[:, 1:].mean(1)


def _branch(k: Any, t: Tensor) -> Tensor:
    cls, mean = _both(t)
    return cls if float(k.scores(mean).detach()[:, 0].sum()) > 0 else mean


def _classes(k: Any, t: Tensor) -> Tensor:
    cls, mean = _both(t)
    return torch.cat([k.scores(cls)[:, :1], k.scores2(mean)[:, 1:]], -1)


MIXTURES: dict[str, Head] = {
    "cls + mean": Head(lambda k, t: t[:, 0] + t[:, 1:].mean(1)),
    "cls + mean, norm before": Head(lambda k, t: t[:, 0] + t[:, 1:].mean(1), before="norm"),
    "cls + mean, halved": Head(lambda k, t: (t[:, 0] + t[:, 1:].mean(1)) / 2, after="norm"),
    "cls - mean": Head(lambda k, t: t[:, 0] - t[:, 1:].mean(1)),
    "cls + sum": Head(lambda k, t: t[:, 0] + t[:, 1:].sum(1)),
    "cat of cls and mean": Head(lambda k, t: torch.cat([*_both(t)], -1)),
    "cat of cls and mean, norm before (DINOv2)": Head(lambda k, t: torch.cat([*_both(t)], -1), before="norm"),
    "cat of mean and cls": Head(lambda k, t: torch.cat([t[:, 1:].mean(1), t[:, 0]], -1)),
    "cat of cls and mean, mlp after": Head(lambda k, t: torch.cat([*_both(t)], -1), after="mlp"),
    "cat of cls and mean beside registers": Head(lambda k, t: torch.cat([t[:, 0], t[:, 5:].mean(1)], -1), prefix=5),
    "cat of cls and mean, cls has zero weights": Head(_without_cls),
    "cat of cls and mean, cls has small weights": Head(_little_cls),
    "cat of cls, mean and max": Head(lambda k, t: torch.cat([*_both(t), t[:, 1:].amax(1)], -1)),
    "stack and mean": Head(lambda k, t: torch.stack([*_both(t)]).mean(0)),
    "stack and max": Head(lambda k, t: torch.stack([*_both(t)]).amax(0)),
    "maximum of cls and mean": Head(lambda k, t: torch.maximum(*_both(t))),
    "mean of cls repeated and patches": Head(lambda k, t: torch.cat([t[:, :1].expand(-1, 96, -1), t[:, 1:]], 1).mean(1)),
    "0.9 cls + 0.1 mean": Head(lambda k, t: 0.9 * t[:, 0] + 0.1 * t[:, 1:].mean(1)),
    "0.1 cls + 0.9 mean": Head(lambda k, t: 0.1 * t[:, 0] + 0.9 * t[:, 1:].mean(1)),
    "1e-2 cls + mean": Head(lambda k, t: 2e-2 * t[:, 0] + t[:, 1:].mean(1)),
    "lerp, learned": Head(lambda k, t: torch.lerp(*_both(t), k.alpha)),
    "layer scale of the mean": Head(lambda k, t: t[:, 0] + k.w[:16] * 0.05 * t[:, 1:].mean(1)),
    "cls and half of the patches": Head(lambda k, t: t[:, 0] + t[:, 1:49].mean(1)),
    "cls and max": Head(lambda k, t: t[:, 0] + t[:, 1:].amax(1)),
    "cls and linear over tokens": Head(lambda k, t: t[:, 0] + k.over(t[:, 1:].mT)[..., 0]),
    "cls, registers and mean": Head(lambda k, t: torch.cat([t[:, 0], t[:, 1:5].mean(1), t[:, 5:].mean(1)], -1), prefix=5),
    "registers and mean": Head(lambda k, t: t[:, 1:5].mean(1) + t[:, 5:].mean(1), prefix=5),
    # products and gates
    "cls * mean": Head(lambda k, t: t[:, 0] * t[:, 1:].mean(1)),
    "cls * sum": Head(lambda k, t: t[:, 0] * t[:, 1:].sum(1)),
    "(1 + cls) * mean": Head(lambda k, t: (1 + t[:, 0]) * t[:, 1:].mean(1)),
    "sigmoid(cls) * mean": Head(lambda k, t: t[:, 0].sigmoid() * t[:, 1:].mean(1)),
    "sigmoid(mean) * cls": Head(lambda k, t: t[:, 1:].mean(1).sigmoid() * t[:, 0]),
    "sigmoid(cls), detached, * mean": Head(lambda k, t: t[:, 0].sigmoid().detach() * t[:, 1:].mean(1)),
    "gate of both": Head(lambda k, t: torch.lerp(*_both(t), k.two(torch.cat([*_both(t)], -1)).sigmoid())),
    "gated linear unit": Head(lambda k, t: F.glu(torch.cat([*_both(t)], -1))),
    "mean of cls times each patch": Head(lambda k, t: (t[:, :1] * t[:, 1:]).mean(1)),
    "mean of patches with added cls": Head(lambda k, t: (t[:, :1] + t[:, 1:]).relu().mean(1)),
    "bilinear": Head(lambda k, t: k.bilinear(*_both(t))),
    "outer product": Head(lambda k, t: torch.einsum("bc,bd->bcd", *_both(t)).flatten(1)),
    "cosine": Head(lambda k, t: F.cosine_similarity(*_both(t))[:, None]),
    "scale and shift by cls": Head(lambda k, t: k.fc(t[:, 0]) * t[:, 1:].mean(1) + k.fc2(t[:, 0])),
    "squeeze and excitation": Head(lambda k, t: (t[:, 1:] * k.fc(t[:, 1:].mean(1, keepdim=True)).sigmoid()).mean(1)),
    "where of channels": Head(lambda k, t: torch.where(k.channels, t[:, 1:].mean(1), t[:, 0])),
    "channels of each": Head(lambda k, t: torch.cat([t[:, 0, :8], t[:, 1:, 8:].mean(1)], -1)),
    "2 channels of cls, 14 of the mean": Head(lambda k, t: torch.cat([t[:, 0, :2], t[:, 1:, 2:].mean(1)], -1)),
    "where of values": Head(lambda k, t: torch.where(t[:, 0] > 0, t[:, 0], t[:, 1:].mean(1))),
    "branch on a value": Head(_branch),
    "branch on an input": Head(lambda k, t, m: t[:, 0] if bool(m[0, 0] > 0) else t[:, 1:].mean(1), masks=2),
    "cls or mean of each image, by an input": Head(lambda k, t, m: torch.where(m[:, :1] > 0, t[:, 0], t[:, 1:].mean(1)), masks=2),
    "cls and mean, weighted by an input": Head(lambda k, t, m: torch.lerp(*_both(t), m.mean(1, keepdim=True)), masks=2),
    # parts without a gradient
    "mean, cls in no_grad": Head(_no_grad),
    "mean, cls straight through": Head(lambda k, t: t[:, 1:].mean(1) + (t[:, 0] - t[:, 1:].mean(1)).detach()),
    "cls, mean straight through": Head(lambda k, t: t[:, 0] + (t[:, 1:].mean(1) - t[:, 0]).detach()),
    "both detached": Head(lambda k, t: (t[:, 0] + t[:, 1:].mean(1)).detach()),
    "half of the patches detached": Head(lambda k, t: torch.cat([t[:, 1:49].detach(), t[:, 49:]], 1).mean(1)),
    "cls cancelled": Head(lambda k, t: t[:, 1:].mean(1) + t[:, 0] - t[:, 0].clone()),
    "mean cancelled": Head(lambda k, t: t[:, 0] + t[:, 1:].mean(1) - t[:, 1:].sum(1) / 96),
    "sign of cls": Head(lambda k, t: t[:, 1:].mean(1) * t[:, 0].sign()),
    "rounded cls": Head(lambda k, t: t[:, 1:].mean(1) + t[:, 0].round()),
    # scores
    "scores of cls and mean, averaged": Head(lambda k, t: (k.scores(t[:, 0]) + k.scores2(t[:, 1:].mean(1))) / 2, after="none"),
    "scores of cls and of each patch": Head(lambda k, t: k.scores(t[:, 0]) + k.scores2(t[:, 1:]).mean(1), after="none"),
    "scores of cls and the largest of patches": Head(
        lambda k, t: k.scores(t[:, 0]) + 0.5 * k.scores2(t[:, 1:]).amax(1), after="none"
    ),
    "probabilities averaged": Head(
        lambda k, t: (k.scores(t[:, 0]).softmax(-1) + k.scores2(t[:, 1:].mean(1)).softmax(-1)) / 2, after="none"
    ),
    "each class reads another token": Head(_classes, after="none"),
    "each class reads another register": Head(lambda k, t: (t[:, 1:4] * k.scores.weight).sum(-1), prefix=5, after="none"),
    "each class reads another half": Head(
        lambda k, t: torch.cat([k.scores(t[:, 1:49].mean(1))[:, :2], k.scores(t[:, 49:].mean(1))[:, 2:]], -1), after="none"
    ),
}
