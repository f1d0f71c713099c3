"""The release: what keeps a commit from being one, what is tried, and when the command that uploads is given. No command really runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FILES = "visattn-0.1.0-py3-none-any.whl", "visattn-0.1.0.tar.gz"
NETWORKS = "visattn_networks-0.1.0-py3-none-any.whl", "visattn_networks-0.1.0.tar.gz"
UPLOAD = f"python -m twine upload {' '.join(f'dist/{name}' for name in FILES + NETWORKS)}"
Release = Callable[..., int]
Command = tuple[str, ...]


class Machine:
    """Answers to every command that the release runs, and a list of them.

    Attributes:
        ran: The commands.
        answers: What git says.
        size: Bytes of the wheel that is built.
        fails: Whether a command fails, and what it says last then.
    """

    def __init__(self) -> None:
        self.ran: list[Command] = []
        self.answers = {"status": "", "tag": "v0.1.0", "rev-parse": "abc"}
        self.size = 3_999_999
        self.fails: Callable[[Command], str] = lambda command: ""

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[Any]:
        words = tuple(command)
        self.ran.append(words)
        if words[0] == "git":
            return self._done(0, b"" if words[1] == "archive" else self.answers[words[1]])
        if words[1:3] == ("-m", "venv"):
            Path(words[3], "lib", "python3.11", "site-packages").mkdir(parents=True)
        elif words[1:3] == ("-m", "build"):
            self._build(Path(words[4]), NETWORKS if words[5].endswith("models") else FILES)
        elif words[-1].startswith("import sys, venv, ssl"):
            return self._done(0, f"{Path(words[0]).name.removeprefix('python')}.7\n")
        elif said := self.fails(words) or self._sentence(words):
            return self._done(2, said)
        return self._done(0, "")

    def _sentence(self, words: Command) -> str:
        """Return what a command says in the environment without extras."""
        extras = sys.modules["releasing.extras"]
        asked = [name for name, text in extras.COMMANDS.items() if words[1:] in (("-m", "visattn", *text.split()), ("-c", text))]
        if "release/plain/" not in words[0] or not asked:
            return ""
        return str(extras.IMPORTED.get(asked[0], f'error: Run: pip install "visattn[{asked[0]}]"'))

    def _build(self, folder: Path, names: Command) -> None:
        folder.mkdir(exist_ok=True)
        (folder / names[0]).write_bytes(bytes(self.size))
        (folder / "content").write_text("")
        with tarfile.open(folder / names[1], "w:gz") as archive:
            archive.add(folder / "content", names[1].removesuffix(".tar.gz") + "/content")
        (folder / "content").unlink()

    @staticmethod
    def _done(status: int, said: str | bytes) -> subprocess.CompletedProcess[Any]:
        return subprocess.CompletedProcess([], status, said, said if status else "")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Provide the machine in place of the real one."""
    made = Machine()
    monkeypatch.setattr(subprocess, "run", made.run)
    return made


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Write what the release reads of a project."""
    folder = tmp_path / "project"
    for name in ("pyproject.toml", "owner.toml", "CITATION.cff", "SECURITY.md", "mkdocs.yml", ".github/workflows/checks.yml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0 (2030-01-31)\n")
    for name in ("test_one.py", "maps/test_two.py", "oracles/three.py"):
        (folder / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "tests" / name).touch()
    return folder


@pytest.fixture
def release(project: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    """Return a function that runs the script with some words in that project, on a machine with two Pythons."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    for name in ("python3.11", "python3.12", "python3.12-config"):
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).touch()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "none"))
    module, owner = imported("release"), imported("owner")
    monkeypatch.setattr(module, "ROOT", project)
    monkeypatch.setattr(owner, "ROOT", project)

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["release.py", *words])
        return int(module.main())

    return run


def imported(name: str) -> ModuleType:
    import importlib

    return importlib.import_module(name)


def fill_in(project: Path, *, empty: str = "") -> None:
    """Fill in what only the owner knows, but for one line, and write it to its files."""
    names = tomllib.loads((project / "owner.toml").read_text())
    (project / "owner.toml").write_text("".join(f'{name} = "{"" if name == empty else "https://a.org"}"\n' for name in names))
    owner = imported("owner")
    for name, text in owner.lines(owner.known()).items():
        (project / name).write_text(owner._written(name, text))


