"""Places, sizes and limits in learning curves and comparisons."""

from __future__ import annotations

from typing import Any

import pytest

from visattn.core.drawing.plots import learning_curves
from visattn.core.drawing.plots.figures import BLUE, VERMILION
from visattn.core.provenance import Provenance

FACTS = Provenance(model="vit", method="training")


def run(**keys: float) -> list[dict[str, Any]]:
    return [{"step": step, **keys} for step in range(1, 4)]


def names(axes: Any) -> dict[str, str]:
    return {text.get_text(): text.get_va() for text in axes.texts}


@pytest.mark.parametrize(
    ("keys", "heights"),
    [
        ({"loss": 1.0}, [2.4]),
        ({"accuracy": 0.5}, [2.0]),
        ({"lr": 0.1}, [1.1]),
        ({"loss": 1.0, "accuracy": 0.5, "lr": 0.1}, [2.4, 2.0, 1.1]),
    ],
)
def test_heights_of_panels_follow_what_they_show(drawn: list[Any], keys: dict[str, float], heights: list[float]) -> None:
    learning_curves.curves(run(**keys), "title", FACTS)
    (figure,) = drawn
    assert figure.get_size_inches() == pytest.approx([7.2, 0.9 + sum(heights)])
    assert figure.axes[0].get_gridspec().get_height_ratios() == heights


def test_panels_share_the_axis_of_steps_which_only_the_last_names(drawn: list[Any]) -> None:
    learning_curves.curves(run(loss=1.0, accuracy=0.5, lr=0.1), "title", FACTS)
    loss, accuracy, rate = drawn[0].axes
    assert [axes.get_xlabel() for axes in (loss, accuracy, rate)] == ["", "", "optimizer step"]
    assert loss.get_shared_x_axes().joined(loss, rate)
    assert loss.get_shared_x_axes().joined(loss, accuracy)
    assert {axes.get_xlim()[0] for axes in (loss, accuracy, rate)} == {0}
    assert rate.xaxis.get_major_formatter()(2000, 0) == "2k"
    assert rate.xaxis.get_major_locator()._integer is True


def test_loss_axis_has_room_for_names(drawn: list[Any]) -> None:
    learning_curves.curves(run(loss=1.0), "title", FACTS)
    assert drawn[0].axes[0].margins() == (0.05, 0.15)


def test_panels_have_faint_lines_behind_the_curves_and_no_frame_above(drawn: list[Any]) -> None:
    learning_curves.curves(run(loss=1.0, lr=0.1), "title", FACTS)
    for axes in drawn[0].axes:
        assert {name for name, spine in axes.spines.items() if spine.get_visible()} == {"left", "bottom"}
        assert axes.get_axisbelow() is True
        lines = axes.yaxis.get_gridlines()
        assert {(line.get_visible(), line.get_color(), line.get_linewidth()) for line in lines} == {(True, "#dddddd", 0.6)}
        assert not any(line.get_visible() for line in axes.xaxis.get_gridlines())


