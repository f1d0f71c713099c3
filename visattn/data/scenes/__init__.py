"""Scenes whose truth is known: which object decides the label, where it is, and what may not matter."""

from visattn.data.scenes.generator import (
    CLASSES,
    COLORS,
    MARK_SIDE,
    NEW,
    TEXTURES,
    VERSION,
    Mark,
    Pairs,
    Scene,
    Scenes,
    Thing,
    write,
)

__all__ = [
    "CLASSES",
    "COLORS",
    "MARK_SIDE",
    "NEW",
    "TEXTURES",
    "VERSION",
    "Mark",
    "Pairs",
    "Scene",
    "Scenes",
    "Thing",
    "write",
]
