"""Messages for unsupported image formats: the name of the format, and how to convert the file."""

from __future__ import annotations

import io
import struct

from PIL.TiffImagePlugin import (
    BITSPERSAMPLE,
    OPEN_INFO,
    PHOTOMETRIC_INTERPRETATION,
    SAMPLEFORMAT,
    ImageFileDirectory_v2,
)

from visattn._support.language import worded

_SIGNATURES = {  # (offset, bytes) -> name
    (4, b"ftypheic"): "HEIC",
    (4, b"ftypheix"): "HEIC",
    (4, b"ftypmif1"): "HEIF",
    (4, b"ftyphevc"): "HEIF",
    (0, b"\xff\x0a"): "JPEG XL",
    (0, b"\0\0\0\x0cJXL \r\n\x87\n"): "JPEG XL",
    (0, b"\0\0\0\x0cjP  \r\n\x87\n"): "JPEG 2000",
    (0, b"\xff\x4f\xff\x51"): "JPEG 2000",
    (0, b"8BPS"): "PSD (Photoshop)",
    (0, b"gimp xcf"): "XCF (GIMP)",
    (0, b"v/1\x01"): "OpenEXR",
    (0, b"#?RADIANCE"): "Radiance HDR",
    (0, b"qoif"): "QOI",
    (0, b"DDS "): "DDS",
    (0, b"\0\0\1\0"): "ICO",
    (0, b"SIMPLE  ="): "FITS",
    (0, b"P7\n"): "PAM",
    (0, b"FUJIFILMCCD-RAW"): "RAW (Fujifilm)",
    (128, b"DICM"): "DICOM",
}
_FILMS = ((4, b"ftyp"), (0, b"\x1aE\xdf\xa3"), (8, b"AVI LIST"), (0, b"\0\0\1\xba"))  # MP4 and MOV, MKV and WebM, AVI, MPEG
_TIFF = b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"
_FORMATS = {1: "unsigned", 2: "signed", 3: "floating-point", 5: "complex", 6: "complex"}
_COLORS = {0: "gray, white is zero", 1: "gray", 2: "RGB", 3: "palette", 5: "CMYK", 6: "YCbCr", 8: "CIELAB"}


def foreign(data: bytes) -> str | None:
    """Return a message about a file in an unsupported image format or variant of TIFF; None for all other files."""
    for (start, mark), name in _SIGNATURES.items():
        if data.startswith(mark, start):
            return f"{name} is not supported; convert it to PNG or JPEG"
    if any(data.startswith(mark, start) for start, mark in _FILMS) and not data.startswith(b"ftypavi", 4):
        return f"a film, not an image; {worded('use visattn.explain_video', 'run: visattn video FILE -o maps.mp4')}"
    if data[-18:-2] == b"TRUEVISION-XFILE":
        return "TGA is not supported; convert it to PNG or JPEG"
    text = data[:4096].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(b"<svg") or (text.startswith((b"<?xml", b"<!--", b"<!doctype svg")) and b"<svg" in text):
        return "SVG is a vector format without pixels; render it to PNG"
    if data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR" and 0 in struct.unpack(">II", data[16:24].ljust(8, b"\1")):
        return "its width or height is 0; export it again"
    return _tiff(data) if data.startswith(_TIFF) else None


def _tiff(data: bytes) -> str | None:
    """Return a message about the samples of a TIFF, if Pillow cannot open their type."""
    try:
        tags, stream = ImageFileDirectory_v2(data[: 16 if data[2:4] in (b"+\0", b"\0+") else 8]), io.BytesIO(data)
        stream.seek(tags.next)
        tags.load(stream)
        bits, photometric, kind = tags[BITSPERSAMPLE], tags[PHOTOMETRIC_INTERPRETATION], tags.get(SAMPLEFORMAT, (1,))
    except Exception:  # a damaged file can raise any error in the parser
        return None
    if any(key[:3] + key[4:5] == (data[:2], photometric, kind[:1], bits) for key in OPEN_INFO):
        return None
    size = f"{bits[0]}-bit" if len(bits) == 1 else f"{len(bits)} x {bits[0]}-bit"
    color = _COLORS.get(photometric, f"photometric {photometric}")
    order = {b"II": "little-endian", b"MM": "big-endian"}[data[:2]]
    what = f"TIFF of {size} {_FORMATS.get(kind[0], 'other')} {color}, {order}, is not supported"
    if len(bits) <= 4:  # channels that a PNG can have
        return f"{what}; convert it to 8- or 16-bit PNG"
    return f"{what}; read it into an array (height, width, {len(bits)}), and pass that to a model with {len(bits)} channels in Python"
