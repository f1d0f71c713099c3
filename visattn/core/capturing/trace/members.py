"""Tensors that a model holds: parameters and buffers, attributes of its modules, and what its code keeps between forward passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from visattn.core.capturing.placing.nodes import shape_of
from visattn.core.capturing.placing.weak import Home, Weak
from visattn.core.capturing.trace.caches import kept_tensors, tensors_within
from visattn.core.capturing.trace.exposed import ExposedMemory
from visattn.core.capturing.trace.tape import PLAIN, Outside, Stored

_MODULES_OWN = frozenset(nn.Module().__dict__)


class Members:
    """Tensors that a model holds when it is first asked in a forward pass: what it has replaced by then is no constant.

    Attributes:
        swapped: Tensors that may hold the content of others, by `id`.
    """

    def __init__(self, names: Mapping[nn.Module, str], exposed: ExposedMemory) -> None:
        """Prepare for a forward pass.

        Args:
            names: Modules of the model, with their names.
            exposed: Memory that other code can write to.
        """
        self._names, self._exposed = names, exposed
        self._held: dict[int, tuple[Tensor, Stored]] = {}  # tensors of the model by `id`, collected when first asked for
        self.swapped: dict[int, Weak] = {}

    def tensors(self) -> Iterator[Tensor]:
        """Yield all of them."""
        return (tensor for tensor, _ in self._all().values())

    def stored(self, tensor: Tensor) -> Stored | None:
        """Return kind and name of a tensor that the model holds, such as its parameter `cls_token`; None for any other tensor.

        A tensor into whose memory other code has written during the forward pass is no longer one of the model.
        """
        entry = None if self.is_exchanged(tensor) else self._all().get(id(tensor))
        if entry is None or self._exposed.is_changed(tensor):
            return None
        _, stored = entry
        return stored

    def home(self, tensor: Tensor) -> Home | None:
        """Return the module and attribute where the model keeps a tensor; None if it does not."""
        entry = self._all().get(id(tensor))
        if entry is None:
            return None
        _, stored = entry
        return stored.home

    def is_kept(self, value: object, outside: Outside) -> bool:
        """Check whether the model keeps a tensor where it kept the tensor `outside` of a tape, and in the same shape.

        So the parameter `pos_embed` of the next forward pass is recognized, also if it was replaced or trained meanwhile.
        """
        home = outside.home
        module = None if home is None else home.module()
        if home is None or module is None:
            return False
        kept = module.__dict__[home.kind] if home.kind else module.__dict__
        if home.name not in kept or kept[home.name] is not value:
            return False
        is_tensor = type(value) is nn.Parameter or isinstance(value, Tensor)
        if not is_tensor or (self.swapped and self.is_exchanged(value)):
            return False
        shape = shape_of(value) if value.is_nested else value.shape
        return shape == outside.shape and value.dtype.is_floating_point == outside.floating

    def exchange(self, tensor: Tensor) -> None:
        """Treat a tensor as one of unknown origin, because the model swaps its content with that of another tensor."""
        self.swapped[id(tensor)] = Weak(tensor)

    def is_exchanged(self, tensor: Tensor) -> bool:
        """Check whether the model has swapped the content of a tensor."""
        ref = self.swapped.get(id(tensor))
        return ref is not None and ref() is tensor

    def clear(self) -> None:
        """Release all tensors."""
        self._held.clear()
        self.swapped.clear()

    def _all(self) -> dict[int, tuple[Tensor, Stored]]:
        """Return all tensors that the model holds, with their kinds and names, by `id`; they are collected once."""
        if not self._held:
            self._held.update({id(tensor): (tensor, Stored("attribute", "")) for tensor in kept_tensors(self._names)})
            for module, path in self._names.items():
                self._held.update((id(tensor), (tensor, stored)) for tensor, stored in _tensors_of_module(module, path))
        return self._held


def _tensors_of_module(module: nn.Module, path: str) -> Iterator[tuple[Tensor, Stored]]:
    """Yield the tensors in the attributes, buffers and parameters of one module, with their kinds and names.

    `path` is the dotted name of the module. A parameter `weight` gets the module's own name, which says more.
    """
    for name, value in module.__dict__.items():
        if type(value) not in PLAIN and name not in _MODULES_OWN:
            home = Home(module, "", name) if isinstance(value, Tensor) else None
            yield from ((tensor, Stored("attribute", name, home)) for tensor in tensors_within(value))
    own_name = path.rpartition(".")[2]
    for kind, attribute, tensors in (("buffer", "_buffers", module._buffers), ("parameter", "_parameters", module._parameters)):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield tensor, Stored(kind, own_name if name == "weight" else name, Home(module, attribute, name))
