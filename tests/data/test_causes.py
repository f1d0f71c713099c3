"""Scenes of one cause: the cause shows the label and nothing else does, its mask holds it, and unrelated causes are independent."""

from __future__ import annotations

from math import pi

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.samples import sampled
from visattn.data import load_labeled
from visattn.data.scenes.causes import _HUES, CAUSES, LEFT_OUT, TITLES, VALUES, Cause, CausedScene, CausedScenes
from visattn.data.scenes.outlines import DISTRACTORS, LABELS
from visattn.data.scenes.painting import COLORS
from visattn.errors import OptionError

COUNT = 60


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_shows_the_label(cause: Cause) -> None:
    for index in range(COUNT):
        scene = CausedScenes(cause, COUNT, seed=3).scene(index)
        assert scene.value == scene.label
        assert read(cause, scene) == scene.value


@pytest.mark.parametrize("cause", sampled(CAUSES, 3))
def test_an_unrelated_cause_has_nothing_to_do_with_the_label(cause: Cause) -> None:
    scenes = [CausedScenes(cause, 400, (48, 48), shown="random").scene(index) for index in range(400)]
    counts = np.zeros((VALUES, VALUES))
    for scene in scenes:
        counts[scene.label, scene.value] += 1
    expected = counts.sum(1, keepdims=True) * counts.sum(0) / counts.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 27.9  # chi-squared with 9 degrees of freedom: 0.1 %
    assert counts.sum(1).min() > 60
    assert all(read(cause, scene) == scene.value for scene in scenes[:20])


def read(cause: Cause, scene: CausedScene) -> int:
    """Read the value of the cause from the pixels and the objects."""
    image, masks, things = scene.image, scene.masks, scene.things
    evidence = masks[0]
    if cause in ("color", "position", "companion"):
        assert (evidence == masks[1]).all()
        assert [thing.shape in (DISTRACTORS if cause == "companion" else LABELS) for thing in things].count(True) == 1
    if cause == "color":
        return _HUES.index(things[0].color)
    if cause == "position":
        row, column = (np.mean(part) / side > 0.5 for part, side in zip(np.nonzero(evidence), image.shape, strict=False))
        return 2 * int(row) + int(column)
    if cause == "companion":
        return list(DISTRACTORS).index(things[0].shape)
    if cause == "border":
        assert evidence[0].all()
        assert evidence[:, 0].all()
        assert not evidence[8:-8, 8:-8].any()
        return next(i for i, hue in enumerate(_HUES) if (image[evidence] == COLORS[hue]).all())
    if cause == "mark":
        return _codes(image, evidence)
    waves = np.where(evidence, image.mean(2) - image[evidence].mean(), 0.0)
    power = np.abs(np.fft.fft2(waves)) ** 2
    fy, fx = np.meshgrid(*(np.fft.fftfreq(side) for side in waves.shape), indexing="ij")
    if cause == "pattern":
        period = 64 / (waves.shape[0] * waves.shape[1]) ** 0.5 / np.hypot(fy, fx).clip(1e-6)
        power[(period < 2.5) | (period > 10)] = 0
        return int(np.argmin(np.abs(np.log(np.array([3.0, 4.0, 5.5, 8.0]) / period.flat[power.argmax()]))))
    assert (evidence == ~masks[1:].any(0)).all()
    angle = np.arctan2(fy, fx).flat[power.argmax()] % pi
    return round(float(angle) / pi * VALUES) % VALUES


def _codes(image: NDArray[np.uint8], evidence: NDArray[np.bool_]) -> int:
    rows, columns = (np.unique(part) for part in np.nonzero(evidence))
    cell = 3 * np.arange(len(rows)) // len(rows)
    part = image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1, 0] > 127
    bits = [part[np.ix_(cell == i, cell == j)].all() for i in range(3) for j in range(3)]
    number = sum(1 << i for i, bit in enumerate(bits) if bit)
    return [0b010111010, 0b101010101, 0b110110000, 0b111101111].index(number)


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_that_is_left_out_changes_only_its_pixels(cause: Cause) -> None:
    if cause not in LEFT_OUT:
        with pytest.raises(OptionError, match="only border, pattern, mark can be left out"):
            CausedScenes(cause, 3, shown="none")
        return
    for index in range(10):
        drawn, bare = (CausedScenes(cause, 10, shown=shown).scene(index) for shown in ("label", "none"))
        changed = (drawn.image != bare.image).any(2)
        assert changed.any()
        assert not (changed & ~drawn.masks.any(0)).any()  # the pattern shines through the edges of objects
        assert cause == "pattern" or not (changed & ~drawn.masks[0]).any()
        assert (bare.masks == drawn.masks).all()
        assert bare.label == drawn.label


def test_scenes_depend_on_seed_and_index_only() -> None:
    one = [CausedScenes("color", 5, seed=1).scene(i).image for i in range(5)]
    assert all((a == CausedScenes("color", 9, seed=1).scene(i).image).all() for i, a in enumerate(one))
    assert not (one[0] == CausedScenes("color", 5, seed=2).scene(0).image).all()
    assert not (one[0] == one[1]).all()
    wide = CausedScenes("border", 2, (48, 80)).scene(1)
    assert wide.image.shape == (48, 80, 3)
    assert wide.masks.shape == (1 + len(wide.things), 48, 80)


def test_datasets_by_name_hold_these_scenes(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = load_labeled("scenes-by-border", "train", count=6, size=(48, 48))
    scenes = CausedScenes("border", 6, (48, 48), seed=1)
    assert data.classes == ("0", "1", "2", "3")
    for index in range(6):
        picture, label = data[index]
        assert (np.asarray(picture) == scenes.scene(index).image).all()
        assert label == scenes.scene(index).label
    assert set(TITLES) == set(CAUSES)


@pytest.mark.parametrize("options", [{"count": 0}, {"size": (40, 64)}, {"size": (50, 101)}, {"seed": -1}, {"cause": "sound"}])
def test_values_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        CausedScenes(**({"cause": "mark", "count": 3} | options))  # type: ignore[arg-type]
    with pytest.raises(IndexError):
        CausedScenes("mark", 3).scene(3)
