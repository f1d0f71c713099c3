"""Passes of a photo through a model that several questions share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.passes import Pass, one_pass

__all__ = ["SharedPasses"]

_USUAL: Mapping[str, Any] = {
    "target": None,
    "each_layer": False,
    "values": False,
    "features": "last",
    "gates": False,
    "terms": False,
}


class SharedPasses:
    """`one_pass`, which runs once for all that ask for the same: for the same model, pixels, target and features.

    It keeps what was recorded, so it lives as long as the questions about one photo are answered.
    """

    def __init__(self) -> None:
        """Start without passes."""
        self._made: list[tuple[dict[str, Any], Pass]] = []

    def __call__(self, model: nn.Module, prepared: Prepared, **options: Any) -> Pass:  # noqa: ANN401
        """Return the pass; for the arguments see `one_pass`."""
        asked = {"model": model, "pixels": prepared.pixels, "seed": prepared.seed, **prepared.inputs, **_USUAL, **options}
        target = asked.pop("target")
        asked |= {} if target is None else {f"target.{name}": value for name, value in vars(target).items()}
        for before, passed in self._made:
            serves = {**before, "gates": before["gates"] and asked["gates"]}  # a pass with gates serves those that need none
            if serves.keys() == asked.keys() and all(_is_same(value, serves[name]) for name, value in asked.items()):
                return passed
        passed = one_pass(model, prepared, **options)
        self._made.append((asked, passed))
        return passed


def _is_same(one: object, other: object) -> bool:
    """Check whether options are one object, or equal plain values."""
    return one is other or (type(one) is type(other) and isinstance(one, (bool, int, str, list, tuple)) and one == other)
