"""Statistics of gates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visattn._support.modes import in_own_modes
from visattn._support.reprs import brief
from visattn._support.types import Role
from visattn.core.methods.gate_maps import CLOSED, GATES, OPEN
from visattn.core.methods.selection import one_forward
from visattn.core.records import Recording


@dataclass(frozen=True, eq=False)
class GateStatistics:
    """Statistics of one gate of one module.

    Attributes:
        layer: Dotted name of the module.
        role: `channel_gate`, `spatial_gate`, `gate` or `branch_gate`.
        values: `(B, count)` gate values, flattened.
    """

    layer: str
    role: Role
    values: Tensor

    __repr__ = brief

    def numbers(self) -> dict[str, Tensor]:
        """Return mean, standard deviation, least and largest value, and the shares below 0.05 and above 0.95; each is `(B,)`."""
        x = self.values
        return {
            "mean": x.mean(1),
            "deviation": x.std(1, unbiased=False),
            "least": x.amin(1),
            "largest": x.amax(1),
            "closed": (x < CLOSED).float().mean(1),
            "open": (x > OPEN).float().mean(1),
        }


@in_own_modes
def gate_statistics(recording: Recording) -> list[GateStatistics]:
    """Return statistics of every gate in a recording, in call order.

    They show whether a gate is selective. A gate with hardly any deviation scales all features equally, and its map shows little. A
    gate that is closed or open everywhere is saturated and hardly learns.
    """
    return [
        GateStatistics(feature.layer, feature.role, feature.value.to(torch.float32).flatten(1))
        for feature in one_forward(recording).features
        if feature.role in GATES
    ]
