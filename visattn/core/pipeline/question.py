"""Method, parameters and target of an explanation, validated once and then used for any number of photos."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from visattn._support.checks import shown
from visattn._support.language import option, worded
from visattn._support.reprs import brief
from visattn._support.typed import check_types
from visattn.core.methods import METHODS, Method, name_of
from visattn.core.pipeline.arguments import head_of, query_of
from visattn.core.pipeline.targets import Target
from visattn.core.records import Recording
from visattn.errors import OptionError

__all__ = ["Question", "ask", "parameter_names"]

_EXAMPLES = {"query": "pixel:120,80", "donor": "other.jpg"}  # of parameters that have no default
_AUTO = ("relevance", "gradcam", "attention")


@dataclass(frozen=True, eq=False)
class Question:
    """Method, parameters and target of an explanation; made by `ask`.

    Attributes:
        name: Name of the method, or `auto`.
        method: The method; None for `auto`.
        parameters: Parameters of the method.
        target: Target of class-specific methods.
        among: Methods that `auto` may choose from.
    """

    name: str
    method: Method | None = field(metadata={"decides": False})  # it follows from the name
    parameters: Mapping[str, Any]
    target: Target = field(default_factory=Target)
    among: tuple[str, ...] = ()

    __repr__ = brief

    @property
    def of_a_class(self) -> bool:
        """True if a target was given."""
        return self.target.given

    @property
    def runs_alone(self) -> str:
        """Why an image needs passes of its own: `terms` of its score, or more of them, `score`, `replay` or `patch`; else empty."""
        needs = self.method.needs if self.method else ()
        return next((need for need in ("terms", "score", "replay", "patch") if need in needs), "")

    def settled(self, recording: Recording) -> Question:
        """Replace `auto` by a method that applies to a recording.

        It is the first of these that applies: relevance, if attention can be multiplied across layers; Grad-CAM, if a target was given
        or the model has no self-attention; else attention.
        """
        if self.method is not None:
            return self
        name = self.among[0] if self.of_a_class else self.among[-1]
        attends = any(record.kind == "self" for record in recording)
        if "relevance" in self.among and METHODS["relevance"].accepts(recording) is None:
            name = "relevance"
        elif "gradcam" in self.among and (self.of_a_class or not attends) and METHODS["gradcam"].accepts(recording) is None:
            name = "gradcam"
        return Question(name, METHODS[name], self.parameters, self.target, self.among)


def parameter_names() -> list[str]:
    """Return the names of the parameters of all methods."""
    return sorted({name for method in METHODS.values() for name in method.parameters})


def named(method: Any) -> str:  # noqa: ANN401 - checked here
    """Return the name of a method that is given by name, by an alias, in another spelling, or as a function of `visattn.methods`.

    Raises:
        OptionError: If there is no such method.
    """
    if callable(method):
        method = next(
            (name for name, candidate in METHODS.items() if candidate.function is method), getattr(method, "__name__", "")
        )
    if not isinstance(method, str):
        raise OptionError(
            f"method must be a name in {worded('visattn.methods.METHODS', '`visattn list --methods`')}, got {shown(method)}."
        )
    return method if method == "auto" else name_of(method)


def check_layer(question: Question) -> None:
    """Check the type of the layer, once its model is known.

    Raises:
        OptionError: If it has the wrong type for the method, or for all methods that `auto` may choose from.
    """
    if "layer" in question.parameters:
        names = question.among or (question.name,)
        _any_accepts(names, {"layer": question.parameters["layer"]})


def _check(methods: Sequence[str], given: Mapping[str, Any]) -> None:
    """Check the types of parameters, without the layer, whose model is not known yet."""
    if present := {name: value for name, value in given.items() if name != "layer"}:
        _any_accepts(methods, present)


def _any_accepts(methods: Sequence[str], given: Mapping[str, Any]) -> None:
    for name in methods[:-1]:
        with suppress(OptionError):
            return check_types(METHODS[name].function, given)
    return check_types(METHODS[methods[-1]].function, given)


def _taking(parameters: Iterable[str]) -> str:
    """Return the names of the methods that have all these parameters."""
    return ", ".join(name for name, method in METHODS.items() if set(parameters) <= set(method.parameters))


def ask(method: str = "auto", parameters: Mapping[str, Any] | None = None, target: Target | None = None) -> Question:
    """Validate a method, its parameters and a target.

    Args:
        method: Name from `visattn.methods.METHODS`, or `auto`.
        parameters: Parameters of the method; for `auto`, of a method that it may choose.
        target: Target of a class-specific method; by default the top class.

    Returns:
        The question.

    Raises:
        OptionError: If the method or a parameter is unknown, a parameter is missing or has the wrong type, or a target is given to a
            method that does not depend on one.
    """
    given = {name: value.item() if isinstance(value, np.generic) else value for name, value in (parameters or {}).items()}
    given = head_of(given) | ({"query": query_of(given["query"])} if "query" in given else {})
    target = target or Target()
    method = named(method)
    if method == "auto":
        among = tuple(name for name in _AUTO if not given or set(given) <= set(METHODS[name].parameters))
        if not among:
            able = f": {names}" if (names := _taking(given)) else ""
            raise OptionError(f"method 'auto' has no parameters {', '.join(given)}. Name the method{able}.")
        _check(among, given)
        return Question(method, None, given, target, among)
    chosen = METHODS[method]
    for name in given:
        if name not in chosen.parameters:
            able = f" Methods with it: {names}." if (names := _taking([name])) else ""
            raise OptionError(f"method '{method}' has no parameter '{name}'. It has: {', '.join(chosen.parameters)}.{able}")
    _check([method], given)
    if lacking := [name for name in chosen.required if name not in given]:
        example = option(lacking[0], _EXAMPLES.get(lacking[0], "VALUE"))
        raise OptionError(f"method '{method}' needs {', '.join(map(option, lacking))}. For example: {example}.")
    question = Question(method, chosen, given, target)
    if question.of_a_class and not chosen.targeted:
        raise OptionError(f"method '{method}' does not depend on a class. Leave the target out, or use method 'relevance'.")
    return question
