"""Attention to sampled points (deformable attention): where the samples lie that a call weights, and which weight each has.

A model reads maps of values at points that it computes for each query, stacks these samples, and sums them with weights from a softmax.
The samples are numbered, and the numbers are moved along the tape as the model moves the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from visattn.capturing.following.moves import MOVES, moved_by
from visattn.capturing.following.tracing import TokenTracer
from visattn.capturing.tokens.arrangement import Arrangement, SampledArrangement, Samples, Unplaced, arrange
from visattn.capturing.tokens.codes import same_along
from visattn.capturing.tokens.planes import Plane
from visattn.capturing.trace.operations import JOIN
from visattn.capturing.trace.tape import Attention, Entry, Ref, Tape


def sampled(follower: TokenTracer, tape: Tape, attention: Attention) -> Arrangement | None:
    """Return the arrangement of a call that weights samples; None if it is unknown where they lie.

    The keys are the cells of the finest map that is sampled.
    """
    weights, values = (follower.of(operand) for operand in (attention.operands[0], attention.operands[-1]))
    if weights is not None and weights.drift.away:  # the queries hold values from elsewhere
        return None
    if values is None or not (same_along(values.codes, -1) and same_along(values.codes, -2)):
        return None
    entries = [tape.entries[number] for number in attention.samples]
    maps = [_map(follower, number, entry) for number, entry in zip(attention.samples, entries, strict=True)]
    planes = [one.plane for one in maps if one is not None]
    if len(planes) < len(maps) or len({one.images for one in maps if one is not None}) > 1:
        return None
    queries = values.codes[..., 0, 0].flatten()
    if len([plane for plane in follower.planes.of(queries) if plane.grid]) > 1:  # queries on several grids, as in encoders
        return None
    numbers = _numbers(tape, attention, entries)
    if numbers is None:
        return None
    order, number, rows = numbers
    finest = max(planes, key=lambda plane: plane.cells)
    images = torch.tensor(next(one.images for one in maps if one is not None), device=queries.device)
    keys = follower.planes.codes(finest).flatten(1)[images]
    try:
        found = arrange(follower.planes, queries[order].view(-1, rows), keys, (len(images),), rows)
    except Unplaced:
        return None
    on_finest = tuple(_placed(plane, finest, entry) for plane, entry in zip(planes, entries, strict=True))
    samples = Samples(order, number, on_finest, (finest.grid[-2], finest.grid[-1]), (len(images), rows))
    return SampledArrangement(
        "sampled", found.queries, found.keys, found.order, found.query_index, found.key_index, samples=samples
    )


class _Map(NamedTuple):
    """Map of values that is sampled: its grid, and the image of each of its groups."""

    plane: Plane
    images: tuple[int, ...]


def _map(follower: TokenTracer, number: int, entry: Entry) -> _Map | None:
    """Return the map that an entry samples; None if its cells are no grid in raster order, or its samples are not interpolated."""
    given = _options(entry)
    codes = follower.sampled.get(number)
    if codes is None or (given.get("mode", "bilinear"), given.get("padding_mode", "zeros")) != ("bilinear", "zeros"):
        return None
    planes = follower.planes
    plane, before = planes.raster(codes)
    if plane is None or before != (0, 0) or plane.grid[-2:] != tuple(codes.shape[1:]) or len(plane.grid) > 2:
        return None
    return _Map(plane, tuple(planes.images_of(codes[:, 0, 0]).tolist()))


def _options(entry: Entry) -> dict[str, object]:
    names = "input", "grid", "mode", "padding_mode", "align_corners"
    return dict(zip(names, entry.args, strict=False)) | dict(entry.kwargs)


def _placed(plane: Plane, finest: Plane, entry: Entry) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return factors and offsets from points in [-1, 1] to `(column, row)` of the finest grid."""
    aligned = _options(entry).get("align_corners")
    factors, offsets = [], []
    for start, length, cells, own_start, own_length, own in (
        (finest.box.left, finest.box.width, finest.columns, plane.box.left, plane.box.width, plane.columns),
        (finest.box.top, finest.box.height, finest.grid[-2], plane.box.top, plane.box.height, plane.grid[-2]),
    ):
        reach = (own - 1) / own if aligned else 1.0  # -1 and 1 are the centers of the first and last cell
        middle = own_start + own_length / 2
        factors.append(own_length / 2 * reach / length * cells)
        offsets.append((middle - start) / length * cells - 0.5)
    return (factors[0], factors[1]), (offsets[0], offsets[1])


def _numbers(tape: Tape, attention: Attention, entries: Sequence[Entry]) -> tuple[Tensor, Tensor, int] | None:
    """Find the samples that each group of weights belongs to.

    Returns:
        Index `(N * Q,)` of the group of each query of each map in the flattened axes of the call; number `(N * Q, k)` of its samples,
        counted over all maps and their points `(N, Q, P)`; and Q. None if they are unknown.
    """
    at: dict[int, Tensor] = {}
    starts, sizes = [0], []
    for entry in entries:
        made = entry.outs[0]
        assert made is not None  # noqa: S101 - it returned a map
        count, _, rows, points = made.shape
        number = torch.arange(count * rows * points).view(count, 1, rows, points) + starts[-1]
        at[made.slot] = number.expand(made.shape)
        starts.append(starts[-1] + number.numel())
        sizes.append((count, rows, points))
    for entry in tape.entries[attention.samples[0] + 1 :]:
        if entry.attention is attention:
            break
        made = entry.outs[0] if entry.outs else None
        if made is None or not entry.operation.own or not any(ref.slot in at for ref in entry.refs) or made.slot in at:
            continue
        moved = _moved(entry, at, made.shape)
        if moved is not None and moved.shape == made.shape:
            at[made.slot] = moved
    found = at.get(attention.operands[-1].slot)
    if found is None or len({size[:2] for size in sizes}) > 1:
        return None
    count, rows, _ = sizes[0]
    found = attention.operands[-1].view(found)
    if bool((found != found[..., :1]).any()):
        return None
    number = found[..., 0].flatten(0, -2)  # (groups, k)
    level = torch.bucketize(number, torch.tensor(starts[1:]), right=True)
    across = torch.tensor([size[2] for size in sizes])[level]
    query = (number - torch.tensor(starts)[level]) // across  # counted over the groups of a map
    if bool((query != query[:, :1]).any()) or len(number) != count * rows:
        return None
    order = query[:, 0].argsort()
    if not torch.equal(query[order, 0], torch.arange(count * rows)):
        return None
    return order, number[order], rows


def _moved(entry: Entry, at: dict[int, Tensor], shape: torch.Size) -> Tensor | None:
    if entry.operation.name in MOVES:
        source = entry.args[0] if entry.args else None
        return moved_by(entry, at[source.slot], shape) if isinstance(source, Ref) and source.slot in at else None
    if entry.operation.name not in JOIN or not entry.args or not isinstance(entry.args[0], (tuple, list)):
        return None
    parts = [at.get(ref.slot) if isinstance(ref, Ref) else None for ref in entry.args[0]]
    if any(part is None for part in parts):
        return None
    joined = entry.func(parts, *entry.args[1:], **entry.kwargs)
    return joined if isinstance(joined, Tensor) else None
