"""Similarity of position embeddings: the table that is added to the tokens, found in the forward pass, against the model's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

import visattn
from visattn import methods
from visattn._support.opencv import cv2
from visattn.core.drawing.parameter_pages import kernel_page, position_page
from visattn.errors import OptionError, UnsupportedModel


def table_of(model: nn.Module, size: tuple[int, int], images: int = 2) -> Any:
    with torch.no_grad(), visattn.capture(model.eval(), features="positions") as recording:
        model(torch.randn(images, 3, *size, generator=torch.Generator().manual_seed(0)))
    return next((feature for feature in recording.features if feature.role == "positions"), None), recording


class Small(nn.Module):
    """Tokens of 4 x 6 patches, to which positions are added in some way, before one attention."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.embed, self.qkv = way, nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 24)
        self.table = nn.Parameter(torch.randn(1, 24, 8))
        self.rows, self.columns = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(6, 8))
        self.places = nn.Embedding(24, 8)
        self.register_buffer("order", torch.arange(24).flip(0))

    def forward(self, x: Tensor) -> Tensor:
        t = self.embed(x).flatten(2).mT
        order: Any = self.order
        if self.way == "parameter":
            t = t + self.table
        elif self.way == "in place":
            t += self.table
        elif self.way == "axes":
            t = t + (self.rows[:, None] + self.columns).flatten(0, 1)
        elif self.way == "embedding":
            t = t + self.places(order)
        elif self.way == "resized":
            wide = nn.functional.interpolate(torch.unflatten(self.table[:, :6].mT, 2, (2, 3)), size=(4, 6), mode="bilinear")
            t = t + wide.flatten(2).mT
        elif self.way == "moved":  # the tokens come in another order
            t = t[:, order] + self.table
        elif self.way == "by the image":
            t = t + self.table * x.mean()
        elif self.way == "one vector":
            t = t + self.table[:, :1]
        elif self.way == "rows":
            t = t + self.rows.repeat_interleave(6, 0)
        elif self.way == "two tables":
            t = t + self.table + self.places(order)
        elif self.way == "table and rows":
            t = t + self.table + self.rows.repeat_interleave(6, 0)
        elif self.way == "rows and columns":
            t = (t.unflatten(1, (4, 6)) + self.rows[:, None] + self.columns).flatten(1, 2)
        query, key, value = self.qkv(t)[:, None].chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(query, key, value).mean((1, 2))

    def expected(self) -> Tensor:
        return {
            "parameter": lambda: self.table[0],
            "in place": lambda: self.table[0],
            "axes": lambda: torch.stack([self.rows[i] + self.columns[j] for i in range(4) for j in range(6)]),
            "embedding": lambda: self.places.weight.flip(0),
            "resized": lambda: (
                nn.functional.interpolate(self.table[0, :6].mT.reshape(1, 8, 2, 3), size=(4, 6), mode="bilinear")[0].flatten(1).mT
            ),
            "moved": lambda: self.table[0].flip(0),
            "rows": lambda: torch.stack([self.rows[i] for i in range(4) for _ in range(6)]),
        }[self.way]()


@pytest.mark.parametrize("way", ["parameter", "in place", "axes", "embedding", "resized", "moved", "rows"])
def test_the_row_of_each_patch_is_found_however_the_table_is_made(way: str) -> None:
    model = Small(way)
    for _ in range(2):  # traced, and on the tape that is known
        feature, recording = table_of(model, (16, 24))
        assert feature.layout.grid == (4, 6)
        torch.testing.assert_close(feature.value[0], model.expected().detach())
        found = methods.positions(recording, query="patch:1,2")
        rows = model.expected().detach()
        for cell in range(24):
            cosine = nn.functional.cosine_similarity(rows[8], rows[cell], dim=0)
            assert float(found.values[0].flatten()[cell]) == pytest.approx(float(cosine), abs=1e-5)
    assert methods.positions(recording).facts.query == "patch:2,3"


@pytest.mark.parametrize("way", ["none", "by the image", "one vector", "two tables", "table and rows", "rows and columns"])
def test_what_is_no_single_table_of_positions_is_refused(way: str) -> None:
    feature, recording = table_of(Small(way), (16, 24))
    assert feature is None
    with pytest.raises(OptionError, match="no single table of positions, with a row for each token, was found"):
        methods.positions(recording)


def test_a_changed_table_is_read_anew() -> None:
    model = Small("parameter")
    table_of(model, (16, 24))
    with torch.no_grad():
        model.table.mul_(2)
    torch.testing.assert_close(table_of(model, (16, 24))[0].value, 2 * Small("parameter").table.detach())


