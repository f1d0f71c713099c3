"""Places that are earned: kernels by their mass, sums with what tokens have in common, resizing, memory that other code holds.

Each program is judged by lighting patches; see `tests.capturing.within`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visattn
from tests.capturing.moving import WIDTH
from tests.capturing.within import verdicts
from tests.capturing.within.common import WEIGHTED
from tests.capturing.within.model import TOKENS, Change, Mover, Program, grid, made, planes, quietly, raster
from visattn.core.capturing.trace.tape import TAPES

REFUSED = ("refused", "refused although placeable")
SHIFT: list[list[float]] = [[0.0, 0, 0], [0, 0, 1], [0, 0, 0]]
LEANING: list[list[float]] = [[0.2, 0.2, 1], [0.2, 0.2, 1], [0.2, 0.2, 1]]
BLUR: list[list[float]] = [[1.0, 2, 1], [2, 4, 2], [1, 2, 1]]


def outcome(change: Change, prepare: Callable[[Any], Any] | None = None, resamples: bool = False) -> str:
    (found,) = verdicts(iter([Program("", "", change, prepare=prepare, resamples=resamples, residual=False)]))
    return found.outcome


def kernel(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows).expand(WIDTH, 1, -1, -1).contiguous()


def convolved(rows: list[list[float]], **how: Any) -> Change:
    return lambda _, t: raster(F.conv2d(planes(t), kernel(rows), groups=WIDTH, **how))


def in_bfloat16(change: Change) -> Change:
    def cast(m: Any, t: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return change(m, t).float()  # type: ignore[no-any-return]

    return cast


def line(*taps: float) -> Tensor:
    return torch.tensor(taps, dtype=torch.float32).expand(WIDTH, 1, -1).contiguous()


# --- kernels

PLACED_BY_KERNELS: dict[str, Change] = {
    "a shift": convolved(SHIFT, padding=1),
    "a shift, same padding": convolved(SHIFT, padding="same"),
    "a shift by three": convolved(SHIFT, padding=3, dilation=3),
    "a shift without padding": convolved(SHIFT),
    "a shift of the sequence": lambda _, t: F.conv1d(t.mT, line(1, 0, 0), padding=1, groups=WIDTH).mT,
    "a shift of a volume": lambda _, t: (
        F.conv3d(planes(t)[:, None], torch.tensor(SHIFT)[None, None, None], padding=(0, 1, 1))[:, 0].flatten(2).mT
    ),
    "a transposed shift": lambda _, t: raster(F.conv_transpose2d(planes(t), kernel(SHIFT), padding=1, groups=WIDTH)),
    "a transposed shift of the sequence": lambda _, t: F.conv_transpose1d(t.mT, line(0, 0, 1), padding=1, groups=WIDTH).mT,
    "a shift in bfloat16": in_bfloat16(convolved(SHIFT, padding=1)),
    "zeros around the own cell, every second": convolved([[0.0, 0, 0], [0, 1, 2], [0, 2, 1]], padding=1, stride=2),
    "a shift, every second": convolved(SHIFT, padding=1, stride=2),
    "two of an even size, every second": convolved([[1.0, 0.9], [0.9, 1]], padding=1),
    "a blur": convolved(BLUR, padding=1),
    "a dilated blur": convolved(BLUR, padding=2, dilation=2),
    "a blur that reflects, every second": lambda _, t: raster(
        F.conv2d(F.pad(planes(t), (1, 1, 1, 1), mode="reflect"), kernel(BLUR), stride=2, groups=WIDTH)
    ),
}
REFUSED_KERNELS: dict[str, Change] = {
    "leaning": convolved(LEANING, padding=1),
    "leaning, dilated": convolved(LEANING, padding=2, dilation=2),
    "leaning, every second": convolved([[0.1, 0.1, 1]] * 3, padding=1, stride=(2, 1)),
    "leaning a little, with gaps": convolved([[0.0, 0, 0], [0, 0.4, 1], [0, 0, 0]], padding=3, dilation=3),
    "of an even size, leaning": convolved([[1.0, 0.2], [0.2, 0.2]], padding=1),
    "leaning away from the own cell, every second": convolved(
        [[1.0, 0, 0], [0, 0.02, 0.02], [0, 0.02, 0.02]], padding=1, stride=2
    ),
    "around a hole": convolved([[1.0, 1, 1], [1, 0, 1], [1, 1, 1]], padding=1),
    "of four with gaps": convolved([[1.0, 1], [1, 1]], padding=1, dilation=2),
    "channels to the left and to the right": lambda _, t: raster(
        F.conv2d(planes(t), torch.cat([kernel(SHIFT)[:8], kernel(SHIFT)[8:].flip(3)]), padding=1, groups=WIDTH)
    ),
    "leaning in bfloat16": in_bfloat16(convolved(LEANING, padding=1)),
    "leaning, transposed": lambda _, t: raster(F.conv_transpose2d(planes(t), kernel(LEANING), padding=1, groups=WIDTH)),
    "leaning along the sequence": lambda _, t: F.conv1d(t.mT, line(1, 0.1, 0.1), padding=1, groups=WIDTH).mT,
    "a shift behind a residual of the kernel": convolved([[0.0, 0, 0], [0, 0.01, 1], [0, 0, 0]], padding=1),
    "beyond the image": lambda _, t: raster(
        F.conv_transpose2d(planes(t), kernel([[1.0] * 3] * 3), dilation=3, groups=WIDTH),
    ),
    "a mean of three that reflects": lambda _, t: raster(F.avg_pool2d(F.pad(planes(t), (1, 1, 1, 1), mode="reflect"), 3, 1)),
    "a mean of five that reflects": lambda _, t: raster(F.avg_pool2d(F.pad(planes(t), (2, 2, 2, 2), mode="reflect"), 5, 1)),
    "a maximum that reflects": lambda _, t: raster(F.max_pool2d(F.pad(planes(t), (1, 1, 1, 1), mode="reflect"), 3, 1)),
}


@pytest.mark.parametrize("name", PLACED_BY_KERNELS)
def test_kernels_that_move_or_stay_are_placed(name: str) -> None:
    assert outcome(PLACED_BY_KERNELS[name], resamples="every second" in name) == "right"


@pytest.mark.parametrize("name", REFUSED_KERNELS)
def test_kernels_that_lean_are_refused(name: str) -> None:
    assert outcome(REFUSED_KERNELS[name]) in REFUSED


class Convolving(nn.Module):
    """Model whose tokens pass one depthwise kernel, through a weight that it computes or not."""

    def __init__(self, computed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, WIDTH, 4, 4)
        self.mix, self.computed = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH, bias=False), computed
        self.mix.weight.data.copy_(kernel(BLUR))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.mix.weight / self.mix.weight.norm() if self.computed else self.mix.weight
        tokens = raster(F.conv2d(self.embed(x), weight, padding=1, groups=WIDTH))[:, None]
        return F.scaled_dot_product_attention(tokens, tokens, tokens)


def reason(model: nn.Module) -> str | None:
    with visattn.capture(model) as recording, torch.no_grad():
        model(made("image", 0, 1))
    return recording[0].reason


def written_by_numpy(model: Convolving, rows: list[list[float]]) -> None:
    model.mix.weight.detach().numpy()[:] = kernel(rows).numpy()


def test_a_centered_kernel_in_another_type_is_placed() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert reason(Convolving()) is None


def written_by_torch(model: Convolving, rows: list[list[float]]) -> None:
    model.mix.weight.data.copy_(kernel(rows))


def exchanged(model: Convolving, rows: list[list[float]]) -> None:
    model.mix.weight = nn.Parameter(kernel(rows))


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("change", [written_by_torch, written_by_numpy, exchanged])
def test_a_kernel_that_begins_to_lean_between_forward_passes_is_refused(change: Any, computed: bool) -> None:
    model = Convolving(computed)
    assert reason(model) is None
    assert reason(model) is None
    change(model, LEANING)
    assert "leans to one side" in str(reason(model))
    change(model, BLUR)
    assert reason(model) is None


def test_training_steps_keep_the_tape() -> None:
    model = Convolving()
    entries = []
    for _ in range(3):
        assert reason(model) is None
        entries.append(TAPES.of(model)[0].entries)
        model.mix.weight.data.add_(0.01 * torch.randn_like(model.mix.weight))
    assert entries[0] is entries[1] is entries[2]


# --- what tokens have in common


def unit() -> Tensor:
    one = torch.zeros(1, TOKENS, 1)
    one[0, 0], one[0, 1] = 2**-0.5, -(2**-0.5)
    return one


def along(t: Tensor) -> Tensor:
    return (unit() * t).sum(1, keepdim=True)


def windows(t: Tensor) -> Tensor:
    return grid(t)


KEPT: dict[str, Change] = {
    "a class token added": lambda m, t: t + m.cls,
    "a mean added": lambda _, t: 1e-2 * t + t.mean(1, keepdim=True),
    "a mean subtracted": lambda _, t: t - t.mean(1, keepdim=True),
    "a gate of the mean": lambda m, t: t * m.part(t.mean(1, keepdim=True)).sigmoid(),
    "a gate of the maximum": lambda _, t: t * F.adaptive_max_pool2d(planes(t), 1).flatten(2).mT.sigmoid(),
    "a softmax over tokens": lambda _, t: t.exp() / t.exp().sum(1, keepdim=True),
    "a mean of each row": lambda _, t: (windows(t) - windows(t).mean(2, keepdim=True)).flatten(1, 2),
    "tokens and a table": lambda m, t: torch.addcmul(t, m.pos, torch.ones(1)),
}
TOLD_APART: dict[str, Change] = {
    "one token added": lambda _, t: 1e-2 * t + t[:, :1],
    "one token subtracted": lambda _, t: 1e-2 * t - t[:, 40:41],
    "one token added with out": lambda _, t: torch.add(1e-2 * t, t[:, :1], out=torch.empty_like(t)),
    "one token in a lerp": lambda _, t: torch.lerp(t[:, :1], t, 1e-2),
    "one token as a gate": lambda _, t: 1e-2 * t * (1 + t[:, :1]),
    "one token of each row": lambda _, t: (1e-2 * windows(t) + windows(t)[:, :, 6:7]).flatten(1, 2),
    "one row": lambda _, t: (1e-2 * windows(t) + windows(t)[:, :1]).flatten(1, 2),
    "the mean of some": lambda _, t: 1e-2 * t + t[:, :2].mean(1, keepdim=True),
    "one token through an operation without a rule": lambda _, t: 1e-2 * t + torch.cdist(t[:, :1], torch.eye(WIDTH)[None]),
    "a reflection": lambda _, t: t - 2 * unit() * along(t),
    "a reflection, expanded": lambda _, t: t - 2 * unit() * along(t).expand_as(t),
    "a reflection, expanded and copied": lambda _, t: t - along(t).expand_as(t).contiguous() * (2 * unit()),
    "a reflection by addcmul": lambda _, t: torch.addcmul(t, unit(), along(t), value=-2),
    "a reflection by lerp": lambda _, t: torch.lerp(t, along(t), 2 * unit()),
    "a reflection by baddbmm": lambda _, t: torch.baddbmm(t, unit(), unit().mT @ t, alpha=-2),
    "a reflection in each row": lambda _, t: (
        windows(t) - 2 * unit()[:, None, :12] * (windows(t) * unit()[:, None, :12]).sum(2, keepdim=True)
    ).flatten(1, 2),
    "a mean, tokens and turned tokens": lambda _, t: torch.addcmul(1e-3 * t.mean(1, keepdim=True), 1e-3 * t, 1 + t.flip(1)),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_all_tokens_have_in_common_keeps_places(name: str) -> None:
    assert outcome(KEPT[name]) == "right"


TOLD_APART |= WEIGHTED


@pytest.mark.parametrize("name", TOLD_APART)
def test_one_place_in_all_tokens_and_weighted_sums_are_refused(name: str) -> None:
    assert outcome(TOLD_APART[name]) in REFUSED


class Normalizing(nn.Module):
    """Model that uses a tensor of its file, and drops paths and channels at random."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, WIDTH, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = raster(F.dropout2d(self.embed((x - MEAN) / 0.2), 0.1))
        tokens = (tokens * tokens.new_empty(len(x), 1, 1).bernoulli_(0.9).div_(0.9))[:, None]
        return F.scaled_dot_product_attention(tokens, tokens, tokens)


