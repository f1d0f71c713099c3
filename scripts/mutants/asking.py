"""Jobs on the tests of a copy: to compile them, which lines each test runs, and whether chosen tests pass."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage

_PLAIN = ("-q", "-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin", "--hypothesis-seed=0", "--no-header", "--no-summary")


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job in this process, which ends after it."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    if job["kind"] == "lines":
        return _lines(job["file"], job["sources"], job["place"])
    if job["kind"] == "compile":
        return {"status": int(pytest.main(["--collect-only", *job["files"], *_PLAIN]))}
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    return _tests(job["rounds"], job["place"], job["all"])


class _Recorder:
    """Plugin that notes the time of each test, which failed, and switches the context of the coverage."""

    def __init__(self, measured: Coverage) -> None:
        self._measured = measured
        self.seconds: dict[str, float] = {}
        self.bad: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._measured.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._measured.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self.bad.add(report.nodeid)


def _lines(file: str, sources: list[str], place: str) -> dict[str, Any]:
    """Run the quick tests of a file; return their seconds, and for each line of the sources which of them ran it, by number.

    A line that ran before the first test, as the modules were imported, has an entry without tests.
    """
    measured = Coverage(data_file=None, include=[str(Path(source).absolute()) for source in sources], config_file=False)
    measured.start()
    recorder = _Recorder(measured)
    pytest.main([file, "-m", "not full and not evidence", "--basetemp", place, *_PLAIN], plugins=[recorder])
    measured.stop()
    tests = [name for name in recorder.seconds if name not in recorder.bad]
    numbers, data = {name: number for number, name in enumerate(tests)}, measured.get_data()
    lines = {
        source: {
            line: sorted(numbers[name] for name in contexts if name in numbers)
            for line, contexts in data.contexts_by_lineno(str(Path(source).absolute())).items()
        }
        for source in sources
    }
    return {
        "tests": {name: round(recorder.seconds[name], 3) for name in tests},
        "bad": sorted(recorder.bad),
        "lines": {source: found for source, found in lines.items() if found},
    }


class _Chosen:
    """Plugin that runs only chosen tests, in their order, and notes which fail."""

    def __init__(self, names: list[str]) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self.failed: list[str] = []
        self.count = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self._places), key=lambda item: self._places[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.count += report.when == "call"
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def _tests(rounds: list[list[str]], place: str, everything: bool) -> dict[str, Any]:
    """Run rounds of tests, each of which loads its own files, until one fails, or `everything`; return which failed and how many ran."""
    failed: list[str] = []
    count = 0
    for names in rounds:
        plugin = _Chosen(names)
        files = dict.fromkeys(name.partition("::")[0] for name in names)
        status = pytest.main([*files, *(() if everything else ("-x",)), "--basetemp", place, *_PLAIN], plugins=[plugin])
        count += plugin.count
        failed += plugin.failed
        if not plugin.failed and status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            failed.append("conftest.py")  # nothing could be loaded
        if failed and not everything:
            break
    return {"failed": failed, "count": count}