@pytest.mark.parametrize(("rows", "width"), [(40, 1), (41, 2), (80, 2), (81, 3)])
def test_curves_of_more_than_40_rows_are_averaged(drawn: list[Any], rows: int, width: int) -> None:
    learning_curves.curves([{"step": step, "loss": float(step)} for step in range(rows)], "title", FACTS)
    (axes,) = drawn[0].axes
    assert len(axes.lines) == (2 if width > 1 else 1)
    *faint, strong = axes.lines
    assert [(line.get_linewidth(), line.get_alpha()) for line in faint] == [(0.6, 0.3)] * len(faint)
    assert (strong.get_linewidth(), strong.get_alpha(), strong.get_color()) == (1.5, None, BLUE)
    assert list(names(axes)) == [f"training\n(mean of {width} rows)" if width > 1 else "training"]
    first, last = (width - 1) / 2, (rows - 1 + (rows - 1) // width * width) / 2
    assert (strong.get_xdata()[0], strong.get_xdata()[-1]) == (first, last)
    assert strong.get_ydata().tolist() == strong.get_xdata().tolist()


@pytest.mark.parametrize(
    ("keys", "sides"),
    [
        ({"loss": 1.0}, {"training": "bottom"}),
        ({"test_loss": 1.0}, {"test": "bottom"}),
        ({"loss": 2.0, "test_loss": 1.0}, {"training": "bottom", "test": "top"}),
        ({"loss": 1.0, "test_loss": 1.0}, {"training": "bottom", "test": "top"}),
        ({"loss": 1.0, "test_loss": 2.0}, {"training": "top", "test": "bottom"}),
    ],
)
def test_the_curve_that_ends_higher_has_its_name_above(drawn: list[Any], keys: dict[str, float], sides: dict[str, str]) -> None:
    learning_curves.curves(run(**keys), "title", FACTS)
    texts = drawn[0].axes[0].texts
    assert {text.get_text(): text.get_va() for text in texts} == sides
    assert {text.get_va(): text.xyann for text in texts} == {side: (6, 1 if side == "bottom" else -1) for side in sides.values()}
    assert {text.get_fontsize() for text in texts} == {9}
    assert {text.get_text(): text.get_color() for text in texts} == {
        name: BLUE if name == "training" else VERMILION for name in sides
    }


def test_the_last_losses_decide_which_name_is_above(drawn: list[Any]) -> None:
    rows = [{"step": step, "loss": loss, "test_loss": test} for step, loss, test in ((1, 9.0, 2.0), (2, 5.0, 2.0), (3, 1.0, 2.0))]
    learning_curves.curves(rows, "title", FACTS)
    assert names(drawn[0].axes[0]) == {"training": "top", "test": "bottom"}


def test_tested_values_have_dots_and_rates_have_none(drawn: list[Any]) -> None:
    learning_curves.curves(run(test_loss=1.0, accuracy=0.125, lr=0.1), "title", FACTS)
    loss, accuracy, rate = (axes.lines[0] for axes in drawn[0].axes)
    for line in (loss, accuracy):
        assert (line.get_marker(), line.get_markersize(), line.get_linewidth(), line.get_color()) == ("o", 3, 1.5, VERMILION)
    assert (rate.get_marker(), rate.get_linewidth()) == ("None", 1.5)
    assert accuracy.get_ydata().tolist() == [12.5] * 3
    assert names(drawn[0].axes[1]) == {"12.50 %": "bottom"}
    assert drawn[0].axes[2].get_ylim()[0] == 0


def test_validation_takes_the_place_of_the_test(drawn: list[Any]) -> None:
    rows: list[dict[str, Any]] = [
        {"step": 1, "test_loss": 9.0, "accuracy": 0.9, "loss": 3.0, "lr": 0.1},
        {"step": 2, "validation_loss": 2.0, "validation_accuracy": 0.25, "test_loss": 9.0, "accuracy": 0.9},
    ]
    learning_curves.curves(rows, "title", FACTS)
    loss, accuracy, _ = drawn[0].axes
    assert {text.get_text(): text.xy for text in loss.texts} == {"training": (1, 3), "validation": (2, 2)}
    assert accuracy.lines[0].get_ydata() == [25]
    assert accuracy.get_ylabel() == "validation accuracy (%)"


def test_without_a_validation_accuracy_the_test_is_shown(drawn: list[Any]) -> None:
    learning_curves.curves([{"step": 1, "validation_loss": 2.0, "test_loss": 3.0}], "title", FACTS)
    assert {text.get_text(): text.xy for text in drawn[0].axes[0].texts} == {"test": (1, 3)}


@pytest.mark.parametrize(
    ("epochs", "said"),
    [
        ((None, 1), "2 steps, 1 epoch"),
        ((0.25, 0.5), "2 steps, 0.5 epochs"),
        ((3, None), "2 steps, 3 epochs"),
        ((1.23456, 0), "2 steps, 1.23 epochs"),
        ((None, None), "2 steps"),
        ((0, 0), "2 steps, 0 epochs"),
    ],
)
def test_title_tells_the_most_steps_and_epochs(drawn: list[Any], epochs: tuple[Any, Any], said: str) -> None:
    rows = [{"step": step, "epoch": epoch, "loss": 1.0} for step, epoch in zip((2, 1), epochs, strict=True)]
    learning_curves.curves(rows, "title", FACTS)
    assert drawn[0].get_suptitle() == f"title\n{said}"


def row(name: str, difference: float | None, verdict: str, *, seeds: int = 3, spread: float | None = 1.0) -> dict[str, Any]:
    def around(value: float | None, side: int) -> float | None:
        return None if value is None or spread is None else value + side * spread

    return {
        "attention": name,
        "seeds": seeds,
        "accuracy": 90.0,
        "accuracy_low": around(90, -1),
        "accuracy_high": around(90, 2),
        "difference": difference,
        "difference_low": around(difference, -1),
        "difference_high": around(difference, 2),
        "verdict": verdict,
    }


ROWS = [row("plain", None, "plain"), row("se", 1.0, "gain"), row("bam", -2.0, "loss"), row("eca", 0.0, "even")]
RUNS = [
    {"attention": name, "seed": seed, "accuracy": accuracy}
    for name, seed, accuracy in (("plain", 0, 0.5), ("plain", 1, 0.25), ("se", 0, 0.75), ("se", 2, 0.125), ("se", 1, 0.5))
]


@pytest.mark.parametrize("count", [2, 4])
def test_height_of_a_comparison_grows_with_its_rows(drawn: list[Any], count: int) -> None:
    learning_curves.comparison(ROWS[:count], RUNS, "title", FACTS)
    left, right = drawn[0].axes
    assert drawn[0].get_size_inches() == pytest.approx([9.6, 1.5 + 0.42 * count])
    assert left.get_ylim() == right.get_ylim() == (count - 0.5, -0.5)
    assert left.get_shared_y_axes().joined(left, right)
    assert left.get_yticks().tolist() == list(range(count))


def test_runs_are_faint_dots_below_the_mean_and_only_those_with_a_plain_pair_have_a_difference(drawn: list[Any]) -> None:
    learning_curves.comparison(ROWS[:2], RUNS, "title", FACTS)
    left, right = drawn[0].axes
    plain, _, own, mean = left.lines
    assert (list(plain.get_xdata()), list(plain.get_ydata())) == ([50, 25], [0.2, 0.2])
    assert (list(own.get_xdata()), list(own.get_ydata())) == ([75, 12.5, 50], [1.2] * 3)
    assert (own.get_markersize(), own.get_alpha(), own.get_markeredgewidth(), own.get_color()) == (3, 0.45, 0, BLUE)
    assert (mean.get_xdata(), mean.get_ydata(), mean.get_markersize()) == ([90], [1], 6)
    gaps, difference, zero = right.lines
    assert (list(gaps.get_xdata()), list(gaps.get_ydata())) == ([25, 25], [1.2, 1.2])
    assert (difference.get_xdata(), difference.get_ydata()) == ([1], [1])
    assert (list(zero.get_xdata()), zero.get_linewidth(), zero.get_color()) == ([0, 0], 0.8, "black")


def test_intervals_are_lines_at_the_height_of_the_mean(drawn: list[Any]) -> None:
    learning_curves.comparison(ROWS[:2], RUNS, "title", FACTS)
    left, right = drawn[0].axes
    spans = [lines.get_segments()[0].tolist() for axes in (left, right) for lines in axes.collections]
    assert spans == [[[89, 0], [92, 0]], [[89, 1], [92, 1]], [[0, 1], [3, 1]]]
    assert {width for axes in (left, right) for lines in axes.collections for width in lines.get_linewidth()} == {2}


def test_differences_are_written_right_of_the_axes(drawn: list[Any]) -> None:
    learning_curves.comparison(ROWS, RUNS, "title", FACTS)
    _, right = drawn[0].axes
    assert [(text.get_text(), text.get_position()) for text in right.texts] == [
        ("+1.00  gain", (1.02, 1)),
        ("-2.00  loss", (1.02, 2)),
        ("+0.00  even", (1.02, 3)),
    ]
    assert {(text.get_fontsize(), text.get_va()) for text in right.texts} == {(9, "center")}
    assert right.texts[0].get_transform() == right.get_yaxis_transform()


def test_axes_of_a_comparison_have_no_ticks_beside_names(drawn: list[Any]) -> None:
    learning_curves.comparison(ROWS, RUNS, "title", FACTS)
    left, right = drawn[0].axes
    assert {tick.tick1line.get_markersize() for axes in (left, right) for tick in axes.yaxis.majorTicks} == {0}
    assert {axes.xaxis.get_major_locator()._nbins for axes in (left, right)} == {5}
    assert {name for name, spine in left.spines.items() if spine.get_visible()} == {"left", "bottom"}
    assert {name for name, spine in right.spines.items() if spine.get_visible()} == {"bottom"}
    assert all(line.get_visible() for axes in (left, right) for line in axes.xaxis.get_gridlines())
    assert not any(line.get_visible() for axes in (left, right) for line in axes.yaxis.get_gridlines())
    labels = [right.xaxis.label, *left.get_yticklabels()]
    assert not any(label.get_parse_math() for label in labels)


@pytest.mark.parametrize(("seeds", "said"), [(1, "one seed each"), (2, "2 seeds each"), (3, "3 seeds each")])
def test_title_of_a_comparison_counts_seeds(drawn: list[Any], seeds: int, said: str) -> None:
    learning_curves.comparison([row("plain", None, "plain", seeds=seeds), row("se", 1.0, "gain", seeds=9)], RUNS, "t", FACTS)
    assert drawn[0].get_suptitle().startswith(f"t\n{said}")


def test_without_an_interval_only_the_mean_is_drawn(drawn: list[Any]) -> None:
    learning_curves.comparison([row("plain", None, "plain", spread=None), row("se", 1.0, "gain")], RUNS, "title", FACTS)
    left, _ = drawn[0].axes
    assert [list(line.get_ydata()) for line in left.lines] == [[0], [1.2] * 3, [1]]
    assert len(left.collections) == 1
    assert left.lines[0].get_color() == "black"
