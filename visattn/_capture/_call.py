"""One attention call as the model made it: its operands, before anybody knows which axis is what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from visattn._capture._arrange import Arrangement
from visattn.operators import Gradient, MatrixGradient, MatrixOperator, Operator, OuterGradient, SoftmaxOperator
from visattn.records import Source


def own(tensor: Tensor) -> Tensor:
    """`tensor` in memory of its own: a view would keep the whole joint query-key-value tensor alive."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


@dataclass(eq=False)
class Call:
    """What every call has.

    Attributes:
        value: `(*lead, k, d)` values that the weights mix.
        out: `(*lead, q, d)` their mixture.
    """

    value: Tensor
    out: Tensor

    @property
    def lead(self) -> Sequence[int]:
        """The axes before tokens."""
        return self.out.shape[:-2]

    @property
    def rows(self) -> int:
        """Number of queries in a group."""
        return self.out.shape[-2]

    @property
    def columns(self) -> int:
        """Number of keys in a group."""
        return self.value.shape[-2]

    def operator(self, arrangement: Arrangement) -> Operator:
        """The weights, in the order of `arrangement`."""
        raise NotImplementedError

    def source(self, arrangement: Arrangement) -> Source:
        """What gradients of the weights are made from."""
        raise NotImplementedError

    def values(self, arrangement: Arrangement) -> Tensor:
        """The values likewise."""
        return own(arrangement.take(self.value.expand(*self.lead, *self.value.shape[-2:])))


@dataclass(eq=False)
class FusedCall(Call):
    """A call of `scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float | None
    lse: Tensor | None

    def operator(self, arrangement: Arrangement) -> SoftmaxOperator:
        """The weights from query and key."""
        query, key = (own(arrangement.take(x.expand(*self.lead, *x.shape[-2:]))) for x in (self.query, self.key))
        lse = None if self.lse is None else own(arrangement.take(self.lse[..., None]))[..., 0]
        bias = self._bias()
        return SoftmaxOperator(
            query,
            key,
            None if bias is None else own(arrangement.take_bias(bias, self.lead)),
            self.scale,
            arrangement.query_index,
            arrangement.key_index,
            lse=lse,
        )

    def source(self, arrangement: Arrangement) -> Source:
        """`dA = dO V^T`, with `dO` the gradient of the result."""
        value = self.values(arrangement)
        return Source(self.out, lambda gradient: OuterGradient(arrangement.take(gradient), value))

    def _bias(self) -> Tensor | None:
        mask = self.mask
        if self.is_causal:
            mask = torch.ones(self.rows, self.columns, dtype=torch.bool, device=self.query.device).tril()
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
        return mask


@dataclass(eq=False)
class ProductCall(Call):
    """A product of weights with values; the weights went through a softmax."""

    weights: Tensor
    operand: Tensor
    axes: Sequence[int]

    def operator(self, arrangement: Arrangement) -> MatrixOperator:
        """The weights as they were multiplied."""
        weights = own(arrangement.take(self.weights.expand(*self.lead, *self.weights.shape[-2:])))
        return MatrixOperator(weights, arrangement.query_index, arrangement.key_index)

    def source(self, arrangement: Arrangement) -> Source:
        """The gradient of the weights themselves."""
        axes, lead = tuple(self.axes), self.lead

        def arranged(gradient: Tensor) -> Gradient:
            gradient = gradient.permute(axes)
            return MatrixGradient(arrangement.take(gradient.expand(*lead, *gradient.shape[-2:])))

        return Source(self.operand, arranged)
