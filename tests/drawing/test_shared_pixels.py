"""Pixels over Pillow's own memory: they are the picture's, and the picture's memory lives as long as they do."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from PIL import Image

from visattn.core.drawing.overlays import overlay
from visattn.core.drawing.shared_pixels import shared_pixels


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (31, 2), (640, 480), (2048, 2048)])
def test_values_are_the_pictures(size: tuple[int, int]) -> None:
    numbers = np.random.default_rng(sum(size)).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    picture = Image.fromarray(numbers)
    pixels = shared_pixels(picture)
    assert pixels is not None
    np.testing.assert_array_equal(pixels[..., :3], numbers)
    pixels[0, 0, :3] = 7, 8, 9
    assert picture.getpixel((0, 0)) == (7, 8, 9)


def test_memory_lives_as_long_as_the_array() -> None:
    pixels = shared_pixels(Image.new("RGB", (300, 300), (1, 2, 3)))
    assert pixels is not None
    gc.collect()
    others = [Image.new("RGB", (300, 300), (9, 9, 9)) for _ in range(20)]
    assert (pixels[..., :3] == (1, 2, 3)).all()
    assert len(others) == 20


@pytest.mark.parametrize("size", [(0, 4), (4, 0), (2048, 2049)])
def test_no_block_no_array(size: tuple[int, int]) -> None:
    assert shared_pixels(Image.new("RGB", size)) is None


def test_overlays_of_one_block_and_of_several_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    photo, heat = Image.fromarray(rng.integers(0, 256, (90, 70, 3), dtype=np.uint8)), rng.random((90, 70), dtype=np.float32)
    before = photo.tobytes()
    for style in ({}, {"blend": "value"}, {"contours": (0.5,)}, {"transparent": True}):
        pictures = [overlay(photo, heat, **style)]
        with monkeypatch.context() as patch:
            patch.setattr("visattn.core.drawing.overlays.shared_pixels", lambda _: None)
            pictures.append(overlay(photo, heat, **style))
        assert pictures[0] == pictures[1]
        assert photo.tobytes() == before
