"""Options of functions: dataclass fields that are also options of commands, and keywords that are checked by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import field
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from visattn._support.checks import printable, suggest
from visattn._support.faces import Later
from visattn.errors import OptionError

if TYPE_CHECKING:
    from visattn._support import other_words
else:
    other_words = Later("visattn._support.other_words")

P = ParamSpec("P")
R = TypeVar("R")
_MANY = 25  # options that a message does not list


def option(default: Any, text: str, *, metavar: str | None = None, least: int | None = None, decides: bool = True) -> Any:  # noqa: ANN401 - of any type
    """Create a dataclass field with metadata for the command line.

    Args:
        default: Default value.
        text: One line for `--help`.
        metavar: Placeholder of the value in `--help`.
        least: Smallest number that the command line accepts.
        decides: Whether results depend on it.
    """
    return field(default=default, metadata={"help": text, "metavar": metavar, "least": least, "decides": decides})


def with_options(*kinds: type, more: Callable[[], Collection[str]] = tuple) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function to refuse unknown keywords, with a suggestion.

    Args:
        kinds: `TypedDict`s of the function's `**options`.
        more: Function that returns the names of further options.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        named = Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD
        own = [name for name, one in signature(function).parameters.items() if one.kind in named and name != "self"]
        own += [name for kind in kinds for name in kind.__annotations__]

        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            if others := [name for name in kwargs if name not in own]:
                known = [*own, *more()]
                for name in others:
                    if name not in known:
                        raise _unknown(name, known, function.__name__)
            return function(*args, **kwargs)

        return called

    return decorated


def _unknown(name: str, known: Sequence[str], what: str) -> OptionError:
    """Return the error for an option that nothing takes; it says what to do instead, or names the closest option."""
    meant, instead, near = other_words.option_meant(name, known), other_words.instead_of(name), suggest(name, known, 1)
    hint = (
        f"; it is called {meant}."
        if meant
        else f"; {instead}."
        if instead
        else f"; did you mean {near[0]}?"
        if near
        else f". It has: {', '.join(dict.fromkeys(known))}."
        if len(known) < _MANY
        else f". Its docstring, help(visattn.{what}), lists them."
    )
    return OptionError(f"{what} has no option {printable(name)}{hint}")
