"""Comparisons: Student's intervals, verdicts, and comparisons that are balanced, resumed and not mixed with others."""

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
REACHED = {"none": 0.80, "se": 0.82, "cbam": 0.79, "simam": 0.80, "wide_baseline": 0.805}
OF_SEED = [0.000, 0.011, -0.007, 0.004]  # effect of each seed on all variants
OF_RUN = {"none": [0.0, 0.001, 0.0, 0.002], "se": [0.001, 0.0, 0.002, 0.0], "cbam": [0.0, 0.02, -0.02, 0.01]}


# numbers


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99, 0.999])
@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 7, 9, 10, 29, 30, 100, 1001])
def test_quantiles_match_students_t_distribution(degrees: int, confidence: float) -> None:
    assert t_quantile(degrees, confidence) == pytest.approx(scipy.stats.t.ppf((1 + confidence) / 2, degrees), rel=1e-9)


@pytest.mark.parametrize(("degrees", "confidence"), [(0, 0.95), (3, 0.0), (3, 1.0)])
def test_quantiles_out_of_range_are_refused(degrees: int, confidence: float) -> None:
    with pytest.raises(OptionError, match="t needs 1 or more degrees of freedom and a probability between 0 and 1, got"):
        t_quantile(degrees, confidence)


QUANTILES = {  # 0.975 quantile of Student's t with 1, 2 and 7 degrees of freedom: two closed forms, which older SciPy has to ten digits
    2: math.tan(math.pi * 0.475),
    3: 0.95 * math.sqrt(2 / (4 * 0.975 * 0.025)),
    8: float(scipy.stats.t.ppf(0.975, 7)),
}


@pytest.mark.parametrize("count", QUANTILES)
def test_paired_intervals_match_the_paired_t_test(count: int) -> None:
    random = np.random.default_rng(count)
    plain, other = random.normal(size=(2, count))
    change = other - plain
    half = QUANTILES[count] * float(change.std(ddof=1)) / math.sqrt(count)
    low, high = float(change.mean()) - half, float(change.mean()) + half
    assert tuple(scipy.stats.ttest_rel(other, plain).confidence_interval(0.95)) == pytest.approx((low, high), rel=1e-9)
    order = [int(seed) for seed in random.permutation(count)]  # paired by seed, not by order
    found = paired(dict(enumerate(map(float, plain))), {seed: float(other[seed]) for seed in order})
    assert found == pytest.approx((float(change.mean()), low, high), abs=1e-12)


def test_differences_use_only_shared_seeds() -> None:
    assert paired({0: 1.0, 1: 5.0, 2: 2.0}, {2: 4.0, 0: 2.0, 7: 9.0}).mean == 1.5


def test_one_value_has_no_interval() -> None:
    assert estimate([3.5]) == (3.5, None, None)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_mean_of_empty_or_nonfinite_values_is_refused(values: list[float]) -> None:
    with pytest.raises(OptionError, match="a mean needs one or more finite numbers, got"):
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
def test_verdict_depends_only_on_the_interval(interval: tuple[float, float | None, float | None], said: str) -> None:
    assert verdict(Estimate(*interval)) == said


def outcome(accuracy: float, speed: float = 100.0, parameters: int = 1) -> Outcome:
    return Outcome(accuracy, 0.5, speed, parameters, 10)


def test_rows_use_percent_and_only_shared_seeds() -> None:
    outcomes = {
        "none": {0: outcome(0.80, 100), 1: outcome(0.82, 400), 2: outcome(0.1)},
        "se": {1: outcome(0.85, 200), 0: outcome(0.81, 50)},
    }
    plain, se = rows(outcomes, {"none": Cost(7, 70), "se": Cost(9, 90)})
    half = 12.706204736174707 * math.sqrt(2) / math.sqrt(2)  # t with 1 degree of freedom, s of (1, 3), divided by sqrt(n)
    assert (plain["attention"], plain["seeds"], plain["accuracy"], plain["speed"]) == ("none", 2, pytest.approx(81), 1)
    assert (plain["difference"], plain["difference_low"], plain["verdict"]) == (None, None, "plain")
    assert (se["parameters"], se["macs"], se["images_per_second"]) == (9, 90, 125)
    assert se["speed"] == pytest.approx(0.5)  # for each seed
    assert (se["difference"], se["difference_low"], se["difference_high"]) == pytest.approx((2, 2 - half, 2 + half))
    assert (se["accuracy_high"] - se["accuracy"]) == pytest.approx(12.706204736174707 * math.sqrt(8) / math.sqrt(2))
    assert se["verdict"] == "no difference shown"


