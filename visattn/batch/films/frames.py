"""Frames of a film, one after another, upright and in RGB."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps, ImageSequence

from visattn._support.checks import first_line, printable, unreadable
from visattn._support.extras import need
from visattn._support.files import regular
from visattn._support.language import option
from visattn._support.types import MAX_PIXELS, ColorProfile
from visattn.core.images.profiles import to_srgb
from visattn.errors import ImageError

_ANIMATED = ".gif", ".webp", ".png", ".apng"
_USUAL = Fraction(25)  # frames a second of a film that does not state them
_END = 2**16  # bytes at the end of a GIF, of which the last ones may be zeros
_HIGH = 720  # rows from which colors are those of BT.709 if a film does not state them
_HDR = 16, 18  # transfer functions as FFmpeg numbers them: PQ and HLG
_MILLISECONDS = 1000


class Frame(NamedTuple):
    """A frame of a film.

    Attributes:
        at: When it is shown, in seconds from the first frame.
        image: Its picture.
    """

    at: Fraction
    image: Image.Image


class Film:
    """Film that can be read several times.

    Attributes:
        path: Its file.
        rate: Frames a second, the mean if they vary.
        lost: Damaged parts that could not be decoded in the last reading.
        hdr: Whether its brightness is that of HDR, which is read as if it were not.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, max_pixels: int = MAX_PIXELS, color_profile: ColorProfile = "convert"
    ) -> None:
        """Open a film and read its rate.

        Args:
            path: A film in any format of FFmpeg, such as MP4 or WebM (needs the extra `video`), or an animation: GIF, WebP or APNG. It is
                always a file; no address of a network is opened.
            max_pixels: Largest allowed width x height of a frame.
            color_profile: `convert` the colors of an animation to sRGB, or `ignore` its profile.

        Raises:
            ImageError: If it is no film, has no pictures, or cannot be read.
            MissingExtra: If PyAV is not installed and the film is no animation.
        """
        self.path, self.lost, self.hdr = Path(path), 0, False
        self._most, self._color_profile = max_pixels, color_profile
        self._name = printable(str(self.path))
        try:
            regular(self.path).open("rb").close()
        except (OSError, ValueError) as error:  # ValueError: the path contains a null byte
            raise ImageError(unreadable(error, self.path)) from error
        self._animated = self.path.suffix.lower() in _ANIMATED
        if not self._animated:
            need("av", "video", "a film")
        self.rate = self._animation_rate() if self._animated else self._stream_rate()

    def frames(self) -> Iterator[Frame]:
        """Read the frames in the order in which they are shown; those that follow a damaged part are read too.

        Yields:
            The frames. All have the size of the first; others are scaled to it.

        Raises:
            ImageError: If no frame can be read, or frames are too large.
        """
        self.lost, size, start = 0, None, Fraction(0)
        for at, image in self._animation() if self._animated else self._stream():
            if size is None:
                size, start = image.size, at
                self._check_size(*size)
            yield Frame(at - start, image if image.size == size else image.resize(size, Image.Resampling.BICUBIC))
        if size is None:
            raise ImageError(f"{self._name}: no frame can be decoded. The film is empty or damaged.")

    def _check_size(self, width: int, height: int) -> None:
        if width * height > self._most:
            raise ImageError(
                f"{self._name}: frames of {width} x {height} pixels exceed the limit of {self._most / 1e6:g} million. Scale the film "
                f"down, or raise {option('max_pixels')}."
            )

    def _animation_rate(self) -> Fraction:
        times = [at for at, _ in self._animation()]
        shown = times[-1] - times[0] if times else Fraction(0)
        return (len(times) - 1) / shown if shown else _USUAL

    def _animation(self) -> Iterator[tuple[Fraction, Image.Image]]:
        shown = 0
        try:
            with Image.open(self.path, formats=("GIF", "WEBP", "PNG")) as animation:
                self._check_size(*animation.size)
                at = Fraction(0)
                for frame in ImageSequence.Iterator(animation):
                    yield at, self._on_white(frame)
                    shown += 1
                    at += Fraction(str(frame.info.get("duration") or _MILLISECONDS / _USUAL)) / _MILLISECONDS
                self.lost = int(animation.format == "GIF" and not _end_of(self.path).rstrip(b"\0").endswith(b";"))
        except ImageError:
            raise
        except Exception as error:  # Pillow raises many types for damaged frames
            if not shown:
                raise ImageError(f"{self._name}: is no animation, or damaged ({first_line(error)}).") from error
            self.lost = 1

    def _on_white(self, frame: Image.Image) -> Image.Image:
        shown = ImageOps.exif_transpose(frame).convert("RGBA")
        ground = Image.new("RGB", shown.size, "white")
        ground.paste(shown, mask=shown.getchannel("A"))
        profile = frame.info.get("icc_profile")
        return to_srgb(ground, profile, []) if profile and self._color_profile == "convert" else ground

    def _stream_rate(self) -> Fraction:
        with _Opened(self.path) as (_, stream):
            rate = stream.average_rate or stream.guessed_rate
        return Fraction(rate) if rate and rate > 0 else _USUAL

    def _stream(self) -> Iterator[tuple[Fraction, Image.Image]]:
        import av

        with _Opened(self.path) as (container, stream):
            stream.thread_type = "AUTO"
            at: Fraction | None = None
            packets = chain(container.demux(stream), (None,))  # an error ends `demux`; None asks for what the decoder still holds
            while True:
                try:
                    packet = next(packets)
                    decoded = stream.codec_context.decode(packet)
                except (StopIteration, EOFError):
                    return
                except av.error.FFmpegError:
                    self.lost += 1
                    continue
                for frame in decoded:
                    self._check_size(frame.width, frame.height)
                    self.hdr |= int(frame.color_trc) in _HDR
                    stated = None if frame.pts is None else Fraction(frame.pts) * Fraction(frame.time_base or stream.time_base)
                    if stated is None or (at is not None and stated <= at):
                        stated = Fraction(0) if at is None else at + 1 / self.rate
                    at = stated
                    try:
                        image = _upright(frame)
                    except (av.error.FFmpegError, ValueError):  # pixels of a kind that cannot be converted
                        self.lost += 1
                        continue
                    yield at, image


