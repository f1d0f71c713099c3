"""Values in plots of head statistics, read back from the axes."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from visattn.core.drawing.plots import head_statistics
from visattn.core.provenance import Provenance

LAYERS: list[dict[str, Any]] = [
    {
        "layer": name,
        "heads": 3,
        "keys": keys,
        "distance_if_uniform_px": even,
        "distance_nearest_px": 16.0,
        "cls": 0.1,
        "registers": 0.2,
        "self": 0.05,
        "patches": 0.6,
        "padding": 0.0,
        "to_sinks": sinks,
    }
    for name, keys, even, sinks in (("blocks.0.attn", 50.0, 100.0, 0.25), ("blocks.1.attn", 20.0, 40.0, 0.0))
]
HEADS: list[dict[str, Any]] = [
    {
        "layer": layer["layer"],
        "head": head,
        **{
            f"{name}{end}": None if value is None else value + shift
            for name, value in (
                ("distance_px", None if place and head == 2 else 10.0 * (3 - head)),
                ("effective_keys", 5.0 + head),
            )
            for end, shift in (("", 0), ("_low", -1), ("_high", 2))
        },
    }
    for place, layer in enumerate(LAYERS)
    for head in range(3)
]
FACTS = Provenance(model="vit $x_1$", weights="random, seed 0", random=True)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the axes of all drawn figures."""
    found: list[Any] = []
    save = head_statistics._png

    def keeping(figure: Any, provenance: Provenance) -> bytes:
        found.append(figure.axes[0])
        return save(figure, provenance)

    monkeypatch.setattr(head_statistics, "_png", keeping)
    return found


def lines(axes: Any) -> dict[str, list[Any]]:
    return {str(lines.get_label()): [path.tolist() for path in lines.get_segments()] for lines in axes.collections}


def test_distances_are_dots_sorted_in_their_layer_with_whiskers_and_baselines(drawn: list[Any]) -> None:
    assert head_statistics.distance(HEADS, LAYERS, 7, FACTS) is not None
    (axes,) = drawn
    ((dots, _, (whiskers,)),) = axes.containers
    assert dots.get_ydata().tolist() == [10, 20, 30, 20, 30]  # layer 1 has two heads with a distance
    assert [round(x) for x in dots.get_xdata()] == [0, 0, 0, 1, 1]
    assert (np.diff(dots.get_xdata()) > 0).all()
    assert [segment[:, 1].tolist() for segment in whiskers.get_segments()] == [[y - 1, y + 2] for y in (10, 20, 30, 20, 30)]
    assert lines(axes)["uniform attention to all patches"] == [[[-0.5, 100], [0.5, 100]], [[0.5, 40], [1.5, 40]]]
    assert lines(axes)["nearest neighboring patch"] == [[[-0.5, 16], [0.5, 16]], [[0.5, 16], [1.5, 16]]]
    assert "pixels" in axes.get_ylabel()
    assert axes.get_ylim()[0] == 0
    assert axes.figure.get_suptitle() == "Attention distance of each head\nvit $x_1$ (random, seed 0), 7 photos"


def test_no_distance_figure_without_distances() -> None:
    none = [row | {"distance_px": None} for row in HEADS]
    assert head_statistics.distance(none, LAYERS, 7, FACTS) is None


def test_effective_keys_lie_below_the_number_of_keys_on_a_log_axis(drawn: list[Any]) -> None:
    head_statistics.entropy(HEADS, LAYERS, 7, FACTS)
    (axes,) = drawn
    assert axes.containers[0][0].get_ydata().tolist() == [5, 6, 7] * 2
    assert lines(axes)["number of keys per query"] == [[[-0.5, 50], [0.5, 50]], [[0.5, 20], [1.5, 20]]]
    assert axes.get_yscale() == "log"
    assert axes.get_ylim()[1] > 50


def test_shares_are_stacked_to_one_with_sinks_taken_from_the_patches(drawn: list[Any]) -> None:
    head_statistics.mass(LAYERS, 7, FACTS)
    (axes,) = drawn
    bars = {bar.get_label(): [patch.get_height() for patch in bar] for bar in axes.containers}
    assert {name: np.round(heights, 9).tolist() for name, heights in bars.items()} == {
        "class token": [0.1, 0.1],
        "registers": [0.2, 0.2],
        "other tokens": [0.05, 0.05],
        "query's own token": [0.05, 0.05],
        "sink patches": [0.25, 0],
        "other patches": [0.35, 0.6],
    }
    tops = [[patch.get_y() + patch.get_height() for patch in bar] for bar in axes.containers]
    assert tops[-1] == pytest.approx([1, 1])


def test_figure_of_one_image_has_colors_and_no_intervals(drawn: list[Any]) -> None:
    bare = [row | {name: None for name in row if name.endswith(("_low", "_high"))} for row in HEADS]
    png = head_statistics.entropy(bare, LAYERS, 7, FACTS)
    assert drawn[0].get_legend_handles_labels()[1] == ["number of keys per query", "one head"]
    with Image.open(io.BytesIO(png)) as picture:
        colors = {color for _, color in picture.convert("RGB").getcolors(1 << 24) or []}
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (255, 255, 255)} <= colors


def test_figure_of_one_layer_names_the_layer(drawn: list[Any]) -> None:
    head_statistics.mass(LAYERS[:1], 7, FACTS)
    assert drawn[0].get_xlabel() == "blocks.0.attn"
