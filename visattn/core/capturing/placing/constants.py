"""Rules for operations that make tensors from numbers, and for tables of learned vectors."""

from __future__ import annotations

from visattn.core.capturing.placing.places import whole, zeros
from visattn.core.capturing.placing.work import Result, Unproven, Work


def constant(work: Work) -> Result:
    """Return the places of constants and random numbers, which count as learned. A tensor argument gives only shape and type."""
    return [whole("learned", out.shape, work.device) for out in work.outs]


def nothing(work: Work) -> Result:
    """Return the places of zeros, which count as padding until something is written over them."""
    return [zeros(out.shape, work.device) for out in work.outs]


def uninitialized(work: Work) -> Result:
    """Return the places of the results of `empty` and the like: it is unknown what their memory holds."""
    return [whole("lost", out.shape, work.device, "memory that was never written") for out in work.outs]


def embedded(work: Work) -> Result:
    """Return the places behind `embedding`, which looks up rows of a table.

    Rows of a learned table, such as words, become members of a set, that is tokens which lie nowhere in the image. If the table
    holds image tokens, rows keep their position codes (cells of the image).

    Raises:
        Unproven: If the table or the indices are of unknown origin, or image tokens choose the rows.
    """
    table, indices = work.places(work.get("weight")), work.places(work.get("indices"))
    if table.placed:
        rows = table.each(lambda codes: codes[work.content("indices")])
        assert rows is not None  # noqa: S101 - rows are always taken alike
        return rows
    if "lost" in (table.kind, indices.kind) or indices.placed:
        raise Unproven(work.name)
    if indices.located:
        rows = indices.each(lambda codes: codes[..., None].expand(work.shape))
        assert rows is not None  # noqa: S101 - a new axis always fits
        return rows._replace(kind=indices.kind)
    shape_of_indices = work.shape[:-1]
    table_node, indices_node = int(work.get("weight")), int(work.get("indices"))
    row_set = work.planes.set_of(f"{table.name}#{table_node}#{indices_node}", shape_of_indices.numel())
    row_codes = work.planes.members(row_set).view(*shape_of_indices, 1)
    return indices._replace(codes=row_codes.expand(work.shape), name=table.name or indices.name)
