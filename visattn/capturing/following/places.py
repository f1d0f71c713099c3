"""What is known of the tensors of a tape: where their numbers belong, or why that is not known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from visattn.capturing.tokens.codes import compact, equal
from visattn.capturing.tokens.planes import Planes
from visattn.capturing.trace.tape import Entry

Behind = tuple[int, str, int] | None  # its number in the forward, the layer, which call of that layer


class Places(NamedTuple):
    """Which place each number of a tensor stands for; a matrix of scores has one for its row and one for its column.

    Attributes:
        codes: As the tensor; of the rows, where there are `columns`.
        columns: As the tensor, for scores and weights.
        behind: The last attention that flowed in, by layer and call.
        copies: Whether the images are there several times, one after the other.
        embedding: The slot in which the pixels became tokens.
        one_stream: Whether rows and columns are of the same tokens, behind the same attention.
        asked: Whether they were multiplied with learned queries.
        mixture: Whether numbers of one cell were mixed to several, of which each may be of another part of it.
    """

    codes: Tensor
    columns: Tensor | None = None
    behind: Behind = None
    copies: bool = False
    embedding: int | None = None
    one_stream: bool = True
    asked: bool = False
    mixture: bool = False

    @property
    def stream(self) -> object:
        """What tells tokens from others at the same places."""
        return self.behind, self.embedding

    def each(self, change: Callable[[Tensor], Tensor | None]) -> Places | None:
        """The same change to both."""
        codes = change(self.codes)
        columns = None if self.columns is None else change(self.columns)
        if codes is None or (columns is None) != (self.columns is None):
            return None
        return self if codes is self.codes and columns is self.columns else self._replace(codes=codes, columns=columns)

    def after(self, behind: Behind) -> Places:
        """The same behind an attention."""
        return self._replace(behind=behind)

    def same(self, other: Places) -> bool:
        """Whether all numbers belong where those of `other` do."""
        if self.codes.shape != other.codes.shape or (self.columns is None) != (other.columns is None):
            return False
        return equal(self.codes, other.codes) and (
            self.columns is None or other.columns is None or equal(self.columns, other.columns)
        )


@dataclass(eq=False)
class Statuses:
    """What is known of each slot: it is in one of these, or in `places` and `lost` where it was multiplied with something lost.

    Attributes:
        images: Number of images.
        input_size: Their size.
        device: Where codes live.
        places: Where its numbers belong.
        lost: The operation behind which that is not known.
        learned: It descends from parameters and constants alone; the name of a parameter.
        foreign: It descends from another input alone; that one's name.
        shapes: Shapes.
        scores: Slots that hold a number for each query and key, as far as that is known.
        mixed: Scores that were multiplied with values one by one, before the sum.
        culprit: Why the rule that ran last gave nothing, where it is not the operation.
    """

    images: int
    input_size: tuple[int, int]
    device: torch.device
    places: dict[int, Places] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    learned: dict[int, str] = field(default_factory=dict)
    foreign: dict[int, str] = field(default_factory=dict)
    shapes: dict[int, torch.Size] = field(default_factory=dict)
    scores: set[int] = field(default_factory=set)
    mixed: set[int] = field(default_factory=set)
    culprit: str | None = None

    def __post_init__(self) -> None:
        """Make the planes."""
        self.planes = Planes(self.images, self.input_size, self.device)

    def image(self, shape: torch.Size) -> Places:
        """Places of the pixels."""
        plane = self.planes.grid(*self.input_size, self.planes.input)
        return Places(self.planes.codes(plane)[:, None].expand(shape))

    def lose(self, slot: int, name: str) -> None:
        """State that the places of a slot are not known beyond an operation."""
        self.drop(slot)
        self.lost[slot] = name

    def drop(self, slot: int) -> None:
        """Nothing is known of a slot."""
        for known in (self.places, self.lost, self.learned, self.foreign):
            known.pop(slot, None)

    def take_over(self, before: int, after: int) -> None:
        """A slot is as another."""
        self.drop(after)
        tables: list[dict[int, Any]] = [self.places, self.lost, self.learned, self.foreign]
        for known in tables:
            if before in known:
                known[after] = known[before]

    def rewrite(self, entry: Entry, found: Places | None) -> None:
        """Slots that share memory with one that was written over: they stay where they were only if that one did."""
        target = entry.refs[0].slot if entry.refs and len(entry.outs) == 1 else None
        old = None if target is None else self.places.get(target)
        stays = isinstance(found, Places) and old is not None and found.same(old)
        constant = isinstance(found, Places) is False and target is not None and target in self.learned
        for before, after in entry.rewritten:
            if stays or (constant and before in self.learned):
                self.take_over(before, after)
            else:
                self.lose(after, entry.operation.name)


def later(*behind: Behind) -> Behind:
    """The last of several attentions."""
    return max((one for one in behind if one is not None), default=None)


def content(codes: Tensor) -> tuple[object, ...]:
    """What tells codes from others."""
    stored = compact(codes)
    return tuple(codes.shape), tuple(stored.shape), stored.cpu().contiguous().numpy().tobytes()
