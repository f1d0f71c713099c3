"""Film that is written frame by frame, and is complete or absent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from visattn._support.checks import first_line, printable
from visattn._support.extras import need
from visattn._support.whole_files import building_file
from visattn.errors import OptionError, OutputError

CODECS = {".mp4": "libx264", ".webm": "libvpx-vp9"}
ANIMATIONS: dict[str, dict[str, Any]] = {
    ".webp": {"format": "WEBP", "quality": 85, "method": 4},
    ".gif": {"format": "GIF", "optimize": True},
}
_UNITS = {
    ".webp": (1, 1),
    ".gif": (10, 20),
}  # milliseconds in which durations are counted; the shortest one, as browsers slow down others
_OPTIONS = {"libx264": {"crf": "18", "preset": "medium"}, "libvpx-vp9": {"crf": "24", "b": "0", "cpu-used": "4", "row-mt": "1"}}
_TICKS = 90_000  # a second
_BT709, _LIMITED = 1, 1  # colors as FFmpeg numbers them: BT.709, from 16 to 235

Add = Callable[[Fraction, Image.Image], None]


def check_name(path: Path) -> None:
    """Check that films of this name can be written.

    Raises:
        OptionError: If its ending names no format.
        MissingExtra: If PyAV is needed and not installed.
    """
    ending = path.suffix.lower()
    if ending not in (*CODECS, *ANIMATIONS):
        raise OptionError(
            f"{printable(path.name)}: films are written as {', '.join((*CODECS, *ANIMATIONS))}. Choose one of these endings."
        )
    if ending in CODECS:
        need("av", "video", f"a {ending} film")


@contextmanager
def writing(path: Path, rate: Fraction) -> Iterator[Add]:
    """Write a film: at the end of the `with` block it is complete, and after an error there is none.

    Args:
        path: File to write; its ending chooses the format: H.264 in MP4, VP9 in WebM, animated WebP or GIF.
        rate: Frames a second that players are told.

    Yields:
        Function that adds a frame from a time on, in seconds. Frames of odd height or width get another row or column like the last one,
        as films have colors for pairs of pixels.

    Raises:
        OutputError: If it cannot be written.
        ResourceError: If the disk is full.
    """
    kind = _encoded if path.suffix.lower() in CODECS else _animated
    with building_file(path) as temporary, kind(temporary, path, rate) as add:
        yield add


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    """Turn errors of the libraries, which concern the size or the mode of a picture, into one line.

    Raises:
        OutputError: In place of them.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError):
            raise
        raise OutputError(
            f"{printable(str(path))}: cannot be encoded ({first_line(error)}). Choose another format or size."
        ) from error


@contextmanager
def _encoded(temporary: Path, path: Path, rate: Fraction) -> Iterator[Add]:
    import av

    ending = path.suffix.lower()
    codec = CODECS[ending]
    with av.open(temporary, "w", format=ending[1:]) as container:
        stream: Any = container.add_stream(codec, rate=rate.limit_denominator(_TICKS), options=_OPTIONS[codec])

        def add(at: Fraction, image: Image.Image) -> None:
            array = np.asarray(image.convert("RGB"))
            array = np.ascontiguousarray(np.pad(array, (*((0, side % 2) for side in array.shape[:2]), (0, 0)), mode="edge"))
            with _telling(path):
                if not stream.codec_context.is_open:
                    _describe(stream, array.shape[1], array.shape[0])
                frame = av.VideoFrame.from_ndarray(array, format="rgb24")
                frame = frame.reformat(format="yuv420p", dst_colorspace="ITU709", dst_color_range="MPEG")
                frame.pts, frame.time_base = round(at * _TICKS), Fraction(1, _TICKS)
                container.mux(stream.encode(frame))

        yield add
        with _telling(path):
            container.mux(stream.encode(None))


def _describe(stream: Any, width: int, height: int) -> None:  # noqa: ANN401 - of PyAV
    stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
    context = stream.codec_context
    context.time_base = Fraction(1, _TICKS)
    context.colorspace = context.color_primaries = context.color_trc = _BT709
    context.color_range = _LIMITED


@contextmanager
def _animated(temporary: Path, path: Path, rate: Fraction) -> Iterator[Add]:
    ending = path.suffix.lower()
    shown: list[tuple[Fraction, Image.Image]] = []
    yield lambda at, image: shown.append((at, image.convert("RGB")))
    times = [*(at for at, _ in shown), shown[-1][0] + 1 / rate]
    unit, least = _UNITS[ending]
    ticks = [round(at * 1000 / unit) for at in times]  # of the times, so that no error adds up
    durations = [max(least, unit * (end - start)) for start, end in pairwise(ticks)]
    first, *others = [image for _, image in shown]
    with _telling(path):
        first.save(temporary, save_all=True, append_images=others, duration=durations, loop=0, **ANIMATIONS[ending])
