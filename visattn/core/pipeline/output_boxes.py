"""Targets in outputs of detectors: `box:N`, a detection, and `query:N`, a query of a detection transformer.

The score is that of the class of the box. Class and box are those of the unedited image. A detection of torchvision is one in its list; one
of a transformer is a query whose best class has a probability above 0.5, the threshold of the image processors of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from visattn._support.language import option
from visattn.core.families import detections as detections_of
from visattn.core.geometry import Box
from visattn.core.maps import Detection
from visattn.core.pipeline.detections import Detections
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.output_places import Place, Score, check_plain, index_of
from visattn.core.pipeline.outputs import class_name, tensor_of
from visattn.core.pipeline.targets import Target
from visattn.errors import OptionError

_DETECTION = {"boxes", "scores", "labels"}  # of one image in torchvision
_ALIKE = 0.5  # overlap from which a detection counts as the same
_LEAST = 0.5  # probability from which a query counts as a detection
_SHOWN = 8  # detections in a message


def is_listed(output: Any) -> bool:  # noqa: ANN401 - a model's own
    """Check whether an output has boxes, scores and labels of each image."""
    first = output[0] if isinstance(output, (list, tuple)) and output else None
    return isinstance(first, Mapping) and first.keys() >= _DETECTION


def completed(model: nn.Module, prepared: Prepared, target: Target) -> tuple[Prepared, Target]:
    """Return a target that names a box as a function of the output.

    Args:
        model: The model.
        prepared: The preprocessed photo.
        target: The target, with the class names if they are known.

    Returns:
        The photo as it was given, and the target.

    Raises:
        OptionError: If `versus` or `target_space` is given too; later, if the box is not in the output.
    """
    assert target.named is not None  # noqa: S101 - the step was looked up by it
    check_plain(target)
    kind, which = target.named
    stated = getattr(getattr(model, "config", None), "num_labels", None) if target.labels is None else len(target.labels)
    classes = stated if isinstance(stated, int) else None
    asked = _Asked(kind, which, target.labels, classes, prepared, partial(detections_of, model))
    return prepared, replace(target, of=Place(asked.settled, on_image=True))


@dataclass(frozen=True)
class _Asked:
    """What a target names.

    Attributes:
        kind: `box` or `query`.
        which: Its number, as text.
        labels: Names of the classes, if known.
        classes: Number of the classes, if known.
        prepared: The preprocessed photo.
        listed: Function that returns an output of the model as boxes, scores and labels of each image, if it has them.
    """

    kind: str
    which: str
    labels: Sequence[str] | None
    classes: int | None
    prepared: Prepared
    listed: Callable[[Any], Any]

    def settled(self, output: Any) -> Score:  # noqa: ANN401 - a model's own
        """Return the score of the box in the output for the unedited image."""
        listed = self.listed(output)
        if self.kind == "box" and is_listed(listed):
            return self._of_detection(listed[0])
        return self._of_query(output)

    def _of_detection(self, first: Mapping[str, Tensor]) -> Score:
        """Return the score of a detection of torchvision. In an edited image it is that of its class that overlaps it most."""
        labels, scores = first["labels"].tolist(), first["scores"].detach().tolist()
        names = [class_name(label, self.labels) for label in labels]
        if not names:
            raise OptionError("the detector found nothing in this photo above its own threshold, so there is no box to explain.")
        index = self._index(names, scores)
        box = first["boxes"][index : index + 1].detach()
        left, top, right, bottom = box[0].tolist()

        def score(output: Any) -> Tensor:  # noqa: ANN401
            return torch.stack([_matching(detections, index, box, labels[index]) for detections in self.listed(output)])

        told = f"score of {names[index]} in box {index} = {scores[index]:.3g}"
        detection = Detection(f"{names[index]} {scores[index]:.0%}", Box(top, left, bottom, right))
        return Score(score, told, lambda output: self.listed(output)[0]["boxes"][index], detection)

    def _of_query(self, output: Any) -> Score:  # noqa: ANN401
        logits, boxes = tensor_of(output, "logits", "pred_logits"), tensor_of(output, "pred_boxes")
        if logits is None or boxes is None or logits.ndim != 3:
            raise OptionError(self._not_a_detector(output))
        logits = logits.detach()[0]
        probabilities = self._probabilities(logits)
        classes = logits[:, : self.classes].argmax(1)
        names = [class_name(index, self.labels) for index in classes.tolist()]
        if self.kind == "query":
            index = index_of("query", self.which, len(names), None)
            where = f"query {index}"
        else:
            if probabilities is None:
                raise OptionError(
                    f"the names of the classes are not known, so neither are probabilities of boxes. Pass {option('labels')}, or a query: "
                    f"{option('target', 'query:0')} to query:{len(names) - 1}."
                )
            number, index = self._found(probabilities, names)
            where = f"box {number} (query {index})"
        best = int(classes[index])
        chance = "" if probabilities is None else f" {float(probabilities[index]):.0%}"

        def score(output: Any) -> Tensor:  # noqa: ANN401
            return _field(output, "logits", "pred_logits")[:, index, best]

        told = f"logit of {names[index]} in {where} = {float(logits[index, best]):.3g}" + (chance and f", probability{chance}")
        placed = Detections.of(output, self.prepared.inputs)
        detection = None if placed is None else placed.of_query(index, self.labels, self.prepared.geometry.input)
        if detection is not None:
            detection = detection._replace(label=names[index] + chance)
        return Score(score, told, lambda output: _field(output, "pred_boxes")[:, index], detection)

    def _probabilities(self, logits: Tensor) -> Tensor | None:
        """Return the probability of the best class of each query; None if it is not known whether a class stands for no object."""
        if self.classes is not None and logits.shape[1] == self.classes + 1:
            return logits.softmax(1)[:, :-1].amax(1)
        return logits.sigmoid().amax(1) if logits.shape[1] == self.classes else None

    def _found(self, probabilities: Tensor, names: Sequence[str]) -> tuple[int, int]:
        """Return the number of a detection, in descending order of probability, and its query."""
        chances, order = (values.tolist() for values in probabilities.sort(descending=True, stable=True))
        count = sum(chance > _LEAST for chance in chances)
        if not count:
            nearest = zip(order[:3], chances, strict=False)
            there = ", ".join(f"query:{query} ({names[query]} {chance:.0%})" for query, chance in nearest)
            raise OptionError(
                f"no query has a class with a probability above {_LEAST:.0%}, so there is no box to explain. The most probable are "
                f"{there}; each can be the target: {option('target', f'query:{order[0]}')}."
            )
        number = self._index([names[query] for query in order[:count]], chances)
        return number, order[number]

    def _index(self, names: Sequence[str], chances: Sequence[float]) -> int:
        """Return the number of a box; the error names those that there are."""
        try:
            return index_of("box", self.which, len(names), None)
        except OptionError as error:
            if not names:
                raise
            there = [f"{number}: {name} {chance:.0%}" for number, (name, chance) in enumerate(zip(names, chances, strict=False))]
            more = ", ..." * (len(there) > _SHOWN)
            raise OptionError(f"{error} Boxes of this photo: {', '.join(there[:_SHOWN])}{more}") from error

    def _not_a_detector(self, output: Any) -> str:  # noqa: ANN401
        fields = "logits and pred_boxes" + (", or boxes, scores and labels of each image" if self.kind == "box" else "")
        shape = f" {tuple(output.shape)}" if isinstance(output, Tensor) else ""
        return (
            f"target {self.kind}:N needs a detector, whose output has {fields}; the model returned {type(output).__name__}{shape}. "
            "A model with another output needs a wrapper of a few lines, see docs/methods.md, Detectors of your own."
        )


def _field(output: Any, *names: str) -> Tensor:  # noqa: ANN401
    """Return a tensor that an output has."""
    field = tensor_of(output, *names)
    assert field is not None  # noqa: S101 - it was there
    return field


def _matching(detections: Mapping[str, Tensor], index: int, box: Tensor, label: int) -> Tensor:
    """Return the score of a detection, or in an edited image of the one of its class that overlaps it most; 0 if none does."""
    boxes, alike = detections["boxes"].detach(), detections["labels"] == label
    if index < len(boxes) and bool(alike[index]) and torch.equal(boxes[index], box[0]):
        return detections["scores"][index]  # the image itself: boxes without an area overlap nothing
    overlap = _overlap(box, boxes) * alike
    if not len(overlap) or float(overlap.max()) < _ALIKE:
        return detections["scores"].sum() * 0
    return detections["scores"][overlap.argmax()]


def _overlap(box: Tensor, boxes: Tensor) -> Tensor:
    """Return the intersection over union of a box `(1, 4)` with boxes `(N, 4)` of left, top, right, bottom."""
    sides = (torch.minimum(box, boxes)[:, 2:] - torch.maximum(box, boxes)[:, :2]).clamp_min(0)
    area, areas = ((corners[:, 2:] - corners[:, :2]).prod(1) for corners in (box, boxes))
    both = sides.prod(1)
    return both / (area + areas - both)