@pytest.mark.parametrize(
    ("name", "parameter", "prefix"),
    [
        ("vit_tiny_patch16_224", "pos_embed", ("cls",)),
        ("vit_tiny_r_s16_p8_224", "pos_embed", ("cls",)),
        ("cait_xxs24_224", "pos_embed", ()),
    ],
)
def test_published_models_have_their_own_table(name: str, parameter: str, prefix: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model: Any = timm.create_model(name)
    feature, _ = table_of(model, (224, 224), 1)
    assert (feature.layer, feature.layout.prefix) == (parameter, prefix)
    torch.testing.assert_close(feature.value, model.pos_embed.detach())


def test_explain_draws_the_similarity_and_refuses_models_without_a_table() -> None:
    torch.manual_seed(0)
    photo = visattn.load_image(visattn.data.photo_path("coffee"))
    found = visattn.explain(timm.create_model("vit_tiny_patch16_224").eval(), photo, method="positions", query="patch:3,4")
    assert float(found.map.values.max()) == pytest.approx(1)
    assert float(found.map.values[3, 4]) == pytest.approx(1)
    with pytest.raises(OptionError, match="no single table of positions"):
        visattn.explain(timm.create_model("resnet18").eval(), photo, method="positions")


def test_kernels_are_drawn_in_their_colors_around_gray() -> None:
    kernels = torch.zeros(3, 3, 4, 4).numpy()
    kernels[0, 0] = 2.0  # red
    kernels[1, 2] = -1.0  # less blue
    page = kernel_page(kernels)
    colors = {color for _, color in page.getcolors(1 << 16) or ()}
    assert {(255, 128, 128), (128, 128, 0), (128, 128, 128)} <= colors


def test_positions_are_drawn_where_their_patches_lie() -> None:
    alike = torch.zeros(2, 3, 2, 3)
    for row in range(2):
        for column in range(3):
            alike[row, column, row, column] = 1
    page = np.asarray(position_page(alike.numpy()))
    _, _, blobs, centers = cv2.connectedComponentsWithStats(
        (page == (253, 231, 37)).all(-1).astype(np.uint8)
    )  # the end of viridis
    patches = sorted((y, x) for (x, y), blob in zip(centers, blobs, strict=True) if tuple(blob[2:4]) == (32, 32))
    across = np.array(patches).reshape(2, 3, 2)
    panel, patch, gap = np.array([64, 96]), 32, 32  # each next patch lies in the next panel, and one patch further in it
    for steps, axis in ((np.diff(across[..., 1], axis=1), 1), (np.diff(across[..., 0], axis=0), 0)):
        assert ((steps >= panel[axis] + patch) & (steps < panel[axis] + patch + gap)).all()


def test_kernels_keep_their_shape() -> None:
    wide = -torch.ones(1, 2, 2, 4).numpy()
    page = np.asarray(kernel_page(wide))
    _, _, blobs, _ = cv2.connectedComponentsWithStats((page != 255).any(-1).astype(np.uint8))
    assert (56, 28) in {tuple(blob[2:4]) for blob in blobs}


def test_the_command_draws_kernels_and_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from visattn.cli import main

    kernels, positions = tmp_path / "kernels.png", tmp_path / "positions.png"
    words = ["inspect", "visattn_vit_c", "--weights", "none", "--kernels", str(kernels), "--positions", str(positions)]
    with pytest.raises(SystemExit) as done:
        main(words)
    assert done.value.code == 0
    assert capsys.readouterr().out.splitlines() == [str(kernels), str(positions)]
    for path in (kernels, positions):
        assert Image.open(path).info["visattn"]
    with pytest.raises(SystemExit) as again:
        main(words)
    assert again.value.code != 0
    assert "exists" in capsys.readouterr().err
    with pytest.raises(SystemExit) as twice:
        main([*words[:4], "--kernels", str(tmp_path / "one.png"), "--positions", str(tmp_path / "one.png")])
    assert twice.value.code != 0
    assert "one.png" in capsys.readouterr().err
    photo = tmp_path / "photo.png"
    visattn.load_image(visattn.data.photo_path("coffee")).save(photo)
    before = photo.read_bytes()
    with pytest.raises(SystemExit) as onto:
        main(["inspect", "visattn_vit_c", str(photo), "--weights", "none", "--kernels", str(photo), "--overwrite"])
    assert onto.value.code != 0
    assert photo.read_bytes() == before
    rotary = tmp_path / "rotary.png"
    with pytest.raises(SystemExit) as drawn:
        main(["inspect", "swin_tiny_patch4_window7_224", "--weights", "none", "--positions", str(rotary)])
    assert drawn.value.code == 0
    told = capsys.readouterr().err
    assert "Swin-T (random" in told
    assert "None" not in told
    stored = json.loads(Image.open(rotary).info["visattn"])
    assert stored["method"] == "attention"
    assert any("all pixels are 0" in note for note in stored["notes"])


def test_models_without_a_first_convolution_have_no_kernels() -> None:
    from visattn.core.pipeline.inputs import prepare
    from visattn.core.pipeline.learned_pictures import kernels_picture

    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 4))
    photo = Image.new("RGB", (8, 8))
    prepared = prepare(photo, model, img_size=8)
    with pytest.raises(UnsupportedModel, match="no 2-d convolution receives the image itself"):
        kernels_picture(model, prepared, "small")
