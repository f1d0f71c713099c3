"""Skip connections of a forward pass, as in a U-Net: the encoder's maps, where the decoder begins, and its outputs.

A decoder is recognized by upsampled maps. It concatenates them with, or adds them to, earlier maps from which it was computed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from visattn.nn.attaching.trail import Shape, Trail

ADDITIONS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})
_JOINS = frozenset({"cat", "concat", "concatenate"})
_ENLARGES = frozenset({"interpolate", "upsample", "conv_transpose2d", "pixel_shuffle", "max_unpool2d"})


@dataclass(slots=True)
class _Level:
    """One resolution of a decoder.

    Attributes:
        made: Trail of the merged map, or of the upsampled map if nothing is merged.
        size: Height and width of that map.
        sources: Trails of the encoder's maps in it.
        taker: Name of the first module with parameters that began afterward.
    """

    made: Trail
    size: Shape
    sources: Sequence[Trail]
    taker: str = ""

    @property
    def newest(self) -> int:
        """Number of the newest of the encoder's maps."""
        return max((source.serial for source in self.sources), default=0)


class Skips:
    """Skip connections of one forward pass.

    Attributes:
        sizes: Height and width of the last output of each module, by name.
    """

    def __init__(self) -> None:
        """Build an empty collection."""
        self.sizes: dict[str, Shape] = {}
        self._levels: list[_Level] = []
        self._spans: dict[str, tuple[int, int]] = {}  # the newest tensors when a module began and ended
        self._given: dict[str, Trail] = {}

    def made(self, name: str, made: Trail, sources: Sequence[tuple[Tensor, Trail]], tensor: Tensor) -> Trail:
        """Return `made`, the trail of a function's result, with its decoder fields filled in."""
        first, trail = sources[0]
        grown = [one for _, one in sources if one.grown]
        fresh = [one for _, one in sources if not one.grown]
        if name in _ENLARGES and tensor.numel() // tensor.shape[1] > first.numel() // first.shape[1]:
            if any(trail.past >> level.made.serial & 1 for level in self._levels):
                self._levels.append(_Level(made, made.size(tensor), ()))
            return replace(made, grown=True, turn=trail.turn if trail.grown else trail)
        merges = name in _JOINS or name in ADDITIONS
        if not grown or (fresh and not merges):  # a map that a decoder only gates still belongs to the encoder
            return replace(made, scaled=fresh[0].scaled or fresh[0]) if grown else made
        made = replace(made, grown=True, turn=grown[0].turn)
        past = 0
        for one in grown:
            past |= one.past
        old = [map_ for one in fresh if not (map_ := one.scaled or one).given and past >> map_.serial & 1]
        if merges and old and tensor.ndim == 4:
            size = made.size(tensor)
            self._levels = [one for one in self._levels if one.sources or one.size != size or not past >> one.made.serial & 1]
            self._levels.append(_Level(made, size, old))
        return made

    def begun(self, name: str, module: nn.Module) -> None:
        """Record that a module begins."""
        if any(not level.taker for level in self._levels) and any(True for _ in module.parameters()):
            for level in self._levels:
                level.taker = level.taker or name

    def gave(self, name: str, span: tuple[int, int], output: Tensor, trail: Trail) -> None:
        """Record the output of a module, and the newest tensors when it began and ended."""
        self._spans[name], self._given[name] = span, trail
        if output.ndim == 4:
            self.sizes[name] = trail.size(output)

    def same(self, one: str, two: str) -> bool:
        """Check whether two modules returned the same tensor, such as a block and its last part."""
        return one == two or (one in self._given and two in self._given and self._given[one].serial == self._given[two].serial)

    def ends(self, once: Callable[[str], bool]) -> list[str | None]:
        """Return the modules at both ends of skip connections and between them; None for a map that is not the output of one module.

        Args:
            once: Check whether a module ran once. A module that also runs elsewhere, such as a shared activation, does not count.
        """
        found: dict[str | None, None] = {}
        levels = [level for level in self._levels if not self._gates(level)]
        for level in levels:
            for trail in (*level.sources, level.made.turn if level.sources else None):
                if trail is not None:
                    found[next((name for name in (trail.end, trail.inner) if name is not None and once(name)), None)] = None
            if (taken := self._decoded(level, levels)) is not None:
                found[taken if once(taken) else None] = None
        return list(found)

    def _gates(self, level: _Level) -> bool:
        """Check whether a merge only computes a gate: a module around it returns a map of the encoder."""
        serial = level.made.serial
        around = (name for name, (begin, end) in self._spans.items() if begin < serial <= end)
        return any(not self._given[name].grown for name in around)

    def _decoded(self, level: _Level, levels: Sequence[_Level]) -> str | None:
        """Return the largest module that decodes one level at its size, else the module that returns the merged map."""
        dots = [dot.start() for dot in re.finditer(r"\.", level.taker)]
        for name in (level.taker[:end] for end in (*dots, len(level.taker))):
            begin, end = self._spans.get(name, (0, 0))
            within = sum(begin < other.made.serial <= end for other in levels)
            alone = within == (begin < level.made.serial) and begin >= level.newest
            if alone and self.sizes.get(name) == level.size:
                return name
        givers = [name for name, trail in self._given.items() if level.sources and trail.serial == level.made.serial]
        return givers[-1] if givers else None