MEAN = torch.tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1)


def test_random_numbers_and_tensors_of_a_file_are_constants() -> None:
    torch.manual_seed(0)
    assert reason(Normalizing().train()) is None


# --- resizing


def resized(size: tuple[int, int], mode: str, **how: Any) -> Change:
    return lambda _, t: raster(F.interpolate(planes(t), size, mode=mode, **how))


RESIZED: dict[str, Change] = {
    "nearest to twice": resized((16, 24), "nearest"),
    "nearest to half": resized((4, 6), "nearest"),
    "nearest to fewer, which are some of the cells": resized((5, 9), "nearest"),
    "the center to others": resized((9, 13), "nearest-exact"),
    "bilinear to others": resized((9, 13), "bilinear"),
    "aligned corners": resized((5, 9), "bilinear", align_corners=True),
    "maximum to others": lambda _, t: raster(F.adaptive_max_pool2d(planes(t), (3, 5))),
}
MOVED_BY_RESIZING: dict[str, Change] = {
    "nearest to more": resized((9, 13), "nearest"),
    "padded on one side": lambda _, t: raster(F.interpolate(F.pad(planes(t), (4, 0, 4, 0)), (8, 12), mode="bilinear")),
    "padded on one side, then pooled": lambda _, t: raster(F.adaptive_avg_pool2d(F.pad(planes(t), (4, 0, 0, 0)), (4, 8))),
    "by a scale that is not that of the size": lambda _, t: torch.ops.aten.upsample_nearest1d(t.mT, [96], 2.0).mT,
}


