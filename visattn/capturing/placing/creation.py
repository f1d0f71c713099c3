"""Rules for operations that make tensors from numbers, and for tables of learned vectors."""

from __future__ import annotations

from visattn.capturing.placing.places import whole, zeros
from visattn.capturing.placing.work import Result, Unproven, Work


def constant(work: Work) -> Result:
    """Constants and random numbers; a tensor among the arguments gives only shape and type."""
    return [whole("learned", out.shape, work.device) for out in work.outs]


def nothing(work: Work) -> Result:
    """Zeros."""
    return [zeros(out.shape, work.device) for out in work.outs]


def uninitialized(work: Work) -> Result:
    """Memory that nothing has written yet."""
    return [whole("lost", out.shape, work.device, "memory that was never written") for out in work.outs]


def embedded(work: Work) -> Result:
    """Rows of a table: members of the set of their indices, or of a set of their own; rows of image tokens are these tokens."""
    table, indices = work.places(work.get("weight")), work.places(work.get("indices"))
    if table.placed:
        taken = table.each(lambda codes: codes[work.content("indices")])
        assert taken is not None  # noqa: S101 - rows are always taken alike
        return taken
    if table.kind == "lost" or indices.kind == "lost":
        raise Unproven(work.name)
    if indices.placed:
        raise Unproven(work.name)
    if indices.located:
        made = indices.each(lambda codes: codes[..., None].expand(work.shape))
        assert made is not None  # noqa: S101 - a new axis always fits
        return made._replace(kind=indices.kind)
    node = int(work.get("weight"))
    planes = work.planes
    codes = planes.members(planes.set_of(f"{table.name}#{node}#{int(work.get('indices'))}", work.shape[:-1].numel()))
    made = indices._replace(codes=codes.view(*work.shape[:-1], 1).expand(work.shape))
    return made._replace(name=table.name or indices.name)
