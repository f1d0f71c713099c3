"""View: one photo under one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from visattn._support.checks import one_of
from visattn._support.language import worded
from visattn._support.reprs import brief
from visattn.core.geometry import Geometry
from visattn.core.maps import AttentionMap
from visattn.core.pipeline.answering import answer
from visattn.core.pipeline.explanation import Explanation
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.outputs import PredictedClass
from visattn.core.pipeline.question import Question, ask
from visattn.core.provenance import Provenance
from visattn.core.records import Recording, TokenLayout
from visattn.errors import OptionError


class Importance(NamedTuple):
    """Importance of the heads for a score, see `visattn.evaluation.head_importance`.

    Attributes:
        target: The score in words.
        heads: In units of the score: a number for each head of each attention call of the recording.
    """

    target: str
    heads: tuple[tuple[float, ...], ...]


class LayerContributions(NamedTuple):
    """What one attention call adds directly to a score.

    Attributes:
        layer: Name of the layer, with the index of the call unless it is the first.
        layout: The tokens that it reads.
        values: `(heads, tokens)` share of each token through each head.
        bias: Share of the biases of its output projection.
    """

    layer: str
    layout: TokenLayout
    values: Tensor
    bias: float


class Contributions(NamedTuple):
    """Terms that a score is the sum of, see `visattn.methods.contributions`.

    Attributes:
        target: The score in words.
        score: The score.
        layers: The attention calls, in order.
        rest: Name and share of each other term: MLPs, embedding, biases.
    """

    target: str
    score: float
    layers: tuple[LayerContributions, ...]
    rest: tuple[tuple[str, float], ...]


@dataclass(frozen=True, eq=False)
class View:
    """One photo under one model.

    Attributes:
        photo: The upright photo.
        geometry: Position of the model's input on the photo.
        recording: Attention and features of one forward pass over this photo alone. Its provenance names model, weights, photo and
            preprocessing.
        maps: Maps of the photo, by name.
        classes: Most probable classes of a classifier, in descending order.
        texts: Words for tokens that stand for some, by the names of the tokens in the layouts: `word3`.
        importance: Importance of the heads for the score that the study explains; None if it explains none.
        contributions: Terms of that score, if the method is among those of the study.
        name: Name of the view, such as a step of a training; it comes first in titles.
    """

    photo: Image.Image
    geometry: Geometry
    recording: Recording
    maps: Mapping[str, AttentionMap] = field(default_factory=dict)
    classes: tuple[PredictedClass, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    importance: Importance | None = None
    contributions: Contributions | None = None
    name: str = ""

    __repr__ = brief

    @property
    def title(self) -> str:
        """Name, model and photo."""
        return f"{self.name}: {self.provenance.title}" if self.name else self.provenance.title

    @property
    def provenance(self) -> Provenance:
        """Model, weights, photo and preprocessing."""
        return self.recording.provenance

    @property
    def prepared(self) -> Prepared:
        """The photo with its place in the model's input, without the pixels."""
        return Prepared(torch.empty(0), (self.photo,), (self.geometry,))

    def explanation(self, name: str) -> Explanation:
        """Return one of the maps with its photo.

        Raises:
            OptionError: If no map has this name.
        """
        return Explanation(self.photo, self.geometry, self.maps[one_of(name, tuple(self.maps), "map")])

    def explain(self, method: str = "attention", **parameters: Any) -> Explanation:  # noqa: ANN401 - the method's own
        """Compute a map from the recording alone, as `visattn.explain` does with the model.

        Args:
            method: Method that reads attention or features and no gradients, such as `attention`, `rollout` or `similarity`.
            parameters: The method's own, such as `layer`, `head` and `query`.

        Returns:
            The explanation.

        Raises:
            OptionError: If the method needs the model, or a parameter does not fit.
        """
        return self.answer(ask(method, parameters))

    def answer(self, question: Question) -> Explanation:
        """Answer a question from `ask` from the recording alone; see `explain`."""
        method = question.method
        if method is not None and not from_recording(question):
            raise OptionError(
                f"method '{question.name}' needs the model, and a study has only its recording. Use "
                + worded(
                    "visattn.explain, or name the method when the study is made: visattn.study(model, image, methods=[...]).",
                    f"visattn overlay IMAGE --method {question.name}.",
                )
            )
        return answer(self.recording, self.prepared, question)


def from_recording(question: Question) -> bool:
    """Check whether a recording without gradients, with the tokens of the last layer, has all that a method needs."""
    if question.method is None:
        return False
    missing = question.method.wants(question.parameters) - {"attention", "gates", "glimpses"}
    return not missing or (missing == {"features"} and question.parameters.get("layer", -1) == -1)
