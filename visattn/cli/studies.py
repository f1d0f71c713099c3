"""Studies in place of images: `STUDY.attn` is drawn without its model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from visattn._support.checks import printable
from visattn.cli.options import refuse_beside
from visattn.errors import OptionError

if TYPE_CHECKING:
    from visattn.studies import View

_SUFFIX = ".attn"
_OF_MODELS = (
    *("model", "weights", "img_size", "resize", "mean", "std", "device", "seed", "max_pixels", "max_bytes", "color_profile"),
    *("target", "versus", "target_space", "labels", "prompt", "task"),
)  # options that a study has settled


def is_study(image: Path) -> bool:
    """Check whether an argument names a study."""
    return image.suffix.lower() == _SUFFIX


def views_of(study: Path) -> tuple[View, ...]:
    """Load the views of a study, after checking that no option was given that only applies to a model.

    Raises:
        OptionError: If one was given.
        StudyError: If the file is not a study.
    """
    refuse_beside("a study", _OF_MODELS)
    from visattn.studies import load_study

    return load_study(study).views


def only_view(study: Path) -> View:
    """Load the view of a study that has one.

    Raises:
        OptionError: If it has several, or an option was given that only applies to a model.
        StudyError: If the file is not a study.
    """
    views = views_of(study)
    if len(views) > 1:
        raise OptionError(
            f"{printable(str(study))}: the study has {len(views)} views, and this command draws one. See all of "
            f"them: visattn view {printable(str(study))}."
        )
    return views[0]
