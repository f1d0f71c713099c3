"""Maps and geometries shared by tests of maps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import settings
from numpy.typing import NDArray
from torch import Tensor

from visattn.core.geometry import Box, Geometry
from visattn.core.maps import AttentionMap, MapFacts
from visattn.core.provenance import Provenance, Sink
from visattn.core.records import TokenLayout

quick = settings(max_examples=60, derandomize=True, deadline=None, database=None)


def make_map(
    values: Tensor | NDArray[Any] | list[Any],
    axes: tuple[str, ...] = (),
    *,
    box: Box | None = None,
    labels: Mapping[str, tuple[str, ...]] | None = None,
    meaning: str = "attention",
    provenance: Provenance | None = None,
    sinks: tuple[tuple[Sink, ...], ...] = (),
) -> AttentionMap:
    """Build a map with patches of 16 pixels."""
    tensor = torch.as_tensor(values)
    grid = (int(tensor.shape[-2]), int(tensor.shape[-1]))
    layout = TokenLayout("tokens", ("cls",), grid, box or Box(0, 0, 16 * grid[0], 16 * grid[1]))
    facts = MapFacts(sinks=sinks)
    return AttentionMap(tensor, axes, layout, labels or {}, meaning, provenance or Provenance(versions={}), facts=facts)


def random_map(rows: int = 2, columns: int = 3, *leading: int, axes: tuple[str, ...] = ()) -> AttentionMap:
    return make_map(torch.rand(*leading, rows, columns, generator=torch.Generator().manual_seed(0)), axes)


WINDOWS = {
    "landscape": Geometry((30, 44), (32, 48), Box(0, 0, 30, 44)),
    "portrait": Geometry((77, 40), (32, 48), Box(0, 0, 77, 40)),
    "crop": Geometry((40, 64), (32, 48), Box(2.5, 14, 37.5, 49.25)),
    "padding": Geometry((50, 60), (32, 48), Box(-5.25, -2, 54.75, 62)),
    "crop and padding": Geometry((50, 60), (32, 48), Box(-5.25, 8, 54.75, 40)),
    "smaller than the grid": Geometry((1, 2), (32, 48), Box(0, 0, 1, 2)),
    "rest of the input": Geometry((45, 60), (38, 60), Box(0, 0, 45, 60)),
}
