from __future__ import annotations

import itertools

import numpy as np
import pytest

from visattn.core.drawing.colormaps import DIVERGING, NAMES, NOT_MONOTONE, SEQUENTIAL, table
from visattn.errors import OptionError

every = pytest.mark.parametrize("name", NAMES)


def luminance(color: tuple[int, int, int]) -> float:
    """Compute the Rec. 709 luminance of an sRGB color, from 0 to 1."""
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def steps(name: str) -> list[float]:
    lights = [luminance((int(r), int(g), int(b))) for r, g, b in table(name)]
    return [after - before for before, after in itertools.pairwise(lights)]


@every
def test_table_has_256_rgb_rows(name: str) -> None:
    assert table(name).shape == (256, 3)
    assert table(name).dtype == np.uint8


@every
def test_table_cannot_be_changed_by_its_users(name: str) -> None:
    with pytest.raises(ValueError, match="read-only"):
        table(name)[0, 0] = 1


@pytest.mark.parametrize("name", ["inferno", "magma", "plasma", "viridis", "cividis", "bone", "gray"])
def test_luminance_never_falls(name: str) -> None:
    assert name in SEQUENTIAL
    assert name not in NOT_MONOTONE
    assert min(steps(name)) > -0.0004  # the published viridis falls by 0.0003 in two steps, because of rounding to 8 bits


@pytest.mark.parametrize("name", NOT_MONOTONE)
def test_colormap_declared_not_monotone_is_not_monotone(name: str) -> None:
    falling = [step for step in steps(name) if step < -0.001]
    assert len(falling) > 64


@pytest.mark.parametrize("name", ["inferno", "magma", "plasma", "gray"])
def test_every_value_has_a_color_of_its_own(name: str) -> None:
    assert len({tuple(row) for row in table(name).tolist()}) == 256


# rows 0, 128 and 255 of the tables as their authors publish them (Smith, van der Walt; cividis: Nunez et al.), times 255
PUBLISHED = {
    "inferno": ((0.001462, 0.000466, 0.013866), (0.735683, 0.215906, 0.330245), (0.988362, 0.998364, 0.644924)),
    "magma": ((0.001462, 0.000466, 0.013866), (0.716387, 0.214982, 0.475290), (0.987053, 0.991438, 0.749504)),
    "plasma": ((0.050383, 0.029803, 0.527975), (0.798216, 0.280197, 0.469538), (0.940015, 0.975158, 0.131326)),
    "viridis": ((0.267004, 0.004874, 0.329415), (0.127568, 0.566949, 0.550556), (0.993248, 0.906157, 0.143936)),
    "cividis": ((0.0, 0.135112, 0.304751), (0.488697, 0.485318, 0.471008), (0.995737, 0.909344, 0.217772)),
    "gray": ((0, 0, 0), (128 / 255, 128 / 255, 128 / 255), (1, 1, 1)),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize(("place", "row"), [(0, 0), (1, 128), (2, 255)], ids=["lowest", "middle", "highest"])
def test_colors_are_the_published_ones(name: str, place: int, row: int) -> None:
    assert table(name)[row].tolist() == pytest.approx([255 * channel for channel in PUBLISHED[name][place]], abs=1)


@pytest.mark.parametrize("name", DIVERGING)
@pytest.mark.parametrize("row", [127, 128])
def test_center_of_a_diverging_map_is_neutral(name: str, row: int) -> None:
    center = table(name)[row].tolist()
    assert max(center) - min(center) <= 1
    assert min(center) > 240


@pytest.mark.parametrize("name", DIVERGING)
def test_diverging_map_darkens_from_its_center_to_both_ends(name: str) -> None:
    assert min(steps(name)[:126]) > 0
    assert max(steps(name)[129:]) < 0


def test_diverging_map_is_blue_below_and_red_above() -> None:
    low, high = table("blue-white-red")[40], table("blue-white-red")[215]
    assert low[2] > low[0] + 50
    assert high[0] > high[2] + 50


def test_unknown_map_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(OptionError, match="unknown colormap 'infero'; did you mean 'inferno'"):
        table("infero")


def test_the_diverging_map_runs_between_the_ends_of_colorbrewers_blue_and_red() -> None:
    colors = table("blue-white-red")
    assert colors[0].tolist() == [5, 48, 97]
    assert colors[255].tolist() == [103, 0, 31]
    assert colors[[127, 128]].tolist() == [[246, 246, 247], [247, 246, 246]]
    assert colors[[64, 191]].tolist() == [[68, 147, 195], [214, 97, 78]]
