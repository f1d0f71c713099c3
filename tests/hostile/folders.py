"""Run folders, model folders and command lines of `train`, each with a single change to a valid one."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.hostile.driver import Case
from tests.training.small import begun, pictures, recipe, written
from visattn.training import CaptionConfig, Config, compare_runs, train

Prepare = Callable[[Path], list[str]]
MINE = b"mine\n"

# values that are written as JSON; texts that begin with RAW are written verbatim
RAW = "raw:"
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 17, 2**31, 2**63, 2**64, 10**400, 0.5, -0.5, 1e-300, 1e308),
    *(
        float("inf"),
        float("-inf"),
        float("nan"),
        "",
        "x",
        "1",
        "none",
        "../../x",
        "/dev/zero",
        "a\x1b]0;x\x07",
        "\u202e\x9b",
        "\ud800",
    ),
    *(
        "x" * 5000,
        [],
        [[]],
        [0],
        [1, 2],
        [100_000, 100_000],
        [10**400],
        ["a"],
        [None],
        {},
        {"a": 1},
        {"tensor": "x"},
        {"dict": 3},
    ),
    *(f"{RAW}{'[' * 50_000}", f"{RAW}{'[' * 900}{']' * 900}", f"{RAW}{'9' * 5000}", f"{RAW}1e999", f"{RAW}"),
]
CAPTIONS: dict[str, Any] = {
    "train_count": 8,
    "test_count": 2,
    "batch_size": 4,
    "epochs": 0.5,
    "embed_dim": 8,
    "hidden_dim": 8,
    "attention_dim": 8,
}
NUMBERS = [
    "",
    "x",
    "-1",
    "0",
    "1",
    "2",
    "1.5",
    "nan",
    "inf",
    "-inf",
    "1e308",
    "1e-308",
    "9" * 20,
    "9" * 5000,
    "²",
    "0x10",
    "1_0",
    "--5",
]
TEXTS = [
    "",
    "x",
    "no_such",
    "../x",
    "/dev/zero",
    "/",
    ".",
    "a\x1b]0;x\x07",
    "\udcff",
    "x" * 300,
    "x" * 5000,
    "a:b",
    "own.py:no",
    "tv:",
    "none",
]


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield `count` cases."""
    dice = random.Random(seed)
    kinds = (
        _of_a_file,
        _of_a_state,
        _of_facts,
        _of_a_caption,
        _of_a_result,
        _of_a_log,
        _of_a_recipe,
        _of_a_comparison,
        _of_options,
    )
    for number in range(count):
        name, prepare = kinds[number % len(kinds)](dice)
        yield Case(f"folder {seed}.{number} {name}", prepare, judge=_judge)


def _judge(folder: Path, arguments: list[str], code: int) -> list[str]:
    return harm(folder) + ([] if code > 1 or results(folder, arguments) else [f"exit {code} without a result"])


def harm(folder: Path) -> list[str]:
    """Describe the changes that a command made to files that do not belong to it."""
    told = [
        f"{path.name} was changed"
        for path in (folder / "outside").iterdir()
        if path.name == "victim" and path.read_bytes() != MINE
    ]
    return told + [f"{path.name} was made" for path in (folder / "outside").iterdir() if path.name != "victim"]


def results(folder: Path, arguments: list[str]) -> bool:
    """Check whether the result of a command exists."""
    output = folder / [after for flag, after in pairwise(arguments) if flag in ("-o", "--output")][-1]
    return any(place.is_file() for place in (output, output / "result.json", output / "comparison.json"))


