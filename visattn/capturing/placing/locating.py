"""Locations of the tokens of an attention call, from the traced codes of its operands."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from visattn.capturing.description import Placement
from visattn.capturing.following.sampling import sampled
from visattn.capturing.intercept.calls import Call
from visattn.capturing.placing.moves import settled
from visattn.capturing.placing.places import LOST, Places, content
from visattn.capturing.placing.tracing import TokenTracer
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
    for operand in attention.operands:
        follower.meet(operand.slot)
    last = follower.behind(attention.operands)
    behind = last[1:] if last else ("", 0)
    if attention.samples:
        found = None
        with suppress(Exception):  # after an unexpected operation the layer is reported as not recorded
            found = sampled(follower, tape, attention)  # type: ignore[arg-type]
        return None if found is None else (found, behind)
    if attention.doubtful and _is_gate(follower, attention.operands[-1]):
        return None
    try:
        return _arranged(follower, attention), behind
    except Unplaced as why:
        reason = _MIXED if why.of_places and _are_mixtures(follower, attention) else str(why)
    except Exception:  # an unexpected arrangement of tokens
        reason = "its tokens could not be traced from the pixels"
    return unplaced(attention.lead, attention.rows, attention.columns, follower.known.planes.input, reason), behind


def _arranged(follower: TokenTracer, attention: Attention) -> Arrangement:
    """Return the arrangement of a call.

    Raises:
        Unplaced: If its tokens cannot be located.
    """
    known, lead, rows = follower.known, attention.lead, attention.rows
    if not follower.image:
        raise Unplaced("the model received no image in this forward pass")
    if not (rows and attention.columns):
        raise Unplaced("it has no tokens")
    queries, keys, values = _of_fused(follower, attention) if attention.fused else _of_weights(follower, attention)
    if isinstance(keys, _Channels) or (keys is None and isinstance(values, _Channels)):
        return channels(lead, rows, attention.columns, known.planes.input, known.images)
    if keys is None:
        raise Unplaced(_why_lost(follower, attention.operands, "tokens"))
    if attention.answers_at_keys and rows == attention.columns:
        queries = keys
    if queries is None:
        slot = attention.operands[0].slot
        if slot in known.lost or slot in known.foreign:
            raise Unplaced(_why_lost(follower, attention.operands[:1], "queries"))
        if attention.fused and slot not in known.learned:
            raise Unplaced("its queries come neither from the pixels nor from a parameter")
    if isinstance(queries, _Channels):
        raise Unplaced("its queries are channels, its keys are tokens")
    if values is None and attention.operands[-1].slot in known.learned and not known.planes.on_grid(keys):
        values = keys  # constants, such as the zeros that object queries begin with
    if isinstance(values, _Channels) or values is None or not _same(values, keys):
        raise Unplaced(_why_other_values(follower, attention.operands[-1], values))
    signs = tuple(lead), rows, None if queries is None else content(queries), content(keys)
    if signs not in follower.arrangements:  # layers of one stage share an arrangement
        follower.arrangements[signs] = arrange(known.planes, queries, keys, lead, rows)
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
    known, places = follower.known, follower.of(values)
    if values.slot in known.lost:
        return False
    if places is None or places.columns is not None or (values.slot in known.learned and places.behind is None):
        return True
    image = known.planes.images_of(places.codes)
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
    known = follower.known
    foreign = next((known.foreign[one.slot] for one in operands if one.slot in known.foreign), None)
    lost = next((known.lost[one.slot] for one in operands if one.slot in known.lost), None)
    if lost is not None:
        return f"its {what} could not be traced from the pixels beyond {lost}"
    if foreign is not None:
        return f"its {what} come from another input of the model ({foreign})"
    if any(one.slot in known.places for one in operands):
        return _MIXED.replace("tokens", what)
    return f"its {what} come from parameters alone, not from the image"


def _why_other_values(follower: TokenTracer, operand: Operand, values: object) -> str:
    if operand.slot in follower.known.lost:
        return f"its values could not be traced from the pixels beyond {follower.known.lost[operand.slot]}"
    return "its keys and values belong to different tokens" if values is not None else "its values belong to no image tokens"


class _Channels:
    """Marker for an operand whose rows are channels."""


Codes = Tensor | _Channels | None


def _of_vectors(follower: TokenTracer, operand: Operand) -> Codes:
    """Return the codes `(*lead, tokens)` of vectors `(*lead, tokens, d)`; None if they are unknown."""
    places = follower.of(operand)
    if places is None or places.columns is not None or operand.slot in follower.known.lost:
        return None
    if places.crossed:
        raise Unplaced(_MIXED, of_places=True)
    if places.sampled:
        raise Unplaced("it reads values at points that it computes")
    if same_along(places.codes, -1):
        return _told_apart(follower, places.codes[..., 0], places.name)
    return _Channels() if same_along(places.codes, -2) else None


def _of_fused(follower: TokenTracer, attention: Attention) -> tuple[Codes, Codes, Codes]:
    queries, keys, values = (_of_vectors(follower, operand) for operand in attention.operands)
    return queries, keys, values


def _of_weights(follower: TokenTracer, attention: Attention) -> tuple[Codes, Codes, Codes]:
    weights, value = attention.operands
    places = follower.of(weights)
    values = _of_vectors(follower, value)
    lost = follower.known.lost.get(weights.slot)
    if lost is not None and not isinstance(values, _Channels):
        what = "tokens" if value.slot in follower.known.lost else "queries or keys"
        raise Unplaced(f"its {what} could not be traced from the pixels beyond {lost}")
    if places is None:
        if weights.slot in follower.known.learned:
            raise Unplaced("its weights come from parameters alone, not from queries and keys")
        return None, None, values
    rows, columns = places.codes, places.columns
    if columns is None and places.others is not None and places.others.shape == rows.shape:  # a product with members of a set
        rows, columns = (places.others, rows) if bool((rows == rows[..., :1, :]).all()) else (rows, places.others)
    if columns is None:  # not query-key scores
        if lost := follower.known.lost.get(weights.slot):
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


def _told_apart(follower: TokenTracer, codes: Tensor, name: str) -> Tensor:
    """Return codes of tokens in which those that lie nowhere are members of sets.

    Raises:
        Unplaced: If some tokens are lost.
    """
    if bool((codes == LOST).any()):
        raise Unplaced(f"its tokens could not be traced from the pixels beyond {name or 'a write'}")
    return settled(follower.known.planes, codes, name)


def _why_no_pairs(codes: Tensor) -> str:
    """Explain why weights with several rows, but only key locations, have no query."""
    along_rows, along_columns = bool((codes == codes[..., :1, :]).all()), bool((codes == codes[..., :1]).all())
    if along_rows and not along_columns:
        return "its softmax runs over the keys alone: no weight belongs to a pair of tokens"
    return "its weights come from one token each: no key comes from the image"
