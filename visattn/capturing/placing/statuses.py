"""Status of each slot of a tape, as the modules that read it need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from visattn.capturing.placing.places import Behind as Behind, Places, content as content, later as later
from visattn.capturing.tokens.planes import PADDING, Planes
from visattn.capturing.trace.arguments import lead_of


@dataclass(eq=False)
class Statuses:
    """Status of each slot.

    A slot is in one of `places`, `lost`, `learned` and `foreign`. A slot that is learned or foreign may also be in `members`: its tokens
    lie nowhere in the image, but they can be told apart.

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

    def __post_init__(self) -> None:
        """Create the planes."""
        self.planes = Planes(self.images, self.input_size, self.device, self.frames)

    def set(self, slot: int, places: Places) -> None:
        """Set the status of a slot."""
        self.drop(slot)
        self.shapes[slot] = places.shape
        if places.placed:
            self.places[slot] = places
            return
        names: dict[str, dict[int, Any]] = {"lost": self.lost, "learned": self.learned, "foreign": self.foreign}
        names[places.kind][slot] = places.name
        if places.kind != "lost" and bool((places.codes >= 0).any()):
            self.members[slot] = places

    def image(self, shape: torch.Size) -> Places:
        """Return the locations of the pixels: `(B, C, H, W)` images, or `(B, T, C, H, W)` or `(B, C, T, H, W)` clips."""
        plane = self.planes.grid(*self.input_size, self.planes.input, max(self.frames, 1))
        return Places("placed", self.planes.codes(plane).unsqueeze(self.colors).expand(shape))

    def patches(self, cells: Tensor, grid: Sequence[int], shape: torch.Size) -> Places:
        """Return the locations of patches `(N, ...)`, or `(B, N, ...)` for images apart, that lie at these cells; -1 is padding."""
        plane = self.planes.grid(grid[1], grid[2], self.planes.input, max(self.frames, 1))
        first = plane.base + torch.arange(self.images, device=cells.device)[:, None] * plane.cells
        codes = torch.where(cells < 0, PADDING, first + cells).to(torch.int32)
        lead = lead_of(shape)
        return Places("placed", codes.view(*lead, *(1,) * (len(shape) - len(lead))).expand(shape))

    def drop(self, slot: int) -> None:
        """Remove the status of a slot."""
        for known in (self.places, self.lost, self.learned, self.foreign, self.members):
            known.pop(slot, None)


def color_axis(shape: Sequence[int], first: str = "") -> int:
    """Return the channel axis of images `(B, C, H, W)`, or of clips: the second or third, whichever has 3 entries, else 1.

    If both qualify, it is the third, unless the `first` operation on the clip is a convolution over time, which has channels second.
    """
    if len(shape) < 5 or (shape[1] == 3 and shape[2] != 3):
        return 1
    return 1 if shape[1] == shape[2] and first == "conv3d" else 2 if shape[2] == 3 or shape[1] != 1 else 1
