"""Programs that sample values at computed points, and that change the grid: transposed convolutions, pooling, padding, interpolation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.capturing.moving import GRID, WIDTH
from tests.capturing.within.model import Change, Program, planes, programs, raster

ROWS, COLUMNS = GRID


def _points(down: float = 0.0, right: float = 0.0, align: bool = False) -> Tensor:
    """Return the points of each cell's own center, moved by some cells, for `grid_sample`."""
    y, x = torch.arange(ROWS) + down, torch.arange(COLUMNS) + right
    rows = 2 * y / (ROWS - 1) - 1 if align else (2 * y + 1) / ROWS - 1
    columns = 2 * x / (COLUMNS - 1) - 1 if align else (2 * x + 1) / COLUMNS - 1
    return torch.stack([columns[None].expand(GRID), rows[:, None].expand(GRID)], -1)[None]


def _sampled(t: Tensor, points: Tensor, mode: str = "bilinear", padding: str = "zeros", align: bool = False) -> Tensor:
    return raster(F.grid_sample(planes(t), points, mode, padding, align))


def _computed(t: Tensor, size: float) -> Tensor:
    """Return offsets that the tokens compute, up to a size in cells."""
    offsets = size * torch.tanh(t[..., :2]).view(1, *GRID, 2)
    return _points() + offsets * torch.tensor([2 / COLUMNS, 2 / ROWS])


def _by_hand(t: Tensor, down: float, right: float) -> Tensor:
    """Sample bilinearly with four gathers, as detectors do."""
    y = (torch.arange(ROWS) + down).clamp(0, ROWS - 1)[:, None].expand(GRID).flatten()
    x = (torch.arange(COLUMNS) + right).clamp(0, COLUMNS - 1)[None].expand(GRID).flatten()
    top, left = y.floor().long(), x.floor().long()
    bottom, far = (top + 1).clamp(max=ROWS - 1), (left + 1).clamp(max=COLUMNS - 1)
    a, b = (y - top)[:, None], (x - left)[:, None]
    return (
        t[:, top * COLUMNS + left] * (1 - a) * (1 - b)
        + t[:, top * COLUMNS + far] * (1 - a) * b
        + t[:, bottom * COLUMNS + left] * a * (1 - b)
        + t[:, bottom * COLUMNS + far] * a * b
    )


def _affine(t: Tensor, matrix: list[list[float]], align: bool = False) -> Tensor:
    return _sampled(t, F.affine_grid(torch.tensor([matrix]), [1, WIDTH, *GRID], align), align=align)


def _volume(t: Tensor) -> Tensor:
    points = torch.cat([_points(0, 3), torch.zeros(1, *GRID, 1)], -1)[:, None]
    return raster(F.grid_sample(planes(t)[:, :, None], points, align_corners=False)[:, :, 0])


