"""Attention that a model writes out: a softmax, perhaps mixed between heads, and then a product with the values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from visattn._capture._codes import flat

_aten = torch.ops.aten
SOFTMAX = frozenset({F.softmax, torch.softmax, Tensor.softmax, _aten.softmax.int, _aten._softmax.default})
_PRODUCT = frozenset(
    {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, _aten.matmul.default, _aten.bmm.default}
)
_SCALING = frozenset(
    getattr(place, name)
    for place in (torch, Tensor)
    for name in ("mul", "__mul__", "__rmul__", "mul_", "__imul__", "div", "__truediv__", "div_", "__itruediv__")
    if hasattr(place, name)
)
# what may lie between: dropout, casts, views, the mixing of heads and gates
_BETWEEN = _SCALING | frozenset(
    getattr(place, name)
    for place in (F, torch, Tensor)
    for name in (
        "dropout", "to", "float", "half", "bfloat16", "type", "type_as", "contiguous", "clone", "detach",
        "view", "reshape", "flatten", "unflatten", "permute", "transpose", "swapaxes", "movedim", "squeeze", "unsqueeze", "expand",
        "linear", "conv2d", "batch_norm", "masked_fill", "nan_to_num", "where", "__getitem__",
        "add", "__add__", "__radd__", "add_", "__iadd__", "sub", "__sub__", "sub_", "__isub__",
    )
    if hasattr(place, name)
)  # fmt: skip


SEEN = _PRODUCT | _BETWEEN | {torch.einsum}  # what matters behind a softmax


Permute = Callable[[Tensor, Sequence[int]], Tensor]


class Product(NamedTuple):
    """Weights times values, as views whose last axes are `(Q, K)` and `(K, d)`.

    `weights` is `operand.permute(axes)`, the operand being the tensor that the model multiplies; what it goes on with, permuted by
    `out_axes`, is `(..., Q, d)`.
    """

    value: Tensor
    weights: Tensor
    operand: Tensor
    axes: Sequence[int]
    out_axes: Sequence[int]


class SoftmaxTrace:
    """Follows the result of each softmax until it is multiplied with values.

    What counts is the operand of that product, not the softmax's own result: talking heads and gates lie between.

    Attributes:
        alive: The tensors that are followed.
    """

    def __init__(self) -> None:
        """Start with nothing to follow."""
        self._followed = _Tensors()
        self.alive = self._followed.known

    def position(self, args: Sequence[Any], kwargs: Mapping[str, Any], operand: Tensor) -> int:
        """Which tensor of a call `operand` is."""
        return next(i for i, x in enumerate(_tensors(args, kwargs)) if x is operand)

    def adopt(self, args: Sequence[Any], kwargs: Mapping[str, Any], position: int) -> None:
        """Take such a tensor of a call for weights, without having seen their softmax."""
        self._followed.add(_tensors(args, kwargs)[position])

    def product(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], permute: Permute
    ) -> Product | None:
        """The product with values that a call is about to make, if it is one; `permute` makes the views of its operands."""
        if not self.alive:
            return None
        if func in _PRODUCT:
            left, right = (*args, *kwargs.values())[:2]
            if left in self._followed and right.ndim > 2:
                axes: Sequence[int] = range(max(left.ndim, right.ndim))
                return Product(right, left, left, range(left.ndim), axes)
            if right in self._followed and left.ndim > 2:  # values first: V^T A^T
                axes = _turned(right.ndim)
                out_axes = _turned(max(left.ndim, right.ndim))
                return Product(permute(left, _turned(left.ndim)), permute(right, axes), right, axes, out_axes)
        elif func is torch.einsum:
            return self._einsum(args, permute)
        return None

    def follow(self, func: Callable[..., Any], args: Sequence[Any], out: Any) -> None:  # noqa: ANN401
        """Take note of the result of a call."""
        if func in SOFTMAX:
            if out.ndim > 2:  # a pair of numbers is a gate
                self._followed.add(out)
        elif self.alive and func in _BETWEEN and isinstance(out, Tensor):
            followed = [x for x in args if isinstance(x, Tensor) and x in self._followed]
            if followed and not (func in _SCALING and self._gated(args, out)):
                self._followed.add(out)

    def _gated(self, args: Sequence[Any], out: Tensor) -> bool:
        """Whether weights met another tensor number by number: that is a gate made of data, no attention any more."""
        return any(isinstance(x, Tensor) and x not in self._followed and x.numel() == out.numel() > 1 for x in args)

    def _einsum(self, args: Sequence[Any], permute: Permute) -> Product | None:
        """An einsum as a product: what is kept of the weights alone are queries, what is summed are keys."""
        operands = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
        names, _, result = args[0].replace(" ", "").partition("->")
        letters = names.split(",")
        side = next((i for i, x in enumerate(operands) if x in self._followed), None)
        if side is None or len(operands) != 2 or "." in names:
            return None
        (weights, w), (value, v) = ((operands[i], letters[i]) for i in (side, 1 - side))
        lead = [x for x in w if x in v and x in result]
        rows, keys = ([x for x in w if x not in lead and (x in v) == shared] for shared in (False, True))
        channels = [x for x in v if x not in w]
        if not len(rows) == len(keys) == len(channels) == 1 or rows[0] not in result or channels[0] not in result:
            return None

        def order(have: str, want: list[str]) -> list[int]:
            return [have.index(x) for x in want]

        axes = order(w, lead + rows + keys)
        value = permute(value, order(v, lead + keys + channels))
        return Product(value, permute(weights, axes), weights, axes, order(result, lead + rows + channels))


class _Tensors:
    """A set of tensors by identity that keeps none alive; the dictionary of torch for this costs ten times as much."""

    def __init__(self) -> None:
        self.known: dict[int, weakref.ref[Tensor]] = {}

    def add(self, tensor: Tensor) -> None:
        number = id(tensor)
        self.known[number] = weakref.ref(tensor, lambda _: self.known.pop(number, None))

    def __contains__(self, tensor: object) -> bool:
        found = self.known.get(id(tensor))
        return found is not None and found() is tensor


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    return [x for x in (*flat(args), *kwargs.values()) if isinstance(x, Tensor)]


def _turned(axes: int) -> list[int]:
    return [*range(axes - 2), axes - 1, axes - 2]
