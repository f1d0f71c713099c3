"""Options that several commands share, under the names timm's users know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import click

from visattn._support.types import Space
from visattn.drawing.style import Style, StyleOptions
from visattn.errors import OptionError
from visattn.pipeline.preprocessing import Preprocessing

F = TypeVar("F", bound=Callable[..., Any])

_READING = ("max_pixels", "color_profile")
DEFAULT_MODEL = "vit_small_patch14_dinov2.lvd142m"


def model_options(command: F) -> F:
    """Which model, which weights, how it sees the photo."""
    return _all(
        command,
        click.option("--model", default=DEFAULT_MODEL, show_default=True, help="A timm name, or file.py:factory."),
        click.option("--weights", default="auto", show_default=True, help="auto (cache, then hub), none (random), or a FILE."),
        *_options(Preprocessing, ("img_size", "resize")),
        click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N."),
        click.option("--seed", type=int, default=0, show_default=True, help="Seed of random weights and of samples."),
    )


def photo_options(command: F) -> F:
    """How photos are read."""
    return _all(command, *_options(Preprocessing, _READING))


def reading(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `load_image` among the options."""
    return {name: options[name] for name in _READING}


def files_read(options: dict[str, Any]) -> list[Path]:
    """Return the files among the options that are read, which no output may replace."""
    model, weights = str(options.get("model") or ""), str(options.get("weights") or "auto")
    named = [model.rpartition(":")[0]] if ".py:" in model else []
    named += [weights] if weights not in ("auto", "none") else []
    return [Path(name) for name in named] + [options[name] for name in ("labels", "map_file") if options.get(name)]


def refuse_beside(option: str, others: Sequence[str]) -> None:
    """Refuse options that say nothing beside another one.

    Raises:
        OptionError: If one was given.
    """
    context = click.get_current_context()
    given = [name for name in others if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
    if given:
        flag = next(parameter.opts[0] for parameter in context.command.params if parameter.name == given[0])
        raise OptionError(f"{flag} says nothing beside {option}. Leave one of them out.")


def target_options(command: F) -> F:
    """What a class-specific method explains."""
    return _all(
        command,
        click.option("--target", help="Class that is explained, by index or name; the top class by default."),
        click.option("--versus", help="Another class, whose score is subtracted."),
        click.option(
            "--target-space",
            type=click.Choice(get_args(Space)),
            default="logit",
            show_default=True,
            help="Whose gradient is taken.",
        ),
        click.option("--labels", type=click.Path(path_type=Path), help="Names of the classes, one a line; ImageNet's are known."),
    )


def style_options(defaults: Mapping[str, Any] | None = None) -> Callable[[F], F]:
    """How maps are drawn: an option for each field of `Style`, with other defaults where a command has its own."""
    return lambda command: _all(command, *_options(Style, [field.name for field in fields(Style)], defaults))


def _options(record: type, names: Sequence[str], defaults: Mapping[str, Any] | None = None) -> list[Callable[[F], F]]:
    """An option for each of these fields of a record, by their types."""
    kinds, own = get_type_hints(record), defaults or {}
    known = {field.name: field for field in fields(record)}

    def made(field: Field[Any]) -> Callable[[F], F]:
        kind, flag = kinds[field.name], f"--{field.name.replace('_', '-')}"
        facts: dict[str, Any] = {"default": own.get(field.name, field.default), "help": field.metadata["help"]}
        if get_origin(kind) is Literal:
            return click.option(flag, type=click.Choice(get_args(kind)), show_default=True, **facts)
        if kind is bool:
            return click.option(f"{flag}/--no-{field.name}", **facts)
        if kind is float:
            return click.option(flag, type=float, show_default=True, **facts)
        if kind is int or int in get_args(kind):
            return click.option(flag, type=click.IntRange(field.metadata["least"]), show_default=True, **facts)
        several = field.default == ()
        numbers = float in get_args(kind)
        return click.option(flag, type=float if numbers else str, multiple=several, metavar=field.metadata["metavar"], **facts)

    return [made(known[name]) for name in names]


def style_of(options: Mapping[str, Any]) -> StyleOptions:
    """The style among the options."""
    return cast("StyleOptions", {field.name: options[field.name] for field in fields(Style)})


def output_options(command: F) -> F:
    """Where results go and how much is said."""
    return _all(
        command,
        click.option("-o", "--output", type=click.Path(path_type=Path), help="File; a folder where there are several."),
        click.option("--overwrite", is_flag=True, help="Replace what exists."),
        *_talk(),
    )


def talk_options(command: F) -> F:
    """How much is said."""
    return _all(command, *_talk())


def _talk() -> list[Callable[[F], F]]:
    return [
        click.option("--json", "as_json", is_flag=True, help="Machine-readable result on stdout."),
        click.option("-q", "--quiet", is_flag=True, help="No notes on stderr."),
        click.option("--debug", is_flag=True, help="Tracebacks, and the warnings of all libraries."),
    ]


def _all(command: F, *options: Callable[[F], F]) -> F:
    for option in reversed(options):
        command = option(command)
    return command
