"""One attention call as the model made it: its operands, before anybody knows which axis is what."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from visattn._capture._arrange import Arrangement
from visattn._capture._softmax import Product
from visattn.operators import Gradient, MatrixGradient, MatrixOperator, Operator, OuterGradient, SoftmaxOperator
from visattn.records import Source


def own(tensor: Tensor) -> Tensor:
    """`tensor` in memory of its own: a view would keep the whole joint query-key-value tensor alive."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.clone(memory_format=torch.contiguous_format)


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
    _kept = False

    def __init__(self, value: Tensor, lead: Sequence[int], rows: int) -> None:
        """Note the sizes."""
        self.value, self.lead, self.rows, self.columns = value, lead, rows, value.shape[-2]

    @abstractmethod
    def operator(self, arrangement: Arrangement) -> Operator:
        """The weights, in the order of `arrangement`."""

    def keep(self, wanted: bool = True) -> None:
        """Own what the operator is made from, so that it can be made later, and let the rest go; all of it if not `wanted`."""
        for name in self._operands:
            operand = getattr(self, name)
            setattr(self, name, own(operand) if wanted and operand is not None else None)
        self._kept, self.out = True, None
        del self.value

    @abstractmethod
    def source(self, arrangement: Arrangement) -> Source:
        """What gradients of the weights are made from."""

    @abstractmethod
    def weigh(self) -> Tensor:
        """The weights written out, `(*lead, q, k)`, in the model's graph."""

    @abstractmethod
    def mix(self, weights: Tensor) -> Tensor:
        """What the model goes on with, of such weights."""

    def values(self, arrangement: Arrangement) -> Tensor:
        """The values in the order of `arrangement`."""
        return own(arrangement.take(self._wide(self.value)))

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous() if self._kept else own(tensor)

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
        *,
        repeat: Callable[[Tensor, int], Tensor] | None = None,
    ) -> None:
        """Take the arguments of the function; `repeat` gives several heads of queries the same keys."""
        if enable_gqa:
            assert repeat is not None  # noqa: S101 - the mode gives it
            groups = query.shape[-3] // key.shape[-3]
            key, value = (repeat(tensor, groups) for tensor in (key, value))
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

    def __init__(self, product: Product) -> None:
        """Take the operands."""
        lead = _shared(product.value, product.weights)
        super().__init__(product.value, lead, product.weights.shape[-2])
        self.weights, self._product = product.weights, product

    def operator(self, arrangement: Arrangement) -> MatrixOperator:
        """The weights as they were multiplied."""
        weights = self._own(arrangement.take(self._wide(self.weights)))
        return MatrixOperator(weights, arrangement.query_index, arrangement.key_index)

    def keep(self, wanted: bool = True) -> None:
        """Also without the product."""
        super().keep(wanted)
        del self._product

    def source(self, arrangement: Arrangement) -> Source:
        """The gradient of the weights themselves."""
        axes, lead = tuple(self._product.axes), self.lead

        def arranged(gradient: Tensor) -> Gradient:
            gradient = gradient.permute(axes)
            return MatrixGradient(arrangement.take(gradient.expand(*lead, *gradient.shape[-2:])))

        return Source(self._product.operand, arranged)

    def weigh(self) -> Tensor:
        """As they are."""
        return self._wide(self.weights)

    def mix(self, weights: Tensor) -> Tensor:
        """In the axes of the model's own product."""
        axes = self._product.out_axes
        return (weights.to(self.value.dtype) @ self.value).permute([list(axes).index(i) for i in range(len(axes))])


def _shared(*operands: Tensor) -> list[int]:
    """The axes before tokens, to which all operands broadcast."""
    first, *others = (operand.shape[:-2] for operand in operands)
    alike = all(other == first for other in others)
    return list(first if alike else torch.broadcast_shapes(first, *others))  # type: ignore[no-untyped-call]
