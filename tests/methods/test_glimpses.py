"""Glimpses of a retina, compared with the pixels that it reads, masks from its definition, and a path in photo pixels."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

import visattn
from tests import tiny
from visattn.core import methods
from visattn.core.drawing.marks import draw_glimpses
from visattn.core.geometry import Box, Geometry
from visattn.core.loading import model_folders as folders
from visattn.core.loading.blueprints import Blueprint
from visattn.core.maps import AttentionMap, load_map, save_map
from visattn.core.records import Recording
from visattn.errors import OptionError
from visattn.models import RAM
from visattn.nn import Retina

HEIGHT, WIDTH = 12, 20


class Given(nn.Module):
    """Model that attends to given locations, one after the other."""

    def __init__(self, locations: Tensor, size: int = 4, scales: int = 1, factor: int = 2, pool: int = 1) -> None:
        super().__init__()
        self.locations, self.pool = locations, pool  # (B, T, 2)
        self.retina, self.other = Retina(size, scales, factor), Retina(2, 1)

    def forward(self, images: Tensor) -> Tensor:
        maps = F.avg_pool2d(images, self.pool)
        means: list[Tensor] = [self.retina(maps, at).flatten(1).mean(1) for at in self.locations.unbind(1)]
        return torch.stack(means, 1)


def at(*points: tuple[float, float], height: int = HEIGHT, width: int = WIDTH) -> Tensor:
    """Convert points (x, y) in pixels to locations `(1, T, 2)`."""
    return torch.tensor([[(2 * x / width - 1, 2 * y / height - 1) for x, y in points]], dtype=torch.float64)


def patches(found: AttentionMap) -> list[list[Box]]:
    """Return the patches of each glimpse of one image, to a thousandth of a pixel."""
    (glimpses,) = found.facts.glimpses
    return [[Box(*(round(side, 3) for side in box)) for box in boxes] for boxes in glimpses]


def seen(model: nn.Module, images: Tensor | None = None) -> Recording:
    batch = len(model.locations) if isinstance(model, Given) else 1
    images = torch.rand(batch, 3, HEIGHT, WIDTH, dtype=torch.float64) if images is None else images
    with torch.no_grad(), visattn.capture(model.eval()) as recording:
        model(images)
    return recording


def covered(locations: Tensor, size: int) -> NDArray[np.float64]:
    """Compute the share of the glimpses that cover each pixel, by the definition: -1 and 1 are the outer edges of the image."""
    found = np.zeros((len(locations), HEIGHT, WIDTH))
    for b, path in enumerate(locations.tolist()):
        for x, y in path:
            for row in range(HEIGHT):
                for column in range(WIDTH):
                    down, across = row + 0.5 - (y + 1) / 2 * HEIGHT, column + 0.5 - (x + 1) / 2 * WIDTH
                    found[b, row, column] += (-size / 2 <= down < size / 2) * (-size / 2 <= across < size / 2) / len(path)
    return found


# the map


@pytest.mark.parametrize(("size", "point"), [(4, (7, 5)), (4, (0, 0)), (3, (18.5, 11.5)), (6, (19, 6)), (1, (0.5, 0.5))])
def test_a_pixel_is_covered_exactly_if_the_retina_reads_it(size: int, point: tuple[float, float]) -> None:
    locations = at(point)
    found = methods.glimpses(seen(Given(locations, size))).values[0]
    spots = torch.eye(HEIGHT * WIDTH, dtype=torch.float64).view(-1, 1, HEIGHT, WIDTH)  # each has one bright pixel
    read = Retina(size, 1)(spots, locations[:, 0].expand(len(spots), 2)).flatten(1).sum(1) > 1e-9
    assert torch.equal(found > 0, read.view(HEIGHT, WIDTH))
    assert 0 < int(read.sum()) <= size**2


@pytest.mark.parametrize("size", [1, 4, 5])
def test_values_equal_the_masks_of_the_definition(size: int) -> None:
    locations = torch.rand(2, 5, 2, dtype=torch.float64) * 2 - 1
    found = methods.glimpses(seen(Given(locations, size, scales=2)))
    assert found.axes == ("batch",)
    assert found.layout.grid == (HEIGHT, WIDTH)
    assert found.layout.box == Box(0, 0, HEIGHT, WIDTH)
    np.testing.assert_allclose(found.values.numpy(), covered(locations, size), atol=1e-6)
    assert not torch.equal(found.values[0], found.values[1])


def test_the_path_of_each_image_is_in_order() -> None:
    points = [(3.0, 9.0), (18.0, 2.0), (3.0, 9.5), (0.0, 12.0)], [(10.0, 6.0), (1.0, 1.0), (2.0, 3.0), (20.0, 0.0)]
    found = methods.glimpses(seen(Given(torch.cat([at(*one) for one in points]), 4, scales=3, factor=3)))
    for image, path in enumerate(points):
        one = found.at(batch=image)
        assert [tuple(point) for point in one.provenance.parameters["path"]] == path
        boxes = patches(one)
        assert boxes[1][0] == Box(path[1][1] - 2, path[1][0] - 2, path[1][1] + 2, path[1][0] + 2)
        assert [[box.width for box in glimpse] for glimpse in boxes] == [[4, 12, 36]] * 4


def test_a_bright_pixel_at_a_glimpse_lies_in_its_box() -> None:
    images = torch.zeros(1, 3, HEIGHT, WIDTH, dtype=torch.float64)
    images[0, :, 8, 15] = 1
    model = Given(at((4.2, 3.1), (15.5, 8.5)), 3)
    with torch.no_grad():
        assert model(images)[0].tolist() == [0, pytest.approx(1 / 9)]
    _, box = patches(methods.glimpses(seen(model, images)).at(batch=0))
    assert (box[0].top, box[0].bottom, box[0].left, box[0].right) == (7, 10, 14, 17)


def test_locations_and_output_are_the_same_in_every_forward_pass() -> None:
    model = RAM(4, 2, num_glimpses=3, hidden_dim=16, in_channels=3).eval()
    images = torch.rand(2, 3, HEIGHT, WIDTH)
    with torch.no_grad():
        expected = model(images)
    paths = []
    for _ in range(3):  # traced, stored, replayed
        with torch.no_grad(), visattn.capture(model) as recording:
            looked = model(images)
        assert all(torch.equal(a, b) for a, b in zip(looked, expected, strict=True))
        paths.append(methods.glimpses(recording).provenance.parameters["path"])
    assert paths[0] == paths[1] == paths[2]
    centers = (expected.locations.double() + 1) / 2 * torch.tensor([WIDTH, HEIGHT])
    torch.testing.assert_close(torch.tensor(paths[0], dtype=torch.float64), centers, atol=1e-3, rtol=0)


def test_a_retina_over_a_coarser_map_lies_on_the_pixels_below_it() -> None:
    found = methods.glimpses(seen(Given(at((5, 3)), 2, pool=2))).at(batch=0)
    assert patches(found) == [[Box(1, 3, 5, 7)]]
    assert int((found.values > 0).sum()) == 16
    assert bool((found.values[1:5, 3:7] == 1).all())


def test_a_module_is_chosen_by_name() -> None:
    class Both(Given):
        def forward(self, images: Tensor) -> Tensor:
            first = super().forward(images)
            second: Tensor = self.other(images, self.locations[:, 0])
            return first + second.flatten(1).mean(1)

    recording = seen(Both(at((5, 3), (6, 6))))
    assert len(patches(methods.glimpses(recording, layer="retina").at(batch=0))) == 2
    assert methods.glimpses(recording).provenance.parameters["layer"] == "other"
    with pytest.raises(OptionError, match="layer must be one of the modules with glimpses, retina, other, got 7"):
        methods.glimpses(recording, layer=7)


class Lost(Given):
    """Model whose retina reads a tensor that does not come from the image."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(torch.ones(1, 3, HEIGHT, WIDTH, dtype=images.dtype) * images.mean())


