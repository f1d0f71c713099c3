"""Pictures that know how they were made, and tell it in every PNG they are saved to."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from visattn._support.tables import to_json
from visattn.provenance import Provenance


class Picture(Image.Image):
    """A Pillow image whose PNG files carry its provenance as JSON in the text chunk `visattn`.

    Pillow itself writes no text that it is not handed while saving. Copies keep the provenance; what is cropped, resized or converted
    is another picture and has none, and neither have files of other formats.

    Attributes:
        provenance: How the picture was made.
    """

    provenance: Provenance

    def save(self, fp: Any, format: str | None = None, **params: Any) -> None:  # noqa: ANN401 - as Pillow names it
        """Save as Pillow does; see `PIL.Image.Image.save`."""
        if known := getattr(self, "provenance", None):  # what was pickled has lost it
            params.setdefault("pnginfo", _chunk(known))  # read by the writer of PNG alone
        super().save(fp, format, **params)

    def copy(self) -> Image.Image:
        """Return a copy with the same provenance."""
        return carried(super().copy(), self)


def carrying(picture: Image.Image, provenance: Provenance) -> Picture:
    """Return the same pixels as a picture that knows how it was made."""
    made = Picture()
    vars(made).update(vars(picture))
    made.provenance = provenance
    return made


def carried(picture: Image.Image, source: Image.Image) -> Image.Image:
    """Return `picture` with the provenance of the one that it was drawn on, where that has one."""
    known = getattr(source, "provenance", None)
    return picture if known is None else carrying(picture, known)


def to_png(picture: Image.Image, provenance: Provenance | None = None) -> bytes:
    """Return the picture as PNG with its provenance, or this one, as JSON in the text chunk `visattn`."""
    stream = io.BytesIO()
    options: dict[str, Any] = {} if provenance is None else {"pnginfo": _chunk(provenance)}
    picture.save(stream, "PNG", compress_level=3, **options)
    return stream.getvalue()


def _chunk(provenance: Provenance) -> PngInfo:
    info = PngInfo()
    info.add_text("visattn", to_json(provenance.to_dict()))
    return info
