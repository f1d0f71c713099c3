"""Programs that write tokens through views, into prepared buffers, and with scatter operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from tests.capturing.moving import GRID, WIDTH
from tests.capturing.within.model import TOKENS, Program, planes, programs, wide

Write = Callable[[Tensor, Tensor, Any], Any]  # writes tokens (second) into a view (first) of the same shape


def _out(func: Callable[..., Any], *more: Any, **named: Any) -> Write:
    """Return a writer that passes the view as `out`."""
    return lambda v, t, _: func(t, *more, out=v, **named)


def _each(v: Tensor, t: Tensor, m: Any) -> None:
    for row, of in zip(v.unbind(1), m.order.tolist(), strict=True):
        row.copy_(t[:, of])


def _halves(v: Tensor, t: Tensor, _: Any) -> None:
    one, other = v.chunk(2, 1)
    one.copy_(t[:, 48:])
    other.copy_(t[:, :48])


def _interleaved(v: Tensor, t: Tensor, _: Any) -> None:
    v[:, ::2] = t[:, 1::2]
    v[:, 1::2] = t[:, ::2]


def _by_columns(v: Tensor, t: Tensor, _: Any) -> None:
    for column in range(WIDTH):
        v.select(2, column).copy_(t[..., column].flip(1))


def _twice(v: Tensor, t: Tensor, _: Any) -> None:
    v.copy_(t)
    v.copy_(t.flip(1))


def _back(v: Tensor, t: Tensor, _: Any) -> None:
    v.copy_(t.flip(1))
    v.copy_(t)


WRITES: dict[str, Write] = {
    "add out": lambda v, t, m: torch.add(t, m.pos, out=v),
    "add out, turned": lambda v, t, m: torch.add(t.flip(1), m.pos, out=v),
    "add out with alpha": lambda v, t, m: torch.add(m.pos, t.flip(1), alpha=2, out=v),
    "sub out": lambda v, t, m: torch.sub(t.roll(3, 1), m.pos, out=v),
    "mul out": _out(torch.mul, 2.0),
    "div out": _out(torch.div, 2.0),
    "neg out": lambda v, t, _: torch.neg(t.flip(1), out=v),
    "exp out": _out(torch.exp),
    "tanh out": lambda v, t, _: torch.tanh(t.roll(7, 1), out=v),
    "clamp out": _out(torch.clamp, min=-1.0),
    "where out": lambda v, t, _: torch.where(t.flip(1) > 9, torch.zeros(1), t.flip(1), out=v),
    "lerp out": lambda v, t, m: torch.lerp(m.pos, t.flip(1), 0.9, out=v),
    "addcmul out": lambda v, t, m: torch.addcmul(m.pos, t.flip(1), torch.ones(1), out=v),
    "index_select out": lambda v, t, m: torch.index_select(t, 1, m.order, out=v),
    "gather out": lambda v, t, m: torch.gather(t, 1, wide(m.order, t), out=v),
    "take_along_dim out": lambda v, t, m: torch.take_along_dim(t, wide(m.order, t), 1, out=v),
    "take out": lambda v, t, _: torch.take(t, torch.arange(t.numel()).view_as(t).flip(1), out=v),
    "cat out": lambda v, t, _: torch.cat([t[:, 48:], t[:, :48]], 1, out=v),
    "stack out": lambda v, t, m: torch.stack([t[:, i] for i in m.order.tolist()], 1, out=v),
    "bmm out": lambda v, t, m: torch.bmm(m.mix[None], t, out=v),
    "matmul out": lambda v, t, m: torch.matmul(m.mix, t, out=v),
    "einsum copied": lambda v, t, m: v.copy_(torch.einsum("nm,bmc->bnc", m.mix, t)),
    "sort out": lambda v, t, _: torch.sort(t, 1, out=(v, torch.empty(0, dtype=torch.long))),
    "cumsum out": lambda v, t, _: torch.cumsum(t, 1, out=v),
    "baddbmm out": lambda v, t, m: torch.baddbmm(m.pos, m.mix[None], t, out=v),
    "copy_": lambda v, t, _: v.copy_(t.flip(1)),
    "copy_ by keyword": lambda v, t, _: v.copy_(other=t.flip(1)),
    "slice": lambda v, t, _: v.__setitem__(slice(None), t.flip(1)),
    "ellipsis": lambda v, t, _: v.__setitem__(..., t),
    "add_": lambda v, t, _: v.zero_().add_(t.flip(1)),
    "mul_ and add_": lambda v, t, _: v.mul_(0).add_(t),
    "sub_": lambda v, t, _: v.zero_().sub_(other=t.flip(1)),
    "lerp_": lambda v, t, _: v.lerp_(t.flip(1), 1.0),
    "addcmul_": lambda v, t, _: v.zero_().addcmul_(t.flip(1), torch.ones_like(t)),
    "baddbmm_": lambda v, t, m: v.baddbmm_(m.mix[None], t, beta=0),
    "each row": _each,
    "halves": _halves,
    "interleaved": _interleaved,
    "each channel": _by_columns,
    "twice": _twice,
    "there and back": _back,
    "transposed": lambda v, t, _: v.mT.copy_(t.flip(1).mT),
    "grid": lambda v, t, _: v.unflatten(1, GRID).copy_(t.unflatten(1, GRID).flip(2)),
    "flat": lambda v, t, _: v[0].copy_(t[0].flip(0)),
    "swapped axes": lambda v, t, _: v.swapaxes(0, 1).copy_(t.flip(1).swapaxes(0, 1)),
    "index": lambda v, t, m: v.__setitem__((slice(None), m.order), t),
    "index of a list": lambda v, t, m: v.__setitem__((slice(None), m.order.tolist()), t),
    "mask": lambda v, t, _: v.__setitem__(torch.ones(v.shape[:2], dtype=torch.bool), t.flip(1)[0]),
    "index_copy_": lambda v, t, m: v.index_copy_(1, m.order, t),
    "index_copy_ by keyword": lambda v, t, m: v.index_copy_(dim=1, index=m.order, source=t),
    "index_add_": lambda v, t, m: v.zero_().index_add_(1, m.order, t),
    "index_add_ by keyword": lambda v, t, m: v.zero_().index_add_(dim=1, index=m.order, source=t, alpha=2),
    "index_reduce_": lambda v, t, m: v.zero_().index_reduce_(1, m.order, t, "mean", include_self=False),
    "index_put_": lambda v, t, m: v.index_put_((torch.tensor([0])[:, None], m.order[None]), t),
    "index_put_ that adds": lambda v, t, m: v.zero_().index_put_((torch.tensor(0), m.order), t[0], accumulate=True),
    "index_fill_ after": lambda v, t, _: v.copy_(t.flip(1)).index_fill_(1, torch.tensor([5]), 0.0),
    "scatter_": lambda v, t, m: v.scatter_(1, wide(m.order, t), t),
    "scatter_ by keyword": lambda v, t, m: v.scatter_(dim=1, index=wide(m.order, t), src=t),
    "scatter_add_": lambda v, t, m: v.zero_().scatter_add_(1, wide(m.order, t), t),
    "scatter_add_ by keyword": lambda v, t, m: v.zero_().scatter_add_(dim=1, index=wide(m.order, t), src=t),
    "scatter_add_ onto what is there": lambda v, t, m: v.scatter_add_(1, wide(m.order, t), t),
    "scatter_reduce_": lambda v, t, m: v.scatter_reduce_(1, wide(m.order, t), t, "amax", include_self=False),
    "scatter_reduce_ by keyword": lambda v, t, m: v.zero_().scatter_reduce_(dim=1, index=wide(m.order, t), src=t, reduce="sum"),
    "masked_scatter_": lambda v, t, _: v.masked_scatter_(torch.ones_like(v, dtype=torch.bool), t.flip(1)),
    "masked_scatter_ by keyword": lambda v, t, _: v.masked_scatter_(mask=torch.ones(v.shape) > 0, source=t.flip(1)),
    "put_": lambda v, t, _: v.put_(torch.arange(t.numel()).view_as(t).flip(1), t),
    "put_ that adds": lambda v, t, _: v.zero_().put_(torch.arange(t.numel()).view_as(t).flip(1), t, accumulate=True),
    "foreach copy": lambda v, t, _: torch._foreach_copy_(list(v.unbind(1)), list(t.flip(1).unbind(1))),
    "foreach add": lambda v, t, _: torch._foreach_add_([v.zero_()], [t.flip(1)]),
    "aten copy_": lambda v, t, _: torch.ops.aten.copy_(v, t.flip(1)),
    "aten add out": lambda v, t, m: torch.ops.aten.add.out(t.flip(1), m.pos, out=v),
    "data": lambda v, t, _: v.data.copy_(t.flip(1)),
    "detached": lambda v, t, _: v.detach().copy_(t.flip(1)),
    "alias": lambda v, t, _: torch.ops.aten.alias(v).copy_(t.flip(1)),
    "strided": lambda v, t, _: v.as_strided(v.shape, v.stride(), v.storage_offset()).copy_(t.flip(1)),
    "diagonal of blocks": lambda v, t, _: v.view(1, 8, 12, WIDTH).transpose(1, 2).copy_(t.view(1, 12, 8, WIDTH)),
    "relu_ after": lambda v, t, _: v.copy_(t.flip(1)).relu_(),
    "normal_ then copy_": lambda v, t, _: v.normal_().copy_(t.flip(1)),
    "where into": lambda v, t, m: v.copy_(torch.where(m.table[:, 1:] > 0, t, t.flip(1))),
}
BUFFERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "zeros": lambda _, t: torch.zeros(1, TOKENS + 1, WIDTH),
    "empty": lambda _, t: t.new_empty(1, TOKENS + 1, WIDTH).fill_(1.0),
    "learned": lambda m, t: m.table.clone(),
    "tokens": lambda m, t: torch.cat([m.cls, t], 1),
    "channels first": lambda _, t: t.new_zeros(1, WIDTH, TOKENS + 1).mT,
}


def _into(buffer: str, write: Write, order: int) -> Callable[[Any, Tensor], Tensor]:
    """Write tokens behind a class token: class token first or last, read from the base, an earlier or a later view."""

    def change(m: Any, t: Tensor) -> Tensor:
        out = BUFFERS[buffer](m, t)
        early = out.view(1, -1, WIDTH) if out.is_contiguous() else out[:]
        if order % 2:
            out[:, :1] = m.cls
        write(out[:, 1:], t, m)
        if not order % 2:
            out.narrow(1, 0, 1).copy_(m.cls)
        return (out, early, out.unsqueeze(0)[0])[order % 3]

    return change


def _alone(write: Write, early: bool) -> Callable[[Any, Tensor], Tensor]:
    """Write tokens into a tensor of their own, through a view that is made before or after another write."""

    def change(m: Any, t: Tensor) -> Tensor:
        out = torch.zeros_like(t)
        view = out[:, :]
        out.add_(m.pos)
        write(view if early else out[..., :], t, m)
        return view if early else out

    return change


def _onto(write: Write) -> Callable[[Any, Tensor], Tensor]:
    """Write tokens over a copy of themselves."""

    def change(m: Any, t: Tensor) -> Tensor:
        out = t.clone()
        write(out.view(1, *GRID, WIDTH).flatten(1, 2), t, m)
        return out

    return change


def written() -> Iterator[Program]:
    """Yield each writer with two buffers, alone and onto tokens."""
    orders = cycle(range(6))
    buffers = cycle(BUFFERS)
    for name, write in WRITES.items():
        fits = name not in ("put_", "put_ that adds")  # they count the elements of the base
        for _ in range(2):
            buffer, order = next(buffers), next(orders)
            ending = f"into {buffer}, {'class token first' if order % 2 else 'class token last'}, read {order % 3}"
            yield Program("writes", f"{name} {ending}", _into(buffer, write, order))
        yield Program("writes", f"{name} alone", _alone(write, len(name) % 2 == 0))
        if fits:
            yield Program("writes", f"{name} onto tokens", _onto(write))
    yield from programs("writes", FUNCTIONAL)


FUNCTIONAL: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "slice_scatter": lambda m, t: torch.slice_scatter(m.table, t.flip(1), 1, 1),
    "slice_scatter by keyword": lambda m, t: torch.slice_scatter(m.table, src=t, dim=1, start=1),
    "select_scatter": lambda m, t: torch.select_scatter(t, m.cls[:, 0], 1, 0),
    "as_strided_scatter": lambda m, t: torch.as_strided_scatter(m.table, t.flip(1), t.shape, m.table.stride(), WIDTH),
    "scatter": lambda m, t: torch.scatter(torch.zeros_like(t), 1, wide(m.order, t), t),
    "scatter into learned": lambda m, t: m.table.scatter(dim=1, index=wide(m.order, t) + 1, src=t),
    "scatter_add": lambda m, t: torch.zeros(1, 97, WIDTH).scatter_add(1, wide(m.order, t) + 1, t),
    "index_add": lambda m, t: torch.index_add(torch.zeros(1, 97, WIDTH), 1, m.order + 1, t),
    "index_add into learned": lambda m, t: torch.index_add(m.table, dim=1, index=m.order + 1, source=t),
    "index_copy": lambda m, t: m.table.index_copy(1, m.order + 1, t),
    "index_put": lambda m, t: m.table.index_put((torch.tensor(0), m.order + 1), t[0]),
    "masked_scatter": lambda m, t: m.table.masked_scatter(torch.arange(97)[None, :, None] > 0, t.flip(1)),
    "masked_scatter of half": lambda m, t: t.masked_scatter(torch.arange(96)[None, :, None] > 47, t),
    "put": lambda m, t: torch.zeros_like(t).put(torch.arange(t.numel()).view_as(t).flip(1), t),
    "scatter_reduce": lambda m, t: torch.zeros_like(t).scatter_reduce(1, wide(m.order, t), t, "sum"),
    "scatter_reduce to pairs": lambda m, t: torch.zeros(1, 48, WIDTH).scatter_reduce(
        1, wide(torch.arange(96) // 2, t), t, "mean"
    ),
    "segment_reduce": lambda m, t: torch.segment_reduce(t[0], "mean", lengths=torch.full((48,), 2))[None],
    "diagonal_scatter": lambda m, t: torch.diagonal_scatter(torch.zeros(1, 96, 96, WIDTH), t.flip(1).mT, 0, 1, 2).sum(2),
    "diag_embed": lambda m, t: torch.diag_embed(t.flip(1).mT).sum(-1).mT,
    "pad": lambda m, t: torch.nn.functional.pad(t.flip(1), (0, 0, 1, 0)),
    "planes into zeros": lambda m, t: _padded(t),
}


def _padded(t: Tensor) -> Tensor:
    out = t.new_zeros(1, WIDTH, GRID[0] + 2, GRID[1] + 2)
    out[:, :, 1:-1, 1:-1] = planes(t).flip(2)
    return out[:, :, 1:-1, 1:-1].flatten(2).mT
