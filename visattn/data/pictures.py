"""Pictures with what is known of each: what every reader gives."""

from __future__ import annotations

from typing import Any, Protocol

from PIL import Image


class Pictures(Protocol):
    """Pictures to learn from."""

    @property
    def channels(self) -> int:
        """1 or 3: gray or RGB pictures."""
        ...

    @property
    def size(self) -> tuple[int, int] | None:
        """`(height, width)` of the pictures; None where they differ."""
        ...

    def __len__(self) -> int:
        """How many."""
        ...

    def __getitem__(self, index: int) -> tuple[Image.Image, Any]:
        """A picture, and what is known of it; `ImageError`, which names the file, for one that cannot be used."""
        ...

    def name(self, index: int) -> str:
        """What to call a picture, safe to print: its file, or `fashion-mnist train 17`."""
        ...

    def fingerprint(self) -> str:
        """A sha256 of what they are made of."""
        ...
