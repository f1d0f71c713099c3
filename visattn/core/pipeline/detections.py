"""Boxes of detectors: what the model outputs for the object query whose map is drawn."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from visattn.core.geometry import Box
from visattn.core.maps import Detection
from visattn.core.pipeline.explanation import Explanation
from visattn.core.pipeline.outputs import class_name, tensor_of

_QUERY = re.compile(r"(?:object|query):(\d+)")


class Detections(NamedTuple):
    """Boxes `(B, N, 4)` as centers and sizes in shares of the image, and the scores of their classes `(B, N, classes)`."""

    boxes: Tensor
    logits: Tensor

    @classmethod
    def of(cls, output: Any, inputs: Mapping[str, Any]) -> Detections | None:  # noqa: ANN401
        """Return the boxes of a model's output; None if it has none, or if the image is padded, as shares are then those of a part."""
        logits, boxes = tensor_of(output, "logits", "pred_logits"), tensor_of(output, "pred_boxes")
        if logits is None or boxes is None or boxes.ndim != 3 or boxes.shape[2] != 4 or logits.shape[:-1] != boxes.shape[:-1]:
            return None
        mask = inputs.get("pixel_mask")
        padded = isinstance(mask, Tensor) and not bool(mask.bool().all())
        inside = bool(((boxes >= 0) & (boxes <= 1)).all())
        return None if padded or not inside else cls(boxes.detach(), logits.detach())

    def of_query(self, index: int, labels: Sequence[str] | None, size: tuple[int, int], image: int = 0) -> Detection:
        """Return a box in pixels of the input, which has `size` (height, width), with the name of its class."""
        x, y, width, height = self.boxes[image, index].tolist()
        shares = y - height / 2, x - width / 2, y + height / 2, x + width / 2
        box = Box(*(share * side for share, side in zip(shares, size * 2, strict=True)))
        return Detection(best_class(self.logits[image, index], labels), box)


def best_class(logits: Tensor, labels: Sequence[str] | None) -> str:
    """Return the name of the class with the highest score `(classes,)`. A class beyond the names stands for no object."""
    best = int(logits.argmax())
    nothing = labels is not None and best == len(labels) == len(logits) - 1
    return "no object" if nothing else class_name(best, labels)


def completed(
    explanation: Explanation,
    output: Any,  # noqa: ANN401
    inputs: Mapping[str, Any],
    labels: Sequence[str] | None,
    image: int,
    detection: Detection | None = None,
) -> Explanation:
    """Add to a map the box of the object query that it is of, if the model outputs one, or else the `detection` of its target."""
    query, detections = _QUERY.fullmatch(explanation.map.facts.query), Detections.of(output, inputs)
    what = "box of the target"
    if query is not None and detections is not None and int(query[1]) < detections.boxes.shape[1]:
        what = f"box {query[1]} of the model's output"
        detection = detections.of_query(int(query[1]), labels, explanation.geometry.input, image)
    return explanation if detection is None else _with_box(explanation, detection, what)


def _with_box(explanation: Explanation, detection: Detection, what: str) -> Explanation:
    place = explanation.geometry.box_to_photo(detection.box)
    where = f"x {place.left:.0f} to {place.right:.0f}, y {place.top:.0f} to {place.bottom:.0f}"
    facts = replace(explanation.map.facts, detections=(detection,))
    provenance = explanation.map.provenance.but(notes=(f"{what}: {detection.label}, {where}",))
    return replace(explanation, map=replace(explanation.map, facts=facts, provenance=provenance))
