"""Locations of the tokens of an attention call, from the traced codes of its operands."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from visattn._support.faces import Later
from visattn.core.capturing.description import Placement
from visattn.core.capturing.following.tracing import TokenTracer
from visattn.core.capturing.intercept.calls import Call
from visattn.core.capturing.placing.moves import settled
from visattn.core.capturing.placing.places import LOST, Places, content
from visattn.core.capturing.tokens.arrangement import MEAN, Arrangement, arrange, channels, unplaced
from visattn.core.capturing.tokens.codes import same_along
from visattn.core.capturing.tokens.refusals import Unplaced, WithoutImage
from visattn.core.capturing.trace.tape import Attention, Operand, Tape
from visattn.errors import LayoutError

if TYPE_CHECKING:
    from visattn.core.capturing.following import sampling, weight_codes
else:
    sampling = Later("visattn.core.capturing.following.sampling")
    weight_codes = Later("visattn.core.capturing.following.weight_codes")


def by_rule(placement: Placement, call: Call, images: int) -> Arrangement:
    """Return the arrangement of an attention call whose token layouts the model's description states, without tracing.

    Operands are `(B, heads, tokens, d)`, or `(B * heads, tokens, d)` if the model folds heads into the batch.

    Raises:
        LayoutError: If the operands are split into windows.
    """
    kind, queries, keys = placement
    if len(call.lead) == 2:
        return Arrangement(kind, queries, keys)
    groups = torch.Size(call.lead).numel()
    heads_in_batch = len(call.lead) == 1 and images and groups % images == 0
    if heads_in_batch:
        return Arrangement(kind, queries, keys, torch.arange(groups).view(images, -1, 1))
    raise LayoutError(
        f"operands must be (B, heads, tokens, d) to be placed by grid and prefix, got {(*call.lead, call.rows)} + (d,). "
        "Omit grid, so that tokens are traced, or exclude the layer with layers=."
    )


def locate(follower: TokenTracer, tape: Tape, attention: Attention) -> tuple[Arrangement, tuple[str, int]] | None:
    """Find where the tokens of an attention call lie in the image.

    Return their arrangement (image, head and token of each row and column), and layer and index of the last attention call that
    flowed into it; ("", 0) for none. If the tokens cannot be located, the arrangement only numbers them and has the reason.
    Return None if the call is a gate, not attention, or if it weights samples that cannot be located.
    """
    _, last_layer, last_call = follower.behind(attention.operands) or (0, "", 0)
    follows = last_layer, last_call
    if attention.samples:
        arrangement = None
        with suppress(Exception):  # after an unexpected operation the layer is reported as not recorded
            arrangement = sampling.sampled(follower, tape, attention)
        return None if arrangement is None else (arrangement, follows)
    if attention.doubtful and _is_gate(follower, attention.operands[-1]):
        return None
    try:
        return _arranged(follower, attention), follows
    except Unplaced as refusal:
        is_mixture = refusal.of_places and _are_mixtures(follower, attention)
        reason, drift = _MIXED if is_mixture else str(refusal), refusal.drift
    except Exception:  # an unexpected arrangement of tokens
        reason, drift = "its tokens could not be traced from the pixels", None
    numbered = unplaced(attention.lead, attention.rows, attention.columns, follower.planes.input, reason)
    return replace(numbered, drift=drift), follows


def _arranged(follower: TokenTracer, attention: Attention) -> Arrangement:
    """Return which image, head, window and token each row and column of an attention matrix belongs to.

    It is read off the position codes of queries, keys and values (the cell of the image that each token comes from).

    Raises:
        Unplaced: If it is not proven where the tokens lie.
    """
    if not follower.images.given:
        raise Unplaced("the model received no floating-point image in this forward pass")
    if not (attention.rows and attention.columns):
        raise Unplaced("it has no tokens")
    if attention.fused:
        query_codes, key_codes, value_codes = (_codes_of_vectors(follower, operand) for operand in attention.operands)
    else:
        query_codes, key_codes, value_codes = _codes_of_product(follower, attention)
    planes = follower.planes
    if isinstance(key_codes, _Channels) or (key_codes is None and isinstance(value_codes, _Channels)):
        return channels(attention.lead, attention.rows, attention.columns, planes.input, planes.images)
    if key_codes is None:
        raise Unplaced(_why_lost(follower, attention.operands, "tokens"))
    if attention.answers_at_keys and attention.rows == attention.columns:
        query_codes = key_codes
    if query_codes is None:
        _check_learned_queries(follower, attention)
    if isinstance(query_codes, _Channels):
        raise Unplaced("its queries are channels, its keys are tokens")
    if value_codes is None and _is_learned(follower, attention.operands[-1]) and not planes.on_grid(key_codes):
        value_codes = key_codes  # constants, such as the zeros that object queries begin with
    if isinstance(value_codes, _Channels) or value_codes is None or not _are_equal(value_codes, key_codes):
        raise Unplaced(_why_other_values(follower, attention.operands[-1], value_codes))
    return _arranged_by_codes(follower, attention, query_codes, key_codes)


def _arranged_by_codes(follower: TokenTracer, attention: Attention, query_codes: Tensor | None, key_codes: Tensor) -> Arrangement:
    """Return the arrangement of a call from the position codes of its queries (None for learned ones) and keys.

    Raises:
        Unplaced: If the tokens form no layout, or if the batch holds copies of one image, which look like heads.
    """
    lead, rows = attention.lead, attention.rows
    query_content = None if query_codes is None else content(query_codes)
    cache_key = tuple(lead), rows, query_content, content(key_codes)
    if cache_key not in follower.arrangements:  # layers of one stage share an arrangement
        try:
            follower.arrangements[cache_key] = arrange(follower.planes, query_codes, key_codes, lead, rows)
        except WithoutImage:
            raise Unplaced(_why_lost(follower, attention.operands, "tokens")) from None
    arrangement = follower.arrangements[cache_key]
    named_mean = any(name.startswith(MEAN) for layout in (arrangement.queries, arrangement.keys) for name in layout.prefix)
    if named_mean and any(follower.places(operand.slot).leaning for operand in attention.operands):
        raise Unplaced("its tokens hold a sum over the image with weights that may leave one token")
    query_places = follower.of(attention.operands[0])
    if attention.answers_at_keys:
        return arrangement
    if query_places is not None and _are_copies(query_places, arrangement):
        raise Unplaced("the batch holds several copies of the image")
    if arrangement.kind == "self" and not follower.one_stream(attention):
        return replace(arrangement, kind="cross")
    return arrangement


def _check_learned_queries(follower: TokenTracer, attention: Attention) -> None:
    """Check that queries without position codes are learned, as in attention pooling.

    Raises:
        Unplaced: If they come from elsewhere.
    """
    kind = follower.places(attention.operands[0].slot).kind
    if kind in ("lost", "foreign"):
        raise Unplaced(_why_lost(follower, attention.operands[:1], "queries"))
    if attention.fused and kind != "learned":
        raise Unplaced("its queries come neither from the pixels nor from a parameter")


def _are_copies(query_places: Places, arrangement: Arrangement) -> bool:
    """Check whether the groups of queries that count as heads are copies of one image, as in test-time augmentation."""
    if query_places.copies is None:
        return False
    elements_per_group = query_places.copies.shape[-2:].numel()
    copy_of_group = query_places.copies.reshape(-1, elements_per_group)[:, 0]
    if arrangement.order is None:
        images, heads = query_places.copies.shape[:2]
        by_head = copy_of_group.view(images, heads, 1)
    else:
        by_head = copy_of_group[arrangement.order]
    return bool((by_head != by_head[:, :1]).any())


def _is_gate(follower: TokenTracer, values: Operand) -> bool:
    """Check whether a product of a softmax with `values` is a gate: it does not sum different tokens of one image.

    That is so if the values are parameters, if those in a sum belong to one token, or if they come from several images.
    """
    places = follower.of(values)
    if _lost_behind(follower, values) is not None:
        return False
    if places is None or places.columns is not None:
        return True
    if _is_learned(follower, values) and places.behind is None:
        return True
    image = follower.planes.images_of(places.codes)
    largest_image = image.amax(-2, keepdim=True)
    from_other_images = (image >= 0) & (image != largest_image)
    return same_along(places.codes, -2) or bool(from_other_images.any())


_MIXED = "its tokens mix several image locations each"


def _are_mixtures(follower: TokenTracer, attention: Attention) -> bool:
    """Check whether an operand mixes cells of the image into several outputs, each of which counts for all of these cells."""
    return any(places is not None and places.mixture for places in map(follower.of, attention.operands))


def _are_equal(value_codes: Tensor, key_codes: Tensor) -> bool:
    """Check whether values and keys are the same tokens; one of them may be shared by all heads."""
    if value_codes.ndim != key_codes.ndim and value_codes.shape != key_codes.shape:
        value_codes, key_codes = torch.broadcast_tensors(value_codes, key_codes)  # type: ignore[no-untyped-call]
    return bool((value_codes == key_codes).all())


def _why_lost(follower: TokenTracer, operands: Sequence[Operand], what: str) -> str:
    """Say why operands have no position codes; `what` names the operands in the message."""
    places = [follower.places(operand.slot) for operand in operands]
    input_name = next((operand.name for operand in places if operand.kind == "foreign"), None)
    lost_behind = next((operand.name for operand in places if operand.kind == "lost"), None)
    if lost_behind is not None:
        return f"its {what} could not be traced from the pixels beyond {lost_behind}"
    if input_name is not None:
        return f"its {what} come from another input of the model ({input_name})"
    if any(operand.placed for operand in places):
        return _MIXED.replace("tokens", what)
    return f"its {what} come from parameters alone, not from the image"


def _why_other_values(follower: TokenTracer, operand: Operand, value_codes: object) -> str:
    """Say why the values of a call are not the tokens that its keys are; `value_codes` is None if they have none."""
    lost_behind = _lost_behind(follower, operand)
    if lost_behind is not None:
        return f"its values could not be traced from the pixels beyond {lost_behind}"
    if value_codes is None:
        return "its values belong to no image tokens"
    return "its keys and values belong to different tokens"


def _lost_behind(follower: TokenTracer, operand: Operand) -> str | None:
    """Return the operation behind which it is unknown where an operand comes from; None if it is known."""
    places = follower.places(operand.slot)
    return places.name if places.kind == "lost" else None


def _is_learned(follower: TokenTracer, operand: Operand) -> bool:
    """Check whether an operand comes from parameters, buffers and constants alone."""
    return follower.places(operand.slot).kind == "learned"


class _Channels:
    """Marker for an operand whose rows are channels."""


Codes = Tensor | _Channels | None


def _codes_of_vectors(follower: TokenTracer, operand: Operand) -> Codes:
    """Return the position code of each vector of an operand `(*lead, tokens, d)`, such as queries, as `(*lead, tokens)`.

    Return a marker if its rows are channels, as in channel attention, and None if the codes are unknown.

    Raises:
        Unplaced: If the vectors do not belong to one token each.
    """
    places = follower.of(operand)
    if places is None or places.columns is not None:
        return None
    if places.crossed:
        raise Unplaced(_MIXED, of_places=True)
    _check_drift(follower, places)
    if same_along(places.codes, -1):
        return _without_lost(follower, places.codes[..., 0], places.name)
    rows_are_channels = places.placed and same_along(places.codes, -2)
    return _Channels() if rows_are_channels else None


def _check_drift(follower: TokenTracer, places: Places) -> None:
    """Refuse tokens whose values were read at computed points (deformable attention) that may lie outside of the tokens' cells.

    Tokens without cells, such as words that attend to these tokens, are refused only if they read at points themselves.

    Raises:
        Unplaced: If the tokens are refused.
    """
    every_codes = [codes for codes in (places.codes, places.columns, places.others) if codes is not None]
    if places.drift.away and (places.drift.of_sets or any(follower.planes.on_grid(codes) for codes in every_codes)):
        raise Unplaced("its tokens hold values read at points that the model computes", drift=places.drift)


def _codes_of_product(follower: TokenTracer, attention: Attention) -> tuple[Codes, Codes, Codes]:
    """Return position codes of queries, keys and values of a call that multiplies weights `(*lead, q, k)` by values.

    Each weight has two codes: that of its row, the query, and that of its column, the key. Codes are None if they are unknown.

    Raises:
        Unplaced: If the weights do not belong to one query and one key each.
    """
    weights, values = attention.operands
    weight_places = follower.of(weights)
    value_codes = _codes_of_vectors(follower, values)
    lost_behind = _lost_behind(follower, weights)
    if lost_behind is not None and not isinstance(value_codes, _Channels):
        what = "queries or keys" if _lost_behind(follower, values) is None else "tokens"
        raise Unplaced(f"its {what} could not be traced from the pixels beyond {lost_behind}")
    if weight_places is None:
        if _is_learned(follower, weights):
            raise Unplaced("its weights come from parameters alone, not from queries and keys")
        return None, None, value_codes
    _check_drift(follower, weight_places)
    row_codes, column_codes = weight_codes.codes_of_pairs(follower, weight_places, follower.softmaxes_behind(weights))
    if column_codes is not None:
        return *_codes_of_axes(follower, row_codes, column_codes, weight_places.name), value_codes
    if lost_behind:
        raise Unplaced(f"its queries or keys could not be traced from the pixels beyond {lost_behind}")
    if isinstance(value_codes, _Channels):
        return None, None, value_codes
    if attention.rows == attention.columns == 1 and isinstance(value_codes, Tensor):  # the only token of its window
        return value_codes, value_codes, value_codes
    if isinstance(value_codes, Tensor) and weight_codes.is_by_query_alone(follower, attention, row_codes):
        return _without_lost(follower, row_codes[..., 0], weight_places.name), value_codes, value_codes
    weight_codes.check_one_query(attention, weight_places)
    return *_codes_of_axes(follower, None, row_codes, weight_places.name), value_codes


def _codes_of_axes(
    follower: TokenTracer, row_codes: Tensor | None, column_codes: Tensor, name: str
) -> tuple[Tensor | None, Tensor]:
    """Reduce the position codes of all weights, `(*lead, q, k)`, to those of their queries `(*lead, q)` and keys `(*lead, k)`.

    Raises:
        Unplaced: If the weights of a row do not share a query, or those of a column a key; or if some codes are unknown.
    """
    if row_codes is not None and weight_codes.are_turned(row_codes, column_codes):
        raise Unplaced("its softmax was turned: its rows are the columns of the softmax")
    keys_differ = bool((column_codes != column_codes[..., :1, :]).any())
    if keys_differ or (row_codes is not None and bool((row_codes != row_codes[..., :1]).any())):
        raise Unplaced("its weights mix several pairs of tokens")
    query_codes = None if row_codes is None else _without_lost(follower, row_codes[..., 0], name)
    return query_codes, _without_lost(follower, column_codes[..., 0, :], name)


def _without_lost(follower: TokenTracer, codes: Tensor, name: str) -> Tensor:
    """Return position codes in which tokens that lie nowhere in the image, such as a learned class token, are numbered.

    Raises:
        Unplaced: If it is unknown where some tokens come from.
    """
    if bool((codes == LOST).any()):
        raise Unplaced(f"its tokens could not be traced from the pixels beyond {name or 'a write'}")
    return settled(follower.planes, codes, name)
