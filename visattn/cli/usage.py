"""What is said of an option or an argument that a command does not have: which commands have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

import click

from visattn.cli.help import COMMANDS


def command_of(name: str) -> click.Command:
    """Return a command of `COMMANDS`; its module is imported on the first call."""
    command: click.Command = getattr(import_module(COMMANDS[name].module), f"{name}_command")
    return command


def told(error: click.ClickException) -> str:
    """Return the message of an error in the usage as whole sentences; an unknown option is told alike with every version of click."""
    message = error.format_message()
    if isinstance(error, click.NoSuchOption):
        return _of_option(error.option_name, error.possibilities or ())
    if message.startswith("Got unexpected extra argument") and _takes_an_image(error):
        return f"{message}. These commands take several images: {', '.join(_having(lambda one: one.name == 'images'))}."
    return message if message.endswith((".", "?", "!")) else f"{message}."


def _of_option(name: str, similar: Sequence[str]) -> str:
    if having := _having(lambda one: name in one.opts):  # of more use than the options with a similar name
        return f"No such option '{name}' here; these commands have it: {', '.join(having)}."
    near = " or ".join(f"'{one}'" for one in sorted(similar))
    return f"No such option '{name}'." + f" Did you mean {near}?" * bool(near)


def _takes_an_image(error: click.ClickException) -> bool:
    context = getattr(error, "ctx", None)
    return context is not None and any(one.name == "image" for one in context.command.params)


def _having(fits: Callable[[click.Parameter], bool]) -> list[str]:
    """Return the names of the commands that have such an option or argument."""
    return [name for name in COMMANDS if any(map(fits, command_of(name).params))]