def twice() -> Recording:
    model = Given(at((5, 3)))
    with torch.no_grad(), visattn.capture(model) as recording:
        for _ in range(2):
            model(torch.rand(1, 3, HEIGHT, WIDTH, dtype=torch.float64))
    return recording


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "transformer": (
        lambda: methods.glimpses(tiny.recording()),
        r"takes no glimpses: no visattn\.nn\.Retina or DrawRead was called",
    ),
    "not followed": (
        lambda: methods.glimpses(seen(Lost(at((5, 3))))),
        "retina: the position of its glimpses .* could not be traced",
    ),
    "two forwards": (lambda: methods.glimpses(twice()), "the recording holds 2 forward passes"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_glimpses_are_refused(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(OptionError, match=message):
        call()


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_a_model_without_a_retina_is_refused(name: str) -> None:
    model = timm.create_model(name, num_classes=3)
    with pytest.raises(OptionError, match="the network takes no glimpses"):
        visattn.explain(model, Image.new("RGB", (40, 30)), method="glimpses")


# the picture

GRAY = Image.new("RGB", (90, 60), (90, 120, 60))


class Model(Given):
    """Model with the attributes that `prepare` needs."""

    img_size = HEIGHT, WIDTH

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))


def changed(drawn: Image.Image, photo: Image.Image) -> NDArray[np.bool_]:
    different: NDArray[np.bool_] = (np.asarray(drawn) != np.asarray(photo)).any(2)
    return different


