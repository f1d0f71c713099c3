"""Commands that suggest their own name for another library's option, and commands that create some of their options on first use.

The latter options are derived from modules that import torch.
"""

from __future__ import annotations

import inspect
import os
import re
import types
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

import click

from visattn._support.checks import printable, whole_number
from visattn._support.language import FLAGS
from visattn._support.other_words import instead_of, option_meant
from visattn.errors import OptionError

if TYPE_CHECKING:
    ValueKind = click.ParamType[Any]
else:
    ValueKind = click.ParamType  # generic since click 8.4

__all__ = ["Command", "LateCommand", "ValueKind", "method_options"]

Late = Callable[[], Sequence[click.Option]]
_PLAIN: dict[Any, ValueKind] = {int: click.INT, float: click.FLOAT, str: click.STRING}
_IMAGES = ("image", "images", "img", "input", "photo", "image-path")
_BESIDE = ("image", "seed")  # commands have one image per map, and one option --seed for everything


class Command(click.Command):
    """Command that suggests its own name for an option of another library."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments after checking the names of options; see `click.Command.parse_args`."""
        parameters = self.get_params(ctx)
        flags = {flag for one in parameters for flag in (*one.opts, *one.secondary_opts)}
        takes_images = any(isinstance(one, click.Argument) and one.name in ("image", "images") for one in parameters)
        for given in args:
            _check_name(given, flags, takes_images)
        _check_once(args, parameters)
        return super().parse_args(ctx, args)


_EXPLAINED = ("target", "versus", "layer", "head", "query", "method")


def _check_once(args: Sequence[str], parameters: Sequence[click.Parameter]) -> None:
    """Check that what is explained was given once: several targets look as if they were all drawn, but click uses the last one.

    Raises:
        OptionError: If one was given several times.
    """
    for parameter in parameters:
        if isinstance(parameter, click.Option) and parameter.name in _EXPLAINED:
            values = [arg for arg in args if arg.partition("=")[0] in parameter.opts]
            if len(values) > 1:
                raise OptionError(
                    f"{parameter.opts[0]} was given {len(values)} times, but takes one value. Run the command for each."
                )


def _check_name(given: str, flags: Collection[str], takes_images: bool) -> None:
    """Check an argument that is an option of another library.

    Raises:
        OptionError: If the command has the same under another name, or does it in another way.
    """
    flag = given.partition("=")[0]
    name = flag.removeprefix("--")
    if not flag.startswith("--") or not name or flag in flags:
        return
    meant = option_meant(name, {each.removeprefix("--").replace("-", "_") for each in flags})
    if takes_images and name in _IMAGES:
        hint: str | None = "images are given without an option"
    elif meant is not None:
        hint = f"it is called --{meant.replace('_', '-')}"
    else:
        hint = instead_of(name)
    if hint is not None:
        raise OptionError(f"no such option {printable(flag)}; {hint}.")


