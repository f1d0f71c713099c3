"""Effects of operations on single tokens: the axes that they mix, the arguments in which they are linear, which tokens are uneven.

These are properties of an operation's row in the table. They tell where the layers that change each token alone end, and which part
of a readout is linear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from visattn.core.capturing.placing.nodes import Node
from visattn.core.capturing.placing.products import FACTORS
from visattn.core.capturing.placing.work import Work

# --- axes along which elements of an argument are mixed; None if others are mixed as well, or it is not known

Mixes = Callable[[Work, Node], Sequence[int] | None]


def by_product(work: Work, node: Node) -> Sequence[int] | None:
    """Return the contracted axis of a factor of a matrix product, if it acts on each token alone, as a linear layer does.

    All tokens meet the same other factor, and keep more than one number each; else return None.
    """
    factors: list[Any] = [work.step.given.get(factor) for factor in FACTORS.get(work.name, ("input", "weight"))]
    if node not in factors or None in factors:
        return None
    first, second = factors
    ndim, is_second = len(work.facts(node).shape), node == second
    other = second if node == first else first
    is_same_for_all = ndim < 3 or work.name not in FACTORS or not work.varies(other, 0, ndim)
    is_score = ndim > 1 and work.shape[-2 if is_second else -1] == 1  # a number for each token
    if is_score or not is_same_for_all:
        return None
    return [-2 if is_second else -1]


def in_layer(work: Work, _: Node) -> Sequence[int]:
    """Return the last axes, which a layer norm normalizes."""
    return [*range(-len(work.get("normalized_shape")), 0)]


def in_batch(work: Work, _: Node) -> Sequence[int] | None:
    """Return the channels, which a batch norm scales by its running statistics; in training it mixes images."""
    return [1] if not work.get("training", False) else None


def along(work: Work, _: Node) -> Sequence[int]:
    """Return the axis of a softmax."""
    return [work.get("dim")]


def over(work: Work, _: Node) -> Sequence[int] | None:
    """Return the axes over which a statistic is taken."""
    dims = work.get("dim")
    return dims if isinstance(dims, list) and dims else None


def by_kernel(work: Work, _: Node) -> Sequence[int] | None:
    """Return the axis of channels if a convolution mixes nothing else, since its kernel covers one position; otherwise None."""
    kernel_size = work.facts(work.step.given["weight"]).shape[2:]
    covers_one_position = all(size == 1 for size in (*kernel_size, *work.get("stride", ())))
    acts_on_tokens = covers_one_position and work.shape[1] > 1
    return [1] if acts_on_tokens and not work.get("transposed", False) else None


# --- whether an operation is linear in some of its arguments together, given by name

Linear = Callable[[set[str]], bool]


def together(_: set[str]) -> bool:
    """Check whether an operation is linear in these arguments together: always, as for `add`."""
    return True


def in_one(coming: set[str]) -> bool:
    """Check whether an operation is linear in these arguments: in one factor alone, as for `mul`."""
    return len(coming - {"bias"}) == 1


def in_one_and_term(coming: set[str]) -> bool:
    """Check whether an operation is linear in these arguments: in one factor, and in the term that is added, as for `addmm`."""
    return len(coming - {"self"}) < 2


def in_self(coming: set[str]) -> bool:
    """Check whether an operation is linear in these arguments: in the first alone, as for `div`."""
    return coming == {"self"}


def but(name: str) -> Linear:
    """Return a function that checks whether `name` is not among some arguments; in all others, the operation is linear."""
    return lambda coming: name not in coming


# --- what else an operation does to each token
# adds: what is added to a token leaves its share in the readout as it is
# power: the mean of its results is no mean of the tokens
# statistic: one number, or a few, for many; behind it, as behind a product, a power is an activation
# uneven: some elements are treated in another way
Effect = Literal["", "adds", "power", "statistic", "uneven"]
