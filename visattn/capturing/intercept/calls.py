"""Attention calls with the operands that the model used, before their axes are assigned to images, heads and windows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from visattn.capturing.following.vectors import Vectors
from visattn.capturing.intercept.softmax import Product
from visattn.capturing.tokens.arrangement import Arrangement, SampledArrangement
from visattn.operators import Gradient, MatrixGradient, MatrixOperator, Operator, OuterGradient, SampledOperator, SoftmaxOperator
from visattn.records import Source

_AGREEING = 2e-5  # rounding of float32; TF32 is off by more


def own(tensor: Tensor, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Return a detached copy of `tensor`. A view would keep the whole joint query-key-value tensor alive."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.clone(memory_format=layout)


class Call(ABC):
    """Base class of attention calls.

    Attributes:
        value: `(*lead, k, d)` values.
        lead: Sizes of the axes before the token axis.
        rows: Number of queries in a group.
        columns: Number of keys in a group.
        out: Result of the call; None until it is known.
    """

    out: Tensor | None = None
    _operands: Sequence[str]
    _layout = torch.contiguous_format
    _kept = False

    def __init__(self, value: Tensor, lead: Sequence[int], rows: int) -> None:
        """Store the values and the sizes."""
        self.value, self.lead, self.rows, self.columns = value, lead, rows, value.shape[-2]

    @abstractmethod
    def operator(self, arrangement: Arrangement, vectors: Vectors | None = None) -> Operator:
        """Return the weights as an operator, in the order of `arrangement`.

        Args:
            arrangement: Order of the tokens.
            vectors: Queries and keys among the operands of the scores, if the model writes them out.

        Returns:
            The operator.
        """

    def keep(self, wanted: bool = True, *, values: bool = False, graph: bool = False) -> None:
        """Copy the operands, so that the operator can be built later, and release everything else.

        Args:
            wanted: Whether the call is recorded; if not, the operands are released too.
            values: Whether to copy the values too.
            graph: Whether to keep the tensors of the model's graph that gradients are computed from.
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
        """Release the model's graph."""
        self.out = None

    @abstractmethod
    def source(self, arrangement: Arrangement) -> Source | None:
        """Return the source from which the gradient of the weights is computed; None if they have no gradient."""

    @abstractmethod
    def weigh(self) -> Tensor:
        """Compute the weights `(*lead, q, k)` as a part of the model's graph."""

    @abstractmethod
    def mix(self, weights: Tensor) -> Tensor:
        """Apply weights to the values; return the result as the model's own call would."""

    def laid_out(self, result: Tensor) -> Tensor:
        """Permute a result `(*lead, q, d)` into the axes of the model's own result."""
        return result

    @abstractmethod
    def sources(self) -> tuple[Tensor, ...]:
        """Return the tensors that the weights are computed from."""

    def values(self, arrangement: Arrangement) -> Tensor | None:
        """Return the values in the order of `arrangement`; None if they belong to no single grid."""
        return self._own(arrangement.take(self._wide(self.value))).contiguous()

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor if self._kept else own(tensor)

    def _wide(self, operand: Tensor) -> Tensor:
        """Expand an operand to all axes before the token axis."""
        *lead, tokens, channels = operand.shape
        return operand if lead == self.lead else operand.expand(*self.lead, tokens, channels)


