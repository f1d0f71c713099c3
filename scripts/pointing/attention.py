"""Lift of DINOv2's attention on whole photos."""

from __future__ import annotations

from collections.abc import Iterator

import visattn
from pointing.photos import PRIOR, Measured, Part, Photo, copies_of, photos, references, times
from visattn import data
from visattn.core import methods
from visattn.core.methods.sinks import find_sinks
from visattn.core.pipeline.passes import look
from visattn.core.records import Recording

COLUMNS = {
    "heads, mean": "last layer, mean of heads",
    "best head": "last layer, best head by the mask",
    "worst head": "last layer, worst head by the mask",
    "rollout": "rollout from layer 0",
    "sinks dropped": "rollout from layer 0, sinks dropped",
    "center prior": PRIOR,
}


def measured() -> Part:
    """Measure every photo."""
    model = visattn.load_model(data.OFFLINE_MODEL, weights=data.offline_weights())
    part = {}
    for photo in photos(model, "fit"):
        recording = look(model, photo.prepared, values=True)
        facts = {"object": f"{photo.seen.mean():.1%}", "sinks": str(len(find_sinks(recording)[0]))}
        part[photo.name] = Measured(facts, dict(lifts_of(photo, recording)))
    return part


def conclusion(part: Part) -> str:
    """Return the main result as text, for the top of the page."""
    mean, rolled = "last layer, mean of heads", "rollout from layer 0"
    (lift, low, high), (ratio, ratio_low, ratio_high) = times(part, mean), times(part, mean, PRIOR)
    share, share_low, share_high = times(part, rolled, PRIOR)
    return (
        f"The mean over the last layer's heads has a lift of {lift:.2f} (95 % interval {low:.2f} to {high:.2f}). That is {ratio:.2f} "
        f"times the center prior (interval {ratio_low:.2f} to {ratio_high:.2f}). Rollout from layer 0 has a lift of "
        f"{times(part, rolled)[0]:.2f}, {share:.2f} times the prior (interval {share_low:.2f} to {share_high:.2f})."
    )


def lifts_of(photo: Photo, recording: Recording) -> Iterator[tuple[str, float]]:
    """Compute all compared lifts of one photo."""
    layers = len(recording.layers)
    for sinks in ("keep", "drop"):
        name = {"keep": "", "drop": ", sinks dropped"}[sinks]
        heads = photo.lift(methods.attention(recording, sinks=sinks).at(batch=0))
        mean = methods.attention(recording, fusion="mean", sinks=sinks).at(batch=0)
        yield f"last layer, mean of heads{name}", float(photo.lift(mean))
        yield f"last layer, best head by the mask{name}", float(heads.max())
        yield f"last layer, worst head by the mask{name}", float(heads.min())
        for start in (0, layers // 2, layers - 2):
            rolled = methods.rollout(recording, start_layer=start, sinks=sinks).at(batch=0)
            yield f"rollout from layer {start}{name}", float(photo.lift(rolled))
            if start == 0 and sinks == "keep":
                yield copies_of(photo, rolled, "rollout")
        if sinks == "keep":
            yield copies_of(photo, mean, "the mean of heads")
    yield "norm attention of the last layer", float(photo.lift(methods.norm_attention(recording).at(batch=0)))
    yield "rollout, weights by norm", float(photo.lift(methods.rollout(recording, weights_by="norm").at(batch=0)))
    yield "rollout, residual measured", float(photo.lift(methods.rollout(recording, residual="measured").at(batch=0)))
    yield from references(photo, mean)
