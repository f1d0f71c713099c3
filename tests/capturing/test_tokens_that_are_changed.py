"""Tokens that a model permutes, merges, thins, mixes, drops or adds are located correctly, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capturing.moving import GRID, WIDTH, Moving, image, judged
from tests.samples import sampled

Change = Callable[[Any, Tensor], Tensor]
ROWS, COLUMNS = GRID


def grid(t: Tensor) -> Tensor:
    return t.view(-1, *GRID, WIDTH)


def planes(t: Tensor) -> Tensor:
    return t.mT.unflatten(-1, GRID)


def raster(t: Tensor) -> Tensor:
    """Convert channels-first maps to tokens."""
    return t.flatten(2).mT


def permuted(seed: int) -> Tensor:
    return torch.randperm(ROWS * COLUMNS, generator=torch.Generator().manual_seed(seed))


def written(t: Tensor, write: Callable[[Tensor, Tensor], Any]) -> Tensor:
    z = t.clone()
    write(z, t)
    return z


def part_written(z: Tensor, t: Tensor) -> None:
    z[:, :48].mul_(0).add_(t[:, :48].flip(1))


def data_written(z: Tensor, t: Tensor) -> None:
    z.data = t.flip(1)


def numpy_written(z: Tensor, t: Tensor) -> None:
    z.numpy()[:] = t.numpy()[:, ::-1]


def dlpack_written(z: Tensor, t: Tensor) -> None:
    torch.from_dlpack(z).copy_(t.flip(1))


def viewed(z: Tensor, t: Tensor) -> None:
    z.mT.flatten(0, 1).copy_(t.flip(1).mT.flatten(0, 1))


def chosen(z: Tensor, t: Tensor) -> None:
    z[:, ::2] = t[:, 1::2]


def fourier(t: Tensor) -> Tensor:
    return torch.fft.ifft(torch.fft.fft(t, dim=1).conj(), dim=1).real


def _turned(t: Tensor) -> Tensor:
    return t.flip(1)


def _turned_in_place(t: Tensor) -> Tensor:
    return t.copy_(t.flip(1).clone())


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TorchScript is deprecated, but still in use
    turned, turned_in_place = torch.jit.script(_turned), torch.jit.script(_turned_in_place)


class Turn(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, t: Tensor) -> Tensor:  # type: ignore[override]
        return t.flip(1)


mylib = torch.library.Library("visattn_tests", "DEF")
mylib.define("relu(Tensor x) -> Tensor")
mylib.impl("relu", lambda x: x.flip(1).clone(), "CPU")

PERMUTED: dict[str, Change] = {
    "nothing": lambda _, t: t,
    "roll": lambda _, t: t.roll(5, 1),
    "flip": lambda _, t: t.flip(1),
    "roll of rows and columns": lambda _, t: grid(t).roll((2, 3), (1, 2)).flatten(1, 2),
    "transposed raster": lambda _, t: grid(t).transpose(1, 2).flatten(1, 2),
    "windows": lambda _, t: grid(t).view(-1, 2, 4, 3, 4, WIDTH).transpose(2, 3).reshape(-1, 96, WIDTH),
    "index": lambda _, t: t[:, permuted(1)],
    "index_select": lambda _, t: t.index_select(1, permuted(2)),
    "gather": lambda _, t: t.gather(1, permuted(3)[None, :, None].expand_as(t)),
    "take_along_dim": lambda _, t: t.take_along_dim(permuted(4)[None, :, None], 1),
    "unbind and stack": lambda _, t: torch.stack(t.unbind(1)[::-1], 1),
    "chunk and cat": lambda _, t: torch.cat(t.chunk(4, 1)[::-1], 1),
    "split and hstack": lambda _, t: torch.hstack(t.split(24, 1)[::-1]),
    "rot90": lambda _, t: torch.rot90(grid(t), 2, (1, 2)).flatten(1, 2),
    "pixel unshuffle and shuffle": lambda _, t: raster(F.pixel_shuffle(F.pixel_unshuffle(planes(t), 2), 2)),
    "channel shuffle": lambda _, t: raster(F.channel_shuffle(planes(t), 4)),
    "a matrix": lambda _, t: torch.eye(96)[permuted(5)] @ t,
    "a matrix by einsum": lambda _, t: torch.einsum("nm,bmc->bnc", torch.eye(96)[permuted(6)], t),
    "a linear layer over tokens": lambda _, t: F.linear(t.mT, torch.eye(96)[permuted(7)]).mT,
    "a convolution over tokens": lambda _, t: F.conv1d(t, torch.eye(96)[permuted(8)][:, :, None]),
    "sorted": lambda _, t: t.sort(1).values,
    "sorted by index": lambda _, t: t[:, t[0].sum(-1).argsort()],
    "fft": lambda _, t: fourier(t),
    "numpy": lambda _, t: torch.from_numpy(t.numpy()[:, ::-1].copy()),
    "script": lambda _, t: turned(t),
    "script in place": lambda _, t: turned_in_place(t.clone()),
    "custom function": lambda _, t: Turn.apply(t),
    "custom operation that is called relu": lambda _, t: torch.ops.visattn_tests.relu(t),
    "grid sample": lambda _, t: raster(
        F.grid_sample(
            planes(t),
            F.affine_grid(torch.tensor([[[-1.0, 0, 0], [0, 1, 0]]]), [1, WIDTH, *GRID], align_corners=False),
            align_corners=False,
        )
    ),
    "deep in a list": lambda _, t: [[t.roll(3, 1)]][0][0],
    "vmap": lambda _, t: torch.vmap(lambda one: one.flip(0))(t),
}
WRITTEN: dict[str, Change] = {
    "arithmetic through a view": lambda _, t: written(t, part_written),
    "data": lambda _, t: written(t, data_written),
    "numpy memory": lambda _, t: written(t, numpy_written),
    "dlpack memory": lambda _, t: written(t, dlpack_written),
    "copy through a view": lambda _, t: written(t, viewed),
    "every second": lambda _, t: written(t, chosen),
    "functional scatter": lambda _, t: t.scatter(1, permuted(1)[None, :, None].expand_as(t), t),
    "index_copy": lambda _, t: t.index_copy(1, permuted(2), t),
    "index_put": lambda _, t: t.index_put((torch.tensor([0])[:, None], permuted(3)[None]), t),
    "masked_scatter": lambda _, t: t.masked_scatter(torch.ones_like(t, dtype=torch.bool), t.flip(1)),
    "in-place transpose": lambda _, t: t.clone().transpose_(1, 2).mT.flip(1),
    "in-place unsqueeze beside another": lambda _, t: _unsqueezed(t),
    "out of a roll": lambda _, t: torch.index_select(t, 1, permuted(4), out=torch.empty_like(t)),
}


def _unsqueezed(t: Tensor) -> Tensor:
    y = t.relu()
    z = y.sigmoid()
    y.unsqueeze_(1)
    return z


MERGED: dict[str, Change] = {
    "two by two": lambda _, t: grid(t).view(-1, 4, 2, 6, 2, WIDTH).mean((2, 4)).flatten(1, 2),
    "two by two, linear": lambda _, t: raster(F.conv2d(planes(t), torch.ones(WIDTH, WIDTH, 2, 2), stride=2)),
    "pixel unshuffle": lambda _, t: F.linear(raster(F.pixel_unshuffle(planes(t), 2)), torch.ones(WIDTH, 4 * WIDTH)),
    "rows": lambda _, t: grid(t).mean(2),
    "average pool": lambda _, t: raster(F.avg_pool2d(planes(t), 2)),
    "overlapping pool": lambda _, t: raster(F.max_pool2d(planes(t), 3, 2, 1)),
    "overlapping unfold": lambda _, t: F.linear(F.unfold(planes(t), 3, stride=2, padding=1).mT, torch.ones(WIDTH, 9 * WIDTH)),
    "unfold side by side": lambda _, t: F.linear(F.unfold(planes(t), 2, stride=2).mT, torch.ones(WIDTH, 4 * WIDTH)),
    "a comb": lambda _, t: t.view(-1, 2, 4, 2, 6, WIDTH).mean((1, 3)).flatten(1, 2),
    "left half with right half": lambda _, t: t.view(-1, 8, 2, 6, WIDTH).mean(2).flatten(1, 2),
    "dilated convolution": lambda _, t: raster(F.conv2d(planes(t), torch.ones(WIDTH, WIDTH, 3, 3), dilation=2)),
    "valid convolution": lambda _, t: raster(F.conv2d(planes(t), torch.ones(WIDTH, WIDTH, 5, 5), stride=1)),
    "a blur after reflection padding": lambda _, t: _blurred(t, 1, "reflect"),
    "a blur after replication padding": lambda _, t: _blurred(t, 1, "replicate"),
    "a blur after circular padding": lambda _, t: _blurred(t, 1, "circular"),
    "a blur after wide reflection padding": lambda _, t: _blurred(t, 3, "reflect"),
    "a pooling that overhangs, beside a convolution": lambda _, t: _downsampled(F.avg_pool2d(planes(t), 2, stride=1)),
    "two poolings a cell apart": lambda _, t: raster(F.avg_pool2d(planes(t), 2) + F.avg_pool2d(planes(t).roll(2, -1), 2)),
    "interpolated": lambda _, t: raster(F.interpolate(planes(t), (4, 6))),
    "two pairs of tokens": lambda _, t: (t[:, ::2] + t[:, 1::2]) / 2,
    "the mean of a pair far apart": lambda _, t: (t + t.flip(1)) / 2,
}


def _blurred(t: Tensor, border: int, mode: str) -> Tensor:
    """Blur and downsample tokens as timm's BlurPool2d does."""
    return raster(F.conv2d(F.pad(planes(t), [border] * 4, mode=mode), torch.ones(WIDTH, WIDTH, 3, 3), stride=2))


