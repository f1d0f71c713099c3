"""Skip connections of a forward, as in a U-Net: what a decoder takes from its encoder, where it begins, and what it makes of it.

A decoder is known by maps that are enlarged. It joins them with, or adds them to, maps from which it was itself made.
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
        made: The join, or the enlarged map where nothing is joined.
        size: Its height and width.
        sources: The encoder's maps in it.
        taker: The first module with parameters that began afterward.
    """

    made: Trail
    size: Shape
    sources: Sequence[Trail]
    taker: str = ""

    @property
    def newest(self) -> int:
        """The last of the encoder's maps."""
        return max((source.serial for source in self.sources), default=0)


class Skips:
    """The skip connections of one forward.

    Attributes:
        sizes: By name, height and width of the maps that a module gave last.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self.sizes: dict[str, Shape] = {}
        self._levels: list[_Level] = []
        self._spans: dict[str, tuple[int, int]] = {}  # the newest tensors when a module began and when it had run
        self._given: dict[str, Trail] = {}

    def made(self, name: str, made: Trail, sources: Sequence[tuple[Tensor, Trail]], tensor: Tensor) -> Trail:
        """Return `made`, the trail of what a function gave, with what is known of its decoder."""
        first, trail = sources[0]
        grown = [one for _, one in sources if one.grown]
        fresh = [one for _, one in sources if not one.grown]
        if name in _ENLARGES and tensor.numel() // tensor.shape[1] > first.numel() // first.shape[1]:
            if any(trail.past >> level.made.serial & 1 for level in self._levels):
                self._levels.append(_Level(made, made.size(tensor), ()))
            return replace(made, grown=True, turn=trail.turn if trail.grown else trail)
        merges = name in _JOINS or name in ADDITIONS
        if not grown or (fresh and not merges):  # a gate from a decoder leaves a map where it was
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
        """Note that a module begins."""
        if any(not level.taker for level in self._levels) and any(True for _ in module.parameters()):
            for level in self._levels:
                level.taker = level.taker or name

    def gave(self, name: str, span: tuple[int, int], output: Tensor, trail: Trail) -> None:
        """Note what a module gave, and the newest tensors when it began and ended."""
        self._spans[name], self._given[name] = span, trail
        if output.ndim == 4:
            self.sizes[name] = trail.size(output)

    def same(self, one: str, two: str) -> bool:
        """Return whether two modules gave the same tensor, as the last part of a block and the block."""
        return one == two or (one in self._given and two in self._given and self._given[one].serial == self._given[two].serial)

    def ends(self, once: Callable[[str], bool]) -> list[str | None]:
        """Return the modules at both ends of skip connections and between them; None for what no module alone gives.

        Args:
            once: Whether a module ran once. One that runs elsewhere too, as one activation for all, gives nothing alone.
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
        """Whether a join only makes a gate: a module around it gives a map of the encoder."""
        serial = level.made.serial
        around = (name for name, (begin, end) in self._spans.items() if begin < serial <= end)
        return any(not self._given[name].grown for name in around)

    def _decoded(self, level: _Level, levels: Sequence[_Level]) -> str | None:
        """The largest module that makes of one level what has its size, else the one that gives the join."""
        dots = [dot.start() for dot in re.finditer(r"\.", level.taker)]
        for name in (level.taker[:end] for end in (*dots, len(level.taker))):
            begin, end = self._spans.get(name, (0, 0))
            within = sum(begin < other.made.serial <= end for other in levels)
            alone = within == (begin < level.made.serial) and begin >= level.newest
            if alone and self.sizes.get(name) == level.size:
                return name
        givers = [name for name, trail in self._given.items() if level.sources and trail.serial == level.made.serial]
        return givers[-1] if givers else None
