"""Check of captured tensors for NaN and infinite values. Some kernels turn a row of NaN into zeros, so the model's output hides them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.utils import get_total_norm

from visattn.core import operators
from visattn.core.operators import Operator, SoftmaxOperator
from visattn.core.records import Recording
from visattn.errors import CaptureError


def are_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether no tensor holds NaN or infinite values, as a tensor on their device: their norm is finite then."""
    return get_total_norm([*filter(Tensor.is_floating_point, tensors)]).isfinite()


def check_finite(recording: Recording) -> None:
    """Check that a recording holds no NaN or infinite values.

    Raises:
        CaptureError: If it holds any. The message names the layer and the number of such values.
    """
    for record in recording.records:
        for name, tensor in _operands(record.operator).items():
            _refuse(f"{record.layer}: {{}} of {tensor.numel()} {name} values", tensor)
    for feature in recording.features:
        name = "token" if feature.role == "tokens" else feature.role
        _refuse(f"{feature.layer}: {{}} of {feature.value.numel()} {name} values", feature.value)


def _refuse(what: str, tensor: Tensor) -> None:
    """Raise an error if a tensor has NaN or infinite values; `what` names them in the message, with `{}` for their number."""
    count = int((~tensor.isfinite()).sum())
    if count:
        raise CaptureError(f"{what.format(count)} are NaN or infinite. Check the weights, the input and the precision.")


def _operands(operator: Operator) -> dict[str, Tensor]:
    """Return the tensors of an operator that come from the model, by name."""
    if isinstance(operator, SoftmaxOperator):
        return {"query": operator.query, "key": operator.key}
    if isinstance(operator, operators.SampledOperator):
        return {"weight": operator.shares}
    assert isinstance(operator, operators.MatrixOperator)  # noqa: S101 - interception creates no other operator
    return {"weight": operator.weights}
