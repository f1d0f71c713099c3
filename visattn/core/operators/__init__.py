"""Attention as a linear operator `A`, computed block by block without building the whole matrix.

An operator is made from the model's own query, key, bias and scale, with the log-sum-exp of its fused kernel if that was read. If a
model exposes only explicit weights, the operator holds those. It yields blocks of rows of `A` and the products `A @ x` and `r @ A`.
Global attention has one *block*, window attention has one per window. Index tensors map the rows and columns of a block to tokens in
canonical order; -1 marks padding.
"""

from typing import TYPE_CHECKING

from visattn._support.faces import face
from visattn.core.operators.operator import ROWS, Operator, Tile
from visattn.core.operators.softmax import SoftmaxOperator
from visattn.core.operators.weight_gradients import (
    Gradient,
    MatrixGradient,
    OuterGradient,
)

__all__ = [
    "ROWS",
    "Gradient",
    "MatrixGradient",
    "MatrixOperator",
    "Operator",
    "OuterGradient",
    "SampledOperator",
    "SoftmaxOperator",
    "SumOperator",
    "Tile",
]

if TYPE_CHECKING:
    from visattn.core.operators.explicit import MatrixOperator, SumOperator
    from visattn.core.operators.sampled import SampledOperator
else:
    __getattr__, *_ = face(__name__, {".explicit": ["MatrixOperator", "SumOperator"], ".sampled": ["SampledOperator"]})
