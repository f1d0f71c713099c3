"""What a forward's tokens did, kept for the next forward of the same model and size: they are followed once.

It is kept only while the model's modules, their settings and hooks, the arguments and the sizes are the same, and never where data
chose the tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from visattn._capture._arrange import Arrangement, Tokens
from visattn._capture._call import Call
from visattn._capture._script import OTHERWISE, Step
from visattn.errors import CaptureError

_KEPT = 8  # input sizes for each model

_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size})
# what every module has: data, other modules, and hooks
_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training"}
# these leave tokens where they are, whatever their settings
_SETTLED = frozenset({nn.Linear, nn.LayerNorm, nn.GELU, nn.ReLU, nn.SiLU, nn.Dropout, nn.Identity, nn.BatchNorm2d})

_known: WeakKeyDictionary[nn.Module, dict[Hashable, Way]] = WeakKeyDictionary()


@dataclass
class Way:
    """Where tokens went in one forward.

    Attributes:
        calls: By layer and number of the call: the sizes of its operands, its arrangement and what it follows.
        tokens: By layer and number of the call: where its output's tokens lie.
        steps: Where in the forward they are made, once that was written down.
        fixed: Whether they are made there every time.
    """

    calls: dict[tuple[str, int], tuple[Sequence[int], Arrangement, tuple[str, int] | None]] = field(default_factory=dict)
    tokens: dict[tuple[str, int], Tokens | None] = field(default_factory=dict)
    steps: Sequence[Step] | None = None
    fixed: bool = True

    def missing(self, counts: Mapping[str, int]) -> str | None:
        """A layer that made fewer calls than it did then."""
        return next((layer for layer, number in self.calls if number >= counts[layer]), None)

    def recall(self, layer: str, number: int, call: Call) -> tuple[Arrangement, tuple[str, int] | None]:
        """The arrangement of a call.

        Raises:
            CaptureError: If the call is not as it was.
        """
        sizes, arrangement, follows = self.calls.get((layer, number), ((), None, None))
        if arrangement is None or tuple(sizes) != sizes_of(call):
            raise CaptureError(OTHERWISE.format(layer))
        return arrangement, follows


def sizes_of(call: Call) -> tuple[int, ...]:
    """What tells a call from one of another form."""
    return (*call.lead, call.rows, call.columns)


def way_of(model: nn.Module, key: Hashable) -> Way | None:
    """What is known of forwards that begin like this one."""
    return _known.get(model, {}).get(key)


def remember(model: nn.Module, key: Hashable, way: Way) -> None:
    """Keep it for the next forward."""
    ways = _known.setdefault(model, {})
    while len(ways) >= _KEPT:
        ways.pop(next(iter(ways)), None)
    ways[key] = way


def drop(model: nn.Module, key: Hashable) -> None:
    """Follow the tokens of such a forward anew."""
    _known.get(model, {}).pop(key, None)


def forget() -> None:
    """Follow the tokens of every model anew."""
    _known.clear()


def key_of(modules: Sequence[nn.Module], pixels: Tensor, given: object) -> Hashable:
    """Everything that a forward could depend on when it begins, but for data: modules, their settings, replaced methods, hooks, sizes."""
    objects: dict[int, Hashable] = {}
    device = pixels.device
    kinds: tuple[Any, ...] = tuple(map(type, modules))
    facts: list[Hashable] = [
        *(str(device), pixels.dtype, _fact(given, objects)),
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(device.type)),
        *(_number(hook) for hooks in (_global_forward_hooks, _global_forward_pre_hooks) for hook in hooks.values()),
        *(tuple(map(id, modules)), kinds, *(_number(_forward(kind)) for kind in dict.fromkeys(kinds))),
    ]
    for module in [module for module in modules if module._forward_hooks or module._forward_pre_hooks]:
        after, before = (
            tuple(_number(hook) for hook in hooks.values() if not _ours(hook))
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        )
        if after or before:
            facts += id(module), after, before
    for module in [x for x in modules if type(x) not in _SETTLED or "forward" in x.__dict__]:
        facts.append(len(module._modules))
        for name, value in module.__dict__.items():
            if name not in _EVERY_MODULE:
                facts += name, value if type(value) in _PLAIN else _fact(value, objects)
    return tuple(facts)


def _forward(kind: type) -> object:
    """As the class has it: a scripted one cannot be asked."""
    return next((base.__dict__["forward"] for base in kind.__mro__ if "forward" in base.__dict__), None)


def _fact(value: object, objects: dict[int, Hashable]) -> Hashable:
    """What tells a setting from another; data do not count, but for their shape. `objects` are those that were seen before."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return value.shape
    if id(value) in objects:
        return objects[id(value)]
    objects[id(value)] = None  # until it is known, which ends circles
    fact: Hashable = None
    if isinstance(value, Mapping):
        fact = tuple((str(name), _fact(item, objects)) for name, item in value.items())
    elif isinstance(value, (tuple, list)):
        fact = tuple(_fact(item, objects) for item in value)
    elif callable(value):
        fact = _number(value)
    else:  # a configuration: what it says itself, for behind it may lie anything
        said = getattr(value, "__dict__", {}).items()
        fact = tuple((name, item) for name, item in said if type(item) in _PLAIN)
    objects[id(value)] = fact
    return fact


def _ours(value: object) -> bool:
    """Whether this is a hook of a capture."""
    return str(getattr(value, "__module__", "")).startswith("visattn._capture")


_numbers: WeakKeyDictionary[object, int] = WeakKeyDictionary()
_next = count()


def _number(thing: object) -> Hashable:
    """A number that is never given to another object, unlike its address. A bound method goes by its function and object."""
    if hasattr(thing, "__func__"):
        return _number(thing.__func__), _number(getattr(thing, "__self__", None))
    try:
        number = _numbers.get(thing)
        return _numbers.setdefault(thing, next(_next)) if number is None else number
    except TypeError:  # what takes no weak reference lives as long as the program, as a rule
        return id(thing)
