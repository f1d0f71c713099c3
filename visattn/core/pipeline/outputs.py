"""Meaning of a model's outputs, and the words that may be said of them.

Probabilities are known where rows lie in [0, 1] and sum to 1, or where the model, its weights or the user say that the outputs are logits
of classes or of independent labels. All others are called outputs, by their number, and get no probability.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from visattn._support.checks import printable
from visattn._support.faces import Later
from visattn._support.types import Space, Task
from visattn.errors import OptionError

if TYPE_CHECKING:
    from visattn.core.pipeline import output_pairs
else:
    output_pairs = Later("visattn.core.pipeline.output_pairs")

__all__ = ["PredictedClass", "name_of", "noun_of", "outputs_of", "predicted_classes"]

Kind = Literal[
    "logits",
    "probabilities",
    "log-probabilities",
    "logits of labels",
    "probabilities of labels",
    "values",
    "embedding",
    "unknown",
]
_NOUNS: Mapping[Kind, str] = {
    "logits": "class",
    "probabilities": "class",
    "log-probabilities": "class",
    "logits of labels": "label",
    "probabilities of labels": "label",
    "values": "output",
    "embedding": "component",
    "unknown": "output",
}
_Change = Callable[[Tensor], Tensor]


def _same(outputs: Tensor) -> Tensor:
    return outputs


def _log(outputs: Tensor) -> Tensor:
    return outputs.clamp_min(torch.finfo(outputs.dtype).tiny).log()


_SCORES: Mapping[Kind, Mapping[Space, tuple[str, _Change]]] = {  # of each space: how the score is called, and computed
    "logits": {
        "logit": ("logit", _same),
        "prob": ("prob", lambda outputs: outputs.softmax(-1)),
        "logprob": ("logprob", lambda outputs: outputs.log_softmax(-1)),
    },
    "probabilities": {"logit": ("probability", _same), "prob": ("probability", _same), "logprob": ("log-probability", _log)},
    "log-probabilities": {
        "logit": ("log-probability", _same),
        "prob": ("probability", torch.exp),
        "logprob": ("log-probability", _same),
    },
    "logits of labels": {
        "logit": ("logit", _same),
        "prob": ("probability", torch.sigmoid),
        "logprob": ("log-probability", torch.nn.functional.logsigmoid),
    },
    "probabilities of labels": {
        "logit": ("probability", _same),
        "prob": ("probability", _same),
        "logprob": ("log-probability", _log),
    },
    "values": {"logit": ("", _same)},
    "embedding": {"logit": ("", _same)},
    "unknown": {
        "logit": ("", _same),
        "prob": ("softmax at", lambda outputs: outputs.softmax(-1)),
        "logprob": ("log-softmax at", lambda outputs: outputs.log_softmax(-1)),
    },
}


@dataclass(frozen=True)
class Meaning:
    """Meaning of the outputs `(B, k)` of a model, and what they are called.

    Attributes:
        kind: What they are.
        names: Names of the outputs, if known.
    """

    kind: Kind = "unknown"
    names: Sequence[str] | None = None

    @classmethod
    def of(cls, outputs: Tensor, task: Task | None, names: Sequence[str] | None) -> Meaning:
        """Return what outputs are, from their values and what is known of the model's task; names alone say that they are classes."""
        task = task or (None if names is None else "classes")
        values = outputs.detach().double()
        within = bool(((values >= 0) & (values <= 1)).all())
        if task == "regression":
            return cls("values", names)
        if task == "embedding":
            return cls("embedding", names)
        if task == "multi_label":
            return cls("probabilities of labels" if within else "logits of labels", names)
        if within and _sums_to_one(values, outputs.dtype):
            return cls("probabilities", names)
        if bool((values <= 0).all()) and _sums_to_one(values.exp(), outputs.dtype):
            return cls("log-probabilities", names)
        return cls("unknown" if task is None else "logits", names)

    @property
    def noun(self) -> str:
        """Noun for one output: `class`, `label`, `component` or `output`."""
        return noun_of(self.kind)

    def called(self, index: int) -> str:
        """Return the first name of an output, or what it stands for with its number."""
        return name_of(index, self.names, self.noun)

    def named(self, index: int) -> str:
        """Return the first name of an output with its number."""
        return self.called(index) + (f" ({self.noun} {index})" if self.names is not None and index < len(self.names) else "")

    def score(self, space: Space) -> tuple[str, _Change]:
        """Return how the score of a target space is called (with the word before the output), and the function that computes it.

        Raises:
            OptionError: If the outputs have no such score.
        """
        scores = _SCORES[self.kind]
        if space not in scores:
            what = {"values": "numbers of a regression", "embedding": "an embedding"}[self.kind]
            raise OptionError(f"the outputs are {what}, which have no probabilities. Leave target_space out.")
        word, change = scores[space]
        before = f"{word} " if word.endswith(" at") else f"{word} of " if word else ""
        return before, change

    def probabilities(self, outputs: Tensor) -> Tensor | None:
        """Return the probabilities `(B, k)`; None if the outputs have none."""
        outputs = outputs.detach().float()
        if self.kind == "logits":
            return outputs.softmax(-1)
        if self.kind == "log-probabilities":
            return outputs.exp()
        if self.kind == "logits of labels":
            return outputs.sigmoid()
        return outputs if self.kind in ("probabilities", "probabilities of labels") else None

    def told(self, outputs: Tensor, index: int, score: float, score_name: str, *, plain: bool) -> str:
        """Describe the score of an output of one image, `(k,)`, and name the largest; `plain` if it is the score of this output alone."""
        best, shares = int(outputs.argmax()), self.probabilities(outputs)
        text = f"{score_name} = {score:.3g}"
        this = "this" if plain else self.named(index)
        if shares is None:
            largest = (
                f"{this} is the largest of {len(outputs)} {self.noun}s" if best == index else f"the largest is {self.named(best)}"
            )
            return text if len(outputs) == 1 else f"{text}; {largest}"
        rank = "predicted class" if self.noun == "class" else "most probable label"
        which = f"{this} is the {rank}" if best == index else f"the {rank} is {self.named(best)}"
        if plain and best != index and not score_name.startswith("probability"):
            text += f", its probability {float(shares[index]):.1%}"
        return f"{text}; {which}, with probability {float(shares[best]):.1%}"


