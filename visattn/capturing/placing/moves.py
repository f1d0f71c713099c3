"""Rules for operations that move, choose, repeat or join elements, and leave each as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from visattn.capturing.placing.nodes import Node
from visattn.capturing.placing.places import FOREIGN, LEARNED, LOST, Places, later
from visattn.capturing.placing.work import Result, Unproven, Work
from visattn.capturing.tokens.codes import equal, joined, padded, reshaped, same_along
from visattn.capturing.tokens.planes import Planes, compact


def same(work: Work) -> Result:
    """Leave each element where it is; further results, such as a mask of dropout, have the same places if they have the same shape."""
    first = work.main()
    return [first if out.shape == first.shape else work.unknown(out.shape) for out in work.outs]


def moved(work: Work) -> Result:
    """Apply the operation to the codes themselves."""
    given = {key: work.step.contents.get(key, value) for key, value in work.step.given.items() if not key.startswith("out")}
    name = next(name for name, value in given.items() if isinstance(value, Node))
    source = work.places(given.pop(name))

    def change(codes: Tensor) -> Any:  # noqa: ANN401
        return _plainly(work.name, {name: codes, **given}, name)

    parts: list[Any] = [None if x is None else change(x) for x in (source.codes, source.columns, source.copies, source.others)]
    if isinstance(parts[0], Tensor):
        return _with(source, parts)
    return [_with(source, [None if part is None else part[number] for part in parts]) for number in range(len(parts[0]))]


def _with(source: Places, parts: Sequence[Any]) -> Places:
    codes, columns, copies, others = parts
    return source._replace(codes=codes, columns=columns, copies=copies, others=others)


def _plainly(operation: str, given: dict[str, Any], name: str) -> Any:  # noqa: ANN401
    """Call an operation in its plain form; on axes along which codes are expanded, and which it leaves alone, they stay so."""
    op = getattr(torch.ops.aten, operation)
    codes, rest = given[name], {key: value for key, value in given.items() if key != name}
    axes = _ALONG.get(operation)
    if axes is None or not codes.ndim:
        return op(**given)
    touched = axes(rest, codes.ndim)
    kept = {axis: size for axis, size in enumerate(codes.shape) if axis not in touched and size > 1 and codes.stride(axis) == 0}
    for axis in kept:
        codes = codes.narrow(axis, 0, 1)
    made = op(**{name: codes, **rest})
    return made.expand([kept.get(axis, size) for axis, size in enumerate(made.shape)]) if kept else made


def _dims(key: str) -> Any:  # noqa: ANN401
    def axes(given: dict[str, Any], ndim: int) -> set[int]:
        dims = given.get(key, ())
        dims = [dims] if isinstance(dims, int) else dims
        return {dim % ndim for dim in dims} if dims else set(range(ndim))

    return axes


_ALONG = {"roll": _dims("dims"), "flip": _dims("dims"), "index_select": _dims("dim"), "slice": _dims("dim")}


def shaped(work: Work) -> Result:
    """Views and reshapes: the order of the elements stays."""
    source = work.main()
    if len(work.step.given) > 1 and isinstance(work.step.given.get("dtype"), torch.dtype):
        raise Unproven(work.name)
    changed = source.each(lambda codes: reshaped(codes, work.shape))
    assert changed is not None  # noqa: S101 - reshaping always succeeds
    others = None if source.others is None else reshaped(source.others, work.shape)
    return changed._replace(others=others)


def strided(work: Work) -> Result:
    """Elements chosen by strides of the memory; those that the tensor does not hold are lost."""
    source, facts = work.main(), work.facts(next(work.nodes()))
    size, stride, offset = work.get("size"), work.get("stride"), work.get("storage_offset", facts.offset)
    end = offset + sum((side - 1) * step for side, step in zip(size, stride, strict=True)) + 1
    own = facts.offset + sum((side - 1) * step for side, step in zip(facts.shape, facts.stride, strict=True)) + 1

    def change(codes: Tensor) -> Tensor:
        memory = torch.full((max(end, own),), LOST, dtype=codes.dtype, device=codes.device)
        memory.as_strided(facts.shape, facts.stride, facts.offset).copy_(codes)
        return memory.as_strided(size, stride, offset).clone()

    made = source.each(change)
    assert made is not None  # noqa: S101 - it always succeeds
    return made


def expanded(work: Work) -> Result:
    """Copies along axes of size 1 or new axes."""
    source, shape = work.main(), work.shape
    wide = _copied(work, source, source.each(lambda codes: codes.expand(shape)), source.shape)
    return wide._replace(parts=source.parts if source.parts is not None and source.parts.shape == shape else None)


def _copied(work: Work, source: Places, wide: Places | None, before: Sequence[int]) -> Places:
    """Number the copies that broadcasting makes of image tokens, along each axis that grew."""
    assert wide is not None  # noqa: S101 - it broadcasts
    if not source.placed or source.columns is not None:
        return wide
    lead = len(wide.shape) - len(before)
    grown = [axis for axis, size in enumerate(wide.shape) if size > 1 and (axis < lead or before[axis - lead] == 1)]
    return wide._replace(copies=numbered(wide.copies, wide.shape, grown, work.device)) if grown else wide


def numbered(copies: Tensor | None, shape: Sequence[int], axes: Sequence[int], device: torch.device) -> Tensor:
    """Number the copies along some axes, on top of copies made before."""
    number = torch.zeros((), dtype=torch.int32, device=device).expand(*shape) if copies is None else copies
    for axis in axes:
        form = [1] * len(shape)
        form[axis] = shape[axis]
        step = torch.arange(shape[axis], dtype=torch.int32, device=device).view(form)
        number = compact(number) * shape[axis] + step
    return number.expand(*shape)


def repeated(work: Work) -> Result:
    """Copies of the whole tensor along axes."""
    source, times = work.main(), list(work.get("repeats"))
    changed = source.each(lambda codes: codes.repeat(times))
    assert changed is not None  # noqa: S101 - repeating always succeeds
    if not source.placed or source.columns is not None:
        return changed
    copies, lead = changed.copies, len(times) - len(source.shape)
    for axis, count in enumerate(times):
        if count > 1:
            form = [1] * len(work.shape)
            form[axis] = work.shape[axis]
            size = 1 if axis < lead else source.shape[axis - lead]
            number = (torch.arange(work.shape[axis], dtype=torch.int32, device=work.device) // max(size, 1)).view(form)
            before = torch.zeros((), dtype=torch.int32, device=work.device).expand(work.shape) if copies is None else copies
            copies = (compact(before) * count + number).expand(work.shape)
    return changed._replace(copies=copies)


def indexed(work: Work) -> Result:
    """Elements chosen by indices or masks; an index that is taken several times makes copies."""
    found = chosen(work)
    if found is not None:
        return found
    source = work.main()
    made = moved(work)
    assert isinstance(made, Places)  # noqa: S101 - it has one result
    if not source.placed or source.columns is not None:
        return made
    occurrence = _occurrences(work, source.shape)
    if occurrence is None:
        return made
    before = torch.zeros((), dtype=torch.int32, device=work.device) if made.copies is None else made.copies
    return made._replace(copies=(before * (int(occurrence.max()) + 1) + occurrence).expand(work.shape))


def _occurrences(work: Work, shape: Sequence[int]) -> Tensor | None:
    """Count, for each element of the result, the results before it that are the same element."""
    given = {key: work.step.contents.get(key, value) for key, value in work.step.given.items() if not key.startswith("out")}
    name = next(key for key, value in given.items() if isinstance(value, Node))
    del given[name]
    if torch.Size(work.shape).numel() < 1:
        return None
    op = getattr(torch.ops.aten, work.name)
    number = torch.arange(torch.Size(shape).numel(), device=work.device).view(tuple(shape))
    counted = occurrences(op(**{name: number, **given}))
    return counted if bool(counted.any()) else None


def occurrences(numbers: Tensor) -> Tensor:
    """Count, for each number, the equal ones before it."""
    taken = numbers.flatten()
    order = taken.argsort(stable=True)
    values = taken[order]
    begins = torch.ones_like(values, dtype=torch.bool)
    begins[1:] = values[1:] != values[:-1]
    at = torch.arange(len(values), device=values.device)
    start = at.where(begins, 0).cummax(0).values
    return torch.zeros_like(at).scatter(0, order, at - start).view(numbers.shape).to(torch.int32)


def chosen(work: Work) -> Places | None:
    """Return tokens that were picked by content from several grids, such as the object queries of two-stage detectors.

    They lie elsewhere in each image, so they form a set of their own.
    """
    index = work.get("index")
    if work.name != "gather" or not isinstance(index, Node) or work.sets:
        return None
    source, picker = work.main(), work.places(index)
    by_content = picker.kind in ("placed", "lost")
    if not by_content or source.columns is not None or len(work.shape) != 3:
        return None
    if len([plane for plane in work.planes.of(source.codes) if plane.grid]) < 2:
        return None
    picked = work.content("index")[..., 0]
    number, plane = work.planes.choice(picked)
    work.step.choice = number
    if work.shape[0] != work.planes.images:
        return None
    return source._replace(codes=work.planes.codes(plane)[..., None].expand(work.shape))


def padded_by(work: Work) -> Result:
    """Padding by constants: elements that lie nowhere."""
    widths, source = list(work.get("pad") or work.get("padding")), work.main()
    changed = source._replace(copies=None).each(lambda codes: padded(codes, [widths], {}))
    assert changed is not None  # noqa: S101 - padding always succeeds
    return changed._replace(copies=None if source.copies is None else torch.zeros_like(changed.codes))


def mirrored(work: Work) -> Result:
    """Padding by reflected or repeated elements."""
    mode = "reflect" if work.name.startswith("reflection") else "replicate"
    widths = list(work.get("padding"))
    changed = work.main()._replace(copies=None).each(lambda codes: padded(codes, [widths], {"mode": mode}))
    assert changed is not None  # noqa: S101 - padding always succeeds
    return changed


def as_complex(work: Work) -> Result:
    """Pairs of numbers become complex numbers."""
    changed = work.main().each(lambda codes: codes[..., 0] if same_along(codes, -1) else None)
    if changed is None:
        raise Unproven(work.name)
    return changed


def as_real(work: Work) -> Result:
    """Complex numbers become pairs of numbers."""
    changed = work.main().each(lambda codes: codes[..., None].expand(work.shape))
    assert changed is not None  # noqa: S101 - expanding always succeeds
    return changed


# --- joining


def joined_by(work: Work) -> Result:
    """Tensors joined along an axis, which may be new."""
    shape, nodes = work.shape, [node for node in work.get("tensors") if work.facts(node).shape.numel()]
    dim = int(work.get("dim", 0)) % len(shape)
    new = work.name == "stack"
    parts = [_lifted(work.places(node), dim) if new else work.places(node) for node in nodes]
    placed = [part for part in parts if work.counts(part)]
    if not placed:
        raise Unproven(work.name)
    there = placed[0]
    if any((part.columns is None) != (there.columns is None) for part in placed):
        raise Unproven(work.name)
    names = [part.name for part in parts if part.kind == "lost"]
    parts = [part if work.counts(part) else _beside(work, part, there, dim) for part in parts]
    codes = joined([part.codes for part in parts], dim)
    columns = None if there.columns is None else joined([_columns(part) for part in parts], dim)
    copies = _doubled(work, parts, placed, dim, new)
    behind = later(*(part.behind for part in parts))
    return there._replace(
        codes=codes,
        columns=columns,
        copies=copies,
        behind=behind,
        others=None,
        name=names[0] if names else there.name,
        mixture=any(part.mixture for part in parts),
        leaning=any(part.leaning for part in parts),
    )


def _columns(part: Places) -> Tensor:
    return part.codes if part.columns is None else part.columns


def _lifted(places: Places, dim: int) -> Places:
    lifted = places.each(lambda codes: codes.unsqueeze(dim))
    assert lifted is not None  # noqa: S101 - a new axis always fits
    return lifted


def _doubled(work: Work, parts: Sequence[Places], placed: Sequence[Places], dim: int, new: bool) -> Tensor | None:
    """Number the copies of image tokens that several parts hold; None if there are none."""
    shape = work.shape
    parts_copies = [part.copies for part in parts]
    twice = len(placed) > 1 and _overlap(work, placed) and (new or not _is_channels(placed, dim))
    if not twice and all(one is None for one in parts_copies):
        return None
    numbers = [
        (torch.zeros((), dtype=torch.int32, device=work.device).expand(part.shape) if own is None else own)
        * (len(parts) if twice else 1)
        + (number if twice else 0)
        for number, (part, own) in enumerate(zip(parts, parts_copies, strict=True))
    ]
    made = joined(numbers, dim)
    return made.expand(shape)


def _is_channels(placed: Sequence[Places], dim: int) -> bool:
    """Check whether parts are joined along the channels of the same tokens."""
    first = placed[0].codes
    return all(same_along(part.codes, dim) for part in placed) and all(
        part.codes.ndim == first.ndim and equal(part.codes.narrow(dim, 0, 1), first.narrow(dim, 0, 1)) for part in placed[1:]
    )


def _overlap(work: Work, parts: Sequence[Places]) -> bool:
    """Check whether several parts have cells in common."""
    held = [torch.unique(compact(part.codes)) for part in parts]
    every = torch.cat([codes[codes >= 0] for codes in held])
    for plane in work.planes.of(every):
        if not plane.grid:
            every = every[(every < plane.start) | (every >= plane.base + plane.cells * work.planes.images)]
    return bool(len(torch.unique(every)) < len(every))


def _beside(work: Work, part: Places, there: Places, dim: int) -> Places:
    """Return the places of elements from no pixel (a class token, registers) that are joined to image tokens.

    Channels that are joined to the channels of tokens get the places of these tokens if they come from parameters.
    """
    shape, codes = part.shape, there.codes
    if part.kind == "lost" or there.columns is not None:
        return part
    along = codes.shape[dim] > 1 and same_along(codes, dim)
    if along and part.kind == "learned":
        return part._replace(codes=codes.narrow(dim, 0, 1).expand(shape))
    if along:
        return part._replace(codes=torch.full((), LOST, dtype=torch.int32, device=work.device).expand(shape))
    if part.located:
        return part
    name = f"foreign {part.name}" if part.kind == "foreign" else part.name or "token"
    form = [1] * len(shape)
    form[dim] = shape[dim]
    return part._replace(codes=work.planes.members(work.planes.set_of(name, shape[dim])).view(form).expand(shape))


def settled(planes: Planes, codes: Tensor, name: str) -> Tensor:
    """Return codes in which learned and foreign elements are members of sets, numbered along the token axis, the last."""
    for code, stem in ((LEARNED, "token"), (FOREIGN, f"foreign {name}".strip())):
        here = codes == code
        if bool(here.any()):
            members = planes.members(planes.set_of(stem, codes.shape[-1]))
            codes = torch.where(here, members.expand(codes.shape), codes)
    return codes
