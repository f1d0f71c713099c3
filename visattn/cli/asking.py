"""Method and target of a command, and the part of file names that states them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from visattn.cli.late import LateCommand
from visattn.errors import OptionError

if TYPE_CHECKING:
    from visattn.pipeline.question import Question

_LONGEST = 40  # characters of a choice in a file name


def question_of(options: dict[str, Any], **more: Any) -> Question:  # noqa: ANN401 - parameters of the method
    """Validate the method with its own options and the target, before a model is loaded."""
    from visattn.pipeline.question import ask
    from visattn.pipeline.targets import Target, read_labels

    given = {name: options[name] for name in parameters() if options[name] is not None} | more
    if options["method"] == "similarity" and "query" not in given:
        raise OptionError("similarity compares one patch with all others: pass --query pixel:X,Y or patch:ROW,COL.")
    labels = None if options["labels"] is None else read_labels(options["labels"])
    return ask(
        options["method"], given, Target(options["target"], options["versus"], options["target_space"], labels, options["prompt"])
    )


def parameters() -> tuple[str, ...]:
    """Return the names of the options that are parameters of methods."""
    command = click.get_current_context().command
    assert isinstance(command, LateCommand)  # noqa: S101
    return command.names


def kind_of(options: dict[str, Any]) -> str:
    """Return the part of the output's file name that states the method and the choices of what it shows."""
    parts = ["overlay" if options["method"] == "auto" else options["method"]]
    for name in ("target", "versus", "layer", "head", "query"):
        if options.get(name) is not None:
            value = re.sub(r"[^\w-]+", "_", str(options[name]))[:_LONGEST].strip("_")
            plain = name in ("target", "query") and not value.isdigit()
            parts.append(value if plain else f"{name}_{value}")
    return ".".join(parts)
