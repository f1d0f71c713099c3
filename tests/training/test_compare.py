"""Comparisons: intervals are Student's, verdicts follow from them, and a comparison is balanced, resumed and not mixed with another."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from PIL import Image
from torch import nn

from visattn import models
from visattn.errors import CheckpointError, OptionError, OutputError
from visattn.training.config import Config
from visattn.training.report.comparison import Outcome, compare, rows, to_page
from visattn.training.report.costs import Cost, cost
from visattn.training.report.paired import Estimate, estimate, paired, t_quantile, verdict

SHAPE = (3, 32, 32)
CONFIG = Config(data="scenes", model="visattn_resnet20", epochs=2.0)
REACHED = {"none": 0.80, "se": 0.82, "cbam": 0.79, "simam": 0.80, "wide": 0.805}
OF_SEED = [0.000, 0.011, -0.007, 0.004]  # what a seed does to all
OF_RUN = {"none": [0.0, 0.001, 0.0, 0.002], "se": [0.001, 0.0, 0.002, 0.0], "cbam": [0.0, 0.02, -0.02, 0.01]}


# numbers


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99, 0.999])
@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 7, 9, 10, 29, 30, 100, 1001])
def test_quantiles_are_students(degrees: int, confidence: float) -> None:
    assert t_quantile(degrees, confidence) == pytest.approx(scipy.stats.t.ppf((1 + confidence) / 2, degrees), rel=1e-9)


@pytest.mark.parametrize(("degrees", "confidence"), [(0, 0.95), (3, 0.0), (3, 1.0)])
def test_quantiles_out_of_range_are_refused(degrees: int, confidence: float) -> None:
    with pytest.raises(OptionError, match="t needs 1 or more degrees of freedom and a probability between 0 and 1, got"):
        t_quantile(degrees, confidence)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_paired_intervals_are_those_of_the_paired_t_test(count: int) -> None:
    random = np.random.default_rng(count)
    plain, other = random.normal(size=(2, count))
    expected = scipy.stats.ttest_rel(other, plain).confidence_interval(0.95)
    order = [int(seed) for seed in random.permutation(count)]  # pairs are by seed, not by order
    found = paired(dict(enumerate(map(float, plain))), {seed: float(other[seed]) for seed in order})
    assert found == pytest.approx((float(np.mean(other - plain)), expected.low, expected.high), abs=1e-12)


def test_pairs_are_of_seeds_that_both_have() -> None:
    assert paired({0: 1.0, 1: 5.0, 2: 2.0}, {2: 4.0, 0: 2.0, 7: 9.0}).mean == 1.5


def test_one_value_has_no_interval() -> None:
    assert estimate([3.5]) == (3.5, None, None)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_a_mean_of_nothing_or_of_no_number_is_refused(values: list[float]) -> None:
    with pytest.raises(OptionError, match="a mean must be of one or more finite numbers, got"):
        estimate(values)


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        ((0.5, 0.1, 0.9), "gain"),
        ((-0.5, -0.9, -0.1), "loss"),
        ((0.5, -0.1, 1.1), "no difference shown"),
        ((0.5, 0.0, 1.0), "no difference shown"),
        ((-0.5, -1.0, 0.0), "no difference shown"),
        ((9.0, None, None), "one seed, no interval"),
    ],
)
def test_the_verdict_follows_from_the_interval_alone(interval: tuple[float, float | None, float | None], said: str) -> None:
    assert verdict(Estimate(*interval)) == said


def outcome(accuracy: float, speed: float = 100.0, parameters: int = 1) -> Outcome:
    return Outcome(accuracy, 0.5, speed, parameters, 10)


def test_rows_are_in_percent_and_points_over_the_seeds_that_all_have() -> None:
    outcomes = {
        "none": {0: outcome(0.80, 100), 1: outcome(0.82, 400), 2: outcome(0.1)},
        "se": {1: outcome(0.85, 200), 0: outcome(0.81, 50)},
    }
    plain, se = rows(outcomes, {"none": Cost(7, 70), "se": Cost(9, 90)})
    half = 12.706204736174707 * math.sqrt(2) / math.sqrt(2)  # t of 1 degree, s of (1, 3), by root n
    assert (plain["attention"], plain["seeds"], plain["accuracy"], plain["speed"]) == ("none", 2, pytest.approx(81), 1)
    assert (plain["difference"], plain["difference_low"], plain["verdict"]) == (None, None, "plain")
    assert (se["parameters"], se["macs"], se["images_per_second"]) == (9, 90, 125)
    assert se["speed"] == pytest.approx(0.5)  # of each seed
    assert (se["difference"], se["difference_low"], se["difference_high"]) == pytest.approx((2, 2 - half, 2 + half))
    assert (se["accuracy_high"] - se["accuracy"]) == pytest.approx(12.706204736174707 * math.sqrt(8) / math.sqrt(2))
    assert se["verdict"] == "no difference shown"


def test_runs_too_short_to_be_timed_have_no_speed() -> None:
    table = rows({"none": {0: outcome(0.5, 10)}, "se": {0: outcome(0.6, 0)}}, {"none": Cost(1, 1), "se": Cost(1, 1)})
    assert [(row["images_per_second"], row["speed"]) for row in table] == [(10, 1), (None, None)]
    assert "| se | 1 | 0.00 |  | 60.00 |" in to_page(table, [], "title", "a = 1")


def test_rows_without_a_seed_of_all_are_refused() -> None:
    with pytest.raises(OptionError, match="a comparison needs a seed that all variants have finished, got none"):
        rows({"none": {0: outcome(0.5)}, "se": {1: outcome(0.5)}}, {"none": Cost(1, 1), "se": Cost(1, 1)})


# runs


@cache
def network(attention: str, widths: tuple[int, ...]) -> nn.Module:
    return models.resnet20(attention=None if attention == "none" else attention, widths=widths or (16, 32, 64))


def build(config: Config) -> nn.Module:
    return network(config.attention, config.widths)


_counted = cache(cost)


@pytest.fixture(autouse=True)
def _quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each network is counted once; pictures, which take a second each, are drawn where they are looked at."""
    monkeypatch.setattr("visattn.training.report.comparison.cost", _counted)
    if "with_picture" not in request.fixturenames:
        monkeypatch.setattr("visattn.training.report.comparison.find_spec", lambda name: None)


