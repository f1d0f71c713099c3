"""Film of many frames through `explain_video`, as JSON: `python -m bench.films COUNT`.

The film is a camera that moves over a photo, in H.264 and in VP9. The results are read by OpenCV, and their left half, which shows the
frames, is compared with the frames that were encoded.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import cv2  # noqa: TID251 - as another reader than ours
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

import visattn
from bench.measuring import load
from visattn import data
from visattn.core.pipeline.inputs import prepare_with
from visattn.core.pipeline.preprocessing import Preprocessing

RATE = 30
SIZE = 16  # frames in a batch
CODECS = {"H.264": ("libx264", "mp4"), "VP9": ("libvpx-vp9", "webm")}
HEIGHT, WIDTH = 240, 320

Array = NDArray[np.uint8]


def main(count: int) -> dict[str, Any]:
    """Return for each codec seconds of the bare forward passes and of the whole, and what OpenCV reads."""
    model, how = load(), Preprocessing(resize="model", img_size=224)
    frames = scene(count)
    inputs = torch.cat([prepare_with([Image.fromarray(frame)], model, how).pixels for frame in frames])
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for codec, (encoder, ending) in CODECS.items():
            source, output = (Path(name, f"{what}.{ending}") for what in ("film", "maps"))
            write(source, frames, encoder)
            start = time.perf_counter()
            with torch.inference_mode():
                for part in torch.split(inputs, SIZE):
                    model(part)
            bare = time.perf_counter() - start
            start = time.perf_counter()
            made = visattn.explain_video(
                model, source, output, method="rollout", view="beside", resize="model", img_size=224, batch_size=SIZE
            )
            found[codec] = {"frames": made.frames, "bare": bare, "whole": time.perf_counter() - start, **seen(output, frames)}
    return found


def scene(count: int) -> list[Array]:
    """Return the frames: a camera moves over a photo and back."""
    photo = visattn.load_image(data.photo_path("coffee")).resize((2 * WIDTH, 2 * HEIGHT))
    shifts = [0.5 - 0.5 * np.cos(2 * np.pi * number / count) for number in range(count)]
    places = [(round(shift * WIDTH), round(shift * HEIGHT)) for shift in shifts]
    return [np.asarray(photo.crop((left, top, left + WIDTH, top + HEIGHT))) for left, top in places]


def write(path: Path, frames: list[Array], encoder: str) -> None:
    """Encode frames with colors of BT.709."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(encoder, rate=RATE, options={"crf": "18", "b": "0"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.codec_context.colorspace = stream.codec_context.color_range = 1
        for number, array in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(array, format="rgb24")
            frame = frame.reformat(format="yuv420p", dst_colorspace="ITU709", dst_color_range="MPEG")
            frame.pts, frame.time_base = number, Fraction(1, RATE)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def seen(path: Path, frames: list[Array]) -> dict[str, Any]:
    """Read a film with OpenCV; compare its left half with the frames."""
    capture = cv2.VideoCapture(str(path))
    rate, count, apart, size = capture.get(cv2.CAP_PROP_FPS), 0, 0.0, (0, 0)
    while (read := capture.read())[0]:
        picture = np.asarray(read[1])[..., ::-1]
        size = picture.shape[:2]
        if count < len(frames):
            apart += float(np.abs(picture[:HEIGHT, :WIDTH].astype(float) - frames[count]).mean())
        count += 1
    capture.release()
    return {"read": count, "rate": rate, "size": size, "levels": apart / max(count, 1)}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