@pytest.mark.parametrize(
    ("answer", "said", "reason"),
    [
        ("status", " M README.md", "the checkout has changes"),
        ("tag", "v0.0.9\nv0.1.0rc1", "the commit has no tag v0.1.0; run: git tag v0.1.0"),
    ],
)
def test_a_commit_that_is_no_release_is_refused_before_anything_is_built(
    release: Release, machine: Machine, capsys: pytest.CaptureFixture[str], answer: str, said: str, reason: str
) -> None:
    machine.answers[answer] = said
    assert release() == 1
    assert f"release: {reason}" in capsys.readouterr().err
    assert {words[0] for words in machine.ran} == {"git"}


def test_a_changelog_without_a_date_is_refused(release: Release, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "CHANGELOG.md").write_text("## 0.1.0 (not released yet)\n")
    assert release() == 1
    assert "CHANGELOG.md has no heading '## 0.1.0 (YYYY-MM-DD)'" in capsys.readouterr().err


def test_a_draft_needs_no_tag_but_gives_no_command(
    release: Release, machine: Machine, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_in(project)
    machine.answers |= {"tag": "", "status": "?? notes"}
    assert release("--draft") == 0
    out = capsys.readouterr().out
    assert "no tag v0.1.0" in out
    assert "the checkout has changes" in out
    assert "twine" not in out


def test_the_command_is_given_once_the_owner_filled_everything_in(
    release: Release, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert release() == 0
    first = capsys.readouterr().out
    fill_in(project, empty="email")
    assert release() == 0
    second = capsys.readouterr().out
    fill_in(project)
    assert release() == 0
    third = capsys.readouterr().out
    assert "owner.toml: authors" in first
    assert "twine" not in first
    assert second.splitlines()[-1] == "missing: owner.toml: email"
    assert third.splitlines()[-1].endswith(UPLOAD)


def test_nothing_is_uploaded(release: Release, project: Path, machine: Machine) -> None:
    fill_in(project)
    assert release() == 0
    assert not [words for words in machine.ran if "twine" in words or "upload" in words]


def test_a_wheel_over_the_limit_is_refused(release: Release, machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.size = 4_000_001
    assert release() == 1
    assert f"release: {FILES[0]} has 4.00 MB, more than 4" in capsys.readouterr().err
    assert not [words for words in machine.ran if "venv" in words]


def test_the_table_names_sizes_pythons_extras_and_tests(
    release: Release, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release()
    out = capsys.readouterr().out
    rows = {line.split("  ")[0]: line.split()[-1] for line in out.splitlines()}
    assert rows[FILES[0]] == rows[NETWORKS[0]] == "MB"
    assert {"Python 3.11.7", "Python 3.12.7", "extra flow", "extra networks", "extra ultralytics"} <= set(rows)
    assert "Python 3.14" in rows
    assert "not on this machine; the hosted workflow tests it" in out
    assert (project / "build" / "release.txt").read_text() in out
    assert len(out.splitlines()) < 40


def test_every_extra_of_users_is_tried(release: Release) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(imported("releasing.extras").COMMANDS) == set(declared) - {"all", "docs", "dev"}


def wheel_of_312(words: Command) -> str:
    return "pip: no wheel fits" if "/python-3.12.7/" in words[0] and words[-1].endswith(FILES[0]) else ""


def source_of_311(words: Command) -> str:
    return "no module" if "/python-3.11.7/" in words[0] and words[-1].endswith(NETWORKS[1]) else ""


def demo_of_312(words: Command) -> str:
    return "the demo broke" if "/python-3.12.7/" in words[0] and words[1:2] == ("demo",) else ""


def extra_video(words: Command) -> str:
    return "no codec" if "/extra-video/" in words[0] and words[3] == "video" else ""


def extra_ray_is_not_found(words: Command) -> str:
    return "pip: nothing fits" if words[-1] == "visattn[ray]" else ""


def sentence_of_cam(words: Command) -> str:
    return "Traceback" if "/plain/" in words[0] and words[-1] == "eigencam" else ""


def suite_of_maps(words: Command) -> str:
    return "FAILED tests/maps/test_two.py::test_x" if words[-1] == "tests/maps" else ""


@pytest.mark.parametrize(
    ("fails", "named"),
    [
        (wheel_of_312, "Python 3.12: wheel: pip install visattn-0.1.0-py3-none-any.whl failed: pip: no wheel fits"),
        (source_of_311, "Python 3.11: source: pip install --no-deps visattn-0.1.0.tar.gz"),
        (demo_of_312, "Python 3.12: source: visattn demo failed: the demo broke"),
        (extra_video, "extra video: with failed: no codec"),
        (extra_ray_is_not_found, "extra ray: pip install --find-links dist visattn[ray] failed: pip: nothing fits"),
        (sentence_of_cam, "extra cam: without failed: Traceback"),
        (suite_of_maps, "tests/maps: tests/maps failed: FAILED tests/maps/test_two.py::test_x"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_fails_is_named_and_tried_again(
    release: Release,
    machine: Machine,
    project: Path,
    capsys: pytest.CaptureFixture[str],
    fails: Callable[[Command], str],
    named: str,
) -> None:
    fill_in(project)
    machine.fails = fails
    assert release() == 1
    said = capsys.readouterr()
    part = named.partition(":")[0]
    assert f"release: {named}" in said.err
    assert said.out.count("FAILED: ") == 1
    assert said.out.splitlines()[-1] == f"missing: {part} failed"
    machine.fails = lambda words: ""
    assert release() == 0
    said = capsys.readouterr()
    assert said.err.strip() == f"{part},"
    assert said.out.splitlines()[-1].endswith(UPLOAD)


def test_a_run_that_was_interrupted_goes_on(
    release: Release, machine: Machine, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(words: Command) -> str:
        if "/python-3.12.7/" in words[0]:
            raise KeyboardInterrupt
        return ""

    machine.fails = interrupted
    with pytest.raises(KeyboardInterrupt):
        release()
    machine.fails, machine.ran = (lambda words: ""), []
    assert release() == 0
    assert not [words for words in machine.ran if "/python-3.11.7/" in words[0] or "build" in words]
    assert [words for words in machine.ran if "/python-3.12.7/" in words[0]]
    assert list((project / "build").rglob("site-packages")) == []


@pytest.mark.parametrize("changed", ["commit", "file"])
def test_nothing_is_kept_for_another_commit_or_other_files(
    release: Release, machine: Machine, project: Path, changed: str
) -> None:
    release()
    machine.ran = []
    if changed == "commit":
        machine.answers["rev-parse"] = "def"
    else:
        (project / "dist" / FILES[0]).write_bytes(b"other")
    release()
    assert len([words for words in machine.ran if words[1:3] == ("-m", "build")]) == 2
    assert [words for words in machine.ran if "/python-3.11.7/" in words[0]]


def test_environments_are_deleted_as_soon_as_they_were_judged(release: Release, machine: Machine, project: Path) -> None:
    most = 0

    def counted(words: Command) -> str:
        nonlocal most
        most = max(most, len(list((project / "build" / "release").rglob("site-packages"))))
        return ""

    machine.fails = counted
    release()
    assert most == 2  # an extra's, and the one that it stands on
    assert list((project / "build").rglob("site-packages")) == []


def test_parts_and_pythons_can_be_chosen(
    release: Release, machine: Machine, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_in(project)
    assert release("--only", "pythons", "--python", "3.12") == 0
    out = capsys.readouterr().out
    assert not [words for words in machine.ran if "/python-3.11.7/" in words[0] or "pytest" in words]
    assert "extra flow was not tried" in out
    assert "twine" not in out
    assert release("--python", "3.10") == 1
    assert "found Python 3.11, 3.12, none of 3.10" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        release("--only", "nothing")


def test_a_command_that_hangs_is_a_failure(
    release: Release, machine: Machine, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def hangs(words: Command) -> str:
        if words[1:2] == ("doctor",):
            raise subprocess.TimeoutExpired(list(words), 1800)
        return ""

    machine.fails = hangs
    assert release("--only", "pythons") == 1
    assert "Python 3.11: wheel: visattn doctor failed: still ran after 1800 s" in capsys.readouterr().err
