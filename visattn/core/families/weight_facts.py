"""Facts that belong to the weights of a model: where they come from, how their images were preprocessed, and the names of their classes.

They lie on the model itself as plain values, so that a copy, a saved and a wrapped model have them too. With them lies a sample of the
weights: facts of weights that have changed since are not claimed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from visattn._support.sampled_weights import sampled_weights
from visattn.core.provenance import Provenance

_PLACE = "_visattn_facts"  # attribute of a model
_read: ContextVar[dict[nn.Module, Facts] | None] = ContextVar("facts that were read", default=None)
CHANGED = "the weights have changed since their preprocessing and classes were stated"


class Facts(NamedTuple):
    """Facts about a model's weights.

    Attributes:
        provenance: Where the weights come from.
        input: Preprocessing as its family stores it, with the name of that `family`; None if it is not known for these weights.
        classes: Names of the classes; None if they are unknown.
        changed: Whether the weights differ from those that the facts are about, by more than rounding to another type.
    """

    provenance: Provenance | None
    input: Mapping[str, Any] | None
    classes: tuple[str, ...] | None
    changed: bool


def state(
    model: nn.Module,
    *,
    provenance: Provenance | None = None,
    input: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
    in_training: bool = False,
) -> nn.Module:
    """State facts about the present weights of a model, besides those that were stated before; return the model.

    Args:
        model: The model.
        provenance: Where the weights come from.
        input: Preprocessing as plain values, with the name of the `family` that reads them.
        classes: Names of the classes.
        in_training: Whether the facts hold for what the weights become too, as in a training that decides them.
    """
    stated = dict(vars(model).get(_PLACE, {}))
    if provenance is not None:
        stated["provenance"] = {key: value for key, value in provenance.to_dict().items() if key in _OF_WEIGHTS}
    if input is not None:
        stated["input"] = dict(input)
    if classes is not None:
        stated["classes"] = list(classes)
    stated["sample"] = None if in_training else sampled_weights(model)
    vars(model)[_PLACE] = stated
    (_read.get() or {}).pop(model, None)
    return model


_OF_WEIGHTS = "model", "weights", "weights_sha256", "random", "notes", "warnings"


@contextmanager
def facts_read_once() -> Iterator[None]:
    """Read the facts of each model once inside the block, such as one explanation: its weights stay as they are there."""
    known = _read.get()
    token = _read.set({} if known is None else known)
    try:
        yield
    finally:
        _read.reset(token)


def facts_of(model: nn.Module) -> Facts | None:
    """Return the facts that were stated about a model's weights, or about those it was copied from; None if there are none."""
    known = _read.get()
    if known is not None and model in known:
        return known[model]
    stated = vars(model).get(_PLACE)
    if not isinstance(stated, dict):
        return None
    provenance = stated.get("provenance")
    origin = None if provenance is None else Provenance.from_dict(dict(provenance))
    changed = stated.get("sample") is not None and not _alike(stated["sample"], sampled_weights(model))
    if origin is not None and changed:
        origin = replace(origin, weights=f"{origin.weights}, changed since", weights_sha256=None, random=False, warnings=())
    classes = stated.get("classes")
    facts = Facts(origin, stated.get("input"), None if classes is None else tuple(classes), changed)
    if known is not None:
        known[model] = facts
    return facts


def why_unknown(facts: Facts | None) -> str:
    """Return why preprocessing is assumed where none was stated; nothing for random weights, for which there is none."""
    is_random = facts is not None and facts.provenance is not None and facts.provenance.random
    return "" if is_random else "how images were preprocessed for these weights is not known"


def family_of(model: nn.Module) -> str:
    """Return which family stored the preprocessing of a model's weights; empty if none did."""
    stated = vars(model).get(_PLACE)
    stored = stated.get("input") if isinstance(stated, dict) else None
    return str(stored["family"]) if stored else ""


def _alike(stated: Mapping[str, Sequence[float]], present: Mapping[str, Sequence[float]]) -> bool:
    """Check that values are the same, or the same after they were rounded to 16 bits."""
    if stated == present:
        return True
    if stated.keys() != present.keys():
        return False
    before, now = ([value for values in sample.values() for value in values] for sample in (stated, present))
    if len(before) != len(now):
        return False
    first, other = (torch.tensor(values, dtype=torch.float64) for values in (before, now))
    kinds = first.dtype, torch.float32, torch.float16, torch.bfloat16
    return any(torch.allclose(first.to(kind), other.to(kind), rtol=0, atol=0, equal_nan=True) for kind in kinds)
