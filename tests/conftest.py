"""Shared fixtures: a real model, a recording of each photo, and the table of measured figures."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import visattn
from tests import messages
from visattn import data
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.passes import look
from visattn.core.records import Recording

Figures = Callable[[str, float, str], None]
Seen = Callable[[str], tuple[Prepared, Recording]]

_FIGURE = "figure"


def pytest_configure(config: pytest.Config) -> None:
    """Limit torch to one thread per process: on shared cores, threads that wait for each other take five times as long."""
    torch.set_num_threads(1)
    if folder := os.environ.get("VISATTN_MESSAGES"):
        messages.record(Path(folder))
    for number in (signal.SIGHUP, signal.SIGINT):  # a run in the background inherits that they are ignored, as by nohup
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL if number is signal.SIGHUP else signal.default_int_handler)
    for name in ("no_proxy", "NO_PROXY"):  # tests start servers of their own
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1,localhost")))


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Start each test from the same random state, and restore the global state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    """Record measured figures and their bounds; the run ends with a table of all figures."""

    def note(name: str, value: float, bound: str) -> None:
        request.node.user_properties.append((_FIGURE, [name, f"{value:.3g}", bound]))

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures; they are stored in the test reports, so those of xdist workers are included."""
    rows = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, value in report.user_properties
        if name == _FIGURE and isinstance(value, (list, tuple))
    ]
    if rows:
        terminalreporter.section("figures")
        widths = [max(len(str(row[i])) for row in rows) for i in range(2)]
        for name, value, bound in sorted(map(tuple, rows)):
            terminalreporter.write_line(f"{name:<{widths[0]}}  {value:>{widths[1]}}  {bound}")


@pytest.fixture(scope="session")
def dinov2() -> nn.Module:
    """Load the real DINOv2 ViT-S/14, which takes any input size."""
    return visattn.load_model(data.OFFLINE_MODEL, weights=data.offline_weights())


@pytest.fixture(scope="session")
def seen(dinov2: nn.Module) -> Seen:
    """Return a function that prepares a photo in full for DINOv2 and returns it with its recording."""

    @cache
    def of(name: str) -> tuple[Prepared, Recording]:
        prepared = visattn.prepare(visattn.load_image(data.photo_path(name)), dinov2, resize="fit")
        return prepared, look(dinov2, prepared)

    return of


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """Create a folder that other users can access; pytest's own folders are private."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.fixture
def ordinary_user(public_folder: Path) -> Iterator[None]:
    """Run one test as an ordinary user, since root may read and write everything."""
    del public_folder  # requested so that root removes it again
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    yield
    if root:
        os.seteuid(0)
