"""The tasks by their recipes: `TASKS` is the one table that the loop reads."""

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
    """The task of a recipe, with its data.

    Raises:
        DataError: If the data cannot be learned from.
        TypeError: If it is no recipe of a task.
    """
    for recipe, task in TASKS.values():
        if isinstance(config, recipe):
            return task(config)
    raise TypeError(f"no task has a {type(config).__name__}")
