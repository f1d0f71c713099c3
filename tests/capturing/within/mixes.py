"""Programs that mix, copy and choose tokens, with a residual of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.capturing.moving import GRID, WIDTH
from tests.capturing.within.model import TOKENS, Change, Program, grid, planes, programs, raster, turned, wide


def _one_by_one(m: Any, t: Tensor) -> Tensor:
    return F.conv2d(t[:, :, None], m.mix[:, :, None, None])[:, :, 0]


def _products(m: Any, t: Tensor) -> Tensor:
    return torch.stack([sum(m.mix[i, j] * t[:, j] for j in range(96)) for i in range(4)] + [*t.unbind(1)[4:]], 1)


def _blocks(t: Tensor) -> Tensor:
    return torch.block_diag(*[torch.eye(2).flip(0)] * 48) @ t


# each moves tokens by arithmetic, so that a residual may hide it
MOVES: dict[str, Change] = {
    "conv1d": lambda m, t: F.conv1d(t, m.mix[:, :, None]),
    "conv1d by keyword": lambda m, t: F.conv1d(input=t, weight=m.mix[:, :, None]),
    "conv1d of a kernel of 3": lambda m, t: F.conv1d(t.mT, torch.eye(WIDTH)[..., None] * torch.tensor([1.0, 0, 0]), padding=1).mT,
    "conv1d in groups": lambda m, t: (
        F.conv1d(t.mT, torch.tensor([[[0.0, 0, 1]]]).expand(WIDTH, 1, 3), padding=1, groups=WIDTH).mT
    ),
    "conv2d over tokens": _one_by_one,
    "conv2d that shifts": lambda m, t: raster(F.conv2d(planes(t), _shift(0, 2), padding=1, groups=WIDTH)),
    "conv3d that shifts": lambda m, t: (
        F.conv3d(planes(t)[:, None], _shift(2, 0)[:1, :, None], padding=(0, 1, 1))[:, 0].flatten(2).mT
    ),
    "conv_transpose1d": lambda m, t: F.conv_transpose1d(t, m.mix[:, :, None]),
    "conv_transpose2d that shifts": lambda m, t: raster(F.conv_transpose2d(planes(t), _shift(0, 0), padding=1, groups=WIDTH)),
    "linear over tokens": lambda m, t: F.linear(t.mT, m.mix).mT,
    "matmul": lambda m, t: m.mix @ t,
    "matmul from the right": lambda m, t: (t.mT @ m.mix).mT,
    "bmm": lambda m, t: torch.bmm(m.mix[None], t),
    "mm": lambda m, t: torch.mm(m.mix, t[0])[None],
    "addmm": lambda m, t: torch.addmm(m.pos[0], m.mix, t[0])[None],
    "baddbmm": lambda m, t: torch.baddbmm(m.pos, m.mix[None], t),
    "einsum": lambda m, t: torch.einsum("nm,bmc->bnc", m.mix, t),
    "einsum of the grid": lambda m, t: torch.einsum("xy,byhc->bxhc", torch.eye(8).flip(0), grid(t)).flatten(1, 2),
    "tensordot": lambda m, t: torch.tensordot(m.mix, t, ([1], [1])).transpose(0, 1),
    "kron": lambda m, t: torch.kron(torch.eye(12).flip(0), torch.eye(8)) @ t,
    "block_diag": lambda m, t: _blocks(t),
    "multi_dot": lambda m, t: torch.linalg.multi_dot([m.mix, m.mix.T, m.mix, t[0]])[None],
    "chain_matmul": lambda m, t: torch.chain_matmul(m.mix, m.mix, t[0])[None],
    "solve": lambda m, t: torch.linalg.solve(m.mix, t[0])[None],
    "solve_triangular": lambda m, t: torch.linalg.solve_triangular(torch.eye(96), t.flip(1), upper=True),
    "inverse": lambda m, t: torch.linalg.inv(m.mix) @ t,
    "lu_solve": lambda m, t: torch.linalg.lu_solve(*torch.linalg.lu_factor(m.mix), t[0])[None],
    "bilinear": lambda m, t: F.bilinear(m.mix.new_ones(WIDTH, 1), t[0].mT, m.mix[:, None])[None].mT,
    "sparse product": lambda m, t: torch.sparse.mm(m.mix.to_sparse(), t[0])[None],
    "a product and a sum": lambda m, t: (m.mix[None, :, :, None] * t[:, None]).sum(2),
    "products one by one": _products,
    "a product and a mean": lambda m, t: (m.mix[None, :, :, None] * t[:, None]).mean(2) * 96,
    "a product and a maximum": lambda m, t: (m.mix[None, :, :, None] * (t[:, None] + 9)).amax(2) - 9,
    "a softmax that is sharp": lambda m, t: (m.mix * 1e4).softmax(1) @ t,
    "cumsum and differences": lambda m, t: t.flip(1).cumsum(1).diff(dim=1, prepend=torch.zeros(1, 1, WIDTH)),
    "differences": lambda m, t: torch.diff(t, dim=1, prepend=t[:, :1]),
    "fft": lambda m, t: torch.fft.ifft(torch.fft.fft(t, dim=1).conj(), dim=1).real,
    "rfft": lambda m, t: torch.fft.irfft(torch.fft.rfft(t, dim=1).conj(), n=96, dim=1),
    "fft that shifts": lambda m, t: torch.fft.ifft(torch.fft.fft(t, dim=1) * _phase(3)[:, None], dim=1).real,
    "fft2": lambda m, t: torch.fft.ifft2(torch.fft.fft2(grid(t), dim=(1, 2)).conj(), dim=(1, 2)).real.flatten(1, 2),
    "hfft": lambda m, t: torch.fft.hfft(torch.fft.ihfft(t, dim=1).conj(), n=96, dim=1),
    "fftshift": lambda m, t: torch.fft.fftshift(t, dim=1),
    "sort": lambda m, t: t.sort(1).values,
    "sort there and back": lambda m, t: _unsorted(t),
    "topk": lambda m, t: t.topk(96, 1).values,
    "argsort and gather": lambda m, t: t.gather(1, t.argsort(1)),
    "unique": lambda m, t: torch.unique(t[0], dim=0)[None],
    "msort": lambda m, t: torch.msort(t[0])[None],
    "cummax": lambda m, t: t.cummax(1).values,
    "cumprod": lambda m, t: (t * 0.01 + 1).cumprod(1),
    "logcumsumexp": lambda m, t: torch.logcumsumexp(t, 1),
    "roll of rows": lambda m, t: grid(t).roll(3, 1).flatten(1, 2),
    "flip of columns": lambda m, t: grid(t).flip(2).flatten(1, 2),
    "swap of halves": lambda m, t: torch.cat([t[:, 48:], t[:, :48]], 1),
    "transposed grid": lambda m, t: grid(t).transpose(1, 2).flatten(1, 2),
    "unfold and fold": lambda m, t: raster(F.fold(F.unfold(planes(t).flip(2), 2, stride=2), GRID, 2, stride=2)),
    "cov": lambda m, t: torch.cov(t[0]) @ t,
    "cdist": lambda m, t: (-100 * torch.cdist(t, t.flip(1))).softmax(-1) @ t.flip(1),
    "similarity": lambda m, t: (50 * F.normalize(t, dim=-1) @ F.normalize(t, dim=-1).mT).softmax(-1) @ t,
    "one_hot": lambda m, t: F.one_hot(m.order).float() @ t,
    "embedding of tokens": lambda m, t: F.embedding(m.order, t[0])[None],
    "embedding_bag": lambda m, t: F.embedding_bag(m.order, t[0], torch.arange(96))[None],
    "householder": lambda m, t: t - 2 * _unit() * (_unit() * t).sum(1, keepdim=True),
    "rnn": lambda m, t: _recurrent(torch.nn.RNN, t),
    "gru": lambda m, t: _recurrent(torch.nn.GRU, t),
    "scan by hand": lambda m, t: _scanned(t),
    "shift by one of half the channels": lambda m, t: torch.cat([t[..., :8].roll(1, 1), t[..., 8:]], 2),
    "shift of most channels": lambda m, t: torch.cat([t[..., :12].roll(1, 1), t[..., 12:]], 2),
    "normalized over tokens": lambda m, t: (t - t.mean(1, keepdim=True)) / t.std(1, keepdim=True),
    "instance norm": lambda m, t: F.instance_norm(t.mT).mT,
    "squeeze and excitation": lambda m, t: t * m.part(t.mean(1, keepdim=True)).sigmoid(),
    "a mean of neighbors": lambda m, t: raster(F.avg_pool2d(planes(t), 3, 1, 1)),
    "a local response norm": lambda m, t: F.local_response_norm(t, 5),
    "a mixer": lambda m, t: F.linear(F.gelu(F.linear(t.mT, m.mix + 0.01)), m.mix.T + 0.01).mT,
}
RESIDUALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "t * .001 + moved": lambda t, x: 0.001 * t + x,
    "moved + t * .001": lambda t, x: x + t * 1e-3,
    "add with alpha": lambda t, x: torch.add(x, t, alpha=1e-3),
    "lerp": lambda t, x: torch.lerp(t, x, 0.999),
    "addcmul": lambda t, x: torch.addcmul(x, t, torch.tensor(1e-3)),
    "in place": lambda t, x: x.clone().add_(t, alpha=1e-3),
    "foreach": lambda t, x: torch._foreach_add([x], [t], alpha=1e-3)[0],
    "stack and sum": lambda t, x: torch.stack([1e-3 * t, x]).sum(0),
    "mean of two": lambda t, x: torch.stack([1e-3 * t, x], -1).mean(-1),
    "maximum": lambda t, x: torch.maximum(1e-3 * t - 9, x),
    "where": lambda t, x: torch.where(torch.arange(96)[:, None] == 7, t, x),
    "difference": lambda t, x: t - (t - x),
    "negative": lambda t, x: -(1e-3 * t - x),
    "a product with a residual": lambda t, x: x * (1 + 1e-3 * t),
    "concatenated channels": lambda t, x: F.linear(
        torch.cat([t, x], 2), torch.cat([1e-3 * torch.eye(WIDTH), torch.eye(WIDTH)], 1)
    ),
    "a sum of channels": lambda t, x: (torch.stack([t, x], 2) * torch.tensor([1e-3, 1.0])[:, None]).sum(2),
    "einsum of both": lambda t, x: torch.einsum("sbnc,s->bnc", torch.stack([t, x]), torch.tensor([1e-3, 1.0])),
    "a norm around": lambda t, x: F.layer_norm(1e-3 * t + x, (WIDTH,)),
    "hypot": lambda t, x: torch.hypot(1e-2 * t, x),
    "logaddexp": lambda t, x: torch.logaddexp(1e-3 * t - 9, x),
}


def _shift(row: int, column: int) -> Tensor:
    """Return a depthwise kernel that reads one neighbor."""
    kernel = torch.zeros(WIDTH, 1, 3, 3)
    kernel[:, :, row, column] = 1
    return kernel


def _phase(by: int) -> Tensor:
    return torch.exp(-2j * torch.pi * by * torch.arange(TOKENS) / TOKENS)


def _unit() -> Tensor:
    one = torch.zeros(1, TOKENS, 1)
    one[0, 0], one[0, 1] = 2**-0.5, -(2**-0.5)
    return one


def _unsorted(t: Tensor) -> Tensor:
    values, order = t.sort(1)
    return values.gather(1, order.argsort(1))


def _recurrent(sort: Any, t: Tensor) -> Tensor:
    return sort(WIDTH, WIDTH, batch_first=True)(t)[0]


def _scanned(t: Tensor) -> Tensor:
    state, out = torch.zeros(1, WIDTH), []
    for i in range(TOKENS):
        state = 0.1 * t[:, i] + 0.9 * state
        out.append(state)
    return torch.stack(out, 1)


def _few(t: Tensor) -> Tensor:
    return torch.cat([t[:, :3].repeat(1, 2, 1), t], 1)


COPIES: dict[str, Change] = {
    "twice in the batch": lambda m, t: t[[0, 0]],
    "index_select twice": lambda m, t: t.index_select(0, torch.tensor([0, 0])),
    "views of a number": lambda m, t: (t[None] + torch.tensor([0.0, 1.0])[:, None, None, None]).flatten(0, 1),
    "views of a parameter": lambda m, t: (t[None] + m.pos[:, None].repeat(2, 1, 1, 1)).flatten(0, 1),
    "broadcast by an addition": lambda m, t: t + torch.zeros(2, 1, 1),
    "broadcast by a product": lambda m, t: t * torch.tensor([1.0, 2.0])[:, None, None],
    "broadcast by where": lambda m, t: torch.where(torch.tensor([True, False])[:, None, None], t, 2 * t),
    "broadcast by matmul": lambda m, t: torch.stack([m.mix, m.mix]) @ t,
    "expanded": lambda m, t: t.expand(2, -1, -1),
    "expanded as": lambda m, t: t.expand_as(torch.empty(3, TOKENS, WIDTH)),
    "broadcast_to": lambda m, t: t.broadcast_to(2, TOKENS, WIDTH),
    "broadcast_tensors": lambda m, t: torch.broadcast_tensors(t, torch.empty(2, 1, 1))[0],
    "repeated": lambda m, t: t.repeat(2, 1, 1),
    "tiled": lambda m, t: t.tile(2, 1, 1),
    "repeat_interleave": lambda m, t: t.repeat_interleave(2, 0),
    "stacked": lambda m, t: torch.stack([t, t]).flatten(0, 1),
    "concatenated": lambda m, t: torch.cat([t, t.flip(1)]),
    "views in the batch turned": lambda m, t: torch.cat([t, t.flip(1)]).flip(0),
    "tokens twice": lambda m, t: torch.cat([t, t], 1),
    "tokens repeated": lambda m, t: t.repeat(1, 2, 1),
    "tokens interleaved": lambda m, t: t.repeat_interleave(2, 1),
    "tokens of an index twice": lambda m, t: t[:, torch.arange(192) // 2],
    "a few tokens again": lambda m, t: _few(t),
    "one token for all": lambda m, t: t[:, :1].expand(-1, TOKENS, -1),
    "one row for all": lambda m, t: grid(t)[:, :1].expand(-1, 8, -1, -1).flatten(1, 2),
    "one token added to all": lambda m, t: 1e-2 * t + t[:, :1],
    "a token over another": lambda m, t: torch.cat([t[:, 5:6], t[:, 1:]], 1),
    "a row over another": lambda m, t: torch.cat([t[:, 12:24], t[:, 12:]], 1),
    "meshgrid of two": lambda m, t: torch.stack(torch.broadcast_tensors(t[:, :, None], t[:, None, :2]), 0).sum(0).flatten(1, 2),
    "outer sum of two": lambda m, t: (t[:, :8, None] + t[:, None, 8:20] * 1e-3).flatten(1, 2),
    "combinations": lambda m, t: t[:, torch.combinations(torch.arange(12), 2)].mean(2),
    "tril_indices": lambda m, t: t[:, torch.tril_indices(8, 8)[0]],
    "cartesian product": lambda m, t: t[:, torch.cartesian_prod(torch.arange(8), torch.arange(12))[:, 0]],
    "take": lambda m, t: t.take(torch.arange(t.numel()).view_as(t).flip(1) % 800),
}


def _zero() -> Tensor:
    return torch.tensor(3)


CHOICES: dict[str, Change] = {
    "roll by a 0-d tensor": lambda m, t: t.roll(int(_zero()), 1),
    "roll by a number of a tensor": lambda m, t: torch.roll(t, _zero().item(), dims=1),
    "roll without an axis": lambda m, t: t.roll(WIDTH * 5),
    "roll of two axes": lambda m, t: torch.roll(input=grid(t), shifts=(1, -2), dims=(1, 2)).flatten(1, 2),
    "narrow by a 0-d tensor": lambda m, t: t.narrow(1, _zero(), 60),
    "narrow by keyword": lambda m, t: torch.narrow(input=t, dim=1, start=_zero(), length=60),
    "narrow_copy": lambda m, t: torch.narrow_copy(t, 1, 3, 60),
    "slice by tensors": lambda m, t: t[:, _zero() : torch.tensor(63)],
    "select and stack": lambda m, t: torch.stack([t.select(1, i) for i in range(95, -1, -1)], 1),
    "index by a range": lambda m, t: t[:, list(range(95, -1, -1))],
    "index by a range object": lambda m, t: t[:, range(12, 60)],
    "index by arange": lambda m, t: t[:, turned()],
    "index by arange with a step": lambda m, t: t[:, torch.arange(0, 96, 12)],
    "index by two": lambda m, t: grid(t)[:, torch.arange(8).flip(0)[:, None], torch.arange(12)].flatten(1, 2),
    "index by tuples": lambda m, t: t[(slice(None), turned())],
    "index by an int8 mask": lambda m, t: t[:, (torch.arange(96) % 2).bool()],
    "index by nonzero": lambda m, t: t[:, (torch.arange(96) % 3 == 0).nonzero()[:, 0]],
    "index by None": lambda m, t: t[:, None, turned()][:, 0],
    "index by int32": lambda m, t: t[:, turned().int()],
    "negative index": lambda m, t: t[:, -1 - torch.arange(96)],
    "index by argsort of a parameter": lambda m, t: t[:, m.pos[0, :, 0].argsort()],
    "index by topk of a parameter": lambda m, t: t[:, m.pos[0, :, 0].topk(40).indices],
    "index by a permutation": lambda m, t: t[:, torch.randperm(96)],
    "index by multinomial": lambda m, t: t[:, torch.multinomial(torch.ones(96), 40)],
    "index_select by keyword": lambda m, t: torch.index_select(input=t, dim=1, index=m.order),
    "index_select of channels last": lambda m, t: (
        planes(t).contiguous(memory_format=torch.channels_last).flatten(2).mT[:, m.order]
    ),
    "gather by keyword": lambda m, t: torch.gather(input=t, dim=1, index=wide(m.order, t)),
    "take_along_dim by keyword": lambda m, t: torch.take_along_dim(input=t, indices=wide(m.order, t), dim=1),
    "unravel": lambda m, t: grid(t)[(slice(None), *torch.unravel_index(m.order, GRID))],
    "searchsorted": lambda m, t: t[:, torch.searchsorted(torch.arange(96), turned())],
    "bucketize": lambda m, t: t[:, torch.bucketize(turned(), torch.arange(96))],
    "masked_select": lambda m, t: t.masked_select(torch.arange(96)[:, None] > 40).view(1, -1, WIDTH),
    "compress of numbers": lambda m, t: t[:, [i for i in range(96) if i % 12 < 6]],
    "tensor_split": lambda m, t: torch.cat(t.tensor_split([10, 50], 1)[::-1], 1),
    "split of sizes": lambda m, t: torch.cat(t.split([10, 40, 46], 1)[::-1], 1),
    "hsplit": lambda m, t: torch.cat(t.hsplit(4)[::-1], 1),
    "unsafe_chunk": lambda m, t: torch.cat(torch.unsafe_chunk(t, 4, 1)[::-1], 1),
    "chunk by keyword": lambda m, t: torch.cat(tensors=t.chunk(chunks=4, dim=1)[::-1], dim=1),
    "unfold": lambda m, t: t.unfold(1, 12, 12).flip(1).mT.flatten(1, 2),
    "as_strided": lambda m, t: t.contiguous().as_strided((1, 48, WIDTH), (96 * WIDTH, 2 * WIDTH, 1), WIDTH),
    "as_strided of an overlap": lambda m, t: t.contiguous().as_strided((1, 95, 2 * WIDTH), (96 * WIDTH, WIDTH, 1))[..., :WIDTH],
    "view of bits": lambda m, t: t.view(torch.int32).flip(1).view(torch.float32),
    "view as complex": lambda m, t: torch.view_as_real(
        torch.view_as_complex(t.reshape(1, 96, 8, 2).contiguous()).flip(1)
    ).flatten(2),
    "complex parts": lambda m, t: torch.complex(t, t.roll(1, 1)).imag,
    "polar": lambda m, t: torch.polar(torch.ones_like(t), t.flip(1)).angle(),
    "pixel_shuffle": lambda m, t: raster(F.pixel_unshuffle(F.pixel_shuffle(planes(t), 2), 2)),
    "channel_shuffle of tokens": lambda m, t: F.channel_shuffle(t[..., None], 4)[..., 0],
    "nested": lambda m, t: torch.nested.to_padded_tensor(torch.nested.nested_tensor([t[0].flip(0)]), 0.0),
    "pad_sequence": lambda m, t: torch.nn.utils.rnn.pad_sequence([t[0].flip(0)], batch_first=True),
    "vmap": lambda m, t: torch.vmap(lambda one: one.flip(0))(t),
    "rot90": lambda m, t: torch.rot90(grid(t), 1, (1, 2)).flatten(1, 2),
    "movedim": lambda m, t: grid(t).movedim(1, 2).flatten(1, 2),
    "to and from double": lambda m, t: t.double().flip(1).float(),
    "to and from half": lambda m, t: t.half().flip(1).float(),
    "to and from bfloat16": lambda m, t: t.bfloat16().flip(1).float(),
    "to and from int": lambda m, t: (t * 1000).int().flip(1).float(),
    "in half": lambda m, t: (t.half() + m.pos.half()).flip(1).float(),
    "cond": lambda m, t: torch.cond(torch.tensor(True), lambda x: x.flip(1), lambda x: x.clone(), (t,)),
    "a checkpoint": lambda m, t: torch.utils.checkpoint.checkpoint(lambda x: x.flip(1), t, use_reentrant=False),
}


def mixes() -> Iterator[Program]:
    yield from programs("mixing", MOVES)
    moves = list(MOVES.items())
    for i, (name, residual) in enumerate(RESIDUALS.items()):
        for j in range(3):
            moved, change = moves[(3 * i + j) * 7 % 33]
            yield Program("mixing", f"{name} of {moved}", _behind(residual, change), residual=False)
    yield from programs("copies", COPIES)
    yield from programs("choices", CHOICES)


def _behind(residual: Callable[[Tensor, Tensor], Tensor], change: Change) -> Change:
    return lambda m, t: residual(t, change(m, t))
