"""Maps that know nothing of the model: mirrored copies, and the edges of the input."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import visattn
from visattn.errors import MapError, ShapeError
from visattn.evaluation import edge_map, flipped_copies


def test_mirrored_copies() -> None:
    values = np.arange(12.0).reshape(3, 4)
    copies = flipped_copies(values).numpy()
    for copy, (down, across) in zip(copies, ((False, True), (True, False), (True, True)), strict=True):
        for row, column in np.ndindex(3, 4):
            assert copy[row, column] == values[2 - row if down else row, 3 - column if across else column]
    assert flipped_copies(values).axes == ("copy",)


@pytest.mark.parametrize("grid", [(4, 4), (6, 3), (12, 12), (5, 7)])
def test_edges_equal_a_loop(grid: tuple[int, int]) -> None:
    side = 12
    pixels = torch.randn(3, side, side, generator=torch.Generator().manual_seed(0))
    gray = pixels.mean(0).tolist()

    def at(y: int, x: int) -> float:
        return float(gray[min(max(y, 0), side - 1)][min(max(x, 0), side - 1)])

    sums, counts = np.zeros(grid), np.zeros(grid)
    for y, x in itertools.product(range(side), range(side)):
        across = sum(w * (at(y + d, x + 1) - at(y + d, x - 1)) for d, w in ((-1, 1), (0, 2), (1, 1)))
        down = sum(w * (at(y + 1, x + d) - at(y - 1, x + d)) for d, w in ((-1, 1), (0, 2), (1, 1)))
        cell = int((y + 0.5) / side * grid[0]), int((x + 0.5) / side * grid[1])
        sums[cell] += (across**2 + down**2) ** 0.5
        counts[cell] += 1
    assert edge_map(np.zeros(grid), pixels).numpy() == pytest.approx(sums / counts, rel=1e-5)


def test_edges_of_an_explained_photo_have_its_layout() -> None:
    model = visattn.load_model("scenes_vit")
    explained = visattn.explain(model, "scene:7", method="relevance")
    pixels = visattn.prepare("scene:7", model).pixels
    edges = edge_map(explained, pixels)
    assert edges.layout == explained.map.layout
    assert edges.meaning == "edges"
    with pytest.raises(MapError, match="input pixels"):
        edge_map(explained, pixels[..., :32, :32])
    with pytest.raises(ShapeError, match="one input"):
        edge_map(explained, pixels[0, 0])
    with pytest.raises(MapError, match="more than the input has pixels"):
        edge_map(np.zeros((40, 40)), torch.zeros(3, 20, 20))
