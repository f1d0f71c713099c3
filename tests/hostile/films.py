"""Films that are odd or damaged, outputs of every kind, and signals at any moment, for `visattn video`."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import random
import signal
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image, ImageSequence

from tests.hostile.driver import Case, Outcome
from tests.hostile.photos import place_of

COLORS = ((200, 40, 40), (40, 200, 40), (40, 40, 200), (200, 200, 40), (200, 40, 200))
RUN = ["video", "--model", "own.py:make", "--img-size", "32", "--opacity", "0", "-q"]
NEAR = 48  # levels by which a codec and a palette may change a flat color


@dataclass(frozen=True)
class Film:
    """A film.

    Attributes:
        name: Name of its file.
        content: Its bytes.
        size: Height and width of its upright frames, if the command must draw them.
        colors: Colors of its frames, if the command must draw them.
    """

    name: str
    content: bytes
    size: tuple[int, int] = (0, 0)
    colors: tuple[tuple[int, int, int], ...] = ()


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield `count` cases."""
    for number in range(count):
        dice = random.Random(f"{seed} film {number}")
        kind = dice.choice([_input, _input, _input, _stopped, _output])
        yield kind(f"film {seed}.{number}", dice)


def _input(name: str, dice: random.Random) -> Case:
    make = dice.choice(_FILMS)
    film, output = make(dice), dice.choice(["o.gif", "o.gif", "o.webp", "o.mp4", "o.webm"])
    more = [
        word
        for words in (["--rate", "2"], ["--smooth", "0.5"], ["--batch-size", "3"], ["--view", "beside"])
        if dice.random() < 0.08
        for word in words
    ]
    plain = not more

    def prepare(folder: Path) -> list[str]:
        place_of(folder)
        (folder / film.name).write_bytes(film.content)
        return [*RUN, film.name, "-o", output, *more]

    def check(folder: Path, found: Outcome) -> list[str]:
        wrong = [f"a valid film is refused ({found.code})"] if film.colors and found.code else []
        wrong += [f"a failed command left {output}"] if found.code and os.path.lexists(folder / output) else []
        return wrong if found.code else wrong + _shown(folder / output, film if plain else Film("", b""))

    return Case(f"{name} {make.__name__.strip('_')}", prepare, (output,), prints=True, check=check, clear=True)


def _stopped(name: str, dice: random.Random) -> Case:
    """Send a signal at a random moment."""
    output, number = (
        dice.choice(["o.gif", "o.webp", "o.mp4", "o.webm"]),
        dice.choice([signal.SIGTERM, signal.SIGHUP, signal.SIGTERM, signal.SIGINT]),
    )
    before = dice.random() < 0.3
    delay = dice.random() ** 2 * 2

    def prepare(folder: Path) -> list[str]:
        place_of(folder)
        (folder / "film.mp4").write_bytes(_encoded("mp4", "libx264", "yuv420p", (32, 48), 90))
        if before:
            (folder / output).write_bytes(b"mine\n")
        return [*RUN, "film.mp4", "-o", output, *(["--overwrite"] if before else [])]

    def check(folder: Path, found: Outcome) -> list[str]:
        path = folder / output
        if found.code == 0:
            return _shown(path, Film("", b""))
        if before and path.is_file() and path.read_bytes() == b"mine\n":
            return []
        return _shown(path, Film("", b"")) if os.path.lexists(path) else [f"{output} is gone"] if before else []

    return Case(
        f"{name} stopped {signal.Signals(number).name}", prepare, (output,), prints=True, check=check, stop=(number, delay)
    )


def _output(name: str, dice: random.Random) -> Case:
    """Name a device, a pipe, a link, a folder or an input as the output. Device files are the case's own."""
    output = dice.choice(_OUTPUTS)
    replace = dice.random() < 0.6

    def prepare(folder: Path) -> list[str]:
        outside = place_of(folder)
        (folder / "film.gif").write_bytes(_animation("GIF"))
        _special(folder, outside)
        return [*RUN, "film.gif", "-o", output, *(["--overwrite"] if replace else [])]

    free = (
        output
        if output
        in (
            "o.gif",
            "sub/new/o.gif",
            "link.gif",
            "dangling.gif",
            "hard.gif",
            ".gif",
            "o.GIF",
            "linked/o.gif",
            "inner/o.gif",
            "a\x1b.gif",
            "a\n.gif",
        )
        else "o.gif"
    )
    return Case(
        f"{name} output {output[:20]}",
        prepare,
        (free, "sub", "linked"),
        prints=True,
        clear=True,
    )


