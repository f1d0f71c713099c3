"""Rules for products of matrices: layers that mix channels, products of queries and keys, weighted sums of values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from visattn.core.capturing.placing.cells import cells_vary, holds_all, is_from_before
from visattn.core.capturing.placing.copies import copies_behind
from visattn.core.capturing.placing.places import Places, later
from visattn.core.capturing.placing.pointwise import with_added
from visattn.core.capturing.placing.work import Result, Unproven, Work, over_members, through
from visattn.core.capturing.tokens.codes import equal, same_along
from visattn.core.capturing.tokens.planes import PADDING, compact

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
    """Return the places of a product of matrices `(..., i, k) @ (..., k, j)`, with an added term such as a bias.

    Raises:
        Unproven: If an element of it comes from several places.
    """
    left, right = (work.places(work.get(name)) for name in FACTORS[work.name])
    if work.name == "addbmm":
        raise Unproven(work.name)
    result = product(work, left, right, weight=work.name in ("mm", "addmm"))
    if work.name in ("baddbmm", "addmm") and work.get("beta", 1) != 0:
        return with_added(work, result, work.get("self"))
    return result


def by_vector(work: Work) -> Result:
    """Return the places of `(n, k) @ (k)` and `(k) @ (k)`, computed as products of matrices with one row or column."""
    names = {"mv": ("self", "vec"), "addmv": ("mat", "vec")}.get(work.name, ("self", "tensor"))
    left, right = (work.places(work.get(name)) for name in names)
    if work.name in ("dot", "vdot"):
        left = _reshaped(left, lambda codes: codes[None])
    column = _reshaped(right, lambda codes: codes[:, None])
    result = product(work, left, column, weight=True, shape=(left.shape[-2], 1))
    return _reshaped(result, lambda codes: codes.reshape(work.shape))


def linear(work: Work) -> Result:
    """Return the places of a linear layer that some processors run in one operation: it mixes the last axis."""
    source = work.places(work.get("input", work.get("self")))
    return _mixed(work, source, -1, work.shape[-1])


def _reshaped(places: Places, change: Callable[[Tensor], Tensor]) -> Places:
    """Return places to whose position codes a change was applied that only reshapes or expands them."""
    changed = places.each(change)
    assert changed is not None  # noqa: S101 - it only turns axes
    return changed


def product(work: Work, left: Places, right: Places, *, weight: bool, shape: tuple[int, ...] | None = None) -> Places:
    """Return the places of a product of matrices: of tokens behind a linear layer, of attention scores, or of a sum of values.

    `weight` tells whether a learned operand is a weight of a layer, never a set of tokens. `shape` is that of the result; by
    default that of the operation.

    Raises:
        Unproven: If its elements come from several places.
    """
    shape = tuple(work.shape) if shape is None else shape
    left_is_followed, right_is_followed = work.counts(left), work.counts(right)
    if not work.sets and "lost" in (left.kind, right.kind) and (left_is_followed or right_is_followed):
        return _by_unknown(work, left, right, shape)
    if work.sets and any(bool((compact(operand.codes) == PADDING).all()) for operand in (left, right)):
        raise Unproven(work.name)  # zeros, which the other operand gives no tokens
    right_is_weight = work.sets and weight and left_is_followed and right.codes.ndim < 3
    if left_is_followed and right_is_followed and not right_is_weight:
        return _of_two(work, left, right, shape)
    if left_is_followed:
        return _with_known(work, left, right, shape, weight)
    transposed_shape = (*shape[:-2], shape[-1], shape[-2])
    return _transposed(_with_known(work, _transposed(right), _transposed(left), transposed_shape, weight))


def _by_unknown(work: Work, left: Places, right: Places, shape: tuple[int, ...]) -> Places:
    """Return the places of tokens whose channels are mixed by a matrix of unknown origin that is the same at all positions.

    Raises:
        Unproven: If the matrix may mix tokens, or differ between them.
    """
    if left.kind == "lost":
        transposed_shape = (*shape[:-2], shape[-1], shape[-2])
        return _transposed(_by_unknown(work, _transposed(right), _transposed(left), transposed_shape))
    lead_axes = range(left.codes.ndim - 2)
    is_one_matrix_per_image = not any(cells_vary(work.planes, left.codes, dim) for dim in lead_axes)
    mixes_channels = is_one_matrix_per_image and same_along(left.codes, -1)
    is_proven = right.of_channels or is_from_before(work, right)
    if not is_proven or left.columns is not None or not mixes_channels:
        raise Unproven(right.name or work.name)
    mixed = _mixed(work, left, -1, shape[-1])
    return _reshaped(mixed, lambda codes: codes.expand(shape))._replace(name=right.name or work.name)


def _transposed(places: Places) -> Places:
    """Return the places of a tensor whose last two axes are swapped."""
    transposed = places.each(lambda codes: codes.mT)
    assert transposed is not None  # noqa: S101 - it only turns axes
    return transposed._replace(others=None if places.others is None else places.others.mT)


def _with_known(work: Work, left: Places, right: Places, shape: tuple[int, ...], weight: bool) -> Places:
    """Return the places of tokens `(..., i, k)` multiplied by `(..., k, j)`, such as a weight, that does not come from the image.

    If the second operand is a set of learned tokens, or words, their codes become those of the other axis.

    Raises:
        Unproven: If several tokens are mixed to one that is no cell, or the second operand is of unknown origin.
    """
    if right.kind == "lost":
        raise Unproven(right.name or work.name)
    if left.columns is not None:
        return _scores_with_known(work, left, right, shape)
    result = _mixed(work, left, -1, shape[-1])
    result = _reshaped(result, lambda codes: codes.expand(shape))
    result = result._replace(behind=later(left.behind, right.behind))
    right_is_tokens = not weight and right.kind in ("learned", "foreign") and right.located
    if not right_is_tokens or not same_along(left.codes, -1) or not same_along(right.codes, -2):
        return result
    return result._replace(others=right.codes[..., :1, :].expand(shape), asked=True)


def _scores_with_known(work: Work, scores: Places, values: Places, shape: tuple[int, ...]) -> Places:
    """Return the places of attention scores, or weights, that are multiplied by a matrix that does not come from the image.

    It either mixes heads, or holds learned values, which the weights sum: then the result lies at the queries.

    Raises:
        Unproven: If scores of several queries and keys are mixed.
    """
    assert scores.columns is not None  # noqa: S101 - the caller has checked it
    one_query, one_key = same_along(scores.codes, -1), same_along(scores.columns, -1)
    if one_query and one_key:  # heads are mixed
        return _reshaped(scores, lambda codes: codes.narrow(-1, 0, 1).expand(shape))
    if one_query or one_key:  # weights are applied to learned values
        _check_members(work, scores, values)
        kept_codes = scores.codes if one_query else scores.columns
        copies = copies_behind(scores.copies, [-1], shape)
        return scores._replace(codes=kept_codes.narrow(-1, 0, 1).expand(shape), columns=None, copies=copies, others=None)
    raise Unproven(work.name)


def _check_members(work: Work, scores: Places, values: Places) -> None:
    """Check that scores `(..., i, k)` of tokens and members of a set, such as words, weight these members `(..., k, j)`, or raise.

    Otherwise they may be no scores, but tokens behind a layer, whose channels have been taken for members.

    Raises:
        Unproven: If they weight anything else.
    """
    assert scores.columns is not None  # noqa: S101 - the caller has checked it
    kept_codes, summed_codes = scores.codes, scores.columns
    if not same_along(kept_codes, -1):
        kept_codes, summed_codes = summed_codes, kept_codes
    if not over_members(work, kept_codes, summed_codes):
        return
    if not same_along(summed_codes, -2) or not same_along(values.codes, -1):
        raise Unproven(work.name)
    of_scores, of_values = torch.broadcast_tensors(summed_codes[..., 0, :], values.codes[..., 0])  # type: ignore[no-untyped-call]
    if not equal(of_scores, of_values):
        raise Unproven(work.name)


def _mixed(work: Work, places: Places, dim: int, size: int) -> Places:
    """Return places after a learned mixing of one axis: channels keep their token, tokens become one merged cell.

    Raises:
        Unproven: If the tokens that are mixed form no cell, or are pairs of queries and keys.
    """
    is_one_token = same_along(places.codes, dim)
    if places.columns is not None and (not is_one_token or not same_along(places.columns, dim)):
        raise Unproven(work.name)
    codes = through(work.planes, places.codes, dim, size)
    columns = None if places.columns is None else through(work.planes, places.columns, dim, size)
    copies = places.copies
    if copies is not None:
        copies = copies.narrow(dim, 0, 1).expand(codes.shape) if same_along(copies, dim) else None
    mixes_tokens = not is_one_token and (size > 1 or places.copies is not None)
    mixture, leaning = places.mixture or mixes_tokens, places.leaning or not is_one_token
    return places._replace(codes=codes, columns=columns, copies=copies, mixture=mixture, leaning=leaning, others=None)


def _of_two(work: Work, left: Places, right: Places, shape: tuple[int, ...]) -> Places:
    """Return the places of a product of two operands from the image: of attention scores, or of weights and values.

    Scores of queries `(..., i, channels)` and keys `(..., channels, j)` have the places of both: those of the query and of the key.

    Raises:
        _Summed: If tokens are multiplied by tokens and summed over tokens.
        Unproven: If the product is neither.
    """
    behind = later(left.behind, right.behind)
    if left.columns is not None or right.columns is not None:
        return _weighted(work, left, right, shape)._replace(behind=behind)
    sums_left_tokens, sums_right_tokens = not same_along(left.codes, -1), not same_along(right.codes, -2)
    if sums_right_tokens:
        codes = _at_windows(work, left, right, shape)
        if codes is not None:
            return left._replace(codes=codes, behind=behind, copies=copies_behind(left.copies, [-1], shape), others=None)
    if sums_left_tokens:
        codes = _at_windows(work, _transposed(right), _transposed(left), (*shape[:-2], shape[-1], shape[-2]))
        if codes is not None:
            return right._replace(codes=codes.mT, behind=behind, copies=copies_behind(right.copies, [-2], shape), others=None)
    if sums_left_tokens and sums_right_tokens:
        raise _Summed(work.name) if _sums_same_tokens(left, right) else Unproven(work.name)
    if sums_left_tokens or sums_right_tokens:
        raise Unproven(work.name)
    row_codes, column_codes = left.codes[..., :1].expand(shape), right.codes[..., :1, :].expand(shape)
    copies = copies_behind(left.copies, [-1], shape)
    mixture = left.mixture or right.mixture
    rows = left._replace(codes=row_codes, behind=behind, copies=copies, others=None, mixture=mixture)
    is_matrix_on_right = shape[-1] > 1 and same_along(column_codes, -1) and not same_along(row_codes, -2)
    is_matrix_on_left = shape[-2] > 1 and same_along(row_codes, -2) and not same_along(column_codes, -1)
    if is_matrix_on_right or is_matrix_on_left:  # tokens behind a layer whose weights come from one cell
        tokens, matrix = (left, right) if is_matrix_on_right else (right, left)
        if matrix.leaning or not holds_all(work.planes, matrix, tokens):
            raise Unproven(work.name)
        return rows if is_matrix_on_right else rows._replace(codes=column_codes, copies=copies_behind(right.copies, [-2], shape))
    if equal(row_codes, column_codes):  # both have the same locations: these are no scores, but tokens
        return rows
    return rows._replace(columns=column_codes, one_stream=left.stream == right.stream)


def _sums_same_tokens(left: Places, right: Places) -> bool:
    """Check that a product `(..., i, k) @ (..., k, j)` sums over the same tokens of both operands, each of which has whole tokens."""
    if not same_along(left.codes, -2) or not same_along(right.codes, -1):
        return False
    of_left, of_right = torch.broadcast_tensors(left.codes[..., 0, :], right.codes[..., 0])  # type: ignore[no-untyped-call]
    return equal(of_left, of_right)


class _Summed(Unproven):
    """Error: tokens were multiplied by tokens and summed over tokens, as in linear attention."""


def is_sum(error: Exception) -> bool:
    """Check whether an error says that tokens were multiplied by tokens and summed over tokens."""
    return isinstance(error, _Summed)


def _weighted(work: Work, left: Places, right: Places, shape: tuple[int, ...]) -> Places:
    """Return the places of attention weights times values, in either order: the result lies where the queries do.

    Raises:
        Unproven: If both are weights, or the weights sum anything else than their keys.
    """
    if left.columns is not None and right.columns is not None:
        raise Unproven(work.name)
    weights, summed_axis = (left, -1) if left.columns is not None else (right, -2)
    assert weights.columns is not None  # noqa: S101 - it has columns
    if summed_axis == -1:
        _check_members(work, left, right)
    else:
        _check_members(work, _transposed(right), _transposed(left))
    for codes in (weights.codes, weights.columns):
        if same_along(codes, summed_axis):
            copies = copies_behind(weights.copies, [summed_axis], shape)
            return weights._replace(codes=codes.narrow(summed_axis, 0, 1).expand(shape), columns=None, copies=copies, others=None)
    raise Unproven(work.name)


def _at_windows(work: Work, weights: Places, values: Places, shape: tuple[int, ...]) -> Tensor | None:
    """Return the position codes of a weighted mean over windows whose weights come from one cell each (outlook attention).

    They are those of that cell, which must lie in the window. Return None for any other product.
    """
    window_has_one_cell = same_along(weights.codes, -1) and same_along(weights.codes, -2)
    if not window_has_one_cell or same_along(values.codes, -2):
        return None
    planes = work.planes
    codes = weights.codes[..., :1].expand(shape)
    low, high = planes.boxes(values.codes)
    window_low = low.nan_to_num(1e9).amin(-3, keepdim=True)  # elements without a cell are ignored
    window_high = high.nan_to_num(-1e9).amax(-3, keepdim=True)
    cell_codes = weights.codes[..., :1].expand(*weights.codes.shape[:-1], values.codes.shape[-1])
    start, stop = planes.boxes(cell_codes)
    center = (start + stop) / 2
    is_inside = (center >= window_low - 1e-6) & (center <= window_high + 1e-6)
    return codes if bool(is_inside.all()) else None