@pytest.mark.parametrize("name", RESIZED)
def test_resizing_that_reads_around_the_center_is_placed(name: str) -> None:
    assert outcome(RESIZED[name], resamples=True) == "right"


def test_a_gate_from_some_of_the_finer_cells_leaves_tokens_in_their_cells() -> None:
    def gated(_: Any, t: Tensor) -> Tensor:
        gate = F.interpolate(planes(t).sigmoid(), (3, 5), mode="nearest")
        return raster(F.adaptive_avg_pool2d(planes(t), (3, 5)) * gate)

    model = Mover(Program("", "", gated))
    with visattn.capture(model) as recording:
        quietly(model, made("image", 0, 1))
    assert recording[0].keys.grid == (3, 5)


def test_pixels_may_be_resized_to_the_nearest() -> None:
    model = Mover(Program("", "", lambda _, t: t))
    model.maps = lambda x: model.embed(F.interpolate(x, (36, 52), mode="nearest")).flatten(2)  # type: ignore[method-assign]
    assert reason(model) is None


@pytest.mark.parametrize("name", MOVED_BY_RESIZING)
def test_resizing_that_reads_elsewhere_is_refused(name: str) -> None:
    assert outcome(MOVED_BY_RESIZING[name], resamples=True) in REFUSED


# --- memory that other code holds


