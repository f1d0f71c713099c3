"""Lift of class activation maps of EfficientNet-Lite0 for its top class, with the model's own evaluation transform."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

import visattn
from pointing.photos import COPIES, ITSELF, PRIOR, Measured, Part, Photo, copies_of, photos, references, times
from visattn import data
from visattn.core import methods
from visattn.core.families import cam_layer, labels
from visattn.core.pipeline.passes import look
from visattn.core.pipeline.targets import Target
from visattn.core.records import Recording

MODEL = "tf_efficientnet_lite0"
POSITIVE = "CAM, positive part"
ALIKE = "Grad-CAM", "XGrad-CAM", "HiResCAM", POSITIVE  # the same map up to a factor if a mean follows
COPIED = tuple(f"{COPIES} shifted copies of {name}" for name in ("Grad-CAM", "Eigen-CAM"))
METHODS = (
    methods.gradcam,
    methods.xgradcam,
    methods.hirescam,
    methods.cam,
    methods.gradcam_plus_plus,
    methods.layercam,
    methods.eigencam,
)
COLUMNS = {
    "Grad-CAM": "Grad-CAM",
    "Grad-CAM++": "Grad-CAM++",
    "Layer-CAM": "Layer-CAM",
    "Eigen-CAM": "Eigen-CAM",
    "shifted copies": COPIED[0],
    "center prior": PRIOR,
    "object mask": ITSELF,
}


def measured() -> Part:
    """Measure every photo."""
    model = visattn.load_model(MODEL, weights=data.offline_weights(MODEL))
    names, layer = labels(model), cam_layer(model)
    if names is None or layer is None:
        sys.exit(f"{MODEL}: its class names, or the layer for class activation maps, are unknown")
    part = {}
    for photo in photos(model, "model"):
        with torch.inference_mode():
            shares = model(photo.prepared.pixels)[0].softmax(0)
        first = int(shares.argmax())
        facts = {
            "object": f"{photo.seen.mean():.1%}",
            "inside the crop": f"{photo.seen.sum() / photo.mask.sum():.0%}",
            "top class": names[first].split(",")[0],
            "probability": f"{float(shares[first]):.0%}",
        }
        recording = look(model, photo.prepared, target=Target(first), features=[layer])
        part[photo.name] = Measured(facts, dict(lifts_of(photo, recording)))
    return part


def lifts_of(photo: Photo, recording: Recording) -> Iterator[tuple[str, float]]:
    """Compute all compared lifts of one photo."""
    for method in METHODS:
        shown = method(recording).at(batch=0)
        if method is methods.cam:
            shown = replace(shown, values=shown.values.clamp(min=0), meaning=POSITIVE)
        yield shown.meaning, float(photo.lift(shown))
        if method in (methods.gradcam, methods.eigencam):
            yield copies_of(photo, shown, shown.meaning)
    yield from references(photo, shown)


def apart(part: Part) -> float:
    """Return the largest difference between the lifts of methods whose maps are equal if a mean follows."""
    found = ([photo.lifts[name] for name in ALIKE] for photo in part.values())
    return max(max(lifts) - min(lifts) for lifts in found)


def conclusion(part: Part) -> str:
    """Return the main result as text, for the top of the page."""
    names = [name for name in next(iter(part.values())).lifts if name not in (PRIOR, ITSELF, *COPIED)]
    told = " and ".join(name for name in names if times(part, name, PRIOR)[1] > 1) or "no method"
    (lift, low, high), (ratio, ratio_low, ratio_high) = times(part, "Grad-CAM"), times(part, "Grad-CAM", PRIOR)
    helmet, tripod = (part[name].lifts["Grad-CAM"] for name in ("astronaut", "camera"))
    return (
        f"Grad-CAM has a lift of {lift:.2f} (95 % interval {low:.2f} to {high:.2f}), its shifted copies {times(part, COPIED[0])[0]:.2f}. "
        f"The center prior reaches {times(part, PRIOR)[0]:.2f}. On {len(part)} photos, {told} is "
        f"reliably above it (Grad-CAM: {ratio:.2f} times the prior, interval {ratio_low:.2f} to {ratio_high:.2f}). On `astronaut` and "
        f"`camera`, Grad-CAM has a lift of {helmet:.2f} and {tripod:.2f}: the top classes are a helmet and a tripod, which the masks "
        "leave out. A class map need not cover the annotated object."
    )
