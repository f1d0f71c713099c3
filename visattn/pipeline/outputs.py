"""Parts of models' outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from visattn._support.checks import printable


@dataclass(frozen=True)
class PredictedClass:
    """A class, its name (None: unknown), and the probability that a classifier gives it."""

    index: int
    name: str | None
    probability: float


def tensor_of(output: Any, *names: str) -> Tensor | None:  # noqa: ANN401
    """Return the first of these tensors of an output; a tensor counts as its `logits`."""
    if isinstance(output, Tensor):
        return output if "logits" in names else None
    given = output if isinstance(output, Mapping) else None
    found = (given.get(name) if given is not None else getattr(output, name, None) for name in names)
    return next((one for one in found if isinstance(one, Tensor)), None)


def class_name(index: int, labels: Sequence[str] | None) -> str:
    """Return the first name of a class, or its number if it has no name."""
    return printable(labels[index].split(",")[0]) if labels is not None and index < len(labels) else f"class {index}"


def predicted_classes(output: Any, labels: Sequence[str] | None, count: int = 5) -> tuple[tuple[PredictedClass, ...], ...]:  # noqa: ANN401
    """Return the most probable classes of each image, in descending order; nothing if the output is not logits `(B, classes)`."""
    logits = tensor_of(output, "logits")
    if logits is None or logits.ndim != 2 or logits.shape[1] < 2 or not logits.is_floating_point():
        return ()
    shares, indices = logits.detach().float().softmax(-1).topk(min(count, logits.shape[1]))
    named = labels is not None and len(labels) >= logits.shape[1]
    return tuple(
        tuple(
            PredictedClass(index, class_name(index, labels) if named else None, share) for index, share in zip(*one, strict=True)
        )
        for one in zip(indices.tolist(), shares.tolist(), strict=True)
    )
