"""Pixels of a transparent layer, found from what was drawn on black and on white."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from visattn.core.drawing.layers import layer_between

Color = tuple[int, int, int]


def one(color: Color) -> Image.Image:
    return Image.new("RGB", (1, 1), color)


def found(black: Color, white: Color, plain: Color = (0, 0, 0), opacity: float | None = None) -> tuple[int, ...]:
    return tuple(np.asarray(layer_between(one(black), one(white), one(plain), opacity))[0, 0].tolist())


@pytest.mark.parametrize(
    ("black", "white", "layer"),
    [
        ((0, 0, 0), (0, 0, 0), (0, 0, 0, 255)),
        ((7, 8, 9), (7, 8, 9), (7, 8, 9, 255)),
        ((0, 0, 0), (255, 255, 255), (0, 0, 0, 0)),
        ((128, 0, 0), (255, 127, 127), (255, 0, 0, 128)),
        ((64, 32, 0), (191, 159, 127), (128, 64, 0, 128)),
        ((129, 0, 0), (255, 127, 127), (255, 0, 0, 128)),
        ((20, 9, 9), (15, 5, 5), (20, 9, 9, 255)),
        ((10, 0, 0), (255, 254, 255), (0, 0, 0, 0)),
        ((3, 0, 0), (255, 254, 254), (255, 0, 0, 1)),
    ],
)
def test_what_the_ground_adds_is_let_through_and_the_rest_is_the_color(
    black: Color, white: Color, layer: tuple[int, ...]
) -> None:
    assert found(black, white, (90, 90, 90) if layer[3] == 255 and any(black) else (200, 200, 200)) == layer


def test_colors_that_were_drawn_without_a_mark_are_exact() -> None:
    plain = (201, 101, 50)  # at half the opacity 100.9, 50.7 and 25.1
    assert found((101, 51, 25), (228, 178, 152), plain) == (*plain, 128)
    assert found((100, 51, 25), (227, 178, 152), plain) == (*plain, 128)
    assert found((102, 51, 25), (229, 178, 152), plain) == (203, 102, 50, 128), "a level more is a mark"
    assert found((101, 51, 27), (228, 178, 154), plain) == (201, 102, 54, 128), "also in one channel"


@pytest.mark.parametrize(("through", "alpha"), [(127, 128), (126, 128), (128, 128), (125, 130), (129, 126)])
def test_an_opacity_that_all_pixels_have_is_met_to_a_level(through: int, alpha: int) -> None:
    assert found((0, 0, 0), (through, through, through), opacity=0.5)[3] == alpha
    assert found((0, 0, 0), (through, through, through))[3] == 255 - through
