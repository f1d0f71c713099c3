"""What is known of how a tensor of a forward was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Layout = Literal["NCHW", "NHWC"]
AnyLayout = Literal["auto", "NCHW", "NHWC"]  # auto: as the forward shows
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trail:
    """How a tensor was made.

    Attributes:
        past: One bit for each tensor that it depends on, and its own, which is the highest.
        end: The last module that gave it, if all that followed was to move or scale it.
        inner: Where that module has no parameters, the one before it.
        layout: On which axis its channels lie.
        resized: Whether it was just split from a larger one or enlarged, as where scales or pieces are merged.
        grown: Whether it comes from a map that was enlarged, as in a decoder.
        turn: How that map was made, the first on its way that was enlarged.
        scaled: How the map was made that a gate scaled to give it.
    """

    past: int
    end: str | None = None
    inner: str | None = None
    layout: Layout | None = None
    resized: bool = False
    grown: bool = False
    turn: Trail | None = None
    scaled: Trail | None = None

    @property
    def serial(self) -> int:
        """The number of the tensor."""
        return self.past.bit_length() - 1

    @property
    def given(self) -> bool:
        """Whether it is what the model was given."""
        return self.past == 1 << self.serial

    def size(self, tensor: Tensor) -> Shape:
        """Height and width of its tensor."""
        return tuple(tensor.shape[1:3] if self.layout == "NHWC" else tensor.shape[2:])