def share(m: Any) -> None:
    m.register_buffer("room", torch.zeros(1, TOKENS + 1, WIDTH))
    m.whole, m.part_of_it = m.room.numpy(), m.room[:, 1:].numpy()
    m.plain, m.kept = torch.zeros(1, TOKENS, WIDTH), {"a": torch.zeros(1, TOKENS, WIDTH)}
    m.plain_array, m.kept_array = m.plain.numpy(), m.kept["a"][:, 48:].numpy()
    m.array = np.zeros((1, TOKENS, WIDTH), np.float32)
    m.register_buffer("of_array", torch.from_numpy(m.array))
    m.register_buffer("by_dlpack", torch.utils.dlpack.from_dlpack(m.array))


def put(array: Any, t: Tensor) -> Any:
    """Let NumPy write turned tokens; return the array."""
    array[:] = np.ascontiguousarray(t.numpy()[:, ::-1])[:, -array.shape[1] :]
    return array


def number(array: Any, t: Tensor) -> Tensor:
    return torch.cat([torch.full((1, 1, WIDTH), float(array[0, 5, 0])), t], 1)


def part_before_whole(_: Any, t: Tensor) -> Tensor:
    out = torch.zeros_like(t)
    _part, whole = out[:, 48:].numpy(), out.numpy()
    put(whole, t)
    return out + 0


def read_after_a_write(_: Any, t: Tensor) -> Tensor:
    out = torch.zeros_like(t)
    array = out.numpy()
    out.copy_(t)
    return number(array, t)


