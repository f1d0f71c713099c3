"""Detection of attention that a model writes out: a softmax, possibly a mixing of heads, then a product with the values.

The product is one of matrices, an einsum, or an elementwise product that is summed over the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from visattn.capturing.tokens.codes import flat
from visattn.capturing.tokens.equations import Equation
from visattn.capturing.trace.operations import EDITED, operation_of, words
from visattn.capturing.trace.products import Axes, Grouped, Permuted, axes_of_letters, axes_of_sum
from visattn.capturing.trace.tape import Entry
from visattn.capturing.trace.tracer import Tracer

_SOFTMAX = frozenset({"softmax", "softmin", "gumbel_softmax"})
PRODUCT = frozenset({"matmul", "__matmul__", "bmm", "mm"})
_SCALING = frozenset({"mul", "multiply", "__mul__", "__rmul__", "__imul__", "div", "divide", "__truediv__", "__itruediv__"})
# operations that may lie between: dropout, casts, views, mixing of heads, gates
BETWEEN = _SCALING | words("""
    dropout to float half bfloat16 double type type_as contiguous clone detach nan_to_num where masked_fill
    mT T swapdims moveaxis view reshape flatten unflatten permute transpose swapaxes movedim squeeze unsqueeze expand __getitem__
    linear conv2d batch_norm add __add__ __radd__ __iadd__ sub __sub__ __isub__
""")


class Product(NamedTuple):
    """Product of weights and values.

    Attributes:
        operand: Weights that the model multiplies.
        value: Values.
        axes: Axes of both, and of the result.
        position: Index of the weights among the operands.
        doubtful: See `Attention`.
        samples: Points at which maps were sampled for the values, by index of the entry on the tape.
    """

    operand: Tensor
    value: Tensor
    axes: Axes
    position: int
    doubtful: bool
    samples: Mapping[int, Tensor] = MappingProxyType({})


IsWeights = Callable[[int, Tensor], bool]  # takes the index of an operand, and the operand


def product_of(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], is_weights: IsWeights) -> Product | None:
    """Return the product of weights and values that a call is about to compute, or None.

    `is_weights` returns whether an operand comes from a softmax. The product's own operand counts as the weights, not the softmax's
    result, because talking heads and gates may lie between.
    """
    name = operation_of(func).name
    if name in PRODUCT:
        left, right = (*args, *kwargs.values())[:2]
        if not isinstance(left, Tensor) or not isinstance(right, Tensor):
            return None
        axes = tuple(range(max(left.ndim, right.ndim)))
        flat = left.ndim == right.ndim == 2  # neither images nor heads
        if (flat or (right.ndim > 2 and left.ndim > 1)) and is_weights(0, left):
            return Product(left, right, Permuted(None, None, axes), 0, left.ndim == 2)
        if (flat or (left.ndim > 2 and right.ndim > 1)) and is_weights(1, right):  # values first: V^T A^T
            return Product(right, left, Permuted(_turned(right.ndim), _turned(left.ndim), _turned(len(axes))), 1, right.ndim == 2)
    elif name == "einsum":
        return _einsum(args, is_weights)
    return None


def _einsum(args: Sequence[Any], is_weights: IsWeights) -> Product | None:
    """Return an einsum as a product, or None. The axes of the keys occur in both operands, and not in the result."""
    equation = Equation.of(args)
    if equation is None or len(equation.operands) != 2 or not all(isinstance(x, Tensor) for x in equation.operands):
        return None
    operands, letters, result = equation
    side = next((i for i, x in enumerate(operands) if is_weights(i, x)), None)
    if side is None:
        return None
    weights, value = operands[side], operands[1 - side]
    axes = axes_of_letters((letters[side], weights), (letters[1 - side], value), result)
    return None if axes is None else Product(weights, value, axes, side, isinstance(axes, Grouped) or weights.ndim == 2)


def sum_of(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], factors: Sequence[Tensor], is_weights: IsWeights
) -> Product | None:
    """Return the product of weights and values whose elements, the products of two `factors`, a call is about to sum; or None."""
    given = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | {_NUMPY.get(key, key): x for key, x in kwargs.items()}
    dims, keepdim = given.get("dim"), given.get("keepdim", False)
    dims = [dims] if isinstance(dims, int) else dims
    if operation_of(func).name != "sum" or not isinstance(dims, (tuple, list)) or given.get("dtype") is not None:
        return None
    side = next((i for i, x in enumerate(factors) if is_weights(i, x)), None)
    if side is None:
        return None
    weights, value = factors[side], factors[1 - side]
    axes = axes_of_sum(weights, value, dims, keepdim=bool(keepdim))
    return None if axes is None else Product(weights, value, axes, side, True)


_NUMPY = {"axis": "dim", "keepdims": "keepdim"}


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
        if out.ndim > 1:
            made = frozenset({len(tape.entries) - 1})
            (tape.logarithms if name == "log_softmax" else tape.weights)[slot] = made
        return
    slots = [ref.slot for ref in entry.refs]
    logarithms = [tape.logarithms[one] for one in slots if one in tape.logarithms]
    if logarithms and name in BETWEEN | {"exp"}:
        (tape.weights if name == "exp" else tape.logarithms)[slot] = frozenset().union(*logarithms)
        return
    weights = [tape.weights[one] for one in slots if one in tape.weights]
    stay = name in BETWEEN and not (name in _SCALING and _gated(tracer, args, out))
    if weights and (stay or (name == "einsum" and _mixes_heads(tracer, args, out))):
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


def _mixes_heads(tracer: Tracer, args: Sequence[Any], out: Tensor) -> bool:
    """Check whether an einsum combines weights of heads by learned factors, and leaves the axes of queries and keys."""
    given = tensors_of(args, {})
    weights = [x for x in given if tracer.slot_of(x) in tracer.tape.weights]
    if len(weights) != 1 or out.ndim < 3 or out.shape[-2:] != weights[0].shape[-2:]:
        return False
    return not any(tracer.descends(x) for x in given if x is not weights[0])


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return all tensors of a call in order."""
    return [x for x in (*flat(args), *kwargs.values()) if isinstance(x, Tensor)]


def _turned(axes: int) -> tuple[int, ...]:
    return (*range(axes - 2), axes - 1, axes - 2)
