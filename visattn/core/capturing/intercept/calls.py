"""Attention calls with the operands that the model used, before their axes are assigned to images, heads and windows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from visattn._support.faces import Later
from visattn.core.capturing.intercept.written_out import Product
from visattn.core.capturing.tokens.arrangement import Arrangement, SampledArrangement
from visattn.core.operators import Gradient, MatrixGradient, Operator, OuterGradient, SoftmaxOperator
from visattn.core.records import Source

if TYPE_CHECKING:
    from visattn.core.capturing.following.vectors import Vectors
    from visattn.core.operators import explicit, sampled
else:
    explicit, sampled = Later("visattn.core.operators.explicit"), Later("visattn.core.operators.sampled")

_AGREEING = 2e-5  # rounding of float32; TF32 is off by more


def own(tensor: Tensor, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Return a detached copy of `tensor`. A view would keep the whole joint query-key-value tensor alive."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.clone(memory_format=layout)


class Call(ABC):
    """Attention of one layer, computed once: the base class of fused calls and of products of weights and values.

    Attributes:
        value: `(*lead, k, d)` values.
        lead: Sizes of the axes before the token axis.
        rows: Number of queries in a group.
        columns: Number of keys in a group.
        out: Result of the call, or where its graph begins; None until it is known.
        result: Copy of the result, if it was to be kept.
    """

    out: Tensor | None = None
    result: Tensor | None = None
    _operands: Sequence[str]
    _layout = torch.contiguous_format
    _kept = False

    def __init__(self, value: Tensor, lead: torch.Size, rows: int) -> None:
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

    def keep_result(self) -> None:
        """Copy the result of the call, which has run."""
        assert self.out is not None  # noqa: S101
        self.result = own(self.out)

    def output(self, arrangement: Arrangement) -> Tensor | None:
        """Return the copy of the result in the order of `arrangement`, `(B, heads, [blocks,] q, d)`; None if it was not kept."""
        return None if self.result is None else arrangement.take(self.led(self.result))

    def led(self, result: Tensor) -> Tensor:
        """Return the model's own result as `(*lead, q, d)`."""
        return result

    def keep(self, wanted: bool = True, *, values: bool = False, graph: bool = False) -> None:
        """Copy the operands (such as query and key), so that the operator can be built later, and release everything else.

        The model may overwrite its own tensors after the call, and memory that is only needed by it should not stay alive.

        Args:
            wanted: Whether the call is recorded; if not, the operands are released too.
            values: Whether to copy the values too.
            graph: Whether to keep the tensors of the autograd graph that gradients are computed from.
        """
        copied_names = (*self._operands, "value") if values else self._operands
        attributes = self.__dict__
        for name in copied_names:
            operand = attributes[name]
            attributes[name] = own(operand, self._layout) if wanted and operand is not None else None
        self._kept = True
        if not (wanted and values):
            del self.value
        if not (wanted and graph):
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
        return self._own(arrangement.take(self._expanded(self.value))).contiguous()

    def _own(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor if it may still be a view of the model's memory, otherwise the tensor itself."""
        return tensor if self._kept else own(tensor)

    def _taken(self, operand: Tensor, arrangement: Arrangement) -> Tensor:
        """Return an operand in the order of `arrangement`."""
        if arrangement.order is None and self._kept and operand.shape[:-2] == self.lead:
            return operand
        return self._own(arrangement.take(self._expanded(operand)))

    def _expanded(self, operand: Tensor) -> Tensor:
        """Return an operand `(..., tokens, channels)` with all axes of images and heads, as `(*lead, tokens, channels)`."""
        return operand if operand.shape[:-2] == self.lead else operand.expand(*self.lead, *operand.shape[-2:])


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
        lead = _broadcast_lead(query, key, value)
        super().__init__(value, lead, query.shape[-2])
        self.query, self.key, self.mask, self.is_causal, self.scale = query, key, attn_mask, is_causal, scale
        self.lse: Tensor | None = None

    def know(self, lse: Tensor) -> None:
        """Keep the log-sum-exp of each row of scores, which the kernel computed, if it agrees with the scores.

        Kernels of GPUs may round scores, so some rows of theirs are computed again.
        """
        if lse.device.type == "cpu" or self.agrees(lse):
            self.lse = lse

    def agrees(self, lse: Tensor) -> bool:
        """Check whether the log-sum-exp of the first, middle and last query is that of its scores."""
        checked_rows = torch.tensor([0, self.rows // 2, self.rows - 1], device=lse.device)
        scale = self.query.shape[-1] ** -0.5 if self.scale is None else self.scale
        checked_queries = self.query[..., checked_rows, :].double()
        scores = (checked_queries * scale) @ self.key.double().mT
        bias = self._bias()
        if bias is not None:
            bias = bias.expand(*bias.shape[:-2], self.rows, self.columns)
            scores = scores + bias[..., checked_rows, :]
        claimed = lse[..., checked_rows].double()
        return bool(torch.allclose(scores.logsumexp(-1), claimed, rtol=_AGREEING, atol=_AGREEING))

    def operator(self, arrangement: Arrangement, _: Vectors | None = None) -> SoftmaxOperator:
        """Return the weights as an operator that computes them from query and key, in the order of `arrangement`."""
        query, key = self._taken(self.query, arrangement), self._taken(self.key, arrangement)
        lse = None if self.lse is None else self._own(arrangement.take(self.lse[..., None]))[..., 0]
        bias = self._bias()
        if bias is not None:
            bias = self._own(arrangement.take_bias(bias, self.lead))
        return SoftmaxOperator(query, key, bias, self.scale, arrangement.query_index, arrangement.key_index, lse=lse)

    def source(self, arrangement: Arrangement) -> Source:
        """Return the result of the call, and a function from its gradient `dO` to that of the weights, `dA = dO V^T`."""
        assert self.out is not None  # noqa: S101 - the call has run
        value = self._own(arrangement.take(self._expanded(self.value))).contiguous()
        return Source(self.out, lambda gradient: OuterGradient(arrangement.take(gradient), value))

    def sources(self) -> tuple[Tensor, ...]:
        """Return query and key."""
        return self.query, self.key

    def weigh(self) -> Tensor:
        """Compute the weights as a softmax of scores, in float32 or wider; a query that may read no key gets zero weights."""
        dtype = torch.promote_types(self.query.dtype, torch.float32)
        scale = self.query.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = (self.query.to(dtype) * scale) @ self.key.to(dtype).mT
        bias = self._bias()
        if bias is not None:
            scores = scores + bias
        is_fully_masked = (scores == -torch.inf).all(-1, keepdim=True)
        return scores.softmax(-1).masked_fill(is_fully_masked, 0)

    def mix(self, weights: Tensor) -> Tensor:
        """Multiply weights by the values, in the dtype of the values."""
        return weights.to(self.value.dtype) @ self.value

    def _bias(self) -> Tensor | None:
        """Return the mask of the call as numbers that are added to the scores, -inf for keys that are hidden; None for no mask."""
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
    operand: Tensor | None

    def __init__(self, product: Product) -> None:
        """Store the operands of the product."""
        self._axes, self.operand = product.axes, product.operand
        self.weights, value = self._axes.weights(product.operand), self._axes.values(product.value)
        lead = _broadcast_lead(value, self.weights)
        super().__init__(value, lead, self.weights.shape[-2])

    def keep(self, wanted: bool = True, *, values: bool = False, graph: bool = False) -> None:
        """Copy the operands, and with the values the operands of the scores; see `Call.keep`."""
        super().keep(wanted, values=values, graph=graph)
        is_copied = wanted and values and self.scored is not None
        self.scored = tuple(own(operand, self._layout) for operand in self.scored or ()) if is_copied else None
        if not (wanted and graph):
            self.operand = None

    def starting_at(self, leaf: Tensor, value: Any) -> Any:  # noqa: ANN401
        """Return arguments of the call, nested or not, with the weights replaced by a leaf of the graph, and without other graph."""
        if isinstance(value, Tensor):
            return leaf if value is self.operand else value.detach()
        if type(value) in (tuple, list):
            return type(value)(self.starting_at(leaf, item) for item in value)
        return {name: self.starting_at(leaf, item) for name, item in value.items()} if isinstance(value, dict) else value

    def operator(self, arrangement: Arrangement, vectors: Vectors | None = None) -> Operator:
        """Return the matrix of weights that the model multiplied by the values, with queries and keys if they were kept.

        `vectors` tells which parts of the kept operands of the scores are the queries and the keys.
        """
        weights = self._own(arrangement.take(self._expanded(self.weights)))
        score_operands, query, key = self.scored, None, None
        if vectors is not None and score_operands is not None:
            query, key = (self._own(arrangement.take(self._expanded(vector.of(score_operands)))) for vector in vectors)
        return explicit.MatrixOperator(weights, arrangement.query_index, arrangement.key_index, query=query, key=key)

    def source(self, arrangement: Arrangement) -> Source | None:
        """Return the weights that the model multiplied, and a function that brings their gradient into the arrangement's order."""
        axes, lead = self._axes, self.lead
        assert self.operand is not None  # noqa: S101 - kept with graph=True

        def arranged(gradient: Tensor) -> Gradient:
            gradient = axes.weights(gradient)
            expanded = gradient.expand(*lead, *gradient.shape[-2:])
            return MatrixGradient(arrangement.take(expanded))

        return Source(self.operand, arranged)

    def sources(self) -> tuple[Tensor, ...]:
        """Return the weights."""
        return (self.weights,)

    def weigh(self) -> Tensor:
        """Return the weights that the model computed."""
        return self._expanded(self.weights)

    def mix(self, weights: Tensor) -> Tensor:
        """Multiply weights by the values; return the axes in the order of the model's own product."""
        return self.laid_out(weights.to(self.value.dtype) @ self.value)

    def laid_out(self, result: Tensor) -> Tensor:
        """Return a result `(*lead, q, d)` in the axes of the model's own product."""
        return self._axes.result(result)

    def led(self, result: Tensor) -> Tensor:
        """Return the model's own result as `(*lead, q, d)`."""
        return self._axes.led(result)


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

    def operator(self, arrangement: Arrangement, _: Vectors | None = None) -> sampled.SampledOperator:
        """Return the weights, spread over the four cells of the finest grid around each point by bilinear interpolation."""
        assert isinstance(arrangement, SampledArrangement)  # noqa: S101 - others are not recorded
        row_order, point_order, scales, (rows, columns), lead = arrangement.samples
        device = self.weights.device
        points_of_maps = [
            points.reshape(-1, 2).double() * torch.tensor(factors, device=device) + torch.tensor(offsets, device=device)
            for points, (factors, offsets) in zip(self._points, scales, strict=True)
        ]
        points = torch.cat(points_of_maps)[point_order.to(device)]  # (N * Q, k, 2): column and row
        weights = self.weights.flatten(0, -3)[row_order.to(device), 0].double()
        corner_above_left = points.floor()
        cells, shares = [], []
        for right, below in ((0, 0), (1, 0), (0, 1), (1, 1)):
            corner = corner_above_left + torch.tensor([right, below], device=device)
            corner_column, corner_row = corner[..., 0], corner[..., 1]
            closeness = (1 - (points - corner).abs()).prod(-1)
            is_inside = ((corner >= 0) & (corner < torch.tensor([columns, rows], device=device))).all(-1)
            has_no_place = points.isnan().any(-1)  # its share stays, and is NaN
            shares.append((weights * closeness).where(is_inside | has_no_place, 0))
            cells.append((corner_row * columns + corner_column).where(is_inside, 0).long())
        cell, share = (torch.cat(corners, -1).view(*lead, -1) for corners in (cells, shares))
        return sampled.SampledOperator(
            arrangement.take(cell),
            arrangement.take(share.float()),
            rows * columns,
            arrangement.query_index,
            arrangement.key_index,
        )

    def sources(self) -> tuple[Tensor, ...]:
        """Return the weights and the points."""
        return self.weights, *self._points

    def values(self, _: Arrangement) -> None:
        """Return None: the values of several maps belong to no single grid."""

    def source(self, _: Arrangement) -> None:
        """Return None: a weight on the grid may combine several samples."""


def _broadcast_lead(first: Tensor, *others: Tensor) -> torch.Size:
    """Return the sizes of the axes of images and heads that all operands `(..., tokens, channels)` broadcast to."""
    lead = first.shape[:-2]
    for other in others:
        if other.shape[:-2] != lead:
            return torch.broadcast_shapes(lead, *(tensor.shape[:-2] for tensor in others))  # type: ignore[no-untyped-call,no-any-return]
    return lead
