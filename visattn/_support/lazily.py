"""Sequences whose elements are made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, overload

T = TypeVar("T")


class Lazily(Sequence[T], Generic[T]):
    """Sequence that makes an element each time it is asked for, so that many photos need not be in memory together."""

    def __init__(self, count: int, make: Callable[[int], T]) -> None:
        """Store a function that makes an element from its index."""
        self._range, self._make = range(count), make

    def __len__(self) -> int:
        """Return the number of elements."""
        return len(self._range)

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> list[T]: ...
    def __getitem__(self, at: int | slice) -> T | list[T]:
        """Make an element, or those of a slice."""
        found = self._range[at]
        return self._make(found) if isinstance(found, int) else [self._make(one) for one in found]
