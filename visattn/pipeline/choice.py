"""Which method answers: the parameters that it takes, and what `auto` stands for."""

from __future__ import annotations

from typing import Any

from visattn._support.typed import check_types
from visattn.errors import OptionError
from visattn.methods import METHODS, method_of
from visattn.records import Recording

_AUTO = ("relevance", "gradcam", "attention")


def check_parameters(method: str, parameters: dict[str, Any]) -> None:
    """Refuse a parameter that a method does not have, of `auto` one that none of its methods has, and the lack of one that it needs.

    Raises:
        OptionError: If the method or a parameter is unknown, or one is missing.
    """
    if method == "auto" and not candidates(parameters):
        raise OptionError(f"method 'auto' has no parameters {', '.join(parameters)}. Name the method.")
    if method == "auto":
        return
    known = method_of(method)
    for name in parameters:
        if name not in known.parameters:
            raise OptionError(f"method '{method}' has no parameter '{name}'. It has: {', '.join(known.parameters)}.")
    check_types(known.function, parameters)
    if lacking := [name for name in known.required if name not in parameters]:
        raise OptionError(f"method '{method}' needs {', '.join(lacking)}. For example: query=\"pixel:120,80\".")


def candidates(parameters: dict[str, Any]) -> list[str]:
    """The methods that `auto` may stand for."""
    return [name for name in _AUTO if set(parameters) <= set(METHODS[name].parameters)]


def chosen(recording: Recording, among: list[str], asked: bool) -> str:
    """The first method that applies: relevance where layers compose; for what has no self-attention Grad-CAM; else attention."""
    if "relevance" in among and METHODS["relevance"].accepts(recording) is None:
        return "relevance"
    attends = any(record.kind == "self" for record in recording)
    if "gradcam" in among and (asked or not attends) and METHODS["gradcam"].accepts(recording) is None:
        return "gradcam"
    return among[0] if asked else among[-1]
