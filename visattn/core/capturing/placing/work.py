"""One step at work: its arguments with their places, as rules read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from visattn.core.capturing.placing.nodes import Facts, Node, tensors_in_nodes
from visattn.core.capturing.placing.places import Places, whole
from visattn.core.capturing.placing.shadows import Shadows
from visattn.core.capturing.placing.steps import Step
from visattn.core.capturing.tokens.codes import same_along
from visattn.core.capturing.tokens.planes import Planes

Result = Places | list[Places]
Rule = Callable[["Work"], Result]


class Unproven(Exception):
    """Error: no rule proves where the elements of a result come from. The message names the operation or the reason."""


class Work:
    """A step, and what its rule needs to know.

    Attributes:
        step: The step.
        name: Name of its operation.
        shadows: Places of all tensors.
        outs: Form of each result that is a tensor.
        sets: Whether members of sets (tokens that lie nowhere in the image, such as words) are followed, because no argument comes
            from the image.
    """

    def __init__(self, step: Step, name: str, shadows: Shadows, outs: list[Facts]) -> None:
        """Store the step; `shadows` has the places of its arguments."""
        self.step, self.name, self.shadows, self.outs, self.sets = step, name, shadows, outs, False

    @property
    def planes(self) -> Planes:
        """Planes of the forward pass."""
        return self.shadows.planes

    @property
    def shape(self) -> torch.Size:
        """Shape of the first result."""
        return self.outs[0].shape

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.planes.device

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ANN401
        """Return an argument of the operation by name; None counts as missing."""
        value = self.step.given.get(name)
        return default if value is None else value

    def content(self, name: str) -> Any:  # noqa: ANN401
        """Return the value of a tensor that chooses elements."""
        return self.step.contents[name]

    def places(self, value: Node) -> Places:
        """Return the places of a tensor."""
        return self.shadows.of(value)

    def facts(self, value: Node) -> Facts:
        """Return the form of a tensor."""
        return self.shadows.facts[value]

    def main(self) -> Places:
        """Return the places of the first tensor argument."""
        return self.places(next(self.nodes()))

    def nodes(self) -> Iterator[Node]:
        """Yield the tensors among the arguments that are read."""
        for name, value in self.step.given.items():
            if name not in ("out", "grad_input") and not name.startswith("out"):
                yield from tensors_in_nodes(value)

    def counts(self, places: Places) -> bool:
        """Check whether a tensor has places to follow: cells of the image, or tokens such as words if no argument has any."""
        return places.placed or (self.sets and places.located)

    def unknown(self, shape: Any) -> Places:  # noqa: ANN401
        """Return the places of elements that this step cannot place."""
        return whole("lost", shape, self.device, self.name)

    def varies(self, node: Node, dim: int, ndim: int) -> bool:
        """Check whether a tensor may have several values along axis `dim` of a result with `ndim` axes, to which it broadcasts."""
        facts = self.facts(node)
        own_dim = dim - (ndim - len(facts.shape))
        is_broadcast = own_dim < 0 or facts.shape[own_dim] == 1
        if is_broadcast or (facts.stride and facts.stride[own_dim] == 0):
            return False
        return own_dim not in self.shadows.even(node)


def through(planes: Planes, codes: Tensor, dim: int, size: int) -> Tensor:
    """Return position codes behind an operation that mixes all elements along `dim`, as a matrix product or a mean does.

    Position codes say which cell of the image each element comes from. The axis gets `size` elements, which all come from the
    merged cell. An axis along which the codes are equal, such as channels, merges none.

    Raises:
        Unproven: If the merged cells form no grid, or elements from elsewhere are mixed with them.
    """
    shape = list(codes.shape)
    shape[dim] = size
    if same_along(codes, dim):
        return codes if tuple(codes.shape) == tuple(shape) else codes.narrow(dim, 0, 1).expand(shape)
    has_unplaced = bool((codes < -1).any())
    if has_unplaced:
        raise Unproven("a mixture of tokens with others")
    merged = planes.merge(codes, dim)
    if merged is None:
        raise Unproven("")
    return merged.expand(shape)


def over_members(work: Work, kept: Tensor, summed: Tensor) -> bool:
    """Check whether scores of image tokens (codes `kept`) are summed over tokens without a place in it (`summed`), such as words.

    Such scores may be no scores: the summed axis may hold the channels of the image tokens behind a linear layer.
    """
    return not (work.sets or work.planes.on_grid(summed) or work.planes.of(kept) == work.planes.of(summed))
