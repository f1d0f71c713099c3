"""Attention as a linear operator `A`, never as a matrix unless asked.

In: what the model itself used (query, key, bias, scale, and the log-sum-exp of its fused kernel where that was read), or the
explicit weights where that is all there is. Out: blocks of rows of `A`, and the products `A @ x` and `r @ A`. An operator is
made of *blocks* (one for global attention, one per window otherwise); the indices of its rows and columns say which token of
the canonical order each one is, and -1 marks padding.
"""

from visattn.operators.explicit import MatrixOperator, SumOperator
from visattn.operators.gradients import Gradient, MatrixGradient, OuterGradient
from visattn.operators.operator import ROWS, Operator, Tile
from visattn.operators.softmax import SoftmaxOperator

__all__ = [
    "ROWS",
    "Gradient",
    "MatrixGradient",
    "MatrixOperator",
    "Operator",
    "OuterGradient",
    "SoftmaxOperator",
    "SumOperator",
    "Tile",
]
