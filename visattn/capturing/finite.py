"""NaN in what was captured: some kernels turn a row of it into zeros, so the model's output does not tell."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from visattn.errors import CaptureError
from visattn.operators import MatrixOperator, Operator, SoftmaxOperator
from visattn.records import Recording


class Sums:
    """Sums of the operands, taken while they are in the cache; NaN shows in them."""

    def __init__(self) -> None:
        """Start with none."""
        self._sums: list[Tensor] = []

    def add(self, parts: Sequence[Tensor]) -> None:
        """Sum what a new operator is made from; of two alike the products, which takes one pass."""
        if len(parts) == 2 and parts[0].dtype == torch.float32 and parts[0].numel() == parts[1].numel():
            self._sums.append(torch.dot(parts[0].view(-1), parts[1].view(-1)))
        else:
            self._sums.extend(part.sum(dtype=torch.float32) for part in parts)

    def check(self, recording: Recording) -> None:
        """Refuse NaN and infinite values.

        Raises:
            CaptureError: If there are any; the message names the layer and how many.
        """
        if not all(math.isfinite(float(total)) for total in self._sums):
            for item in recording.records:
                for name, tensor in _operands(item.operator).items():
                    _refuse(f"{item.layer}: {{}} of {tensor.numel()} {name} values", tensor)
        names = {"tokens": "token"}
        for feature in recording.features:
            _refuse(
                f"{feature.layer}: {{}} of {feature.value.numel()} {names.get(feature.role, feature.role)} values", feature.value
            )


def _refuse(what: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point() or math.isfinite(float(tensor.sum(dtype=torch.float32))):  # one pass where all is well
        return
    if bad := int((~tensor.isfinite()).sum()):
        raise CaptureError(f"{what.format(bad)} are NaN or infinite. Check the weights and the input.")


def _operands(operator: Operator) -> dict[str, Tensor]:
    """What was taken from the model."""
    if isinstance(operator, SoftmaxOperator):
        return {"query": operator.query, "key": operator.key}
    assert isinstance(operator, MatrixOperator)  # noqa: S101 - the interception makes no other
    return {"weight": operator.weights}
