"""Whatever a folder of a run or a model holds, and whatever options are given: a result, or one line; no file of others is touched."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

import pytest

from tests.hostile_folders import cases, harm, results
from tests.training.small import ended, fork
from visattn.cli import _main

COUNT, SEED = int(os.environ.get("VISATTN_HOSTILE", "45")), int(os.environ.get("VISATTN_HOSTILE_SEED", "0"))
SECONDS = 20  # of the processor: a machine may be busy


@pytest.mark.parametrize(("name", "prepare"), [pytest.param(*case, id=case[0]) for case in cases(SEED, COUNT)])
def test_a_hostile_folder_or_option_is_a_result_or_one_line(name: str, prepare: object, tmp_path: Path) -> None:
    arguments = prepare(tmp_path)  # type: ignore[operator]

    def command() -> int:
        signal.alarm(5 * SECONDS)  # for what waits without working
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        os.chdir(tmp_path)
        sys.argv = ["visattn", *arguments]
        try:
            _main.main(arguments)
        except SystemExit as error:
            return int(error.code or 0)
        return 0

    code, text = ended(fork(command, tmp_path / "said"), tmp_path / "said")
    assert code in (0, 1, 2, 3, 4, 5), (arguments, code, text[-3000:])
    told = [line for line in text.splitlines() if line.startswith("visattn: error: ")]
    assert "Traceback" not in text, text[-3000:]
    assert "a fault of visattn's own" not in text, (arguments, text[-3000:])
    assert bool(told) == (code != 0), (arguments, text[-3000:])
    assert all(len(line) < 6000 for line in told), [line[:300] for line in told]
    assert all(c.isprintable() or c in "\n\t" for c in text), ascii(text)
    assert code not in (0, 1) or results(tmp_path, arguments), (arguments, text)
    assert not harm(tmp_path)
