"""Keys and prefixes under which training scripts store weights, and which of several that fit equally well is preferred."""

from __future__ import annotations

import re
from collections.abc import Sequence

WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")  # DistributedDataParallel, torch.compile, FullyShardedDataParallel
_PARTS = ("teacher.", "student.", "model.", "backbone.", "encoder.")  # prefixes of one part of a larger model
_NESTS = (  # the first of equally good fits is used: averaged weights, then plain ones, then those that training leaves behind
    *("state_dict_ema", "model_ema", "ema", "ema_state_dict", "params_ema", "ema_model", "teacher"),
    *("state_dict", "model", "model_state_dict", "module", "encoder", "model_state", "net", "network", "weights", "params"),
    *("encoder_q", "base_encoder", "online_network", "online_encoder"),
)
_AVERAGED = {"ema", "averaged", "average", "avg", "swa", "teacher"}
_BEHIND = {"student", "k", "target", "momentum", "key", "old", "previous", "last"}


def preference(path: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return a tuple for each key of a path, to sort by: averaged weights first, then usual names, then others."""
    return tuple(_rank(key) for key in path)


def is_usual(path: Sequence[str]) -> bool:
    """Check whether all keys of a path are usual names for weights."""
    return all(key in _NESTS or key == "student" for key in path)


def is_wrapper(prefix: str) -> bool:
    """Check whether a prefix consists of wrappers of the whole model."""
    return not _without(prefix, WRAPPERS)


def is_usual_prefix(prefix: str) -> bool:
    """Check whether a prefix consists of wrappers and usual names of parts."""
    return not _without(prefix, (*WRAPPERS, *_PARTS))


def _without(prefix: str, known: tuple[str, ...]) -> str:
    while prefix.startswith(known):
        prefix = prefix[prefix.index(".") + 1 :]
    return prefix


def _rank(key: str) -> tuple[int, int]:
    place = _NESTS.index(key) if key in _NESTS else len(_NESTS)
    words = set(re.split(r"[._\W]+", key[:100].lower()))
    return (0 if words & _AVERAGED else 2 if words & _BEHIND else 1), place