@pytest.fixture
def with_picture() -> None:
    """Draw as with matplotlib."""


class Trainer:
    """Writes the result that a run would have; stops where it is told to."""

    def __init__(self, stop_at: int | None = None, **spoilt: Any) -> None:
        self.stop_at, self.spoilt = stop_at, spoilt
        self.seen: list[tuple[str, Config]] = []

    def __call__(self, config: Config, run: Path) -> None:
        if len(self.seen) == self.stop_at:
            raise KeyboardInterrupt
        self.seen.append((run.parent.name + "/" + run.name, config))
        name = "wide" if config.widths else config.attention
        run.mkdir(parents=True)
        told = {
            "accuracy": REACHED[name] + OF_SEED[config.seed] + OF_RUN.get(name, OF_RUN["none"])[config.seed],
            "loss": 0.5,
            "images_per_second": 100.0 if name == "none" else 80.0,
            "parameters": sum(parameter.numel() for parameter in build(config).parameters()),
            "steps": 42,
        }
        (run / "result.json").write_text(json.dumps(told | self.spoilt))

    @property
    def folders(self) -> list[str]:
        return [folder for folder, _ in self.seen]


def compared(
    run: Path, trainer: Trainer, variants: tuple[str, ...] = ("se", "cbam"), seeds: int = 3, config: Config = CONFIG
) -> Any:
    return compare(config, run, variants, seeds, train=trainer, build=build, shape=SHAPE, machine="a machine")


def files(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.glob("comparison.*")}


def test_each_variant_is_trained_from_each_seed_with_nothing_else_changed(tmp_path: Path) -> None:
    trainer = Trainer()
    compared(tmp_path / "run", trainer, seeds=2)
    assert trainer.folders == [f"{name}/seed{seed}" for seed in (0, 1) for name in ("none", "se", "cbam")]
    for folder, config in trainer.seen:
        name, _, seed = folder.partition("/seed")
        assert config == replace(CONFIG, attention=name, seed=int(seed))


