"""The page of a study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from visattn._support.typed import typed
from visattn.studies.study_payload import StudyPayload
from visattn.studies.views import View
from visattn.viewer import MAX_MB, written


class PageOptions(TypedDict, total=False):
    """Options of `html_of`."""

    max_mb: float
    layers: str
    heads: Sequence[int] | None


@typed(but=("study", "heads"))
def html_of(study: Sequence[View], *, max_mb: float = MAX_MB, layers: str = "*", heads: Sequence[int] | None = None) -> str:
    """Return a study as an HTML page. It refers to nothing outside of itself.

    Args:
        study: The study.
        max_mb: Largest size of the page in MB.
        layers: Glob of the names of the layers whose attention is in the page.
        heads: Numbers of the heads that are in the page; None: all. A layer that has none of them is left out.

    Returns:
        The page.

    Raises:
        OptionError: If the study has nothing to show, no layer has such a name or such heads, or the page exceeds `max_mb`.
    """
    payload = StudyPayload(study, layers=layers, heads=heads, max_mb=max_mb)
    title = " | ".join(view["title"] for view in payload.facts["views"])
    return written(title, payload.facts, payload.data, ("viewer.css",), "viewer.js", max_mb)
