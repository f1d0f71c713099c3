"""Steps of `overlay`: each runs once, no unneeded step runs, and no unneeded memory is used."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import Figures
from visattn.cli import main
from visattn.core.families import spec
from visattn.core.images import loading
from visattn.core.pipeline import inputs, question

MODEL = "vit_tiny_patch16_224"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often each step runs."""
    count: Counter[str] = Counter()

    def counting(home: Any, name: str, step: str) -> None:
        whole: Callable[..., Any] = getattr(home, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            count[step] += 1
            return whole(*args, **kwargs)

        monkeypatch.setattr(home, name, counted)

    counting(loading, "read_bytes", "photo read")
    counting(loading, "_split", "photo converted")
    counting(question, "check_types", "parameters bound")
    counting(spec.InputSpec, "checked", "input specification built")
    counting(inputs, "prepare_with", "photo prepared")
    counting(np, "savez_compressed", "map compressed")
    return count


def photos(folder: Path, count: int) -> list[str]:
    names = []
    for number in range(count):
        noise = np.random.default_rng(number).integers(0, 256, (40, 60, 4), np.uint8)
        noise[..., 3] = 255
        names.append(str(folder / f"{number}.png"))
        Image.fromarray(noise).save(names[-1])  # a mode that must be converted
    return names


@pytest.mark.parametrize("count", [1, 3])
def test_every_step_runs_once_per_photo_and_parameters_are_bound_once(tmp_path: Path, calls: Counter[str], count: int) -> None:
    target = tmp_path / ("out.png" if count == 1 else "out")
    options = ["--model", MODEL, "--weights", "none", "--method", "rollout", "--discard", "0.1", "-o", str(target)]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["overlay", *photos(tmp_path, count), *options])
    assert calls == {
        "photo read": count,
        "photo converted": count,
        "parameters bound": 1,
        "input specification built": count,
        "photo prepared": count,
    }


def test_explaining_a_vit_of_timm_imports_the_core_alone(tmp_path: Path, figures: Figures) -> None:
    (photo,) = photos(tmp_path, 1)
    code = f"""
import sys, timm, visattn
explanation = visattn.explain(timm.create_model({MODEL!r}).eval(), {photo!r})
files = [module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "visattn"]
print(len(files), sum(len(open(file).readlines()) for file in files))
explanation.save({str(tmp_path / "out.png")!r})
print(*sorted(name for name in sys.modules if name.split(".")[0] == "visattn"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    counts, loaded = done.stdout.splitlines()
    rooms = {".".join(name.split(".")[:2]) for name in loaded.split()}
    assert rooms == {"visattn", "visattn.core", "visattn._support", "visattn.errors"}
    modules, lines = map(int, counts.split())  # two thirds of what it was before there was a core
    figures("modules of visattn that explaining a ViT of timm loads", modules, "<= 156")
    figures("lines of these modules", lines, "<= 21,972")
    assert modules <= 156
    assert lines <= 21_972
