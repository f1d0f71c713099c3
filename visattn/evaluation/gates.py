"""What gates do, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visattn._support.types import Role
from visattn.methods.gate_maps import CLOSED, GATES, OPEN
from visattn.methods.selection import one_forward
from visattn.records import Recording


@dataclass(frozen=True, eq=False)
class GateStatistics:
    """One gate of one module, in numbers.

    Attributes:
        layer: Dotted name of the module.
        role: `channel_gate`, `spatial_gate`, `gate` or `branch_gate`.
        values: `(B, count)`, flattened.
    """

    layer: str
    role: Role
    values: Tensor

    def numbers(self) -> dict[str, Tensor]:
        """By name, each `(B,)`: mean, least and largest value, deviation, and the shares below 0.05 and above 0.95."""
        x = self.values
        return {
            "mean": x.mean(1),
            "deviation": x.std(1, unbiased=False),
            "least": x.amin(1),
            "largest": x.amax(1),
            "closed": (x < CLOSED).float().mean(1),
            "open": (x > OPEN).float().mean(1),
        }


def gate_statistics(recording: Recording) -> list[GateStatistics]:
    """Every gate of a recording in numbers, in the order of the calls: whether it chooses at all.

    A module whose gates hardly deviate scales all alike, and its picture shows little; one that is closed or open everywhere no longer
    learns.
    """
    return [
        GateStatistics(feature.layer, feature.role, feature.value.to(torch.float32).flatten(1))
        for feature in one_forward(recording).features
        if feature.role in GATES
    ]