def _downsampled(x: Tensor) -> Tensor:
    """Downsample a map as a block of timm's ResNet-D does for an odd grid."""
    pooled = F.avg_pool2d(x, 2, 2, ceil_mode=True, count_include_pad=False)
    return raster(pooled + F.conv2d(x, torch.ones(WIDTH, WIDTH, 3, 3), stride=2, padding=1))


THINNED: dict[str, Change] = {
    "every second": lambda _, t: grid(t)[:, ::2, ::2].flatten(1, 2),
    "every third": lambda _, t: grid(t)[:, :, ::3].flatten(1, 2),
    "corners": lambda _, t: grid(t)[:, [0, -1]][:, :, [0, -1]].flatten(1, 2),
    "two columns": lambda _, t: grid(t)[:, :, [1, 4]].flatten(1, 2),
    "a crop": lambda _, t: grid(t)[:, 2:6, 3:9].flatten(1, 2),
    "one row": lambda _, t: grid(t)[:, 3],
    "half of them": lambda _, t: t[:, :48],
    "dropped at random": lambda _, t: t[:, torch.rand(96).argsort()[:40].sort().values],
    "kept by energy": lambda _, t: t[:, t[0].abs().sum(-1).topk(50).indices.sort().values],
    "by a mask": lambda _, t: t[:, t[0].sum(-1) > 0],
}
MIXED: dict[str, Change] = {
    "clamped by sorted tokens": lambda _, t: (1e-6 * t).clamp(min=t.sort(1).values),
    "a vanishing residual of a permutation": lambda _, t: t * 1e-6 + torch.eye(96)[permuted(1)] @ t,
    "a vanishing residual of sorted tokens": lambda _, t: t * 1e-6 + t.sort(1).values,
    "a vanishing residual through numpy": lambda _, t: t * 1e-6 + torch.from_numpy(t.numpy()[:, ::-1].copy()),
    "chosen by a mask": lambda _, t: torch.where(torch.arange(96)[:, None] > 40, t.sort(1).values, t),
    "half of them sorted": lambda _, t: torch.cat([t[:, :48], torch.sort(t[:, 48:], 1).values], 1),
    "half of them through a script": lambda _, t: torch.cat([t[:, :48], turned(t[:, 48:])], 1),
    "a mean added": lambda _, t: t + t.mean(1, keepdim=True),
    "a gate of the mean of all tokens": lambda _, t: t * t.mean(1, keepdim=True).sigmoid(),
    "a gate of sorted tokens": lambda _, t: t.sort(1).values * t.sigmoid(),
    "a mixer": lambda _, t: t + F.linear(t.mT, torch.eye(96)[permuted(2)] + 0.01).mT,
    "a mixer over a vanishing residual": lambda _, t: 1e-6 * t + F.linear(t.mT, torch.eye(96)[permuted(2)]).mT,
    "a mixer of rows": lambda _, t: 1e-6 * t + torch.einsum("xy,byhc->bxhc", torch.eye(8).flip(0), grid(t)).flatten(1, 2),
    "cumsum": lambda _, t: t.cumsum(1),
    "softmax along tokens": lambda _, t: t.softmax(1),
    "twice the same token": lambda _, t: torch.cat([t, t[:, :1]], 1),
    "two passes": lambda _, t: torch.cat([t, 0.9 * t]),
    "two passes stacked": lambda _, t: torch.stack([t, 0.9 * t], 1).flatten(0, 1),
    "two passes repeated": lambda _, t: t.repeat(2, 1, 1),
    "two passes added": lambda _, t: torch.stack([t, 0.9 * t]).sum(0),
    "two passes added after the batch axis": lambda _, t: torch.stack([t, 0.9 * t], 1).mean(1),
    "two passes expanded": lambda _, t: t[None].expand(2, -1, -1, -1).flatten(0, 1),
}


