"""Images by name: files, URLs, the shipped photos (`photo:chelsea`) and generated scenes (`scene:7`)."""

from __future__ import annotations

import http.client
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from PIL import Image

from visattn._support.checks import first_line, printable, suggest
from visattn._support.files import exists
from visattn._support.typed import typed
from visattn._support.types import MAX_BYTES, MAX_PIXELS, ColorProfile
from visattn.core.images import as_photo, decode, load_file
from visattn.core.images.loading import bounded
from visattn.core.offers import offered, offers
from visattn.core.shipped import PHOTOS, photo_path
from visattn.errors import ImageError

__all__ = ["as_file", "as_image", "load_image", "named"]

_URL = re.compile(r"(https?):/+(?=[^/])", re.IGNORECASE)  # `Path` folds two slashes into one
_SECONDS = 10  # timeout for the first answer, and for each part after it


@typed()
def load_image(
    source: str | os.PathLike[str] | bytes,
    *,
    max_pixels: int = MAX_PIXELS,
    max_bytes: int = MAX_BYTES,
    color_profile: ColorProfile = "convert",
) -> Image.Image:
    """Load a photo as an upright RGB image.

    EXIF orientation is applied. Colors are converted to sRGB with the file's ICC profile. Transparent images are placed on white. Unsigned
    gray of up to 16 bits is scaled by the range of its bits, other wide gray by its own minimum and maximum. Of an animation, the first
    frame is used. All of these except the orientation are noted in `image_facts(photo).notes`.

    Args:
        source: A path; the content of a file; the URL of an image; `photo:NAME` for a shipped photo (`visattn.data.PHOTOS`); or
            `scene:N` for scene N of `visattn.data.scenes` with seed 0, 224 pixels wide and high. A name that exists as a file is that file.
        max_pixels: Largest allowed width x height of a file, checked before decoding; at most `visattn.images.LARGEST`.
        max_bytes: Largest allowed size of a file or a download in bytes; no more is read.
        color_profile: `convert` to sRGB, or `ignore` the profile, as timm's and torchvision's loaders do.

    Returns:
        An RGB image. Its facts (see `visattn.images.image_facts`) are stored in its `info` and kept by copies.

    Raises:
        OptionError: If `max_pixels` is above `LARGEST`, or `color_profile` is unknown.
        ImageError: If the source is not a file or not an image, or is damaged, too large, unsupported or out of reach. The message names
            the source, the cause and what to do.
    """
    return _loaded(source, max_bytes, max_pixels=max_pixels, color_profile=color_profile)


def _loaded(source: str | os.PathLike[str] | bytes, max_bytes: int | None = None, **options: Any) -> Image.Image:  # noqa: ANN401
    """Load a photo, see `load_image`; a limit that is not given is one that the caller cannot raise."""
    if isinstance(source, bytes):
        return decode(source, **options)
    name = os.fspath(source)
    if named(name):
        scheme, _, rest = name.partition(":")
        return load_file(_photo(rest), **options) if scheme == "photo" else offered("image source", scheme)(rest)
    if _is_url(name):
        address = _URL.sub(r"\1://", name)
        return decode(_download(address, max_bytes), name=address, **options)
    return load_file(name, max_bytes=max_bytes, **options)


def as_image(image: Any) -> Image.Image:  # noqa: ANN401 - a source, or an array or a tensor of any library
    """Return the image that a source names, see `load_image`; or convert an image, an array or a tensor with `as_photo`.

    Raises:
        ImageError: The errors of `load_image` and `as_photo`.
    """
    return _loaded(image) if isinstance(image, (str, os.PathLike, bytes)) else as_photo(image)


def named(source: str) -> bool:
    """Check whether a source is `photo:NAME`, `scene:N` or the like, which need no file; what exists as a file is that file."""
    return source.partition(":")[0] in ("photo", *offers("image source")) and ":" in source and not exists(Path(source))


def _is_url(source: str) -> bool:
    return _URL.match(source) is not None and not exists(Path(source))


def as_file(source: str | os.PathLike[str]) -> Path:
    """Return the file whose name the results of a source get: `chelsea.png` for `photo:chelsea`; a file itself."""
    name = os.fspath(source)
    if named(name):
        return Path(name.removeprefix("photo:").replace(":", "") + ".png")
    if _is_url(name):
        return Path(urllib.parse.unquote(urllib.parse.urlsplit(_URL.sub(r"\1://", name)).path).rpartition("/")[2] or "image")
    return Path(name)


def _photo(name: str) -> Path:
    if name not in PHOTOS:
        near = suggest(name, PHOTOS, 1)
        hint = f"did you mean photo:{near[0]}?" if near else "choose one of these"
        raise ImageError(f"photo:{printable(name)}: there is no such photo, only {', '.join(PHOTOS)}; {hint}")
    return photo_path(name)


def _download(address: str, max_bytes: int | None) -> bytes:
    shown = printable(address)
    try:
        with urllib.request.urlopen(address, timeout=_SECONDS) as answer:
            return bounded(answer, max_bytes, shown)
    except ImageError:
        raise
    except urllib.error.HTTPError as error:
        error.close()
        raise ImageError(f"{shown}: the server answers {error.code} {error.reason}; {_fix(error.code)}") from error
    except (http.client.InvalidURL, ValueError) as error:
        raise ImageError(f"{shown}: is no valid address ({first_line(error)}); correct it") from error
    except (OSError, http.client.HTTPException) as error:
        cause = printable(str(getattr(error, "reason", error))) or type(error).__name__
        raise ImageError(f"{shown}: cannot be reached ({cause}); download the image and pass its file") from error


def _fix(code: int) -> str:
    """Return what to do after a server refused with a code of HTTP."""
    if code in (404, 410):
        return "check the address"
    return "try again later" if code == 429 or code >= 500 else "download the image and pass its file"