def _end_of(path: Path) -> bytes:
    with path.open("rb") as stream:
        stream.seek(max(path.stat().st_size - _END, 0))
        return stream.read(_END)


class _Opened:
    """Container of a film and its first stream of pictures that can be decoded, as a context."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> tuple[Any, Any]:
        import av

        name = printable(str(self._path))
        self._file = self._path.open("rb")  # not a name, which FFmpeg may take for an address or a pattern
        try:
            self._container = av.open(self._file, "r")
        except (av.error.FFmpegError, OSError, ValueError) as error:
            self._file.close()
            raise ImageError(f"{name}: is no film, or damaged or cut off ({first_line(error)}). Check the download.") from error
        streams = [stream for stream in self._container.streams.video if stream.codec_context is not None]
        films = [stream for stream in streams if not stream.disposition & av.stream.Disposition.attached_pic] or streams
        if not films:
            stated = bool(self._container.streams.video)
            self.__exit__()
            why = "its pictures have no decoder here; convert it to H.264" if stated else "has no pictures. Pass a film"
            raise ImageError(f"{name}: {why}.")
        return self._container, films[0]

    def __exit__(self, *_error: object) -> None:
        for stream in self._container.streams.video:
            if stream.codec_context is not None:
                stream.codec_context.flush_buffers()  # waits without the GIL for threads that may log; freeing waits with it
        self._container.close()
        self._file.close()


def _upright(frame: Any) -> Image.Image:  # noqa: ANN401 - of PyAV
    """Convert a frame to RGB, by the colors that it states, and turn it upright."""
    from av.video.reformatter import Colorspace

    stated = {6: 5, 10: 9}.get(int(frame.colorspace), int(frame.colorspace))  # names of one matrix
    usual = Colorspace.ITU709 if frame.height >= _HIGH else Colorspace.ITU601
    colors = Colorspace(stated) if stated in {int(one) for one in Colorspace} else usual
    rgb = frame.reformat(format="rgb24", src_colorspace=colors).to_ndarray()
    quarters = round(frame.rotation / 90) % 4
    return Image.fromarray(np.ascontiguousarray(np.rot90(rgb, quarters)))
