"""Types of what other parts of the package bring to the core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import nn

__all__ = ["Networks"]


class Networks(Protocol):
    """Networks of the package, and attention that can be inserted into any network."""

    REFERENCES: Mapping[str, Callable[..., nn.Module]]

    @staticmethod
    def has_slot(model: str, attention: str, init: str) -> bool:
        """Check whether a network of `REFERENCES` builds this attention itself."""

    @staticmethod
    def insert(model: nn.Module, attention: str, init: str, shape: tuple[int, int, int]) -> None:
        """Insert attention into a network for images of `shape`: channels, height and width."""
