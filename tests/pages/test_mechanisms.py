"""Every command in the tables of mechanisms is one that the command line takes, and every class that is named exists."""

from __future__ import annotations

import re
import shlex

import click
import pytest

import visattn.models
import visattn.nn
from tests.pages.blocks import ROOT
from visattn.cli.usage import command_of

PAGE = (ROOT / "docs" / "mechanisms.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"`(visattn [^`]+)`", PAGE)))


def test_the_page_has_commands() -> None:
    assert len(COMMANDS) > 30


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_page_are_taken(command: str) -> None:
    name, *words = shlex.split(command)[1:]
    with command_of(name).make_context(name, words, parent=click.Context(click.Command("visattn"))):
        pass


def test_classes_of_the_page_exist() -> None:
    named = re.findall(r"`(?:visattn\.models\.)?([A-Z][A-Za-z]+)`", PAGE)
    assert len(named) > 5
    assert not [name for name in named if not hasattr(visattn.nn, name) and not hasattr(visattn.models, name)]
