"""Check of captured tensors for NaN and infinite values. Some kernels turn a row of NaN into zeros, so the model's output hides them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from visattn.core.operators import MatrixOperator, Operator, SampledOperator, SoftmaxOperator
from visattn.core.records import Recording
from visattn.errors import CaptureError


class Sums:
    """Sums of captured operands, computed while these are still in the CPU cache. A NaN or infinite operand makes its sum so."""

    def __init__(self) -> None:
        """Start without sums."""
        self._sums: list[Tensor] = []

    def add(self, parts: Sequence[Tensor]) -> None:
        """Add the sums of the operands of a new operator. Two float32 operands of one size need one pass, as a dot product."""
        if len(parts) == 2 and parts[0].dtype == torch.float32 and parts[0].numel() == parts[1].numel():
            self._sums.append(torch.dot(parts[0].view(-1), parts[1].view(-1)))
        else:
            self._sums.extend(part.sum(dtype=torch.float32) for part in parts)

    def check(self, recording: Recording) -> None:
        """Check that a recording holds no NaN or infinite values.

        Raises:
            CaptureError: If it does. The message names the layer and the number of such values.
        """
        if not all(math.isfinite(float(total)) for total in self._sums):
            for record in recording.records:
                for name, tensor in _operands(record.operator).items():
                    _refuse(f"{record.layer}: {{}} of {tensor.numel()} {name} values", tensor)
        for feature in recording.features:
            name = "token" if feature.role == "tokens" else feature.role
            _refuse(f"{feature.layer}: {{}} of {feature.value.numel()} {name} values", feature.value)


def _refuse(what: str, tensor: Tensor) -> None:
    """Raise an error if a tensor has NaN or infinite values; `what` names them in the message, with `{}` for their number."""
    # the sum takes one pass if all values are finite
    if not tensor.is_floating_point() or math.isfinite(float(tensor.sum(dtype=torch.float32))):
        return
    count = int((~tensor.isfinite()).sum())
    if count:
        raise CaptureError(f"{what.format(count)} are NaN or infinite. Check the weights, the input and the precision.")


def _operands(operator: Operator) -> dict[str, Tensor]:
    """Return the tensors of an operator that come from the model, by name."""
    if isinstance(operator, SoftmaxOperator):
        return {"query": operator.query, "key": operator.key}
    if isinstance(operator, SampledOperator):
        return {"weight": operator.shares}
    assert isinstance(operator, MatrixOperator)  # noqa: S101 - interception creates no other operator
    return {"weight": operator.weights}