HELD: dict[str, Change] = {
    "a buffer": lambda m, t: (put(m.part_of_it, t), m.room.clone())[1],
    "a buffer, read by a view": lambda m, t: (put(m.part_of_it, t), m.room[:, 1:] * 1)[1],
    "a buffer, then written by torch": lambda m, t: (put(m.part_of_it, t), m.room[:, :1].copy_(m.cls), m.room.clone())[2],
    "a buffer, after torch": lambda m, t: (m.room[:, 1:].copy_(t), put(m.part_of_it, t), m.room[:, 1:].clone())[2],
    "a buffer of an array": lambda m, t: (put(m.array, t), m.of_array + 0)[1],
    "a buffer by DLPack": lambda m, t: (put(m.array, t), m.by_dlpack + 0)[1],
    "an attribute": lambda m, t: (put(m.plain_array, t), m.plain.clone())[1],
    "a tensor in a container": lambda m, t: (put(m.kept_array, t), m.kept["a"] + 1e-3 * t)[1],
    "a part before the whole": part_before_whole,
    "a number that is read after a write": read_after_a_write,
    "a number of a buffer": lambda m, t: (m.room[:, 1:].copy_(t), number(m.whole, t))[1],
}


@pytest.mark.parametrize("name", HELD)
def test_memory_that_other_code_holds_is_watched(name: str) -> None:
    assert outcome(HELD[name], share) in REFUSED


def test_shared_memory_that_nobody_writes_is_constant() -> None:
    assert outcome(lambda m, t: t.flip(1) + m.room[:, 1:] + m.plain, share) == "right"


def test_sums_of_tensors_hold_no_number_that_was_read() -> None:
    assert outcome(lambda m, t: (t.numpy().sum(), t.flip(1) + t.flip(1))[1]) == "right"


def test_a_known_tape_notices_a_write() -> None:
    model = Mover(Program("", "", lambda m, t: t + m.plain, prepare=share))

    def told() -> str | None:
        with visattn.capture(model) as recording:
            quietly(model, made("image", 0, 1))
        return recording[0].reason

    assert told() is None
    assert told() is None
    model.program[0] = Program("", "", lambda m, t: (put(m.plain_array, t), t + m.plain)[1], prepare=share)
    assert told() is not None


# --- programs under a capture compute what they do without one


def rank(t: Tensor) -> Tensor:
    out = torch.zeros((), dtype=torch.long)
    torch.linalg.matrix_rank(t[0], out=out)
    return out


def chained(m: Any, t: Tensor) -> Tensor:
    out = torch.ones(TOKENS, WIDTH)
    torch.chain_matmul(m.mix, t[0], out=out)  # type: ignore[no-untyped-call]
    return out[None]


SAME_BITS: dict[str, Change] = {
    "max_pool1d": lambda _, t: torch.max_pool1d(t, 3, 1, 1),
    "max_pool1d by keyword": lambda _, t: F.max_pool1d(input=t, kernel_size=1, stride=None),
    "MaxPool1d": lambda _, t: nn.MaxPool1d(2)(t),
    "matrix_rank with out": lambda _, t: t * rank(t),
    "chain_matmul with out": chained,
    "l1_loss with weights": lambda _, t: t * F.l1_loss(t, t.flip(1), **{"weight": torch.linspace(0, 1, WIDTH).expand_as(t)}),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", SAME_BITS)
def test_calls_compute_the_same_under_a_capture(name: str, inference: bool) -> None:
    model, x, strides = Mover(Program("", "", SAME_BITS[name])), made("image", 0, 1), list[Any]()
    change = SAME_BITS[name]

    def seen(m: Any, t: Tensor) -> Tensor:
        out = change(m, t)
        strides.append(out.stride())
        return out  # type: ignore[no-any-return]

    model.program[0] = Program("", "", seen)
    with torch.inference_mode(inference):
        plain = quietly(model, x)
        with visattn.capture(model):
            first, second = quietly(model, x), quietly(model, x)
    assert torch.equal(plain, first)
    assert torch.equal(plain, second)
    assert strides[0] == strides[1] == strides[2]
    assert math.isfinite(float(plain.sum()))
