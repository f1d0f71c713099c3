"""Locations of the tokens of an attention call, from the traced codes of its operands."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from visattn.capturing.description import Placement
from visattn.capturing.following.sampling import sampled
from visattn.capturing.following.tracing import TokenTracer
from visattn.capturing.intercept.calls import Call
from visattn.capturing.placing.moves import settled
from visattn.capturing.placing.places import LOST, Places, content
from visattn.capturing.tokens.arrangement import Arrangement, Unplaced, arrange, channels, unplaced
from visattn.capturing.tokens.codes import same_along
from visattn.capturing.trace.tape import Attention, Operand, Tape
from visattn.errors import LayoutError


def by_rule(placement: Placement, call: Call, images: int) -> Arrangement:
    """Return the arrangement of a call whose tokens are placed by a rule; heads may be folded into the batch.

    Raises:
        LayoutError: If the operands are split into windows.
    """
    kind, queries, keys = placement
    if len(call.lead) == 2:
        return Arrangement(kind, queries, keys)
    groups = torch.Size(call.lead).numel()
    if len(call.lead) == 1 and images and groups % images == 0:
        return Arrangement(kind, queries, keys, torch.arange(groups).view(images, -1, 1))
    raise LayoutError(
        f"operands must be (B, heads, tokens, d) to be placed by grid and prefix, got {(*call.lead, call.rows)} + (d,). "
        "Omit grid, so that tokens are traced, or exclude the layer with layers=."
    )


def locate(follower: TokenTracer, tape: Tape, attention: Attention) -> tuple[Arrangement, tuple[str, int]] | None:
    """Return the arrangement of a call, and layer and index of the last attention call that flowed into it; ("", 0) for none.

    Return None if the call is a gate, not attention, or if it weights samples that cannot be located.
    """
    last = follower.behind(attention.operands)
    behind = last[1:] if last else ("", 0)
    if attention.samples:
        found = None
        with suppress(Exception):  # after an unexpected operation the layer is reported as not recorded
            found = sampled(follower, tape, attention)
        return None if found is None else (found, behind)
    if attention.doubtful and _is_gate(follower, attention.operands[-1]):
        return None
    try:
        return _arranged(follower, attention), behind
    except Unplaced as why:
        reason, drift = _MIXED if why.of_places and _are_mixtures(follower, attention) else str(why), why.drift
    except Exception:  # an unexpected arrangement of tokens
        reason, drift = "its tokens could not be traced from the pixels", None
    found = unplaced(attention.lead, attention.rows, attention.columns, follower.planes.input, reason)
    return replace(found, drift=drift), behind


def _arranged(follower: TokenTracer, attention: Attention) -> Arrangement:
    """Return the arrangement of a call.

    Raises:
        Unplaced: If its tokens cannot be located.
    """
    planes, lead, rows = follower.planes, attention.lead, attention.rows
    if not follower.images.given:
        raise Unplaced("the model received no image in this forward pass")
    if not (rows and attention.columns):
        raise Unplaced("it has no tokens")
    queries, keys, values = _of_fused(follower, attention) if attention.fused else _of_weights(follower, attention)
    if isinstance(keys, _Channels) or (keys is None and isinstance(values, _Channels)):
        return channels(lead, rows, attention.columns, planes.input, planes.images)
    if keys is None:
        raise Unplaced(_why_lost(follower, attention.operands, "tokens"))
    if attention.answers_at_keys and rows == attention.columns:
        queries = keys
    if queries is None:
        kind = follower.places(attention.operands[0].slot).kind
        if kind in ("lost", "foreign"):
            raise Unplaced(_why_lost(follower, attention.operands[:1], "queries"))
        if attention.fused and kind != "learned":
            raise Unplaced("its queries come neither from the pixels nor from a parameter")
    if isinstance(queries, _Channels):
        raise Unplaced("its queries are channels, its keys are tokens")
    if values is None and _is_learned(follower, attention.operands[-1]) and not planes.on_grid(keys):
        values = keys  # constants, such as the zeros that object queries begin with
    if isinstance(values, _Channels) or values is None or not _same(values, keys):
        raise Unplaced(_why_other_values(follower, attention.operands[-1], values))
    signs = tuple(lead), rows, None if queries is None else content(queries), content(keys)
    if signs not in follower.arrangements:  # layers of one stage share an arrangement
        follower.arrangements[signs] = arrange(planes, queries, keys, lead, rows)
    found = follower.arrangements[signs]
    asking = follower.of(attention.operands[0])
    if asking is not None and not attention.answers_at_keys and _are_copies(asking, found):
        raise Unplaced("the batch holds several copies of the image")
    if found.kind == "self" and not attention.answers_at_keys and not follower.one_stream(attention):
        found = replace(found, kind="cross")
    return found


def _are_copies(asking: Places, arrangement: Arrangement) -> bool:
    """Check whether the groups that count as heads are copies of one image."""
    if asking.copies is None:
        return False
    first = asking.copies.reshape(-1, asking.copies.shape[-2:].numel())[:, 0]
    groups = first.view(-1)
    if arrangement.order is None:
        lead = asking.copies.shape[:2]
        groups = groups.view(lead[0], lead[1], 1)
    else:
        groups = groups[arrangement.order]
    return bool((groups != groups[:, :1]).any())


def _is_gate(follower: TokenTracer, values: Operand) -> bool:
    """Check whether the values that are weighted are parameters, belong to one token each time, or to the images of the batch."""
    places = follower.of(values)
    if _lost(follower, values) is not None:
        return False
    if places is None or places.columns is not None or (_is_learned(follower, values) and places.behind is None):
        return True
    image = follower.planes.images_of(places.codes)
    mixed = (image >= 0) & (image != image.amax(-2, keepdim=True))
    return same_along(places.codes, -2) or bool(mixed.any())


_MIXED = "its tokens mix several image locations each"


def _are_mixtures(follower: TokenTracer, attention: Attention) -> bool:
    """Check whether an operand mixes cells into several outputs, each of which counts for all of them."""
    return any(places is not None and places.mixture for places in map(follower.of, attention.operands))


def _same(values: Tensor, keys: Tensor) -> bool:
    if values.ndim != keys.ndim and values.shape != keys.shape:
        values, keys = torch.broadcast_tensors(values, keys)  # type: ignore[no-untyped-call]
    return bool((values == keys).all())


def _why_lost(follower: TokenTracer, operands: Sequence[Operand], what: str) -> str:
    places = [follower.places(operand.slot) for operand in operands]
    foreign = next((one.name for one in places if one.kind == "foreign"), None)
    lost = next((one.name for one in places if one.kind == "lost"), None)
    if lost is not None:
        return f"its {what} could not be traced from the pixels beyond {lost}"
    if foreign is not None:
        return f"its {what} come from another input of the model ({foreign})"
    if any(one.placed for one in places):
        return _MIXED.replace("tokens", what)
    return f"its {what} come from parameters alone, not from the image"


def _why_other_values(follower: TokenTracer, operand: Operand, values: object) -> str:
    if (lost := _lost(follower, operand)) is not None:
        return f"its values could not be traced from the pixels beyond {lost}"
    return "its keys and values belong to different tokens" if values is not None else "its values belong to no image tokens"


def _lost(follower: TokenTracer, operand: Operand) -> str | None:
    """Return the operation beyond which an operand is lost; None if it is not."""
    places = follower.places(operand.slot)
    return places.name if places.kind == "lost" else None


def _is_learned(follower: TokenTracer, operand: Operand) -> bool:
    return follower.places(operand.slot).kind == "learned"


class _Channels:
    """Marker for an operand whose rows are channels."""


Codes = Tensor | _Channels | None


def _of_vectors(follower: TokenTracer, operand: Operand) -> Codes:
    """Return the codes `(*lead, tokens)` of vectors `(*lead, tokens, d)`; None if they are unknown."""
    places = follower.of(operand)
    if places is None or places.columns is not None:
        return None
    if places.crossed:
        raise Unplaced(_MIXED, of_places=True)
    _check_drift(follower, places)
    if same_along(places.codes, -1):
        return _told_apart(follower, places.codes[..., 0], places.name)
    return _Channels() if places.placed and same_along(places.codes, -2) else None


def _check_drift(follower: TokenTracer, places: Places) -> None:
    """Refuse tokens that hold values which may lie outside their cells, and members of sets that read some at points.

    Other members, such as words that attend to these tokens, have no cells: they are themselves, whatever was read.

    Raises:
        Unplaced: If they do.
    """
    codes = [part for part in (places.codes, places.columns, places.others) if part is not None]
    if places.drift.away and (places.drift.of_sets or any(follower.planes.on_grid(part) for part in codes)):
        raise Unplaced("its tokens hold values read at points that the model computes", drift=places.drift)


def _of_fused(follower: TokenTracer, attention: Attention) -> tuple[Codes, Codes, Codes]:
    queries, keys, values = (_of_vectors(follower, operand) for operand in attention.operands)
    return queries, keys, values


def _of_weights(follower: TokenTracer, attention: Attention) -> tuple[Codes, Codes, Codes]:
    weights, value = attention.operands
    places = follower.of(weights)
    values = _of_vectors(follower, value)
    lost = _lost(follower, weights)
    if lost is not None and not isinstance(values, _Channels):
        what = "queries or keys" if _lost(follower, value) is None else "tokens"
        raise Unplaced(f"its {what} could not be traced from the pixels beyond {lost}")
    if places is None:
        if _is_learned(follower, weights):
            raise Unplaced("its weights come from parameters alone, not from queries and keys")
        return None, None, values
    _check_drift(follower, places)
    rows, columns = _pair(follower, places)
    if columns is None and places.others is not None and places.others.shape == rows.shape:  # a product with members of a set
        rows, columns = (places.others, rows) if bool((rows == rows[..., :1, :]).all()) else (rows, places.others)
    if columns is None:  # not query-key scores
        if lost:
            raise Unplaced(f"its queries or keys could not be traced from the pixels beyond {lost}")
        if isinstance(values, _Channels):
            return None, None, values
        if attention.rows == attention.columns == 1 and isinstance(values, Tensor):  # the only token of its window
            return values, values, values
        if attention.rows > 1 and not (places.asked and bool((rows == rows[..., :1, :]).all())):
            if places.name:
                raise Unplaced(f"its queries or keys could not be traced from the pixels beyond {places.name}")
            raise Unplaced(_why_no_pairs(rows), of_places=True)
        columns, rows = rows, None  # type: ignore[assignment]
    columns = columns[..., 0, :] if bool((columns == columns[..., :1, :]).all()) else None
    if columns is None or (rows is not None and bool((rows != rows[..., :1]).any())):
        raise Unplaced("its weights mix several pairs of tokens")
    rows = None if rows is None else _told_apart(follower, rows[..., 0], places.name)
    return rows, _told_apart(follower, columns, places.name), values


def _pair(follower: TokenTracer, places: Places) -> tuple[Tensor, Tensor | None]:
    """Return the codes of rows and columns of weights; members of a set ask, so they are rows wherever the product had them."""
    rows, columns = places.codes, places.columns
    if columns is None or same_along(rows, -1) or follower.planes.on_grid(columns):
        return rows, columns
    return (columns, rows) if same_along(rows, -2) and same_along(columns, -1) else (rows, columns)


def _told_apart(follower: TokenTracer, codes: Tensor, name: str) -> Tensor:
    """Return codes of tokens in which those that lie nowhere are members of sets.

    Raises:
        Unplaced: If some tokens are lost.
    """
    if bool((codes == LOST).any()):
        raise Unplaced(f"its tokens could not be traced from the pixels beyond {name or 'a write'}")
    return settled(follower.planes, codes, name)


def _why_no_pairs(codes: Tensor) -> str:
    """Explain why weights with several rows, but only key locations, have no query."""
    along_rows, along_columns = bool((codes == codes[..., :1, :]).all()), bool((codes == codes[..., :1]).all())
    if along_rows and not along_columns:
        return "its softmax runs over the keys alone: no weight belongs to a pair of tokens"
    return "its weights come from one token each: no key comes from the image"
