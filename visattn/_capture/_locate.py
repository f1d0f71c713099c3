"""Where the tokens of a call lie, from what was followed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visattn._capture._anatomy import Placement
from visattn._capture._arrange import Arrangement, Unplaced, arrange, channels, unplaced
from visattn._capture._call import Call, FusedCall, ProductCall
from visattn._capture._codes import compact, same_along
from visattn._capture._follow import Follower, later
from visattn.errors import LayoutError


def by_rule(placement: Placement, call: Call, images: int) -> Arrangement:
    """The arrangement of a call whose tokens are placed by a rule; heads may be folded into the batch.

    Raises:
        LayoutError: If the operands are cut into windows.
    """
    kind, queries, keys = placement
    if len(call.lead) == 2:
        return Arrangement(kind, queries, keys)
    groups = torch.Size(call.lead).numel()
    if len(call.lead) == 1 and images and groups % images == 0:
        return Arrangement(kind, queries, keys, torch.arange(groups).view(images, -1, 1))
    raise LayoutError(
        f"operands must be (B, heads, tokens, d) to be placed by grid and prefix, got {(*call.lead, call.rows)} + (d,). "
        "Leave grid out: then tokens are followed; or leave the layer out with layers=."
    )


def locate(follower: Follower, call: Call, answers_at_keys: bool = False) -> tuple[Arrangement, tuple[str, int]]:
    """The arrangement of a call, and the last attention that flowed into it, by layer and call; ("", 0) for none."""
    assert isinstance(call, (FusedCall, ProductCall))  # noqa: S101
    sources = (call.query, call.key, call.value) if isinstance(call, FusedCall) else (call.weights, call.value)
    last = later(*(places.behind for places in map(follower.of, sources) if places is not None))
    behind = last[1:] if last else ("", 0)
    box = follower.planes.input
    try:
        if isinstance(call, FusedCall):
            queries, keys = (_of_vectors(follower, x) for x in (call.query, call.key))
            if keys is None:
                keys = _of_vectors(follower, call.value)
            if isinstance(keys, _Channels):
                return channels(call.lead, call.rows, call.columns, box, follower.planes.images), behind
        else:
            queries, keys = _of_weights(follower, call)
            if keys is None and isinstance(_of_vectors(follower, call.value), _Channels):
                return channels(call.lead, call.rows, call.columns, box, follower.planes.images), behind
        if keys is None:
            raise Unplaced(f"its tokens could not be followed from the pixels beyond {_lost(follower, sources) or 'the input'}")
        if answers_at_keys and call.rows == call.columns:
            queries = keys
        if queries is None and _lost(follower, sources[:1]):
            raise Unplaced(f"its queries could not be followed from the pixels beyond {_lost(follower, sources[:1])}")
        if queries is None and isinstance(call, FusedCall) and not follower.learned(call.query):
            raise Unplaced("its queries come neither from the pixels nor from a parameter")
        if isinstance(queries, _Channels):
            raise Unplaced("its queries are channels, its keys are tokens")
        known = tuple(call.lead), call.rows, None if queries is None else _content(queries), _content(keys)
        if known not in follower.arrangements:  # layers of one stage are arranged alike
            follower.arrangements[known] = arrange(follower.planes, queries, keys, call.lead, call.rows)
        return follower.arrangements[known], behind
    except Unplaced as why:
        return unplaced(call.lead, call.rows, call.columns, box, str(why)), behind


def _content(codes: Tensor) -> tuple[object, ...]:
    stored = compact(codes)
    return tuple(codes.shape), tuple(stored.shape), stored.cpu().contiguous().numpy().tobytes()


def _lost(follower: Follower, tensors: Sequence[Tensor]) -> str | None:
    return next((name for name in map(follower.lost, tensors) if name is not None), None)


class _Channels:
    """The rows of an operand are channels."""


def _of_vectors(follower: Follower, tensor: Tensor) -> Tensor | _Channels | None:
    """`(*lead, tokens)` codes of `(*lead, tokens, d)` vectors."""
    places = follower.of(tensor)
    if places is None or places.columns is not None:
        return None
    if same_along(places.codes, -1):
        return places.codes[..., 0]
    return _Channels() if same_along(places.codes, -2) else None


def _of_weights(follower: Follower, call: ProductCall) -> tuple[Tensor | None, Tensor | None]:
    places = follower.of(call.weights)
    keys = _of_vectors(follower, call.value)
    if places is None:
        return None, None
    rows, columns = places.codes, places.columns
    if columns is None:  # not scores of queries with keys
        if lost := follower.lost(call.weights):
            raise Unplaced(f"its queries could not be followed from the pixels beyond {lost}")
        if call.rows == call.columns == 1 and isinstance(keys, Tensor):  # a token alone in its window
            return keys, keys
        if call.rows > 1:
            alone = bool((rows == rows[..., :1, :]).all()) and not bool((rows == rows[..., :1]).all())
            raise Unplaced(
                "its softmax runs over the keys alone: no weight belongs to a pair of tokens"
                if alone
                else "its weights come from one token each, not from a query and a key"
            )
        columns, rows = rows, None  # type: ignore[assignment]
    columns = columns[..., 0, :] if bool((columns == columns[..., :1, :]).all()) else None
    if columns is None or (rows is not None and bool((rows != rows[..., :1]).any())):
        raise Unplaced("its weights mix several pairs of tokens")
    if isinstance(keys, Tensor) and not bool((keys == columns).all()):
        raise Unplaced("its keys and values are of different tokens")
    return None if rows is None else rows[..., 0], columns
