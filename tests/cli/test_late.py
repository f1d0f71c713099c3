"""Options created from the signatures of methods: one per parameter, converted to the type that the method expects."""

from __future__ import annotations

from typing import Any, get_args

import click
import pytest

from visattn._support.types import Fusion
from visattn.core.command_line.late import method_options
from visattn.core.methods import METHODS

OPTIONS = {option.name: option for option in method_options()}
NOT_GIVEN = {"dtype", "image", "seed"}  # torch's own dtype, the index in a batch, and an option of every command


def test_every_parameter_of_every_method_has_an_option() -> None:
    parameters = {name for method in METHODS.values() for name in method.parameters}
    assert set(OPTIONS) == parameters - NOT_GIVEN


def test_every_option_has_a_help_text() -> None:
    assert all(option.help and len(option.help) > 10 and "`" not in option.help for option in OPTIONS.values())


def value(name: str, *texts: str) -> Any:
    option = OPTIONS[name]
    command = click.Command("overlay", params=[option], callback=lambda **given: given[name])
    return command.main([option.opts[0], *texts], standalone_mode=False)


@pytest.mark.parametrize(
    ("name", "texts", "expected"),
    [
        ("layer", ["-1"], -1),
        ("layer", ["all"], "all"),
        ("layer", ["blocks.3.attn"], "blocks.3.attn"),
        ("head", ["2"], 2),
        ("residual", ["0.25"], 0.25),
        ("residual", ["measured"], "measured"),
        ("grid_size", ["3", "4"], (3, 4)),
        ("signed", [], True),
        ("query", ["patch:1,2"], "patch:1,2"),
        ("last_layers", ["2"], 2),
        ("noise", ["0.5"], 0.5),
    ],
)
def test_option_texts_are_converted_to_values(name: str, texts: list[str], expected: object) -> None:
    found = value(name, *texts)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("head", "first", r"'first' is not one of: integer, all"),
        ("residual", "much", r"'much' is not one of: float, measured"),
        ("fusion", "median", r"'median' is not one of 'mean', 'max', 'min'"),
        ("last_layers", "2.5", r"'2.5' is not a valid integer"),
    ],
)
def test_invalid_option_texts_are_refused(name: str, text: str, told: str) -> None:
    with pytest.raises(click.BadParameter, match=told):
        value(name, text)


def test_choices_match_the_annotation() -> None:
    kind = OPTIONS["fusion"].type
    assert isinstance(kind, click.Choice)
    assert tuple(kind.choices) == get_args(Fusion)
