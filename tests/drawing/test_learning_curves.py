"""Values in learning curves and comparisons, read back from the axes."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import pytest
from PIL import Image

from visattn.core.drawing.plots import figures, learning_curves
from visattn.core.provenance import Provenance
from visattn.errors import OptionError

FACTS = Provenance(model="vit $x_1$", method="training")
LOG: list[dict[str, Any]] = [
    {"step": 10, "epoch": 0.5, "loss": 2.0, "lr": 0.1},
    {"step": 20, "epoch": 1.0, "loss": math.nan, "lr": 0.08},
    {"step": 20, "epoch": 1, "test_loss": 1.8, "accuracy": 0.25},
    {"step": 30, "epoch": 1.5, "loss": 1.0, "lr": None},
    {"step": 40, "epoch": 2, "test_loss": 0.9, "accuracy": 0.75},
]
ROWS: list[dict[str, Any]] = [
    {
        "attention": name,
        "seeds": 2,
        "accuracy": accuracy,
        "accuracy_low": accuracy - 1,
        "accuracy_high": accuracy + 2,
        "difference": difference,
        "difference_low": None if difference is None else difference - 0.5,
        "difference_high": None if difference is None else difference + 0.25,
        "verdict": verdict,
    }
    for name, accuracy, difference, verdict in (
        ("none", 90.0, None, "plain"),
        ("$se_1$", 91.0, 1.0, "gain"),
        ("bam", 88.0, -2.0, "loss"),
        ("eca", 90.1, 0.1, "no difference shown"),
    )
]
RUNS = [
    {"attention": row["attention"], "seed": seed, "accuracy": row["accuracy"] / 100 + shift}
    for row in ROWS
    for seed, shift in ((0, 0.001), (1, -0.001 if row["attention"] != "bam" else -0.003))
]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record all drawn figures."""
    found: list[Any] = []
    save = figures.png

    def keeping(figure: Any, provenance: Provenance) -> bytes:
        found.append(figure)
        return save(figure, provenance)

    monkeypatch.setattr(figures, "png", keeping)
    return found


def lines(axes: Any) -> list[tuple[list[float], list[float]]]:
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]


def names(axes: Any) -> dict[str, tuple[float, float]]:
    return {text.get_text(): text.xy for text in axes.texts}


def test_each_panel_shows_only_its_finite_values(drawn: list[Any]) -> None:
    png = learning_curves.curves(LOG, "title $y_2$", FACTS)
    loss, accuracy, rate = drawn[0].axes
    assert lines(loss) == [([10, 30], [2, 1]), ([20, 40], [1.8, 0.9])]
    assert lines(accuracy) == [([20, 40], [25, 75])]
    assert lines(rate) == [([10, 20], [0.1, 0.08])]
    assert names(loss) == {"training": (30, 1), "test": (40, 0.9)}
    assert names(accuracy) == {"75.00 %": (40, 75)}
    assert [axes.get_ylabel() for axes in (loss, accuracy, rate)] == ["loss (nats)", "test accuracy (%)", "learning rate"]
    assert rate.get_xlabel() == "optimizer step"
    assert rate.get_ylim()[0] == rate.get_xlim()[0] == 0
    assert drawn[0].get_suptitle() == "title $y_2$\n40 steps, 2 epochs"
    with Image.open(io.BytesIO(png)) as picture:
        assert json.loads(picture.info["visattn"])["model"] == "vit $x_1$"


@pytest.mark.parametrize(("train", "test"), [(1.0, 0.99), (0.99, 1.0)])
def test_names_of_curves_that_end_together_do_not_overlap(drawn: list[Any], train: float, test: float) -> None:
    rows = [{"step": 1, "loss": 3.0, "test_loss": 3.0}, {"step": 2, "loss": train, "test_loss": test}]
    learning_curves.curves(rows, "title", FACTS)
    boxes = [text.get_window_extent() for text in drawn[0].axes[0].texts]
    assert len(boxes) == 2
    assert not boxes[0].overlaps(boxes[1])


def test_names_lie_inside_the_picture(drawn: list[Any]) -> None:
    learning_curves.curves(
        [{"step": step, "loss": 1 / step, "test_loss": 2 / step, "accuracy": 1.0} for step in range(1, 500)], "t", FACTS
    )
    for axes in drawn[0].axes:
        for text in axes.texts:
            box = text.get_window_extent()
            assert box.x1 <= drawn[0].bbox.x1
            assert box.y1 <= drawn[0].bbox.y1


