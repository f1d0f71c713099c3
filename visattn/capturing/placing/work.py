"""One step at work: its arguments with their places, as rules read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from visattn.capturing.placing.places import Behind, Places, later, whole
from visattn.capturing.placing.steps import Facts, Node, Step, tensors_in_nodes
from visattn.capturing.tokens.codes import same_along
from visattn.capturing.tokens.planes import Planes

Result = Places | list[Places]
Rule = Callable[["Work"], Result]


class Unproven(Exception):
    """Error: no rule proves where the elements of a result come from. The message names the operation or the reason."""


class Work:
    """A step, and what its rule needs to know.

    Attributes:
        step: The step.
        name: Name of its operation.
        planes: Planes of the forward pass.
        outs: Form of each result that is a tensor.
        sets: Whether members of sets are followed, because no argument comes from the image.
    """

    def __init__(
        self, step: Step, name: str, planes: Planes, outs: list[Facts], places_of: Callable[[Node], Places], facts: list[Facts]
    ) -> None:
        """Store the step and the places of its arguments."""
        self.step, self.name, self.planes, self.outs, self.sets = step, name, planes, outs, False
        self._places, self._facts = places_of, facts

    @property
    def shape(self) -> torch.Size:
        """Shape of the first result."""
        return self.outs[0].shape

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.planes.device

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ANN401
        """Return an argument; None counts as missing."""
        value = self.step.given.get(name)
        return default if value is None else value

    def content(self, name: str) -> Any:  # noqa: ANN401
        """Return the value of a tensor that chooses elements."""
        return self.step.contents[name]

    def places(self, value: Node) -> Places:
        """Return the places of a tensor."""
        return self._places(value)

    def facts(self, value: Node) -> Facts:
        """Return the form of a tensor."""
        return self._facts[value]

    def main(self) -> Places:
        """Return the places of the first tensor argument."""
        return self.places(next(self.nodes()))

    def nodes(self) -> Iterator[Node]:
        """Yield the tensors among the arguments that are read."""
        for name, value in self.step.given.items():
            if name not in ("out", "grad_input") and not name.startswith("out"):
                yield from tensors_in_nodes(value)

    def counts(self, places: Places) -> bool:
        """Check whether a tensor has places to follow: of the image, or of a set where no argument comes from the image."""
        return places.placed or (self.sets and bool((places.codes >= 0).any()))

    def unknown(self, shape: Any) -> Places:  # noqa: ANN401
        """Return the places of elements that this step cannot place."""
        return whole("lost", shape, self.device, self.name)

    def varies(self, node: Node, dim: int, ndim: int) -> bool:
        """Check whether a tensor may differ along an axis of a result with `ndim` axes, to which it broadcasts."""
        facts = self.facts(node)
        own = dim - (ndim - len(facts.shape))
        return own >= 0 and facts.shape[own] != 1 and (not facts.stride or facts.stride[own] != 0)


def through(planes: Planes, codes: Tensor, dim: int, size: int) -> Tensor:
    """Return codes behind an operation that mixes all of `dim`, with that axis of another size.

    Raises:
        Unproven: If the merged cells form no grid.
    """
    shape = list(codes.shape)
    shape[dim] = size
    if same_along(codes, dim):
        return codes if tuple(codes.shape) == tuple(shape) else codes.narrow(dim, 0, 1).expand(shape)
    if bool((codes < -1).any()):
        raise Unproven("a mixture of tokens with others")
    merged = planes.merge(codes, dim)
    if merged is None:
        raise Unproven("")
    return merged.expand(shape)


def behind_of(*places: Places) -> Behind:
    """Return the last attention call that flowed into several tensors."""
    return later(*(one.behind for one in places))
