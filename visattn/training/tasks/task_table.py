"""Table of the tasks and their settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from visattn.training.config import Config, Recipe
from visattn.training.tasks.caption_config import CaptionConfig
from visattn.training.tasks.captioning import Captioning
from visattn.training.tasks.classification import Classification
from visattn.training.tasks.task import Task

TASKS: dict[str, tuple[type[Recipe], Callable[[Any], Task]]] = {
    "classify": (Config, Classification),
    "caption": (CaptionConfig, Captioning),
}


def task_of(config: Recipe) -> Task:
    """Create the task that belongs to the settings, and load its data.

    Raises:
        DataError: If the data cannot be used for training.
        TypeError: If no task has settings of this type.
    """
    for recipe, task in TASKS.values():
        if isinstance(config, recipe):
            return task(config)
    raise TypeError(f"no task has settings of type {type(config).__name__}")
