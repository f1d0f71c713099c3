"""Detection of attention that a model writes out: a softmax, possibly a mixing of heads, then a product with the values.

The product is one of matrices, an einsum, or an elementwise product that is summed over the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from visattn._support.faces import Later
from visattn.core.capturing.tokens.codes import flat
from visattn.core.capturing.tokens.equations import Equation
from visattn.core.capturing.trace.operations import EDITED, operation_of, words
from visattn.core.capturing.trace.product_axes import Axes, Grouped, Permuted
from visattn.core.capturing.trace.tape import Entry, Tape
from visattn.core.capturing.trace.tracer import Tracer

if TYPE_CHECKING:
    from visattn.core.capturing.trace import lettered_axes
else:
    lettered_axes = Later("visattn.core.capturing.trace.lettered_axes")

_SOFTMAX = frozenset({"softmax", "softmin", "gumbel_softmax"})
PRODUCT = frozenset({"matmul", "__matmul__", "bmm", "mm"})
_SCALING = frozenset({"mul", "multiply", "__mul__", "__rmul__", "__imul__", "div", "divide", "__truediv__", "__itruediv__"})
_POSITIVE = words("exp exp2 sigmoid")
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
    """Return the product of attention weights and values that a call of `matmul` or `einsum` is about to compute, or None.

    `is_weights` returns whether an operand comes from a softmax. The product's own operand counts as the weights, not the softmax's
    result, because talking heads and gates may lie between.
    """
    name = operation_of(func).name
    if name == "einsum":
        return _einsum_product(args, is_weights)
    if name not in PRODUCT:
        return None
    left, right = (*args, *kwargs.values())[:2]
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return None
    axes = tuple(range(max(left.ndim, right.ndim)))
    has_no_images = left.ndim == right.ndim == 2  # nor heads
    left_may_be_weights = has_no_images or (right.ndim > 2 and left.ndim > 1)
    if left_may_be_weights and is_weights(0, left):
        return Product(left, right, Permuted(None, None, axes), 0, left.ndim == 2)
    right_may_be_weights = has_no_images or (left.ndim > 2 and right.ndim > 1)
    if right_may_be_weights and is_weights(1, right):  # values first: V^T A^T
        transposed = Permuted(_transposing(right.ndim), _transposing(left.ndim), _transposing(len(axes)))
        return Product(right, left, transposed, 1, right.ndim == 2)
    return None


def _einsum_product(args: Sequence[Any], is_weights: IsWeights) -> Product | None:
    """Return the product of weights and values that an einsum such as `bhqk,bhkd->bhqd` computes; None for any other einsum.

    The axes of the keys occur in both operands, and not in the result.
    """
    equation = Equation.of(args)
    if equation is None or len(equation.operands) != 2:
        return None
    operands, letters, result = equation
    if not all(isinstance(operand, Tensor) for operand in operands):
        return None
    side = next((index for index, operand in enumerate(operands) if is_weights(index, operand)), None)
    if side is None:
        return None
    other_side = 1 - side
    weights, value = operands[side], operands[other_side]
    axes = lettered_axes.axes_of_letters((letters[side], weights), (letters[other_side], value), result)
    if axes is None:
        return None
    is_doubtful = isinstance(axes, Grouped) or weights.ndim == 2
    return Product(weights, value, axes, side, is_doubtful)


def sum_of(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], factors: Sequence[Tensor], is_weights: IsWeights
) -> Product | None:
    """Return the product of weights and values that a call such as `(weights * values).sum(dim)` is about to complete, or None.

    The call sums the elementwise product of the two `factors`, one of which must be weights.
    """
    by_position = dict(zip(("input", "dim", "keepdim"), args, strict=False))
    by_name = {_TORCH_NAMES.get(name, name): value for name, value in kwargs.items()}
    arguments = by_position | by_name
    dims, keepdim = arguments.get("dim"), arguments.get("keepdim", False)
    dims = [dims] if isinstance(dims, int) else dims
    if operation_of(func).name != "sum" or not isinstance(dims, (tuple, list)) or arguments.get("dtype") is not None:
        return None
    side = next((index for index, factor in enumerate(factors) if is_weights(index, factor)), None)
    if side is None:
        return None
    weights, value = factors[side], factors[1 - side]
    axes = lettered_axes.axes_of_sum(weights, value, dims, keepdim=bool(keepdim))
    return None if axes is None else Product(weights, value, axes, side, True)


_TORCH_NAMES = {"axis": "dim", "keepdims": "keepdim"}  # by NumPy's names, which PyTorch takes too


def note_weights(tracer: Tracer, entry: Entry, args: Sequence[Any], out: Any) -> None:  # noqa: ANN401
    """Note whether the result of a recorded call is attention weights: a softmax, also one that was scaled, mixed or reshaped.

    `tape.weights` maps the slot (number) of such a result to the indices of the softmax calls that it comes from; `tape.logarithms`
    does the same for a log-softmax, which becomes weights in an `exp`.
    """
    if not entry.operation.own or not isinstance(out, Tensor) or entry.outs[0] is None:
        return
    name, tape, slot = entry.operation.name, tracer.tape, entry.outs[0].slot
    this_call = len(tape.entries) - 1
    if name == EDITED:
        tape.weights[slot] = frozenset({this_call}).union(*(tape.weights.get(ref.slot, ()) for ref in entry.refs))
        return
    if name in _SOFTMAX or name == "log_softmax":
        if out.ndim > 1:
            (tape.logarithms if name == "log_softmax" else tape.weights)[slot] = frozenset({this_call})
        return
    argument_slots = [ref.slot for ref in entry.refs]
    log_softmaxes = [tape.logarithms[argument] for argument in argument_slots if argument in tape.logarithms]
    if log_softmaxes and name in BETWEEN | {"exp"}:
        (tape.weights if name == "exp" else tape.logarithms)[slot] = frozenset().union(*log_softmaxes)
        return
    softmaxes = [tape.weights[argument] for argument in argument_slots if argument in tape.weights]
    keeps_weights = name in BETWEEN and not (name in _SCALING and _is_gated(tracer, args, out))
    if softmaxes and (keeps_weights or (name == "einsum" and _mixes_heads(tracer, args, out))):
        tape.weights[slot] = frozenset().union(*softmaxes)


def _is_gated(tracer: Tracer, args: Sequence[Any], out: Tensor) -> bool:
    """Check whether weights were multiplied elementwise by other data from the image: then they are a gate, not attention.

    `args` are the factors, and `out` is their product. Factors that are positive by how they were computed, such as a Gaussian around
    a predicted place, only change the size of the weights.
    """
    return any(
        isinstance(factor, Tensor)
        and factor is not out
        and factor.numel() == out.numel() > 1
        and tracer.slot_of(factor) not in tracer.tape.weights
        and tracer.descends(factor)
        and not _is_positive(tracer.tape, tracer.slot_of(factor))
        for factor in args
    )


def _is_positive(tape: Tape, slot: int | None) -> bool:
    """Check whether the call that computed the tensor in a slot has positive results only."""
    for entry in reversed(tape.entries):
        if any(out is not None and out.slot == slot for out in entry.outs):
            return entry.operation.own and entry.operation.name in _POSITIVE
    return False


def _mixes_heads(tracer: Tracer, args: Sequence[Any], out: Tensor) -> bool:
    """Check whether an einsum combines attention weights of several heads by learned factors, as talking heads do.

    The axes of queries and keys must stay the last two.
    """
    operands = tensors_of(args, {})
    all_weights = [operand for operand in operands if tracer.slot_of(operand) in tracer.tape.weights]
    if len(all_weights) != 1:
        return False
    (weights,) = all_weights
    if out.ndim < 3 or out.shape[-2:] != weights.shape[-2:]:
        return False
    return not any(tracer.descends(operand) for operand in operands if operand is not weights)


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return all tensors among the arguments of a call, in order."""
    return [value for value in (*flat(args), *kwargs.values()) if isinstance(value, Tensor)]


def _transposing(ndim: int) -> tuple[int, ...]:
    """Return the permutation of `ndim` axes that exchanges the last two."""
    return (*range(ndim - 2), ndim - 1, ndim - 2)