@pytest.mark.usefixtures("with_picture")
def test_tables_hold_what_was_trained(tmp_path: Path) -> None:
    table = compared(tmp_path, Trainer())
    told = json.loads((tmp_path / "comparison.json").read_text())
    assert told["rows"] == table
    assert told["recipe"] == CONFIG.digest()
    assert [(run["attention"], run["seed"]) for run in told["runs"]] == [(n, s) for n in ("none", "se", "cbam") for s in range(3)]
    plain, se, cbam = table
    assert (plain["parameters"], plain["macs"]) == (269_722, 40_813_184)
    gaps = [100 * (0.02 + a - b) for a, b in zip(OF_RUN["se"][:3], OF_RUN["none"][:3], strict=True)]
    expected = scipy.stats.ttest_1samp(gaps, 0).confidence_interval(0.95)
    assert (se["difference_low"], se["difference_high"]) == pytest.approx((expected.low, expected.high))
    assert [row["verdict"] for row in (plain, se, cbam)] == ["plain", "gain", "no difference shown"]
    assert se["speed"] == pytest.approx(0.8)
    lines = list(csv.DictReader(io.StringIO((tmp_path / "comparison.csv").read_text())))
    assert [float(line["accuracy"]) for line in lines] == [row["accuracy"] for row in table]
    page = (tmp_path / "comparison.md").read_text()
    assert page.startswith("# visattn_resnet20 on scenes, by attention\n")
    low, high = (f"{gap:+.2f}" for gap in expected)
    assert f"| se | 272,095 | 40.82 | 80 (0.80) | {se['accuracy']:.2f} ± " in page
    assert f"| {sum(gaps) / 3:+.2f} ({low} to {high}) | gain |" in page
    assert "3 seeds each" in page
    assert "2 degrees of freedom" in page
    assert "Machine: a machine." in page
    assert f"```toml\n{CONFIG.toml().strip()}\n```" in page
    with Image.open(tmp_path / "comparison.png") as picture:
        facts = json.loads(picture.info["visattn"])
    assert (facts["method"], facts["parameters"]["epochs"]) == ("comparison", 2.0)


@pytest.mark.parametrize("stop_at", [1, 3, 8])
def test_an_interrupted_comparison_goes_on_to_the_same_end_and_repeats_nothing(tmp_path: Path, stop_at: int) -> None:
    whole, first, second = Trainer(), Trainer(stop_at), Trainer()
    compared(tmp_path / "whole", whole)
    with pytest.raises(KeyboardInterrupt):
        compared(tmp_path / "cut", first)
    assert (tmp_path / "cut" / "comparison.md").exists() == (stop_at >= 3)
    compared(tmp_path / "cut", second)
    assert first.folders + second.folders == whole.folders
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_what_is_there_while_it_runs_is_balanced(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        compared(tmp_path, Trainer(stop_at=8))
    assert [row["seeds"] for row in json.loads((tmp_path / "comparison.json").read_text())["rows"]] == [2, 2, 2]


def test_seeds_and_variants_can_be_added(tmp_path: Path) -> None:
    compared(tmp_path, Trainer(), ("se",), 1)
    trainer = Trainer()
    table = compared(tmp_path, trainer, ("se", "cbam", "se"), 2)
    assert trainer.folders == ["cbam/seed0", "none/seed1", "se/seed1", "cbam/seed1"]
    assert [row["attention"] for row in table] == ["none", "se", "cbam"]


def test_seeds_begin_at_the_recipes_own(tmp_path: Path) -> None:
    trainer = Trainer()
    compared(tmp_path, trainer, ("se",), 2, replace(CONFIG, seed=2, attention="cbam"))
    assert trainer.folders == ["none/seed2", "se/seed2", "none/seed3", "se/seed3"]


def test_one_seed_has_no_interval_and_that_is_said(tmp_path: Path) -> None:
    _, se, _ = compared(tmp_path, Trainer(), seeds=1)
    assert (se["difference_low"], se["accuracy_high"], se["verdict"]) == (None, None, "one seed, no interval")
    page = (tmp_path / "comparison.md").read_text()
    assert "One seed each: there is no interval" in page
    assert "| 82.10 | +2.10 | one seed, no interval |" in page


def test_wide_is_as_large_as_the_largest(tmp_path: Path) -> None:
    trainer = Trainer()
    table = {row["attention"]: row for row in compared(tmp_path, trainer, ("wide", "se", "cbam"), 1)}
    assert list(table) == ["none", "wide", "se", "cbam"]
    (config,) = [config for folder, config in trainer.seen if folder.startswith("wide")]
    assert (config.attention, config.widths) == ("none", (16, 33, 64))
    assert table["cbam"]["parameters"] <= table["wide"]["parameters"] < 1.005 * table["cbam"]["parameters"]
    assert table["wide"]["macs"] == cost(models.resnet20(widths=(16, 33, 64)), SHAPE).macs
    assert (
        "- wide: the plain network with widths (16, 33, 64), 0.14 % more parameters than cbam.\n"
        in (tmp_path / "comparison.md").read_text()
    )


@pytest.mark.parametrize("variants", [("wide",), ("wide", "simam")])
def test_wide_beside_nothing_larger_is_refused(tmp_path: Path, variants: tuple[str, ...]) -> None:
    with pytest.raises(OptionError, match="'wide' must stand beside a variant that adds parameters, got none"):
        compared(tmp_path, Trainer(), variants)


def test_a_wrong_name_is_told_before_anything_is_trained(tmp_path: Path) -> None:
    trainer = Trainer()
    with pytest.raises(OptionError, match="unknown attention 'cbm'"):
        compared(tmp_path / "run", trainer, ("se", "cbm"))
    assert trainer.seen == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("variants", "seeds"), [((), 3), (("none",), 3), (("se",), 0)])