_OUTPUTS = (
    *(
        "null.gif",
        "full.gif",
        "zero.mp4",
        "full/x.gif",
        "null.gif/x.gif",
        "pipe.gif",
        "pipe/x.gif",
        "socket.gif",
        "link.gif",
        "dangling.gif",
    ),
    *(
        "into/o.gif",
        "itself.gif",
        "folder.gif",
        "film.gif",
        "own.py",
        "sub/new/o.gif",
        "o.xyz",
        "o",
        "-",
        ".gif",
        "o.GIF",
        "hard.gif",
    ),
    *(
        "x" * 300 + ".gif",
        "a\x1b.gif",
        "a\n.gif",
        "",
        ".",
        "..",
        "../outside/victim",
        "a\x1b.gif",
        "a\n.gif",
        "linked/o.gif",
        "o.gif/",
        "inner/o.gif",
        "/proc/self/x.gif",
    ),
)


def _special(folder: Path, outside: Path) -> None:
    for name, number in {"null.gif": 3, "full.gif": 7, "full": 7, "zero.mp4": 5}.items():
        with contextlib.suppress(PermissionError):
            os.mknod(folder / name, 0o666 | stat.S_IFCHR, os.makedev(1, number))
    os.mkfifo(folder / "pipe.gif")
    os.mkfifo(folder / "pipe")
    os.mknod(folder / "socket.gif", 0o666 | stat.S_IFSOCK)
    (folder / "link.gif").symlink_to(outside / "victim")
    (folder / "dangling.gif").symlink_to(outside / "new.gif")
    (folder / "into").symlink_to(outside / "nothing")
    (folder / "itself.gif").symlink_to("itself.gif")
    os.link(outside / "victim", folder / "hard.gif")
    (folder / "folder.gif").mkdir()
    (folder / "inner").mkdir()


# what a film must look like


def _shown(path: Path, film: Film) -> list[str]:
    """Read a result, and compare it with the film that was drawn."""
    try:
        frames = _frames(path)
    except (OSError, ValueError, av.error.FFmpegError) as error:
        return [f"{path.name} cannot be read ({error})"]
    if not frames:
        return [f"{path.name} has no frames"]
    if not film.colors:
        return []
    height, width = film.size
    even = path.suffix in (".mp4", ".webm")
    size = (height + (height % 2 if even else 0), width + (width % 2 if even else 0))
    wrong = [] if frames[0].shape[:2] == size else [f"{path.name} is {frames[0].shape[:2]}, not {size}"]
    means = [frame[: height or 1, : width or 1].reshape(-1, 3).mean(0) for frame in frames]
    for number, color in enumerate(film.colors):
        if not any(np.abs(mean - color).max() < NEAR for mean in means):
            wrong.append(f"{path.name} does not show frame {number}")
    return (
        wrong
        + [
            f"{path.name} shows another color"
            for mean in means
            if not any(np.abs(mean - color).max() < NEAR for color in film.colors)
        ][:1]
    )


def _frames(path: Path) -> list[Any]:
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError("no file")
    if path.suffix in (".gif", ".webp"):
        with Image.open(path) as animation:
            return [np.asarray(frame.convert("RGB"), dtype=float) for frame in ImageSequence.Iterator(animation)]
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24").astype(float) for frame in container.decode(video=0)]


# films


def _flat(number: int, size: tuple[int, int]) -> Any:
    return np.full((*size, 3), COLORS[number % len(COLORS)], dtype=np.uint8)


def _stream(container: Any, codec: str, pixels: str, size: tuple[int, int], **options: str) -> Any:
    stream = container.add_stream(codec, rate=10)
    stream.height, stream.width, stream.pix_fmt = *size, pixels
    stream.codec_context.thread_count = 1
    stream.options = options
    return stream


def _fill(container: Any, stream: Any, size: tuple[int, int], count: int, first: int = 0) -> None:
    for number in range(count):
        frame = av.VideoFrame.from_ndarray(_flat(number + first, size), format="rgb24")
        frame.pts = number
        container.mux(stream.encode(frame))
    container.mux(stream.encode())


