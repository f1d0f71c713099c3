"""What a forward's tokens did, kept for the next forward of the same model and size: they are followed once.

It is kept only while the model's modules, their settings and the sizes are the same, and never where data chose the tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from visattn._capture._arrange import Arrangement, Tokens
from visattn._capture._call import Call
from visattn.errors import CaptureError

_KEPT = 8  # input sizes for each model

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
    """What is known of forwards of this model with this key."""
    return _known.get(model, {}).get(key)


def remember(model: nn.Module, key: Hashable, way: Way) -> None:
    """Keep it for the next forward."""
    ways = _known.setdefault(model, {})
    while len(ways) >= _KEPT:
        del ways[next(iter(ways))]
    ways[key] = way


def forget() -> None:
    """Follow the tokens of every model anew."""
    _known.clear()


def key_of(model: nn.Module, pixels: Tensor) -> Hashable:
    """Everything that a forward could depend on, but for data: modules, their settings, replaced methods, sizes."""
    facts: list[Hashable] = [tuple(pixels.shape), str(pixels.device), pixels.dtype]
    for module in model.modules():
        facts.append(id(module))
        for name, value in module.__dict__.items():
            if isinstance(value, (bool, int, float, str)):
                facts.append((name, value))
            elif isinstance(value, (tuple, list)):
                facts.append((name, str(value)))
            elif callable(value):
                facts.append((name, id(value)))
    return tuple(facts)
