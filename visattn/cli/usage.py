"""What is said of an option or an argument that a command does not have: which commands have it."""

from __future__ import annotations

from importlib import import_module

import click

from visattn.cli.help import COMMANDS


def command_of(name: str) -> click.Command:
    """Return a command of `COMMANDS`; its module is imported on the first call."""
    command: click.Command = getattr(import_module(COMMANDS[name].module), f"{name}_command")
    return command


def told(error: click.ClickException) -> str:
    """Return the message of an error in the usage as whole sentences."""
    message = error.format_message()
    if isinstance(error, click.NoSuchOption):
        having = [name for name in COMMANDS if any(error.option_name in parameter.opts for parameter in command_of(name).params)]
        if having:  # of more use than the options with a similar name
            return f"No such option '{error.option_name}' here; these commands have it: {', '.join(having)}."
    if message.startswith("Got unexpected extra argument"):
        having = [name for name in COMMANDS if any(parameter.nargs == -1 for parameter in command_of(name).params)]
        return f"{message}. These commands take several images: {', '.join(having)}."
    return message if message.endswith((".", "?", "!")) else f"{message}."
