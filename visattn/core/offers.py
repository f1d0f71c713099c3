"""What other parts of the package bring to the core. The core asks for it by kind and name, and imports none of these parts itself.

`visattn/__init__.py` states the offers; a part is imported when the core first asks for what it brings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, overload

if TYPE_CHECKING:
    from pathlib import Path

    from PIL import Image
    from torch import nn

__all__ = ["Networks", "offer", "offered", "offers"]

Kind = Literal["image source", "networks", "notebook", "study"]

_OFFERS: dict[Kind, dict[str, str]] = {kind: {} for kind in get_args(Kind)}


class Networks(Protocol):
    """Networks of the package, and attention that can be inserted into any network."""

    REFERENCES: Mapping[str, Callable[..., nn.Module]]

    @staticmethod
    def has_slot(model: str, attention: str, init: str) -> bool:
        """Check whether a network of `REFERENCES` builds this attention itself."""

    @staticmethod
    def insert(model: nn.Module, attention: str, init: str, shape: tuple[int, int, int]) -> None:
        """Insert attention into a network for images of `shape`: channels, height and width."""


def offer(kind: Kind, name: str, path: str) -> None:
    """State what is at `path`, written as `package.module:name` or as `package.module`; it is imported when it is asked for."""
    _OFFERS[kind][name] = path


def offers(kind: Kind) -> tuple[str, ...]:
    """Return the names of a kind; nothing is imported."""
    return tuple(_OFFERS[kind])


@overload
def offered(kind: Literal["image source"], name: str) -> Callable[[str], Image.Image]: ...
@overload
def offered(kind: Literal["networks"], name: str) -> Networks: ...
@overload
def offered(kind: Literal["notebook"], name: str) -> Callable[[Any], bytes | None]: ...
@overload
def offered(kind: Literal["study"], name: str) -> Callable[[Path], Any]: ...


def offered(kind: Kind, name: str) -> Any:
    """Import and return what was offered under a name."""
    return resolve_name(_OFFERS[kind][name])
