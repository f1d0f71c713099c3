"""Heads that weigh patches: learned weights, attention, maxima, powers, convolutions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers.adaptive_avgmax_pool import select_adaptive_pool2d
from timm.models.vision_transformer import global_pool_nlc
from torch import Tensor

from tests.capturing.heads.model import GRID, Head


def _latents(k: Any, t: Tensor, queries: Tensor) -> Tensor:
    """Let queries attend to the patches."""
    patches = t[:, k.prefix :]
    found: Tensor = k.latents((queries @ k.fc(patches).mT).softmax(-1) @ k.fc2(patches))
    return found


WEIGHTS: dict[str, Head] = {
    "linear over tokens": Head(lambda k, t: k.over(t[:, 1:].mT)[..., 0]),
    "linear over tokens, norm before": Head(lambda k, t: k.over(t[:, 1:].mT)[..., 0], before="norm"),
    "linear over tokens, no class token": Head(lambda k, t: k.over(t.mT)[..., 0], prefix=0),
    "weights, matmul": Head(lambda k, t: k.w @ t[:, 1:]),
    "weights, einsum": Head(lambda k, t: torch.einsum("bnc,n->bc", t[:, 1:], k.w)),
    "weights, product and sum": Head(lambda k, t: (t[:, 1:] * k.w[:, None]).sum(1)),
    "weights, product and mean": Head(lambda k, t: (t[:, 1:] * k.w[:, None]).mean(1)),
    "softmax of weights, product": Head(lambda k, t: (t[:, 1:] * k.w.softmax(0)[:, None]).sum(1)),
    "softmax of weights, matmul": Head(lambda k, t: k.w.softmax(0) @ t[:, 1:]),
    "sigmoid of weights": Head(lambda k, t: (t[:, 1:] * k.w.sigmoid()[:, None]).mean(1)),
    "distance to the center": Head(
        lambda k, t: (k.map(t) * torch.linspace(-2, 2, 12, dtype=t.dtype).square().neg().exp()).mean((2, 3))
    ),
    "rows, then columns with weights": Head(lambda k, t: k.map(t).mean(2) @ torch.linspace(0.1, 1, 12, dtype=t.dtype)),
    "columns weighted, then rows": Head(lambda k, t: (k.map(t) @ k.w[:12]).mean(-1)),
    "token mixing, then mean": Head(lambda k, t: k.mixer(t[:, 1:].mT).mean(-1)),
    "token mixing with gelu, then mean": Head(lambda k, t: F.gelu(k.mixer(t[:, 1:].mT)).mean(-1)),
    "flatten": Head(lambda k, t: t.flatten(1)),
    "flatten patches": Head(lambda k, t: t[:, 1:].flatten(1), before="norm"),
    "flatten a 2 x 2 pooling": Head(lambda k, t: F.adaptive_avg_pool2d(k.map(t), 2).flatten(1)),
    "flatten a 4 x 4 pooling": Head(lambda k, t: F.avg_pool2d(k.map(t), 4).flatten(1)),
    "convolution, then mean": Head(lambda k, t: k.conv(k.map(t)).mean((2, 3))),
    "convolution with relu, then mean": Head(lambda k, t: k.conv(k.map(t)).relu().mean((2, 3))),
    "convolution without padding, then mean": Head(lambda k, t: k.valid(k.map(t)).mean((2, 3))),
    "depthwise convolution, then mean": Head(lambda k, t: k.depthwise(k.map(t)).mean((2, 3))),
    "convolution of the whole map": Head(lambda k, t: k.whole(k.map(t)).flatten(1)),
    "convolution with a stride": Head(lambda k, t: F.conv2d(k.map(t), k.valid.weight, stride=2).mean((2, 3))),
    "convolution over tokens": Head(lambda k, t: k.conv1(t[:, 1:].mT).mean(-1)),
    "upsampled, then mean": Head(lambda k, t: F.interpolate(k.map(t), scale_factor=3, mode="bicubic").mean((2, 3))),
    "nearest of 5 x 5": Head(lambda k, t: F.interpolate(k.map(t), (5, 5), mode="nearest").mean((2, 3))),
    "recurrent": Head(lambda k, t: k.gru(t[:, 1:])[0][:, -1]),
    "second frequency": Head(lambda k, t: torch.fft.rfft(t[:, 1:], dim=1)[:, 1].real),
    "sum of a cumulative sum": Head(lambda k, t: t[:, 1:].cumsum(1).mean(1)),
    "first differences": Head(lambda k, t: t[:, 1:].diff(dim=1).mean(1)),
}

EXTREMES: dict[str, Head] = {
    "max": Head(lambda k, t: t[:, 1:].amax(1)),
    "max, no class token": Head(lambda k, t: t.amax(1), prefix=0),
    "max, values": Head(lambda k, t: t[:, 1:].max(1).values),
    "max, norm before": Head(lambda k, t: t[:, 1:].amax(1), before="norm"),
    "max of all tokens": Head(lambda k, t: t.amax(1)),
    "max, adaptive 1d": Head(lambda k, t: F.adaptive_max_pool1d(t[:, 1:].mT, 1).flatten(1)),
    "max, adaptive 2d": Head(lambda k, t: F.adaptive_max_pool2d(k.map(t), 1).flatten(1)),
    "max_pool2d, then mean": Head(lambda k, t: F.max_pool2d(k.map(t), 2).mean((2, 3))),
    "mean of windows, then max": Head(lambda k, t: F.avg_pool2d(k.map(t), 2).amax((2, 3))),
    "mean of rows, then max of columns": Head(lambda k, t: k.map(t).mean(2).amax(-1)),
    "sorted, last": Head(lambda k, t: t[:, 1:].sort(1).values[:, -1]),
    "sorted, mean of half": Head(lambda k, t: t[:, 1:].sort(1).values[:, 48:].mean(1)),
    "sorted, mean of all": Head(lambda k, t: t[:, 1:].sort(1).values.mean(1)),
    "min": Head(lambda k, t: t[:, 1:].amin(1)),
    "range": Head(lambda k, t: t[:, 1:].amax(1) - t[:, 1:].amin(1)),
    "aminmax": Head(lambda k, t: torch.cat(t[:, 1:].aminmax(dim=1), -1)),
    "median": Head(lambda k, t: t[:, 1:].median(1).values),
    "quantile": Head(lambda k, t: t[:, 1:].quantile(0.9, 1)),
    "kthvalue": Head(lambda k, t: t[:, 1:].kthvalue(80, 1).values),
    "topk of channels, mean": Head(lambda k, t: t[:, 1:].topk(8, 1).values.mean(1)),
    "mean of the tokens with the largest scores": Head(
        lambda k, t: t.gather(1, 1 + k.one(t[:, 1:]).topk(8, 1).indices.expand(-1, -1, t.shape[2])).mean(1)
    ),
    "running maximum": Head(lambda k, t: t[:, 1:].cummax(1).values[:, -1]),
    "maximum, loop": Head(lambda k, t: torch.stack([*t[:, 1:].unbind(1)]).amax(0)),
    "avgmax": Head(lambda k, t: 0.5 * (t[:, 1:].amax(1) + t[:, 1:].mean(1))),
    "max and mean, cat": Head(lambda k, t: torch.cat([t[:, 1:].amax(1), t[:, 1:].mean(1)], -1)),
    "max of the scores": Head(lambda k, t: k.scores(t[:, 1:]).amax(1), after="none"),
    "mean of the scores above 0": Head(lambda k, t: t[:, 1:].mean(1), before="scores above 0", after="none"),
    "logsumexp": Head(lambda k, t: t[:, 1:].logsumexp(1)),
    "logsumexp, sharp": Head(lambda k, t: (8 * t[:, 1:]).logsumexp(1) / 8),
    "logsumexp, written out": Head(lambda k, t: t[:, 1:].exp().mean(1).log()),
    "logsumexp of the scores": Head(lambda k, t: k.scores(t[:, 1:]).logsumexp(1), after="none"),
    "generalized mean": Head(lambda k, t: t[:, 1:].clamp(min=1e-6).pow(3).mean(1).pow(1 / 3)),
    "generalized mean, learned": Head(lambda k, t: t[:, 1:].abs().pow(2 + k.alpha).mean(1).pow(1 / (2 + k.alpha))),
    "lp_pool2d": Head(lambda k, t: F.lp_pool2d(k.map(t).abs(), 3.0, GRID).flatten(1)),
    "norm over tokens": Head(lambda k, t: t[:, 1:].norm(dim=1)),
    "mean of absolute values": Head(lambda k, t: t[:, 1:].abs().mean(1)),
    "mean of squares": Head(lambda k, t: t[:, 1:].square().mean(1)),
    "standard deviation": Head(lambda k, t: t[:, 1:].std(1)),
    "mean and deviation, cat": Head(lambda k, t: torch.cat([*torch.std_mean(t[:, 1:], 1)], -1)),
    "covariance": Head(lambda k, t: (t[:, 1:].mT @ t[:, 1:]).flatten(1) / 96),
    "product of tokens": Head(lambda k, t: (1 + t[:, 1:] / 20).prod(1)),
    "harmonic mean": Head(lambda k, t: 1 / (1 / (t[:, 1:].abs() + 0.1)).mean(1)),
    "soft median": Head(lambda k, t: t[:, 1:].sort(1).values[:, 32:64].mean(1)),
    **{
        f"timm: {kind}, {'all tokens' if whole else 'patches'}": Head(
            lambda k, t, kind=kind, whole=whole: global_pool_nlc(t, kind, 1, whole), before=before, after=after
        )
        for kind in ("token", "avg", "avgmax", "max")
        for whole in (False, True)
        for before, after in [("none", "norm") if kind != "token" else ("norm", "linear")]
    },
    **{
        f"timm: {kind} of the map": Head(lambda k, t, kind=kind: select_adaptive_pool2d(k.map(t), kind).flatten(1))
        for kind in ("avg", "avgmax", "catavgmax", "max")
    },
}

ATTENTION: dict[str, Head] = {
    "attention of a linear layer": Head(
        lambda k, t: k.latents((t[:, 1:] * k.one(t[:, 1:]).softmax(1)).sum(1, keepdim=True))[:, 0]
    ),
    "attention of a linear layer, matmul": Head(lambda k, t: k.latents(k.one(t[:, 1:]).mT.softmax(-1) @ t[:, 1:])[:, 0]),
    "attention with tanh": Head(
        lambda k, t: k.latents((t[:, 1:] * k.one(k.fc(t[:, 1:]).tanh()).softmax(1)).sum(1, keepdim=True))[:, 0]
    ),
    "attention of a latent": Head(lambda k, t: _latents(k, t, k.latent)[:, 0]),
    "attention of a latent, norm before and mlp after": Head(
        lambda k, t: _latents(k, t, k.latent)[:, 0], before="norm", after="mlp"
    ),
    "attention of a latent, no class token": Head(lambda k, t: _latents(k, t, k.latent)[:, 0], prefix=0),
    "attention of a latent, einsum": Head(
        lambda k, t: k.latents(
            torch.einsum("bqn,bnc->bqc", torch.einsum("qc,bnc->bqn", k.latent[0], k.fc(t)).softmax(-1), k.fc2(t))
        )[:, 0]
    ),
    "attention of a latent, sdpa": Head(
        lambda k, t: k.latents(
            F.scaled_dot_product_attention(k.latent[:, None].expand(len(t), -1, -1, -1), k.fc(t)[:, None], k.fc2(t)[:, None])[
                :, 0
            ]
        )[:, 0]
    ),
    "attention of a latent, MultiheadAttention": Head(
        lambda k, t: k.latents(k.mha(k.latent.expand(len(t), -1, -1), t, t)[0])[:, 0]
    ),
    "attention of a latent, without weights": Head(
        lambda k, t: k.latents(k.mha(k.latent.expand(len(t), -1, -1), t, t, need_weights=False)[0])[:, 0], before="norm"
    ),
    "attention of cls over patches": Head(lambda k, t: _latents(k, t, t[:, :1])[:, 0]),
    "attention of the mean over patches": Head(lambda k, t: _latents(k, t, t[:, 1:].mean(1, keepdim=True))[:, 0]),
    "attention of 3 latents, mean": Head(lambda k, t: _latents(k, t, k.latents3).mean(1)),
    "attention of 3 latents, cat": Head(lambda k, t: _latents(k, t, k.latents3).flatten(1)),
    "attention of 3 latents, first": Head(lambda k, t: _latents(k, t, k.latents3)[:, 0]),
    "attention of 3 latents, max": Head(lambda k, t: _latents(k, t, k.latents3).amax(1)),
    "attention of a latent, and cls": Head(lambda k, t: _latents(k, t, k.latent)[:, 0] + t[:, 0]),
    "attention of a latent, and mean": Head(lambda k, t: torch.cat([_latents(k, t, k.latent)[:, 0], t[:, 1:].mean(1)], -1)),
    "attention of a latent, unused": Head(lambda k, t: t[:, 0] + 0 * _latents(k, t, k.latent)[:, 0]),
    "attention of a latent, beside a maximum": Head(lambda k, t: _latents(k, t, k.latent)[:, 0] + t[:, 1:].amax(1)),
    "softmax of each channel": Head(lambda k, t: k.latents((t[:, 1:] * (2 * t[:, 1:]).softmax(1)).sum(1, keepdim=True))[:, 0]),
    "gated with sigmoid": Head(lambda k, t: (t[:, 1:] * k.one(t[:, 1:]).sigmoid()).mean(1)),
    "weights without softmax": Head(lambda k, t: (t[:, 1:] * (k.one(t[:, 1:]).relu() + 0.1)).mean(1)),
    "hard attention": Head(
        lambda k, t: (t[:, 1:] * F.one_hot(k.one(t[:, 1:])[..., 0].argmax(1), 96)[..., None].to(t.dtype)).sum(1)
    ),
    "divided by the sum of norms": Head(lambda k, t: t[:, 1:].sum(1) / t[:, 1:].norm(dim=-1).sum(1, keepdim=True)),
}