def test_runs_too_short_to_be_timed_have_no_speed() -> None:
    table = rows({"none": {0: outcome(0.5, 10)}, "se": {0: outcome(0.6, 0)}}, {"none": Cost(1, 1), "se": Cost(1, 1)})
    assert [(row["images_per_second"], row["speed"]) for row in table] == [(10, 1), (None, None)]
    assert "| se | 1 | 0.00 |  | 60.00 |" in to_page(table, [], "title", "a = 1")


def test_rows_without_a_shared_seed_are_refused() -> None:
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
    """Count each network only once, and skip the plots, which take a second each."""
    monkeypatch.setattr("visattn.training.report.comparison.cost", _counted)
    if "with_picture" not in request.fixturenames:
        monkeypatch.setattr("visattn.training.report.comparison.find_spec", lambda name: None)


@pytest.fixture
def with_picture() -> None:
    """Request plots, which `_quick` otherwise skips."""


class Trainer:
    """Trainer that writes prepared results, and can stop after a number of runs."""

    def __init__(self, stop_at: int | None = None, **spoilt: Any) -> None:
        self.stop_at, self.spoilt = stop_at, spoilt
        self.seen: list[tuple[str, Config]] = []

    def __call__(self, config: Config, run: Path) -> None:
        if len(self.seen) == self.stop_at:
            raise KeyboardInterrupt
        self.seen.append((run.parent.name + "/" + run.name, config))
        name = "wide_baseline" if config.widths else config.attention
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


def test_runs_differ_only_in_variant_and_seed(tmp_path: Path) -> None:
    trainer = Trainer()
    compared(tmp_path / "run", trainer, seeds=2)
    assert trainer.folders == [f"{name}/seed{seed}" for seed in (0, 1) for name in ("none", "se", "cbam")]
    for folder, config in trainer.seen:
        name, _, seed = folder.partition("/seed")
        assert config == replace(CONFIG, attention=name, seed=int(seed))


@pytest.mark.usefixtures("with_picture")
def test_tables_match_the_trained_runs(tmp_path: Path) -> None:
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
def test_resumed_comparison_repeats_no_run_and_gives_the_same_files(tmp_path: Path, stop_at: int) -> None:
    whole, first, second = Trainer(), Trainer(stop_at), Trainer()
    compared(tmp_path / "whole", whole)
    with pytest.raises(KeyboardInterrupt):
        compared(tmp_path / "cut", first)
    assert (tmp_path / "cut" / "comparison.md").exists() == (stop_at >= 3)
    compared(tmp_path / "cut", second)
    assert first.folders + second.folders == whole.folders
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_partial_results_have_the_same_seeds_for_every_variant(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        compared(tmp_path, Trainer(stop_at=8))
    assert [row["seeds"] for row in json.loads((tmp_path / "comparison.json").read_text())["rows"]] == [2, 2, 2]


def test_seeds_and_variants_can_be_added(tmp_path: Path) -> None:
    compared(tmp_path, Trainer(), ("se",), 1)
    trainer = Trainer()
    table = compared(tmp_path, trainer, ("se", "cbam", "se"), 2)
    assert trainer.folders == ["cbam/seed0", "none/seed1", "se/seed1", "cbam/seed1"]
    assert [row["attention"] for row in table] == ["none", "se", "cbam"]


def test_seeds_start_at_the_seed_of_the_config(tmp_path: Path) -> None:
    trainer = Trainer()
    compared(tmp_path, trainer, ("se",), 2, replace(CONFIG, seed=2, attention="cbam"))
    assert trainer.folders == ["none/seed2", "se/seed2", "none/seed3", "se/seed3"]


def test_one_seed_has_no_interval_and_the_page_states_it(tmp_path: Path) -> None:
    _, se, _ = compared(tmp_path, Trainer(), seeds=1)
    assert (se["difference_low"], se["accuracy_high"], se["verdict"]) == (None, None, "one seed, no interval")
    page = (tmp_path / "comparison.md").read_text()
    assert "One seed each: there is no interval" in page
    assert "| 82.10 | +2.10 | one seed, no interval |" in page


def test_wide_baseline_is_as_large_as_the_largest_variant(tmp_path: Path) -> None:
    trainer = Trainer()
    table = {row["attention"]: row for row in compared(tmp_path, trainer, ("wide_baseline", "se", "cbam"), 1)}
    assert list(table) == ["none", "wide_baseline", "se", "cbam"]
    (config,) = [config for folder, config in trainer.seen if folder.startswith("wide_baseline")]
    assert (config.attention, config.widths) == ("none", (16, 33, 64))
    assert table["cbam"]["parameters"] <= table["wide_baseline"]["parameters"] < 1.005 * table["cbam"]["parameters"]
    assert table["wide_baseline"]["macs"] == cost(models.resnet20(widths=(16, 33, 64)), SHAPE).macs
    assert (
        "- wide_baseline: the plain network with widths (16, 33, 64), 0.14 % more parameters than cbam.\n"
        in (tmp_path / "comparison.md").read_text()
    )


@pytest.mark.parametrize("variants", [("wide_baseline",), ("wide_baseline", "simam")])
def test_wide_baseline_without_a_larger_variant_is_refused(tmp_path: Path, variants: tuple[str, ...]) -> None:
    with pytest.raises(OptionError, match="'wide_baseline' needs another variant that adds parameters, got none"):
        compared(tmp_path, Trainer(), variants)


def test_unknown_variant_is_refused_before_training(tmp_path: Path) -> None:
    trainer = Trainer()
    with pytest.raises(OptionError, match="unknown attention 'cbm'"):
        compared(tmp_path / "run", trainer, ("se", "cbm"))
    assert trainer.seen == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("variants", "seeds"), [((), 3), (("none",), 3), (("se",), 0)])
