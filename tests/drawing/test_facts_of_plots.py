"""Places, sizes and limits in plots of head statistics and confusion matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex

from visattn.core.drawing.plots import confusion as confusions, head_statistics
from visattn.core.drawing.plots.figures import BLUE
from visattn.core.provenance import Provenance

FACTS = Provenance(model="vit", weights="random, seed 0", random=True)


def layer(name: str, **values: float | None) -> dict[str, Any]:
    return {"layer": name, "keys": 50.0, "distance_if_uniform_px": 100.0, "distance_nearest_px": 16.0} | values


def head(name: str, value: float | None, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    ends = {"_low": low, "_high": high}
    return {"layer": name} | {
        f"{key}{end}": ends.get(end, value) for key in ("distance_px", "effective_keys") for end in ("", *ends)
    }


def masses(drawn: list[Any], *rows: dict[str, float | None]) -> dict[str, list[float]]:
    """Draw the shares of layers; return the heights of the bars by their names."""
    head_statistics.mass([layer(f"l{i}", **row) for i, row in enumerate(rows)], 7, FACTS)
    return {bars.get_label(): [bar.get_height() for bar in bars] for bars in drawn[-1].axes[0].containers}


@pytest.mark.parametrize(("layers", "width"), [(1, 6.4), (8, 6.4), (10, 7.5), (32, 19.6), (33, 20), (50, 20)])
def test_width_of_a_figure_grows_with_its_layers_between_bounds(drawn: list[Any], layers: int, width: float) -> None:
    head_statistics.entropy([head("l0", 5)], [layer(f"l{i}") for i in range(layers)], 7, FACTS)
    assert drawn[0].get_size_inches() == pytest.approx([width, 4.8])
    assert drawn[0].dpi == 150
    assert drawn[0].axes[0].get_xlim() == pytest.approx((-0.6, layers - 0.4))


def test_title_begins_at_the_left_and_counts_photos(drawn: list[Any]) -> None:
    for photos in (1, 0, 2):
        head_statistics.entropy([head("a", 5)], [layer("a")], photos, FACTS)
    said = [figure.get_suptitle().rpartition(", ")[2] for figure in drawn]
    assert said == ["1 photo", "0 photos", "2 photos"]
    title = drawn[0]._suptitle
    assert (title.get_position()[0], title.get_ha(), title.get_fontsize(), title.get_parse_math()) == (0.01, "left", 10, False)
    assert drawn[0].get_layout_engine() is not None


def test_axis_of_layers_names_the_first_and_the_last(drawn: list[Any]) -> None:
    rows = [layer("first"), layer("middle"), layer("last")]
    head_statistics.entropy([head("first", 5)], rows, 7, FACTS)
    head_statistics.entropy([head("first", 5)], rows[:2], 7, FACTS)
    head_statistics.entropy([head("first", 5)], rows[:1], 7, FACTS)
    found = [figure.axes[0].xaxis for figure in drawn]
    assert [axis.label.get_text() for axis in found] == [
        "layer, from 0 (first) to 2 (last)",
        "layer, from 0 (first) to 1 (middle)",
        "first",
    ]
    assert not any(axis.label.get_parse_math() for axis in found)
    locator = found[0].get_major_locator()
    assert (locator._nbins, locator._integer) == (30, True)


def test_axes_have_faint_lines_behind_the_dots_and_no_frame_above(drawn: list[Any]) -> None:
    head_statistics.entropy([head("a", 5)], [layer("a")], 7, FACTS)
    (axes,) = drawn[0].axes
    assert {name: spine.get_visible() for name, spine in axes.spines.items()} == {
        "left": True,
        "right": False,
        "top": False,
        "bottom": True,
    }
    assert axes.get_axisbelow() is True
    lines = axes.yaxis.get_gridlines()
    assert {(line.get_visible(), line.get_color(), line.get_linewidth()) for line in lines} == {(True, "#dddddd", 0.6)}
    assert not any(line.get_visible() for line in axes.xaxis.get_gridlines())


def test_axis_of_effective_keys_ends_a_little_above_the_most_keys(drawn: list[Any]) -> None:
    head_statistics.entropy([head("a", 5)], [layer("a", keys=20.0), layer("b", keys=50.0), layer("c", keys=30.0)], 7, FACTS)
    (axes,) = drawn[0].axes
    assert axes.get_ylim() == pytest.approx((0.9, 80))
    assert axes.yaxis.get_major_formatter()(20, 0) == "20"


def test_axis_of_distances_begins_at_0(drawn: list[Any]) -> None:
    assert head_statistics.distance([head("a", 5), head("b", None)], [layer("a"), layer("b")], 7, FACTS) == b""
    assert drawn[0].axes[0].get_ylim()[0] == 0


def test_a_legend_stands_above_the_axes_in_three_columns_without_a_frame(drawn: list[Any]) -> None:
    head_statistics.distance([head("a", 5)], [layer("a")], 7, FACTS)
    axes = drawn[0].axes[0]
    legend = axes.get_legend()
    assert (legend._ncols, legend._fontsize, legend.get_frame_on(), legend._loc) == (3, 8, False, 3)  # 3 is the lower left
    corner = axes.transAxes.inverted().transform(legend.get_bbox_to_anchor().p0)
    assert corner == pytest.approx([-0.02, 1])


def test_dots_of_a_layer_share_its_width_evenly(drawn: list[Any]) -> None:
    heads = [head("a", 7), head("b", 4), head("a", 5), head("b", 3), head("a", 6)]
    head_statistics.entropy(heads, [layer("a"), layer("b"), layer("c")], 7, FACTS)
    dots = drawn[0].axes[0].containers[0][0]
    assert dots.get_xdata() == pytest.approx([-0.24, 0, 0.24, 0.82, 1.18])
    assert dots.get_ydata() == pytest.approx([5, 6, 7, 3, 4])
    assert dots.get_color() == BLUE


def test_an_interval_is_drawn_as_far_as_it_reaches_from_its_mean(drawn: list[Any]) -> None:
    heads = [head("a", 5, 4, 8), head("b", 5, 6, 7), head("c", 5, 3, 4), head("d", 5)]
    head_statistics.entropy(heads, [layer(name) for name in "abcd"], 7, FACTS)
    dots, _, (whiskers,) = drawn[0].axes[0].containers[0]
    assert [segment[:, 1].tolist() for segment in whiskers.get_segments()] == [[4, 8], [5, 7], [3, 5], [5, 5]]
    assert whiskers.get_linewidth() == [1]
    assert drawn[0].axes[0].containers[0].get_label() == "one head, 95 % interval over photos"
    assert dots.get_markersize() == 4


@pytest.mark.parametrize(("heads", "size"), [(199, 4), (200, 2.5), (201, 2.5)])
def test_dots_are_smaller_from_200_on(drawn: list[Any], heads: int, size: float) -> None:
    head_statistics.entropy([head("a", 5)] * heads, [layer("a")], 7, FACTS)
    assert drawn[0].axes[0].containers[0][0].get_markersize() == size
    assert drawn[0].axes[0].containers[0].get_label() == "one head"


def test_a_layer_without_a_level_has_no_line(drawn: list[Any]) -> None:
    rows = [layer("a", distance_nearest_px=None), layer("b", distance_nearest_px=None, distance_if_uniform_px=None)]
    rows += [layer("c", distance_nearest_px=None, distance_if_uniform_px=70)]
    head_statistics.distance([head("a", 5)], rows, 7, FACTS)
    collections = {str(lines.get_label()): lines for lines in drawn[0].axes[0].collections}
    assert "nearest neighboring patch" not in collections
    lines = collections["uniform attention to all patches"]
    assert [path.tolist() for path in lines.get_segments()] == [[[-0.5, 100], [0.5, 100]], [[1.5, 70], [2.5, 70]]]
    assert lines.get_linewidth() == [1.5]


def test_bars_of_shares_stand_on_each_other_and_fill_the_axis(drawn: list[Any]) -> None:
    heights = masses(drawn, {"cls": 0.5, "patches": 0.5}, {"cls": 0.25, "patches": 0.625, "self": None})
    assert heights == {"class token": [0.5, 0.25], "other tokens": [0, 0.125], "other patches": [0.5, 0.625]}
    (axes,) = drawn[0].axes
    first, second, third = axes.containers
    assert [bar.get_y() for bar in first] == [0, 0]
    assert [bar.get_y() for bar in second] == [0.5, 0.25]
    assert [bar.get_y() for bar in third] == [0.5, 0.375]
    assert [bar.get_x() + bar.get_width() / 2 for bar in first] == pytest.approx([0, 1])
    assert {round(bar.get_width(), 6) for bar in first} == {0.86}
    assert to_hex(first[0].get_facecolor()).upper() == "#D55E00"
    assert axes.get_ylim() == (0, 1)
    assert axes.yaxis.get_major_formatter().xmax == 1
    assert not any(line.get_visible() for line in (*axes.yaxis.get_gridlines(), *axes.xaxis.get_gridlines()))


@pytest.mark.parametrize(("share", "shown"), [(2e-4, True), (1e-4, False), (5e-5, False)])
def test_shares_up_to_a_ten_thousandth_are_not_drawn(drawn: list[Any], share: float, shown: bool) -> None:
    heights = masses(drawn, {"cls": 1 - share, "self": share})
    assert ("query's own token" in heights) is shown


def test_sinks_are_taken_from_the_patches(drawn: list[Any]) -> None:
    heights = masses(drawn, {"patches": 1.0, "to_sinks": 0.25})
    assert heights == {"sink patches": [0.25], "other patches": [0.75]}


COUNTS = np.array([[3, 1, 0], [0, 0, 0], [2, 2, 4]])


def test_cells_of_a_confusion_matrix_are_shares_of_the_row(drawn: list[Any]) -> None:
    confusions.confusion(COUNTS, ["a", "bb", "ccccc"], "a title", FACTS)
    axes, bar = drawn[0].axes
    (image,) = axes.images
    assert image.get_array().tolist() == [[0.75, 0.25, 0], [0, 0, 0], [0.25, 0.25, 0.5]]
    assert image.get_clim() == (0, 1)
    side = 3.2 + 3 * 0.34 + 5 * 0.07
    assert drawn[0].get_size_inches() == pytest.approx([side + 0.8, side])
    assert drawn[0].get_suptitle() == "a title\n7 of 12 test images on the diagonal"
    assert bar.get_ylabel() == "share of the class"
    assert image.colorbar is not None
    assert bar._colorbar_info["fraction"] == 0.04


def test_numbers_of_a_confusion_matrix_are_white_on_cells_of_more_than_one_half(drawn: list[Any]) -> None:
    confusions.confusion(COUNTS, ["a", "bb", "ccccc"], "a title", FACTS)
    texts = drawn[0].axes[0].texts
    assert [(text.get_text(), text.get_position(), text.get_color()) for text in texts] == [
        ("3", (0, 0), "white"),
        ("1", (1, 0), "black"),
        ("2", (0, 2), "black"),
        ("2", (1, 2), "black"),
        ("4", (2, 2), "black"),
    ]
    assert {(text.get_fontsize(), text.get_ha(), text.get_va()) for text in texts} == {(7, "center", "center")}


def test_axes_of_a_confusion_matrix_name_each_class_once_without_ticks(drawn: list[Any]) -> None:
    confusions.confusion(COUNTS, ["a", "b" * 24, "c" * 25], "a title", FACTS)
    axes = drawn[0].axes[0]
    short = ["a", "b" * 24, "c" * 23 + "…"]
    assert [label.get_text() for label in axes.get_xticklabels()] == short
    assert [label.get_text() for label in axes.get_yticklabels()] == short
    assert {(label.get_rotation(), label.get_fontsize(), label.get_parse_math()) for label in axes.get_xticklabels()} == {
        (90, 8, False)
    }
    assert {(label.get_rotation(), label.get_fontsize(), label.get_parse_math()) for label in axes.get_yticklabels()} == {
        (0, 8, False)
    }
    assert {tick.tick1line.get_markersize() for tick in (*axes.xaxis.majorTicks, *axes.yaxis.majorTicks)} == {0}
    assert not any(spine.get_visible() for spine in axes.spines.values())
    assert drawn[0].get_size_inches()[1] == pytest.approx(3.2 + 3 * 0.34 + 24 * 0.07)


@pytest.mark.parametrize(("classes", "numbers"), [(20, 20), (21, 0)])
def test_cells_of_up_to_20_classes_have_numbers(drawn: list[Any], classes: int, numbers: int) -> None:
    confusions.confusion(np.eye(classes), ["x"] * classes, "a title", FACTS)
    assert len(drawn[0].axes[0].texts) == numbers


def test_a_class_of_one_image_has_whole_shares(drawn: list[Any]) -> None:
    confusions.confusion([[0, 1], [0, 0]], ["a", "b"], "a title", FACTS)
    assert drawn[0].axes[0].images[0].get_array().tolist() == [[0, 1], [0, 0]]


def test_matrices_of_up_to_60_classes_have_room_for_names() -> None:
    assert confusions.LARGEST == 60
