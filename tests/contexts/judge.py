"""Comparison of answers inside a program with those of fresh processes."""

from __future__ import annotations

import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from tests.contexts.asking import METHODS, PHOTOS, Answer, ask
from tests.contexts.models import build
from tests.contexts.modes import Mode, NotHere, mode_of

Result = TypeVar("Result")
LONGEST = 60  # seconds of a process
CLOSE = 1e-6  # of the largest magnitude
Question = tuple[str, int]  # method and photo


class Verdict(NamedTuple):
    """Judgment of one answer.

    Attributes:
        wrong: What is wrong; empty if nothing is.
        text: Text of a refusal or an error.
        plain: Whether the plain model answers.
    """

    model: str
    mode: str
    method: str
    photo: int
    kind: str
    wrong: str
    text: str
    plain: bool


def fresh(act: Callable[[], Result]) -> Result:
    """Call a function in a fork of this process, which has computed nothing yet.

    Raises:
        NotHere: As the function does.
        RuntimeError: If the process ends without a result.
    """
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "result"
        sys.stdout.flush()
        child = os.fork()
        if not child:
            code = 1
            try:
                try:
                    made: Any = act()
                except NotHere as error:
                    made = error
                file.write_bytes(pickle.dumps(made))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        until = time.monotonic() + LONGEST
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
        if not file.exists():
            raise RuntimeError(f"a process ended without a result, or took more than {LONGEST} s")
        found = pickle.loads(file.read_bytes())
    if isinstance(found, NotHere):
        raise found
    return found  # type: ignore[no-any-return]


def preload(names: Iterable[str]) -> None:
    """Import in this process what explanations import, so that forks of it need not; nothing is computed here."""
    before = set(sys.modules)

    def used() -> list[str]:
        for name in names:
            model = build(name)
            for method in METHODS:
                ask(model, method, 0)
        torch.compile(torch.nn.Identity(), backend="eager")(torch.zeros(1))
        return [module for module in sys.modules if module not in before]

    for module in fresh(used):
        with suppress(Exception):
            import_module(module)


def in_turn(name: str, mode: Mode, questions: Sequence[Question]) -> list[Answer]:
    """Ask one model all questions in their order, in one mode."""
    torch.set_num_threads(1)
    model = mode.change(build(name))
    answers = []
    for method, photo in questions:
        with mode.around():
            answers.append(ask(model, method, photo))
    return answers


def all_questions(seed: int, methods: Iterable[str] = METHODS) -> list[Question]:
    """Return every method on every photo, in an order drawn by a seed."""
    questions = [(method, photo) for method in methods for photo in range(len(PHOTOS))]
    random.Random(seed).shuffle(questions)
    return questions


def judge(name: str, mode_name: str, questions: Sequence[Question], plain: dict[Question, Answer]) -> list[Verdict]:
    """Judge the answers of one model in one mode.

    Args:
        name: Name of the model.
        mode_name: Name of the mode, or of two.
        questions: Methods and photos, in their order.
        plain: Answers of the plain model in fresh processes, which are filled in as they are needed.

    Raises:
        NotHere: If the mode cannot be had for this model.
    """
    mode = mode_of(mode_name)
    answers = fresh(lambda: in_turn(name, mode, questions))
    found = []
    for question, answer in zip(questions, answers, strict=True):
        if question not in plain:
            plain[question] = fresh(partial(in_turn, name, mode_of("plain"), [question]))[0]
        alone = plain[question] if mode_name == "plain" else fresh(partial(in_turn, name, mode, [question]))[0]
        wrong = fault(answer, alone, plain[question], mode)
        text = "" if answer.kind == "answered" else answer.words[0]
        found.append(Verdict(name, mode_name, *question, answer.kind, wrong, text, plain[question].kind == "answered"))
    return found


def fault(answer: Answer, alone: Answer, plain: Answer, mode: Mode) -> str:
    """Return what is wrong with an answer, compared with that of a fresh process in the same mode and with the plain one."""
    if answer.kind == "raw":
        return "a raw error"
    if answer.left:
        return f"not as before: {', '.join(answer.left)}"
    if answer.kind != alone.kind:
        return f"{answer.kind}, and {alone.kind} in a fresh process"
    if answer.words != alone.words:
        return f"other words than in a fresh process: {_difference(answer.words, alone.words)}"
    if answer.kind != "answered" or plain.kind != "answered":
        return ""
    if off := differs(answer, alone):
        return f"the map differs from that of a fresh process by {off:.1e}"
    off = differs(answer, plain)
    if mode.neutral and off:
        return f"the map differs from the plain one by {off:.1e}"
    if mode.neutral and said(answer, "target") != said(plain, "target"):
        return f"other words than the plain model: {said(answer, 'target')}"
    if off and mode.said and not any(word and word in text for word in mode.said.split("|") for text in answer.words):
        return f"the map differs from the plain one by {off:.1e}, and no word says why"
    return ""


def differs(one: Answer, other: Answer) -> float:
    """Return the largest difference of two maps, as a share of the largest magnitude; 0 if they are close."""
    assert one.map is not None
    assert other.map is not None
    if one.map.shape != other.map.shape:
        return float("inf")
    off = float(np.abs(one.map - other.map).max()) / (float(np.abs(other.map).max()) or 1.0)
    return off if off > CLOSE else 0.0


def said(answer: Answer, fact: str) -> str:
    """Return what an answer says about a fact."""
    return next((text for text in answer.words if text.startswith(f"{fact}: ")), "")


def _difference(one: Sequence[str], other: Sequence[str]) -> str:
    pairs = [pair for pair in zip(one, other, strict=False) if pair[0] != pair[1]]
    return f"{pairs[0][0][:300]!r} and {pairs[0][1][:300]!r}" if pairs else f"{len(one)} and {len(other)} lines"
