"""Type checks for arguments of public functions, by their annotations, with messages in plain words."""

from __future__ import annotations

import inspect
import math
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, wraps
from numbers import Integral, Real
from typing import Any, Literal, ParamSpec, TypeVar, Union

from visattn._support.checks import shown
from visattn.errors import OptionError

P = ParamSpec("P")
R = TypeVar("R")
_ALIKE = frozenset({type(None), bool, str})  # types whose values all fit, or none; a number may not be finite
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "True or False",
    bytes: "bytes",
    type(None): "None",
    os.PathLike: "a path",
    Callable: "a function",
    Sequence: "a list",
    Iterable: "a list",
    tuple: "a tuple",
}


def typed(*, but: Collection[str] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function to check its arguments, except those in `but`, by its annotations; a wrong type raises `OptionError`."""

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            given = _named(function, args, kwargs)
            check_types(function, {name: value for name, value in given.items() if name not in but})
            return function(*args, **kwargs)

        return checked

    return decorated


def check_types(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Check arguments by the annotations of a function; arguments without an annotation pass.

    Raises:
        OptionError: If an argument has another type, of which the message states the expected one, or is a number that is not finite.
    """
    hints, fitting = _hints(function), _fitting(function)
    for name in given:
        value = given[name]
        if name not in hints or type(value) in fitting[name]:
            continue
        if not _fits(value, hints[name]):
            raise OptionError(f"{name} must be {_words(hints[name])}, got {shown(value)}.")
        if not all(map(_finite, value if isinstance(value, tuple) else (value,))):
            raise OptionError(f"{name} must be finite, got {shown(value)}.")
        if type(value) in _ALIKE and not _names_values(hints[name]):
            fitting[name].add(type(value))


@cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    plain: Any = inspect.unwrap(function)
    hints = {name: hint for name, hint in plain.__annotations__.items() if name != "return"}
    try:
        if inspect.isclass(plain):
            return typing.get_type_hints(plain)
        return typing.get_type_hints(types.SimpleNamespace(__annotations__=hints), globalns=plain.__globals__)
    except NameError:  # an annotation uses a name imported for type checkers only
        return {}


@cache
def _fitting(function: Callable[..., Any]) -> dict[str, set[type]]:
    """Return the types of which every value fits an argument, as far as they were met, by name of the argument."""
    return {name: set() for name in _hints(function)}


def _names_values(hint: Any) -> bool:  # noqa: ANN401
    """Check whether a hint names values beside numbers, so that not every string fits."""
    parts = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else ()
    return bool({int, float} & {*parts}) and any(typing.get_origin(part) is Literal for part in parts)


@cache
def _positional(function: Callable[..., Any]) -> tuple[str, ...]:
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return tuple(name for name, one in inspect.signature(function).parameters.items() if one.kind in kinds)


def _named(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip(_positional(function), args, strict=False)) | dict(kwargs)


def _fits(value: Any, hint: Any) -> bool:  # noqa: ANN401
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        parts = typing.get_args(hint)
        if {int, float} & {*parts}:  # beside numbers, names must be checked here: no later check covers them
            parts = tuple(
                value for part in parts for value in (typing.get_args(part) if typing.get_origin(part) is Literal else [part])
            )
        return any(value == part if isinstance(part, str) else _fits(value, part) for part in parts)
    if origin is Literal:
        return isinstance(value, str)  # unknown names are rejected later, by a message that lists the known ones
    if origin is tuple:
        parts = typing.get_args(hint)
        return isinstance(value, (tuple, list)) and (... in parts or len(value) == len(parts)) and _all(value, parts)
    if origin is not None and inspect.isclass(origin) and issubclass(origin, Iterable) and not issubclass(origin, Mapping):
        return isinstance(value, Iterable) and not isinstance(value, (str, bytes)) and _all(value, typing.get_args(hint)[:1] * 2)
    if hint is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    kind = origin or hint
    return not (inspect.isclass(kind) or kind is Callable) or _is(value, kind)


def _finite(value: Any) -> bool:  # noqa: ANN401
    """Check that a value is not a number beyond every float, or none; no later check of a range would refuse NaN."""
    try:
        return not isinstance(value, Real) or math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False


def _all(values: Iterable[Any], parts: Sequence[Any]) -> bool:
    """Check whether the elements fit; those of arrays and generators are not checked here."""
    if not isinstance(values, (tuple, list)) or not parts:
        return True
    hints = [parts[0]] * len(values) if ... in parts or len(parts) != len(values) else parts
    return all(_fits(value, hint) for value, hint in zip(values, hints, strict=True))


def _is(value: Any, kind: Any) -> bool:  # noqa: ANN401
    try:
        return isinstance(value, kind)
    except TypeError:  # a protocol that does not support isinstance
        return True


def _words(hint: Any) -> str:  # noqa: ANN401
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(part) for part in parts))
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin is tuple and ... not in parts:
        return f"{len(parts)} values, each {_words(parts[0])}"
    return _WORDS.get(origin or hint) or f"a {getattr(origin or hint, '__name__', hint)}"
