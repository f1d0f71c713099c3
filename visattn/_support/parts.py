"""Modules of a model by name, and what follows from how the model is built: found once, for as long as it is built that way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

from torch import nn

T = TypeVar("T")
Parts = Mapping[nn.Module, str]  # modules with their names, in the order of `named_modules`


class _Build:
    """How a model is built: its modules with their names, classes and children. No module is kept alive.

    Attributes:
        names: Dotted names of the modules.
        lasts: Whether it can be compared with a later one; not so in TorchScript.
        facts: What follows from the build, by question.
    """

    def __init__(self, parts: Parts) -> None:
        """Note how the modules are built."""
        self.names = tuple(parts.values())
        self.facts: dict[Hashable, Any] = {}
        self._modules = [
            (
                ref(module),
                type(module),
                [(name, None if child is None else ref(child)) for name, child in module._modules.items()],
            )
            for module in parts
        ]
        self.lasts = all(type(module._modules) in (dict, OrderedDict) for module in parts)

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
                for name, (name_before, child_ref) in zip(now, children, strict=True):
                    if name != name_before or now[name] is not (child_ref and child_ref()):
                        return None
                modules += (module,)
        except ValueError:  # another number of children
            return None
        return modules


_builds: WeakKeyDictionary[nn.Module, _Build] = WeakKeyDictionary()


def parts_of(model: nn.Module) -> dict[nn.Module, str]:
    """Return the modules of a model with their names, in the order of `named_modules`."""
    build, modules = _build_of(model)
    return dict(zip(modules, build.names, strict=True))


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model; one that several modules share comes several times."""
    build, modules = _build_of(model)
    if not build.lasts:
        return list(model.parameters())
    holders = [module._parameters for module in modules]
    return [parameter for held in holders for name in held if (parameter := held[name]) is not None]


def fact_of_build(model: nn.Module, question: Hashable, find: Callable[[Parts], T]) -> T:
    """Return the result of `find` for the modules of a model; it is kept until the model is built otherwise.

    It must follow from names, classes and children of the modules alone, and must not hold a module.
    """
    build, modules = _build_of(model)
    if question not in build.facts:
        build.facts[question] = find(dict(zip(modules, build.names, strict=True)))
    fact: T = build.facts[question]
    return fact


def _build_of(model: nn.Module) -> tuple[_Build, list[nn.Module]]:
    build = _builds.get(model)
    modules = None if build is None else build.modules()
    if build is None or modules is None:
        parts = _listed(model)
        build, modules = _Build(parts), list(parts)
        _builds[model] = build
    return build, modules


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