SAMPLED: dict[str, Change] = {
    "own centers": lambda m, t: _sampled(t, _points()),
    "own centers, aligned corners": lambda m, t: _sampled(t, _points(align=True), align=True),
    "own centers by keyword": lambda m, t: raster(
        F.grid_sample(input=planes(t), grid=_points(), mode="nearest", align_corners=False)
    ),
    "wrong corners": lambda m, t: _sampled(t, _points(align=True)),
    "near": lambda m, t: _sampled(t, _points(0.2, -0.3)),
    "half a cell": lambda m, t: _sampled(t, _points(0.5, 0.0)),
    "six tenths": lambda m, t: _sampled(t, _points(0.6, 0.0), padding="border"),
    "a cell": lambda m, t: _sampled(t, _points(1.0, 0.0), padding="border"),
    "far": lambda m, t: _sampled(t, _points(0.0, 3.0), padding="reflection"),
    "far, nearest": lambda m, t: _sampled(t, _points(2.0, 3.0), "nearest", "border"),
    "far, bicubic": lambda m, t: _sampled(t, _points(0.0, -3.0), "bicubic"),
    "near, nearest": lambda m, t: _sampled(t, _points(0.3, 0.3), "nearest"),
    "near, bicubic": lambda m, t: _sampled(t, _points(0.1, -0.1), "bicubic"),
    "computed, near": lambda m, t: _sampled(t, _computed(t, 0.3)),
    "computed, far": lambda m, t: _sampled(t, _computed(t, 5.0)),
    "computed, nearest": lambda m, t: _sampled(t, _computed(t, 0.3), "nearest"),
    "computed by learned numbers, far": lambda m, t: _sampled(t, _computed(30 * m.pos, 4.0)),
    "computed by learned numbers, near": lambda m, t: _sampled(t, _computed(m.pos, 0.3)),
    "by hand, near": lambda m, t: _by_hand(t, 0.2, -0.2),
    "by hand, far": lambda m, t: _by_hand(t, 0.0, 3.25),
    "by hand, own": lambda m, t: _by_hand(t, 0.0, 0.0),
    "affine identity": lambda m, t: _affine(t, [[1.0, 0, 0], [0, 1, 0]]),
    "affine identity, aligned corners": lambda m, t: _affine(t, [[1.0, 0, 0], [0, 1, 0]], True),
    "affine flip": lambda m, t: _affine(t, [[-1.0, 0, 0], [0, 1, 0]]),
    "affine shift": lambda m, t: _affine(t, [[1.0, 0, 0.5], [0, 1, 0]]),
    "affine zoom": lambda m, t: _affine(t, [[0.5, 0, 0], [0, 0.5, 0]]),
    "affine turn": lambda m, t: _affine(t, [[0.0, 1, 0], [1, 0, 0]]),
    "a volume": lambda m, t: _volume(t),
    "near, with a residual": lambda m, t: 1e-2 * t + _sampled(t, _points(0.2, 0.2)),
    "far, with a residual": lambda m, t: 1e-2 * t + _sampled(t, _points(3.0, 0.0)),
    "computed far, with a residual": lambda m, t: 1e-2 * t + _sampled(t, _computed(t, 5.0)),
    "a mean of four points": lambda m, t: torch.stack(
        [_sampled(t, _points(y, x)) for y in (-0.3, 0.3) for x in (-0.3, 0.3)]
    ).mean(0),
    "a mean of far points": lambda m, t: torch.stack([_sampled(t, _points(y, 3)) for y in (-0.3, 0.3)]).mean(0),
    "roi_align by pooling": lambda m, t: raster(F.adaptive_avg_pool2d(planes(t)[:, :, 2:6, 3:9], (4, 6))),
    "deform_conv2d": lambda m, t: _deformed(t, 0.0),
    "deform_conv2d, far": lambda m, t: _deformed(t, 3.0),
    "roi_align": lambda m, t: _regions(t),
}


def _deformed(t: Tensor, down: float) -> Tensor:
    from torchvision.ops import deform_conv2d

    offset = torch.zeros(1, 2, *GRID)
    offset[:, 0] = down
    return raster(deform_conv2d(planes(t), offset, torch.eye(WIDTH)[:, :, None, None]))


def _regions(t: Tensor) -> Tensor:
    from torchvision.ops import roi_align

    boxes = torch.tensor([[float(x), 0, x + 3, 8] for x in range(9, -1, -3)])
    return roi_align(planes(t), [boxes], 1)[:, :, 0, 0][None]  # type: ignore[no-any-return]


def _transposed() -> Iterator[tuple[str, Change]]:
    for kernel, stride, padding, output, dilation in (
        (2, 2, 0, 0, 1),
        (3, 1, 1, 0, 1),
        (3, 2, 1, 0, 1),
        (3, 2, 1, 1, 1),
        (3, 2, 0, 0, 1),
        (4, 2, 1, 0, 1),
        (4, 4, 0, 0, 1),
        (4, 2, 0, 0, 1),
        (5, 2, 2, 1, 1),
        (5, 2, 1, 0, 1),
        (3, 3, 0, 0, 1),
        (3, 1, 0, 0, 1),
        (3, 1, 2, 0, 2),
        (3, 2, 2, 1, 2),
        (3, 1, 0, 0, 3),
        (2, 2, 0, 1, 1),
        (2, 3, 0, 0, 1),
        (1, 2, 0, 0, 1),
        (1, 2, 0, 1, 1),
        (6, 2, 2, 0, 1),
        (6, 3, 1, 1, 1),
        (2, 1, 0, 0, 3),
    ):
        weight = torch.ones(WIDTH, 1, kernel, kernel)
        how = {"stride": stride, "padding": padding, "output_padding": output, "dilation": dilation, "groups": WIDTH}
        told = f"conv_transpose2d {kernel}, stride {stride}, padding {padding}, output {output}, dilation {dilation}"
        yield told, lambda m, t, weight=weight, how=how: raster(F.conv_transpose2d(planes(t), weight, **how))
    yield (
        "transposed, uneven",
        lambda m, t: raster(F.conv_transpose2d(planes(t), torch.ones(WIDTH, 1, 2, 4), None, (2, 1), (0, 1), (0, 0), WIDTH)),
    )
    yield "transposed module", lambda m, t: raster(_module(t))
    yield (
        "transposed, then strided",
        lambda m, t: raster(F.avg_pool2d(F.conv_transpose2d(planes(t), torch.ones(WIDTH, 1, 2, 2), stride=2, groups=WIDTH), 2)),
    )


