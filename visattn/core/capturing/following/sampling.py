"""Attention to sampled points (deformable attention): where the samples lie that a call weights, and which weight each has.

A model reads maps of values at points that it computes for each query, stacks these samples, and sums them with weights from a
softmax. The samples are numbered, and the numbers are moved along the tape as the model moves the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from visattn.core.capturing.following.tape_moves import MOVES, moved_by
from visattn.core.capturing.following.tracing import TokenTracer
from visattn.core.capturing.tokens.arrangement import Arrangement, SampledArrangement, Samples, arrange
from visattn.core.capturing.tokens.codes import same_along
from visattn.core.capturing.tokens.planes import Plane
from visattn.core.capturing.tokens.refusals import Unplaced
from visattn.core.capturing.trace.operations import JOIN
from visattn.core.capturing.trace.tape import Attention, Entry, Ref, Tape


def sampled(follower: TokenTracer, tape: Tape, attention: Attention) -> Arrangement | None:
    """Return the arrangement of a call that sums samples of maps (deformable attention); None if it is unknown where they lie.

    The keys are the cells of the finest map that is sampled.
    """
    weights, values = (follower.of(operand) for operand in (attention.operands[0], attention.operands[-1]))
    if weights is not None and weights.drift.away:  # the queries hold values from elsewhere
        return None
    if values is None or not (same_along(values.codes, -1) and same_along(values.codes, -2)):
        return None
    entries = [tape.entries[number] for number in attention.samples]
    maps = [_map(follower, number, entry) for number, entry in zip(attention.samples, entries, strict=True)]
    known_maps = [known for known in maps if known is not None]
    different_images = {known.images for known in known_maps}
    if len(known_maps) < len(maps) or len(different_images) > 1:
        return None
    query_codes = values.codes[..., 0, 0].flatten()  # a sample counts as a value of the query that computed its point
    query_grids = [plane for plane in follower.planes.of(query_codes) if plane.grid]
    if len(query_grids) > 1:  # as in encoders
        return None
    groups = _groups(tape, attention, entries)
    if groups is None:
        return None
    order, sample_numbers, queries_per_map = groups
    planes = [known.plane for known in known_maps]
    finest = max(planes, key=lambda plane: plane.cells)
    images = torch.tensor(known_maps[0].images, device=query_codes.device)
    key_codes = follower.planes.codes(finest).flatten(1)[images]
    try:
        tokens = arrange(
            follower.planes, query_codes[order].view(-1, queries_per_map), key_codes, (len(images),), queries_per_map
        )
    except Unplaced:
        return None
    on_finest = tuple(_to_finest(plane, finest, entry) for plane, entry in zip(planes, entries, strict=True))
    grid = finest.grid[-2], finest.grid[-1]
    samples = Samples(order, sample_numbers, on_finest, grid, (len(images), queries_per_map))
    return SampledArrangement(
        "sampled", tokens.queries, tokens.keys, tokens.order, tokens.query_index, tokens.key_index, samples=samples
    )


class _Map(NamedTuple):
    """Map of values that is sampled: its grid, and the image of each of its groups."""

    plane: Plane
    images: tuple[int, ...]


def _map(follower: TokenTracer, number: int, entry: Entry) -> _Map | None:
    """Return the map that an entry samples; None if its cells are no grid in raster order, or its samples are not interpolated."""
    options = _options(entry)
    codes = follower.sampled.get(number)
    modes = options.get("mode", "bilinear"), options.get("padding_mode", "zeros")
    if codes is None or modes != ("bilinear", "zeros"):
        return None
    planes = follower.planes
    plane, padding = planes.raster(codes)
    if plane is None or padding != (0, 0) or plane.grid[-2:] != tuple(codes.shape[1:]) or len(plane.grid) > 2:
        return None
    return _Map(plane, tuple(planes.images_of(codes[:, 0, 0]).tolist()))


def _options(entry: Entry) -> dict[str, object]:
    """Return the arguments of a call of `grid_sample` by name."""
    names = "input", "grid", "mode", "padding_mode", "align_corners"
    return dict(zip(names, entry.args, strict=False)) | dict(entry.kwargs)


def _to_finest(plane: Plane, finest: Plane, entry: Entry) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return factors and offsets `(x, y)` that turn points of `grid_sample`, in [-1, 1], into cells of the finest grid."""
    aligned = _options(entry).get("align_corners")
    box, finest_box = plane.box, finest.box
    horizontal = (box.left, box.width, plane.columns), (finest_box.left, finest_box.width, finest.columns)
    vertical = (box.top, box.height, plane.grid[-2]), (finest_box.top, finest_box.height, finest.grid[-2])
    factors, offsets = [], []
    for (start, length, cells), (finest_start, finest_length, finest_cells) in (horizontal, vertical):
        reach = (cells - 1) / cells if aligned else 1.0  # -1 and 1 are the centers of the first and last cell
        middle = start + length / 2
        factors.append(length / 2 * reach / finest_length * finest_cells)
        offsets.append((middle - finest_start) / finest_length * finest_cells - 0.5)
    return (factors[0], factors[1]), (offsets[0], offsets[1])


