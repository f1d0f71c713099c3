"""Cluttered images: the item is whole, anywhere, among four pieces of other items, and the same on every machine."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from visattn.data.labeled.arrays import ArrayDataset
from visattn.data.labeled.cluttered import PIECE, PIECES, SIDE, Cluttered

COUNT = 200


@pytest.fixture(scope="module")
def items() -> ArrayDataset:
    random = np.random.RandomState(0)
    pixels = random.randint(1, 256, (COUNT, 28, 28)).astype(np.uint8)
    pixels[random.random_sample(pixels.shape) < 0.3] = 0
    return ArrayDataset(pixels, np.arange(COUNT) % 10, [str(name) for name in range(10)])


def places(image: np.ndarray, item: np.ndarray) -> list[tuple[int, int]]:
    """Return every place where all pixels of the item that are not black stand in the image."""
    kept = item > 0
    return [
        (y, x)
        for y in range(SIDE - 27)
        for x in range(SIDE - 27)
        if np.array_equal(image[y : y + 28, x : x + 28][kept], item[kept])
    ]


def test_the_item_lies_whole_and_anywhere_among_pieces(items: ArrayDataset) -> None:
    drawn = Cluttered(items, 1, "cluttered")
    found = []
    for index in range(0, COUNT, 5):
        picture, label = drawn[index]
        image = np.asarray(picture)
        assert image.shape == (SIDE, SIDE)
        assert label == index % 10
        (place,) = places(image, items.pixels[index])
        found.append(place)
        rest = image.copy()
        rest[place[0] : place[0] + 28, place[1] : place[1] + 28] = 0
        assert np.count_nonzero(rest) <= PIECES * PIECE**2
    spread = np.array(found)
    assert len(set(found)) > 30
    assert spread.min() < 4
    assert spread.max() > SIDE - 32


def test_pieces_are_drawn_and_come_from_other_items(items: ArrayDataset) -> None:
    seen = [np.count_nonzero(np.asarray(Cluttered(items, 1, "")[i][0])) - np.count_nonzero(items.pixels[i]) for i in range(50)]
    assert 0 < np.mean(seen) <= PIECES * PIECE**2


def test_an_image_depends_on_seed_and_index_alone(items: ArrayDataset) -> None:
    one, other = Cluttered(items, 1, "a"), Cluttered(items, 2, "b")
    assert one[3][0].tobytes() == Cluttered(items, 1, "c")[3][0].tobytes()
    assert one[3][0].tobytes() != other[3][0].tobytes()
    assert one.fingerprint() == Cluttered(items, 1, "c").fingerprint() != other.fingerprint()
    whole = hashlib.sha256(b"".join(one[i][0].tobytes() for i in range(COUNT)))
    assert whole.hexdigest() == "98444d262fd9c8509c0e27f2022f95811863779f638142099db033e859722923"
    assert (one.channels, one.size, len(one), one.name(7)) == (1, (SIDE, SIDE), COUNT, "a 7")


def test_turned_items_are_rotated_by_angles_up_to_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visattn.data.labeled.cluttered.PIECES", 0)
    pixels = np.zeros((40, 28, 28), np.uint8)
    pixels[:, 4:24, 13:15] = 200  # upright bars
    bars = ArrayDataset(pixels, np.arange(40) % 2, ("a", "b"), "bars")
    plain = Cluttered(bars, 1, "bars")
    for most in (60.0, 20.0):
        turned = Cluttered(bars, 1, "bars", most)
        angles = []
        for index in range(40):
            image, label = turned[index]
            assert label == plain[index][1]
            rows, columns = np.nonzero(np.asarray(image) > 100)
            axes, _, _ = np.linalg.svd(np.stack([columns - columns.mean(), rows - rows.mean()]), full_matrices=False)
            right, down = axes[:, 0]
            angles.append(np.degrees(np.arctan2(right, down)))
        upright = (np.array(angles) + 90) % 180 - 90  # an axis has no direction
        assert upright.min() < -0.7 * most
        assert upright.max() > 0.7 * most
        assert np.abs(upright).max() < most + 3  # of a bar of few pixels
        assert turned.fingerprint() != plain.fingerprint()


def test_items_that_are_not_turned_stay_upright(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visattn.data.labeled.cluttered.PIECES", 0)
    pixels = np.zeros((5, 28, 28), np.uint8)
    pixels[:, 4:24, 13:15] = 200
    bars = ArrayDataset(pixels, np.arange(5) % 2, ("a", "b"), "bars")
    for index in range(5):
        rows, columns = np.nonzero(np.asarray(Cluttered(bars, 1, "bars")[index][0]))
        assert (int(np.ptp(rows)), int(np.ptp(columns))) == (19, 1)