@functools.cache
def _encoded(kind: str, codec: str, pixels: str, size: tuple[int, int] = (32, 48), count: int = 4, before: str = "") -> bytes:
    """Return a film, with another stream before its pictures."""
    stream = io.BytesIO()
    with av.open(stream, "w", format=kind) as container:
        sound = container.add_stream("aac", rate=8000) if before in ("sound", "only sound") else None
        cover = (
            _stream(
                container, "mjpeg" if before == "cover" else "mpeg4", "yuvj420p" if before == "cover" else "yuv420p", (16, 16)
            )
            if before in ("cover", "pictures")
            else None
        )
        if before == "attachment":
            container.add_attachment("x.png", "image/png", _flat(0, (4, 4)).tobytes())
        main = None if before == "only sound" else _stream(container, codec, pixels, size)
        if sound is not None:
            noise = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
            noise.rate, noise.pts = 8000, 0
            container.mux(sound.encode(noise))
            container.mux(sound.encode(None))
        if cover is not None:
            if before == "cover":
                with contextlib.suppress(AttributeError, ValueError):
                    cover.disposition = av.stream.Disposition.attached_pic
            _fill(container, cover, (16, 16), 1, 4)
        if main is not None:
            _fill(container, main, size, count)
    return stream.getvalue()


@functools.cache
def _animation(kind: str, size: tuple[int, int] = (32, 48), count: int = 4, duration: int = 100) -> bytes:
    frames = [Image.fromarray(_flat(number, size)) for number in range(count)]
    stream = io.BytesIO()
    options = {"lossless": True} if kind == "WEBP" else {}
    frames[0].save(stream, kind, save_all=True, append_images=frames[1:], duration=duration, loop=0, **options)
    return stream.getvalue()


_PLAIN = (
    ("film.mp4", "mp4", "libx264", "yuv420p"),
    ("film.webm", "webm", "libvpx-vp9", "yuv420p"),
    ("film.mkv", "matroska", "ffv1", "yuv420p"),
    ("film.avi", "avi", "mpeg4", "yuv420p"),
    ("film.ts", "mpegts", "libx264", "yuv420p"),
    ("film.mov", "mov", "prores_ks", "yuv422p10le"),
    ("film.mkv", "matroska", "libx264", "yuv420p10le"),
    ("film.mkv", "matroska", "ffv1", "gray16le"),
    ("film.mov", "mov", "qtrle", "argb"),
    ("film.mov", "mov", "png", "rgba"),
    ("film.webm", "webm", "libvpx-vp9", "yuva420p"),
    ("film.avi", "avi", "huffyuv", "rgb24"),
    ("film.avi", "avi", "rawvideo", "bgr24"),
    ("film", "mp4", "libx264", "yuv420p"),
    ("film.txt", "mp4", "libx264", "yuv444p"),
)


def _usual(dice: random.Random) -> Film:
    name, kind, codec, pixels = dice.choice(_PLAIN)
    size = (32, 48)
    colors = () if pixels.startswith("gray") else COLORS[:4]
    return Film(name, _encoded(kind, codec, pixels, size), size, colors)


def _odd_sizes(dice: random.Random) -> Film:
    size = dice.choice([(1, 1), (1, 64), (64, 2), (17, 33), (3, 2), (2, 3)])
    return Film("film.mkv", _encoded("matroska", "ffv1", "yuv444p", size), size, COLORS[:4])


def _animations(dice: random.Random) -> Film:
    kind, size = dice.choice(["GIF", "WEBP", "PNG"]), dice.choice([(32, 48), (1, 1), (7, 5)])
    name = dice.choice([f"film.{kind.lower()}", f"film.{'apng' if kind == 'PNG' else kind.lower()}", "film.gif"])
    return Film(name, _animation(kind, size, duration=dice.choice([100, 20, 1000, 60_000])), size, COLORS[:4])


def _other_streams(dice: random.Random) -> Film:
    """Put another stream before the pictures: sound, an attachment, a cover."""
    before = dice.choice(["sound", "attachment", "cover"])
    kind = "matroska" if before == "attachment" else "mp4"
    content = _encoded(kind, "libx264", "yuv420p", before=before)
    return Film("film.mkv" if kind == "matroska" else "film.mp4", content, (32, 48), () if before == "cover" else COLORS[:4])


def _without_a_decoder(dice: random.Random) -> Film:
    """State a codec that does not exist, for the first of two streams, or for the only one."""
    code = dice.choice([b"zzzz", b"\0\0\0\0", b"\xff\xff\xff\xff"])
    if dice.random() < 0.4:
        return Film("film.mp4", _encoded("mp4", "libx264", "yuv420p").replace(b"avc1\0", code + b"\0"))
    content = _encoded("mp4", "libx264", "yuv420p", before="pictures")
    content = content.replace(b"mp4v\0", code + b"\0", 1).replace(b"esds", b"free", 1)  # the second names the codec too
    return Film("film.mp4", content, (32, 48), COLORS[:4])


def _only_sound(dice: random.Random) -> Film:
    return Film("film.mp4", _encoded("mp4", "libx264", "yuv420p", before="only sound"))