def _module(t: Tensor) -> Tensor:
    layer = torch.nn.ConvTranspose2d(WIDTH, WIDTH, 2, 2, groups=WIDTH)
    torch.nn.init.ones_(layer.weight)
    return layer(planes(t), output_size=[17, 25])  # type: ignore[no-any-return]


def _pooled() -> Iterator[tuple[str, Change]]:
    for kernel, stride, padding, ceil in itertools.product((2, 3), (1, 2, 3), (0, 1), (False, True)):
        told = f"{kernel}, stride {stride}, padding {padding}{', ceiling' if ceil else ''}"
        for name, func in (("avg_pool2d", F.avg_pool2d), ("max_pool2d", F.max_pool2d)):
            how = {"stride": stride, "padding": padding, "ceil_mode": ceil}
            if (kernel + stride + padding + ceil + (name == "avg_pool2d")) % 2:
                yield f"{name} {told}", lambda m, t, func=func, kernel=kernel, how=how: raster(func(planes(t), kernel, **how))
    for kernel, stride, padding, dilation in ((3, 1, 1, 1), (3, 2, 1, 1), (3, 1, 2, 2), (3, 1, 0, 2), (2, 2, 0, 1), (5, 3, 2, 1)):
        weight = torch.ones(WIDTH, 1, kernel, kernel)
        how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": WIDTH}
        told = f"conv2d {kernel}, stride {stride}, padding {padding}, dilation {dilation}"
        yield told, lambda m, t, weight=weight, how=how: raster(F.conv2d(planes(t), weight, **how))


POOLED: dict[str, Change] = {
    "adaptive average": lambda m, t: raster(F.adaptive_avg_pool2d(planes(t), (4, 6))),
    "adaptive average, uneven": lambda m, t: raster(F.adaptive_avg_pool2d(planes(t), (3, 5))),
    "adaptive maximum": lambda m, t: raster(F.adaptive_max_pool2d(planes(t), (4, 6))),
    "adaptive to more": lambda m, t: raster(F.adaptive_avg_pool2d(planes(t), (16, 24))),
    "lp_pool2d": lambda m, t: raster(F.lp_pool2d(planes(t).abs(), 2.0, 2)),
    "fractional": lambda m, t: raster(
        F.fractional_max_pool2d(planes(t), 2, (5, 7), _random_samples=torch.full((1, WIDTH, 2), 0.4))
    ),
    "avg_pool1d of rows": lambda m, t: F.avg_pool1d(t.mT, 12).mT,
    "avg_pool3d": lambda m, t: raster(F.avg_pool3d(planes(t)[:, :, None], (1, 2, 2))[:, :, 0]),
    "pixel_shuffle": lambda m, t: F.linear(raster(F.pixel_shuffle(planes(t), 2)), torch.ones(WIDTH, 4)),
    "pixel_unshuffle": lambda m, t: F.linear(raster(F.pixel_unshuffle(planes(t), 2)), torch.ones(WIDTH, 4 * WIDTH)),
    "repeated rows": lambda m, t: raster(planes(t).repeat_interleave(2, 2)),
    "patch merging": lambda m, t: F.linear(
        torch.cat([planes(t)[:, :, i::2, j::2] for j in (0, 1) for i in (0, 1)], 1).flatten(2).mT, torch.ones(WIDTH, 4 * WIDTH)
    ),
}
MOVING_POOLS: dict[str, Change] = {
    "unpooled": lambda m, t: raster(F.max_unpool2d(*F.max_pool2d(planes(t), 2, return_indices=True), 2)),
    "unpooled elsewhere": lambda m, t: raster(_unpooled(t)),
    "indices of a pooling": lambda m, t: (
        planes(t).flatten(2).gather(2, F.max_pool2d(planes(t), 2, return_indices=True)[1].flatten(2)).mT
    ),
    "fold": lambda m, t: raster(F.fold(F.unfold(planes(t), 3, padding=1), GRID, 3, padding=1)),
    "fold of a stride": lambda m, t: raster(F.fold(t.mT.repeat(1, 4, 1), (16, 24), 2, stride=2)),
    "unfold of the middle": lambda m, t: F.unfold(planes(t), 3, padding=1).view(1, WIDTH, 9, 96)[:, :, 4].mT,
    "unfold of a corner": lambda m, t: F.unfold(planes(t), 3, padding=1).view(1, WIDTH, 9, 96)[:, :, 0].mT,
    "unfold of a corner with a residual": lambda m, t: (
        1e-2 * t + F.unfold(planes(t), 3, padding=1).view(1, WIDTH, 9, 96)[:, :, 2].mT
    ),
}


