"""Tokens that each meet all others, as in additive attention."""

from __future__ import annotations

from visattn.core.capturing.placing.cells import cells_vary
from visattn.core.capturing.placing.places import Places
from visattn.core.capturing.tokens.planes import Planes


def pairs_of_tokens(planes: Planes, left: Places, right: Places) -> Places | None:
    """Return the places of pairs of tokens: each token of one operand meets each of the other.

    Return None if the tokens of both vary along the same axis, or come from several images.
    """
    left_axes, right_axes = (
        [dim for dim in range(places.codes.ndim) if cells_vary(planes, places.codes, dim)] for places in (left, right)
    )
    if not left_axes or not right_axes or set(left_axes) & set(right_axes):
        return None
    left_image, right_image = (planes.images_of(places.codes) for places in (left, right))
    if bool(((left_image != right_image) & (left_image >= 0) & (right_image >= 0)).any()):
        return None
    queries, keys = (left, right) if left_axes[-1] < right_axes[-1] else (right, left)
    mixture, crossed = left.mixture or right.mixture, left.crossed or right.crossed
    return queries._replace(columns=keys.codes, one_stream=left.stream == right.stream, mixture=mixture, crossed=crossed)
