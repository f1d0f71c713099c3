"""Pictures with provenance, which their PNG files store."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from visattn._support.tables import to_json
from visattn.provenance import Provenance


class Picture(Image.Image):
    """Pillow image whose PNG files store its provenance as JSON in the text chunk `visattn`.

    Copies keep the provenance. Crops, resized or converted images are other pictures and have none; files of other formats do not
    store it. `save` is overridden because Pillow writes only the text that is passed to it.

    Attributes:
        provenance: Record of how the picture was made.
    """

    provenance: Provenance

    def save(self, fp: Any, format: str | None = None, **params: Any) -> None:  # noqa: ANN401 - as Pillow names it
        """Save as Pillow does; see `PIL.Image.Image.save`."""
        if known := getattr(self, "provenance", None):  # pickling loses it
            params.setdefault("pnginfo", _chunk(known))  # only Pillow's PNG writer reads it
        super().save(fp, format, **params)

    def copy(self) -> Image.Image:
        """Return a copy with the same provenance."""
        return carried(super().copy(), self)


def carrying(picture: Image.Image, provenance: Provenance) -> Picture:
    """Return a picture with the same pixels and the given provenance."""
    made = Picture()
    vars(made).update(vars(picture))
    made.provenance = provenance
    return made


def carried(picture: Image.Image, source: Image.Image) -> Image.Image:
    """Return `picture` with the provenance of `source`, the picture that it was drawn on, if `source` has one."""
    known = getattr(source, "provenance", None)
    return picture if known is None else carrying(picture, known)


def to_png(picture: Image.Image, provenance: Provenance | None = None) -> bytes:
    """Encode the picture as PNG, with the given provenance (by default its own) as JSON in the text chunk `visattn`."""
    stream = io.BytesIO()
    options: dict[str, Any] = {} if provenance is None else {"pnginfo": _chunk(provenance)}
    picture.save(stream, "PNG", compress_level=3, **options)
    return stream.getvalue()


def _chunk(provenance: Provenance) -> PngInfo:
    info = PngInfo()
    info.add_text("visattn", to_json(provenance.to_dict()))
    return info
