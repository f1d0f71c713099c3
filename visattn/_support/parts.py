"""Modules of a model by name, and what follows from how the model is built: found once, for as long as it is built that way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

T = TypeVar("T")


class Parts(NamedTuple):
    """Modules of a model as it is built now.

    Attributes:
        modules: The modules, in the order of `named_modules`.
        names: Their dotted names, in the same order.
        build: How they are built.
    """

    modules: Sequence[nn.Module]
    names: Sequence[str]
    build: _Build

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters; one that several modules share comes several times."""
        if not self.build.lasts:
            return list(self.modules[0].parameters())
        parameters: list[nn.Parameter] = []
        for module in self.modules:
            held = module._parameters
            for name in held:
                parameter = held[name]
                if parameter is not None:
                    parameters += (parameter,)
        return parameters

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return parameters and buffers by name, each once, as `named_parameters` and `named_buffers` do."""
        if not self.build.lasts:
            return dict(self.modules[0].named_parameters()), dict(self.modules[0].named_buffers())
        parameters, buffers, seen = dict[str, Tensor](), dict[str, Tensor](), set[int]()
        for module, path in zip(self.modules, self.names, strict=True):
            for held, found in ((module._parameters, parameters), (module._buffers, buffers)):
                for name in held:
                    tensor = held[name]
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        found[f"{path}.{name}" if path else name] = tensor
        return parameters, buffers

    def fact(self, question: Hashable, find: Callable[[Parts], T]) -> T:
        """Return the result of `find`, which is kept until the model is built otherwise.

        It must follow from names, classes and children of the modules alone, and must not hold a module.
        """
        facts = self.build.facts
        if question not in facts:
            facts[question] = find(self)
        fact: T = facts[question]
        return fact


class _Build:
    """How a model is built: its modules with their names, classes and children. No module is kept alive.

    Attributes:
        names: Dotted names of the modules.
        lasts: Whether it can be compared with a later one; not so in TorchScript.
        facts: What follows from the build, by question.
    """

    def __init__(self, parts: dict[nn.Module, str]) -> None:
        """Note how the modules are built."""
        self.names = tuple(parts.values())
        self.facts: dict[Hashable, Any] = {}
        self.lasts = True
        self._modules: list[tuple[ref[nn.Module], type, list[tuple[str, ref[nn.Module] | None]]]] = []
        for module in parts:
            children: list[tuple[str, ref[nn.Module] | None]] = []
            for name, child in module._modules.items():
                children.append((name, None if child is None else ref(child)))
            self._modules.append((ref(module), type(module), children))
            self.lasts &= type(module._modules) in (dict, OrderedDict)

    def modules(self) -> list[nn.Module] | None:
        """Return the modules if the model is still built this way, else None.

        Each question about a model comes here first, so nothing is called that an operator can do.
        """
        if not self.lasts:
            return None
        modules: list[nn.Module] = []
        try:
            for module_ref, kind, children in self._modules:
                module = module_ref()
                if module is None or module.__class__ is not kind:
                    return None
                now = module._modules
                if now or children:
                    for name, (name_before, child_ref) in zip(now, children, strict=True):
                        if name != name_before or now[name] is not (child_ref and child_ref()):
                            return None
                modules += (module,)
        except ValueError:  # another number of children
            return None
        return modules


_builds: WeakKeyDictionary[nn.Module, _Build] = WeakKeyDictionary()


def parts_of(model: nn.Module) -> Parts:
    """Return the modules of a model, compared with those of the last time."""
    build = _builds.get(model)
    modules = None if build is None else build.modules()
    if build is None or modules is None:
        listed = _listed(model)
        build, modules = _Build(listed), list(listed)
        _builds[model] = build
    return Parts(modules, build.names, build)


def _listed(model: nn.Module) -> dict[nn.Module, str]:
    """List the modules of a model as `named_modules` does, but several times faster."""
    names: dict[nn.Module, str] = {}
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if module in names:
            continue
        names[module] = name
        if children := module._modules:
            prefix = f"{name}." if name else ""
            waiting += [(prefix + key, child) for key, child in reversed(children.items()) if child is not None]
    return names
