"""Names of choices that several modules share."""

from __future__ import annotations

from typing import Literal

Fusion = Literal["mean", "max", "min"]
Sinks = Literal["keep", "drop", "redistribute"]
Interpolation = Literal["nearest", "bilinear", "bicubic"]
Normalization = Literal["auto", "minmax", "none", "percentile", "symmetric"]
Blend = Literal["constant", "value"]
Resize = Literal["auto", "fit", "model"]
Kind = Literal["self", "cross", "pool", "channel", "unplaced"]
Role = Literal["activation", "tokens", "channel_gate", "spatial_gate", "gate", "branch_gate", "transform", "glimpse", "mix"]
ColorProfile = Literal["convert", "ignore"]