def _groups(tape: Tape, attention: Attention, entries: Sequence[Entry]) -> tuple[Tensor, Tensor, int] | None:
    """Find the samples that each query sums: number them, and move the numbers as the model moves the samples.

    Returns:
        Index `(N * Q,)` of the sum of each query of each map in the flattened axes of the call; number `(N * Q, k)` of its samples,
        counted over all maps and their points `(N, Q, P)`; and Q. None if they are unknown.
    """
    numbers_by_slot: dict[int, Tensor] = {}
    starts, points_of_maps, different_counts = [0], list[int](), set[tuple[int, int]]()
    for entry in entries:
        sampled_map = entry.outs[0]
        assert sampled_map is not None  # noqa: S101 - it returned a map
        groups, _, rows, points = sampled_map.shape
        number = torch.arange(groups * rows * points).view(groups, 1, rows, points) + starts[-1]
        numbers_by_slot[sampled_map.slot] = number.expand(sampled_map.shape)  # the same for all channels
        starts.append(starts[-1] + number.numel())
        points_of_maps.append(points)
        different_counts.add((groups, rows))
    numbers = _at_product(tape, attention, numbers_by_slot)
    if numbers is None or len(different_counts) > 1:
        return None
    ((groups, rows),) = different_counts
    number_of_value = attention.operands[-1].view(numbers)
    if bool((number_of_value != number_of_value[..., :1]).any()):  # the channels of a value come from several samples
        return None
    number = number_of_value[..., 0].flatten(0, -2)  # (sums, k)
    map_index = torch.bucketize(number, torch.tensor(starts[1:]), right=True)
    points_of_sample = torch.tensor(points_of_maps)[map_index]
    query = (number - torch.tensor(starts)[map_index]) // points_of_sample  # counted over the groups of a map
    if bool((query != query[:, :1]).any()) or len(number) != groups * rows:
        return None
    order = query[:, 0].argsort()
    is_each_query_once = torch.equal(query[order, 0], torch.arange(groups * rows))
    return (order, number[order], rows) if is_each_query_once else None


def _at_product(tape: Tape, attention: Attention, numbers_by_slot: dict[int, Tensor]) -> Tensor | None:
    """Move numbers of samples along the tape, from the maps to the product with the weights; None if they do not arrive there."""
    for entry in tape.entries[attention.samples[0] + 1 :]:
        if entry.attention is attention:
            break
        made = entry.outs[0] if entry.outs else None
        if made is None or not entry.operation.own or made.slot in numbers_by_slot:
            continue
        if not any(ref.slot in numbers_by_slot for ref in entry.refs):
            continue
        moved = _moved(entry, numbers_by_slot, made.shape)
        if moved is not None and moved.shape == made.shape:
            numbers_by_slot[made.slot] = moved
    return numbers_by_slot.get(attention.operands[-1].slot)


def _moved(entry: Entry, numbers_by_slot: dict[int, Tensor], shape: torch.Size) -> Tensor | None:
    """Apply a call that reshapes or joins tensors to the numbers of their elements; None for any other call."""
    if entry.operation.name in MOVES:
        source = entry.args[0] if entry.args else None
        if not isinstance(source, Ref) or source.slot not in numbers_by_slot:
            return None
        return moved_by(entry, numbers_by_slot[source.slot], shape)
    if entry.operation.name not in JOIN or not entry.args or not isinstance(entry.args[0], (tuple, list)):
        return None
    parts = [numbers_by_slot.get(ref.slot) if isinstance(ref, Ref) else None for ref in entry.args[0]]
    if any(part is None for part in parts):
        return None
    joined = entry.func(parts, *entry.args[1:], **entry.kwargs)
    return joined if isinstance(joined, Tensor) else None
