"""Plain English: docstrings, spelling, long sentences, and a table for every name that changed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import pytest
from click import Command, Context, Group

from visattn.cli.help import COMMANDS

ROOT = Path(__file__).parents[1]


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


WORDS = script("words")


def test_every_file_reads_well() -> None:
    assert not [(path.name, *fault) for path in WORDS.tracked() for fault in WORDS.faults(path)]


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ('def f() -> None:\n    """The color of a cell."""\n', "begins with 'The'"),
        ('def f() -> None:\n    """Whether it fits."""\n', "begins with 'Whether'"),
        ('class A:\n    """What a layer gives."""\n', "begins with 'What'"),
        ('class A:\n    """The same of a layer."""\n', "begins with 'The'"),
        ('"""A module."""\nx = 1  # the col' + "our\n", "not American"),
        ('"""A module."""\nraise ValueError("pixels in the pl' + 'ace of tokens")\n', "reads badly"),
    ],
)
def test_bad_words_are_found(code: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(code)
    assert [text for _, text in WORDS.faults(path) if fault in text]


def test_good_words_pass(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""Colors."""\n\n\nclass A:\n    """A cell."""\n\n    @property\n    def color(self) -> str:\n        """The color."""\n\n'
        '    def shift(self) -> None:\n        """Shift the cell."""\n'
    )
    assert not list(WORDS.faults(path))


@pytest.mark.parametrize(("count", "found"), [(35, 0), (36, 1)])
@pytest.mark.parametrize("form", ["{}.", "- {}.", "| {} |", 'A. {}. "quoted"', "[{}.](x.md)", "# {}"])
def test_sentences_of_more_than_35_words_are_found(form: str, count: int, found: int) -> None:
    text = form.format(" ".join(["Word"] * count))
    assert len(list(WORDS.long_sentences(text))) == found


def test_quotes_and_code_do_not_make_a_sentence_long() -> None:
    words = " ".join(["word"] * 40)
    assert not list(WORDS.long_sentences(f'It says "{words}".\n\n```\n{words}\n```\n\nUse `{words}`.\n'))


def public() -> set[str]:
    """Return public names: `module.name`, `module.name(parameter)`, `module.Class.attribute`, and options of the commands."""
    found = set()
    for module in script("api").packages():
        whole = importlib.import_module(module)
        for name in whole.__all__:
            value = getattr(whole, name)
            found.add(f"{module}.{name}")
            if callable(value) and not isinstance(value, ModuleType):
                found |= parts_of(f"{module}.{name}", value)
    for name in COMMANDS:
        found |= options_of(f"visattn {name}", getattr(importlib.import_module(f"visattn.cli.{name}"), f"{name}_command"))
    return found


def parts_of(name: str, value: Any) -> set[str]:
    found = parameters_of(name, value)
    if not inspect.isclass(value):
        return found
    own = [one for one in value.__mro__ if one.__module__.startswith("visattn")]
    for attribute in {attribute for one in own for attribute in (*vars(one), *getattr(one, "__annotations__", {}))}:
        if not attribute.startswith("_"):
            found.add(f"{name}.{attribute}")
            if inspect.isfunction(member := getattr(value, attribute, None)):
                found |= parameters_of(f"{name}.{attribute}", member)
    return found


def parameters_of(name: str, value: Any) -> set[str]:
    try:
        every = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):  # some types of Python have none
        return set()
    named = [one.name for one in every if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL) and one.name != "self"]
    for one in every:
        if one.kind is one.VAR_KEYWORD and "Unpack" in str(one.annotation):  # the keywords stand in a TypedDict
            (options,) = get_args(
                get_type_hints(inspect.unwrap(value.__init__ if inspect.isclass(value) else value), include_extras=True)[one.name]
            )
            named += get_type_hints(options)
    return {f"{name}({one})" for one in named}


def options_of(name: str, command: Command) -> set[str]:
    if isinstance(command, Group):
        return {option for sub, one in command.commands.items() for option in options_of(f"{name} {sub}", one)}
    return {
        f"{name} {flag}"
        for one in command.get_params(Context(command))
        for flag in (*one.opts, *one.secondary_opts)
        if flag.startswith("--")
    }


def renamed() -> dict[str, list[str]]:
    """Return the table of the changelog: old name to new ones."""
    rows = re.findall(r"^\| `([^`|]+)` \| (`[^|]+`) \|$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    return {old: re.findall(r"`([^`]+)`", new) for old, new in rows}


def test_every_name_that_changed_is_in_the_table_of_the_changelog() -> None:
    """`golden/names.json` holds the public names before the great renaming."""
    before, now, table = set(json.loads((ROOT / "tests" / "golden" / "names.json").read_text())), public(), renamed()
    assert table
    assert not [old for old in table if old in now]
    assert not [new for names in table.values() for new in names if new not in now]

    def is_told(name: str) -> bool:
        """Check whether the table has the name itself, its owner, or the parameter of the same name."""
        owner, _, last = name.partition("(")[0].rpartition(".")
        names = {name, name.partition("(")[0], owner, f"{owner}({last})"}
        homes = {old.rpartition(".")[2] for old in table}  # a name may be public in two modules
        return bool(names & set(table)) or bool({one.rpartition(".")[2] for one in names} & homes)

    assert not sorted(name for name in before - now if not is_told(name))
