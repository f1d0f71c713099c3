"""One attention call as the model made it: its operands, before anybody knows which axis is what."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from visattn.capturing.intercept.softmax import Product
from visattn.capturing.tokens.arrangement import Arrangement
from visattn.operators import Gradient, MatrixGradient, MatrixOperator, Operator, OuterGradient, SoftmaxOperator
from visattn.records import Source


def own(tensor: Tensor, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    """`tensor` in memory of its own: a view would keep the whole joint query-key-value tensor alive."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.clone(memory_format=layout)


class Call(ABC):
    """What every call has.

    Attributes:
        value: `(*lead, k, d)` values that the weights mix.
        lead: The axes before tokens.
        rows: Number of queries in a group.
        columns: Number of keys in a group.
        out: What the model goes on with, once that is known.
    """

    out: Tensor | None = None
    _operands: Sequence[str]
    _layout = torch.contiguous_format
    _kept = False

    def __init__(self, value: Tensor, lead: Sequence[int], rows: int) -> None:
        """Note the sizes."""
        self.value, self.lead, self.rows, self.columns = value, lead, rows, value.shape[-2]

    @abstractmethod
    def operator(self, arrangement: Arrangement) -> Operator:
        """The weights, in the order of `arrangement`."""

    def keep(self, wanted: bool = True, *, values: bool = False, graph: bool = False) -> None:
        """Own what the operator is made from, so that it can be made later, and let the rest go; all of it if not `wanted`.

        `values` are kept too, and of the `graph` what gradients are made from.
        """
        kept = (*self._operands, "value") if values else self._operands
        for name in kept:
            operand = getattr(self, name)
            setattr(self, name, own(operand, self._layout) if wanted and operand is not None else None)
        self._kept = True
        if not (wanted and values):
            del self.value
        if not (wanted and graph):
            self._cut()

    def _cut(self) -> None:
        """Let go of the model's graph."""
        self.out = None

    @abstractmethod
    def source(self, arrangement: Arrangement) -> Source:
        """What gradients of the weights are made from."""

    @abstractmethod
    def weigh(self) -> Tensor:
        """The weights written out, `(*lead, q, k)`, in the model's graph."""

    @abstractmethod
    def mix(self, weights: Tensor) -> Tensor:
        """What the model goes on with, of such weights."""

    @abstractmethod
    def sources(self) -> tuple[Tensor, ...]:
        """What the weights are made from."""

    def values(self, arrangement: Arrangement) -> Tensor:
        """The values in the order of `arrangement`."""
        return self._own(arrangement.take(self._wide(self.value))).contiguous()

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor if self._kept else own(tensor)

    def _wide(self, operand: Tensor) -> Tensor:
        """An operand with all the axes before tokens."""
        *lead, tokens, channels = operand.shape
        return operand if lead == self.lead else operand.expand(*self.lead, tokens, channels)


class FusedCall(Call):
    """A call of `scaled_dot_product_attention`."""

    _operands = "query", "key", "mask", "lse"

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,  # weights are taken before dropout
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        """Take the arguments of the function."""
        self.groups = query.shape[-3] // key.shape[-3] if enable_gqa else 1  # heads of queries that share their keys
        if self.groups > 1:
            key, value = (tensor.repeat_interleave(self.groups, -3) for tensor in (key, value))
        lead = _shared(query, key, value)
        super().__init__(value, lead, query.shape[-2])
        self.query, self.key, self.mask, self.is_causal, self.scale = query, key, attn_mask, is_causal, scale
        self.lse: Tensor | None = None

    def operator(self, arrangement: Arrangement) -> SoftmaxOperator:
        """The weights from query and key."""
        query, key = (self._own(arrangement.take(self._wide(x))) for x in (self.query, self.key))
        lse = None if self.lse is None else self._own(arrangement.take(self.lse[..., None]))[..., 0]
        bias = self._bias()
        return SoftmaxOperator(
            query,
            key,
            None if bias is None else self._own(arrangement.take_bias(bias, self.lead)),
            self.scale,
            arrangement.query_index,
            arrangement.key_index,
            lse=lse,
        )

    def source(self, arrangement: Arrangement) -> Source:
        """`dA = dO V^T`, with `dO` the gradient of the result."""
        assert self.out is not None  # noqa: S101 - the call was made
        value = self.values(arrangement)
        return Source(self.out, lambda gradient: OuterGradient(arrangement.take(gradient), value))

    def sources(self) -> tuple[Tensor, ...]:
        """Query and key."""
        return self.query, self.key

    def weigh(self) -> Tensor:
        """A float32 softmax; a row that is masked whole has no weights."""
        wide = torch.promote_types(self.query.dtype, torch.float32)
        scale = self.query.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = (self.query.to(wide) * scale) @ self.key.to(wide).mT
        bias = self._bias()
        if bias is not None:
            scores = scores + bias
        return scores.softmax(-1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0)

    def mix(self, weights: Tensor) -> Tensor:
        """In the type of the values."""
        return weights.to(self.value.dtype) @ self.value

    def _bias(self) -> Tensor | None:
        mask = self.mask
        if self.is_causal:
            mask = torch.ones(self.rows, self.columns, dtype=torch.bool, device=self.query.device).tril()
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
        return mask


class ProductCall(Call):
    """A product of weights with values; the weights went through a softmax."""

    _operands = ("weights",)
    _layout = torch.preserve_format  # heads that were mixed lie last in memory; putting them first takes longer

    def __init__(self, product: Product) -> None:
        """Take the operands."""
        self.weights, value = product.views()
        super().__init__(value, _shared(value, self.weights), self.weights.shape[-2])
        self._operand: Tensor | None = product.operand
        self._axes, self._out_axes = product.axes, product.out_axes

    def operator(self, arrangement: Arrangement) -> MatrixOperator:
        """The weights as they were multiplied."""
        weights = self._own(arrangement.take(self._wide(self.weights)))
        return MatrixOperator(weights, arrangement.query_index, arrangement.key_index)

    def _cut(self) -> None:
        """Also of the weights that were multiplied."""
        super()._cut()
        self._operand = None

    def source(self, arrangement: Arrangement) -> Source:
        """The gradient of the weights themselves."""
        axes, lead = self._axes, self.lead
        assert self._operand is not None  # noqa: S101 - it was kept

        def arranged(gradient: Tensor) -> Gradient:
            gradient = gradient if axes is None else gradient.permute(axes)
            return MatrixGradient(arrangement.take(gradient.expand(*lead, *gradient.shape[-2:])))

        return Source(self._operand, arranged)

    def sources(self) -> tuple[Tensor, ...]:
        """The weights."""
        return (self.weights,)

    def weigh(self) -> Tensor:
        """As they are."""
        return self._wide(self.weights)

    def mix(self, weights: Tensor) -> Tensor:
        """In the axes of the model's own product."""
        axes = list(self._out_axes)
        return (weights.to(self.value.dtype) @ self.value).permute([axes.index(i) for i in range(len(axes))])


def _shared(*operands: Tensor) -> list[int]:
    """The axes before tokens, to which all operands broadcast."""
    first, *others = (operand.shape[:-2] for operand in operands)
    alike = all(other == first for other in others)
    return list(first if alike else torch.broadcast_shapes(first, *others))  # type: ignore[no-untyped-call]
