"""Operators as tensors and plain values, and back: what a file stores of an attention matrix.

The tensors have no axis for the batch, and none for blocks if there is a single one in canonical order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from visattn.core.operators import MatrixOperator, Operator, SampledOperator, SoftmaxOperator
from visattn.errors import ShapeError

MASKS = "bias"  # may hold -inf


def operands_of(operator: Operator) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the plain values and the tensors of an operator of one image. Gradients are left out."""
    if isinstance(operator, SoftmaxOperator):
        tensors = {"query": operator.query, "key": operator.key, "bias": operator.bias}
        facts: dict[str, Any] = {"kind": "softmax", "scale": operator.scale}
    elif isinstance(operator, SampledOperator):
        tensors, facts = {"cells": operator.cells, "shares": operator.shares}, {"kind": "sampled", "keys": operator.shape[3]}
        if operator.key_index is not None:
            facts["keys"] = operator.key_index.shape[1]
    elif isinstance(operator, MatrixOperator):
        tensors, facts = {"weights": operator.weights, "query": operator.query, "key": operator.key}, {"kind": "weights"}
    else:  # a combination of operators
        return {"kind": "weights"}, {"weights": operator.dense()[0]}
    found = {name: tensor[0] for name, tensor in tensors.items() if tensor is not None}
    if operator.query_index is None or operator.key_index is None:
        return facts, {name: tensor.squeeze(1) for name, tensor in found.items()}
    return facts, found | {"query_index": operator.query_index, "key_index": operator.key_index}


def operator_of(facts: Mapping[str, Any], tensor: Callable[[str], Tensor | None]) -> Operator:
    """Build an operator of one image from the result of `operands_of`.

    Args:
        facts: Plain values.
        tensor: Function that returns a tensor by the name of the operand, or None if there is none.

    Returns:
        The operator; its constructor checks shapes.

    Raises:
        ShapeError: If an operand is missing, shapes do not fit, or an index does not name every token.
    """

    def given(name: str) -> Tensor | None:
        found = tensor(name)
        if found is None:
            return None
        if not found.numel() or (name != "cells" and not found.is_floating_point()):
            raise ShapeError(f"{name} must hold floating-point numbers, got {found.dtype} {tuple(found.shape)}")
        return found[None]

    def needed(name: str) -> Tensor:
        if (found := given(name)) is None:
            raise ShapeError(f"attention of kind '{facts['kind']}' must have '{name}'")
        return found

    indices = [_index(name, tensor(name)) for name in ("query_index", "key_index")]
    if facts["kind"] == "softmax":
        query, key = needed("query"), needed("key")
        return SoftmaxOperator(query, key, given("bias"), facts.get("scale"), *indices)
    if facts["kind"] == "weights":
        return MatrixOperator(needed("weights"), *indices, query=given("query"), key=given("key"))
    if facts["kind"] == "sampled":
        cells, keys = needed("cells"), facts.get("keys", 0)
        if cells.is_floating_point() or not bool(((cells >= 0) & (cells < keys)).all()):
            raise ShapeError(f"cells must be indices from 0 to {keys - 1}")
        return SampledOperator(cells.long(), needed("shares"), keys, *indices)
    raise ShapeError(f"attention must be of kind 'softmax', 'weights' or 'sampled', got {facts['kind']!r}")


def _index(name: str, index: Tensor | None) -> Tensor | None:
    """Check that an index `(blocks, tokens)` names every token from 0 on; -1 is padding."""
    if index is None:
        return None
    if index.is_floating_point() or index.ndim != 2:
        raise ShapeError(f"{name} must be (blocks, tokens) of whole numbers, got {index.dtype} {tuple(index.shape)}")
    found = torch.unique(index)
    real = found[found >= 0]
    if not len(real) or int(found[0]) < -1 or int(real[-1]) != len(real) - 1:
        raise ShapeError(f"{name} must name every token from 0 on; -1 is padding")
    return index.long()