def _copied(t: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch recommends clone
        return torch.tensor(t)


BESIDE: dict[str, Change] = {
    "zeros": lambda _, t: torch.cat([torch.zeros(1, 2, WIDTH), t], 1),
    "a parameter": lambda m, t: torch.cat([m.part.weight[None, :1], t], 1),
    "the mean": lambda _, t: torch.cat([t.mean(1, keepdim=True), t], 1),
    "an unknown tensor": lambda _, t: torch.cat([torch.from_numpy(np.array(t[:, :2].numpy())), t], 1),
    "a new tensor of the tokens": lambda _, t: torch.cat([t.new_tensor(t.flip(1)[:, :2].tolist()), t], 1),
    "numbers that went through Python": lambda _, t: torch.cat([torch.tensor(t.flip(1)[:, :2].tolist()), t], 1),
    "a copy of the tokens": lambda _, t: torch.cat([_copied(t.flip(1)[:, :2]), t], 1),
    "random numbers around the tokens": lambda _, t: torch.cat([torch.normal(t.flip(1)[:, :2], 0.0), t], 1),
    "the legacy empty tensor": lambda _, t: torch.cat([torch.tensor([]), t], -2),
}
MODELS = {
    f"{sort}: {name}": change
    for sort, changes in (
        ("permuted", PERMUTED),
        ("written", WRITTEN),
        ("merged", MERGED),
        ("thinned", THINNED),
        ("mixed", MIXED),
        ("beside", BESIDE),
    )
    for name, change in changes.items()
}
# changes that must be located; for the others a refusal is fine
PLACED = {
    *(f"permuted: {name}" for name in [*list(PERMUTED)[:15], "a matrix"][:15]),
    *(
        f"merged: {name}"
        for name in ("two by two", "two by two, linear", "pixel unshuffle", "average pool", "overlapping unfold")
    ),
    "merged: a blur after reflection padding",
    "merged: a blur after replication padding",
    "merged: a pooling that overhangs, beside a convolution",
    "thinned: every second",
    "thinned: a crop",
    "thinned: one row",
    "thinned: half of them",
    "thinned: dropped at random",
    "thinned: kept by energy",
    "thinned: by a mask",
    "mixed: a mean added",
    "mixed: two passes added",
    "mixed: two passes added after the batch axis",
    "mixed: a gate of the mean of all tokens",
    "beside: zeros",
    "beside: a parameter",
    "beside: the legacy empty tensor",
}


# distance in cells that a kernel reaches
REACH = {"merged: dilated convolution": 2.0, "merged: valid convolution": 2.0}
# here a cell covers more pixels than its token reads: it also stands for its neighbors
POINTS = {"thinned: every second", "merged: interpolated", "merged: dilated convolution"}


def test_at_least_60_models_are_tested() -> None:
    assert len(MODELS) >= 60


@pytest.mark.parametrize("name", sampled(MODELS, 3))
def test_positions_of_tokens_are_correct_or_refused(name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Moving(MODELS[name])
    for forward in range(3):
        torch.manual_seed(3)
        verdict = _judged(model, forward, name)
        assert not verdict.startswith("wrong"), (forward, verdict)
        if name in PLACED:
            assert verdict == "right", verdict


def _judged(model: nn.Module, forward: int, name: str) -> str:
    """Judge a model with a fixed random seed in each forward pass."""

    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(forward)
            return self.inner(x)  # type: ignore[no-any-return]

    return judged(Same(), image(forward), reach=REACH.get(name, 1.0), covers=name not in POINTS)
