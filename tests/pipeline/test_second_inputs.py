"""Models with a second input: a row of a table, another image. The layer of a class activation map is one of the picture's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import visattn
from visattn.errors import OptionError

PHOTO = "photo:chelsea"
TABLE = torch.arange(5.0)[None]


def backbone(channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, 8, 3, stride, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU())


class WithTable(nn.Module):
    """CNN beside a row of a table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cnn, self.table, self.head = backbone(3, 4), nn.Linear(5, 8), nn.Linear(16, 4)

    def scores(self, picture: Tensor, row: Tensor) -> Tensor:
        out: Tensor = self.head(torch.cat([self.cnn(picture).mean((2, 3)), self.table(row)], 1))
        return out


class PictureFirst(WithTable):
    def forward(self, frontal: Tensor, table: Tensor) -> Tensor:
        return self.scores(frontal, table)


class TableFirst(WithTable):
    def forward(self, table: Tensor, img: Tensor) -> Tensor:
        return self.scores(img, table)


class KeywordOnly(WithTable):
    def forward(self, *, table: Tensor, scan: Tensor) -> Tensor:
        return self.scores(scan, table)


class TwoPictures(nn.Module):
    """One backbone for each of two pictures of other sizes; the second runs last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of_color, self.of_depth, self.head = backbone(3, 2), backbone(1, 4), nn.Linear(16, 4)

    def forward(self, rgb: Tensor, depth: Tensor) -> Tensor:
        pooled = [self.of_color(rgb).mean((2, 3)), self.of_depth(depth).mean((2, 3))]
        out: Tensor = self.head(torch.cat(pooled, 1))
        return out


class Siamese(nn.Module):
    """One backbone for two pictures: the output is how alike they are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cnn = backbone(3, 2)

    def forward(self, query: Tensor, gallery: Tensor) -> Tensor:
        one, other = (self.cnn(picture).mean((2, 3)) for picture in (query, gallery))
        return torch.cosine_similarity(one, other)[:, None]


def hirescam(features: Tensor, score: Tensor) -> Tensor:
    """Compute the gradient times the feature map, summed over channels, without what is negative."""
    (slope,) = torch.autograd.grad(score, features)
    made: Tensor = (features.detach() * slope).sum(1)[0].clamp(min=0)
    return made


def explained(model: nn.Module, image: Any, inputs: Mapping[str, Tensor], target: int | str) -> visattn.AttentionMap:
    return visattn.explain(model.eval(), image, method="hirescam", inputs=inputs, target=target, img_size=64).map


@pytest.mark.parametrize("kind", [PictureFirst, TableFirst, KeywordOnly])
def test_a_row_of_a_table_does_not_hide_the_layer(kind: type[WithTable]) -> None:
    model = kind()
    made = explained(model, PHOTO, {"table": TABLE}, 2)
    pixels = visattn.prepare(PHOTO, model, img_size=64).pixels
    features = model.cnn(pixels).detach().requires_grad_()
    expected = hirescam(features, model.head(torch.cat([features.mean((2, 3)), model.table(TABLE)], 1))[0, 2])
    assert torch.allclose(made.values, expected, atol=1e-8)
    assert made.provenance.parameters["layer"] == "cnn"


@pytest.mark.parametrize(("kind", "name"), [(PictureFirst, "frontal"), (TableFirst, "img"), (KeywordOnly, "scan")])
def test_pixels_are_found_under_any_name(kind: type[WithTable], name: str) -> None:
    model, pixels = kind(), torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    made = explained(model, None, {"table": TABLE, name: pixels}, 1)
    features = model.cnn(pixels).detach().requires_grad_()
    expected = hirescam(features, model.head(torch.cat([features.mean((2, 3)), model.table(TABLE)], 1))[0, 1])
    assert torch.allclose(made.values, expected, atol=1e-8)


@pytest.mark.parametrize("picture", ["rgb", "depth"])
def test_each_of_two_pictures_has_its_own_layer(picture: str) -> None:
    model, generator = TwoPictures(), torch.Generator().manual_seed(0)
    inputs = {"rgb": torch.rand(1, 3, 32, 32, generator=generator), "depth": torch.rand(1, 1, 48, 48, generator=generator)}
    made = explained(model, picture, inputs, 3)
    maps = {"rgb": model.of_color(inputs["rgb"]).detach(), "depth": model.of_depth(inputs["depth"]).detach()}
    features = maps[picture].requires_grad_()
    expected = hirescam(features, model.head(torch.cat([one.mean((2, 3)) for one in maps.values()], 1))[0, 3])
    assert torch.allclose(made.values, expected, atol=1e-8)
    assert made.provenance.parameters["layer"] == {"rgb": "of_color", "depth": "of_depth"}[picture]


def test_the_layer_of_the_other_picture_is_refused() -> None:
    inputs = {"rgb": torch.rand(1, 3, 32, 32), "depth": torch.rand(1, 1, 32, 32)}
    with pytest.raises(OptionError, match="positions of its values"):
        visattn.explain(TwoPictures().eval(), "rgb", method="gradcam", inputs=inputs, target=0, layer="of_depth")


@pytest.mark.parametrize("picture", ["query", "gallery"])
def test_two_pictures_may_share_a_backbone(picture: str) -> None:
    model, generator = Siamese(), torch.Generator().manual_seed(0)
    inputs = {name: torch.rand(1, 3, 32, 32, generator=generator) for name in ("query", "gallery")}
    made = explained(model, picture, inputs, "output:0")
    maps = {name: model.cnn(pixels).detach() for name, pixels in inputs.items()}
    features = maps[picture].requires_grad_()
    expected = hirescam(features, torch.cosine_similarity(*(one.mean((2, 3)) for one in maps.values()))[0])
    assert torch.allclose(made.values, expected, atol=1e-8)


def test_several_pictures_must_be_named() -> None:
    inputs = {"rgb": torch.rand(1, 3, 32, 32), "depth": torch.rand(1, 1, 32, 32)}
    with pytest.raises(OptionError, match=r"each of the inputs rgb \(1, 3, 32, 32\), depth \(1, 1, 32, 32\) may be"):
        explained(TwoPictures(), None, inputs, 0)
