"""What is known of a method: how it is called, what it needs, and when it applies. Each method's file says it of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, Literal

from visattn.maps import AttentionMap
from visattn.records import Recording

Refusal = Callable[[Recording], str | None]
Need = Literal[
    "attention", "gradients", "layer gradients", "values", "features", "cam layer", "gates", "glimpses", "replay", "score"
]
_RUN_AGAIN = "replay", "scored"  # arguments that the pipeline gives


def _nothing_more(_parameters: Mapping[str, Any]) -> frozenset[Need]:
    return frozenset()


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method: how to call it, and when it applies.

    Attributes:
        function: From a recording and its own parameters to a map.
        needs: What the recording must hold, whatever the parameters; `cam layer`: features of one layer, by default of that which
            `families.cam_layer` names; `replay` and `score` are arguments of their own, see `visattn.methods`.
        accepts: Why it does not apply to a recording, or None.
        targeted: Whether it explains a class.
        sinks: Whether sinks can show in its map as bright spots.
        more: What the recording must hold beside that, given the parameters.
        lacking: What is said where a model has nothing of what is needed.
        aliases: Other names it is known by.
    """

    function: Callable[..., AttentionMap]
    needs: frozenset[Need]
    accepts: Refusal
    targeted: bool = False
    sinks: bool = False
    more: Callable[[Mapping[str, Any]], frozenset[Need]] = _nothing_more
    lacking: str | None = None
    aliases: tuple[str, ...] = ()

    def wants(self, parameters: Mapping[str, Any]) -> frozenset[Need]:
        """What the recording must hold, given the parameters."""
        return self.needs | self.more(parameters)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of its own parameters."""
        return tuple(name for name in list(signature(self.function).parameters)[1:] if name not in _RUN_AGAIN)

    @property
    def required(self) -> tuple[str, ...]:
        """Those of them that have no default."""
        own = signature(self.function).parameters
        return tuple(name for name in self.parameters if own[name].default is Parameter.empty)


def needs(*names: Need) -> frozenset[Need]:
    """What a recording must hold, by name."""
    return frozenset(names)


def attention_method(function: Callable[..., AttentionMap], accepts: Refusal, **facts: Any) -> Method:  # noqa: ANN401 - of `Method`
    """A method that reads attention alone."""
    return Method(function=function, needs=needs("attention"), accepts=accepts, **facts)


def gradient_method(function: Callable[..., AttentionMap], accepts: Refusal, **facts: Any) -> Method:  # noqa: ANN401
    """A method that reads attention and the gradient of a score."""
    return Method(function=function, needs=needs("attention", "gradients"), accepts=accepts, targeted=True, sinks=True, **facts)


def attribution_method(function: Callable[..., AttentionMap], *aliases: str) -> Method:
    """A method for which pixels and a score are all that it needs."""
    return Method(function=function, needs=needs("score"), accepts=lambda _: None, targeted=True, aliases=aliases)
