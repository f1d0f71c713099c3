"""What other parts of the package bring to the core. The core asks for it by kind and name, and imports none of these parts itself.

`visattn/__init__.py` states the offers; a part is imported when the core first asks for what it brings.
"""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

if TYPE_CHECKING:
    from PIL import Image

    from visattn.core.offer_types import Networks

__all__ = ["offer", "offered", "offers"]

Kind = Literal["check", "image source", "networks", "notebook", "study"]

_OFFERS: dict[Kind, dict[str, str]] = {kind: {} for kind in get_args(Kind)}


def offer(kind: Kind, name: str, path: str) -> None:
    """State what is at `path`, written as `package.module:name` or as `package.module`; it is imported when it is asked for."""
    _OFFERS[kind][name] = path


def offers(kind: Kind) -> tuple[str, ...]:
    """Return the names of a kind; nothing is imported."""
    return tuple(_OFFERS[kind])


@overload
def offered(kind: Literal["check", "study"], name: str) -> Callable[..., Any]: ...
@overload
def offered(kind: Literal["image source"], name: str) -> Callable[[str], Image.Image]: ...
@overload
def offered(kind: Literal["networks"], name: str) -> Networks: ...
@overload
def offered(kind: Literal["notebook"], name: str) -> Callable[[Any], bytes | None]: ...


def offered(kind: Kind, name: str) -> Any:
    """Import and return what was offered under a name."""
    return resolve_name(_OFFERS[kind][name])