def test_nothing_to_compare_is_refused(tmp_path: Path, variants: tuple[str, ...], seeds: int) -> None:
    with pytest.raises(OptionError, match="a comparison needs a variant beside the plain network and a seed, got"):
        compared(tmp_path, Trainer(), variants, seeds)


def test_another_recipe_is_refused_and_one_that_changes_no_result_is_not(tmp_path: Path) -> None:
    compared(tmp_path, Trainer(), ("se",), 1)
    with pytest.raises(CheckpointError, match=r"holds runs of another recipe \(epochs 2\.0 -> 3\.0\); choose another folder"):
        compared(tmp_path, Trainer(), ("se",), 1, replace(CONFIG, epochs=3.0))
    trainer = Trainer()
    compared(tmp_path, trainer, ("se",), 1, replace(CONFIG, workers=2, attention="cbam"))
    assert trainer.seen == []


def test_runs_of_another_width_are_not_taken_for_these(tmp_path: Path) -> None:
    compared(tmp_path, Trainer(), ("se", "wide"), 1)
    with pytest.raises(
        CheckpointError, match=r"wide/seed0/result\.json: is of a network with 272,261 parameters, this one has 273,379"
    ):
        compared(tmp_path, Trainer(), ("se", "cbam", "wide"), 1)


@pytest.mark.parametrize(
    ("spoilt", "told"),
    [
        ({"accuracy": 81.0}, "must hold an accuracy from 0 to 1, a finite loss and a speed, got"),
        ({"loss": math.nan}, "must hold an accuracy from 0 to 1, a finite loss"),
        ({"images_per_second": -1}, "a finite loss and a speed, got"),
        ({"steps": None}, "must hold accuracy, loss, images_per_second, parameters, steps as numbers, got"),
    ],
)
def test_results_that_cannot_be_are_refused(tmp_path: Path, spoilt: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError, match=rf"none/seed0/result\.json: .*{told}"):
        compared(tmp_path, Trainer(**spoilt))


@pytest.mark.parametrize(("content", "told"), [("{", "cannot be read"), ("[1]", "must hold a JSON object, got a list")])
def test_a_damaged_result_is_refused_by_name(tmp_path: Path, content: str, told: str) -> None:
    compared(tmp_path, Trainer(), ("se",), 1)
    (tmp_path / "se" / "seed0" / "result.json").write_text(content)
    with pytest.raises(CheckpointError, match=rf"se/seed0/result\.json: {told}"):
        compared(tmp_path, Trainer(), ("se",), 1)


def test_a_training_that_leaves_no_result_is_told(tmp_path: Path) -> None:
    def idle(config: Config, run: Path) -> None:
        """Trains nothing."""

    with pytest.raises(CheckpointError, match=r"none/seed0/result\.json: cannot be read \(no such file"):
        compare(CONFIG, tmp_path, ("se",), 1, train=idle, build=build, shape=SHAPE)


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file/run: cannot be written"):
        compared(tmp_path / "file" / "run", Trainer())


def test_without_matplotlib_there_are_tables(tmp_path: Path) -> None:
    compared(tmp_path, Trainer(), seeds=1)
    assert sorted(files(tmp_path)) == ["comparison.csv", "comparison.json", "comparison.md"]


def test_a_page_of_one_difference_speaks_of_one_interval() -> None:
    each = {name: {0: outcome(0.5), 1: outcome(0.6)} for name in ("none", "se")}
    page: Callable[..., str] = to_page
    assert "1 interval, each" in page(rows(each, {name: Cost(1, 1) for name in each}), [], "title", "a = 1")
