"""Method and target of a command, and the parts of file names that state them and the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import click

from visattn.core.command_line.late import LateCommand
from visattn.core.command_line.shared_options import DEFAULT_MODEL
from visattn.errors import OptionError

if TYPE_CHECKING:
    from visattn.core.pipeline.question import Question

__all__ = ["choices_of", "kind_of", "model_of", "parameters", "question_of", "short_name"]

_CHOICES = "target", "versus", "target_space", "prompt", "layer", "head", "query"  # this order in a file name, before others
_USUAL = {"target_space": "logit"}  # what goes without saying
_PLAIN = "target", "prompt", "query"  # whose values tell what they are
_LONGEST = 40  # characters of a choice in a file name
_DIGEST = 6  # characters that tell two long names apart


def question_of(options: dict[str, Any], **more: Any) -> Question:  # noqa: ANN401 - parameters of the method
    """Validate the method with its own options and the target, before a model is loaded."""
    from visattn.core.pipeline.label_files import read_labels
    from visattn.core.pipeline.question import ask
    from visattn.core.pipeline.targets import Target

    given = {name: options[name] for name in parameters() if options[name] is not None} | more
    if options["method"] == "similarity" and "query" not in given:
        raise OptionError("similarity compares one patch with all others: pass --query pixel:X,Y or patch:ROW,COL.")
    labels = None if options["labels"] is None else read_labels(options["labels"])
    told = {name: options[name] for name in ("versus", "target_space", "prompt", "task")}
    return ask(options["method"], given, Target(options["target"], labels=labels, **told))


def parameters() -> tuple[str, ...]:
    """Return the names of the options that are parameters of methods."""
    command = click.get_current_context().command
    assert isinstance(command, LateCommand)  # noqa: S101
    return command.names


def kind_of(options: dict[str, Any]) -> str:
    """Return the part of the output's file name that states the method and the choices of what it shows."""
    method = "overlay" if options["method"] == "auto" else options["method"]
    stated = {name: value for name, value in options.items() if value != _USUAL.get(name)}
    return ".".join([method, *choices_of(stated, dict.fromkeys((*_CHOICES, *parameters())))])


def choices_of(options: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return a part of a file name for each of these options that is given."""
    return [_part(name, options[name]) for name in names if options.get(name) is not None]


def _part(name: str, value: object) -> str:
    if value is True:
        return name
    text = _shortened(re.sub(r"[^\w-]+", "_", str(value)).strip("_"), str(value))
    return text if name in _PLAIN and not text.isdigit() else f"{name}_{text}"


def model_of(options: Mapping[str, Any]) -> str:
    """Return the part of the output's file name that states the model and weights of one's own; empty for the default model."""
    model, weights = options["model"], options["weights"]
    if (model, weights) == (DEFAULT_MODEL, "auto"):
        return ""
    seed = f"_seed_{options['seed']}" if options["seed"] else ""
    own = f"none{seed}" if weights == "none" else "" if weights == "auto" else short_name(weights)
    return "".join(f"{part}." for part in (short_name(model), own) if part)


def short_name(source: str) -> str:
    """Return a part of a file name for a model, a repository or a path: at most 40 letters, digits, dashes and underscores.

    Of a path the last two names are taken, as many folders are called `final`. Long names end in a digest, so they differ if the sources
    do.
    """
    kind, path = re.fullmatch(r"([a-z-]+:)?(.*)", source, re.DOTALL).groups("")  # type: ignore[union-attr] # anything matches
    names = [name for name in path.split("/") if name not in ("", ".", "..")]
    return _shortened(re.sub(r"[^\w-]+", "_", kind + "_".join(names[-2:])).strip("_") or "model", source)


def _shortened(name: str, source: str) -> str:
    """Return a name of at most 40 characters; of a longer one the end is a digest of its source."""
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST - _DIGEST - 1]}_{sha256(source.encode(errors='surrogateescape')).hexdigest()[:_DIGEST]}"
