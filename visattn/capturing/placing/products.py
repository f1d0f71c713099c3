"""Rules for products of matrices: layers that mix channels, products of queries and keys, weighted sums of values."""

from __future__ import annotations

import torch
from torch import Tensor

from visattn.capturing.placing.places import Places, later
from visattn.capturing.placing.pointwise import cells_vary, with_added
from visattn.capturing.placing.work import Result, Unproven, Work, over_members, through
from visattn.capturing.tokens.codes import equal, same_along
from visattn.capturing.tokens.planes import PADDING, Planes, compact

FACTORS = {  # names of both operands of a product of matrices
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
    "addbmm": ("batch1", "batch2"),
    "mv": ("self", "vec"),
    "addmv": ("mat", "vec"),
    "dot": ("self", "tensor"),
    "convolution": ("input", "weight"),
}


def multiplied(work: Work) -> Result:
    """`(..., i, k) @ (..., k, j)`, with an added term that must be constant."""
    left, right = (work.places(work.get(name)) for name in FACTORS[work.name])
    if work.name == "addbmm":
        raise Unproven(work.name)
    made = product(work, left, right, weight=work.name in ("mm", "addmm"))
    if work.name in ("baddbmm", "addmm") and work.get("beta", 1) != 0:
        return with_added(work, made, work.get("self"))
    return made


def by_vector(work: Work) -> Result:
    """`(n, k) @ (k)` and `(k) @ (k)`."""
    names = {"mv": ("self", "vec"), "addmv": ("mat", "vec")}.get(work.name, ("self", "tensor"))
    left, right = (work.places(work.get(name)) for name in names)
    if work.name in ("dot", "vdot"):
        left = _turned_to(left, lambda codes: codes[None])
    made = product(work, left, _turned_to(right, lambda codes: codes[:, None]), weight=True, shape=(left.shape[-2], 1))
    return _turned_to(made, lambda codes: codes.reshape(work.shape))


def linear(work: Work) -> Result:
    """Mix the last axis, as a linear layer that some processors run in one operation."""
    source = work.places(work.get("input", work.get("self")))
    return _mixed(work, source, -1, work.shape[-1])


def _turned_to(places: Places, change: object) -> Places:
    made = places.each(change)  # type: ignore[arg-type]
    assert made is not None  # noqa: S101 - it only turns axes
    return made


def product(work: Work, left: Places, right: Places, *, weight: bool, shape: tuple[int, ...] | None = None) -> Places:
    """Return the places of a product of matrices. `weight`: whether a learned operand is a weight, never a set of tokens.

    Raises:
        Unproven: If its elements come from several places.
    """
    shape = tuple(work.shape) if shape is None else shape
    first, second = work.counts(left), work.counts(right)
    if not work.sets and "lost" in (left.kind, right.kind) and (first or second):
        return _by_unknown(work, left, right, shape)
    if work.sets and any(bool((compact(one.codes) == PADDING).all()) for one in (left, right)):
        raise Unproven(work.name)  # zeros, which the other operand gives no members
    if work.sets and weight:
        second = second and not (first and right.codes.ndim < 3)
    if first and second:
        return _of_two(work, left, right, shape)
    if first:
        return _with_known(work, left, right, shape, weight)
    turned = _with_known(work, _transposed(right), _transposed(left), (*shape[:-2], shape[-1], shape[-2]), weight)
    return _transposed(turned)


def _by_unknown(work: Work, left: Places, right: Places, shape: tuple[int, ...]) -> Places:
    """Multiply tokens by a matrix that is the same at all positions, wherever it comes from (attention of channels)."""
    if left.kind == "lost":
        return _transposed(_by_unknown(work, _transposed(right), _transposed(left), (*shape[:-2], shape[-1], shape[-2])))
    lead = range(left.codes.ndim - 2)
    uniform = not any(cells_vary(work.planes, left.codes, dim) for dim in lead)
    if right.summed or left.columns is not None or not uniform or not same_along(left.codes, -1):
        raise Unproven(right.name or work.name)
    return _turned_to(_mixed(work, left, -1, shape[-1]), lambda codes: codes.expand(shape))._replace(name=right.name or work.name)


def _transposed(places: Places) -> Places:
    made = places.each(lambda codes: codes.mT)
    assert made is not None  # noqa: S101 - it only turns axes
    return made._replace(others=None if places.others is None else places.others.mT)


def _with_known(work: Work, left: Places, right: Places, shape: tuple[int, ...], weight: bool) -> Places:
    """Multiply tokens `(..., i, k)` by `(..., k, j)` that does not come from the image."""
    if right.kind == "lost":
        raise Unproven(right.name or work.name)
    if left.columns is not None:
        return _scores_with_known(work, left, right, shape)
    made = _mixed(work, left, -1, shape[-1])
    made = _turned_to(made, lambda codes: codes.expand(shape))
    sets = not weight and right.kind in ("learned", "foreign") and right.located
    if not sets or not same_along(left.codes, -1) or not same_along(right.codes, -2):
        return made._replace(behind=later(left.behind, right.behind))
    others = right.codes[..., :1, :].expand(shape)
    return made._replace(others=others, asked=True, behind=later(left.behind, right.behind))


