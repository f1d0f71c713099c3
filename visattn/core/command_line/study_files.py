"""Studies in place of images: a file of one is drawn without its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from visattn._support.checks import printable
from visattn.core.command_line.shared_options import refuse_beside
from visattn.core.offers import offered, offers
from visattn.errors import OptionError

if TYPE_CHECKING:
    from visattn.core.maps import AttentionMap
    from visattn.core.pipeline.explanation import Explanation
    from visattn.core.pipeline.inputs import Prepared
    from visattn.core.pipeline.question import Question
    from visattn.core.provenance import Provenance
    from visattn.core.records import Recording

__all__ = ["check_settled", "is_study", "only_view", "views_of"]

_OF_MODELS = (
    *("model", "weights", "img_size", "resize", "mean", "std", "device", "seed", "max_pixels", "max_bytes", "color_profile"),
    *("target", "versus", "target_space", "labels", "prompt", "task"),
)  # options that a study has settled


class StoredView(Protocol):
    """One photo under one model, from a file, with what answers questions about it without the model."""

    @property
    def maps(self) -> Mapping[str, AttentionMap]:
        """Maps of the photo, by name."""

    @property
    def recording(self) -> Recording:
        """Attention and features of the forward pass."""

    @property
    def prepared(self) -> Prepared:
        """The photo with its place in the model's input."""

    @property
    def provenance(self) -> Provenance:
        """Model, weights, photo and preprocessing."""

    def explanation(self, name: str) -> Explanation:
        """Return one of the maps with its photo."""

    def answer(self, question: Question) -> Explanation:
        """Answer a question from the recording alone."""


def is_study(image: Path) -> bool:
    """Check whether an argument names a study."""
    return image.suffix.lower() in offers("study")


def check_settled() -> None:
    """Check that no option was given that only applies to a model.

    Raises:
        OptionError: If one was given.
    """
    refuse_beside("a study", _OF_MODELS)


def views_of(study: Path) -> Sequence[StoredView]:
    """Load the views of a study, after checking that no option was given that only applies to a model.

    Raises:
        OptionError: If one was given.
        StudyError: If the file is not a study.
    """
    check_settled()
    views: Sequence[StoredView] = offered("study", study.suffix.lower())(study).views
    return views


def only_view(study: Path) -> StoredView:
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