class LateCommand(Command):
    """Command with options that `late` creates; they are inserted before the option named `before`, or before all others.

    With `spare`, they are created only if they may have been given.
    """

    def __init__(self, *arguments: Any, late: Late, before: str = "", spare: bool = False, **options: Any) -> None:  # noqa: ANN401
        """Store the function that creates options; all other arguments are those of `click.Command`."""
        super().__init__(*arguments, **options)
        self._late, self._before, self._spare, self._wanted = late, before, spare, True
        self._made: list[click.Option] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the created options."""
        return tuple(one.name for one in self._made or () if one.name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments; create the late options only if they may have been given, since that imports torch."""
        early = {flag for one in self.params for flag in (*one.opts, *one.secondary_opts)}
        given = {word.partition("=")[0] for word in args if word.startswith("-")}
        prefix = f"{ctx.auto_envvar_prefix}_"
        self._wanted = not (self._spare and given <= early) or any(name.startswith(prefix) for name in os.environ)
        return super().parse_args(ctx, args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, and create the late options on the first call that needs them; see `click.Command.get_params`."""
        if self._made is None and self._wanted:
            own = {option.name for option in self.params}  # an option of the command stands before one of its name
            self._made = [option for option in self._late() if option.name not in own]
            at = next((i for i, option in enumerate(self.params) if option.name == self._before), 0)
            self.params[at:at] = self._made
        return super().get_params(ctx)


class OneOf(ValueKind):
    """Option type that accepts several types: a number, one of some names, or any text."""

    def __init__(self, words: Sequence[str], kinds: Sequence[Any]) -> None:
        """Store the accepted names and types."""
        self._words, self._kinds = tuple(words), tuple(kind for kind in _PLAIN if kind in kinds)
        self.name = "|".join([*(_PLAIN[kind].name for kind in self._kinds if kind is not str), *self._words] or ["text"])
        if words and str in kinds:
            self.name += "|name"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:  # noqa: ANN401
        """Convert a value to the first type that it matches; see `click.ParamType.convert`."""
        if value not in self._words:
            if int in self._kinds and (number := whole_number(value)) is not None:
                return number
            if float in self._kinds:
                with suppress(ValueError):
                    return float(value)
        if value not in self._words and str not in self._kinds:
            self.fail(f"{value!r} is not one of: {self.name.replace('|', ', ')}", param, ctx)
        return value


def method_options() -> list[click.Option]:
    """Create an option for each parameter of any method, from the annotations and docstrings of their functions."""
    from visattn.core.methods import METHODS

    takes: dict[str, list[str]] = {}
    for name, method in METHODS.items():
        for parameter in method.parameters:
            takes.setdefault(parameter, []).append(name)
    options = []
    for parameter, names in takes.items():
        functions = [METHODS[name].function for name in names]
        facts = _type([get_type_hints(function)[parameter] for function in functions])
        if facts is not None and parameter not in _BESIDE:
            help_text = next((text for function in functions if (text := _told(function, parameter))), "")
            of = f"{names[0].split('.')[0]}: " if len(names) == 1 or all(name.startswith("captum") for name in names) else ""
            options.append(
                click.Option(
                    [FLAGS.get(parameter, f"--{parameter.replace('_', '-')}"), parameter],
                    default=None,
                    help=f"{of}{help_text}",
                    **facts,
                )
            )
    return options


def _type(hints: Sequence[Any]) -> dict[str, Any] | None:
    """Return the click type of an option from the annotations of the methods; None if no command line can express it."""
    flat = [part for hint in hints for part in _flat(hint)]
    words = [word for part in flat if get_origin(part) is Literal for word in get_args(part)]
    pairs = [part for part in flat if get_origin(part) is tuple]
    kinds = [kind for kind in _PLAIN if kind in flat]
    if pairs:
        return {"type": get_args(pairs[0])[0], "nargs": len(get_args(pairs[0]))}
    if words and not kinds:
        return {"type": click.Choice([*dict.fromkeys(words)])}
    if kinds == [str] or len(kinds) + bool(words) > 1:
        return {"type": OneOf([*dict.fromkeys(words)], kinds)}
    if kinds:
        return {"type": _PLAIN[kinds[0]]}
    return {"is_flag": True} if bool in flat else None


def _flat(hint: Any) -> list[Any]:  # noqa: ANN401
    if get_origin(hint) in (Union, types.UnionType):
        return [part for one in get_args(hint) for part in _flat(one)]
    return [hint]


def _told(function: Callable[..., Any], parameter: str) -> str:
    """Return the first sentence of a parameter's docstring; empty if it only refers elsewhere ("See ...")."""
    description = re.search(
        rf"^    {parameter}: (.+?)(?=\n    \w|\n\n|\n\w|\Z)", inspect.getdoc(function) or "", re.MULTILINE | re.DOTALL
    )
    text = " ".join(description[1].split()) if description else ""
    return "" if text.startswith("See ") else text.split(". ")[0].rstrip(".").replace("`", "") + "."
