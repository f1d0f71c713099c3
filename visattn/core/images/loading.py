"""Image loading: read a file, an array or a tensor as an upright RGB image. No other module decodes images.

A file must be regular and not empty. It is read first, and Pillow then decodes the bytes, in allowed formats only. The size is checked
in the header, before any pixel is decoded.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import IO, TYPE_CHECKING, Any, get_args

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from visattn._support.checks import between, one_of, printable
from visattn._support.faces import Later
from visattn._support.language import option, worded
from visattn._support.types import MAX_BYTES, MAX_PIXELS, ColorProfile
from visattn.errors import ImageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from visattn.core.images import foreign_formats as formats, gray, profiles
else:
    formats, gray, profiles = (Later(f"visattn.core.images.{name}") for name in ("foreign_formats", "gray", "profiles"))

__all__ = ["bounded", "read_bytes", "too_large"]

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "PPM")
LARGEST = 178_956_970  # Pillow itself refuses larger images
BACKGROUND = (255, 255, 255)  # color behind transparent pixels
_FACTS = "visattn image"
_TAGS = "tag_v2"  # what Pillow calls the tags of a TIFF, which state the format of gray samples
_PART, _MEGA = 2**24, 10**6  # bytes that are read at once, and in a megabyte
_PATIENCE, _SLOWEST = 20.0, 1000  # seconds after which a stream must have given so many bytes for each second
_SIGNATURES = (
    b"\x89PNG",
    b"\xff\xd8\xff",
    b"GIF8",
    b"II*\0",
    b"MM\0*",
    b"II+\0",
    b"MM\0+",
)  # first bytes of supported formats: if such a file does not open, it is damaged


@dataclass(frozen=True)
class ImageFacts:
    """Origin of an image.

    Attributes:
        name: File name, safe to print.
        sha256: Digest of the file, or of the pixels if there was no file.
        notes: Conversions made while reading it.
    """

    name: str
    sha256: str
    notes: tuple[str, ...] = ()


def load_file(
    path: str | os.PathLike[str],
    *,
    max_pixels: int | None = None,
    max_bytes: int | None = None,
    color_profile: ColorProfile = "convert",
) -> Image.Image:
    """Load a file as an upright RGB image; see `visattn.load_image`.

    Errors name those limits that were given.

    Raises:
        OptionError: If `max_pixels` is above `LARGEST`, or `color_profile` is unknown.
        ImageError: If the path is not a file or not an image, or is damaged, too large or unsupported. The message names the file, the
            cause and what to do.
    """
    return decode(read_bytes(Path(path), max_bytes), os.fspath(path), max_pixels=max_pixels, color_profile=color_profile)


def decode(
    data: bytes, name: str = "image", *, max_pixels: int | None = None, color_profile: ColorProfile = "convert"
) -> Image.Image:
    """Decode the content of an image file to an upright RGB image; see `visattn.load_image`.

    Args:
        data: Content of the file.
        name: Name for messages and facts.
        max_pixels: See `visattn.load_image`. An error names the limit if it was given.
        color_profile: See `visattn.load_image`.

    Returns:
        An RGB image with its facts.

    Raises:
        OptionError: If `max_pixels` is above `LARGEST`, or `color_profile` is unknown.
        ImageError: If the content is not an image, or is damaged, too large or unsupported.
    """
    between(_or(max_pixels, MAX_PIXELS), 1, LARGEST, "max_pixels")
    one_of(color_profile, get_args(ColorProfile), "color_profile")
    name = printable(name)
    if not data:
        raise ImageError(f"{name}: empty file; check the download or the copy")
    try:
        photo, notes = _decode(data, max_pixels, color_profile)
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from error
    except (Exception, MemoryError) as error:  # Pillow raises OSError, SyntaxError, ValueError, RuntimeError and more
        raise ImageError(f"{name}: {_cause(error, data, _or(max_pixels, MAX_PIXELS))}") from error
    return stating(photo, ImageFacts(Path(name).name, hashlib.sha256(data).hexdigest(), tuple(notes)))


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


def stating(photo: Image.Image, facts: ImageFacts) -> Image.Image:
    """Store the facts of an image in it, in place of all other `info`, and return it."""
    photo.info = {_FACTS: facts}
    return photo


def image_facts(photo: Image.Image) -> ImageFacts:
    """Return the origin of an image; if it was not loaded by `load_image`, a digest of its pixels."""
    known = photo.info.get(_FACTS)
    if isinstance(known, ImageFacts):
        return known
    return ImageFacts("image", hashlib.sha256(photo.tobytes()).hexdigest())


def as_photo(image: Any) -> Image.Image:  # noqa: ANN401 - arrays and tensors of any library
    """Convert a PIL image, an array or a tensor to an RGB image; the argument is not modified.

    An image with an ICC profile is converted to sRGB; delete `image.info["icc_profile"]` to keep its values. The dtype of an array decides
    its range: signed and unsigned integers are 0 to 255, floats 0 to 1, booleans black and white. Allowed shapes are `(H, W)`,
    `(H, W, 1|3|4)` and `(1|3|4, H, W)`.

    Raises:
        ImageError: If the shape is not allowed, or values are out of range.
    """
    if isinstance(image, Image.Image):
        return _noted(image, gray.stated(image) if hasattr(image, _TAGS) else None)
    array = _plain(image)
    if array.ndim == 3 and array.shape[2] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if array.size == 0 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))):
        fix = " Pass one photo, not a batch." if array.ndim == 4 else ""
        raise ImageError(f"a photo must be (H, W), (H, W, 3|4) or (3|4, H, W), got {array.shape}.{fix}")
    return _noted(Image.fromarray(np.ascontiguousarray(_to_uint8(array))), None)


def as_array(image: Any) -> NDArray[Any]:  # noqa: ANN401 - arrays and tensors of any library
    """Return the values of an array or a tensor of any shape, scaled to 0 to 255; the dtype decides the range, as in `as_photo`.

    Raises:
        ImageError: If values are out of range.
    """
    array = _plain(image)
    return _scaled(array) * 1.0 if array.size else array


def _plain(image: Any) -> NDArray[Any]:  # noqa: ANN401
    if hasattr(image, "detach"):
        image = image.detach().cpu()
        image = (image.float() if image.is_floating_point() else image).numpy()  # numpy has no bfloat16
    return np.asarray(image)


def _noted(image: Image.Image, samples: gray.Samples | None) -> Image.Image:
    notes: list[str] = []
    photo = _to_rgb(image, samples, notes)
    if notes:
        photo.info = {_FACTS: ImageFacts("image", hashlib.sha256(photo.tobytes()).hexdigest(), tuple(notes))}
    return photo


def _to_uint8(array: NDArray[Any]) -> NDArray[np.uint8]:
    return _scaled(array).round().astype(np.uint8)


def _scaled(array: NDArray[Any]) -> NDArray[Any]:
    """Scale values to 0 to 255."""
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind not in "uif":
        raise ImageError(f"a photo must hold real numbers, got {array.dtype}. Pass uint8 0 to 255 or floats 0 to 1.")
    low, high = float(array.min()), float(array.max())
    top = 255 if array.dtype.kind in "ui" else 1
    if not (np.isfinite(low) and np.isfinite(high)):
        raise ImageError(f"a photo must be finite, got {int((~np.isfinite(array)).sum())} NaN or infinite values.")
    if low < 0 or high > top:
        above = high if float(f"{high:g}") == top else f"{high:g}"  # all digits, if fewer look like the limit
        raise ImageError(
            f"a photo of {array.dtype} must lie in [0, {top}], got {low:g} to {above}. Scale its values to that range; of an image "
            "that was normalized for a model, pass the original."
        )
    return array * (255 // top)


def read_bytes(path: Path, max_bytes: int | None = None) -> bytes:
    """Read a regular file that has no more bytes than the limit.

    Raises:
        ImageError: If it has more, is no regular file, or cannot be read.
    """
    name = printable(str(path))
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            fix = worded("pass an image file in it", f"pass the image files in it, or run: visattn batch {name} -o maps")
            raise ImageError(f"{name}: is a directory; {fix}")
        if not stat.S_ISREG(mode):
            raise ImageError(f"{name}: not a regular file; pass an image file")
        with path.open("rb") as stream:
            return bounded(stream, max_bytes, name)
    except FileNotFoundError as error:
        cause = "link to a missing file" if path.is_symlink() else "no such file"
        raise ImageError(f"{name}: {cause}; check the path") from error
    except PermissionError as error:
        raise ImageError(f"{name}: permission denied; check the permissions of the file and its folder") from error
    except ImageError:
        raise
    except (OSError, ValueError) as error:  # ValueError: the path contains a null byte
        cause = (getattr(error, "strerror", None) or str(error)).lower()
        raise ImageError(f"{name}: cannot be read ({cause}); check the path") from error


def bounded(stream: IO[bytes], max_bytes: int | None, name: str) -> bytes:
    """Read a stream to its end, in parts, and no further than the limit.

    Raises:
        ImageError: If it has more bytes, or they come too slowly.
    """
    whole = _or(max_bytes, MAX_BYTES) + 1
    parts, left, began = [], whole, time.monotonic()
    read = getattr(stream, "read1", stream.read)  # of a connection: what has come
    while left and (part := read(min(left, _PART))):
        parts.append(part)
        left -= len(part)
        seconds = time.monotonic() - began
        if seconds > _PATIENCE and whole - left < seconds * _SLOWEST:
            raise ImageError(f"{name}: answers too slowly, below {_SLOWEST / 1000:g} kB a second; try again, or download it")
    if not left:
        refused = too_large(name, max_bytes)
        raise refused
    return b"".join(parts)


def too_large(name: str, max_bytes: int | None) -> ImageError:
    """Return the error for a file of more bytes than the limit, which is named if it was given."""
    most = _or(max_bytes, MAX_BYTES)
    limit = f"{most / 1e6:,.0f} MB" if most >= _MEGA else f"{most:,} bytes"
    return ImageError(f"{name}: has more than {limit}; check the file{_or_raise('max_bytes', max_bytes)}")


def _or_raise(name: str, limit: int | None) -> str:
    return "" if limit is None else f", or raise {option(name)}"


class _Quiet:
    """Leave out Pillow's warnings: of broken metadata, and of sizes, which are checked here.

    Several threads may decode at once. `catch_warnings` of each would restore the filters of another.
    """

    def __init__(self) -> None:
        self._lock, self._threads = Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._threads:
                self._caught = warnings.catch_warnings()
                self._caught.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL(\.|$)")
            self._threads += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads:
                self._caught.__exit__(None, None, None)


_QUIET = _Quiet()


def _decode(data: bytes, max_pixels: int | None, color_profile: ColorProfile) -> tuple[Image.Image, list[str]]:
    with _QUIET:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > (most := _or(max_pixels, MAX_PIXELS)):
            raise ImageError(
                f"{width} x {height} pixels exceed the limit of {most / 1e6:g} million; scale the image down"
                f"{_or_raise('max_pixels', max_pixels)}"
            )
        notes = []
        if (frames := getattr(image, "n_frames", 1)) > 1 and image.format != "MPO":
            notes.append(f"{frames} frames; the first is used")
        image.load()
        try:
            upright = ImageOps.exif_transpose(image)
        except Exception:  # broken EXIF data can raise anything; the pixels are intact
            upright = image
            notes.append("its EXIF data cannot be read; taken as upright")
        if color_profile == "ignore" and upright.info.pop("icc_profile", None):
            notes.append("its color profile is ignored")
        return _to_rgb(upright, gray.stated(image) if hasattr(image, _TAGS) else None, notes), notes


def _to_rgb(image: Image.Image, samples: gray.Samples | None, notes: list[str]) -> Image.Image:
    profile = image.info.get("icc_profile")
    if image.mode == "RGB" and "transparency" not in image.info and not profile:
        return image
    color, alpha = _split(image, samples, notes)
    if profile:
        color = profiles.to_srgb(color, profile, notes)
    if color.mode == "I;16":
        color = gray.narrow(color)
    photo = color.convert("RGB")
    photo.info.pop("icc_profile", None)  # it has been applied
    if alpha is None:
        return photo
    notes.append("transparent pixels shown on white")
    photo.putalpha(alpha)
    return Image.alpha_composite(Image.new("RGBA", photo.size, (*BACKGROUND, 255)), photo).convert("RGB")


def _split(image: Image.Image, samples: gray.Samples | None, notes: list[str]) -> tuple[Image.Image, Image.Image | None]:
    """Split an image into its colors, with wide gray as `I;16`, and its alpha channel or None."""
    clear = image.info.get("transparency")
    if image.mode[0] in "ILF" and gray.is_wide(image, samples):
        alpha = None if clear is None else Image.fromarray((np.asarray(image) != clear).astype(np.uint8) * 255)
        return gray.spread(image, samples, notes), alpha
    if clear is None and image.mode not in ("LA", "La", "PA", "RGBA", "RGBa"):
        return image, None
    mode = "LA" if image.mode in ("1", "L", "LA", "La") else "RGBA"
    *_, alpha = (whole := image.convert(mode)).split()
    return whole.convert(mode[:-1]), alpha


def _has_signature(data: bytes) -> bool:
    """Check for the first bytes of a supported format; sound begins as WebP, and text may begin as BMP."""
    if data.startswith(b"RIFF"):
        return b"WEBP".startswith(data[8:12])
    return data.startswith(_SIGNATURES) or (data.startswith(b"BM") and data[6:10] == bytes(4))


def _cause(error: BaseException, data: bytes, max_pixels: int) -> str:
    text = str(error).lower()
    if isinstance(error, MemoryError):
        return "out of memory while decoding; scale the image down"
    if isinstance(error, Image.DecompressionBombError):  # Pillow's own limit; the size is only in the message
        pixels = next((word.strip("(") for word in str(error).split() if word.strip("(").isdigit()), "too many")
        return f"{pixels} pixels exceed the limit of {max_pixels / 1e6:g} million; scale the image down"
    unknown = isinstance(error, UnidentifiedImageError) or (data.startswith(b"BM") and not _has_signature(data))
    if unknown and (cause := formats.foreign(data)):
        return cause
    if unknown and _has_signature(data):
        return "truncated (image data ends early) or damaged; download or copy it again"
    if unknown:
        words = data[:64].decode("utf-8", "ignore").split()
        text_like = bool(words) and "".join(words).isprintable()
        start = " ".join(words)[:24]
        found = f"starts with '{start}'" if text_like else "unknown format"
        return f"not an image ({found}); supported formats are {', '.join(FORMATS)}"
    short = data[:4] == b"RIFF" and int.from_bytes(data[4:8], "little") + 8 > len(
        data
    )  # the header of WebP states the length of the file
    if short or "truncated" in text or "broken data stream" in text or "incomplete" in text or "eof" in text:
        return "truncated (image data ends early); download or copy it again"
    if "conversion" in text and "not supported" in text:
        return f"unsupported color mode ({error}); convert it to RGB"
    return (
        f"damaged or unsupported image ({printable(str(error)) or type(error).__name__}); open it in an editor and save it again"
    )
