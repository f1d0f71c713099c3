"""Comparison of the same training with and without attention modules: accuracy, variation over seeds, and cost.

Every variant is trained with the same seeds. So each difference is between two runs that receive the same images in the same order.
This module turns results into tables; the function that trains is an argument.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from torch import nn

from visattn._support.checks import printable
from visattn._support.json_files import Amount, Count, Finite, Share, decoded
from visattn._support.tables import Row, to_csv, to_json, to_markdown
from visattn._support.untrusted import check_own, read_own
from visattn._support.whole_files import refusal, write_whole
from visattn.core.provenance import Provenance
from visattn.errors import CheckpointError, OptionError, VisattnError
from visattn.training.config import Config, differences
from visattn.training.report.costs import Cost, cost
from visattn.training.report.paired import Estimate, estimate, paired, verdict
from visattn.training.tasks.widths import wide

PLAIN, WIDE, GAIN = "none", "wide_baseline", "gain"
RESULT, RECIPE = "result.json", "recipe.json"


@dataclass(frozen=True)
class Outcome:
    """Result of a finished run, as in its `result.json`.

    Attributes:
        accuracy: Accuracy on the test images, from 0 to 1.
        loss: Mean cross-entropy on the test images, in nats.
        images_per_second: Training throughput; 0 if the run was too short to measure it.
        parameters: Number of parameters of the network.
        steps: Number of optimizer steps.
    """

    accuracy: Share
    loss: Finite
    images_per_second: Amount
    parameters: Count
    steps: Count


@dataclass(frozen=True)
class Variant:
    """One of the compared networks: its settings, its cost, and a note for the table."""

    config: Config
    cost: Cost
    note: str = ""


T = TypeVar("T")
Outcomes = Mapping[str, Mapping[int, Outcome]]  # by variant and seed


def compare(
    config: Config,
    run: Path,
    variants: Sequence[str],
    seeds: int,
    *,
    train: Callable[[Config, Path], object],
    build: Callable[[Config], nn.Module],
    shape: tuple[int, int, int],
    machine: str = "",
) -> list[Row]:
    """Train every variant with every seed and write tables of the differences. Finished runs are not trained again.

    Each run has its own folder, such as `RUN/VARIANT/seed0`. All variants are trained with one seed before the next seed starts, so an
    interrupted comparison is balanced; call the function again to resume it. After each seed `comparison.json`, `.csv`, `.md` and,
    with matplotlib, `.png` are written again.

    Args:
        config: Settings of all runs. Its `attention` is ignored, and its `seed` is the first seed.
        run: Folder of the comparison.
        variants: Names in `visattn.nn.ATTENTION`, alone or with their start, as in `se-identity`, see `visattn.nn.attach`; `gain-0.5`: the
            plain network, whose residual branches start at this weight; and `wide_baseline`: a plain network with as many parameters as the
            largest variant. The plain network, `none`, is always included and comes first.
        seeds: Number of seeds for each variant, 1 or more. With one seed there are no intervals.
        train: Function that trains with given settings into a folder, resumes there, and writes `result.json` at the end.
        build: Function that builds the network of given settings, to count its parameters and operations.
        shape: `(channels, height, width)` of the input.
        machine: Description of the machine, for the table.

    Returns:
        Rows of the table; see `rows`.

    Raises:
        OptionError: If there is nothing to compare, or a network cannot be built.
        CheckpointError: If the folder holds runs with other settings, or a damaged result.
        OutputError: If the folder cannot be written.
    """
    names = list(dict.fromkeys([PLAIN, *variants]))
    if len(names) < 2 or seeds < 1:
        raise OptionError(
            f"a comparison needs a variant besides the plain network and at least one seed, got {list(variants)} and {seeds} seeds."
        )
    check_own(run, (RECIPE, "comparison.*"), names)
    made = planned(config, names, build, shape)
    outcomes: dict[str, dict[int, Outcome]] = {name: {} for name in names}
    with _claimed(run, config):
        for seed in range(config.seed, config.seed + seeds):
            news = seed == config.seed + seeds - 1
            for name, variant in made.items():
                folder = run / name / f"seed{seed}"
                if not (folder / RESULT).exists():
                    train(replace(variant.config, seed=seed), folder)
                    news = True
                outcomes[name][seed] = _outcome(folder / RESULT, variant)
            if news:
                table = rows(outcomes, {name: variant.cost for name, variant in made.items()})
                _write(run, config, made, outcomes, table, machine)
    return table


def planned(
    config: Config, names: Sequence[str], build: Callable[[Config], nn.Module], shape: tuple[int, int, int]
) -> dict[str, Variant]:
    """Build every variant once and count its cost, so that errors appear before hours of training.

    Args:
        config: Settings of all runs.
        names: Names of the variants, including the plain network.
        build: Function that builds the network of given settings.
        shape: `(channels, height, width)` of the input.

    Returns:
        Variants by name, in the given order.

    Raises:
        OptionError: If no variant has more parameters than the plain network, so that `wide_baseline` has no target, or if the network
            cannot be widened.
    """
    configs = {name: _settings(config, name) for name in names if name != WIDE}
    made = {name: Variant(each, cost(build(each), shape), _note(name)) for name, each in configs.items()}
    if WIDE in names:
        largest = max(made, key=lambda name: made[name].cost.parameters)
        if made[largest].cost.parameters == made[PLAIN].cost.parameters:
            raise OptionError(f"'{WIDE}' needs another variant that adds parameters, got {', '.join(made)}. Leave it out.")
        plain = configs[PLAIN]
        found = wide(lambda widths: build(replace(plain, widths=widths or config.widths)), made[largest].cost.parameters)
        wider = replace(plain, widths=found.widths)
        note = f"{WIDE}: the plain network with widths {found.widths}, {found.excess:.2f} % more parameters than {largest}."
        made[WIDE] = Variant(wider, cost(build(wider), shape), note)
    return {name: made[name] for name in names}


def _settings(config: Config, name: str) -> Config:
    """Return the settings of a variant.

    Raises:
        OptionError: If it is unknown.
    """
    kind, _, how = name.partition("-")
    if kind != GAIN:
        return replace(config, attention=kind, attention_init=how or "auto")
    try:
        gain = float(how)
    except ValueError as error:
        raise OptionError(f"'{GAIN}' needs the first weight of the residual branches, such as gain-0.5, got '{name}'.") from error
    return replace(config, attention=PLAIN, model_kwargs=config.model_kwargs | {"branch_gain": gain})


def _note(name: str) -> str:
    kind, _, how = name.partition("-")
    return f"{name}: the plain network, whose residual branches start at {how} times their weight." if kind == GAIN else ""


def rows(outcomes: Outcomes, costs: Mapping[str, Cost]) -> list[Row]:
    """Compute one table row per variant, over the seeds that all variants have finished.

    Args:
        outcomes: Results of `none` and the other variants, by variant and seed.
        costs: Cost of each variant.

    Returns:
        Rows with the keys `attention`, `parameters`, `macs`, `images_per_second` (mean), `speed`, `seeds`, `accuracy` (percent),
        `difference` (to the plain network, in percentage points) and `verdict`. `speed` is the geometric mean of the throughput
        relative to the plain network with the same seed; it and `images_per_second` are None if a run was too short to measure.
        `accuracy` and `difference` have 95 % intervals over seeds, in the keys with `_low` and `_high`; None if there is one seed. The
        `verdict` depends only on the interval of the difference.

    Raises:
        OptionError: If no seed is finished for all variants.
    """
    seeds = sorted(set.intersection(*(set(runs) for runs in outcomes.values())))
    if not seeds:
        raise OptionError("a comparison needs a seed that all variants have finished, got none. Let the runs finish.")
    made: list[Row] = []
    for name, runs in outcomes.items():
        accuracy = _over(runs, seeds, "accuracy", 100)
        speed = _over(runs, seeds, "images_per_second")
        plain = {
            part: _over(outcomes[PLAIN], seeds, part, scale) for part, scale in (("accuracy", 100), ("images_per_second", 1))
        }
        difference = None if name == PLAIN else paired(plain["accuracy"], accuracy)
        timed = all(speed.values()) and all(plain["images_per_second"].values())
        ratios = [math.log(speed[seed] / plain["images_per_second"][seed]) for seed in seeds if timed]
        made.append(
            {
                "attention": name,
                "parameters": costs[name].parameters,
                "macs": costs[name].macs,
                "images_per_second": fmean(speed.values()) if timed else None,
                "speed": math.exp(fmean(ratios)) if timed else None,
                "seeds": len(seeds),
                **_columns("accuracy", estimate(list(accuracy.values()))),
                **_columns("difference", difference),
                "verdict": verdict(difference) if difference else "plain",
            }
        )
    return made


def to_page(table: Sequence[Row], notes: Sequence[str], title: str, recipe: str) -> str:
    """Format the rows as a Markdown page, with notes on the method and the settings."""
    seeds = table[0]["seeds"]
    shown = [
        {
            "attention": row["attention"],
            "parameters": f"{row['parameters']:,}",
            "MACs (M)": f"{row['macs'] / 1e6:.2f}",
            "images/s (ratio)": f"{row['images_per_second']:,.0f} ({row['speed']:.2f})" if row["speed"] else "",
            "test accuracy (%)": f"{row['accuracy']:.2f}" + _half(row),
            "difference (points)": _signed(row),
            "verdict": row["verdict"],
        }
        for row in table
    ]
    facts = [
        _method(seeds, len(table) - 1),
        "MACs: multiply-accumulates of convolutions, matrix products and attention, of the forward pass of one image.",
        "images/s: training throughput; the ratio is relative to the plain network with the same seed.",
        *notes,
    ]
    return (
        f"# {title}\n\n{to_markdown(shown)}\n" + "".join(f"- {fact}\n" for fact in facts) + f"\n```toml\n{recipe.strip()}\n```\n"
    )


def _method(seeds: int, compared: int) -> str:
    if seeds == 1:
        return "One seed each: there is no interval, and a difference may come from the seed alone."
    return (
        f"{seeds} seeds each, the same for all variants. Intervals are 95 % Student's t intervals with {seeds - 1} "
        f"degree{'s' * (seeds > 2)} of freedom. They cover the choice of seed, not of test images. Differences are paired by seed. "
        "The verdict depends only on the interval of the difference: above 0, below 0, or on both sides of 0. An interval on both sides "
        f"does not prove that there is no difference. {compared} interval{'s' * (compared > 1)}, each at 95 % without correction for "
        "multiple comparisons."
    )


def _over(runs: Mapping[int, Outcome], seeds: Sequence[int], metric: str, scale: float = 1) -> dict[int, float]:
    return {seed: scale * getattr(runs[seed], metric) for seed in seeds}


def _columns(name: str, found: Estimate | None) -> dict[str, float | None]:
    mean, low, high = found or (None, None, None)
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def _half(row: Row) -> str:
    return "" if row["accuracy_low"] is None else f" ± {row['accuracy_high'] - row['accuracy']:.2f}"


def _signed(row: Row) -> str:
    if row["difference"] is None:
        return ""
    ends = "" if row["difference_low"] is None else f" ({row['difference_low']:+.2f} to {row['difference_high']:+.2f})"
    return f"{row['difference']:+.2f}{ends}"


@contextmanager
def _claimed(run: Path, config: Config) -> Iterator[None]:
    """Write the settings into the folder, or check that they match those already there. Undo this if the first run is refused.

    Raises:
        CheckpointError: If the folder has other settings.
        OutputError: If the folder cannot be created.
        VisattnError: If the body raises one.
    """
    file, name = run / RECIPE, printable(str(run))
    made = [place for place in (file, run, *run.parents) if not os.path.lexists(place)]
    if file not in made:
        own = {key: config.digest()[key] for key in ("attention", "seed")}  # these may differ
        changed = differences(_read(file, dict[str, Any]) | own, config)
        if changed:
            raise CheckpointError(f"{name}: holds runs with other settings ({'; '.join(changed)}). Choose another folder.")
    else:
        try:
            run.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            refused = refusal(error, run)
            raise refused from error
        write_whole(file, to_json(config.digest()).encode())
    try:
        yield
    except VisattnError:
        if file in made and [*run.iterdir()] == [file]:
            file.unlink()
            for place in made[1:]:
                place.rmdir()
        raise


def _outcome(file: Path, variant: Variant) -> Outcome:
    """Read the result of a finished run of this variant.

    Raises:
        CheckpointError: If the result is missing, damaged or from another network.
    """
    found, name = _read(file, Outcome), printable(str(file))
    if found.parameters != variant.cost.parameters:
        raise CheckpointError(
            f"{name}: belongs to a network with {found.parameters:,} parameters, but this one has {variant.cost.parameters:,}. "
            "Choose another folder."
        )
    return found


def _read(file: Path, kind: type[T]) -> T:
    """Read a JSON file of a run.

    Raises:
        CheckpointError: If the file cannot be read or holds something else.
    """
    try:
        return decoded(read_own(file), kind, lax=True)
    except (OSError, ValueError) as error:
        cause = printable(getattr(error, "strerror", None) or str(error))
        raise CheckpointError(f"{printable(str(file))}: cannot be read ({cause.lower()}). Remove it to train again.") from error


def _write(run: Path, config: Config, made: Mapping[str, Variant], outcomes: Outcomes, table: list[Row], machine: str) -> None:
    """Write the tables and, with matplotlib, the plot of all finished seeds."""
    runs = [{"attention": name, "seed": seed} | asdict(outcomes[name][seed]) for name in outcomes for seed in outcomes[name]]
    notes = [variant.note for variant in made.values() if variant.note] + [f"Machine: {machine}."] * bool(machine)
    config = config.shared()
    title = f"{printable(config.model)} on {printable(config.data)}, by attention"
    whole = {"recipe": config.digest(), "machine": machine, "notes": notes, "rows": table, "runs": runs}
    files = {
        "json": to_json(whole).encode(),
        "csv": to_csv(table).encode(),
        "md": to_page(table, notes, title, config.toml()).encode(),
    }
    if find_spec("matplotlib"):
        from visattn.core.drawing.plots import learning_curves

        provenance = Provenance(model=config.model, method="comparison", parameters=config.digest())
        files["png"] = learning_curves.comparison(table, runs, title, provenance)
    for ending, content in files.items():
        write_whole(run / f"comparison.{ending}", content)