def test_boxes_of_a_cropped_photo_are_in_its_original_pixels() -> None:
    photo = Image.new("RGB", (240, 120), (90, 120, 60))  # the model receives its center 200 x 120 pixels, ten times as large
    found = visattn.explain(Model(at((5, 4), (14, 8))), photo, method="glimpses")
    assert found.geometry.window == Box(0, 20, 120, 220)
    drawn = found.overlay(opacity=0.0)
    pixels = np.asarray(drawn)
    for left, top in ((20 + 30, 20), (20 + 120, 60)):  # two pixels up and left of the centers
        right, bottom = left + 39, top + 39
        side = np.arange(8)  # near the corners, away from lines and numbers
        for row, column in ((top, left), (top, right), (bottom, left), (bottom, right)):
            assert (pixels[row, column] == 255).all()
        assert (pixels[top, left + side] == 255).all()
        assert (pixels[top + side, left] == 255).all()
        assert (pixels[bottom, right - side] == 255).all()
        assert (pixels[bottom - side, right] == 255).all()
        assert (pixels[top + 3, left + 3 : left + 8] == (90, 120, 60)).all()
    assert not changed(drawn, photo)[:, :20].any()
    assert not changed(drawn, photo)[:, 220:].any()


def test_the_heatmap_lies_under_the_path() -> None:
    photo = Image.new("RGB", (200, 120), (90, 120, 60))
    found = visattn.explain(Model(at((5, 4), (14, 8))), photo, method="glimpses")
    values = found.heatmap("nearest").values
    assert set(np.unique(values)) == {0, 0.5}
    assert (values[20:60, 30:70] == 0.5).all()
    assert int((values > 0).sum()) == 2 * 40 * 40
    assert found.map.meaning == "glimpses"
    assert found.overlay().tobytes() != found.overlay(opacity=0.0).tobytes()


def test_pixels_change_only_near_boxes_lines_and_numbers() -> None:
    glimpses = [[Box(10, 8, 30, 28)], [Box(25, 50, 45, 70)], [Box(35.2, 10.7, 55.2, 30.7)]]
    drawn = draw_glimpses(GRAY, glimpses)
    centers = [((box.left + box.right) / 2, (box.top + box.bottom) / 2) for (box,) in glimpses]
    near = np.zeros((60, 90), bool)
    for row in range(60):
        for column in range(90):
            x, y = column + 0.5, row + 0.5
            for (box,) in glimpses:
                outside = max(box.left - x, x - box.right, box.top - y, y - box.bottom)
                near[row, column] |= abs(outside) <= 3
            for (ax, ay), (bx, by) in pairwise(centers):
                share = min(max(((x - ax) * (bx - ax) + (y - ay) * (by - ay)) / ((bx - ax) ** 2 + (by - ay) ** 2), 0), 1)
                near[row, column] |= (ax + share * (bx - ax) - x) ** 2 + (ay + share * (by - ay) - y) ** 2 <= 3.5**2
            near[row, column] |= any((x - cx) ** 2 + (y - cy) ** 2 <= 6**2 for cx, cy in centers)
    found = changed(drawn, GRAY)
    assert near.sum() < 0.6 * near.size
    assert not (found & ~near).any()
    for (ax, ay), (bx, by) in pairwise(centers):
        assert all(found[int(ay + s * (by - ay)), int(ax + s * (bx - ax))] for s in (0.1, 0.3, 0.5, 0.7, 0.9))
    assert changed(draw_glimpses(GRAY, [*glimpses[:2]]), GRAY)[35:55, 12:28].sum() < found[35:55, 12:28].sum()


