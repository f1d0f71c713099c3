"""Position codes of the rows and columns of weights that a model writes out, as a matrix for each head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visattn.core.capturing.following.tracing import TokenTracer
from visattn.core.capturing.placing.places import Places
from visattn.core.capturing.tokens.codes import same_along
from visattn.core.capturing.tokens.refusals import Unplaced
from visattn.core.capturing.trace.tape import Attention


def codes_of_pairs(follower: TokenTracer, places: Places, softmaxes: Sequence[Places]) -> tuple[Tensor, Tensor | None]:
    """Return the position codes of the row and of the column that each weight belongs to; None for columns without codes.

    A product of scores that was turned before the softmax is as good as one of its operands in the other order. Tokens that lie nowhere in
    the image, such as object queries, are the rows, even if the product had them as columns: they ask.
    """
    row_codes, column_codes, other_codes = places.codes, places.columns, places.others
    if column_codes is None:
        if other_codes is None or other_codes.shape != row_codes.shape:
            return row_codes, None
        # a product with tokens that lie nowhere: their codes are the other ones
        image_along_columns = bool((row_codes == row_codes[..., :1, :]).all())
        return (other_codes, row_codes) if image_along_columns else (row_codes, other_codes)
    if not are_turned(row_codes, column_codes):
        return row_codes, column_codes
    turned_before = any(
        normalized.columns is not None and are_turned(normalized.codes, normalized.columns) for normalized in softmaxes
    )
    is_swapped = turned_before or not follower.planes.on_grid(column_codes)
    return (column_codes, row_codes) if is_swapped else (row_codes, column_codes)


def are_turned(row_codes: Tensor, column_codes: Tensor) -> bool:
    """Check whether codes of rows differ along columns only, and codes of columns along rows only."""
    return same_along(row_codes, -2) and same_along(column_codes, -1) and not same_along(row_codes, -1)


def is_by_query_alone(follower: TokenTracer, attention: Attention, codes: Tensor) -> bool:
    """Check whether each row of weights comes from a query of its own, and from nothing else, as in location-based attention.

    Then the keys are the tokens that the weights multiply. Weights of pairs of tokens that were mixed over the keys are no such rows. With
    several groups for an image, nothing would tell heads from queries that share a cell.
    """
    tells_rows_apart = attention.rows == 1 or not same_along(codes, -2)
    has_one_group = torch.Size(attention.lead).numel() == follower.planes.images
    if attention.columns < 2 or not has_one_group or not same_along(codes, -1) or not tells_rows_apart:
        return False
    softmaxes = follower.softmaxes_behind(attention.operands[0])
    return all(places.columns is None and places.others is None for places in softmaxes)


def check_one_query(attention: Attention, places: Places) -> None:
    """Check that weights with one code each are those of learned queries, or of a single query, so that the codes are the keys'.

    Raises:
        Unplaced: If they are not.
    """
    differ_along_columns_only = bool((places.codes == places.codes[..., :1, :]).all())
    if attention.rows <= 1 or (places.asked and differ_along_columns_only):
        return
    if places.name:
        raise Unplaced(f"its queries or keys could not be traced from the pixels beyond {places.name}")
    raise Unplaced(_why_no_pairs(places.codes), of_places=True)


def _why_no_pairs(codes: Tensor) -> str:
    """Explain why weights with several rows, but only key locations, have no query."""
    same_in_all_rows = bool((codes == codes[..., :1, :]).all())
    same_in_all_columns = bool((codes == codes[..., :1]).all())
    if same_in_all_rows and not same_in_all_columns:
        return "its softmax runs over the keys alone: no weight belongs to a pair of tokens"
    return "its weights come from one token each: no key comes from the image"
