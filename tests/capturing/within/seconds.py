"""Programs that combine the image's tokens with a further input of the model, and that move images of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.capturing.within.model import Change, Program, grid, planes, programs, raster, wide

Combine = Callable[[Any, Tensor, Tensor], Tensor]  # of the model, its tokens, and tokens of the further input


def _taken(x: Tensor, y: Tensor, half: bool = False) -> Tensor:
    return torch.where(torch.arange(96)[:, None] < (48 if half else 90), x, y)


def _cross(m: Any, t: Tensor, v: Tensor) -> Tensor:
    return (50 * F.normalize(t, dim=-1) @ F.normalize(v, dim=-1).mT).softmax(-1) @ v


def _written(m: Any, t: Tensor, v: Tensor) -> Tensor:
    out = t.clone()
    out[:, 48:] = v[:, 48:]
    return out


def _out(m: Any, t: Tensor, v: Tensor) -> Tensor:
    out = torch.zeros(1, 97, t.shape[2])
    out[:, :1] = m.cls
    torch.add(t, v, out=out[:, 1:])
    return out


# applied to a view in its own order and to a turned one
COMBINED: dict[str, Combine] = {
    "add": lambda m, t, v: t + v,
    "add twice": lambda m, t, v: t + 2 * v,
    "add by keyword": lambda m, t, v: torch.add(input=t, other=v, alpha=0.5),
    "add in place": lambda m, t, v: t.clone().add_(v),
    "add out": _out,
    "sub": lambda m, t, v: t - v,
    "rsub": lambda m, t, v: torch.rsub(t, v),
    "mul": lambda m, t, v: t * v,
    "div": lambda m, t, v: t / (v.abs() + 1),
    "gate": lambda m, t, v: t * v.sigmoid(),
    "own gate": lambda m, t, v: v * t.sigmoid(),
    "glu": lambda m, t, v: F.glu(torch.cat([t, v], 2), 2),
    "where": lambda m, t, v: torch.where(v > 0, t, -t),
    "where of both": lambda m, t, v: torch.where(t > 0, t, v),
    "where by place": lambda m, t, v: _taken(t, v),
    "where by half": lambda m, t, v: _taken(t, v, True),
    "lerp": lambda m, t, v: torch.lerp(t, v, 0.4),
    "lerp by keyword": lambda m, t, v: torch.lerp(t, end=v, weight=0.7),
    "addcmul": lambda m, t, v: torch.addcmul(t, v, torch.ones(1)),
    "addcdiv": lambda m, t, v: torch.addcdiv(t, v, torch.ones(1), value=0.5),
    "maximum": lambda m, t, v: torch.maximum(t, v),
    "minimum": lambda m, t, v: torch.minimum(t, v),
    "fmax": lambda m, t, v: torch.fmax(t, v),
    "hypot": lambda m, t, v: torch.hypot(t, v),
    "atan2": lambda m, t, v: torch.atan2(t, v),
    "logaddexp": lambda m, t, v: torch.logaddexp(t, v),
    "copysign": lambda m, t, v: torch.copysign(t, v),
    "complex": lambda m, t, v: torch.complex(t, v).abs(),
    "stack and mean": lambda m, t, v: torch.stack([t, v]).mean(0),
    "stack and amax": lambda m, t, v: torch.stack([t, v], 1).amax(1),
    "cat": lambda m, t, v: torch.cat([t, v], 1),
    "cat before": lambda m, t, v: torch.cat([v, t], 1),
    "cat of halves": lambda m, t, v: torch.cat([t[:, :48], v[:, 48:]], 1),
    "cat of channels": lambda m, t, v: torch.cat([t[..., :8], v[..., 8:]], 2),
    "cat of channels and a layer": lambda m, t, v: torch.cat([t, v], 2) @ torch.cat([torch.eye(16), 2 * torch.eye(16)]),
    "interleaved": lambda m, t, v: torch.stack([t, v], 2).flatten(1, 2),
    "written": _written,
    "masked_scatter": lambda m, t, v: t.masked_scatter(torch.arange(96)[None, :, None] >= 48, v[:, 48:]),
    "index_copy": lambda m, t, v: t.index_copy(1, torch.arange(48), v[:, :48]),
    "scatter_add": lambda m, t, v: t.scatter_add(1, wide(m.order, t), v),
    "foreach add": lambda m, t, v: torch._foreach_add([t], [v])[0],
    "sum of three": lambda m, t, v: torch.stack(torch.broadcast_tensors(t, v, m.pos)).sum(0),
    "einsum": lambda m, t, v: torch.einsum("bnc,bnc->bnc", t, v),
    "bilinear": lambda m, t, v: F.bilinear(t, v, torch.eye(16)[:, :, None] * torch.eye(16)[:, None]),
    "film": lambda m, t, v: t * (1 + 0.1 * m.part(v)) + m.part(v),
    "layer norm of the sum": lambda m, t, v: m.norm(t + v),
    "the other alone": lambda m, t, v: v + 0 * t,
    "the other behind a residual": lambda m, t, v: v + 1e-3 * t,
    "cross attention": _cross,
    "cross attention with a residual": lambda m, t, v: t * 1e-2 + _cross(m, t, v),
    "an order of the other": lambda m, t, v: t[:, v[0].sum(-1).argsort()],
    "a mask of the other": lambda m, t, v: t * (v.sum(-1, keepdim=True) > 0),
    "the other's numbers": lambda m, t, v: torch.cat([torch.tensor(v[:, :1].tolist()), t], 1),
    "the other by numpy": lambda m, t, v: t + torch.from_numpy(v.numpy()),
}
TURNED: dict[str, Callable[[Tensor], Tensor]] = {"own order": lambda v: v, "turned": lambda v: v.flip(1)}

# the further input is the same for all tokens
ALIKE: dict[str, tuple[str, Change]] = {
    "vector added": ("vector", lambda m, t, v: t + v[:, None]),
    "vector added, turned": ("vector", lambda m, t, v: t.flip(1) + v[:, None]),
    "vector gate": ("vector", lambda m, t, v: t * v[:, None].sigmoid()),
    "vector film": ("vector", lambda m, t, v: t * (1 + m.part(v)[:, None]) + v[:, None]),
    "vector in place": ("vector", lambda m, t, v: t.clone().mul_(v[:, None])),
    "vector lerp": ("vector", lambda m, t, v: torch.lerp(t, v[:, None], 0.3)),
    "vector addcmul": ("vector", lambda m, t, v: torch.addcmul(t, v[:, None], torch.ones(1))),
    "vector where": ("vector", lambda m, t, v: torch.where(v[:, None] > 0, t, -t)),
    "vector maximum": ("vector", lambda m, t, v: torch.maximum(t, v[:, None] - 2)),
    "vector expanded": ("vector", lambda m, t, v: t + v[:, None].expand_as(t)),
    "vector on maps": ("vector", lambda m, t, v: raster(planes(t) * v[:, :, None, None])),
    "vector as a token": ("vector", lambda m, t, v: torch.cat([v[:, None], t], 1)),
    "vector as a token behind": ("vector", lambda m, t, v: torch.cat([t, v[:, None]], 1)),
    "vector adaptive norm": ("vector", lambda m, t, v: m.norm(t) * v[:, None] + m.part(v)[:, None]),
    "number added": ("vector", lambda m, t, v: t + float(v[0, 0])),
    "number times": ("vector", lambda m, t, v: t.flip(1) * v[0, 0]),
    "mean of a view": ("view", lambda m, t, v: t * v.mean((1, 2, 3))[:, None, None].sigmoid()),
    "mean of a view's tokens": ("view", lambda m, t, v: t + m.embed(v).flatten(2).mean(2)[:, None]),
    "maximum of a view's tokens": ("view", lambda m, t, v: t * m.embed(v).flatten(2).amax(2)[:, None]),
    "one token of a view": ("view", lambda m, t, v: t + m.embed(v)[:, None, :, 3, 3]),
    "shift by a vector": ("vector", lambda m, t, v: t.roll(int(v[0, 0].abs() * 0) + 3, 1)),
}
OTHERS: dict[str, tuple[str, Change]] = {
    "depth added": ("depth", lambda m, t, d: t + m.deep(d).flatten(2).mT),
    "depth added, turned": ("depth", lambda m, t, d: t + m.deep(d).flatten(2).mT.flip(1)),
    "depth gate": ("depth", lambda m, t, d: t * F.avg_pool2d(d, 4).flatten(2).mT.sigmoid()),
    "depth gate, turned": ("depth", lambda m, t, d: t * 9 * F.avg_pool2d(d, 4).flatten(2).mT.flip(1)),
    "depth gate of columns": ("depth", lambda m, t, d: (grid(t) * F.avg_pool2d(d, 4)[:, 0, :1, :, None]).flatten(1, 2)),
    "depth mask": ("depth", lambda m, t, d: torch.where(F.avg_pool2d(d, 4).flatten(2).mT > 0, t, m.cls)),
    "depth as tokens": ("depth", lambda m, t, d: torch.cat([t, m.deep(d).flatten(2).mT], 1)),
    "depth order": ("depth", lambda m, t, d: t[:, F.avg_pool2d(d, 4).flatten().argsort()]),
    "tokens added": ("tokens", lambda m, t, s: t + 0.5 * s),
    "tokens added, turned": ("tokens", lambda m, t, s: t + 0.5 * s.flip(1)),
    "tokens beside": ("tokens", lambda m, t, s: torch.cat([t, s[:, :5]], 1)),
    "tokens before": ("tokens", lambda m, t, s: torch.cat([s[:, :5], t], 1)),
    "tokens over": ("tokens", lambda m, t, s: torch.cat([s[:, :5], t[:, 5:]], 1)),
    "tokens gate": ("tokens", lambda m, t, s: t * s.sigmoid()),
    "tokens times": ("tokens", lambda m, t, s: t * s.mean(1, keepdim=True)),
    "tokens that choose": ("tokens", lambda m, t, s: torch.where(s[..., :1] > 0, t, t.flip(1))),
}

BATCHES: dict[str, Change] = {
    "turned images": lambda m, t: t.flip(0),
    "rolled images": lambda m, t: t.roll(1, 0),
    "index of images": lambda m, t: t[[1, 0]],
    "index_select of images": lambda m, t: t.index_select(0, torch.tensor([1, 0])),
    "one image twice": lambda m, t: t[[0, 0]],
    "turned images and tokens": lambda m, t: t.flip(0, 1),
    "a mean of images": lambda m, t: t + t.mean(0, keepdim=True),
    "the other image added": lambda m, t: t + t.flip(0),
    "the other image behind a residual": lambda m, t: 1e-2 * t + t.flip(0),
    "half of the other image": lambda m, t: torch.cat([t[:, :48], t.flip(0)[:, 48:]], 1),
    "batch norm": lambda m, t: F.batch_norm(t.mT, None, None, training=True).mT,
    "mixup": lambda m, t: 0.7 * t + 0.3 * t.flip(0),
    "mixup that turns": lambda m, t: 0.3 * t + 0.7 * t.flip(0),
    "images in one sequence": lambda m, t: t.flatten(0, 1)[None],
    "tokens in their order": lambda m, t: t[:, m.order],
    "tokens in an order of each image": lambda m, t: t.gather(1, torch.stack([m.order, m.order.flip(0)])[..., None].expand_as(t)),
    "a matrix of images": lambda m, t: torch.einsum("ab,bnc->anc", torch.eye(2).flip(0), t),
    "unbind and stack": lambda m, t: torch.stack(t.unbind(0)[::-1]),
    "chunk and cat": lambda m, t: torch.cat(t.chunk(2)[::-1]),
    "a class token each": lambda m, t: torch.cat([m.cls.expand(2, -1, -1), t], 1),
    "written": lambda m, t: _batch_written(t),
    "the first image alone": lambda m, t: t[:1],
    "twice": lambda m, t: t.repeat(2, 1, 1),
    "interleaved": lambda m, t: t.repeat_interleave(2, 0),
}


def _batch_written(t: Tensor) -> Tensor:
    out = torch.zeros_like(t)
    out[0] = t[1]
    out[1] = t[0]
    return out


def _of_view(combine: Combine, turn: Callable[[Tensor], Tensor]) -> Change:
    return lambda m, t, v: combine(m, t, turn(m.embed(v).flatten(2).mT))


def second_inputs() -> Iterator[Program]:
    for name, combine in COMBINED.items():
        for how, turn in TURNED.items():
            change, attention = _of_view(combine, turn), 1 + ("attention" in name)
            yield Program("two inputs", f"{name}, {how}", change, ("view",), attention=attention, residual=False)
    for name, (sort, change) in {**ALIKE, **OTHERS}.items():
        yield Program("two inputs", name, change, (sort,), residual=False)


def batches() -> Iterator[Program]:
    yield from programs("batches", BATCHES, batch=2, residual=False)