def _sums_to_one(values: Tensor, kind: torch.dtype) -> bool:
    """Check that rows sum to 1, up to rounding in their type."""
    return values.shape[-1] > 1 and bool(((values.sum(-1) - 1).abs() <= max(1e-5, 4 * torch.finfo(kind).eps)).all())


def name_of(index: int, names: Sequence[str] | None, noun: str) -> str:
    """Return the first name of a class or an output, or what it is with its number if it has no name."""
    return printable(names[index].split(",")[0]) if names is not None and index < len(names) else f"{noun} {index}"


def noun_of(kind: Kind) -> str:
    """Return what one output stands for."""
    return _NOUNS[kind]


def class_name(index: int, labels: Sequence[str] | None) -> str:
    """Return the first name of a class, or its number if it has no name."""
    return name_of(index, labels, "class")


@dataclass(frozen=True)
class PredictedClass:
    """A class, its name (None: unknown), and the probability that a classifier gives it."""

    index: int
    name: str | None
    probability: float


def tensor_of(output: Any, *names: str) -> Tensor | None:  # noqa: ANN401
    """Return the first of these tensors of an output; None if there is none, or it has no numbers.

    A tensor counts as its `logits`, and so does one of two tensors `(B, k)` if the other is their softmax or their sigmoid.
    """
    found = _tensor_of(output, names)
    return found if found is not None and found.numel() and not found.is_meta else None


def _tensor_of(output: Any, names: Sequence[str]) -> Tensor | None:  # noqa: ANN401
    if isinstance(output, Tensor):
        return output if "logits" in names else None
    if type(output) is tuple and len(output) == 2 and "logits" in names:
        return output_pairs.logits_of(*output)
    given = output if isinstance(output, Mapping) else None
    fields = (given.get(name) if given is not None else getattr(output, name, None) for name in names)
    return next((field for field in fields if isinstance(field, Tensor)), None)


def outputs_of(output: Any) -> Tensor | None:  # noqa: ANN401
    """Return the outputs `(B, k)`, at least two for each image, that a class can be chosen of; None if there are none."""
    logits = tensor_of(output, "logits")
    if logits is None or logits.ndim != 2 or logits.shape[1] < 2 or not logits.is_floating_point():
        return None
    return logits


def predicted_classes(
    output: Any,  # noqa: ANN401
    task: Task | None,
    labels: Sequence[str] | None,
    count: int = 5,
) -> tuple[tuple[PredictedClass, ...], ...]:
    """Return the most probable classes of each image, in descending order; nothing if the outputs have no probabilities."""
    outputs = outputs_of(output)
    if outputs is None:
        return ()
    meaning = Meaning.of(outputs, task, labels if labels is not None and len(labels) >= outputs.shape[1] else None)
    every = meaning.probabilities(outputs)
    if every is None:
        return ()
    shares, indices = every.topk(min(count, outputs.shape[1]))
    return tuple(
        tuple(
            PredictedClass(index, None if meaning.names is None else meaning.called(index), share)
            for index, share in zip(*top, strict=True)
        )
        for top in zip(indices.tolist(), shares.tolist(), strict=True)
    )