def _scores_with_known(work: Work, scores: Places, values: Places, shape: tuple[int, ...]) -> Places:
    assert scores.columns is not None  # noqa: S101 - the caller has checked it
    rows, columns = same_along(scores.codes, -1), same_along(scores.columns, -1)
    if rows and columns:  # heads are mixed
        return _turned_to(scores, lambda codes: codes.narrow(-1, 0, 1).expand(shape))
    if rows or columns:  # weights are applied to learned values
        _check_members(work, scores, values)
        kept = scores.codes if rows else scores.columns
        return scores._replace(codes=kept.narrow(-1, 0, 1).expand(shape), columns=None, copies=None, others=None)
    raise Unproven(work.name)


def _check_members(work: Work, scores: Places, values: Places) -> None:
    """Check that scores `(..., i, k)` of tokens and members of a set weight these members `(..., k, j)`, or raise.

    Otherwise they may be no scores, but tokens behind a layer, whose channels have been taken for members.

    Raises:
        Unproven: If they weight anything else.
    """
    assert scores.columns is not None  # noqa: S101 - the caller has checked it
    kept, summed = scores.codes, scores.columns
    if not same_along(kept, -1):
        kept, summed = summed, kept
    if not over_members(work, kept, summed):
        return
    if not same_along(summed, -2) or not same_along(values.codes, -1):
        raise Unproven(work.name)
    members, own = torch.broadcast_tensors(summed[..., 0, :], values.codes[..., 0])  # type: ignore[no-untyped-call]
    if not equal(members, own):
        raise Unproven(work.name)


def _mixed(work: Work, places: Places, dim: int, size: int) -> Places:
    """Mix an axis by learned weights: channels keep their token, tokens become one merged cell."""
    alike = same_along(places.codes, dim)
    if places.columns is not None and (not alike or not same_along(places.columns, dim)):
        raise Unproven(work.name)
    codes = through(work.planes, places.codes, dim, size)
    columns = None if places.columns is None else through(work.planes, places.columns, dim, size)
    copies = places.copies
    if copies is not None:
        copies = copies.narrow(dim, 0, 1).expand(codes.shape) if same_along(copies, dim) else None
    mixture = places.mixture or (not alike and size > 1) or (not alike and places.copies is not None)
    leaning = places.leaning or not alike
    return places._replace(codes=codes, columns=columns, copies=copies, mixture=mixture, leaning=leaning, others=None)


def _of_two(work: Work, left: Places, right: Places, shape: tuple[int, ...]) -> Places:
    """Multiply two operands that both come from the image."""
    behind = later(left.behind, right.behind)
    if left.columns is not None or right.columns is not None:
        return _weighted(work, left, right, shape)._replace(behind=behind)
    over_left, over_right = not same_along(left.codes, -1), not same_along(right.codes, -2)
    if over_left or over_right:
        at = _at_windows(work, left, right, shape) if over_right else None
        if at is not None:
            return left._replace(codes=at, behind=behind, copies=None, others=None)
        at = _at_windows(work, _transposed(right), _transposed(left), (*shape[:-2], shape[-1], shape[-2])) if over_left else None
        if at is not None:
            return right._replace(codes=at.mT, behind=behind, copies=None, others=None)
        if over_left and over_right:
            raise _Summed(work.name)
        raise Unproven(work.name)
    rows, columns = left.codes[..., :1].expand(shape), right.codes[..., :1, :].expand(shape)
    copies = None if left.copies is None or not same_along(left.copies, -1) else left.copies[..., :1].expand(shape)
    base = left._replace(codes=rows, behind=behind, copies=copies, others=None, mixture=left.mixture or right.mixture)
    if equal(rows, columns):  # all operands have the same locations
        return base
    return base._replace(columns=columns, one_stream=left.stream == right.stream)


class _Summed(Unproven):
    """Error: tokens were multiplied by tokens and summed over tokens."""


def is_sum(error: Exception) -> bool:
    """Check whether an error says that tokens were multiplied by tokens and summed over tokens."""
    return isinstance(error, _Summed)


def _weighted(work: Work, left: Places, right: Places, shape: tuple[int, ...]) -> Places:
    """Apply weights to values: the result lies where the query does."""
    if left.columns is not None and right.columns is not None:
        raise Unproven(work.name)
    pair, dim = (left, -1) if left.columns is not None else (right, -2)
    assert pair.columns is not None  # noqa: S101 - it has columns
    _check_members(work, *((left, right) if dim == -1 else (_transposed(right), _transposed(left))))
    for codes in (pair.codes, pair.columns):
        if same_along(codes, dim):
            return pair._replace(codes=codes.narrow(dim, 0, 1).expand(shape), columns=None, copies=None, others=None)
    raise Unproven(work.name)


def _at_windows(work: Work, weights: Places, values: Places, shape: tuple[int, ...]) -> Tensor | None:
    """Return codes of a weighted mean over windows whose weights come from their own cell (outlook attention): those of that cell."""
    own = same_along(weights.codes, -1) and same_along(weights.codes, -2)  # all weights of a window come from one cell
    if not own or same_along(values.codes, -2):
        return None
    planes: Planes = work.planes
    at = weights.codes[..., :1].expand(shape)
    low, high = planes.boxes(values.codes)
    low, high = (
        part.nan_to_num(bad).amin(-3, keepdim=True) if bad > 0 else part.nan_to_num(bad).amax(-3, keepdim=True)
        for part, bad in ((low, 1e9), (high, -1e9))
    )
    cells = weights.codes[..., :1].expand(*weights.codes.shape[:-1], values.codes.shape[-1])
    start, stop = planes.boxes(cells)
    middle = (start + stop) / 2
    inside = ((middle >= low - 1e-6) & (middle <= high + 1e-6)).all()
    return at if bool(inside) else None
