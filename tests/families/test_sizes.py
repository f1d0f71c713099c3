"""Sizes that are guessed for models which state none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import visattn
from tests.cli.test_commands import Run, photo, run
from visattn.core.families import input_spec
from visattn.errors import ModelError

__all__ = ["photo", "run"]


class Positions(nn.Module):
    """ViT without a class token, with a table of learned positions."""

    def __init__(self, count: int, patch: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.table = nn.Conv2d(3, 32, patch, patch), nn.Parameter(torch.randn(1, count, 32) * 0.02)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2))
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.table
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))  # type: ignore[no-any-return]


class Gated(nn.Module):
    """CNN whose channels are weighted by what the image holds, and by a table of one number each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale, self.head = nn.Conv2d(3, 8, 3), nn.Parameter(torch.ones(1, 8, 1, 1)), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = x * x.mean((2, 3), keepdim=True).sigmoid() * self.scale
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("count", "side"), [(196, 224), (256, 256), (16, 64)])
def test_the_first_size_that_fits_the_table_is_assumed(count: int, side: int) -> None:
    spec = input_spec(Positions(count))
    assert spec.size == (side, side)
    assert spec.sources["size"] == "assumed"


def test_one_patch_is_not_repeated_over_a_table() -> None:
    model = Positions(240).eval()
    message = (
        r"fails for pixels \(1, 3, 224, 224\): .*does not state its input size, so it was assumed. If it is another, pass it"
    )
    with pytest.raises(ModelError, match=message):
        visattn.explain(model, "photo:chelsea", method="attention")
    assert visattn.explain(model, "photo:chelsea", method="attention", img_size=(192, 320)).map.layout.grid == (12, 20)


def test_gates_are_no_tables() -> None:
    assert input_spec(Gated()).size == (224, 224)


def test_inspect_names_the_layer_that_grad_cam_reads(run: Run, photo: object) -> None:
    with open("own.py", "w") as file:  # noqa: PTH123
        file.write("from tests.families.test_sizes import Positions\n\ndef build():\n    return Positions(196)\n")
    code, out, _ = run("inspect", "own.py:build")
    assert code == 0
    layer = visattn.explain(Positions(196).eval(), "photo:chelsea", method="gradcam").map.facts.layer
    assert out.startswith(f"own.py:build: input 224 x 224 (assumed), classifier, read-out: mean; Grad-CAM layer: {layer}\n")
