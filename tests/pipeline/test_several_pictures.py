"""Several pictures that a model receives together: each map is proven to be of its own picture, down to the pixel that is drawn."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

import visattn
from visattn.errors import MapError, OptionError, VisattnWarning

SIDE, CELL = 32, 8
WIDTH, HEADS = 8, 2


def index_picture(number: int, side: int = SIDE) -> Image.Image:
    """Return a picture whose pixels hold their own column and row, and the number of the picture."""
    rows, columns = np.mgrid[:side, :side]
    return Image.fromarray(np.stack([columns, rows, np.full_like(rows, number)], -1).astype(np.uint8))


class OneCell(nn.Module):
    """Siamese network, one backbone for all, whose score is read from one cell of one picture."""

    def __init__(self, picture: int, cell: tuple[int, int]) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, 2, CELL, CELL)
        nn.init.constant_(self.backbone.weight, 1e-4)
        nn.init.constant_(self.backbone.bias, 1.0)  # type: ignore[arg-type]
        self.picture, self.cell = picture, cell

    def forward(self, *views: Tensor) -> dict[str, Tensor]:
        features = [self.backbone(view) for view in views]
        value = features[self.picture][:, :, self.cell[0], self.cell[1]].mean(1, keepdim=True)
        return {"logits": torch.cat([value, 0 * value], 1)}


def changed(picture: Image.Image, photo: Image.Image) -> set[tuple[int, int]]:
    different = (np.asarray(picture.convert("RGB")).astype(int) != np.asarray(photo).astype(int)).any(-1)
    return {(int(y), int(x)) for y, x in zip(*different.nonzero(), strict=True)}


def pixels_of(cell: tuple[int, int]) -> set[tuple[int, int]]:
    return {(cell[0] * CELL + y, cell[1] * CELL + x) for y in range(CELL) for x in range(CELL)}


@pytest.mark.parametrize(("decisive", "cell"), [(0, (1, 3)), (1, (2, 0)), (2, (0, 2))])
def test_only_the_cell_that_decides_is_colored_in_the_file(decisive: int, cell: tuple[int, int], tmp_path: Path) -> None:
    model, photos = OneCell(decisive, cell).eval(), [index_picture(number) for number in range(3)]
    inputs = dict(enumerate(photos))
    made = visattn.explain_pictures(
        model, inputs, ["0", "1", "views.2"], method="hirescam", target=0, resize="fit", img_size=SIDE
    )
    for number, (photo, explanation) in enumerate(zip(photos, made.values(), strict=True)):
        assert explanation.provenance.parameters["layer"] == f"backbone #{number}"
        with nullcontext() if number == decisive else pytest.warns(VisattnWarning, match="the photo is unchanged"):
            file = explanation.save(tmp_path / f"{number}.png", interpolation="nearest", ground="photo")
        with Image.open(file) as drawn:
            assert changed(drawn, photo) == (pixels_of(cell) if number == decisive else set())


class Tracker(nn.Module):
    """One self-attention over the tokens of a template and of a search region; the search region is read."""

    def __init__(self, *, search_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Conv2d(3, WIDTH, CELL, CELL), nn.LayerNorm(WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3)
        self.search_first = search_first

    def tokens(self, pixels: Tensor) -> Tensor:
        return self.embed(pixels).flatten(2).mT  # type: ignore[no-any-return]

    def forward(self, template: Tensor, search: Tensor) -> Tensor:
        parts = [self.tokens(template), self.tokens(search)]
        tokens = torch.cat(parts[::-1] if self.search_first else parts, 1)
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in self.qkv(self.norm(tokens)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        count = parts[1].shape[1]
        read = mixed[:, :count] if self.search_first else mixed[:, -count:]
        return self.head(read.mean(1))  # type: ignore[no-any-return]


def rows_by_hand(model: Tracker, template: Tensor, search: Tensor, queries: list[int]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Compute the mean over heads and over some tokens of the search region of their attention, to template and search, with loops."""
    tokens = [*model.tokens(template)[0].detach().double(), *model.tokens(search)[0].detach().double()]
    count = len(model.tokens(template)[0])
    norm, qkv = model.norm.double(), model.qkv.double()
    vectors = [qkv(norm(token)).detach().numpy() for token in tokens]
    model.float()
    wide = WIDTH // HEADS
    weights = np.zeros(len(tokens))
    for head in range(HEADS):
        for query in queries:
            own = vectors[count + query][head * wide : (head + 1) * wide]
            scores = [
                math.exp(sum(own[i] * other[WIDTH + head * wide + i] for i in range(wide)) / math.sqrt(wide)) for other in vectors
            ]
            for key, score in enumerate(scores):
                weights[key] += score / sum(scores) / HEADS / len(queries)
    return weights[:count], weights[count:]