@functools.cache
def _valid() -> Path:
    """Create a folder with valid inputs: data, an interrupted and a finished run, a comparison, a captioner, a photo."""
    place, mine = Path(tempfile.mkdtemp(prefix="hostile-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(place) if os.getpid() == mine else None)  # not when a forked child exits
    data = pictures(place / "data")
    begun(recipe(data, ema=0.9), place / "half")
    train(recipe(data, epochs=0.4), place / "done")
    compare_runs(recipe(data, epochs=0.4), place / "comparison", ["se"], 1)
    small: dict[str, Any] = {
        "train_count": 8,
        "test_count": 2,
        "batch_size": 4,
        "epochs": 1.0,
        "embed_dim": 8,
        "hidden_dim": 8,
        "attention_dim": 8,
    }
    train(CaptionConfig(**small, model_kwargs={"width": 16}, device="cpu"), place / "captions")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(place / "photo.png")
    return place


def _begin(folder: Path, source: str, **changes: Any) -> list[str]:
    """Copy a valid run, and return the command that resumes it."""
    (folder / "outside").mkdir()
    (folder / "outside" / "victim").write_bytes(MINE)
    shutil.copytree(_valid() / source, folder / "run")
    file = written(recipe(_valid() / "data", **changes), folder / "recipe.toml")
    return ["train", "classify", "-q", "--config", str(file), "-o", str(folder / "run")]


def _draw(folder: Path) -> list[str]:
    _begin(folder, "done")
    (folder / "run").rename(folder / "trained")
    model = ["--model", str(folder / "trained" / "final"), "--method", "gradcam"]
    return ["overlay", "-q", str(_valid() / "photo.png"), *model, "-o", str(folder / "out.png")]


def _tell(folder: Path) -> list[str]:
    _begin(folder, "captions")
    (folder / "run").rename(folder / "trained")
    checkpoint = ["--checkpoint", str(folder / "trained" / "final")]
    return ["caption", "-q", str(_valid() / "photo.png"), *checkpoint, "-o", str(folder / "out.json")]


def _linked(path: Path, folder: Path) -> None:
    path.symlink_to(folder / "outside" / "victim")


def _dangling(path: Path, folder: Path) -> None:
    path.symlink_to(folder / "outside" / "new")


def _into(path: Path, folder: Path) -> None:
    path.symlink_to(folder / "outside")


def _device(path: Path, _folder: Path) -> None:
    path.symlink_to("/dev/zero")


def _itself(path: Path, _folder: Path) -> None:
    path.symlink_to(path.name)


def _hard(path: Path, folder: Path) -> None:
    os.link(folder / "outside" / "victim", path)


def _pipe(path: Path, _folder: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path, _folder: Path) -> None:
    (path / "inner").mkdir(parents=True)


def _empty(path: Path, _folder: Path) -> None:
    path.write_bytes(b"")


def _noise(path: Path, _folder: Path) -> None:
    path.write_bytes(np.random.default_rng(1).bytes(3000))


def _deep(path: Path, _folder: Path) -> None:
    path.write_text("[" * 50_000)


def _gone(_path: Path, _folder: Path) -> None:
    """Do nothing: the file is left out."""


_MADE = (_linked, _dangling, _into, _device, _itself, _hard, _pipe, _folder, _empty, _noise, _deep, _gone)


def _of_a_file(dice: random.Random) -> tuple[str, Prepare]:
    """Replace a file or folder of a run, or a name that it will write, by something else."""
    command = dice.choice([_begin_half, _begin_done, _draw, _tell, _compare])
    make, which, overwrite = dice.choice(_MADE), dice.random(), dice.random() < 0.2
    names = [
        ".lock",
        "maps",
        "nonfinite.jsonl",
        "log.csv",
        "curves.png",
        "README.md",
        ".visattn-x",
        "final",
        "checkpoints",
        "log.jsonl",
    ]

    def prepare(folder: Path) -> list[str]:
        arguments = command(folder)
        place = folder / ("run" if (folder / "run").exists() else "trained")
        every = sorted({*(place / name for name in names), *place.rglob("*")})
        path = every[int(which * len(every))]
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        make(path, folder)
        return arguments + ["--overwrite"] * (overwrite and "train" in arguments and "--compare" not in arguments)

    return f"file {command.__name__} {make.__name__} {which:.3f}", prepare


def _begin_half(folder: Path) -> list[str]:
    return _begin(folder, "half", ema=0.9)


def _begin_done(folder: Path) -> list[str]:
    return _begin(folder, "done", epochs=0.4)


def _compare(folder: Path) -> list[str]:
    return [*_begin(folder, "comparison", epochs=0.4), "--compare", "se"]


def _text(value: Any) -> str:
    """Encode a value as JSON; text after RAW is inserted verbatim."""
    text = json.dumps(value)
    for raw in (one for one in VALUES if isinstance(one, str) and one.startswith(RAW)):
        text = text.replace(json.dumps(raw), raw.removeprefix(RAW))
    return text


def _change(told: Any, dice: random.Random) -> None:
    """Insert a hostile value at a random position of nested objects."""
    while True:
        key = dice.choice(list(told) if isinstance(told, dict) else range(len(told)))
        if isinstance(told[key], (dict, list)) and told[key] and dice.random() < 0.6:
            told = told[key]
            continue
        told[key] = dice.choice(VALUES)
        return


def _of_json(name: str, command: Prepare, file: str, dice: random.Random) -> tuple[str, Prepare]:
    key = dice.randrange(2**32)

    def prepare(folder: Path) -> list[str]:
        own = random.Random(key)
        arguments = command(folder)
        path = folder / file
        told = json.loads(path.read_text())
        _change(told, own)
        path.write_text(_text(told), errors="surrogatepass")
        return arguments

    return f"{name} {key}", prepare


def _of_a_state(dice: random.Random) -> tuple[str, Prepare]:
    """Change a value of a checkpoint, and keep its digests valid."""
    key = dice.randrange(2**32)

    def prepare(folder: Path) -> list[str]:
        own = random.Random(key)
        arguments = _begin_half(folder)
        path = folder / "run" / "checkpoints" / "step_00000004" / "state.json"
        told = json.loads(path.read_text())
        _change(told["facts"] if own.random() < 0.8 else told, own)
        told.pop("own_sha256", None)
        text = _text(dict(sorted(told.items())))
        try:
            digest = hashlib.sha256(json.dumps(json.loads(text), sort_keys=True).encode()).hexdigest()
        except (ValueError, RecursionError):
            digest = "0" * 64
        path.write_text(f'{text[:-1]}, "own_sha256": "{digest}"}}', errors="surrogatepass")
        return arguments

    return f"state {key}", prepare


def _of_facts(dice: random.Random) -> tuple[str, Prepare]:
    return _of_json("model.json", _draw, "trained/final/model.json", dice)


def _of_a_caption(dice: random.Random) -> tuple[str, Prepare]:
    return _of_json("captioner", _tell, "trained/final/model.json", dice)


def _of_a_result(dice: random.Random) -> tuple[str, Prepare]:
    return _of_json("result.json", _begin_done, "run/result.json", dice)


def _of_a_comparison(dice: random.Random) -> tuple[str, Prepare]:
    return _of_json("comparison", _compare, dice.choice(["run/recipe.json", "run/none/seed0/result.json"]), dice)


def _of_a_log(dice: random.Random) -> tuple[str, Prepare]:
    file, value, cut = dice.choice(["log.jsonl", "speed.jsonl"]), dice.choice(VALUES), dice.random()

    def prepare(folder: Path) -> list[str]:
        arguments = _begin_half(folder)
        path = folder / "run" / file
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        row = rows[int(cut * len(rows))]
        row[list(row)[int(cut * 97) % len(row)]] = value
        path.write_text("".join(f"{_text(one)}\n" for one in rows), errors="surrogatepass")
        return arguments

    return f"{file} {str(value)[:20]!a}", prepare


def _of_a_recipe(dice: random.Random) -> tuple[str, Prepare]:
    """Change a value of the recipe, in the run or in the given config file."""
    name, value, where = dice.choice(fields(Config)).name, dice.choice(VALUES), dice.choice(["run/config.toml", "recipe.toml"])

    def prepare(folder: Path) -> list[str]:
        arguments = _begin_half(folder)
        path = folder / where
        lines = [line for line in path.read_text().splitlines() if not line.startswith(f"{name} = ")]
        lines = [line for line in lines if name != "model_kwargs" or line != "[model_kwargs]"]
        path.write_text("\n".join([f"{name} = {_text(value)}", *lines]), errors="surrogatepass")
        return arguments

    return f"{where} {name} {str(value)[:20]!a}", prepare


def _begin_captioner(folder: Path) -> list[str]:
    """Copy the run of a captioner, and return the command that resumes it."""
    _begin(folder, "captions")
    small = [word for name, value in CAPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return ["train", "caption", "-q", *small, "--model-kwargs", "width=16", "--device", "cpu", "-o", str(folder / "run")]


def _of_options(dice: random.Random) -> tuple[str, Prepare]:
    """Pass a wrong value for one option."""
    kind, begin = dice.choice([(Config, _begin_done), (CaptionConfig, _begin_captioner)])
    settings = {one.name: one.type in ("int", "float", "tuple[int, ...]") for one in fields(kind) if one.type != "bool"}
    settings |= {"output": False, "config": False} | ({"compare": False, "seeds": True} if kind is Config else {})
    name = dice.choice(list(settings))
    value = dice.choice(NUMBERS if settings[name] else TEXTS)
    if name == "model_kwargs":
        value = f"{value}={_text(dice.choice(VALUES))}"

    def prepare(folder: Path) -> list[str]:
        arguments = begin(folder)
        shutil.rmtree(folder / "run")
        return [*arguments, f"--{name.replace('_', '-')}", value]

    return f"{kind.__name__} --{name} {value[:20]!a}", prepare
