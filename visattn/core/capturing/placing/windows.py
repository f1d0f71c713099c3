"""Rules for operations on maps: convolutions, pooling, resizing, windows that are cut out and put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from visattn.core.capturing.placing.cells import check_parameters, repeats_some
from visattn.core.capturing.placing.copies import copies_behind, occurrences
from visattn.core.capturing.placing.places import Places
from visattn.core.capturing.placing.work import Result, Unproven, Work, through
from visattn.core.capturing.tokens.codes import Geometry2d, same_along
from visattn.core.capturing.tokens.lines import shared
from visattn.core.capturing.tokens.planes import Plane, compact
from visattn.core.geometry import Box


def convolved(work: Work) -> Result:
    """Return the places of a convolution: each result lies in the middle of the cells that it reads, if the kernel is centered.

    A kernel with a single tap that is not zero moves cells. The kernel is the same at all positions, so its own origin is free.

    Raises:
        Unproven: If the kernel leans to one side.
    """
    source = work.places(work.get("input"))
    if not work.counts(source):
        raise Unproven("a kernel that comes from the image")
    check_parameters(work, source, ("weight", "bias"))
    kernel_size = work.facts(work.get("weight")).shape[2:]
    axes = len(kernel_size)
    stride, padding, dilation = (
        _sides(work.get(key, default), axes) for key, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    )
    reach = tuple((side - 1) * gap + 1 for side, gap in zip(kernel_size, dilation, strict=True))
    transposed = bool(work.get("transposed", False))
    one_channel = source._replace(copies=None, others=None).each(partial(through, work.planes, dim=1, size=1))
    assert one_channel is not None  # noqa: S101 - `through` raises
    merges_channels = not same_along(source.codes, 1)  # they belong to different cells
    has_one_cell = all(same_along(source.codes, -1 - axis) for axis in range(axes))  # a line of channels of one token, as in ECA
    kernel = None if has_one_cell else work.step.kernel
    if kernel is not None and kernel.tap is not None and set(stride) == {1}:
        settings = stride, padding, dilation, transposed, _sides(work.get("output_padding", 0), axes)
        moved = one_channel.each(partial(_moved, work, kernel_size=kernel_size, tap=kernel.tap, settings=settings))
        return [_finished(work, moved, source, axes, merges_channels)]
    if kernel is not None and not kernel.centered:
        raise Unproven(f"{work.name} by a kernel that leans to one side")
    made = one_channel.each(
        partial(resampled, work, axes=axes, reach=reach, stride=stride, padding=padding, transposed=transposed)
    )
    return [_finished(work, made, source, axes, merges_channels)]


def _moved(work: Work, codes: Tensor, kernel_size: Sequence[int], tap: Sequence[int], settings: tuple[Any, ...]) -> Tensor:
    """Return position codes `(images, 1, ...)` behind a kernel that reads one cell, as a kernel with a one there moves them."""
    shift = torch.zeros(1, 1, *kernel_size, dtype=torch.float64, device=work.device)
    shift[(0, 0, *tap)] = 1
    moved = torch.ops.aten.convolution((codes + 1).double(), shift, None, *settings, 1) - 1  # padding becomes -1
    rounded: Tensor = moved.round().int().expand(work.shape)
    return rounded


def pooled(work: Work) -> Result:
    """Return the places of a pooling with a kernel: each result lies in the middle of the cells that it reads."""
    source = work.main()
    axes = 3 if "3d" in work.name else 1 if "1d" in work.name else 2
    kernel_size = _sides(work.get("kernel_size"), axes)
    stride = _sides(work.get("stride") or kernel_size, axes)
    padding, dilation = (_sides(work.get(key, default), axes) for key, default in (("padding", 0), ("dilation", 1)))
    reach = tuple((side - 1) * gap + 1 for side, gap in zip(kernel_size, dilation, strict=True))
    return _over_channels(work, source, axes, lambda codes: resampled(work, codes, axes, reach, stride, padding))


def adapted(work: Work) -> Result:
    """Return the places of a resizing, or of a pooling to a given size: its cells divide the image evenly."""
    source = work.main()
    axes = 3 if "3d" in work.name else 1 if "1d" in work.name else 2
    try:
        return _over_channels(work, source, axes, lambda codes: resampled(work, codes, axes, None, None, None))
    except Unproven:
        if "nearest" not in work.name:  # which may also be a choice among the old cells
            raise
        return [_taken(work, source)]


def _taken(work: Work, source: Places) -> Places:
    """Return the places of a resizing to the nearest, as a choice of cells: each keeps its place, and repeated ones are copies."""
    moved = source._replace(copies=None).each(lambda codes: _resized(work, codes.double()).int())
    assert moved is not None  # noqa: S101 - it always succeeds
    numbers = torch.arange(source.shape.numel(), dtype=torch.float64, device=work.device).view(source.shape)
    occurrence = occurrences(_resized(work, numbers))
    if not bool(occurrence.any()) or not source.placed:
        return moved
    copies = torch.zeros_like(occurrence) if source.copies is None else _resized(work, source.copies.double()).int()
    return moved._replace(copies=copies * (int(occurrence.max()) + 1) + occurrence)


def _resized(work: Work, maps: Tensor) -> Tensor:
    """Apply the resizing of this step to other maps; a maximum is replaced by the mean over the same area."""
    operation = getattr(torch.ops.aten, work.name.replace("adaptive_max", "adaptive_avg").replace("mkldnn_", "_"))
    settings = {key: value for key, value in work.step.given.items() if key not in ("self", "input", "out", "indices")}
    resized: Tensor = operation(maps, **settings)
    return resized


def _over_channels(work: Work, source: Places, axes: int, change: Callable[[Tensor], Tensor]) -> Result:
    """Return places to whose codes a pooling or resizing was applied; only once, if all channels have the same codes."""
    channel_axis = source.codes.ndim - axes - 1
    channels_agree = channel_axis >= 0 and same_along(source.codes, channel_axis)

    def change_maps(codes: Tensor) -> Tensor:
        if channel_axis < 0:  # a map without a channel axis
            return change(codes[None])[0]
        return change(codes.narrow(channel_axis, 0, 1) if channels_agree else codes)

    made = source._replace(copies=None, others=None).each(change_maps)
    return [_finished(work, made, source, axes, False)] + [work.unknown(out.shape) for out in work.outs[1:]]


def _finished(work: Work, made: Places | None, source: Places, axes: int, merges_channels: bool) -> Places:
    """Return the places of a convolution, pooling or resizing, with notes on how cells were mixed and weighted.

    Raises:
        Unproven: If a cell that may hold one cell alone is spread over finer ones.
    """
    assert made is not None  # noqa: S101 - the change raises
    cells, new_cells = (places.shape[-axes:].numel() for places in (source, made))
    if source.leaning and new_cells > cells:
        raise Unproven(work.name)
    picks_some = "upsample" in work.name and not work.name.endswith("_aa")  # `interpolate` to a smaller size leaves cells out
    leaning = merges_channels or (source.weighted or picks_some if new_cells < cells else source.leaning)
    changed_axes = [-1 - axis for axis in range(min(axes + 1, len(made.shape)))]
    copies = copies_behind(source.copies, changed_axes, made.shape)
    mixture = made.mixture or (merges_channels and work.shape[1] > 1)
    return made._replace(mixture=mixture, leaning=leaning, copies=copies, others=None)


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
    """Return position codes after a convolution or pooling, or a resizing (`reach` is None), of the last `axes` axes.

    Raises:
        Unproven: If the codes form no grid.
    """
    shape = work.shape
    old_size, new_size = codes.shape[-axes:], shape[-axes:]
    has_kernel = reach is not None and stride is not None and padding is not None
    if not has_kernel and not _reads_own(work, codes, old_size, [0] * axes):
        raise Unproven(work.name)
    if old_size == new_size and (not has_kernel or _stays(reach, stride, padding)):  # type: ignore[arg-type]
        return codes.expand(shape)
    if old_size.numel() == 1 and new_size.numel() == 1:
        return codes.expand(shape)
    if axes == 1:
        return _on_line(work, codes, reach, stride)
    if axes == 3 and codes.ndim == 5:
        return _resampled_clip(work, codes[:, 0], reach, stride, padding)
    has_channels = codes.ndim == 4 and codes.shape[1] != 1  # which have different codes
    if axes != 2 or codes.ndim not in (3, 4) or has_channels:
        raise Unproven(work.name)
    geometry = Geometry2d(reach, stride, padding) if has_kernel else None  # type: ignore[arg-type]
    return _resampled_maps(work, codes, geometry, transposed=transposed)


def _resampled_maps(work: Work, codes: Tensor, geometry: Geometry2d | None, *, transposed: bool) -> Tensor:
    """Return position codes `(B, H, W)` or `(B, 1, H, W)` after a kernel, or resizing (`geometry` is None), or raise."""
    planes, (rows, columns) = work.planes, work.shape[-2:]
    maps = codes.flatten(0, 1) if codes.ndim == 4 else codes
    plane, lines_before = planes.raster(maps)
    if plane is None and geometry is not None and not transposed:
        plane, lines_before = planes.bordered(maps, geometry.reach, geometry.stride)
    if plane is None:
        return _tiled(work, maps, geometry)
    image, _ = planes.split(maps.flatten(1).amax(1), plane)
    box = _covered(plane, lines_before, rows, columns, geometry, transposed=transposed)
    if not _stays_inside(plane, box, rows, columns):
        raise Unproven(work.name)
    if geometry is None and not _reads_own(work, maps, plane.grid[-2:], lines_before):
        raise Unproven(work.name)
    new_codes = planes.codes(planes.grid(rows, columns, box, plane.frames)).view(-1, rows, columns)[image.long()]
    return (new_codes[:, None] if codes.ndim == 4 else new_codes).expand(work.shape)


def _stays_inside(plane: Plane, box: Box, rows: int, columns: int) -> bool:
    """Check whether the centers of new cells, spread over `box`, lie at most half a (coarser) cell outside of the old grid."""
    old_box = plane.box
    vertical = old_box.top, old_box.bottom, old_box.height / plane.grid[-2] / 2, box.top, box.bottom, box.height / rows / 2
    horizontal = old_box.left, old_box.right, old_box.width / plane.columns / 2, box.left, box.right, box.width / columns / 2
    for old_start, old_stop, old_half, start, stop, half in (vertical, horizontal):
        slack = max(old_half, half)
        begins_inside, ends_inside = old_start - slack - 1e-6 <= start + half, stop - half <= old_stop + slack + 1e-6
        if not begins_inside or not ends_inside:
            return False
    return True


def _reads_own(work: Work, codes: Tensor, plane_size: Sequence[int], lines_before: Sequence[int]) -> bool:
    """Check whether a resizing reads each new cell from around its center.

    The operation itself says so, applied to the numbers of the lines that it reads. A maximum over an area reads where the mean does.

    Args:
        work: The resizing.
        codes: Position codes of the maps that it reads.
        plane_size: Size of the plane in them, over which the new cells are spread evenly.
        lines_before: Lines of padding before that plane.
    """
    map_size = codes.shape[codes.ndim - len(plane_size) :]
    slack = 1.0 if work.planes.pixels.holds(codes) else 0.5  # in cells; pixels are finer than any cell that is shown
    for axis, (length, own_length, first_line) in enumerate(zip(map_size, plane_size, lines_before, strict=True)):
        along_axis = [1] * (len(map_size) + 2)
        along_axis[axis + 2] = length
        lines = torch.arange(length, dtype=torch.float64).view(along_axis).expand(1, 1, *map_size).contiguous()
        read_lines = _resized(work, lines)[0, 0].movedim(axis, -1)
        count = read_lines.shape[-1]
        scale = own_length / count
        center_lines = first_line + (torch.arange(count, dtype=torch.float64) + 0.5) * scale - 0.5
        if bool(((read_lines - center_lines).abs() > max(1, scale) * slack + 1e-6).any()):
            return False
    return True


def _stays(reach: Sequence[int], stride: Sequence[int], padding: Sequence[float]) -> bool:
    """Check whether a kernel has stride 1 and is centered on its cell to within half a cell, so that the grid stays the same."""
    return all(
        step == 1 and abs(size / 2 - before - 0.5) <= 0.5 + 1e-6
        for size, step, before in zip(reach, stride, padding, strict=True)
    )


def _covered(
    plane: Plane, lines_before: tuple[int, int], rows: int, columns: int, geometry: Geometry2d | None, *, transposed: bool
) -> Box:
    """Return the box (part of the image) that the new grid of `rows` and `columns` covers behind a kernel or resizing.

    Cells of non-overlapping patches cover exactly the cells they read; other cells cover even shares around their centers.
    """
    box = plane.box
    if geometry is None:
        return box
    sides = []
    for axis, (start, stop, count) in enumerate(((box.top, box.bottom, rows), (box.left, box.right, columns))):
        cell_size = (stop - start) / plane.grid[axis - 2]
        reach, stride, padding = geometry.reach[axis], geometry.stride[axis], geometry.padding[axis]
        first_read = start - (lines_before[axis] + padding) * cell_size
        if transposed:
            first_center = start + ((padding - (reach - 1) / 2) / stride + 0.5 - lines_before[axis]) * cell_size
            sides.append(shared(first_center, cell_size / stride, count, start, stop))
        elif reach == stride and not padding:  # patches
            sides.append((first_read, first_read + count * stride * cell_size))
        else:
            sides.append(shared(first_read + reach / 2 * cell_size, stride * cell_size, count, start, stop))
    (top, bottom), (left, right) = sides
    return Box(top, left, bottom, right)


def _on_line(work: Work, codes: Tensor, reach: tuple[int, ...] | None, stride: tuple[int, ...] | None) -> Tensor:
    """Return position codes after a pooling over lines of tokens, whose windows do not overlap, or raise `Unproven`."""
    length, new_length = codes.shape[-1], work.shape[-1]
    if reach is None and length % new_length == 0:
        width = length // new_length
    elif reach is not None and reach == stride and length == new_length * reach[0]:
        width = reach[0]
    else:
        raise Unproven(work.name)
    if new_length == 1 and repeats_some(codes):  # the result would lean to these cells
        raise Unproven(work.name)
    windows = codes.reshape(*codes.shape[:-1], new_length, width)
    return through(work.planes, windows, windows.ndim - 1, 1)[..., 0].expand(work.shape)


def _resampled_clip(
    work: Work,
    codes: Tensor,
    reach: tuple[int, ...] | None,
    stride: tuple[int, ...] | None,
    padding: tuple[int, ...] | None,
) -> Tensor:
    """Return position codes after a convolution or pooling of video clips, from codes `(B, T, H, W)`, or raise `Unproven`."""
    planes, (new_frames, rows, columns) = work.planes, work.shape[2:]
    if reach is None or stride is None or padding is None:
        raise Unproven(work.name)
    geometry, frame_step = Geometry2d(reach[1:], stride[1:], padding[1:]), stride[0]  # type: ignore[arg-type]
    if (new_frames, rows, columns) == (1, 1, 1) and reach == codes.shape[1:]:  # a patch of its own
        return through(planes, codes.flatten(1), 1, 1).view(-1, 1, 1, 1, 1).expand(work.shape)
    plane, lines_before = planes.raster(codes.flatten(0, 1))
    if plane is None or codes.shape[1] != plane.frames:
        raise Unproven(work.name)
    if not (new_frames - 1) * frame_step < plane.frames <= new_frames * frame_step:
        raise Unproven(work.name)
    frame, _ = planes.split(codes.flatten(2).amax(2), plane)  # counted over all clips
    if bool((frame % plane.frames != torch.arange(plane.frames, device=codes.device)).any()):
        raise Unproven(work.name)
    box = _covered(plane, lines_before, rows, columns, geometry, transposed=False)
    new_codes, image = planes.codes(planes.grid(rows, columns, box, new_frames)), frame[:, 0] // plane.frames
    return new_codes[image.long()][:, None].expand(work.shape)


def _tiled(work: Work, codes: Tensor, geometry: Geometry2d | None) -> Tensor:
    """Return position codes after a strided kernel within windows `(windows, H, W)`, or raise `Unproven`."""
    rows, columns = work.shape[-2:]
    if geometry is None:
        raise Unproven(work.name)
    row_step, column_step = geometry.stride
    if (rows * row_step, columns * column_step) != codes.shape[1:]:
        raise Unproven(work.name)
    tiles = codes.reshape(-1, rows, row_step, columns, column_step).transpose(2, 3).flatten(3)
    merged = through(work.planes, tiles, 3, 1)[..., 0]
    return (merged[:, None] if len(work.shape) == 4 else merged).expand(work.shape)


def unfolded(work: Work) -> Result:
    """Return the places of windows cut out of maps (`torch.nn.functional.unfold`): each element keeps its own."""
    operation = work.step.op
    assert operation is not None  # noqa: S101 - a step of the model
    settings = {key: value for key, value in work.step.given.items() if key != "self"}
    # codes are shifted by 1, so that the zeros of the padding become -1
    return _through_windows(work, lambda codes: (operation(codes.double() + 1, **settings) - 1).int())


def folded(work: Work) -> Result:
    """Return the places of windows `(images, channels x taps, windows)` put back into an image (`torch.nn.functional.fold`)."""
    return _through_windows(work, partial(_folded, work))


def _through_windows(work: Work, change: Callable[[Tensor], Tensor]) -> Places:
    """Return the places of maps that are cut into windows, or of windows put together; each image keeps its copy number."""
    source = work.main()
    changed = source._replace(copies=None).each(change)
    assert changed is not None  # noqa: S101 - the change raises
    numbers = copies_behind(source.copies, range(1, len(source.shape)), (len(source.codes), *[1] * (len(source.shape) - 1)))
    copies = None if numbers is None else numbers.reshape(-1, *[1] * (len(work.shape) - 1)).expand(work.shape)
    return changed._replace(copies=copies)


def _folded(work: Work, codes: Tensor) -> Tensor:
    """Return the position codes of an image made of windows, each of which must be put back at its cell, or raise `Unproven`."""
    kernel_size, stride, padding, size, dilation = (
        _sides(work.get(name, default), 2)
        for name, default in (("kernel_size", 1), ("stride", 1), ("padding", 0), ("output_size", 0), ("dilation", 1))
    )
    planes, device = work.planes, codes.device
    grids = [plane for plane in planes.of(compact(codes)) if plane.grid]
    if codes.ndim != 3 or not same_along(codes, 1) or len(grids) != 1 or dilation != (1, 1):
        raise Unproven(work.name)
    plane, window_codes = grids[0], codes[:, 0]
    windows_in_row = (size[1] + 2 * padding[1] - kernel_size[1]) // stride[1] + 1
    number = torch.arange(window_codes.shape[1], device=device)
    row_and_column = torch.stack([number // windows_in_row, number % windows_in_row], -1)
    steps, taps, before = (torch.tensor(value, device=device) for value in (stride, kernel_size, padding))
    pixel_size = torch.tensor([plane.box.height / size[0], plane.box.width / size[1]], dtype=torch.float64, device=device)
    origin = torch.tensor([plane.box.top, plane.box.left], dtype=torch.float64, device=device)
    center = (row_and_column * steps - before + taps / 2) * pixel_size + origin
    start, stop = planes.boxes(window_codes)
    if not bool(((center >= start - 1e-6) & (center <= stop + 1e-6)).all()):
        raise Unproven(work.name)
    images = planes.images_of(window_codes).long()
    if not same_along(images, 1):
        raise Unproven(work.name)
    new_codes = planes.codes(planes.grid(size[0], size[1], plane.box))
    return new_codes[images[:, 0]][:, None].expand(work.shape)


def _sides(value: Any, axes: int) -> tuple[int, ...]:  # noqa: ANN401
    """Return an argument such as a kernel size as one number for each axis."""
    if isinstance(value, int):
        return (value,) * axes
    return tuple(value) * (axes if len(value) == 1 else 1)
