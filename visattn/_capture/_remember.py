"""What a forward's tokens did, kept for the next forward of the same model and size: they are followed once.

It is kept only while the model's modules, their settings and hooks, the arguments and the sizes are the same, and never where data
chose the tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from visattn._capture._arrange import Arrangement, Tokens
from visattn._capture._call import Call
from visattn.errors import CaptureError

_KEPT = 8  # input sizes for each model

_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size})
_HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks"})
# what every module has: data, other modules, and hooks of loading, saving and gradients
_EVERY_MODULE = frozenset(nn.Module().__dict__) - _HOOKS - {"training"}

_known: WeakKeyDictionary[nn.Module, dict[Hashable, Way]] = WeakKeyDictionary()


@dataclass
class Way:
    """Where tokens went in one forward.

    Attributes:
        calls: By layer and number of the call: the sizes of its operands, its arrangement and what it follows.
        tokens: By layer and number of the call: where its output's tokens lie.
    """

    calls: dict[tuple[str, int], tuple[Sequence[int], Arrangement, tuple[str, int] | None]] = field(default_factory=dict)
    tokens: dict[tuple[str, int], Tokens | None] = field(default_factory=dict)

    def recall(self, layer: str, number: int, call: Call) -> tuple[Arrangement, tuple[str, int] | None]:
        """The arrangement of a call.

        Raises:
            CaptureError: If the call is not as it was.
        """
        sizes, arrangement, follows = self.calls.get((layer, number), ((), None, None))
        if arrangement is None or tuple(sizes) != sizes_of(call):
            _known.clear()
            raise CaptureError(f"{layer} was called otherwise than in the forward before, at the same size. Run the model again.")
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


def forget() -> None:
    """Follow the tokens of every model anew."""
    _known.clear()


def key_of(modules: Iterable[nn.Module], pixels: Tensor, given: object) -> Hashable:
    """Everything that a forward could depend on when it begins, but for data: modules, their settings, replaced methods, hooks, sizes."""
    facts: list[Hashable] = [str(pixels.device), pixels.dtype, _fact(given)]
    kinds: dict[type, Hashable] = {}
    for module in modules:
        kind = type(module)
        if kind not in kinds:
            kinds[kind] = _number(kind), _number(kind.forward)
        facts += id(module), kinds[kind]
        for name, value in module.__dict__.items():
            if name in _EVERY_MODULE:
                continue
            if type(value) in _PLAIN:
                facts += name, value
            elif name in _HOOKS:
                facts += (_number(hook) for hook in value.values() if not _ours(hook))
            else:
                facts += name, _fact(value)
    return tuple(facts)


def _fact(value: object) -> Hashable:
    """What tells a setting from another; data do not count, but for their shape."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return value.shape
    if isinstance(value, Mapping):
        return tuple((str(name), _fact(item)) for name, item in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(_fact(item) for item in value)
    return _number(value) if callable(value) else None


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
