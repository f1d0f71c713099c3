"""Parts of models' outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from visattn._support.checks import printable


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
