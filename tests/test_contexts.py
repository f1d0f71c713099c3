"""Calling contexts, drawn by a seed; the judge of them sees each fault. The whole grid is `python -m tests.contexts`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.contexts.asking import Answer
from tests.contexts.judge import fault
from tests.contexts.modes import MODES

ROOT = Path(__file__).parents[1]
SAID = ("attention", "notes: the model ran under autocast to bfloat16", "target: class 3")
RIGHT = Answer("answered", np.arange(6.0).reshape(2, 3), SAID, ())
REFUSED = Answer("refused", None, ("OptionError: no",), ())
OTHER = RIGHT._replace(map=np.arange(6.0).reshape(2, 3) + 1e-3)


def test_contexts_drawn_by_a_seed() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.contexts", "--draw", "2", "--seed", "45"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert " 0 wrong, 0 raw errors" in done.stdout


@pytest.mark.parametrize(
    ("answer", "alone", "plain", "mode", "expected"),
    [
        (RIGHT, RIGHT, RIGHT, "no_grad", ""),
        (REFUSED, REFUSED, RIGHT, "no_grad", ""),
        (OTHER, OTHER, RIGHT, "autocast bfloat16", ""),
        (OTHER, RIGHT, RIGHT, "no_grad", "the map differs from that of a fresh process by 2.0e-04"),
        (OTHER, OTHER, RIGHT, "no_grad", "the map differs from the plain one by 2.0e-04"),
        (
            OTHER._replace(words=SAID[:1]),
            OTHER._replace(words=SAID[:1]),
            RIGHT,
            "autocast bfloat16",
            "the map differs from the plain one by 2.0e-04, and no word says why",
        ),
        (REFUSED, RIGHT, RIGHT, "no_grad", "refused, and answered in a fresh process"),
        (REFUSED._replace(kind="raw"), REFUSED._replace(kind="raw"), RIGHT, "no_grad", "a raw error"),
        (RIGHT._replace(left=("hooks",)), RIGHT, RIGHT, "no_grad", "not as before: hooks"),
        (RIGHT._replace(words=(*SAID[:2], "target: class 4")), RIGHT, RIGHT, "no_grad", "other words than in a fresh process"),
        (
            RIGHT._replace(words=(*SAID[:2], "target: output 3")),
            RIGHT._replace(words=(*SAID[:2], "target: output 3")),
            RIGHT,
            "deepcopy",
            "other words than the plain model: target: output 3",
        ),
    ],
)
def test_the_judge_sees_each_fault(answer: Answer, alone: Answer, plain: Answer, mode: str, expected: str) -> None:
    found = fault(answer, alone, plain, MODES[mode])
    assert found.startswith(expected)
    assert bool(found) == bool(expected)


def test_importing_libraries_draws_no_random_numbers_of_the_program() -> None:
    code = (
        "import random, torch, visattn\n"
        "model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()).eval()\n"
        "before = random.getstate()\n"
        "visattn.explain(model, torch.rand(1, 3, 32, 32), method='eigencam', img_size=32)\n"
        "assert random.getstate() == before\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["explain", "models", "methods"])
def test_names_are_imported_without_drawing_random_numbers_of_the_program(name: str) -> None:
    code = (
        "import random, sys, visattn\n"
        "class Drawing:  # as rich draws when timm imports it\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        random.random()\n"
        "sys.meta_path.insert(0, Drawing())\n"
        "before, known = random.getstate(), len(sys.modules)\n"
        f"visattn.{name}\n"
        "assert len(sys.modules) > known\n"
        "assert random.getstate() == before\n"
        f"assert {name!r} in vars(visattn)  # later uses do not touch the state, which another thread may read\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
