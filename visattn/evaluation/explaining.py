"""A method as a function from the model's input to its map, always of one class and of one layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from visattn._support.reprs import brief
from visattn.core.maps import AttentionMap
from visattn.core.methods import METHODS, name_of
from visattn.core.pipeline.asking import asked_of
from visattn.core.pipeline.explanation import Explanation
from visattn.core.pipeline.inputs import Prepared, prepare_with, read
from visattn.core.pipeline.question import Question
from visattn.core.pipeline.running import explained
from visattn.core.pipeline.targets import Of
from visattn.evaluation.scores import one_input


class Explainer:
    """A method of visattn as a function of pixels, for `robustness`, `max_sensitivity` and the sanity checks.

    Without a target, the class that the model predicts for the photo itself is explained in every call; and the layer that the method
    chose for the photo is used in every call.

    Attributes:
        model: The model.
        pixels: The model's input for the photo, `(1, C, H, W)`.
        explanation: The explanation of the photo.
    """

    def __init__(
        self,
        model: nn.Module,
        photo: Any,  # noqa: ANN401 - see `visattn.explain`
        method: str = "auto",
        *,
        target: Of = None,
        seed: int = 0,
        **options: Any,  # noqa: ANN401 - of the method, the target and the preprocessing
    ) -> None:
        """Explain the photo itself.

        Args:
            model: A model.
            photo: See `visattn.explain`.
            method: See `visattn.explain`.
            target: See `visattn.explain`.
            seed: Seed of methods that draw samples.
            options: See `visattn.explain`.

        Raises:
            VisattnError: See `visattn.explain`.
        """
        asked = asked_of(method, target, options, seed)
        prepared = prepare_with([read(photo, asked.how)], model, asked.how)
        self._start(model, prepared, asked.question, seed, explained(model, [prepared], asked.question, seed=seed)[0])

    @classmethod
    def of_explanation(cls, model: nn.Module, prepared: Prepared, question: Question, seed: int, found: Explanation) -> Explainer:
        """Return the function of an explanation that is there already."""
        made = cls.__new__(cls)
        made._start(model, prepared, question, seed, found)
        return made

    def _start(self, model: nn.Module, prepared: Prepared, question: Question, seed: int, found: Explanation) -> None:
        self.model, self.pixels, self.explanation = model, one_input(prepared.pixels), found
        self._prepared, self._seed, self._question = prepared, seed, _fixed(question, found)

    __repr__ = brief

    def __call__(self, pixels: Tensor) -> AttentionMap:
        """Return the map of other pixels, `(1, C, H, W)`: the mean over heads and layers."""
        return self.of(self.model, pixels)

    def of(self, model: nn.Module, pixels: Tensor) -> AttentionMap:
        """Return the map of another model, such as a copy with random weights."""
        with torch.enable_grad():
            return explained(model, [replace(self._prepared, pixels=pixels)], self._question, seed=self._seed)[0].panel


def _fixed(question: Question, found: Explanation) -> Question:
    """Return a question about the method, the class and the layer of an explanation."""
    name = name_of(str(found.provenance.method))
    method, target, parameters = METHODS[name], question.target, dict(question.parameters)
    classes = [score["class"] for score in found.provenance.scores]
    if not target.given and len(classes) == 1:
        target = replace(target, of=classes[0])
    if "layer" in method.parameters and "layer" not in parameters and found.map.facts.layer:
        parameters["layer"] = found.map.facts.layer
    return replace(question, name=name, method=method, target=target, parameters=parameters)
