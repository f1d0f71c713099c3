"""Calls of torch functions in variants: positional, by keyword, with `out`, in place, through views, and in other types."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.overrides import get_testing_overrides

from tests.capturing.moving import WIDTH
from tests.capturing.operations import listed
from tests.capturing.within.model import TOKENS, Program, called, quietly

Function = Callable[..., Any]
Arguments = Callable[[Tensor], tuple[Any, ...]]
ATTENTION = ("scaled_dot_product", "multi_head_attention")
TYPES = (torch.float16, torch.bfloat16, torch.float64)


@cache
def _names() -> dict[Function, list[str]]:
    """Return the names of the arguments of each function."""
    found = {}
    for func, stand_in in get_testing_overrides().items():
        try:
            found[func] = [
                name
                for name, parameter in inspect.signature(stand_in).parameters.items()
                if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            ]
        except (TypeError, ValueError):
            continue
    return found


def _sample() -> Tensor:
    return torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(5))


def _runs(func: Function, arguments: Arguments, expected: Tensor) -> bool:
    """Check whether a variant gives the same tokens as the positional call."""
    try:
        tokens = quietly(called, func, arguments, _sample())
    except Exception:
        return False
    return isinstance(tokens, Tensor) and tokens.shape == expected.shape and torch.equal(tokens, expected)


def _keyword(func: Function, names: list[str], arguments: Arguments, method: bool) -> Function:
    """Return a function of the same arguments that passes them by keyword; of a method, all but the first."""

    def call(*given: Any) -> Any:
        first = given[:1] if method else ()
        return func(*first, **dict(zip(names[len(first) :], given[len(first) :], strict=False)))

    return call


def _with_out(func: Function) -> Function:
    """Return a function that writes behind a class token of a prepared buffer, if its result is like the tokens."""

    def call(*given: Any) -> Any:
        room = torch.zeros(1, TOKENS + 1, WIDTH)
        room[:, :1] = 0.5
        func(*given, out=room[:, 1:])
        return room

    return call


def _with_new_out(func: Function) -> Function:
    def call(*given: Any) -> Any:
        room = torch.empty(0)
        func(*given, out=room)
        return room

    return call


def _through_a_view(func: Function, before: bool) -> Function:
    """Return a function that changes a view of a buffer in place: the result is the buffer, or a view called before."""

    def call(first: Tensor, *given: Any) -> Any:
        room = torch.zeros(1, TOKENS + 1, WIDTH)
        early = room.view(1, -1, WIDTH)
        room[:, :1] = 0.5
        view = room[:, 1:]
        view.copy_(first)
        func(view, *given)
        return early if before else room

    return call


def _base(func: Function) -> Function:
    """Return a function that changes the base in place, of which a view was called before."""

    def call(first: Tensor, *given: Any) -> Any:
        room = first.clone()
        view = room[:, :]
        func(room, *given)
        return view

    return call


def _typed(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    """Return arguments with all tensors of float32 in another type."""

    def cast(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.to(dtype) if x.dtype == torch.float32 else x
        return type(x)(map(cast, x)) if type(x) in (list, tuple) else x

    return lambda t: tuple(cast(x) for x in arguments(t))


def _program(name: str, func: Function, arguments: Arguments) -> Program:
    attention = 1 + any(word in name for word in ATTENTION)
    return Program("calls", name, lambda _, t: called(func, arguments, t), attention=attention, written=False)


def calls() -> Iterator[Program]:
    """Yield the variants of each function; each in at most one other type."""
    types, early = cycle(TYPES), cycle((False, True))
    for name, (func, arguments) in listed().calls.items():
        expected = quietly(called, func, arguments, _sample())
        last = name.rsplit(".", 1)[-1]
        method = name.startswith("torch.Tensor.")
        if last.endswith("__get__"):
            continue
        turn = sum(map(ord, name)) % 6
        if turn == 0:
            yield _program(f"{name}, positional", func, arguments)
        names = _names().get(func, [])
        if turn % 2 and len(names) >= len(arguments(_sample())) > (1 if method else 0):
            keyword = _keyword(func, names, arguments, method)
            if _runs(keyword, arguments, expected):
                yield _program(f"{name}, by keyword", keyword, arguments)
        if not method and not last.endswith("_"):
            if expected.shape == (1, TOKENS, WIDTH) and _tokens(_with_out(func), arguments) is not None:
                yield _program(f"{name}, out of a slice", _with_out(func), arguments)
            elif _runs(_with_new_out(func), arguments, expected):
                yield _program(f"{name}, out of an empty tensor", _with_new_out(func), arguments)
        if last.endswith("_") and not last.endswith("__"):
            before = next(early)
            if _tokens(_through_a_view(func, before), arguments) is not None:
                told = "a view called before" if before else "its base"
                yield _program(f"{name}, in a slice, read by {told}", _through_a_view(func, before), arguments)
                yield _program(f"{name}, of a base that has a view", _base(func), arguments)
        if turn in (1, 4):
            dtype = next(types)
            typed = _typed(arguments, dtype)
            if _tokens(func, typed) is not None:
                yield _program(f"{name}, in {str(dtype)[6:]}", func, typed)


def _tokens(func: Function, arguments: Arguments) -> Tensor | None:
    """Return the finite tokens that a call makes; None if it makes none."""
    try:
        tokens = quietly(called, func, arguments, _sample())
    except Exception:
        return None
    return tokens if isinstance(tokens, Tensor) and bool(tokens.isfinite().all()) else None
