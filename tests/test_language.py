"""Mistakes made in Python and in the shell: each message speaks the language of its caller."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import visattn
from tests.cli.test_commands import COLORED, TINY, Run, photo, run  # noqa: F401 - fixtures
from visattn._support import extras
from visattn._support.language import flag, in_shell, option, worded
from visattn.batch.cluster import Explainer
from visattn.core.loading import load_model
from visattn.core.maps import load_map
from visattn.errors import MissingExtra, VisattnError
from visattn.training import Config, train

FLAG = re.compile(r"(?<![\w-])(--[a-z]|-o\b)")
KEYWORD = re.compile(r"(?<![\w.-])[a-z_]+=|visattn\.[a-z]")


def tiny() -> nn.Module:
    return load_model("vit_tiny_patch16_224", weights="none", img_size=64)


def explained(**options: Any) -> visattn.Explanation:
    return visattn.explain(tiny(), "dog.png", **{"resize": "fit", **options})


def twice() -> None:
    for _ in range(2):
        explained(method="rollout").save("out.png", overwrite=False, normalize="minmax")


def trained(folder: str = "run", **options: Any) -> None:
    train(Config(**{"data": "photos", "img_size": 32, "epochs": 1.0, **options}), Path(folder))


OVERLAY = ("overlay", "dog.png", *TINY)
TRAIN = ("train", "classify", "--img-size", "32", "--epochs", "1", "-o", "run")

# the mistake in Python and in the shell, and what each message says to do
MISTAKES: dict[str, tuple[Callable[[], Any], tuple[str, ...], str, str]] = {
    "an output that exists": (
        twice,
        (*OVERLAY, *COLORED, "--method", "rollout", "-o", "out.png"),
        "pass overwrite=True to replace it or choose another name",
        "pass --overwrite to replace it or choose another name (-o/--output)",
    ),
    "the output is the input": (
        lambda: explained(method="rollout").save("dog.png", overwrite=False),
        (*OVERLAY, "--overwrite", "-o", "dog.png"),
        "choose another name",
        "choose another name (-o/--output)",
    ),
    "a large file": (
        lambda: explained(max_bytes=100),
        (*OVERLAY, "--max-bytes", "100"),
        "or raise max_bytes",
        "or raise --max-bytes",
    ),
    "a large photo": (
        lambda: explained(max_pixels=100),
        (*OVERLAY, "--max-pixels", "100"),
        "or raise max_pixels",
        "or raise --max-pixels",
    ),
    "a pixel outside": (
        lambda: explained(resize="auto", method="similarity", query="pixel:0,30"),
        (*OVERLAY[:-2], "--method", "similarity", "--query", "pixel:0,30"),
        "with resize='fit'.",
        "with --resize fit.",
    ),
    "no query": (
        lambda: explained(method="similarity"),
        (*OVERLAY, "--method", "similarity"),
        "query='pixel:120,80'",
        "pass --query pixel:X,Y or patch:ROW,COL.",
    ),
    "a GPU": (lambda: explained(gpu=True), (*OVERLAY, "--gpu"), "pass device='cuda'", "pass --device cuda"),
    "settings that exclude each other": (
        lambda: explained(method="norm_attention", keep_heads=True, add_residual=True),
        (*OVERLAY, "--method", "norm_attention", "--keep-heads", "--add-residual"),
        "Leave out keep_heads=True or add_residual=True.",
        "Leave out --keep-heads or --add-residual.",
    ),
    "no map": (
        lambda: load_map("dog.png.npz"),
        ("overlay", "dog.png", "--map", "dog.png.npz"),
        "make one with visattn.maps.save_map",
        "make one with visattn overlay --save-map",
    ),
    "no study": (
        lambda: visattn.load_study("bad.attn"),
        ("overlay", "bad.attn"),
        "make one with visattn.study(...).save(path)",
        "make one with visattn view IMAGE -o NAME.attn",
    ),
    "photos without splits": (
        lambda: trained(),
        (*TRAIN, "--data", "photos"),
        "or pass held_out=0.2 (split=0.2 in a Config) if",
        "or pass --split 0.2 if",
    ),
    "a setting without its condition": (
        lambda: trained(min_lr=0.1, schedule="step"),
        (*TRAIN, "--data", "photos", "--min-lr", "0.1", "--schedule", "step"),
        "min_lr needs schedule cosine or linear, got step.",
        "--min-lr needs --schedule cosine or linear, got step.",
    ),
    "a folder of something else": (
        lambda: trained("photos", data="fashion-mnist"),
        (*TRAIN[:-1], "photos", "--data", "fashion-mnist"),
        "choose another folder",
        "choose another folder (-o/--output)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_message_speaks_the_language_of_its_caller(run: Run, photo: Path, tmp_path: Path, name: str) -> None:  # noqa: F811
    mistake, command, python, shell = MISTAKES[name]
    for folder in ("a", "b"):
        (tmp_path / "photos" / folder).mkdir(parents=True)
    (tmp_path / "dog.png.npz").write_bytes(b"nothing")
    (tmp_path / "bad.attn").write_bytes(b"nothing")
    with pytest.raises(VisattnError) as caught:
        mistake()
    message = str(caught.value)
    assert python in message
    assert not FLAG.search(message)
    code, _, err = run(*command)
    line = next(line for line in err.splitlines() if "error: " in line)
    assert code not in (0, 70)
    assert shell in line
    assert not KEYWORD.search(line)


def test_options_are_written_in_both_languages() -> None:
    def written() -> list[str]:
        names = option("img_size"), option("weights", "none"), option("weights", "FILE"), option("split", 0.2)
        return [*names, option("overwrite", True), option("output"), f"a name{flag('output')}", worded("this", "that")]

    python = written()
    with in_shell():
        shell = written()
    assert python == ["img_size", "weights='none'", "weights=FILE", "split=0.2", "overwrite=True", "output", "a name", "this"]
    flags = [
        "--img-size",
        "--weights none",
        "--weights FILE",
        "--split 0.2",
        "--overwrite",
        "-o/--output",
        "a name (-o/--output)",
    ]
    assert shell == [*flags, "that"]
    assert written() == python


def test_actors_of_ray_speak_the_language_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []
    monkeypatch.setattr(Explainer, "_loaded", lambda _: heard.append(option("output")))
    monkeypatch.setattr("visattn.batch.cluster.done", lambda *_: [])
    work: Any = None
    Explainer(tiny, "", work, Path("spare"), ".")({"batch": []})
    assert heard == ["-o/--output"]
    assert option("output") == "output"


@pytest.mark.parametrize(
    ("project", "command"),
    [
        (True, 'In the source folder of visattn, run: pip install -e ".[video]"'),
        (False, 'Run: pip install "visattn[video]"'),
    ],
)
def test_a_missing_extra_is_installed_as_visattn_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, project: bool, command: str
) -> None:
    if not project:  # a wheel has no pyproject.toml beside the package
        monkeypatch.setattr(extras, "_PROJECT", tmp_path / "pyproject.toml")
    with pytest.raises(MissingExtra) as caught:
        extras.need("no_such_module", "video", "a film")
    assert str(caught.value) == f"a film needs no_such_module, which is not installed. {command}"


def test_a_missing_extra_is_installed_in_the_source_folder_wherever_python_runs(tmp_path: Path) -> None:
    code = "from visattn._support.extras import need; need('no_such_module', 'video', 'a film')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'In the source folder of visattn, run: pip install -e ".[video]"' in done.stderr
