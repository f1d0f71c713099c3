"""Detection of attention that a model writes out: a softmax, possibly a mixing of heads, then a product with the values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from visattn.capturing.tokens.codes import flat
from visattn.capturing.tokens.equations import Equation
from visattn.capturing.trace.operations import EDITED, operation_of, words
from visattn.capturing.trace.tape import Entry
from visattn.capturing.trace.tracer import Tracer

_SOFTMAX = frozenset({"softmax", "softmin", "gumbel_softmax"})
PRODUCT = frozenset({"matmul", "__matmul__", "bmm"})
_SCALING = frozenset({"mul", "multiply", "__mul__", "__rmul__", "__imul__", "div", "divide", "__truediv__", "__itruediv__"})
# operations that may lie between: dropout, casts, views, mixing of heads, gates
BETWEEN = _SCALING | words("""
    dropout to float half bfloat16 double type type_as contiguous clone detach nan_to_num where masked_fill
    mT T swapdims moveaxis view reshape flatten unflatten permute transpose swapaxes movedim squeeze unsqueeze expand __getitem__
    linear conv2d batch_norm add __add__ __radd__ __iadd__ sub __sub__ __isub__
""")


class Product(NamedTuple):
    """Product of weights and values, with permutations that make their last axes `(Q, K)` and `(K, d)`.

    Attributes:
        value: Values.
        operand: Weights that the model multiplies.
        value_axes: Permutation of the values' axes; None for no permutation.
        axes: Permutation of the weights' axes; None for no permutation.
        out_axes: Permutation that makes the model's result `(..., Q, d)`.
        position: Index of the weights among the tensors of the call.
    """

    value: Tensor
    operand: Tensor
    value_axes: tuple[int, ...] | None
    axes: tuple[int, ...] | None
    out_axes: Sequence[int]
    position: int

    def views(self) -> tuple[Tensor, Tensor]:
        """Return weights `(..., Q, K)` and values `(..., K, d)` as views."""
        weights = self.operand if self.axes is None else self.operand.permute(self.axes)
        return weights, self.value if self.value_axes is None else self.value.permute(self.value_axes)


def product_of(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], is_weights: Callable[[int, Tensor], bool]
) -> Product | None:
    """Return the product of weights and values that a call is about to compute, or None.

    `is_weights(index, tensor)` returns whether a tensor of the call comes from a softmax. The product's own operand counts as the
    weights, not the softmax's result, because talking heads and gates may lie between.
    """
    name = operation_of(func).name
    if name in PRODUCT:
        left, right = (*args, *kwargs.values())[:2]
        if not isinstance(left, Tensor) or not isinstance(right, Tensor):
            return None
        axes = tuple(range(max(left.ndim, right.ndim)))
        if right.ndim > 2 and left.ndim > 1 and is_weights(0, left):
            return Product(right, left, None, None, axes, 0)
        if left.ndim > 2 and right.ndim > 1 and is_weights(1, right):  # values first: V^T A^T
            turned = _turned(len(axes))
            return Product(left, right, _turned(left.ndim), _turned(right.ndim), turned, 1)
    elif name == "einsum":
        return _einsum(args, is_weights)
    return None


def _einsum(args: Sequence[Any], is_weights: Callable[[int, Tensor], bool]) -> Product | None:
    """Return an einsum as a product, or None. The query axis occurs in the weights and not in the values; the key axis is summed over."""
    equation = Equation.of(args)
    if equation is None or len(equation.operands) != 2:
        return None
    operands, letters, result = equation
    side = next((i for i, x in enumerate(operands) if isinstance(x, Tensor) and is_weights(i, x)), None)
    if side is None:
        return None
    (weights, w), (value, v) = ((operands[i], letters[i]) for i in (side, 1 - side))
    lead = [x for x in w if x in v and x in result]
    rows, keys = ([x for x in w if x not in lead and (x in v) == shared] for shared in (False, True))
    channels = [x for x in v if x not in w]
    if not len(rows) == len(keys) == len(channels) == 1 or rows[0] not in result or channels[0] not in result:
        return None

    def order(have: str, want: list[str]) -> tuple[int, ...]:
        return tuple(have.index(x) for x in want)

    return Product(
        value,
        weights,
        order(v, lead + keys + channels),
        order(w, lead + rows + keys),
        order(result, lead + rows + channels),
        side,
    )


def note_weights(tracer: Tracer, entry: Entry, args: Sequence[Any], out: Any) -> None:  # noqa: ANN401
    """Register whether the result of a recorded call comes from a softmax."""
    if not entry.operation.own or not isinstance(out, Tensor) or entry.outs[0] is None:
        return
    name, tape, slot = entry.operation.name, tracer.tape, entry.outs[0].slot
    if name == EDITED:
        made = frozenset({len(tape.entries) - 1}).union(*(tape.weights.get(ref.slot, ()) for ref in entry.refs))
        tape.weights[slot] = made
        return
    if name in _SOFTMAX or name == "log_softmax":
        if out.ndim > 2:  # a 2-d softmax is a gate
            made = frozenset({len(tape.entries) - 1})
            (tape.logarithms if name == "log_softmax" else tape.weights)[slot] = made
        return
    slots = [ref.slot for ref in entry.refs]
    logarithms = [tape.logarithms[one] for one in slots if one in tape.logarithms]
    if logarithms and name in BETWEEN | {"exp"}:
        (tape.weights if name == "exp" else tape.logarithms)[slot] = frozenset().union(*logarithms)
        return
    weights = [tape.weights[one] for one in slots if one in tape.weights]
    if weights and name in BETWEEN and not (name in _SCALING and _gated(tracer, args, out)):
        tape.weights[slot] = frozenset().union(*weights)


def _gated(tracer: Tracer, args: Sequence[Any], out: Tensor) -> bool:
    """Check whether weights were scaled elementwise by other data from the image: then they are a gate, not attention."""
    return any(
        isinstance(x, Tensor)
        and x is not out
        and x.numel() == out.numel() > 1
        and tracer.slot_of(x) not in tracer.tape.weights
        and tracer.descends(x)
        for x in args
    )


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return all tensors of a call in order."""
    return [x for x in (*flat(args), *kwargs.values()) if isinstance(x, Tensor)]


def _turned(axes: int) -> tuple[int, ...]:
    return (*range(axes - 2), axes - 1, axes - 2)
