"""Check of captured tensors for NaN and infinite values. Some kernels turn a row of NaN into zeros, so the model's output hides them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.nn.utils import get_total_norm

from visattn.core.operators import MatrixOperator, Operator, SampledOperator, SoftmaxOperator
from visattn.core.records import Recording
from visattn.errors import CaptureError


def check_finite(recording: Recording, operands: Sequence[Tensor]) -> None:
    """Check that a recording holds no NaN or infinite values; `operands` are what its attention weights are computed from.

    All of them are read once, together: their norm is finite if they are.

    Raises:
        CaptureError: If it holds any. The message names the layer and the number of such values.
    """
    if _are_finite([*operands, *(feature.value for feature in recording.features)]):
        return
    for record in recording.records:
        for name, tensor in _operands(record.operator).items():
            _refuse(f"{record.layer}: {{}} of {tensor.numel()} {name} values", tensor)
    for feature in recording.features:
        name = "token" if feature.role == "tokens" else feature.role
        _refuse(f"{feature.layer}: {{}} of {feature.value.numel()} {name} values", feature.value)


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    return math.isfinite(float(get_total_norm([tensor for tensor in tensors if tensor.is_floating_point()])))


def _refuse(what: str, tensor: Tensor) -> None:
    """Raise an error if a tensor has NaN or infinite values; `what` names them in the message, with `{}` for their number."""
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