def test_comparison_without_variants_or_seeds_is_refused(tmp_path: Path, variants: tuple[str, ...], seeds: int) -> None:
    with pytest.raises(OptionError, match="a comparison needs a variant besides the plain network and at least one seed, got"):
        compared(tmp_path, Trainer(), variants, seeds)


def test_only_config_changes_that_affect_results_are_refused(tmp_path: Path) -> None:
    compared(tmp_path, Trainer(), ("se",), 1)
    with pytest.raises(CheckpointError, match=r"holds runs with other settings \(epochs 2\.0 -> 3\.0\)\. Choose another folder"):
        compared(tmp_path, Trainer(), ("se",), 1, replace(CONFIG, epochs=3.0))
    trainer = Trainer()
    compared(tmp_path, trainer, ("se",), 1, replace(CONFIG, workers=2, attention="cbam"))
    assert trainer.seen == []


def test_wide_baseline_run_of_another_size_is_not_reused(tmp_path: Path) -> None:
    compared(tmp_path, Trainer(), ("se", "wide_baseline"), 1)
    with pytest.raises(
        CheckpointError,
        match=r"wide_baseline/seed0/result\.json: belongs to a network with 272,261 parameters, but this one has 273,379",
    ):
        compared(tmp_path, Trainer(), ("se", "cbam", "wide_baseline"), 1)


@pytest.mark.parametrize(
    ("spoilt", "told"),
    [
        ({"accuracy": 81.0}, r"accuracy must be a number <= 1\.0"),
        ({"loss": math.nan}, "loss must be a number >= "),
        ({"images_per_second": -1}, r"images_per_second must be a number >= 0\.0"),
        ({"steps": None}, "steps must be a whole number, got null"),
    ],
)
def test_impossible_results_are_refused(tmp_path: Path, spoilt: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError, match=rf"none/seed0/result\.json: .*{told}"):
        compared(tmp_path, Trainer(**spoilt))


@pytest.mark.parametrize(
    ("content", "told"), [("{", "cannot be read"), ("[1]", r"cannot be read \(must be an object, got a list\)")]
)
def test_a_damaged_result_is_refused_by_name(tmp_path: Path, content: str, told: str) -> None:
    compared(tmp_path, Trainer(), ("se",), 1)
    (tmp_path / "se" / "seed0" / "result.json").write_text(content)
    with pytest.raises(CheckpointError, match=rf"se/seed0/result\.json: {told}"):
        compared(tmp_path, Trainer(), ("se",), 1)


def test_missing_result_after_training_is_an_error(tmp_path: Path) -> None:
    def idle(config: Config, run: Path) -> None:
        """Train nothing."""

    with pytest.raises(CheckpointError, match=r"none/seed0/result\.json: cannot be read \(no such file"):
        compare(CONFIG, tmp_path, ("se",), 1, train=idle, build=build, shape=SHAPE)


def test_invalid_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file/run: cannot be written"):
        compared(tmp_path / "file" / "run", Trainer())


def test_tables_are_written_without_matplotlib(tmp_path: Path) -> None:
    compared(tmp_path, Trainer(), seeds=1)
    assert sorted(files(tmp_path)) == ["comparison.csv", "comparison.json", "comparison.md"]


def test_page_with_one_difference_uses_the_singular() -> None:
    each = {name: {0: outcome(0.5), 1: outcome(0.6)} for name in ("none", "se")}
    page: Callable[..., str] = to_page
    assert "1 interval, each" in page(rows(each, {name: Cost(1, 1) for name in each}), [], "title", "a = 1")
