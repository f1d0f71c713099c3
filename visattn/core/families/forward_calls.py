"""Calls of a model with other inputs beside the pixels: by name, by position, and inside of other values."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from inspect import Parameter
from typing import Any, TypeGuard

from torch import Tensor, nn

from visattn._support.checks import printable, suggest
from visattn._support.nested import mapped
from visattn.core.capturing.watching import PICTURE
from visattn.errors import OptionError

_BY_NAME = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
_BY_POSITION = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD


def called(model: nn.Module, pixels: Tensor, inputs: Mapping[str, Any], place: str) -> Any:  # noqa: ANN401 - a model's own
    """Return what a model returns for pixels among other inputs; tokens are traced from the pixels.

    Args:
        model: The model.
        pixels: `(B, C, H, W)`. Inputs of one image are repeated for each.
        inputs: Other inputs by name, from `by_name`.
        place: Path of the pixels among the inputs, such as `rgb` or `batch.rgb`; empty: they are the first argument.
    """

    def of_all(path: str, leaf: Any) -> Any:  # noqa: ANN401
        return pixels if path == place else _copies(leaf, len(pixels))

    values = mapped(dict(inputs), of_all)
    if place and "." not in place:
        values[place] = pixels
    args = [] if place else [pixels]
    for parameter in _positional(model, values)[len(args) :]:
        if parameter.kind is parameter.VAR_POSITIONAL:
            args += values.pop(parameter.name, ())
        else:
            args.append(values.pop(parameter.name, parameter.default))
    token = PICTURE.set(pixels)
    try:
        return model(*args, **values)
    finally:
        PICTURE.reset(token)


def by_name(model: nn.Module, inputs: Mapping[Any, Any]) -> dict[str, Any]:
    """Return inputs by the names of the forward function's parameters.

    Those of `*views` are one list, in which None stands for a position that was not given.

    Args:
        model: The model.
        inputs: Inputs by name or by position, from 0.

    Raises:
        OptionError: If there is no such input, or one is given twice.
    """
    parameters = parameters_of(model)
    named: dict[str, Any] = {}
    for key, value in inputs.items():
        path = path_of(key, parameters)
        name, _, index = path.partition(".")
        if index:
            views = named.setdefault(name, [])
            views += [None] * (int(index) + 1 - len(views))
            views[int(index)] = value
        elif name in named:
            raise OptionError(f"the input {name} is given twice, by name and by position. Leave one out.")
        else:
            named[name] = value
    _check_names(model, named, parameters)
    return named


def path_of(key: str | int, parameters: Mapping[str, Parameter]) -> str:
    """Return the path of an input that is given by position, such as `1` or `1.rgb`, by the name of its parameter.

    Raises:
        OptionError: If the forward function has no such position.
    """
    first, dot, rest = str(key).partition(".")
    if not first.isdecimal() or first in parameters:
        return str(key)
    for position, (name, parameter) in enumerate(parameters.items()):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return f"{name}.{int(first) - position}{dot}{rest}"
        if position == int(first) and parameter.kind in _BY_POSITION:
            return f"{name}{dot}{rest}"
    raise OptionError(f"the model has no input at position {first}. {_listed(parameters)}")


def parameters_of(model: nn.Module) -> Mapping[str, Parameter]:
    """Return the parameters of the forward function by name; none if it has no signature, as a compiled or foreign one."""
    try:
        return inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return {}


def is_image(value: object) -> TypeGuard[Tensor]:
    """Check whether an input may be a picture: floats `(B, C, H, W)` with more than one position."""
    return isinstance(value, Tensor) and value.ndim == 4 and value.is_floating_point() and value.shape[2:].numel() > 1


def required_place(model: nn.Module, inputs: Mapping[str, Any], keyword: str = "") -> str | None:
    """Return the path of the only input that the model needs beside others, so that it takes the picture; None if it needs no more.

    Args:
        model: The model.
        inputs: The inputs, from `by_name`.
        keyword: Parameter that takes the pixels, if the model's family states it.

    Raises:
        OptionError: If more inputs than the picture are missing.
    """
    parameters = parameters_of(model)
    missing = [path for name, one in parameters.items() for path in _missing(one, inputs.get(name, one.default))]
    if keyword in missing:
        return keyword
    if len(missing) > 1:
        raise OptionError(
            f"one of the inputs {', '.join(missing)} is the photo, and the others are missing. Pass them among inputs."
        )
    return next(("" if path == next(iter(parameters)) else path for path in missing), None)


def optional_place(model: nn.Module, inputs: Mapping[str, Any], keyword: str = "") -> str | None:
    """Return the path of an input that the model may do without, but takes as the picture; None if it is given. See `required_place`."""
    first = keyword or next(iter(parameters_of(model)), "")
    return None if first in inputs else keyword


def _missing(parameter: Parameter, value: Any) -> list[str]:  # noqa: ANN401
    """Return the paths of what is missing of an input."""
    if parameter.kind is parameter.VAR_POSITIONAL:
        views = enumerate(() if value is parameter.empty else value)
        return [f"{parameter.name}.{index}" for index, view in views if view is None]
    return [parameter.name] if value is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD else []


def _positional(model: nn.Module, names: Collection[str]) -> list[Parameter]:
    """Return the parameters that cannot be given by name, and those before them, up to the last that is given."""
    every = list(parameters_of(model).values())
    last = max(
        (at for at, one in enumerate(every) if one.kind not in (*_BY_NAME, one.VAR_KEYWORD) and one.name in names), default=-1
    )
    return every[: last + 1]


def _check_names(model: nn.Module, inputs: Mapping[str, Any], parameters: Mapping[str, Parameter]) -> None:
    """Check that the forward function has these parameters.

    Raises:
        OptionError: If it lacks one.
    """
    if not parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    unknown = next((name for name in inputs if name not in parameters), None)
    if unknown is not None:
        near = suggest(unknown, parameters, 1)
        hint = f"; did you mean '{near[0]}'?" if near else "."
        raise OptionError(f"{type(model).__name__} has no input '{printable(unknown)}'{hint} {_listed(parameters)}")


def _listed(parameters: Mapping[str, Parameter]) -> str:
    names = [f"{_STARS.get(parameter.kind, '')}{name}" for name, parameter in parameters.items()]
    return f"Its inputs: {', '.join(names)}." if names else "It states no names of its inputs."


_STARS: Mapping[Any, str] = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}


def _copies(value: Any, count: int) -> Any:  # noqa: ANN401
    """Return an input of one image as one of several copies of that image."""
    is_of_one_image = isinstance(value, Tensor) and value.ndim and len(value) == 1
    return value.expand(count, *value.shape[1:]) if is_of_one_image else value