def test_many_rows_are_drawn_faintly_behind_their_means(drawn: list[Any]) -> None:
    learning_curves.curves([{"step": step, "loss": float(step % 3)} for step in range(1, 121)], "title", FACTS)
    (axes,) = drawn[0].axes
    (all_, means), (faint, strong) = lines(axes), axes.lines
    assert all_[0] == list(range(1, 121))
    assert means == ([2.0 + 3 * i for i in range(40)], [1.0] * 40)
    assert faint.get_alpha() < 0.5 < strong.get_linewidth()
    assert "training\n(mean of 3 rows)" in names(axes)


@pytest.mark.parametrize(("keys", "panels"), [({"loss"}, 1), ({"accuracy"}, 1), ({"lr"}, 1), ({"test_loss", "lr"}, 2)])
def test_there_is_one_panel_for_each_logged_quantity(drawn: list[Any], keys: set[str], panels: int) -> None:
    learning_curves.curves([{key: value for key, value in row.items() if key in keys | {"step"}} for row in LOG], "title", FACTS)
    assert len(drawn[0].axes) == panels
    assert drawn[0].get_suptitle() == "title\n40 steps"


@pytest.mark.parametrize("log", [[], [{"step": 1, "epoch": 1, "loss": None}]], ids=["empty", "nothing"])
def test_a_log_without_values_is_refused(log: list[dict[str, Any]]) -> None:
    with pytest.raises(
        OptionError, match="learning curves need rows with a step and a loss, an accuracy or a learning rate, got none"
    ):
        learning_curves.curves(log, "title", FACTS)


def test_comparisons_show_each_run_the_mean_and_its_interval(drawn: list[Any]) -> None:
    learning_curves.comparison(ROWS, RUNS, "title", FACTS)
    left, right = drawn[0].axes
    spans = [[path.tolist() for path in item.get_segments()] for axes in (left, right) for item in axes.collections]
    places = enumerate(ROWS)
    expected = [[[[row["accuracy"] - 1, place], [row["accuracy"] + 2, place]]] for place, row in places]
    expected += [
        [[[row["difference"] - 0.5, place], [row["difference"] + 0.25, place]]] for place, row in enumerate(ROWS) if place
    ]
    assert spans == expected
    assert [line[0] for line in lines(left)[1::2]] == [[90], [91], [88], [90.1]]
    assert lines(left)[4][0] == pytest.approx([88.1, 87.7])
    gaps = [line[0] for line in lines(right)[:-1]]
    assert gaps[1::2] == [[1], [-2], [0.1]]
    assert [value for gap in gaps[::2] for value in gap] == pytest.approx([1, 1, -2, -2.2, 0.1, 0.1])  # by seed
    assert lines(right)[-1][0] == [0, 0]
    assert [label.get_text() for label in left.get_yticklabels()] == ["none", "$se_1$", "bam", "eca"]
    assert left.yaxis_inverted()
    assert [text.get_text() for text in right.texts] == ["+1.00  gain", "-2.00  loss", "+0.10  no difference shown"]
    assert drawn[0].get_suptitle() == "title\n2 seeds each: runs (small dots), mean, and 95 % interval of the mean"


def test_verdicts_have_colors_safe_for_color_blindness(drawn: list[Any]) -> None:
    learning_curves.comparison(ROWS, RUNS, "title", FACTS)
    assert [text.get_color() for text in drawn[0].axes[1].texts] == ["#0072B2", "#D55E00", "#767676"]


def test_one_seed_is_drawn_without_an_interval(drawn: list[Any]) -> None:
    bare = [row | {"seeds": 1} | {key: None for key in row if key.endswith(("_low", "_high"))} for row in ROWS[:2]]
    learning_curves.comparison(bare, RUNS[:4:2], "title", FACTS)
    left, right = drawn[0].axes
    assert not left.collections
    assert [line[0] for line in lines(left)] == [[90], [91]]
    assert lines(right)[0][0] == [1]
    assert "one seed each, so no intervals" in drawn[0].get_suptitle()
