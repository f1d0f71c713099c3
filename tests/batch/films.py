"""Films for tests, written by PyAV itself, and read by OpenCV."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import cv2  # noqa: TID251 - as another reader than ours
import numpy as np
from numpy.typing import NDArray

OPENCV = tuple(map(int, cv2.__version__.split(".")[:2]))

Array = NDArray[np.uint8]


def scene(number: int, height: int = 64, width: int = 96) -> Array:
    """Return a frame with flat areas, whose colors survive an encoder, and a square that moves."""
    frame = np.zeros((height, width, 3), np.uint8)
    frame[: height // 2, : width // 2] = (200, 40, 40)
    frame[: height // 2, width // 2 :] = (40, 180, 60)
    frame[height // 2 :, : width // 2] = (40, 60, 200)
    frame[height // 2 :, width // 2 :] = (128, 128, 128)
    left = 4 * number % (width - 16)
    frame[8:24, left : left + 16] = 255
    return frame


def write(
    path: Path,
    frames: Sequence[Array],
    *,
    codec: str = "libx264",
    rate: int = 10,
    times: Sequence[Fraction] = (),
    colors: int = 1,
    brightness: int = 1,
) -> Path:
    """Write a film at constant rate or at given times, in colors that FFmpeg numbers so: BT.709, unless others are given."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=rate, options={"crf": "10"})
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        stream.codec_context.colorspace, stream.codec_context.color_trc = colors, brightness
        stream.codec_context.color_range = 1
        stream.codec_context.gop_size = 5
        for number, array in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(array, format="rgb24")
            frame = frame.reformat(format="yuv420p", dst_colorspace=colors, dst_color_range="MPEG")
            at = times[number] if times else Fraction(number, rate)
            frame.pts, frame.time_base = round(at * 1000), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def rotated(path: Path, source: Path) -> Path:
    """Copy an MP4 file with a display matrix that turns it by a quarter, as phones write it."""
    data = bytearray(source.read_bytes())
    start = data.index(b"tkhd") + 4 + 40  # version 0: the matrix follows 40 bytes
    quarter = (0, 1 << 16, 0, -(1 << 16) & 0xFFFFFFFF, 0, 0, 0, 0, 1 << 30)
    data[start : start + 36] = b"".join(value.to_bytes(4, "big") for value in quarter)
    path.write_bytes(data)
    return path


def read(path: Path) -> tuple[list[Array], float]:
    """Read a film with OpenCV: its frames in RGB, and its rate."""
    capture = cv2.VideoCapture(str(path))
    frames: list[Array] = []
    while True:
        good, frame = capture.read()
        if not good:
            break
        frames.append(np.asarray(frame)[..., ::-1])
    rate = capture.get(cv2.CAP_PROP_FPS)
    capture.release()
    return frames, rate
