"""Description of a method: its function, its needs, and when it applies. Each method's file describes its own methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, signature
from typing import Any, Literal

from visattn._support.reprs import brief
from visattn.core.maps import AttentionMap
from visattn.core.records import Recording

__all__ = ["Method"]

Refusal = Callable[[Recording], str | None]
Need = Literal[
    "attention",
    "gradients",
    "layer gradients",
    "values",
    "features",
    "cam layer",
    "gates",
    "glimpses",
    "patch",
    "positions",
    "replay",
    "score",
    "terms",
]
_RUN_AGAIN = "replay", "scored", "patches"  # arguments that the pipeline passes


def _nothing_more(_parameters: Mapping[str, Any]) -> frozenset[Need]:
    return frozenset()


@dataclass(frozen=True, kw_only=True)
class Method:
    """Description of a method: its function, its needs, and when it applies.

    Attributes:
        function: Function from a recording and the method's own parameters to a map.
        needs: Contents that the recording must have for any parameters. `cam layer` is the features of one layer, by default the one
            that `families.cam_layer` names. `replay` and `score` are arguments of their own, see `visattn.methods`.
        accepts: Function that returns why the method does not apply to a recording, or None if it does.
        targeted: Whether the method explains a class.
        sinks: Whether sinks can appear in the map as bright spots.
        more: Function from the parameters to further contents that the recording must have.
        lacking: Error message for models that have nothing the method can use.
        aliases: Other names of the method.
    """

    function: Callable[..., AttentionMap]
    needs: frozenset[Need]
    accepts: Refusal
    targeted: bool = False
    sinks: bool = False
    more: Callable[[Mapping[str, Any]], frozenset[Need]] = _nothing_more
    lacking: str | None = None
    aliases: tuple[str, ...] = ()

    __repr__ = brief

    def wants(self, parameters: Mapping[str, Any]) -> frozenset[Need]:
        """Return what the recording must contain for these parameters."""
        return self.needs | self.more(parameters)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the method's own parameters."""
        return tuple(name for name in [*_parameters(self.function)][1:] if name not in _RUN_AGAIN)

    @property
    def required(self) -> tuple[str, ...]:
        """Names of the method's own parameters that have no default."""
        own = _parameters(self.function)
        return tuple(name for name in self.parameters if own[name].default is Parameter.empty)


@cache
def _parameters(function: Callable[..., AttentionMap]) -> Mapping[str, Parameter]:
    return signature(function).parameters


def needs(*names: Need) -> frozenset[Need]:
    """Build the set of contents that a recording must have."""
    return frozenset(names)


def attention_method(function: Callable[..., AttentionMap], accepts: Refusal, **facts: Any) -> Method:  # noqa: ANN401 - of `Method`
    """Describe a method that reads only attention."""
    return Method(function=function, needs=needs("attention"), accepts=accepts, **facts)


def gradient_method(function: Callable[..., AttentionMap], accepts: Refusal, **facts: Any) -> Method:  # noqa: ANN401
    """Describe a method that reads attention and the gradient of a score."""
    return Method(function=function, needs=needs("attention", "gradients"), accepts=accepts, targeted=True, sinks=True, **facts)


def attribution_method(function: Callable[..., AttentionMap], *aliases: str) -> Method:
    """Describe a method that needs only pixels and a score."""
    return Method(function=function, needs=needs("score"), accepts=lambda _: None, targeted=True, aliases=aliases)
