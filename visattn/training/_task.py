"""What is to be learned: the pictures of a configuration, and the network for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from visattn.data import Labelled, read
from visattn.families.trained import Blueprint
from visattn.training._batches import moments
from visattn.training._config import Config
from visattn.training._learner import published_moments

_USUAL = 224  # pixels, of pictures of many sizes
_SCENES = 64


def pictures_of(config: Config, split: Literal["train", "test"]) -> Labelled:
    """The pictures to train or to test on.

    Raises:
        DataError: If they cannot be learned from.
    """
    size = (config.img_size or _SCENES,) * 2
    count = config.train_count if split == "train" else config.test_count
    return read(config.data, split, root=Path(config.root) if config.root else None, count=count or None, size=size)


def blueprint_of(config: Config, pictures: Labelled | None = None, *, like: Blueprint | None = None) -> Blueprint:
    """The network of a configuration for its pictures, or for those of a blueprint that is given."""
    options = config.model_kwargs | ({"widths": config.widths} if config.widths else {})
    if like is not None:
        return replace(like, model=config.model, attention=config.attention, options=options)
    pictures = pictures or pictures_of(config, "train")
    published = config.weights != "none"
    channels = 3 if published or config.model.startswith("tv:") else pictures.channels
    side = config.img_size
    size = (side, side) if side else pictures.size or (_USUAL, _USUAL)
    mean, std = published_moments(config) if published else moments(pictures, "L" if channels == 1 else "RGB")
    return Blueprint(config.model, pictures.classes, channels, size, mean, std, config.attention, options)
