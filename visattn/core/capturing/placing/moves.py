"""Rules for operations that move, choose, repeat or join elements, and leave each as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from visattn.core.capturing.placing.copies import numbered, occurrences
from visattn.core.capturing.placing.nodes import Node
from visattn.core.capturing.placing.places import FOREIGN, LEARNED, LOST, Places, later
from visattn.core.capturing.placing.work import Result, Unproven, Work
from visattn.core.capturing.tokens.codes import equal, joined, padded, reshaped, same_along
from visattn.core.capturing.tokens.planes import Planes, compact


def same(work: Work) -> Result:
    """Return the places of the first tensor argument for each result, as for GELU or `contiguous`, which move no element.

    Further results, such as the mask of dropout, have these places too if they have the same shape; otherwise they are lost.
    """
    source = work.main()
    return [source if result.shape == source.shape else work.unknown(result.shape) for result in work.outs]


def moved(work: Work) -> Result:
    """Run an operation that moves or picks elements, such as `permute` or `split`, on position codes instead of values.

    Position codes say which cell of the image each element comes from. They move like the elements themselves.
    """
    contents = work.step.contents
    arguments = {key: contents.get(key, value) for key, value in work.step.given.items() if not key.startswith("out")}
    source_name = next(name for name, value in arguments.items() if isinstance(value, Node))
    source = work.places(arguments.pop(source_name))

    def run_on(codes: Tensor) -> Any:  # noqa: ANN401
        return _run_on_codes(work.name, {source_name: codes, **arguments}, source_name)

    tensors = (source.codes, source.columns, source.copies, source.others)
    moved_tensors: list[Any] = [None if tensor is None else run_on(tensor) for tensor in tensors]
    moved_codes = moved_tensors[0]
    if isinstance(moved_codes, Tensor):
        return _with_tensors(source, moved_tensors)
    results = []
    for number in range(len(moved_codes)):  # `split` and the like have several results
        results.append(_with_tensors(source, [None if several is None else several[number] for several in moved_tensors]))
    return results


def _with_tensors(source: Places, tensors: Sequence[Any]) -> Places:
    """Return places with other tensors, given in the order codes, columns, copies, others."""
    codes, columns, copies, others = tensors
    return source._replace(codes=codes, columns=columns, copies=copies, others=others)


def _run_on_codes(operation: str, arguments: dict[str, Any], codes_name: str) -> Any:  # noqa: ANN401
    """Call an aten operation on position codes, which are its argument `codes_name`, and return its result.

    To save memory, axes along which the codes are expanded (stride 0) have size 1 in the call if the operation leaves them alone.
    """
    op = getattr(torch.ops.aten, operation)
    codes = arguments[codes_name]
    other_arguments = {key: value for key, value in arguments.items() if key != codes_name}
    changed_axes_of = _CHANGED_AXES.get(operation)
    if changed_axes_of is None or not codes.ndim:
        return op(**arguments)
    changed_axes = changed_axes_of(other_arguments, codes.ndim)
    unchanged = [axis for axis in range(codes.ndim) if axis not in changed_axes]
    expanded_sizes = {axis: codes.shape[axis] for axis in unchanged if codes.shape[axis] > 1 and codes.stride(axis) == 0}
    for axis in expanded_sizes:
        codes = codes.narrow(axis, 0, 1)
    result = op(**{codes_name: codes, **other_arguments})
    if not expanded_sizes:
        return result
    return result.expand([expanded_sizes.get(axis, size) for axis, size in enumerate(result.shape)])


def _axes_in(argument: str) -> Any:  # noqa: ANN401
    """Return a function that tells which axes an operation changes: those in the named argument, or all if it is empty."""

    def axes(arguments: dict[str, Any], ndim: int) -> set[int]:
        dims = arguments.get(argument, ())
        dims = [dims] if isinstance(dims, int) else dims
        return {dim % ndim for dim in dims} if dims else set(range(ndim))

    return axes


_CHANGED_AXES = {"roll": _axes_in("dims"), "flip": _axes_in("dims"), "index_select": _axes_in("dim"), "slice": _axes_in("dim")}


def shaped(work: Work) -> Result:
    """Return the places behind a view or reshape: the position codes in the new shape, in the same order.

    Raises:
        Unproven: If a view reads the memory as another dtype, which changes the elements.
    """
    source = work.main()
    is_other_dtype = len(work.step.given) > 1 and isinstance(work.step.given.get("dtype"), torch.dtype)
    if is_other_dtype:
        raise Unproven(work.name)
    reshaped_places = source.each(lambda codes: reshaped(codes, work.shape))
    assert reshaped_places is not None  # noqa: S101 - reshaping always succeeds
    others = None if source.others is None else reshaped(source.others, work.shape)
    return reshaped_places._replace(others=others)


def strided(work: Work) -> Result:
    """Return the places behind `as_strided`; elements of the memory that the source does not hold are LOST (of unknown origin)."""
    source, facts = work.main(), work.facts(next(work.nodes()))
    size, stride, offset = work.get("size"), work.get("stride"), work.get("storage_offset", facts.offset)
    result_end = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) + 1
    source_end = facts.offset + sum((length - 1) * step for length, step in zip(facts.shape, facts.stride, strict=True)) + 1
    memory_size = max(result_end, source_end)

    def pick(codes: Tensor) -> Tensor:
        memory = torch.full((memory_size,), LOST, dtype=codes.dtype, device=codes.device)
        memory.as_strided(facts.shape, facts.stride, facts.offset).copy_(codes)
        return memory.as_strided(size, stride, offset).clone()

    picked = source.each(pick)
    assert picked is not None  # noqa: S101 - it always succeeds
    return picked


def expanded(work: Work) -> Result:
    """Return the places behind `expand`: each copy of an element has the position code of the original."""
    source, shape = work.main(), work.shape
    expanded_places = source.each(lambda codes: codes.expand(shape))
    numbered_places = _number_broadcast(work, source, expanded_places, source.shape)
    parts_fit = source.parts is not None and source.parts.shape == shape
    return numbered_places._replace(parts=source.parts if parts_fit else None)


def _number_broadcast(work: Work, source: Places, expanded_places: Places | None, source_shape: Sequence[int]) -> Places:
    """Return expanded places in which the copies of each image token are numbered, along each axis that `expand` made larger.

    So an image that was expanded to a batch counts as several passes over one image.
    """
    assert expanded_places is not None  # noqa: S101 - it broadcasts
    is_scores = source.columns is not None
    if not source.placed or is_scores:
        return expanded_places
    new_axes = len(expanded_places.shape) - len(source_shape)
    large_axes = [axis for axis, size in enumerate(expanded_places.shape) if size > 1]
    grown_axes = [axis for axis in large_axes if axis < new_axes or source_shape[axis - new_axes] == 1]
    if not grown_axes:
        return expanded_places
    copies = numbered(expanded_places.copies, expanded_places.shape, grown_axes, work.device)
    return expanded_places._replace(copies=copies)


def repeated(work: Work) -> Result:
    """Return the places behind `repeat`: the position codes repeated, and a number for each copy of an image token."""
    source, repeats = work.main(), list(work.get("repeats"))
    repeated_places = source.each(lambda codes: codes.repeat(repeats))
    assert repeated_places is not None  # noqa: S101 - repeating always succeeds
    is_scores = source.columns is not None
    if not source.placed or is_scores:
        return repeated_places
    copies, new_axes = repeated_places.copies, len(repeats) - len(source.shape)
    for axis, count in enumerate(repeats):
        if count < 2:
            continue
        broadcastable = [1] * len(work.shape)
        broadcastable[axis] = work.shape[axis]
        source_size = 1 if axis < new_axes else source.shape[axis - new_axes]
        index = torch.arange(work.shape[axis], dtype=torch.int32, device=work.device)
        number = (index // max(source_size, 1)).view(broadcastable)
        earlier = torch.zeros((), dtype=torch.int32, device=work.device).expand(work.shape) if copies is None else copies
        copies = (compact(earlier) * count + number).expand(work.shape)
    return repeated_places._replace(copies=copies)


def indexed(work: Work) -> Result:
    """Return the places behind `index`, `gather` or a mask: each picked element keeps the position code that it had.

    Elements that are picked several times are numbered as copies. Object queries that are picked by content form a set (`chosen`).
    """
    picked_by_content = chosen(work)
    if picked_by_content is not None:
        return picked_by_content
    source = work.main()
    picked = moved(work)
    assert isinstance(picked, Places)  # noqa: S101 - it has one result
    is_scores = source.columns is not None
    if not source.placed or is_scores:
        return picked
    repetition = _repetitions(work, source.shape)
    if repetition is None:
        return picked
    earlier = torch.zeros((), dtype=torch.int32, device=work.device) if picked.copies is None else picked.copies
    copies = (earlier * (int(repetition.max()) + 1) + repetition).expand(work.shape)
    return picked._replace(copies=copies)


def _repetitions(work: Work, source_shape: Sequence[int]) -> Tensor | None:
    """Return, for each element that an index picks, how often the same source element was picked before it; None if never.

    To see which element is picked, the operation runs on the numbers 0, 1, 2, ... in the shape of its source.
    """
    contents = work.step.contents
    arguments = {key: contents.get(key, value) for key, value in work.step.given.items() if not key.startswith("out")}
    source_name = next(key for key, value in arguments.items() if isinstance(value, Node))
    del arguments[source_name]
    if torch.Size(work.shape).numel() < 1:
        return None
    element_numbers = torch.arange(torch.Size(source_shape).numel(), device=work.device).view(tuple(source_shape))
    picked_numbers = getattr(torch.ops.aten, work.name)(**{source_name: element_numbers, **arguments})
    repetitions = occurrences(picked_numbers)
    return repetitions if bool(repetitions.any()) else None


def chosen(work: Work) -> Places | None:
    """Return the places of tokens that `gather` picks by their content from several grids; None for all other picks.

    Two-stage detectors pick object queries so. They lie elsewhere in each image, and count as a set: tokens without a place in it.
    """
    index = work.get("index")
    if work.name != "gather" or not isinstance(index, Node) or work.sets:
        return None
    source, index_places = work.main(), work.places(index)
    is_by_content = index_places.kind in ("placed", "lost")
    is_scores = source.columns is not None
    if not is_by_content or is_scores or len(work.shape) != 3:
        return None
    grids = [plane for plane in work.planes.of(source.codes) if plane.grid]
    if len(grids) < 2:
        return None
    index_values = work.content("index")
    token_index = index_values[..., 0]
    if not bool((index_values == index_values[..., :1]).all()):  # each channel picks other tokens
        return None
    choice_number, query_set = work.planes.choice(token_index)
    work.step.choice = choice_number
    if work.shape[0] != work.planes.images:
        return None
    query_codes = work.planes.codes(query_set)
    return source._replace(codes=query_codes[..., None].expand(work.shape))


def padded_by(work: Work) -> Result:
    """Return the places behind padding by a constant: the padding lies nowhere in the image, so its code is negative."""
    return _padded(work.main(), list(work.get("pad") or work.get("padding")), {})


def mirrored(work: Work) -> Result:
    """Return the places behind reflection or replication padding: padding has the codes of the cells that it repeats."""
    return _padded(
        work.main(), list(work.get("padding")), {"mode": "reflect" if work.name.startswith("reflection") else "replicate"}
    )


def _padded(source: Places, widths: Sequence[int], how: dict[str, Any]) -> Places:
    """Pad position codes and copy numbers as the tensor is padded."""
    padded_places = source._replace(copies=None).each(lambda codes: padded(codes, [widths], how))
    assert padded_places is not None  # noqa: S101 - padding always succeeds
    copies = None if source.copies is None else padded(source.copies, [widths], how).clamp(min=0)
    return padded_places._replace(copies=copies)


def as_complex(work: Work) -> Result:
    """Return the places behind `view_as_complex`, if both numbers of each pair come from the same cell.

    Raises:
        Unproven: If they do not.
    """
    complex_places = work.main().each(lambda codes: codes[..., 0] if same_along(codes, -1) else None)
    if complex_places is None:
        raise Unproven(work.name)
    return complex_places


def as_real(work: Work) -> Result:
    """Return the places behind `view_as_real`: both parts of a complex number have its position code."""
    real_places = work.main().each(lambda codes: codes[..., None].expand(work.shape))
    assert real_places is not None  # noqa: S101 - expanding always succeeds
    return real_places


# --- joining


def joined_by(work: Work) -> Result:
    """Return the places behind `cat` or `stack`: the position codes of all inputs, joined.

    Inputs that do not come from the image, such as a class token in front of the patches, become tokens that lie nowhere in it.

    Raises:
        Unproven: If no input has places, or if scores (with a row and a column for each element) are joined to other tensors.
    """
    dim = int(work.get("dim", 0)) % len(work.shape)
    is_stack = work.name == "stack"
    nodes = [node for node in work.get("tensors") if work.facts(node).shape.numel()]
    inputs = [_with_new_axis(work.places(node), dim) if is_stack else work.places(node) for node in nodes]
    placed_inputs = [places for places in inputs if work.counts(places)]
    if not placed_inputs:
        raise Unproven(work.name)
    first_placed = placed_inputs[0]
    if any((places.columns is None) != (first_placed.columns is None) for places in placed_inputs):
        raise Unproven(work.name)
    lost_names = [places.name for places in inputs if places.kind == "lost"]
    parts = [places if work.counts(places) else _beside(work, places, first_placed, dim) for places in inputs]
    return first_placed._replace(
        codes=joined([part.codes for part in parts], dim),
        columns=None if first_placed.columns is None else joined([_column_codes(part) for part in parts], dim),
        copies=_joined_copies(work, parts, placed_inputs, dim, is_stack=is_stack),
        behind=later(*(part.behind for part in parts)),
        others=None,
        name=lost_names[0] if lost_names else first_placed.name,
        mixture=any(part.mixture for part in parts),
        leaning=any(part.leaning for part in parts),
    )


def _column_codes(part: Places) -> Tensor:
    """Return the codes of the columns (keys) of a score matrix; for any other tensor, its codes."""
    return part.codes if part.columns is None else part.columns


def _with_new_axis(places: Places, dim: int) -> Places:
    """Return places with a new axis of size 1, as `stack` adds it."""
    unsqueezed = places.each(lambda codes: codes.unsqueeze(dim))
    assert unsqueezed is not None  # noqa: S101 - a new axis always fits
    return unsqueezed


def _joined_copies(
    work: Work, parts: Sequence[Places], placed_parts: Sequence[Places], dim: int, *, is_stack: bool
) -> Tensor | None:
    """Return a number for each joined element that tells copies of one image token apart; None if there are no copies.

    Joining makes copies if several parts hold the same image cells, as in `cat([tokens, tokens])`, unless it joins their channels.
    """
    is_repeated = len(placed_parts) > 1 and _overlap(work, placed_parts) and (is_stack or not _is_channels(placed_parts, dim))
    if not is_repeated and all(part.copies is None for part in parts):
        return None
    factor = len(parts) if is_repeated else 1
    no_copies = torch.zeros((), dtype=torch.int32, device=work.device)
    numbers = []
    for index, part in enumerate(parts):
        earlier = no_copies.expand(part.shape) if part.copies is None else part.copies
        numbers.append(earlier * factor + (index if is_repeated else 0))
    return joined(numbers, dim).expand(work.shape)


def _is_channels(placed_parts: Sequence[Places], dim: int) -> bool:
    """Check whether `dim` holds the channels of tokens, and all parts hold channels of the same tokens."""
    if not all(same_along(part.codes, dim) for part in placed_parts):
        return False
    first_codes = placed_parts[0].codes
    return all(
        part.codes.ndim == first_codes.ndim and equal(part.codes.narrow(dim, 0, 1), first_codes.narrow(dim, 0, 1))
        for part in placed_parts[1:]
    )


def _overlap(work: Work, parts: Sequence[Places]) -> bool:
    """Check whether several tensors have cells of the image in common. Class tokens and the like lie in no cell."""
    distinct_codes = [torch.unique(compact(part.codes)) for part in parts]
    all_codes = torch.cat([codes[codes >= 0] for codes in distinct_codes])
    for plane in work.planes.of(all_codes):
        is_set = not plane.grid  # tokens that lie nowhere in the image
        if is_set:
            set_end = plane.base + plane.cells * work.planes.images
            all_codes = all_codes[(all_codes < plane.start) | (all_codes >= set_end)]
    return bool(len(torch.unique(all_codes)) < len(all_codes))


def _beside(work: Work, part: Places, image_tokens: Places, dim: int) -> Places:
    """Return the places of elements from no pixel, such as a class token or registers, that `cat` joins to image tokens.

    Joined as tokens, they become members of a set: tokens that lie nowhere in the image. Learned channels that are joined to the
    channels of image tokens get the position codes of these tokens.
    """
    shape, image_codes = part.shape, image_tokens.codes
    is_scores = image_tokens.columns is not None
    if part.kind == "lost" or is_scores:
        return part
    joins_channels = image_codes.shape[dim] > 1 and same_along(image_codes, dim)
    if joins_channels and part.kind == "learned":
        return part._replace(codes=image_codes.narrow(dim, 0, 1).expand(shape))
    if joins_channels:
        return part._replace(codes=torch.full((), LOST, dtype=torch.int32, device=work.device).expand(shape))
    if part.located:
        return part
    count = shape[dim]
    set_name = f"foreign {part.name}" if part.kind == "foreign" else part.name or "token"
    token_codes = work.planes.members(work.planes.set_of(set_name, count))
    broadcastable = [1] * len(shape)
    broadcastable[dim] = count
    return part._replace(codes=token_codes.view(broadcastable).expand(shape))


def settled(planes: Planes, codes: Tensor, name: str) -> Tensor:
    """Return position codes in which learned and foreign elements are tokens of a set, numbered along the last axis.

    Such tokens lie nowhere in the image: learned ones descend from parameters, foreign ones from another input, such as words.
    """
    for unplaced_code, set_name in ((LEARNED, "token"), (FOREIGN, f"foreign {name}".strip())):
        is_unplaced = codes == unplaced_code
        if bool(is_unplaced.any()):
            token_codes = planes.members(planes.set_of(set_name, codes.shape[-1]))
            codes = torch.where(is_unplaced, token_codes.expand(codes.shape), codes)
    return codes
