"""Fixtures for overlay tests: a photo of noise, and heatmaps of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from visattn.core.geometry import Box, Geometry
from visattn.core.maps import AttentionMap, Heatmap, MapFacts
from visattn.core.provenance import Provenance, Sink
from visattn.core.records import TokenLayout

Values = NDArray[np.float64]


How = Literal["auto", "minmax", "none", "percentile", "symmetric"]


HEIGHT, WIDTH = 24, 36


def noise(height: int = HEIGHT, width: int = WIDTH) -> Image.Image:
    return Image.fromarray(np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8))


def heat_values(height: int = HEIGHT, width: int = WIDTH) -> Values:
    return np.random.default_rng(4).random((height, width))


def heatmap(
    grid: Sequence[Any] | NDArray[Any] | torch.Tensor,
    geometry: Geometry | None = None,
    axes: tuple[str, ...] = (),
    meaning: str = "attention",
    sinks: tuple[Sink, ...] = (),
    *,
    signed: bool = False,
) -> Heatmap:
    """Build a heatmap of the noise photo from a grid of 16-pixel patches."""
    tensor = torch.as_tensor(grid, dtype=torch.float32)
    rows, columns = tensor.shape[-2:]
    layout = TokenLayout("tokens", (), (rows, columns), Box(0, 0, 16 * rows, 16 * columns))
    place = geometry or Geometry((HEIGHT, WIDTH), (16 * rows, 16 * columns), Box(0, 0, HEIGHT, WIDTH))
    facts = MapFacts(sinks=(sinks,) if sinks else ())
    return AttentionMap(tensor, axes, layout, {}, meaning, Provenance(versions={}), signed, facts).to_heatmap(place)


GRID = [[0.0, 1.0, 2.0], [5.0, 3.0, 4.0]]