@pytest.mark.parametrize("search_first", [False, True])
@pytest.mark.parametrize("template_side", [16, 32])
def test_rows_of_one_sequence_are_told_apart(search_first: bool, template_side: int) -> None:
    generator = torch.Generator().manual_seed(0)
    template, search = (
        torch.rand(1, 3, template_side, template_side, generator=generator),
        torch.rand(1, 3, 32, 32, generator=generator),
    )
    model, inputs = Tracker(search_first=search_first).eval(), {"search": search, "template": template}
    for queries, asked in [(list(range(16)), {}), ([6], {"template": "foreign6", "search": "patch:1,2"})]:
        expected = dict(zip(("template", "search"), rows_by_hand(model, template, search, queries), strict=True))
        for picture, row in expected.items():
            query: dict[str, Any] = {"query": asked[picture]} if asked else {}
            made = visattn.explain(model, picture, method="attention", fusion="mean", inputs=inputs, **query)
            assert np.allclose(made.map.numpy().ravel(), row, atol=1e-6)


def test_the_name_of_an_input_does_not_decide_which_picture_is_traced() -> None:
    class Other(Tracker):
        def forward(self, image_of_template: Tensor, region: Tensor) -> Tensor:
            return super().forward(image_of_template, region)

    template, search = (torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    model = Other().eval()
    expected = rows_by_hand(model, template, search, list(range(16)))
    for picture, row in zip(("image_of_template", "region"), expected, strict=True):
        inputs = {"image_of_template": template, "region": search}
        made = visattn.explain(model, picture, method="attention", fusion="mean", inputs=inputs)
        assert np.allclose(made.map.numpy().ravel(), row, atol=1e-6)


def test_a_figure_has_one_scale(tmp_path: Path) -> None:
    photos = {"template": index_picture(0), "search": index_picture(200)}
    made = visattn.explain_pictures(
        Tracker().eval(), photos, list(photos), method="attention", fusion="mean", resize="fit", img_size=SIDE
    )
    file = tmp_path / "page.png"
    visattn.comparison_page(list(made.values()), list(made), scale="raw", panel=64, opacity=1.0).save(file)
    values = np.concatenate([explanation.map.numpy().ravel() for explanation in made.values()])
    with Image.open(file) as drawn:
        page, facts = np.asarray(drawn.convert("RGB")).astype(int), json.loads(drawn.info["visattn"])
    assert facts["value_range"] == pytest.approx([values.min(), values.max()])
    assert facts["drawing"]["labels"] == list(photos)
    corners = [(y, x) for y in range(len(page) - 64) for x in range(page.shape[1] - 64) if is_panel(page[y : y + 64, x : x + 64])]
    assert len(corners) == len(photos)
    colors = [page[y + 8 + 16 * row, x + 8 + 16 * column] for y, x in corners for row in range(4) for column in range(4)]
    brightness = [float(color @ (0.299, 0.587, 0.114)) for color in colors]
    in_order = np.array(brightness)[np.argsort(values)]
    assert np.all(np.diff(in_order) >= -1)  # the color map becomes brighter with the value, over both pictures
    assert in_order[-1] - in_order[0] > 100


def is_panel(part: NDArray[Any]) -> bool:
    """Check whether a part of a page is 4 x 4 squares of one color each, and not paper."""
    if (part[0, 0] != part[15, 15]).any() or (part[48, 48] != part[63, 63]).any() or (part > 250).all(-1).any():
        return False
    squares = part.reshape(4, 16, 4, 16, 3)
    return bool((squares == squares[:, :1, :, :1]).all()) and len(np.unique(squares[:, 0, :, 0].reshape(16, 3), axis=0)) > 4


def test_maps_of_several_methods_have_no_common_scale() -> None:
    photos = {"template": index_picture(0), "search": index_picture(200)}
    asked: dict[str, dict[str, Any]] = {
        "template": {"method": "attention", "fusion": "mean"},
        "search": {"method": "gradcam", "layer": "norm"},
    }
    one, other = (
        visattn.explain_pictures(Tracker().eval(), photos, [name], img_size=SIDE, **options)[name]
        for name, options in asked.items()
    )
    with pytest.raises(MapError, match="different quantities have no common scale: attention, Grad-CAM"):
        visattn.comparison_page([one, other], ["template", "search"], scale="raw")


@pytest.mark.parametrize("images", [[], ["search", "search"], "search"])
def test_pictures_are_named_once(images: Any) -> None:
    with pytest.raises(OptionError, match=r"images=\['template', 'search'\]|images must"):
        visattn.explain_pictures(Tracker().eval(), {"template": index_picture(0), "search": index_picture(1)}, images)


@pytest.mark.parametrize(("images", "named"), [(["first"], "photo:coffee"), (["second", "first"], "my photo.jpg")])
def test_text_that_is_named_as_a_picture_is_told_how_it_is_opened(images: list[str], named: str) -> None:
    said = rf"the input {images[0]} is text, not a picture\. Open .*visattn\.load_image\('{named}'\), or PIL\.Image\.open"
    with pytest.raises(OptionError, match=said):
        visattn.explain_pictures(TwoNamed().eval(), TEXTS, images)


def test_texts_among_inputs_without_a_picture_are_told_too() -> None:
    with pytest.raises(OptionError, match=r"inputs have no picture .*visattn\.load_image\('photo:coffee'\)"):
        visattn.explain(TwoNamed().eval(), inputs=TEXTS)


TEXTS = {"first": "photo:coffee", "second": Path("my photo.jpg")}


class TwoNamed(nn.Module):
    """Network of two pictures with names."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, 2, CELL, CELL)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return (self.backbone(first) + self.backbone(second)).mean((-1, -2))  # type: ignore[no-any-return]
