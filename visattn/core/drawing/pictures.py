"""Pictures with provenance, which their PNG files store."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngInfo

from visattn._support.checks import printable
from visattn._support.tables import to_json
from visattn.core.provenance import Provenance
from visattn.errors import OptionError

__all__ = ["Picture", "carrying", "to_png"]

_KEY = "visattn"
_SMALL = 300 * 300  # pixels
_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}


class Picture(Image.Image):
    """Pillow image whose PNG files store its provenance as JSON in the text chunk `visattn`.

    JPEG and WebP files store it as the image description of their EXIF data. Copies keep the provenance. Crops, resized or converted
    images are other pictures and have only its text, in `info["visattn"]`. `save` is overridden because Pillow writes only what is passed
    to it.

    Attributes:
        provenance: Record of how the picture was made.
    """

    provenance: Provenance

    @property
    def info(self) -> dict[Any, Any]:
        """Pillow's dictionary of facts; `visattn` holds the provenance as JSON."""
        facts: dict[Any, Any] = self.__dict__["info"]
        if _KEY not in facts and (known := self.__dict__.get("provenance")):  # pickling loses it
            facts[_KEY] = to_json(known.to_dict())
        return facts

    @info.setter
    def info(self, facts: dict[Any, Any]) -> None:
        self.__dict__["info"] = facts

    def save(self, fp: Any, format: str | None = None, **params: Any) -> None:  # noqa: ANN401 - as Pillow names it
        """Save as Pillow does; see `PIL.Image.Image.save`.

        Raises:
            OptionError: If the picture is transparent and the format is JPEG.
        """
        kind = format or _FORMATS.get(Path(str(fp)).suffix.lower())
        check_transparency(kind, transparent=self.mode == "RGBA")
        if text := self.info.get(_KEY):
            params.setdefault("pnginfo", _chunk(text))  # only Pillow's PNG writer reads it
            if kind in ("JPEG", "WEBP"):
                params.setdefault("exif", _exif(text))
        super().save(fp, format, **params)

    def _repr_png_(self) -> bytes | None:
        """Return a small picture as PNG; a notebook stores what it is offered, so there is one of both."""
        return None if self._is_large() else to_png(self)

    def _repr_jpeg_(self) -> bytes | None:
        """Return a large picture as JPEG."""
        return encoded(self, "JPEG") if self._is_large() else None

    def _is_large(self) -> bool:
        return self.mode == "RGB" and self.width * self.height > _SMALL

    def copy(self) -> Image.Image:
        """Return a copy with the same provenance."""
        return carried(super().copy(), self)


def carrying(picture: Image.Image, provenance: Provenance) -> Picture:
    """Return a picture with the same pixels and the given provenance."""
    made = Picture()
    vars(made).update(vars(picture))
    made.info = {key: value for key, value in vars(made)["info"].items() if key != _KEY}
    made.provenance = provenance
    return made


def carried(picture: Image.Image, source: Image.Image) -> Image.Image:
    """Return `picture` with the provenance of `source`, the picture that it was drawn on, if `source` has one."""
    known = getattr(source, "provenance", None)
    return picture if known is None else carrying(picture, known)


def to_png(picture: Image.Image, provenance: Provenance | None = None) -> bytes:
    """Encode the picture as PNG, with the given provenance (by default its own) as JSON in the text chunk `visattn`."""
    stream = io.BytesIO()
    options: dict[str, Any] = {} if provenance is None else {"pnginfo": _chunk(to_json(provenance.to_dict()))}
    picture.save(stream, "PNG", compress_level=3, **options)
    return stream.getvalue()


def format_of(path: Path) -> str:
    """Return the format that the ending of a file name stands for.

    Raises:
        OptionError: If it stands for none of PNG, JPEG and WebP.
    """
    if kind := _FORMATS.get(path.suffix.lower()):
        return kind
    raise OptionError(
        f"{printable(path.name)}: pictures are written as {', '.join(_FORMATS)}. Choose a name with one of these endings."
    )


def check_transparency(kind: str | None, *, transparent: bool) -> None:
    """Check that a format can hold a picture.

    Raises:
        OptionError: If the picture is transparent and the format is JPEG.
    """
    if transparent and kind in ("JPEG", "JPG"):
        raise OptionError("JPEG holds no transparency. Choose a name that ends in .png or .webp, or leave transparent out.")


def encoded(picture: Image.Image, kind: str) -> bytes:
    """Encode a picture as `PNG`, `JPEG` or `WEBP`, with its provenance."""
    if kind == "PNG":
        return to_png(picture)
    stream = io.BytesIO()
    options: dict[str, Any] = {"quality": 95, "subsampling": 0} if kind == "JPEG" else {"quality": 90}
    picture.save(stream, kind, **options)
    return stream.getvalue()


def _chunk(text: str) -> PngInfo:
    info = PngInfo()
    info.add_text(_KEY, text)
    return info


def _exif(text: str) -> Image.Exif:
    facts = Image.Exif()
    facts[ExifTags.Base.ImageDescription] = text.encode("ascii", "backslashreplace").decode()
    return facts
