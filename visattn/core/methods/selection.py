"""Selection of records, and checks of recordings that several methods share."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from visattn.core.records import AttentionRecord, FeatureRecord, Recording, TokenLayout, split_call
from visattn.errors import OptionError

__all__ = ["chain", "chain_refusal", "graded", "one_forward", "tokens_of"]

NOTHING = (
    "no layer multiplied a softmax by values. Use method 'gradcam', or 'eigencam' if there is no class; without feature maps, "
    "'captum.saliency'."
)


def one_forward(recording: Recording) -> Recording:
    """Return `recording` after checking that it holds one forward pass.

    Raises:
        OptionError: If it holds several forward passes, whose maps must not be mixed.
    """
    if len(recording.forwards) > 1:
        raise OptionError(
            f"the recording holds {len(recording.forwards)} forward passes. Choose one: recording.select(forward=0)."
        )
    return recording


def chain(recording: Recording, *, probability: bool = True) -> list[AttentionRecord]:
    """Return the self-attention records after checking that they compose: consecutive layers share one token set.

    Raises:
        OptionError: If there are none, they are over different token sets, or rows must be distributions and are not.
    """
    reason = chain_refusal(one_forward(recording), probability=probability)
    if reason:
        raise OptionError(reason)
    return [record for record in of_the_image(recording) if record.kind == "self"]


def of_the_image(recording: Recording) -> Recording:
    """Return a recording without attention among tokens that never meet those of the image, as in the text tower of CLIP.

    Of tokens that could not be located, it is known that they do not meet those of the image if they do not depend on it.
    """
    layouts = {id(layout): layout for record in recording for layout in (record.queries, record.keys)}
    located = {layout for layout in layouts.values() if layout.grid}
    if located and len(layouts) == 1:  # as in most models
        return recording
    if not located:
        return recording
    pairs = [{record.queries, record.keys} for record in recording]
    met = located
    while more := {layout for pair in pairs if pair & met for layout in pair} - met:
        met = met | more
    lost = [record.reason is not None and record.keys.space != "apart" for record in recording]
    kept = [record for record, pair, unknown in zip(recording, pairs, lost, strict=True) if pair & met or unknown]
    return recording if len(kept) == len(pairs) else replace(recording, records=kept)


def graded(recording: Recording) -> Recording:
    """Return `recording` after checking that it holds the gradient of a score.

    Raises:
        OptionError: If it has no gradient, or if some of its attention cannot have one.
    """
    if sampled := _sampled(recording):
        raise OptionError(f"{sampled}, and such weights have no gradient. Choose other layers: recording.select(layer=...).")
    if any(record.operator.gradient is None for record in recording):
        raise OptionError(
            "a score's gradient is needed. Use capture(model, gradients=True), then recording.gradients(logits[:, index])."
        )
    return recording


def chain_refusal(recording: Recording, *, probability: bool = True) -> str | None:
    """Return why the self-attention of a recording does not compose, or None if it does."""
    instead = f"so layers cannot be multiplied.{advice(recording)}"
    if recording.captured != "*":
        return f"only the layers {recording.captured} were captured, so layers cannot be multiplied. Capture without layers=."
    recording = of_the_image(recording)
    if reason := set_refusal(recording):
        return reason
    other = next((record for record in recording if record.kind in ("cross", "unplaced")), None)
    if other is not None:
        return f"{named(other.layer)}: {other.reason or _why_cross(other)}, {instead}"
    records = [record for record in recording if record.kind == "self"]
    if not len(recording):
        return f"there is no self-attention to multiply: {NOTHING}"
    if not records:
        return f"there is no self-attention to multiply.{advice(recording)}"
    for before, after in pairwise(records):
        if before.queries != after.keys:
            names = f"{named(before.layer)} ({_size(before.queries)}) and {named(after.layer)} ({_size(after.keys)})"
            return f"{names} attend over different tokens, {instead}"
        if after.call:
            return f"{named(after.layer)} calls its attention several times, {instead}"
        if after.follows is not None and after.follows != (before.layer, before.call):
            return f"{named(after.layer)} does not follow {named(before.layer)} but {after.follows[0] or 'the pixels'}, {instead}"
    outside = next((record for record in recording if record.kind == "pool" and _reads_elsewhere(record, records[0].keys)), None)
    if outside is not None:
        return f"{named(outside.layer)} pools tokens that these layers do not have, {instead}"
    if probability and not all(record.probability for record in records):
        return f"attention rows do not sum to 1 in this model, {instead}"
    return None


def set_refusal(recording: Recording) -> str | None:
    """Return why layers must not be combined in any order, or None.

    Either attention was not recorded, or a layer attends to another input of the model or across branches.
    """
    instead = f"so layers cannot be combined.{advice(recording)}"
    if recording.unseen:
        unseen = recording.unseen[0]
        return f"{named(unseen.layer)} {unseen.reason}, which was not recorded, {instead}"
    foreign = next((record for record in recording if any(map(_foreign, record.keys.prefix))), None)
    if foreign is not None:
        return f"{named(foreign.layer)} also attends to tokens of another input of the model, {instead}"
    if sampled := _sampled(recording):
        return f"{sampled}, {instead}"
    apart = next((record for record in recording if record.kind == "cross" and record.queries == record.keys), None)
    return None if apart is None else f"{named(apart.layer)}: {_why_cross(apart)}, {instead}"


def advice(recording: Recording) -> str:
    """Return the advice to draw single layers, where that is possible; else nothing."""
    return " Use method 'attention'." if spatial_refusal(recording) is None else ""


def _sampled(recording: Recording) -> str:
    """Name a layer with deformable attention; empty if there is none."""
    found = next((record for record in recording if record.kind == "sampled"), None)
    return "" if found is None else f"{named(found.layer)} weights points that it computes (deformable attention)"


def named(layer: str) -> str:
    """Return the name of a layer for messages; the model itself has an empty name."""
    return layer or "the model itself"


def _foreign(token: str) -> bool:
    return token.startswith("foreign")


def _why_cross(record: AttentionRecord) -> str:
    queries, keys = record.queries, record.keys
    if (queries.grid, queries.box, queries.holes) == (keys.grid, keys.box, keys.holes):
        more = [token for token in keys.prefix if token not in queries.prefix]
        if more:
            return f"some of its keys are never queries ({', '.join(more)})"
        if queries == keys:
            return "its queries and its keys come from different branches"
    return f"its keys are other tokens ({_size(keys)}) than its queries ({_size(queries)})"


def _reads_elsewhere(pool: AttentionRecord, tokens: TokenLayout) -> bool:
    """Check whether a pooling head also attends to tokens outside of the set, as class attention does to its class token."""
    return (pool.keys.grid, pool.keys.holes) == (tokens.grid, tokens.holes) and not set(pool.keys.prefix) <= set(tokens.prefix)


def chain_refusal_of_any_rows(recording: Recording) -> str | None:
    """Return `chain_refusal` without requiring that rows sum to 1."""
    return chain_refusal(recording, probability=False)


def _size(layout: TokenLayout) -> str:
    dropped = f" without {len(layout.holes)}" if layout.holes else ""
    return " x ".join(map(str, layout.grid)) + dropped or f"{len(layout)} tokens"


def spatial_refusal(recording: Recording) -> str | None:
    """Return why no attention of a recording can be drawn on the image, or None if some can."""
    if not len(recording):
        return NOTHING
    if any(record.keys.grid for record in recording):
        return None
    for record in recording:
        if record.reason:
            return f"{named(record.layer)}: {record.reason}."
    if any(record.kind == "channel" for record in recording):
        return "channels attend to channels in this model, which cannot be drawn on the image. Use method 'similarity' or 'pca'."
    return "no attention over tokens on a grid was recorded."


def tokens_of(recording: Recording, layer: int | str = -1) -> FeatureRecord:
    """Return the token features of one layer.

    Raises:
        OptionError: If they were not recorded.
    """
    found = [feature for feature in one_forward(recording).features if feature.role == "tokens"]
    if isinstance(layer, str):
        name, call = split_call(layer)
        found = [feature for feature in found if feature.layer == name and call in (None, feature.call)]
    elif -len(found) <= layer < len(found):
        found = [found[layer]]
    else:
        found = []
    if not found:
        known = ", ".join(feature.name for feature in recording.features) or "none"
        raise OptionError(
            f"no token features of layer {layer} were recorded (recorded: {known}). Use capture(model, features='all')."
        )
    return found[-1]


def features_refusal(recording: Recording) -> str | None:
    """Return why there are no token features, or None if there are."""
    return None if any(feature.role == "tokens" for feature in recording.features) else "no token features were recorded."
