"""Provenance of a tensor in a traced forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Layout = Literal["NCHW", "NHWC"]
AnyLayout = Literal["auto", "NCHW", "NHWC"]  # auto: detected in the forward pass
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trail:
    """Provenance of a tensor.

    Attributes:
        past: Bit set of the tensors that it depends on, including itself, which is the highest bit.
        end: Name of the last module that returned it, if it was only moved or scaled since.
        inner: Name of the module before that, if that module has no parameters.
        layout: Axis order, `NCHW` or `NHWC`; None if unknown.
        resized: Whether the last operation split or upsampled it, as when scales or pieces are merged.
        grown: Whether it depends on an upsampled map, as in a decoder.
        turn: Trail of the map that was upsampled first.
        scaled: Trail of the map that a gate scaled to produce it.
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
        """Number of the tensor."""
        return self.past.bit_length() - 1

    @property
    def given(self) -> bool:
        """True for an input of the model."""
        return self.past == 1 << self.serial

    def size(self, tensor: Tensor) -> Shape:
        """Return the height and width of its tensor."""
        return tuple(tensor.shape[1:3] if self.layout == "NHWC" else tensor.shape[2:])
