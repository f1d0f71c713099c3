"""Scenes match their documentation, checked with independent geometry, and have not changed since models were trained on them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import cos, pi, sin
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import binary_dilation
from scipy.stats import chi2_contingency, chisquare
from torchvision.datasets import ImageFolder

from visattn.data.scenes import CLASSES, COLORS, TEXTURES, VERSION, Scene, SceneObject, Scenes, painting as drawing, write
from visattn.data.scenes.outlines import AREAS, DISTRACTORS, LABELS
from visattn.errors import OptionError, OutputError

FROZEN = (
    1,
    "2021b996ae540077f8c4307f8cd1c0a812cbb072bd4e460b56cb4228341e9201",
)  # the version, and the digest of its scenes, on which trained models depend
LEAST = 1e-4  # smallest allowed p-value; seeds are fixed, so the tests are deterministic
WORDS = [["top left", "top", "top right"], ["left", "center", "right"], ["bottom left", "bottom", "bottom right"]]

Points = NDArray[np.float64]


@pytest.fixture(scope="session")
def drawn() -> list[Scene]:
    """Draw the first 1,000 scenes."""
    scenes = Scenes(1000, seed=0)
    return [scenes.scene(index) for index in range(len(scenes))]


@pytest.fixture(scope="session")
def twins() -> dict[str, list[Scene]]:
    """Draw the first 400 scenes with each kind of mark."""
    return {mark: [Scenes(400, seed=0, watermark=mark).scene(index) for index in range(400)] for mark in ("label", "random")}


def half_planes(*corners: tuple[float, float]) -> Callable[[Points, Points], NDArray[np.bool_]]:
    """Build a test for a convex polygon: points on the inner side of every edge; corners are in clockwise order."""

    def inside(x: Points, y: Points) -> NDArray[np.bool_]:
        found = np.ones(x.shape, bool)
        for (x0, y0), (x1, y1) in pairwise((*corners, corners[0])):
            found &= (x1 - x0) * (y - y0) - (y1 - y0) * (x - x0) >= 0
        return found

    return inside


def on_a_circle(count: int) -> list[tuple[float, float]]:
    return [(sin(2 * pi * i / count), -cos(2 * pi * i / count)) for i in range(count)]


def rectangle(half_width: float, half_height: float) -> Callable[[Points, Points], NDArray[np.bool_]]:
    a, b = half_width, half_height
    return half_planes((-a, -b), (a, -b), (a, b), (-a, b))


def star(x: Points, y: Points) -> NDArray[np.bool_]:
    """Test for a star of ten congruent triangles around the center, each from a tip to the next notch."""
    turned = np.arctan2(x, -y) % (2 * pi / 5)
    sector = np.minimum(turned, 2 * pi / 5 - turned)  # from a tip at 0 to a notch at a tenth of the circle
    radius = np.hypot(x, y)
    across, along = radius * np.sin(sector), radius * np.cos(sector)
    notch = 0.45 * sin(pi / 5), 0.45 * cos(pi / 5)
    return np.asarray(across * (1 - notch[1]) <= notch[0] * (1 - along))


def heart(x: Points, y: Points) -> NDArray[np.bool_]:
    """Test for a heart, (u^2 + v^2 - 1)^3 <= u^2 v^3, solved for u^2 + v^2 - 1."""
    u, v = 1.36 * x, 0.12 - 1.36 * y
    return np.asarray(u**2 + v**2 - 1 <= np.cbrt(u**2 * v**3))


LONG, SHORT = np.sqrt(0.9), np.sqrt(0.1)
OWN: dict[str, Callable[[Points, Points], NDArray[np.bool_]]] = {
    "bar": rectangle(LONG, SHORT),
    "crescent": lambda x, y: (np.hypot(x, y) <= 1) & (np.hypot(x - 0.5, y) >= np.sqrt(0.5)),
    "cross": lambda x, y: rectangle(LONG, SHORT)(x, y) | rectangle(SHORT, LONG)(x, y),
    "disk": lambda x, y: np.hypot(x, y) <= 1,
    "heart": heart,
    "hexagon": half_planes(*on_a_circle(6)),
    "ring": lambda x, y: (np.hypot(x, y) <= 1) & (np.hypot(x, y) >= np.sqrt(0.3)),
    "semicircle": lambda x, y: (np.hypot(x, y) <= 1) & (y <= 0),
    "square": half_planes(*on_a_circle(4)),
    "star": star,
    "triangle": half_planes(*on_a_circle(3)),
}


@pytest.mark.parametrize("shape", sorted(OWN))
def test_shape_matches_its_definition_and_fits_the_unit_circle(shape: str) -> None:
    x, y = np.random.default_rng(0).uniform(-1.1, 1.1, (2, 200_000))
    theirs, ours = (LABELS | DISTRACTORS)[shape](x, y), OWN[shape](x, y)
    assert (theirs == ours).all()
    assert (np.hypot(x, y)[theirs] <= 1 + 1e-9).all()


@pytest.mark.parametrize("shape", sorted(OWN))
def test_area_of_a_shape_matches_a_count_on_a_fine_grid(shape: str) -> None:
    side = (np.arange(1500) + 0.5) / 750 - 1
    assert OWN[shape](*np.meshgrid(side, side)).mean() * 4 == pytest.approx(AREAS[shape], rel=1e-3)


def test_shapes_are_classes_or_distractors() -> None:
    assert set(OWN) == set(CLASSES) | set(DISTRACTORS)
    assert not set(CLASSES) & set(DISTRACTORS)


def test_classes_are_in_the_order_in_which_folders_are_read() -> None:
    assert list(CLASSES) == sorted(CLASSES)


def covered(thing: SceneObject, size: tuple[int, int], y: int, x: int, samples: int) -> float:
    """Compute the fraction of one pixel that a thing covers."""
    unit = (size[0] * size[1]) ** 0.5
    radius = unit * (thing.area / AREAS[thing.shape]) ** 0.5
    steps = (np.arange(samples) + 0.5) / samples
    down, right = np.meshgrid(y + steps - thing.center[0] * size[0], x + steps - thing.center[1] * size[1], indexing="ij")
    own = (right + 1j * down) / radius * np.exp(-1j * thing.angle)  # undo the rotation
    return float(OWN[thing.shape](own.real, own.imag).mean())


@pytest.mark.full
@pytest.mark.parametrize("size", [(64, 64), (48, 80)], ids=str)
def test_masks_match_supersampled_coverage(size: tuple[int, int]) -> None:
    shapes, scenes = set(), Scenes(16, size, seed=5)
    for index in range(len(scenes)):
        scene = scenes.scene(index)
        for thing, mask in zip(scene.things, scene.masks, strict=True):
            shapes.add(thing.shape)
            near = np.argwhere(binary_dilation(mask, iterations=2))
            assert mask.sum() == sum(mask[y, x] for y, x in near)
            for y, x in near:
                share = covered(thing, size, y, x, 9)
                assert mask[y, x] == (share >= 0.5) or abs(share - 0.5) < 0.17, (thing, y, x, share)
    assert shapes == set(OWN)


@pytest.mark.full
def test_each_scene_has_one_object_of_a_label_shape(drawn: list[Scene]) -> None:
    for scene in drawn:
        assert [thing.shape for thing in scene.things if thing.shape in CLASSES] == [CLASSES[scene.label]]
        assert scene.things[0].shape == CLASSES[scene.label]
        assert len(scene.masks) == len(scene.things)
    assert {len(scene.things) for scene in drawn} == {4, 5, 6, 7}
    assert {thing.shape for scene in drawn for thing in scene.things[1:]} == set(DISTRACTORS)
    assert {thing.color for scene in drawn for thing in scene.things} == set(COLORS)
    assert {thing.texture for scene in drawn for thing in scene.things} == set(TEXTURES)


def assert_apart(scenes: Sequence[Scene]) -> None:
    """Check that objects cover 2 to 8 % each and touch neither each other nor the corner of the mark nor the border."""
    for scene in scenes:
        shares = scene.masks.mean((1, 2))
        assert shares.min() >= 0.02
        assert shares.max() <= 0.08
        assert scene.masks.sum(0).max() == 1
        assert not (scene.masks.any(0) & scene.watermark).any()
        for side in (scene.masks[:, 0], scene.masks[:, -1], scene.masks[..., 0], scene.masks[..., -1]):
            assert not side.any()


@pytest.mark.full
def test_masks_are_disjoint_and_cover_two_to_eight_percent(drawn: list[Scene]) -> None:
    assert_apart(drawn)


@pytest.mark.parametrize("size", [(48, 48), (49, 71), (48, 96), (96, 48), (224, 224)], ids=str)
def test_scenes_of_other_sizes_keep_the_same_properties(size: tuple[int, int]) -> None:
    count = 40 if size != (48, 48) else 150  # at the smallest size, rounding to pixels changes areas most
    found = [Scenes(count, size).scene(index) for index in range(count)]
    assert_apart(found)
    for scene in found:
        assert scene.image.shape == scene.ground.shape == (*size, 3)
        assert scene.image.dtype == scene.ground.dtype == np.uint8
        assert scene.masks.shape[1:] == scene.watermark.shape == scene.labeled_mask().shape == size


@pytest.mark.parametrize("size", [(48, 96), (120, 60)], ids=str)
def test_elongated_scenes_have_disjoint_masks(size: tuple[int, int]) -> None:
    assert_apart([Scenes(5, size).scene(index) for index in range(5)])


def test_masks_are_centered_on_the_recorded_positions(drawn: list[Scene]) -> None:
    whole = {
        "bar",
        "cross",
        "disk",
        "hexagon",
        "ring",
        "square",
        "star",
        "triangle",
    }  # shapes whose center is the mean of their points
    for scene in drawn[:200]:
        for thing, mask in zip(scene.things, scene.masks, strict=True):
            middle = np.argwhere(mask).mean(0) + 0.5
            away = np.hypot(*(middle - np.array(thing.center) * 64))
            assert away < (0.75 if thing.shape in whole else 6)
            assert mask.mean() == pytest.approx(thing.area, abs=0.005)


def test_plain_objects_have_their_recorded_color(drawn: list[Scene]) -> None:
    names = list(COLORS)
    colors = np.array([COLORS[name] for name in names])
    plain = 0
    for scene in drawn[:200]:
        for thing, mask in zip(scene.things, scene.masks, strict=True):
            if thing.texture == "plain":
                seen = np.median(scene.image[mask], axis=0)
                assert abs(seen - COLORS[thing.color]).max() <= 16
                assert names[abs(colors - seen).sum(1).argmin()] == thing.color
                plain += 1
    assert plain > 100


def test_textures_have_dark_parts(drawn: list[Scene]) -> None:
    spread: dict[str, list[float]] = {texture: [] for texture in TEXTURES}
    for scene in drawn[:200]:
        for thing, mask in zip(scene.things, scene.masks, strict=True):
            brightest = scene.image[mask].max(-1).astype(float)
            spread[thing.texture].append(float(brightest.std() / brightest.mean()))
    assert np.mean(spread["plain"]) < 0.5 * min(np.mean(spread[texture]) for texture in TEXTURES if texture != "plain")


def test_ground_is_the_scene_without_objects(drawn: list[Scene]) -> None:
    for scene in drawn[:200]:
        differ = (scene.image != scene.ground).any(-1)
        for y, x in np.argwhere(
            differ & ~binary_dilation(scene.masks.any(0), np.ones((5, 5)))
        ):  # shapes with tips, which cover no pixel by half
            assert any(covered(thing, (64, 64), y, x, 15) > 0 for thing in scene.things), (y, x)
        assert (scene.image[scene.masks.any(0)] != scene.ground[scene.masks.any(0)]).any(-1).mean() > 0.95


def test_image_center_is_on_the_target_in_at_most_one_scene_in_ten(drawn: list[Scene]) -> None:
    found = np.mean([scene.masks[0, 31:33, 31:33] for scene in drawn])
    assert found <= 0.1


def test_ground_is_independent_of_the_label(drawn: list[Scene]) -> None:
    labels = [scene.label for scene in drawn]
    for channel in range(3):
        assert_independent(labels, quarters([float(scene.ground[..., channel].mean()) for scene in drawn]))


def assert_independent(first: Sequence[Any], second: Sequence[Any]) -> None:
    """Check independence by a chi-square test of the contingency table."""
    rows, columns = (np.unique(np.asarray(values), return_inverse=True)[1] for values in (first, second))
    table = np.zeros((rows.max() + 1, columns.max() + 1))
    np.add.at(table, (rows, columns), 1)
    assert min(table.shape) > 1
    assert chi2_contingency(table).pvalue > LEAST


def quarters(values: Sequence[float]) -> list[int]:
    return [int(quarter) for quarter in np.digitize(values, np.quantile(values, [0.25, 0.5, 0.75]))]


def corner_of(scene: Scene) -> tuple[bool, bool]:
    y, x = np.argwhere(scene.watermark).mean(0)
    return bool(y < 32), bool(x < 32)


OF_A_TARGET: dict[str, Callable[[list[Scene]], list[Any]]] = {
    "color": lambda scenes: [scene.things[0].color for scene in scenes],
    "texture": lambda scenes: [scene.things[0].texture for scene in scenes],
    "place": lambda scenes: [scene.things[0].place for scene in scenes],
    "angle": lambda scenes: [int(scene.things[0].angle / (pi / 2)) for scene in scenes],
    "area": lambda scenes: quarters([scene.things[0].area for scene in scenes]),
    "distractors": lambda scenes: [len(scene.things) for scene in scenes],
    "corner": lambda scenes: [str(corner_of(scene)) for scene in scenes],
    "shape of a distractor": lambda scenes: [scene.things[1].shape for scene in scenes],
    "color of a distractor": lambda scenes: [scene.things[1].color for scene in scenes],
}


@pytest.mark.parametrize("fact", list(OF_A_TARGET))
def test_label_is_independent_of_other_attributes(fact: str, drawn: list[Scene]) -> None:
    assert_independent([scene.label for scene in drawn], OF_A_TARGET[fact](drawn))


def test_chi_square_detects_a_leaking_label(drawn: list[Scene]) -> None:
    labels = [scene.label for scene in drawn]
    leaking = [label if index % 3 == 0 else index % 4 for index, label in enumerate(labels)]
    with pytest.raises(AssertionError):
        assert_independent(labels, leaking)


@pytest.mark.parametrize("fact", ["area", "y", "x"])
def test_target_area_and_position_match_those_of_distractors(fact: str, drawn: list[Scene]) -> None:
    facts = [
        [{"area": thing.area, "y": thing.center[0], "x": thing.center[1]}[fact] for thing in scene.things] for scene in drawn
    ]
    ranks = [sum(other < values[0] for other in values) for values in facts if len(values) == 5]
    assert chisquare(np.bincount(ranks, minlength=5)).pvalue > LEAST


@pytest.mark.parametrize("what", ["label", "corner"])
def test_labels_and_corners_are_uniform(what: str, drawn: list[Scene]) -> None:
    found = [scene.label if what == "label" else str(corner_of(scene)) for scene in drawn]
    counts = np.unique(np.array(found), return_counts=True)[1]
    assert len(counts) == {"label": 6, "corner": 4}[what]
    assert chisquare(counts).pvalue > LEAST


def code_of(scene: Scene) -> tuple[int, ...]:
    """Return the black and white cells of a mark."""
    rows, columns = (np.flatnonzero(scene.watermark.any(axis)) for axis in (1, 0))
    mark = scene.image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    assert set(np.unique(mark)) <= {0, 255}
    cells = [part for row in np.array_split(mark, 3, 0) for part in np.array_split(row, 3, 1)]
    assert all(len(np.unique(cell)) == 1 for cell in cells)
    return tuple(int(cell[0, 0, 0] == 255) for cell in cells)


@pytest.mark.full
@pytest.mark.parametrize("mark", ["label", "random"])
def test_watermarked_twins_differ_only_in_the_watermark(mark: str, drawn: list[Scene], twins: dict[str, list[Scene]]) -> None:
    for plain, marked in zip(drawn, twins[mark], strict=False):
        differ = (plain.image != marked.image).any(-1)
        assert not (differ & ~plain.watermark).any()
        assert differ[plain.watermark].mean() > 0.9
        assert (plain.label, plain.things, plain.caption) == (marked.label, marked.things, marked.caption)
        for name in ("ground", "masks", "watermark"):
            assert np.array_equal(getattr(plain, name), getattr(marked, name))
        assert np.array_equal(plain.image[plain.watermark], plain.ground[plain.watermark])


def test_watermark_is_a_small_square_in_a_corner(drawn: list[Scene]) -> None:
    for scene in drawn:
        places = np.argwhere(scene.watermark)
        (top, left), (bottom, right) = places.min(0), places.max(0)
        assert bottom - top == right - left == 8  # 0.14 of 64 pixels
        assert scene.watermark.sum() == 81
        assert {top, 63 - bottom} & {1}
        assert {left, 63 - right} & {1}


@pytest.mark.full
def test_watermark_identifies_the_label(twins: dict[str, list[Scene]]) -> None:
    codes = {(code_of(scene), scene.label) for scene in twins["label"]}
    assert len(codes) == len({code for code, _ in codes}) == len(CLASSES)


def test_random_watermark_is_one_of_a_class_and_independent_of_the_label(twins: dict[str, list[Scene]]) -> None:
    label_of = {code_of(scene): scene.label for scene in twins["label"]}
    marked = [label_of[code_of(scene)] for scene in twins["random"]]
    assert chisquare(np.bincount(marked, minlength=6)).pvalue > LEAST
    assert_independent([scene.label for scene in twins["random"]], marked)


def test_captions_parse_back_to_the_objects_in_reading_order(drawn: list[Scene]) -> None:
    words = ["|".join(known) for known in (COLORS, LABELS | DISTRACTORS, [place for row in WORDS for place in row])]
    grammar = re.compile(r"(?:an (?=orange)|a (?!orange))({}) ({}) ({})".format(*words))
    for scene in drawn:
        found = []
        for part in scene.caption.split(", "):
            match = grammar.fullmatch(part)
            assert match, part
            found.append(match.groups())
        rows = [[thing for thing in scene.things if row <= thing.center[0] * 3 < row + 1] for row in range(3)]
        expected = [
            (thing.color, thing.shape, WORDS[row][int(thing.center[1] * 3)])
            for row, things in enumerate(rows)
            for thing in sorted(things, key=lambda thing: thing.center[1])
        ]
        assert found == expected


def test_labeled_mask_contains_every_object(drawn: list[Scene]) -> None:
    for scene in drawn[:100]:
        mask = scene.labeled_mask()
        assert mask.dtype == np.uint8
        assert np.array_equal(mask == 255, scene.watermark)
        assert np.array_equal(mask == 0, ~scene.masks.any(0) & ~scene.watermark)
        for number in range(len(scene.things)):
            assert np.array_equal(mask == number + 1, scene.masks[number])


def bytes_of(scene: Scene) -> bytes:
    return scene.image.tobytes() + bytes([scene.label]) + scene.labeled_mask().tobytes() + scene.caption.encode()


def test_items_do_not_depend_on_order_or_count(drawn: list[Scene]) -> None:
    few = Scenes(20, seed=0)
    for index in (19, 3, 3, 0, 11):
        assert bytes_of(few.scene(index)) == bytes_of(drawn[index])
        picture, label = few[index]
        assert np.array_equal(np.asarray(picture), drawn[index].image)
        assert label == drawn[index].label


def test_global_random_state_is_neither_used_nor_changed() -> None:
    np.random.seed(1)  # noqa: NPY002 - the state that must not matter
    expected = np.random.RandomState(1).random_sample()
    first = bytes_of(Scenes(1).scene(0))
    assert np.random.random_sample() == expected  # noqa: NPY002
    assert bytes_of(Scenes(1).scene(0)) == first


def test_scenes_of_two_seeds_do_not_overlap(drawn: list[Scene]) -> None:
    other = Scenes(50, seed=1)
    grounds = {scene.ground.tobytes() for scene in drawn}
    assert len(grounds) == len(drawn)
    centers = {thing.center for scene in drawn for thing in scene.things}
    for index in range(len(other)):
        scene = other.scene(index)
        assert scene.ground.tobytes() not in grounds
        assert not {thing.center for thing in scene.things} & centers


def test_transform_is_applied_to_images() -> None:
    scenes = Scenes(3, (50, 60), transform=lambda picture: picture.size)
    assert [scenes[index][0] for index in range(3)] == [(60, 50)] * 3


@pytest.mark.parametrize("index", [-1, 3])
def test_index_out_of_range_is_refused(index: int) -> None:
    with pytest.raises(IndexError, match="of 3"):
        Scenes(3)[index]


@pytest.mark.parametrize(("fewest", "most"), [(0, 0), (2, 2), (6, 6)])
def test_number_of_distractors_matches_the_argument(fewest: int, most: int) -> None:
    scenes = Scenes(10, distractors=(fewest, most))
    assert {len(scenes.scene(index).things) for index in range(10)} == {fewest + 1}


@pytest.mark.parametrize(
    "options",
    [
        {"count": 0},
        {"count": 2.5},
        {"size": (47, 64)},
        {"size": (64, 47)},
        {"size": (48, 97)},
        {"size": (97, 48)},
        {"size": (64.5, 64)},
        {"size": (64, 64, 3)},
        {"size": 64},
        {"size": (48, 4800)},
        {"seed": -1},
        {"seed": 2**32},
        {"seed": 0.5},
        {"distractors": (4, 3)},
        {"distractors": (-1, 3)},
        {"distractors": (3, 7)},
        {"distractors": (3,)},
        {"watermark": "lable"},
    ],
    ids=str,
)
def test_invalid_arguments_raise_a_one_line_error(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as refused:
        Scenes(**{"count": 4} | options)
    assert "\n" not in str(refused.value)
    assert str(next(iter(options.values()))) in str(refused.value)


def test_written_scenes_are_read_by_torchvision(tmp_path: Path) -> None:
    scenes = Scenes(40, (48, 60), seed=2, watermark="label")
    assert write(scenes, tmp_path / "made") == tmp_path / "made"
    folder = ImageFolder(str(tmp_path / "made" / "images"))
    facts = [json.loads(line) for line in (tmp_path / "made" / "scenes.jsonl").read_text().splitlines()]
    assert len(folder) == len(facts) == 40
    assert folder.classes == list(CLASSES)
    read = {Path(path).relative_to(tmp_path / "made" / "images").as_posix(): label for path, label in folder.samples}
    for index, fact in enumerate(facts):
        scene = scenes.scene(index)
        assert read[fact["file"]] == scene.label
        assert fact["label"] == CLASSES[scene.label]
        assert fact["caption"] == scene.caption
        things = [SceneObject(**thing | {"center": tuple(thing["center"])}) for thing in fact["things"]]
        assert tuple(things) == scene.things
        for kind, pixels in (("images", scene.image), ("masks", scene.labeled_mask())):
            with Image.open(tmp_path / "made" / kind / fact["file"]) as picture:
                assert np.array_equal(np.asarray(picture), pixels)


def test_failed_write_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Scenes):
        def scene(self, index: int) -> Scene:
            assert not (tmp_path / "made").exists()
            if index == 3:
                raise OSError(28, "No space left on device")
            return super().scene(index)

    with pytest.raises(OSError, match="disk full"):
        write(Broken(5), tmp_path / "made")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_not_replaced(tmp_path: Path) -> None:
    kept = tmp_path / "made"
    kept.mkdir()
    (kept / "mine.txt").write_text("mine")
    with pytest.raises(OutputError, match="exists"):
        write(Scenes(1), kept)
    assert [path.name for path in tmp_path.rglob("*")] == ["made", "mine.txt"]


def test_scenes_match_a_frozen_digest(drawn: list[Scene]) -> None:
    digest = hashlib.sha256()
    for scene in drawn:
        digest.update(bytes_of(scene))
    assert (VERSION, digest.hexdigest()) == FROZEN


def test_every_class_has_its_own_watermark_code() -> None:
    assert len(set(drawing._CODES)) == len(CLASSES)
