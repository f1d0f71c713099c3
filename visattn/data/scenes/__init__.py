"""Generated scenes with known ground truth: the object that decides the label, its location, and everything that must not matter."""

from visattn.data.scenes.drawing import COLORS, MARK_SIDE, TEXTURES, SceneObject
from visattn.data.scenes.generator import CLASSES, NEW, VERSION, Mark, Pairs, Scene, Scenes, write

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
    "SceneObject",
    "Scenes",
    "write",
]
