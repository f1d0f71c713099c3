from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from visattn._checks import one_of
from visattn.maps import AttentionMap
from visattn.methods._attention import attention
from visattn.methods._pca import pca
from visattn.methods._rollout import rollout
from visattn.methods._select import chain_refusal, spatial_refusal
from visattn.methods._similarity import similarity
from visattn.records import Recording

Need = Literal["attention", "gradients", "values", "features", "replay"]


@dataclass(frozen=True)
class Method:
    """One method: how to call it, and when it applies.

    Attributes:
        function: From a recording and its own parameters to a map.
        needs: What the recording must hold.
        targeted: Whether it explains a class.
        accepts: Why it does not apply to a recording, or None.
        sinks: Whether sinks can show in its map as bright spots.
        aliases: Other names it is known by.
    """

    function: Callable[..., AttentionMap]
    needs: frozenset[Need]
    targeted: bool
    accepts: Callable[[Recording], str | None]
    sinks: bool = False
    aliases: tuple[str, ...] = ()


def _features_refusal(recording: Recording) -> str | None:
    return None if any(feature.role == "tokens" for feature in recording.features) else "no token features were recorded."


METHODS: dict[str, Method] = {
    "attention": Method(attention, frozenset({"attention"}), False, spatial_refusal, True, ("raw",)),
    "similarity": Method(similarity, frozenset({"features"}), False, _features_refusal),
    "pca": Method(pca, frozenset({"features"}), False, _features_refusal),
    "rollout": Method(rollout, frozenset({"attention"}), False, chain_refusal, True),
}


def method_of(name: str) -> Method:
    """A method by name or alias.

    Raises:
        OptionError: If there is none; the message names the nearest.
    """
    aliases = {alias: known for known, method in METHODS.items() for alias in method.aliases}
    return METHODS[one_of(aliases.get(name, name), tuple(METHODS), "method")]
