"""Positions that share one sum over cells spread over the image keep their own place, as in MobileViTv2."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import visattn
from visattn.core.families import cam_layer
from visattn.core.records import TokenLayout

GRID = 6, 12
PATCH = 4


class SharedContext(nn.Module):
    """Tokens in groups, each of which adds one weighted sum of its group. Group of each cell: `group_of`, in row-major order."""

    def __init__(self, group_of: Tensor) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, PATCH, PATCH)
        self.order = [int(cell) for cell in group_of.argsort(stable=True)]
        self.groups = int(group_of.max()) + 1
        self.features = nn.Identity()
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2)
        ordered = tokens[:, :, self.order].unflatten(2, (self.groups, -1))
        context = (ordered * ordered[:, :1].softmax(-1)).sum(-1, keepdim=True)
        mixed = (ordered + ordered.relu() * context.expand_as(ordered)).flatten(2)
        back = [self.order.index(cell) for cell in range(len(self.order))]
        found: Tensor = self.head(self.features((mixed[:, :, back] + tokens).unflatten(2, GRID)).mean((2, 3)))
        return found


def groups(rows: int, columns: int) -> Tensor:
    """Return the group of each cell: cells that are `rows` and `columns` apart share one."""
    row, column = torch.meshgrid(*map(torch.arange, GRID), indexing="ij")
    return (row % rows * columns + column % columns).flatten()


def layout_of(group_of: Tensor) -> TokenLayout | None:
    model = SharedContext(group_of)
    with visattn.capture(model, features=["features"]) as recording:
        model(torch.rand(2, 3, GRID[0] * PATCH, GRID[1] * PATCH, generator=torch.Generator().manual_seed(0)))
    return recording.features[0].layout


@pytest.mark.parametrize("apart", [(1, 1), (2, 2), (3, 1), (1, 4), (6, 12)])
def test_cells_that_share_a_sum_over_the_image_keep_their_place(apart: tuple[int, int]) -> None:
    layout = layout_of(groups(*apart))
    assert layout is not None
    assert layout.grid == GRID
    assert tuple(layout.box) == (0, 0, GRID[0] * PATCH, GRID[1] * PATCH)


UNEVEN = {
    "any cells": torch.randperm(GRID[0] * GRID[1], generator=torch.Generator().manual_seed(1)) % 4,
    "every second row at the top": torch.tensor([0, 1, 0, 1, 2, 2]).repeat_interleave(GRID[1]),
    "rows at unequal distances": torch.tensor([0, 1, 1, 0, 0, 1]).repeat_interleave(GRID[1]),
    "a checkerboard": torch.arange(GRID[0])[:, None].add(torch.arange(GRID[1])).remainder(2).flatten(),
}


@pytest.mark.parametrize("kind", UNEVEN)
def test_cells_in_uneven_groups_have_no_known_place(kind: str) -> None:
    assert layout_of(UNEVEN[kind]) is None


def test_grad_cam_of_mobilevitv2_equals_hirescam() -> None:
    model = visattn.load_model("mobilevitv2_050", weights="none")
    assert cam_layer(model) == "stages"
    pixels = torch.rand(1, 3, 256, 256, generator=torch.Generator().manual_seed(0))
    gradcam, hirescam = (visattn.explain(model, pixels=pixels, method=name, target=3).map for name in ("gradcam", "hirescam"))
    assert gradcam.layout.grid == (8, 8)
    assert gradcam.values.shape == hirescam.values.shape == (8, 8)
    assert float(gradcam.values.max()) > 0
    torch.testing.assert_close(gradcam.values, hirescam.values, rtol=0, atol=1e-6)