def _unpooled(t: Tensor) -> Tensor:
    pooled = F.avg_pool2d(planes(t), 2)
    places = torch.arange(95, -1, -4).view(1, 1, 4, 6).expand_as(pooled)
    return F.max_unpool2d(pooled, places, 2) + 0.0


def _padded() -> Iterator[tuple[str, Change]]:
    for mode in ("constant", "reflect", "replicate", "circular"):
        yield f"pad {mode}, cropped", lambda m, t, mode=mode: raster(F.pad(planes(t), (2, 1, 3, 1), mode=mode)[:, :, 3:-1, 2:-1])
        yield (
            f"pad {mode}, cropped elsewhere",
            lambda m, t, mode=mode: raster(F.pad(planes(t), (2, 2, 2, 2), mode=mode)[:, :, :8, 1:13]),
        )
        yield f"pad {mode}", lambda m, t, mode=mode: raster(F.pad(planes(t), (1, 1, 1, 1), mode=mode))
        yield (
            f"pad {mode}, a mean of three",
            lambda m, t, mode=mode: raster(F.avg_pool2d(F.pad(planes(t), (1, 1, 1, 1), mode=mode), 3, 1)),
        )
        yield f"pad {mode} of the sequence", lambda m, t, mode=mode: F.pad(t.mT, (3, 0), mode=mode).mT[:, :96]
    yield "pad negative", lambda m, t: raster(F.pad(planes(t), (-1, -2, -1, 0)))
    yield "pad negative and positive", lambda m, t: raster(F.pad(planes(t), (-1, 1, -2, 2)))
    yield "ReflectionPad2d", lambda m, t: raster(torch.nn.ReflectionPad2d(2)(planes(t))[:, :, 1:9, 1:13])
    yield "constant_pad_nd", lambda m, t: torch.constant_pad_nd(t, [0, 0, 5, -5], 0.0)


def _interpolated() -> Iterator[tuple[str, Change]]:
    sizes = {"double": (16, 24), "half": (4, 6), "same": GRID, "other": (5, 9), "triple": (24, 36)}
    for name, size in sizes.items():
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area"):
            corners = (False, True) if mode in ("bilinear", "bicubic") else (None,)
            for align in corners:
                told = f"interpolate to {name}, {mode}{', aligned corners' if align else ''}"
                yield (
                    told,
                    lambda m, t, size=size, mode=mode, align=align: raster(
                        F.interpolate(planes(t), size, mode=mode, align_corners=align)
                    ),
                )
    yield "interpolate by scale", lambda m, t: raster(F.interpolate(planes(t), scale_factor=1.5, mode="nearest"))
    yield (
        "interpolate by scale, kept",
        lambda m, t: raster(F.interpolate(planes(t), scale_factor=1.6, mode="bilinear", recompute_scale_factor=False)),
    )
    yield "interpolate antialiased", lambda m, t: raster(F.interpolate(planes(t), (4, 6), mode="bilinear", antialias=True))
    yield "interpolate the sequence", lambda m, t: F.interpolate(t.mT, 48, mode="linear").mT
    yield "interpolate twice", lambda m, t: raster(F.interpolate(F.interpolate(planes(t), (16, 24)), GRID))
    yield "upsample module", lambda m, t: raster(torch.nn.Upsample(scale_factor=2)(planes(t)))


def resampled() -> Iterator[Program]:
    yield from programs("sampling", SAMPLED)
    how: dict[str, Any] = {"resamples": True}
    yield from programs("transposed", _transposed(), **how)
    yield from programs("pooling", _pooled(), **how)
    yield from programs("pooling", POOLED, **how)
    yield from programs("pooling", MOVING_POOLS)
    yield from programs("padding", _padded())
    yield from programs("interpolation", _interpolated(), **how)
