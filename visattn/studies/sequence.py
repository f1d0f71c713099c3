"""A study: a sequence of views, with its file and its page."""

from __future__ import annotations

import io
import os
import sys
import tempfile
import webbrowser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Unpack, overload

from visattn._support import html
from visattn._support.options import with_options
from visattn._support.reprs import brief
from visattn._support.typed import typed
from visattn._support.whole_files import check_output, write_whole
from visattn.errors import OptionError
from visattn.studies.attn_writing import attn_content
from visattn.studies.study_page import PageOptions, html_of
from visattn.studies.views import View
from visattn.viewer import framed, widget_of

SUFFIX = ".attn"
_SHOWN, _THUMBNAIL = 12, 160  # photos of a study in a notebook, and pixels of their longer side


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

        The file holds the photos, and stored activations can be inverted to images: share it only where you may share the photos.

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
        return write_whole(check_output(target, overwrite=overwrite), attn_content(self.views))

    @with_options(PageOptions)
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

    @with_options(PageOptions)
    def _repr_html_(self) -> str:
        """Return small photos with their titles, for notebooks; `show` has the page."""
        figures = []
        for view in self.views[:_SHOWN]:
            stream, small = io.BytesIO(), view.photo.copy()
            small.thumbnail((_THUMBNAIL, _THUMBNAIL))
            small.save(stream, "JPEG", quality=85)
            figures.append(html.figure(stream.getvalue(), [view.title, f"maps: {', '.join(view.maps) or 'none'}"]))
        more = f"<p>{len(self) - _SHOWN} more</p>" if len(self) > _SHOWN else ""
        return f'<div style="display: flex; flex-wrap: wrap">{"".join(figures)}</div>{more}'

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

    @with_options(PageOptions)
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