def _turned(dice: random.Random) -> Film:
    """Let the file state that its frames are turned, or mapped by an odd matrix."""
    content = _encoded("mp4", "libx264", "yuv420p")
    start = content.index(b"tkhd") + 4 + 4 + 20 + 16
    one, two = 1 << 16, 1 << 30
    quarter = [0, one, 0, -one, 0, 0, 0, 0, two]
    matrix = dice.choice(
        [
            quarter,
            [-one, 0, 0, 0, -one, 0, 0, 0, two],
            [0] * 9,
            [1 << 30] * 9,
            [-(1 << 31)] * 9,
            [one, one, 0, -one, one, 0, 0, 0, two],
        ]
    )
    content = content[:start] + struct.pack(">9i", *matrix) + content[start + 36 :]
    return Film(
        "film.mp4",
        content,
        (48, 32) if matrix == quarter else (32, 48),
        COLORS[:4] if matrix[:2] in ([0, one], [-one, 0]) else (),
    )


def _changing(dice: random.Random) -> Film:
    """Join parts whose frames have different sizes."""
    sizes = dice.sample([(32, 48), (48, 32), (16, 16), (64, 96)], 2)
    if dice.random() < 0.5:
        parts = [_encoded("mpegts", "libx264", "yuv420p", size) for size in sizes]
        return Film("film.ts", b"".join(parts))
    pictures = []
    for number, size in enumerate(sizes):
        stream = io.BytesIO()
        Image.fromarray(_flat(number, size)).save(stream, "JPEG")
        pictures.append(stream.getvalue())
    return Film("film.mjpeg", b"".join(pictures * 2))


def _times(dice: random.Random) -> Film:
    """Change a field of a box that states times, sizes or places."""
    content = bytearray(_encoded("mp4", dice.choice(["libx264", "mpeg4"]), "yuv420p"))
    boxes = [
        box
        for box in (b"mvhd", b"mdhd", b"tkhd", b"stts", b"ctts", b"elst", b"stsz", b"stco", b"stsc", b"stss", b"stsd", b"hdlr")
        if box in content
    ]
    start = content.index(dice.choice(boxes)) + 4
    for _ in range(dice.choice([1, 1, 2])):
        at = start + 4 * dice.randrange(1, 7)
        content[at : at + 4] = struct.pack(">I", dice.choice([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFF00, 0x10000000]))
    return Film("film.mp4", bytes(content))


def _long(dice: random.Random) -> Film:
    """State durations that no film has."""
    kind = dice.choice(["GIF", "WEBP", "PNG"])
    return Film(f"film.{kind.lower()}", _animation(kind, duration=dice.choice([65_535 * 10, 65_000, 0])))


def _any(dice: random.Random) -> tuple[str, bytes]:
    film = dice.choice([_usual, _animations, _animations, _other_streams])(dice)
    return film.name, film.content


def _cut(dice: random.Random) -> Film:
    name, content = _any(dice)
    return Film(name, content[: dice.randrange(len(content))])


def _flipped(dice: random.Random) -> Film:
    name, content = _any(dice)
    data = bytearray(content)
    for _ in range(dice.choice([1, 3, 20, 200])):
        data[dice.randrange(len(data) if dice.random() < 0.7 else min(len(data), 200))] ^= 1 << dice.randrange(8)
    return Film(name, bytes(data))


def _nothing(dice: random.Random) -> Film:
    name = dice.choice(
        ["film.mp4", "film.gif", "film.webp", "film.png", "film.m3u8", "film.txt", "film.concat", "film.sdp", "film.ffconcat"]
    )
    texts = (
        b"",
        b"\0" * 5000,
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile /etc/passwd\nfile http://127.0.0.1:1/x\n",
        b"v=0\nc=IN IP4 127.0.0.1\nm=video 1 RTP/AVP 96\n",
        b"GIF89a" + b"\xff" * 40,
        b"RIFF\xff\xff\xff\xffWEBPVP8X" + b"\xff" * 40,
        dice.randbytes(4000),
    )
    return Film(name, dice.choice(texts))


def _huge(dice: random.Random) -> Film:
    """State frames that would not fit into memory."""
    content = bytearray(_animation("GIF"))
    content[6:10] = struct.pack("<HH", *dice.choice([(65535, 65535), (0, 0), (65535, 1), (0, 7)]))
    return Film("film.gif", bytes(content))


_FILMS: tuple[Callable[[random.Random], Film], ...] = (
    *(_usual, _usual, _odd_sizes, _animations, _other_streams, _without_a_decoder, _only_sound, _turned, _changing),
    *(_times, _times, _long, _cut, _cut, _flipped, _flipped, _flipped, _nothing, _huge),
)