def test_lines_join_glimpses_in_their_order() -> None:
    a, b, c = [Box(0, 0, 8, 8)], [Box(0, 80, 8, 88)], [Box(50, 0, 58, 8)]
    there, back = (changed(draw_glimpses(GRAY, path), GRAY) for path in ([a, b, c], [b, a, c]))
    assert there[27:31, 42:46].any()  # between b and c
    assert not back[27:31, 42:46].any()
    assert not there[25:30, 2:6].any()  # between a and c
    assert back[25:30, 2:6].any()


def test_large_glimpses_are_numbered_and_small_ones_have_dots() -> None:
    large, small = Box(10, 10, 50, 50), Box(10, 10, 20, 20)
    first, second, third = (np.asarray(draw_glimpses(GRAY, [[large]] * times))[25:35, 25:35] for times in (1, 2, 3))
    assert (first != second).any()
    assert (second != third).any()
    assert (first < 80).all(2).any()  # the digit, in a bright disc
    dot = changed(draw_glimpses(GRAY, [[small]]), GRAY)[13:17, 13:17]  # inside the box's line
    assert 0 < dot.sum() <= 9


def test_coarse_patches_are_fainter_than_the_finest() -> None:
    drawn = np.asarray(draw_glimpses(GRAY, [[Box(20, 30, 40, 50), Box(10, 20, 50, 60)]])).astype(int)
    fine, coarse = drawn[20, 35] - (90, 120, 60), drawn[10, 35] - (90, 120, 60)
    assert (fine > coarse).all()
    assert (coarse > 20).all()
    assert (drawn[5, 35] == (90, 120, 60)).all()


def test_pixels_outside_the_crop_are_not_drawn_on() -> None:
    drawn = draw_glimpses(GRAY, [[Box(-10, -10, 30, 30), Box(-90, -90, 200, 200)]], Box(0, 15, 60, 75))
    assert changed(drawn, GRAY)[:, 15:75].any()
    assert not changed(drawn, GRAY)[:, :15].any()
    assert not changed(drawn, GRAY)[:, 75:].any()
    assert draw_glimpses(GRAY, []).tobytes() == GRAY.tobytes()


def test_a_saved_map_draws_the_same_path(tmp_path: Path) -> None:
    found = visattn.explain(Model(at((5, 4), (14, 8))), GRAY, method="glimpses")
    file = tmp_path / "map.npz"
    file.write_bytes(save_map(found.map, found.geometry))
    loaded = load_map(file)
    assert isinstance(loaded, tuple)
    again, geometry = loaded
    assert isinstance(geometry, Geometry)
    assert patches(again) == patches(found.map)
    assert len(patches(again)) == 2


# a trained folder


def test_a_folder_is_drawn_by_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from visattn.cli.commands import _run

    plan = Blueprint(
        "visattn_ram", ("a", "b"), 1, (28, 28), (0.3,), (0.3,), options={"glimpse_size": 8, "num_glimpses": 4, "hidden_dim": 16}
    )
    model = plan.build().eval()
    folders.save(model, plan, tmp_path / "ram")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (56, 90, 3), dtype=np.uint8)).save(tmp_path / "photo.png")
    monkeypatch.chdir(tmp_path)
    assert _run(["overlay", "photo.png", "--model", "ram", "--method", "glimpses"], debug=True) == 0
    with Image.open("photo.ram.glimpses.png") as picture:
        assert picture.size == (90, 56)
        facts = json.loads(picture.info["visattn"])
    assert facts["parameters"]["patches"] == [[8, 8]]
    assert len(facts["parameters"]["path"]) == 4
    loaded = visattn.load_model(str(tmp_path / "ram"))
    with torch.no_grad():
        pixels = visattn.prepare(visattn.load_image("photo.png"), loaded).pixels
        centers = (model(pixels).locations[0].double() + 1) * 14
    torch.testing.assert_close(torch.tensor(facts["parameters"]["path"], dtype=torch.float64), centers, atol=1e-3, rtol=0)


def test_ram_refuses_another_attention() -> None:
    plan = Blueprint("visattn_ram", ("a", "b"), 1, (28, 28), (0.3,), (0.3,), attention="cbam")
    with pytest.raises(OptionError, match=r"visattn_ram has its own attention \(glimpses\) and takes no other, got cbam"):
        plan.build()
