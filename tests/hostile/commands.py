"""Command lines with all options of all commands, and values of all kinds."""

from __future__ import annotations

import contextlib
import os
import random
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click
import numpy as np
from PIL import Image

from tests.hostile.driver import Case
from tests.hostile.models import FILE
from visattn.cli.commands import cli

CHECKPOINT = Path(__file__).parents[2] / "models" / "captions_soft"
NUMBERS = (
    "0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "10" * 30,
    "x",
    "²",
    "",
    "1e3",
    " 1",
    "--5",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "0.5",
    "1_0",
    "٣",
)
WORDS = (
    "all",
    "mean",
    "auto",
    "cls",
    "pixel:10,10",
    "pixel:999,1",
    "pixel:nan,1",
    "patch:0,0",
    "patch:²,1",
    "pixel:",
    ":",
    "a" * 300,
    "\x1b]0;x\a",
)
PATHS = (
    "p.png",
    "missing",
    ".",
    "photos",
    "pipe",
    "empty",
    "/dev/null",
    "/dev/full",
    "/proc/self/mem",
    "a" * 300,
    "own.py",
    "b\udcffd",
    "",
)
OUTPUTS = (
    "o.png",
    "o.jpg",
    "o",
    "sub/o.png",
    "p.png",
    "photos",
    "full/x.png",
    "a" * 300 + ".png",
    "O.PNG",
    ".png",
    "pipe",
    "o.json",
    "o.webp",
)
WRITTEN = {"output", "save_map", "filmstrip"}
QUICK = {"steps": "5", "samples": "5", "limit": "1"}  # options for which large values are merely slow
SLOW = {"img_size": ("32", "64", "16", "7", "0", "-1", "x")}
COMMANDS = ("overlay", "overlay", "overlay", "heads", "heads", "stats", "caption", "batch", "batch", "video", "inspect", "list")
LEFT_OUT = {"help", "debug", "engine"}  # a cluster takes minutes to start
PRODUCTS = (
    "journal*.jsonl",
    "*.png",
    "*.npz",
    "*.attn",
    "*.csv",
    "*.json",
    "*.tar",
    "statistics",
    "maps",
)  # of `batch`, in the output folder or below


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield `count` cases."""
    for number in range(count):
        rng = random.Random(f"{seed} command {number}")
        arguments, written = _line(rng, rng.choice(COMMANDS))
        yield Case(f"command {seed}.{number}", partial(_prepare, arguments), tuple(written), prints=True)


def _prepare(arguments: list[str], folder: Path) -> list[str]:
    (folder / "photos").mkdir()
    for i, name in enumerate(("p.png", "photos/a.png", "photos/b.png")):
        picture = Image.fromarray(np.random.default_rng(i).integers(0, 256, (50, 60, 3), dtype=np.uint8))
        picture.save(folder / name)
    parts = dict.fromkeys(("top", "init", "begin", "before", "after", "end", "make"), "pass")
    (folder / "own.py").write_text(FILE.format(**parts, channels="3", stride="16", arguments=""))
    (folder / "empty").touch()
    frames = [Image.new("RGB", (48, 32), (80 * i, 0, 0)) for i in range(3)]
    frames[0].save(folder / "film.gif", save_all=True, append_images=frames[1:], duration=100)
    (folder / "list.txt").write_text("p.png\nmissing.png\nphotos/a.png\n")
    os.mkfifo(folder / "pipe")
    with contextlib.suppress(PermissionError):  # a device of its own: what is written in its place would replace it
        os.mknod(folder / "full", 0o666 | stat.S_IFCHR, os.makedev(1, 7))
    return arguments


def _line(rng: random.Random, name: str) -> tuple[list[str], list[str]]:
    """Return a command line that is valid except for a few options, and the outputs that it names."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    given: dict[str, list[str]] = {}
    options = {
        option.name: option for option in command.params if isinstance(option, click.Option) and option.name not in LEFT_OUT
    }
    if "model" in options:
        given |= {"model": ["--model", "own.py:make"], "img_size": ["--img-size", "32"]}
    if "checkpoint" in options:
        given["checkpoint"] = ["--checkpoint", str(CHECKPOINT)]
    given |= {
        key: [options[key].opts[0], value]
        for key, value in QUICK.items()
        if key in options and rng.random() < 0.8 and name == "stats"
    }
    written = ["stats"] if name == "stats" else []
    given |= {"batch": {"output": ["-o", "out"]}, "video": {"output": ["-o", "o.gif"]}}.get(name, {})
    for key in rng.choices(sorted(key for key in options if key), k=rng.choice([1, 1, 2, 3, 4])):
        option = options[key]
        if option.is_flag:
            given[key] = [option.opts[0]]
            continue
        values = [_value(rng, key, option) for _ in range(option.nargs)]
        if key in WRITTEN:
            written += [value for value in values if value not in ("p.png", "photos", "pipe") and name != "batch"]
        if key == "model" and rng.random() < 0.5:
            values = ["vit_tiny_patch16_224"]
            given["weights"] = ["--weights", "none"]
        flag = rng.choice(option.opts)
        given[key] = (
            [f"{flag}={values[0]}"] if flag.startswith("--") and option.nargs == 1 and rng.random() < 0.3 else [flag, *values]
        )
    if name in ("overlay", "heads", "caption") and "output" not in given and "filmstrip" not in given:
        names = [f"{stem}.*{kind}" for stem in ("p", "a", "b", "p.png") for kind in _KINDS]
        written += [
            f"{one}{choice}.png" for one in names for choice in ("", ".*")
        ]  # target, layer, head and query follow the kind
    if name == "batch":
        written += [f"{given['output'][-1].rpartition('=')[2]}/{product}" for product in PRODUCTS]
    if name == "video":
        written.append(given["output"][-1].rpartition("=")[2])
    operands = {
        "batch": rng.choice([["photos"], ["p.png", "photos"], ["list.txt"], ["*.png"], ["photos/*", rng.choice(PATHS)]]),
        "video": [rng.choice(["film.gif", "film.gif", rng.choice(PATHS)])],
        "overlay": rng.choice([["p.png"], ["p.png"], ["photos/a.png", "photos/b.png"], [rng.choice(PATHS)], []]),
        "caption": rng.choice([["p.png"], ["photos/a.png", "missing"], [rng.choice(PATHS)]]),
        "heads": [rng.choice(["p.png", "p.png", rng.choice(PATHS)])],
        "stats": [rng.choice(["photos", "photos", rng.choice(PATHS)])],
        "inspect": [rng.choice(["own.py:make", "own.py:make", *WORDS[:6], *PATHS[:4]])],
        "list": [rng.choice(["*", "vit_tiny*", "[", "", "\x1b", *WORDS[:3]])],
    }[name]
    tail = [item for part in given.values() for item in part]
    return [name, *([*operands, *tail] if rng.random() < 0.7 else [*tail, *operands])], written


_KINDS = (
    "overlay",
    "map",
    "heads",
    "grid",
    "layers",
    "matrix",
    "stats",
    "gates",
    "attention",
    "rollout",
    "caption",
    "similarity",
    "relevance",
)


def _value(rng: random.Random, key: str, option: click.Option) -> str:
    if key in WRITTEN:
        return rng.choice(OUTPUTS)
    if key in SLOW and rng.random() < 0.9:
        return rng.choice(SLOW[key])
    if isinstance(option.type, click.Choice):
        return rng.choice([*map(str, option.type.choices), *map(str, option.type.choices), rng.choice(WORDS)])
    if isinstance(option.type, click.Path):
        return rng.choice(PATHS)
    if isinstance(option.type, (click.types.IntParamType, click.types.FloatParamType)):
        return rng.choice(NUMBERS)
    return rng.choice([*NUMBERS, *WORDS, *PATHS, "auto", "rollout", "attention", "relevance", "own.py:make", "none"])
