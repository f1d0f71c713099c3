"""Status of the tensors of a tape: the image locations of their elements, or why these are unknown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from visattn.capturing.tokens.codes import equal
from visattn.capturing.tokens.planes import PADDING, Planes, compact
from visattn.capturing.trace.arguments import lead_of
from visattn.capturing.trace.tape import Entry

Behind = tuple[int, str, int] | None  # index in the forward pass, layer, index of the call in that layer


class Places(NamedTuple):
    """Image location of each element of a tensor. An element of a score matrix has two: that of its row and that of its column.

    Attributes:
        codes: Position codes in the shape of the tensor; for scores and weights, those of the rows.
        columns: Position codes of the columns of scores and weights; None for other tensors.
        behind: Last attention call that flowed into the tensor.
        copies: Whether the tensor holds several copies of the images.
        embedding: Slot in which pixels became tokens.
        one_stream: Whether rows and columns come from the same tokens, behind the same attention call.
        asked: Whether the tensor was multiplied by learned queries.
        mixture: Whether several cells were mixed into several outputs, each of which may stand for another part of the merged cell.
        others: Position codes of the other axis, if the tensor is a product with members of a set: those of its queries or keys.
    """

    codes: Tensor
    columns: Tensor | None = None
    behind: Behind = None
    copies: bool = False
    embedding: int | None = None
    one_stream: bool = True
    asked: bool = False
    mixture: bool = False
    others: Tensor | None = None

    @property
    def stream(self) -> object:
        """Key that distinguishes these tokens from others at the same locations."""
        return self.behind, self.embedding

    def each(self, change: Callable[[Tensor], Tensor | None]) -> Places | None:
        """Apply a change to the codes of rows and columns; return None if it gives None for one of them."""
        codes = change(self.codes)
        columns = None if self.columns is None else change(self.columns)
        if codes is None or (columns is None) != (self.columns is None):
            return None
        if codes is self.codes and columns is self.columns:
            return self
        others = self.others if self.others is None or self.others.shape != self.codes.shape else change(self.others)
        return self._replace(codes=codes, columns=columns, others=others)

    def after(self, behind: Behind) -> Places:
        """Return a copy that lies behind an attention call."""
        return self._replace(behind=behind)

    def same(self, other: Places) -> bool:
        """Check whether all elements have the same locations as those of `other`."""
        if self.codes.shape != other.codes.shape or (self.columns is None) != (other.columns is None):
            return False
        return equal(self.codes, other.codes) and (
            self.columns is None or other.columns is None or equal(self.columns, other.columns)
        )


@dataclass(eq=False)
class Statuses:
    """Status of each slot.

    A slot is in one of `places`, `lost`, `learned` and `foreign`. If it was multiplied by something lost, it is in both `places` and
    `lost`. A slot that is learned or foreign may also be in `members`: its tokens lie nowhere in the image, but they can be told apart.

    Attributes:
        images: Number of images.
        input_size: `(height, width)` of the images, or of the frames of clips.
        device: Device of the codes.
        frames: Number of frames of each clip; 0 for single images.
        colors: Axis of the channels of images or clips.
        places: Locations of the elements of a slot.
        lost: Name of the operation beyond which the locations are unknown.
        learned: Name of a parameter, for tensors computed from parameters and constants only; may be empty.
        foreign: Name of another input of the model, for tensors computed from it without the image.
        members: Members of sets, such as object queries or words, that the elements of a slot belong to.
        shapes: Shape of each slot.
        scores: Slots that hold a value for each query-key pair, as far as this is known.
        mixed: Scores that were multiplied elementwise by values and not summed yet.
        culprit: Reason why the last rule gave no result, if this is not the operation itself.
    """

    images: int
    input_size: tuple[int, int]
    device: torch.device
    frames: int = 0
    colors: int = 1
    places: dict[int, Places] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    learned: dict[int, str] = field(default_factory=dict)
    foreign: dict[int, str] = field(default_factory=dict)
    members: dict[int, Places] = field(default_factory=dict)
    shapes: dict[int, torch.Size] = field(default_factory=dict)
    scores: set[int] = field(default_factory=set)
    mixed: set[int] = field(default_factory=set)
    culprit: str | None = None

    def __post_init__(self) -> None:
        """Create the planes."""
        self.planes = Planes(self.images, self.input_size, self.device, self.frames)

    def image(self, shape: torch.Size) -> Places:
        """Return the locations of the pixels: `(B, C, H, W)` images, or `(B, T, C, H, W)` or `(B, C, T, H, W)` clips."""
        plane = self.planes.grid(*self.input_size, self.planes.input, max(self.frames, 1))
        return Places(self.planes.codes(plane).unsqueeze(self.colors).expand(shape))

    def patches(self, cells: Tensor, grid: Sequence[int], shape: torch.Size) -> Places:
        """Return the locations of patches `(N, ...)`, or `(B, N, ...)` for images apart, that lie at these cells; -1 is padding."""
        plane = self.planes.grid(grid[1], grid[2], self.planes.input, max(self.frames, 1))
        first = plane.base + torch.arange(self.images, device=cells.device)[:, None] * plane.cells
        codes = torch.where(cells < 0, PADDING, first + cells).to(torch.int32)
        lead = lead_of(shape)
        return Places(codes.view(*lead, *(1,) * (len(shape) - len(lead))).expand(shape))

    def lose(self, slot: int, name: str) -> None:
        """Mark the locations of a slot as unknown beyond an operation."""
        self.drop(slot)
        self.lost[slot] = name

    def drop(self, slot: int) -> None:
        """Remove the status of a slot."""
        for known in (self.places, self.lost, self.learned, self.foreign, self.members):
            known.pop(slot, None)

    def of_sets(self) -> Statuses:
        """Return a view in which the members of sets are the places."""
        view = copy(self)
        view.places, view.members, view.lost = self.members, {}, {}
        return view

    def take_over(self, before: int, after: int) -> None:
        """Copy the status of slot `before` to slot `after`."""
        self.drop(after)
        tables: list[dict[int, Any]] = [self.places, self.lost, self.learned, self.foreign, self.members]
        for known in tables:
            if before in known:
                known[after] = known[before]

    def rewrite(self, entry: Entry, found: Places | None) -> None:
        """Update slots that share memory with an overwritten tensor. They keep their locations only if that tensor did."""
        target = entry.refs[0].slot if entry.refs and len(entry.outs) == 1 else None
        old = None if target is None else self.places.get(target)
        stays = isinstance(found, Places) and old is not None and found.same(old)
        constant = isinstance(found, Places) is False and target is not None and target in self.learned
        for before, after in entry.rewritten:
            if stays or (constant and before in self.learned):
                self.take_over(before, after)
            else:
                self.lose(after, entry.operation.name)


def color_axis(shape: Sequence[int], first: str = "") -> int:
    """Return the channel axis of images `(B, C, H, W)`, or of clips: the second or third, whichever has 3 entries, else 1.

    If both qualify, it is the third, unless the `first` operation on the clip is a convolution over time, which has channels second.
    """
    if len(shape) < 5 or (shape[1] == 3 and shape[2] != 3):
        return 1
    return 1 if shape[1] == shape[2] and first == "conv3d" else 2 if shape[2] == 3 or shape[1] != 1 else 1


def later(*behind: Behind) -> Behind:
    """Return the last of several attention calls; None if there is none."""
    return max((one for one in behind if one is not None), default=None)


def content(codes: Tensor) -> tuple[object, ...]:
    """Return a hashable key that is equal for equal codes."""
    stored = compact(codes)
    return tuple(codes.shape), tuple(stored.shape), stored.cpu().contiguous().numpy().tobytes()
