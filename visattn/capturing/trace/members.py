"""Tensors that a model holds: its parameters and buffers, attributes of its modules, and what its code keeps between forward passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from visattn.capturing.placing.nodes import shape_of
from visattn.capturing.placing.weak import Home, Weak
from visattn.capturing.trace.caches import kept_tensors, tensors_within
from visattn.capturing.trace.exposed import ExposedMemory
from visattn.capturing.trace.tape import PLAIN, Outside, Stored

_MODULES_OWN = frozenset(nn.Module().__dict__)


class Members:
    """Tensors that a model holds when it is first asked in a forward pass: what it has replaced by then is no constant."""

    def __init__(self, names: Mapping[nn.Module, str], exposed: ExposedMemory) -> None:
        """Prepare for a forward pass.

        Args:
            names: Modules of the model, with their names.
            exposed: Memory that other code can write to.
        """
        self._names, self._exposed = names, exposed
        self._known: dict[int, tuple[Tensor, Stored]] = {}  # by `id`
        self._exchanged: dict[int, Weak] = {}  # tensors that may hold the content of others, by `id`

    def tensors(self) -> Iterator[Tensor]:
        """Yield all of them."""
        return (tensor for tensor, _ in self._all().values())

    def stored(self, tensor: Tensor) -> Stored | None:
        """Return what a tensor is in the model; None for others, and if other code has written into its memory."""
        known = None if self.is_exchanged(tensor) else self._all().get(id(tensor))
        return None if known is None or self._exposed.is_changed(tensor) else known[1]

    def home(self, tensor: Tensor) -> Home | None:
        """Return where the model keeps a tensor."""
        known = self._all().get(id(tensor))
        return None if known is None else known[1].home

    def is_kept(self, value: object, outside: Outside) -> bool:
        """Check whether a tensor is the one that the model keeps where it kept the one on a tape, in the same form."""
        home = outside.home
        return (
            home is not None
            and isinstance(value, Tensor)
            and home.holds(value)
            and not self.is_exchanged(value)
            and shape_of(value) == outside.shape
            and value.is_floating_point() == outside.floating
        )

    def exchange(self, tensor: Tensor) -> None:
        """Treat a tensor, which will hold the content of another, as one from code that is not intercepted."""
        self._exchanged[id(tensor)] = Weak(tensor)

    def is_exchanged(self, tensor: Tensor | None = None) -> bool:
        """Check whether a tensor, or any, may hold the content of another."""
        if not self._exchanged or tensor is None:
            return bool(self._exchanged)
        other = self._exchanged.get(id(tensor))
        return other is not None and other() is tensor

    def clear(self) -> None:
        """Release all tensors."""
        self._known.clear()
        self._exchanged.clear()

    def _all(self) -> dict[int, tuple[Tensor, Stored]]:
        if not self._known:
            self._known.update({id(x): (x, Stored("attribute", "")) for x in kept_tensors(self._names)})
            for part, path in self._names.items():
                self._known.update((id(x), (x, stored)) for x, stored in _members_of(part, path))
        return self._known


def _members_of(part: nn.Module, path: str) -> Iterator[tuple[Tensor, Stored]]:
    """Yield the tensors of one module: those in its attributes, its buffers and its parameters."""
    for name, value in part.__dict__.items():
        if type(value) not in PLAIN and name not in _MODULES_OWN:
            home = Home(part, "", name) if isinstance(value, Tensor) else None
            yield from ((x, Stored("attribute", name, home)) for x in tensors_within(value))
    for kind, attribute, values in (("buffer", "_buffers", part._buffers), ("parameter", "_parameters", part._parameters)):
        for name, x in values.items():
            if x is not None:
                yield x, Stored(kind, path.rpartition(".")[2] if name == "weight" else name, Home(part, attribute, name))
