"""Rules for operations on maps: convolutions, pooling, resizing, windows that are cut out and put back, sampling at points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from visattn.capturing.placing.moves import occurrences
from visattn.capturing.placing.places import Places
from visattn.capturing.placing.work import Result, Unproven, Work, through
from visattn.capturing.tokens.codes import Geometry2d, same_along
from visattn.capturing.tokens.lines import shared
from visattn.capturing.tokens.planes import Plane, Planes, compact
from visattn.capturing.tokens.points import POINTS, UNKNOWN, Cells, Drift
from visattn.geometry import Box


def convolved(work: Work) -> Result:
    """Mix channels by a kernel: cells lie at its center if its mass does. It is the same at all positions, so its own origin is free.

    A kernel with a single tap that is not zero moves cells.

    Raises:
        Unproven: If the kernel leans to one side.
    """
    source = work.places(work.get("input"))
    if not work.counts(source):
        raise Unproven("a kernel that comes from the image")
    weight = work.facts(work.get("weight")).shape
    axes = len(weight) - 2
    stride, padding, dilation = (
        _sides(work.get(key, default), axes) for key, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    )
    reach = tuple((side - 1) * gap + 1 for side, gap in zip(weight[2:], dilation, strict=True))
    turned = bool(work.get("transposed", False))
    merged = source._replace(copies=None).each(lambda codes: through(work.planes, codes, 1, 1))
    assert merged is not None  # noqa: S101 - `through` raises
    many = not same_along(source.codes, 1) and work.shape[1] > 1
    kernel = work.step.kernel
    if all(same_along(source.codes, -1 - axis) for axis in range(axes)):  # channels of one token, as in ECA
        kernel = None
    if kernel is not None and kernel.tap is not None and set(stride) == {1}:
        tap, how = kernel.tap, (stride, padding, dilation, turned, _sides(work.get("output_padding", 0), axes))
        return [_finished(merged.each(lambda codes: _moved(work, codes, weight[2:], tap, how)), source, axes, many)]
    if kernel is not None and not kernel.centered:
        raise Unproven(f"{work.name} by a kernel that leans to one side")
    made = merged.each(lambda codes: resampled(work, codes, axes, reach, stride, padding, transposed=turned))
    return [_finished(made, source, axes, many)]


def _moved(work: Work, codes: Tensor, taps: Sequence[int], tap: Sequence[int], how: tuple[Any, ...]) -> Tensor:
    """Return codes `(images, 1, ...)` behind a kernel that reads one cell: they are convolved by a kernel with a one there."""
    one = torch.zeros(1, 1, *taps, dtype=torch.float64, device=work.device)
    one[(0, 0, *tap)] = 1
    moved = torch.ops.aten.convolution((codes + 1).double(), one, None, *how, 1) - 1
    made: Tensor = moved.round().int().expand(work.shape)
    return made


def pooled(work: Work) -> Result:
    """Pooling with a kernel."""
    source, axes = work.main(), 3 if "3d" in work.name else 1 if "1d" in work.name else 2
    size = _sides(work.get("kernel_size"), axes)
    stride = _sides(work.get("stride") or size, axes)
    padding, dilation = (_sides(work.get(key, default), axes) for key, default in (("padding", 0), ("dilation", 1)))
    reach = tuple((side - 1) * gap + 1 for side, gap in zip(size, dilation, strict=True))
    return _over_channels(work, source, axes, lambda codes: resampled(work, codes, axes, reach, stride, padding))


def adapted(work: Work) -> Result:
    """Pooling to a size, and resizing."""
    source = work.main()
    axes = 3 if "3d" in work.name else 1 if "1d" in work.name else 2
    try:
        return _over_channels(work, source, axes, lambda codes: resampled(work, codes, axes, None, None, None))
    except Unproven:
        if "nearest" not in work.name:
            raise
        return [_taken(work, source)]


def _taken(work: Work, source: Places) -> Places:
    """Resize to the nearest cells, as a choice of cells: each keeps its own place."""
    moved = source._replace(copies=None).each(lambda codes: _resized(work, codes.double()).int())
    assert moved is not None  # noqa: S101 - it always succeeds
    number = _resized(work, torch.arange(source.shape.numel(), dtype=torch.float64, device=work.device).view(source.shape))
    occurrence = occurrences(number)
    if not bool(occurrence.any()) or not source.placed:
        return moved
    copies = torch.zeros_like(occurrence) if source.copies is None else _resized(work, source.copies.double()).int()
    return moved._replace(copies=copies * (int(occurrence.max()) + 1) + occurrence)


def _resized(work: Work, maps: Tensor) -> Tensor:
    """Apply a resizing to other maps."""
    op = getattr(torch.ops.aten, work.name.replace("adaptive_max", "adaptive_avg").replace("mkldnn_", "_"))
    made: Tensor = op(
        maps, **{key: value for key, value in work.step.given.items() if key not in ("self", "input", "out", "indices")}
    )
    return made


def _over_channels(work: Work, source: Places, axes: int, change: Callable[[Tensor], Tensor]) -> Result:
    """Apply a change to the codes of one channel, if all channels have the same."""
    channel = source.codes.ndim - axes - 1
    alike = channel >= 0 and same_along(source.codes, channel)

    def each(codes: Tensor) -> Tensor:
        return change(codes.narrow(channel, 0, 1) if alike else codes) if channel >= 0 else change(codes[None])[0]

    made = source._replace(copies=None, others=None).each(each)
    return [_finished(made, source, axes, False)] + [work.unknown(out.shape) for out in work.outs[1:]]


def _finished(made: Places | None, source: Places, axes: int, many: bool) -> Places:
    assert made is not None  # noqa: S101 - the change raises
    merged = made.shape[-axes:] != source.shape[-axes:]
    leaning = source.weighted if merged else source.leaning
    return made._replace(mixture=made.mixture or many, leaning=leaning, copies=None, others=None)


def resampled(
    work: Work,
    codes: Tensor,
    axes: int,
    reach: tuple[int, ...] | None,
    stride: tuple[int, ...] | None,
    padding: tuple[int, ...] | None,
    *,
    transposed: bool = False,
) -> Tensor:
    """Return the codes after a kernel, or a resizing, over the last axes.

    Raises:
        Unproven: If the codes form no grid.
    """
    shape, planes = work.shape, work.planes
    kernel = reach is not None and stride is not None and padding is not None
    slack = 1.0 if planes.pixels.holds(codes) else 0.5  # pixels are finer than any cell that is shown
    if not kernel and not _reads_own(work, codes.shape[-axes:], codes.shape[-axes:], [0] * axes, slack):
        raise Unproven(work.name)
    if codes.shape[-axes:] == shape[-axes:] and not transposed and (not kernel or _stays(reach, stride, padding)):  # type: ignore[arg-type]
        return codes.expand(shape)
    if transposed and codes.shape[-axes:] == shape[-axes:] and _stays(reach, stride, padding):  # type: ignore[arg-type]
        return codes.expand(shape)
    lead = codes.shape[: codes.ndim - axes]
    if codes.shape[-axes:].numel() == 1 and shape[-axes:].numel() == 1:
        return codes.expand(shape)
    if axes == 1:
        return _on_line(work, codes, reach, stride)
    if axes == 3 and codes.ndim == 5:
        return _resampled_clip(work, codes[:, 0], reach, stride, padding)
    if axes != 2 or codes.ndim not in (3, 4) or (len(lead) == 2 and lead[1] != 1):
        raise Unproven(work.name)
    maps = codes.flatten(0, 1) if codes.ndim == 4 else codes
    geometry = None if not kernel else Geometry2d(reach, stride, padding)  # type: ignore[arg-type]
    plane, before = planes.raster(maps)
    if plane is None and geometry is not None and not transposed:
        plane, before = planes.bordered(maps, geometry.reach, geometry.stride)
    if plane is None:
        return _tiled(work, maps, geometry)
    image, _ = planes.split(maps.flatten(1).amax(1), plane)
    rows, columns = shape[-2:]
    box = _covered(plane, before, rows, columns, geometry, transposed=transposed)
    if not _meets(plane, box, rows, columns):
        raise Unproven(work.name)
    if geometry is None and not _reads_own(work, maps.shape[1:], plane.grid[-2:], before, slack):
        raise Unproven(work.name)
    made = planes.codes(planes.grid(rows, columns, box, plane.frames)).view(-1, rows, columns)
    made = made[image.long()]
    return (made[:, None] if codes.ndim == 4 else made).expand(shape)


def _meets(plane: Plane, box: Box, rows: int, columns: int) -> bool:
    """Check whether the center of each new cell is at most half a cell, of the coarser grid, outside of the plane it was made from."""
    was = plane.box
    return all(
        start - max(old, new) - 1e-6 <= first + new and last - new <= stop + max(old, new) + 1e-6
        for start, stop, old, first, last, new in (
            (was.top, was.bottom, was.height / plane.grid[-2] / 2, box.top, box.bottom, box.height / rows / 2),
            (was.left, was.right, was.width / plane.columns / 2, box.left, box.right, box.width / columns / 2),
        )
    )


def _reads_own(work: Work, size: Sequence[int], inner: Sequence[int], before: Sequence[int], slack: float) -> bool:
    """Check whether a resizing reads each cell from around its center.

    The operation itself says so, applied to the numbers of the lines that it reads. A maximum over an area reads where the mean does.

    Args:
        work: The resizing.
        size: Size of the maps that it reads.
        inner: Size of the plane in them, over which the new cells are spread evenly.
        before: Lines before that plane.
        slack: Distance that is near enough, in cells of the coarser grid.
    """
    for axis, (length, own, first) in enumerate(zip(size, inner, before, strict=True)):
        form = [1] * (len(size) + 2)
        form[axis + 2] = length
        lines = torch.arange(length, dtype=torch.float64).view(form).expand(1, 1, *size).contiguous()
        read = _resized(work, lines)[0, 0].movedim(axis, -1)
        scale = own / read.shape[-1]
        claimed = first + (torch.arange(read.shape[-1], dtype=torch.float64) + 0.5) * scale - 0.5
        if bool(((read - claimed).abs() > max(1, scale) * slack + 1e-6).any()):
            return False
    return True


def _stays(reach: Sequence[int], stride: Sequence[int], padding: Sequence[float]) -> bool:
    """Check whether a kernel has stride 1 and is centered on its cell to within half a cell, so that the grid stays the same."""
    return all(
        step == 1 and abs(size / 2 - before - 0.5) <= 0.5 + 1e-6
        for size, step, before in zip(reach, stride, padding, strict=True)
    )


def _covered(
    plane: Plane, before: tuple[int, int], rows: int, columns: int, geometry: Geometry2d | None, *, transposed: bool
) -> Box:
    """Return the box that a resampled plane covers.

    Cells of non-overlapping patches cover exactly the cells they read; other cells cover even shares around their centers.
    """
    box = plane.box
    if geometry is None:
        return box
    sides = []
    for axis, (start, stop, count) in enumerate(((box.top, box.bottom, rows), (box.left, box.right, columns))):
        scale = (stop - start) / plane.grid[axis - 2]
        reach, step, padding = geometry.reach[axis], geometry.stride[axis], geometry.padding[axis]
        if transposed:
            first = start + ((padding - (reach - 1) / 2) / step + 0.5 - before[axis]) * scale
            sides.append(shared(first, scale / step, count, start, stop))
            continue
        begin = start - (before[axis] + padding) * scale
        if reach == step and not padding:
            sides.append((begin, begin + count * step * scale))
        else:
            sides.append(shared(begin + reach / 2 * scale, step * scale, count, start, stop))
    (top, bottom), (left, right) = sides
    return Box(top, left, bottom, right)


def _on_line(work: Work, codes: Tensor, reach: tuple[int, ...] | None, stride: tuple[int, ...] | None) -> Tensor:
    """Return codes after a pooling over lines of tokens, whose windows do not overlap."""
    count = work.shape[-1]
    if reach is None and codes.shape[-1] % count == 0:
        width = codes.shape[-1] // count
    elif reach is not None and reach == stride and codes.shape[-1] == count * reach[0]:
        width = reach[0]
    else:
        raise Unproven(work.name)
    tiles = codes.reshape(*codes.shape[:-1], count, width)
    return through(work.planes, tiles, tiles.ndim - 1, 1)[..., 0].expand(work.shape)


def _resampled_clip(
    work: Work,
    codes: Tensor,
    reach: tuple[int, ...] | None,
    stride: tuple[int, ...] | None,
    padding: tuple[int, ...] | None,
) -> Tensor:
    """Return the codes after a convolution or pooling of clips, from codes `(B, T, H, W)`."""
    planes, shape = work.planes, work.shape
    frames, rows, columns = shape[2:]
    if reach is None or stride is None or padding is None:
        raise Unproven(work.name)
    geometry, step = Geometry2d(reach[1:], stride[1:], padding[1:]), stride[0]  # type: ignore[arg-type]
    if (frames, rows, columns) == (1, 1, 1) and reach == codes.shape[1:]:  # a patch of its own
        return through(planes, codes.flatten(1), 1, 1).view(-1, 1, 1, 1, 1).expand(shape)
    plane, before = planes.raster(codes.flatten(0, 1))
    if plane is None or codes.shape[1] != plane.frames or not (frames - 1) * step < plane.frames <= frames * step:
        raise Unproven(work.name)
    frame, _ = planes.split(codes.flatten(2).amax(2), plane)
    if bool((frame % plane.frames != torch.arange(plane.frames, device=codes.device)).any()):
        raise Unproven(work.name)
    new = planes.grid(rows, columns, _covered(plane, before, rows, columns, geometry, transposed=False), frames)
    return planes.codes(new)[(frame[:, 0] // plane.frames).long()][:, None].expand(shape)


def _tiled(work: Work, codes: Tensor, geometry: Geometry2d | None) -> Tensor:
    """Return codes after a strided kernel within windows, where `(groups, rows, columns)` codes are not one image."""
    rows, columns = work.shape[-2:]
    if geometry is None or (rows * geometry.stride[0], columns * geometry.stride[1]) != codes.shape[1:]:
        raise Unproven(work.name)
    tiles = codes.reshape(-1, rows, geometry.stride[0], columns, geometry.stride[1]).transpose(2, 3).flatten(3)
    merged = through(work.planes, tiles, 3, 1)[..., 0]
    return (merged[:, None] if len(work.shape) == 4 else merged).expand(work.shape)


def unfolded(work: Work) -> Result:
    """Windows cut out of maps (`im2col`)."""
    op = work.step.op
    assert op is not None  # noqa: S101 - a step of the model
    given = {key: value for key, value in work.step.given.items() if key != "self"}
    made = work.main()._replace(copies=None).each(lambda codes: (op(codes.double() + 1, **given) - 1).int())
    assert made is not None  # noqa: S101 - it always succeeds
    return made


def folded(work: Work) -> Result:
    """Windows `(images, channels x taps, windows)` put back into an image; each must lie at its own cell."""
    made = work.main()._replace(copies=None).each(lambda codes: _folded(work, codes))
    assert made is not None  # noqa: S101 - it raises
    return made


def _folded(work: Work, codes: Tensor) -> Tensor:
    kernel, stride, padding, size, dilation = (
        _sides(work.get(name, default), 2)
        for name, default in (("kernel_size", 1), ("stride", 1), ("padding", 0), ("output_size", 0), ("dilation", 1))
    )
    planes = work.planes
    grids = [plane for plane in planes.of(compact(codes)) if plane.grid]
    if codes.ndim != 3 or not same_along(codes, 1) or len(grids) != 1 or dilation != (1, 1):
        raise Unproven(work.name)
    plane, windows = grids[0], codes[:, 0]
    columns = (size[1] + 2 * padding[1] - kernel[1]) // stride[1] + 1
    number = torch.arange(windows.shape[1], device=codes.device)
    place = torch.stack([number // columns, number % columns], -1)
    steps, taps, before = (torch.tensor(value, device=codes.device) for value in (stride, kernel, padding))
    scale = torch.tensor([plane.box.height / size[0], plane.box.width / size[1]], dtype=torch.float64, device=codes.device)
    origin = torch.tensor([plane.box.top, plane.box.left], dtype=torch.float64, device=codes.device)
    middle = (place * steps - before + taps / 2) * scale + origin
    start, stop = planes.boxes(windows)
    if not bool(((middle >= start - 1e-6) & (middle <= stop + 1e-6)).all()):
        raise Unproven(work.name)
    image = planes.images_of(windows)[:, 0].long()
    made = planes.codes(planes.grid(size[0], size[1], plane.box))
    return made[image][:, None].expand(work.shape)


def sampled(work: Work) -> Result:
    """Values read at points `(N, rows, columns, 2)`: they count as those of the tokens that computed the points, with a drift."""
    values, asking = work.places(work.get("input")), work.places(work.get(POINTS))
    known = asking.placed or (asking.kind == "learned" and asking.located)
    if not known or asking.columns is not None or not same_along(asking.codes, -1) or values.kind in ("lost", "foreign"):
        raise Unproven(values.name or work.name)
    codes, drift = asking.codes[..., 0], Drift()
    if not all(plane.grid for plane in work.planes.of(values.codes)):  # members of a set, of which a token may read another one
        raise Unproven(work.name)
    if values.placed:
        owner = _owner(work.planes, values.codes)
        codes = work.planes.given(codes, owner.view(-1, 1, 1))
        drift = _drift(work, values, codes)
    made = codes[:, None].expand(work.shape)
    mixture = asking.mixture or values.mixture
    return asking._replace(kind="placed", codes=made, copies=None, others=None, mixture=mixture, drift=drift)


def _drift(work: Work, values: Places, asking: Tensor) -> Drift:
    """Return how far values that tokens `(N, rows, columns)` read lie from them."""
    points = work.step.points
    if points is None:
        return UNKNOWN
    cells = None
    with suppress(Unproven):
        cells = _asking_cells(work, values.codes, asking)
    by_sets = not all(plane.grid for plane in work.planes.of(asking))
    return values.drift.further(points.drift(cells), points, by_sets=by_sets)


def _asking_cells(work: Work, values: Tensor, asking: Tensor) -> Cells:
    """Return the cells of tokens `(N, rows, columns)` that read maps `(N, channels, rows, columns)`.

    Raises:
        Unproven: If the maps are no images, or the tokens lie on no grid, or belong to other images than the maps.
    """
    planes, maps = work.planes, values[:, 0]
    plane, before = planes.raster(maps)
    whole = plane is not None and before == (0, 0) and plane.grid == tuple(maps.shape[1:]) and same_along(values, 1)
    if plane is None or not whole:
        raise Unproven(work.name)
    asking = asking.narrow(2, 0, 1) if same_along(asking, 2) else asking
    (low, high), image = planes.boxes(asking), planes.images_of(asking)
    if bool(low.isnan().any()) or bool((image != planes.images_of(maps[:, :1, :1])).any()):
        raise Unproven(work.name)
    center, size = ((low + high) / 2).flip(-1), (high - low).flip(-1)
    if same_along(center, 0) and same_along(size, 0):
        center, size = center[:1], size[:1]
    box, columns, rows = plane.box, plane.columns, plane.grid[-2]
    aligned = bool(work.get("align_corners", False))  # then -1 and 1 are the centers of the first and the last cell
    shares = [(count - aligned) / count / 2 for count in (columns, rows)]
    sides = [[box.left + box.width / 2, box.top + box.height / 2], [box.width * shares[0], box.height * shares[1]]]
    middle, reach = torch.tensor(sides, dtype=torch.float64, device=asking.device)
    return Cells(center, size, middle, reach, int(work.get("padding_mode", 0)))


def _owner(planes: Planes, codes: Tensor) -> Tensor:
    stored = compact(codes)
    return planes.images_of(stored).flatten(1).amax(1).expand(codes.shape[0])


def _sides(value: Any, axes: int) -> tuple[int, ...]:  # noqa: ANN401
    if isinstance(value, int):
        return (value,) * axes
    return tuple(value) * (axes if len(value) == 1 else 1)
