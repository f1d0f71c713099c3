"""Rules for operations that merge elements along axes, or put them in an order of their values."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from visattn.capturing.placing.places import Places
from visattn.capturing.placing.work import Result, Unproven, Work, over_members, through
from visattn.capturing.tokens.codes import same_along


def reduced(work: Work) -> Result:
    """Merge axes: their elements count as one cell, if they are one."""
    source, dims = work.main(), work.get("dim")
    ndim = source.codes.ndim
    if dims is None and work.shape.numel() > 1 and ndim:
        raise Unproven(work.name)
    given = range(ndim) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    chosen = sorted({dim % ndim for dim in given}, reverse=True) if ndim else []
    made = _of_scores(work, source, chosen) if source.columns is not None else _merged(work, source, chosen)
    return [made if out.shape == made.shape else work.unknown(out.shape) for out in work.outs]


def _merged(work: Work, source: Places, dims: Sequence[int]) -> Places:
    codes, copies = source.codes, source.copies
    mixed = any(not same_along(codes, dim) for dim in dims)
    for dim in dims:
        codes = through(work.planes, codes, dim, 1)
        if copies is not None:
            copies = copies.narrow(dim, 0, 1) if same_along(copies, dim) else None
    kept = source.codes if mixed and codes.ndim == len(work.shape) else None
    mixture = source.mixture or (mixed and copies is not None and any(not same_along(copies, dim) for dim in range(copies.ndim)))
    if codes.ndim != len(work.shape):
        for dim in dims:
            codes = codes.squeeze(dim)
            copies = None if copies is None else copies.squeeze(dim)
    leaning = source.weighted if mixed else source.leaning
    return source._replace(codes=codes, copies=copies, others=None, parts=kept, mixture=mixture, leaning=leaning)


def _of_scores(work: Work, source: Places, dims: Sequence[int]) -> Places:
    """Return the places of summed scores: sums over keys lie at the query, sums over queries at the key."""
    assert source.columns is not None  # noqa: S101 - the caller has checked it
    for codes, others in ((source.codes, source.columns), (source.columns, source.codes)):
        if all(same_along(codes, dim) for dim in dims):
            alone = not all(same_along(part, dim) for part in (source.codes, source.columns) for dim in dims)
            if not alone:
                kept = source.each(lambda part: _narrowed(part, dims).reshape(work.shape))
                assert kept is not None  # noqa: S101 - it always fits
                return kept
            if over_members(work, codes, others):
                raise Unproven(work.name)
            return source._replace(codes=_narrowed(codes, dims).reshape(work.shape), columns=None, copies=None, others=None)
    raise Unproven(work.name)


def _narrowed(codes: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in dims:
        codes = codes.narrow(dim, 0, 1)
    return codes


def reordered(work: Work) -> Result:
    """Sort, choose or accumulate along an axis of elements of one token."""
    source = work.main()
    default = 0 if work.name == "msort" else None if work.name.startswith("arg") and work.name != "argsort" else -1
    dim = work.get("dim", default)
    if source.columns is not None or not isinstance(dim, int) or not same_along(source.codes, dim):
        raise Unproven(work.name)
    alike = source.codes.narrow(dim, 0, 1)
    return [
        source._replace(
            codes=(alike if len(out.shape) == alike.ndim else alike.squeeze(dim)).expand(out.shape), copies=None, others=None
        )
        for out in work.outs
    ]


def normalized(work: Work) -> Result:
    """Normalize, with or without a softmax: each element stays where it is."""
    first = work.main()
    return [
        first._replace(summed=False) if number == 0 and out.shape == first.shape else work.unknown(out.shape)
        for number, out in enumerate(work.outs)
    ]
