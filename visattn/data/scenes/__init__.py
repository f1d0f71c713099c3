"""Generated scenes with known ground truth: the object that decides the label, its location, and everything that must not matter."""

from visattn.data.scenes.causes import CAUSES, TITLES, CausedScenes, class_meaning
from visattn.data.scenes.generator import CLASSES, NEW, VERSION, Mark, Pairs, Scene, Scenes, write
from visattn.data.scenes.outlines import DISTRACTORS, LABELS
from visattn.data.scenes.painting import COLORS, MARK_SIDE, TEXTURES, SceneObject
from visattn.data.scenes.scene_names import CAUSE_OF, DRAWN

__all__ = [
    "CAUSES",
    "CAUSE_OF",
    "CLASSES",
    "COLORS",
    "DISTRACTORS",
    "DRAWN",
    "LABELS",
    "MARK_SIDE",
    "NEW",
    "TEXTURES",
    "TITLES",
    "VERSION",
    "CausedScenes",
    "Mark",
    "Pairs",
    "Scene",
    "SceneObject",
    "Scenes",
    "class_meaning",
    "write",
]