class FusedCall(Call):
    """Call of `scaled_dot_product_attention`."""

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
        """Store the arguments of `scaled_dot_product_attention`."""
        self.groups = query.shape[-3] // key.shape[-3] if enable_gqa else 1  # query heads per key head
        if self.groups > 1:
            key, value = (tensor.repeat_interleave(self.groups, -3) for tensor in (key, value))
        lead = _shared(query, key, value)
        super().__init__(value, lead, query.shape[-2])
        self.query, self.key, self.mask, self.is_causal, self.scale = query, key, attn_mask, is_causal, scale
        self.lse: Tensor | None = None

    def know(self, lse: Tensor) -> None:
        """Keep the log-sum-exp that a kernel computed. Kernels of GPUs may round scores, so some rows of theirs are computed again."""
        if lse.device.type == "cpu" or self.agrees(lse):
            self.lse = lse

    def agrees(self, lse: Tensor) -> bool:
        """Check whether the log-sum-exp of the first, middle and last row is that of the scores."""
        rows = torch.tensor([0, self.rows // 2, self.rows - 1], device=lse.device)
        scale = self.query.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = (self.query[..., rows, :].double() * scale) @ self.key.double().mT
        bias = self._bias()
        if bias is not None:
            scores = scores + bias.expand(*bias.shape[:-2], self.rows, self.columns)[..., rows, :]
        return bool(torch.allclose(scores.logsumexp(-1), lse[..., rows].double(), rtol=_AGREEING, atol=_AGREEING))

    def operator(self, arrangement: Arrangement, _: Vectors | None = None) -> SoftmaxOperator:
        """Return the weights as a softmax of query-key scores."""
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
        """Return a source that computes `dA = dO V^T`, where `dO` is the gradient of the result."""
        assert self.out is not None  # noqa: S101 - the call has run
        value = self._own(arrangement.take(self._wide(self.value))).contiguous()
        return Source(self.out, lambda gradient: OuterGradient(arrangement.take(gradient), value))

    def sources(self) -> tuple[Tensor, ...]:
        """Return query and key."""
        return self.query, self.key

    def weigh(self) -> Tensor:
        """Compute the softmax in float32 or wider; a fully masked row gets zero weights."""
        wide = torch.promote_types(self.query.dtype, torch.float32)
        scale = self.query.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = (self.query.to(wide) * scale) @ self.key.to(wide).mT
        bias = self._bias()
        if bias is not None:
            scores = scores + bias
        return scores.softmax(-1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0)

    def mix(self, weights: Tensor) -> Tensor:
        """Multiply weights by the values, in the dtype of the values."""
        return weights.to(self.value.dtype) @ self.value

    def _bias(self) -> Tensor | None:
        mask = self.mask
        if self.is_causal:
            mask = torch.ones(self.rows, self.columns, dtype=torch.bool, device=self.query.device).tril()
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
        return mask


class ProductCall(Call):
    """Product of weights and values; the weights come from a softmax."""

    _operands = ("weights",)
    _layout = torch.preserve_format  # mixed heads come last in memory; a contiguous copy takes longer
    scored: tuple[Tensor, ...] | None = None  # operands of the product behind the softmax
    _operand: Tensor | None

    def __init__(self, product: Product) -> None:
        """Store the operands of the product."""
        self._axes, self._operand = product.axes, product.operand
        self.weights, value = self._axes.weights(product.operand), self._axes.values(product.value)
        super().__init__(value, _shared(value, self.weights), self.weights.shape[-2])

    def keep(self, wanted: bool = True, *, values: bool = False, graph: bool = False) -> None:
        """Copy the operands, and with the values the operands of the scores; see `Call.keep`."""
        super().keep(wanted, values=values, graph=graph)
        kept = wanted and values and self.scored is not None
        self.scored = tuple(own(operand, self._layout) for operand in self.scored or ()) if kept else None

    def operator(self, arrangement: Arrangement, vectors: Vectors | None = None) -> Operator:
        """Return the weights that the model multiplied by the values, with queries and keys if they were kept."""
        weights = self._own(arrangement.take(self._wide(self.weights)))
        scored, query, key = self.scored, None, None
        if vectors is not None and scored is not None:
            query, key = (self._own(arrangement.take(self._wide(part.of(scored)))) for part in vectors)
        return MatrixOperator(weights, arrangement.query_index, arrangement.key_index, query=query, key=key)

    def _cut(self) -> None:
        """Release the graph, including the weights that were multiplied."""
        super()._cut()
        self._operand = None

    def source(self, arrangement: Arrangement) -> Source | None:
        """Return a source that is the gradient of the weights themselves."""
        axes, lead = self._axes, self.lead
        assert self._operand is not None  # noqa: S101 - kept with graph=True

        def arranged(gradient: Tensor) -> Gradient:
            gradient = axes.weights(gradient)
            return MatrixGradient(arrangement.take(gradient.expand(*lead, *gradient.shape[-2:])))

        return Source(self._operand, arranged)

    def sources(self) -> tuple[Tensor, ...]:
        """Return the weights."""
        return (self.weights,)

    def weigh(self) -> Tensor:
        """Return the weights that the model computed."""
        return self._wide(self.weights)

    def mix(self, weights: Tensor) -> Tensor:
        """Multiply weights by the values; return the axes in the order of the model's own product."""
        return self.laid_out(weights.to(self.value.dtype) @ self.value)

    def laid_out(self, result: Tensor) -> Tensor:
        """Return a result `(*lead, q, d)` in the axes of the model's own product."""
        return self._axes.result(result)


class SampledCall(ProductCall):
    """Weighted sum of samples that were read from maps at points (deformable attention)."""

    def __init__(self, product: Product) -> None:
        """Store the weights, and the points `(N, Q, P, 2)` of each map."""
        super().__init__(product)
        self._points = tuple(product.samples.values())

    def keep(self, wanted: bool = True, *, values: bool = False, graph: bool = False) -> None:
        """Copy the weights and the points; the samples are not kept."""
        super().keep(wanted, graph=graph)
        self._points = tuple(map(own, self._points)) if wanted else ()

    def operator(self, arrangement: Arrangement, _: Vectors | None = None) -> SampledOperator:
        """Return the weights, spread over the four cells of the finest grid around each point by bilinear interpolation."""
        assert isinstance(arrangement, SampledArrangement)  # noqa: S101 - others are not recorded
        order, number, maps, (rows, columns), lead = arrangement.samples
        device = self.weights.device
        points = [
            points.reshape(-1, 2).double() * torch.tensor(factors, device=device) + torch.tensor(offsets, device=device)
            for points, (factors, offsets) in zip(self._points, maps, strict=True)
        ]
        at = torch.cat(points)[number.to(device)]  # (N * Q, k, 2): column and row
        weights = self.weights.flatten(0, -3)[order.to(device), 0].double()
        low = at.floor()
        cells, shares = [], []
        for right, below in ((0, 0), (1, 0), (0, 1), (1, 1)):
            corner = low + torch.tensor([right, below], device=device)
            share = weights * (1 - (at - corner).abs()).prod(-1)
            inside = ((corner >= 0) & (corner < torch.tensor([columns, rows], device=device))).all(-1)
            shares.append(share.where(inside | at.isnan().any(-1), 0))
            cells.append((corner[..., 1] * columns + corner[..., 0]).where(inside, 0).long())
        cell, share = (torch.cat(parts, -1).view(*lead, -1) for parts in (cells, shares))
        taken = arrangement.take(cell), arrangement.take(share.float())
        return SampledOperator(*taken, rows * columns, arrangement.query_index, arrangement.key_index)

    def sources(self) -> tuple[Tensor, ...]:
        """Return the weights and the points."""
        return self.weights, *self._points

    def values(self, _: Arrangement) -> None:
        """Return None: the values of several maps belong to no single grid."""

    def source(self, _: Arrangement) -> None:
        """Return None: a weight on the grid may combine several samples."""


def _shared(*operands: Tensor) -> list[int]:
    """Return the sizes of the axes before the token axis, to which all operands broadcast."""
    first, *others = (operand.shape[:-2] for operand in operands)
    alike = all(other == first for other in others)
    return list(first if alike else torch.broadcast_shapes(first, *others))  # type: ignore[no-untyped-call]
