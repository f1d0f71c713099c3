"""A study, and its views: one photo under one model each."""

from __future__ import annotations

import os
import sys
import tempfile
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Unpack, overload

import torch
from PIL import Image

from visattn._support.checks import one_of
from visattn._support.files import check_output, write_whole
from visattn._support.language import worded
from visattn._support.reprs import brief
from visattn._support.spellings import spelled
from visattn._support.typed import typed
from visattn.core.geometry import Geometry
from visattn.core.maps import AttentionMap
from visattn.core.pipeline.explaining import answer
from visattn.core.pipeline.explanation import Explanation
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.outputs import PredictedClass
from visattn.core.pipeline.question import Question, ask
from visattn.core.provenance import Provenance
from visattn.core.records import Recording
from visattn.errors import OptionError
from visattn.studies.writing import content
from visattn.viewer.page import PageOptions, framed, html_of
from visattn.viewer.widget import widget_of

SUFFIX = ".attn"


class Importance(NamedTuple):
    """Importance of the heads for a score, see `visattn.evaluation.head_importance`.

    Attributes:
        target: The score in words.
        heads: In units of the score: a number for each head of each attention call of the recording.
    """

    target: str
    heads: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, eq=False)
class View:
    """One photo under one model.

    Attributes:
        photo: The upright photo.
        geometry: Position of the model's input on the photo.
        recording: Attention and features of one forward pass over this photo alone. Its provenance names model, weights, photo and
            preprocessing.
        maps: Maps of the photo, by name.
        classes: Most probable classes of a classifier, in descending order.
        texts: Words for tokens that stand for some, by the names of the tokens in the layouts: `word3`.
        importance: Importance of the heads for the score that the study explains; None if it explains none.
        name: Name of the view, such as a step of a training; it comes first in titles.
    """

    photo: Image.Image
    geometry: Geometry
    recording: Recording
    maps: Mapping[str, AttentionMap] = field(default_factory=dict)
    classes: tuple[PredictedClass, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    importance: Importance | None = None
    name: str = ""

    __repr__ = brief

    @property
    def title(self) -> str:
        """Name, model and photo."""
        return f"{self.name}: {self.provenance.title}" if self.name else self.provenance.title

    @property
    def provenance(self) -> Provenance:
        """Model, weights, photo and preprocessing."""
        return self.recording.provenance

    @property
    def prepared(self) -> Prepared:
        """The photo with its place in the model's input, without the pixels."""
        return Prepared(torch.empty(0), (self.photo,), (self.geometry,))

    def explanation(self, name: str) -> Explanation:
        """Return one of the maps with its photo.

        Raises:
            OptionError: If no map has this name.
        """
        return Explanation(self.photo, self.geometry, self.maps[one_of(name, tuple(self.maps), "map")])

    def explain(self, method: str = "attention", **parameters: Any) -> Explanation:  # noqa: ANN401 - the method's own
        """Compute a map from the recording alone, as `visattn.explain` does with the model.

        Args:
            method: Method that reads attention or features and no gradients, such as `attention`, `rollout` or `similarity`.
            parameters: The method's own, such as `layer`, `head` and `query`.

        Returns:
            The explanation.

        Raises:
            OptionError: If the method needs the model, or a parameter does not fit.
        """
        return self.answer(ask(method, parameters))

    def answer(self, question: Question) -> Explanation:
        """Answer a question from `ask` from the recording alone; see `explain`."""
        method = question.method
        if method is not None and not from_recording(question):
            raise OptionError(
                f"method '{question.name}' needs the model, and a study has only its recording. Use "
                + worded(
                    "visattn.explain, or name the method when the study is made: visattn.study(model, image, methods=[...]).",
                    f"visattn overlay IMAGE --method {question.name}.",
                )
            )
        return answer(self.recording, self.prepared, question)


def from_recording(question: Question) -> bool:
    """Check whether a recording without gradients, with the tokens of the last layer, has all that a method needs."""
    if question.method is None:
        return False
    missing = question.method.wants(question.parameters) - {"attention", "gates", "glimpses"}
    return not missing or (missing == {"features"} and question.parameters.get("layer", -1) == -1)


@dataclass(frozen=True, eq=False)
class Study(Sequence[View]):
    """Photos under models, with all that was recorded and computed of them.

    A study is a sequence of views. Overlays, pages of heads and viewers are made from it without the model.

    Attributes:
        views: The views, at least one.
    """

    views: tuple[View, ...]

    __repr__ = brief

    def __post_init__(self) -> None:
        """Check that there is a view.

        Raises:
            OptionError: If there is none.
        """
        if not self.views:
            raise OptionError("a study must have at least one view, got none.")

    @overload
    def __getitem__(self, index: int) -> View: ...
    @overload
    def __getitem__(self, index: slice) -> Study: ...
    def __getitem__(self, index: int | slice) -> View | Study:
        """Return one view, or a study of several."""
        return Study(self.views[index]) if isinstance(index, slice) else self.views[index]

    def __len__(self) -> int:
        """Return the number of views."""
        return len(self.views)

    def __iter__(self) -> Iterator[View]:
        """Iterate over the views."""
        return iter(self.views)

    def __add__(self, other: Study) -> Study:
        """Return a study with the views of both, such as those of two models."""
        return Study((*self.views, *other.views))

    @typed()
    def save(self, path: str | os.PathLike[str], *, overwrite: bool = True) -> Path:
        """Save the whole study as one file, which `visattn.load_study` reads. Gradients are left out.

        Args:
            path: File whose name ends in `.attn`. Its folder is created.
            overwrite: Whether an existing file may be replaced.

        Returns:
            The path.

        Raises:
            OptionError: If the name has another ending, or a view holds several images or forward passes.
            OutputError: If the file exists and `overwrite` is false, or if it cannot be written.
        """
        target = Path(path)
        if target.suffix.lower() != SUFFIX:
            raise OptionError(f"{target.name}: studies are written as .attn files. Choose a name that ends in {SUFFIX}.")
        return write_whole(check_output(target, overwrite=overwrite), content(self.views))

    @spelled(PageOptions)
    @typed()
    def save_html(self, path: str | os.PathLike[str], *, overwrite: bool = True, **options: Unpack[PageOptions]) -> Path:
        """Save the study as one interactive page, which opens in any browser without a network.

        Args:
            path: File to write. Its folder is created.
            overwrite: Whether an existing file may be replaced.
            options: `max_mb`, the largest size of the page in MB (60); `layers`, a glob of the names of the layers whose attention is in
                the page, such as `blocks.1*`; `heads`, numbers of the heads that are in the page, such as `[0, 3]`.

        Returns:
            The path.

        Raises:
            OptionError: If the study has nothing to show, no layer has such a name or such heads, or the page exceeds `max_mb`.
            OutputError: If the file exists and `overwrite` is false, or if it cannot be written.
        """
        return write_whole(check_output(Path(path), overwrite=overwrite), html_of(self, **options).encode())

    @spelled(PageOptions)
    def show(self, *, height: int = 900, **options: Unpack[PageOptions]) -> None:
        """Show the page: in a notebook below the cell, in a frame that can reach nothing else; otherwise in the system's browser.

        Args:
            height: Height of the frame in pixels.
            options: See `save_html`.

        Raises:
            OptionError: The errors of `save_html`.
        """
        page = html_of(self, **options)
        if "IPython" in sys.modules and hasattr(sys.modules["IPython"].get_ipython(), "kernel"):
            display = import_module("IPython.display")
            display.display({"text/html": framed(page, height), "text/plain": repr(self)}, raw=True)
            return
        file = Path(tempfile.mkdtemp(prefix="visattn-")) / "view.html"
        file.write_text(page, encoding="utf-8")
        webbrowser.open(file.as_uri())

    @spelled(PageOptions)
    def widget(self, *, height: int = 900, **options: Unpack[PageOptions]) -> Any:  # noqa: ANN401 - an anywidget.AnyWidget
        """Return the page as a widget for notebooks, whose attribute `link` follows what the page shows and can be set.

        Args:
            height: Height of the frame in pixels.
            options: See `save_html`.

        Returns:
            The widget.

        Raises:
            MissingExtra: If anywidget is not installed.
            OptionError: The errors of `save_html`.
        """
        return widget_of(html_of(self, **options), height)
