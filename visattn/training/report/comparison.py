"""The same recipe with and without attention: what a module brings, beside what the seed alone does and what it costs.

Runs go in, tables come out. Every variant is trained from the same seeds, so that a difference is one of two runs that see the same
pictures in the same order. How a network is trained is not known here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

from visattn._support.checks import printable, shown
from visattn._support.files import check_own, read_own, refusal, write_whole
from visattn._support.tables import Row, to_csv, to_json, to_markdown
from visattn.errors import CheckpointError, OptionError, VisattnError
from visattn.provenance import Provenance
from visattn.training.config import Config, differences
from visattn.training.report.costs import Cost, cost
from visattn.training.report.paired import Estimate, estimate, paired, verdict
from visattn.training.tasks.widths import wide

PLAIN, WIDE = "none", "wide"
RESULT, RECIPE = "result.json", "recipe.json"


@dataclass(frozen=True)
class Outcome:
    """What a finished run reached: `result.json` of its folder.

    Attributes:
        accuracy: Share of the test pictures that are told right, from 0 to 1.
        loss: Mean cross-entropy on them, in nats.
        images_per_second: Training throughput; 0 of a run too short to tell.
        parameters: Of the network.
        steps: Of the optimizer.
    """

    accuracy: float
    loss: float
    images_per_second: float
    parameters: int
    steps: int


@dataclass(frozen=True)
class Variant:
    """One of the networks that are compared: its configuration, what it costs, and what should be said about it."""

    config: Config
    cost: Cost
    note: str = ""


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
    """Train each variant from each seed and write what differs; what is finished already is not trained again.

    Runs lie in `RUN/VARIANT/seed0`, seed after seed through all variants, and after each seed `comparison.json`, `.csv`, `.md` and,
    with matplotlib, `.png` are written anew: an interrupted comparison is balanced, and goes on when it is called again.

    Args:
        config: The recipe; its own attention is not used, its seed is the first.
        run: Folder of the comparison.
        variants: Names of `visattn.nn.ATTENTION`, and `wide`: a plain network with as many parameters as the largest of the others.
            The plain network, `none`, is always there and first.
        seeds: How often each is trained, 1 or more; of one there are no intervals.
        train: Trains a configuration into a folder, goes on where it stopped there, and leaves `result.json` at the end.
        build: The network of a configuration, for counting.
        shape: `(channels, height, width)` of its input.
        machine: What it was trained on, for the table.

    Returns:
        Rows as `rows` gives them.

    Raises:
        OptionError: If there is nothing to compare, or a network cannot be built.
        CheckpointError: If the folder holds runs of another recipe, or a damaged result.
        OutputError: If the folder cannot be written.
    """
    names = list(dict.fromkeys([PLAIN, *variants]))
    if len(names) < 2 or seeds < 1:
        raise OptionError(
            f"a comparison needs a variant beside the plain network and a seed, got {list(variants)} and {seeds} seeds."
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
    """Every variant with its configuration and cost, built once, so that a wrong name is told before hours of training.

    Args:
        config: The recipe.
        names: Of the variants, the plain network among them.
        build: The network of a configuration.
        shape: `(channels, height, width)` of its input.

    Returns:
        Variants by name, in the order given.

    Raises:
        OptionError: If `wide` has nothing to be as large as, or the network is none that can be widened.
    """
    configs = {name: replace(config, attention=name) for name in names if name != WIDE}
    made = {name: Variant(each, cost(build(each), shape)) for name, each in configs.items()}
    if WIDE in names:
        largest = max(made, key=lambda name: made[name].cost.parameters)
        if made[largest].cost.parameters == made[PLAIN].cost.parameters:
            raise OptionError(f"'{WIDE}' must stand beside a variant that adds parameters, got {', '.join(made)}. Leave it out.")
        plain = configs[PLAIN]
        found = wide(lambda widths: build(replace(plain, widths=widths or config.widths)), made[largest].cost.parameters)
        wider = replace(plain, widths=found.widths)
        note = f"{WIDE}: the plain network with widths {found.widths}, {found.excess:.2f} % more parameters than {largest}."
        made[WIDE] = Variant(wider, cost(build(wider), shape), note)
    return {name: made[name] for name in names}


def rows(outcomes: Outcomes, costs: Mapping[str, Cost]) -> list[Row]:
    """A row for each variant, over the seeds that all of them have finished.

    Args:
        outcomes: Of `none` and others, by variant and seed.
        costs: By variant.

    Returns:
        `attention`, `parameters`, `macs`, `images_per_second` (mean) and `speed` (geometric mean of its ratio to the plain network of
        the same seed; both None where a run was too short to tell), `seeds`, `accuracy` in percent and `difference` to the plain
        network in points, both with the ends of their 95 % intervals over seeds (None of one seed), and the `verdict`, which follows
        from the interval of the difference alone.

    Raises:
        OptionError: If no seed is finished by all.
    """
    seeds = sorted(set.intersection(*(set(runs) for runs in outcomes.values())))
    if not seeds:
        raise OptionError("a comparison needs a seed that all variants have finished, got none. Let it run on.")
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
    """The rows as a Markdown page, with what must be known to read them."""
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
        "images/s: of training; the ratio is to the plain network of the same seed.",
        *notes,
    ]
    return (
        f"# {title}\n\n{to_markdown(shown)}\n" + "".join(f"- {fact}\n" for fact in facts) + f"\n```toml\n{recipe.strip()}\n```\n"
    )


def _method(seeds: int, compared: int) -> str:
    if seeds == 1:
        return "One seed each: there is no interval, and a difference may be the seed's alone."
    return (
        f"{seeds} seeds each, the same for all. Intervals: 95 %, Student's t with {seeds - 1} degree{'s' * (seeds > 2)} of freedom, over "
        "seeds and not over other test pictures; differences are paired by seed. The verdict follows from the interval of the difference "
        "alone: above 0, below 0, or on both sides, which does not show that there is no difference. "
        f"{compared} interval{'s' * (compared > 1)}, each at 95 % by itself."
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
    """Write the recipe into the folder, or see that it is the one that lies there; take it back if the first run is refused.

    Raises:
        CheckpointError: If it is another.
        OutputError: If the folder cannot be made.
        VisattnError: As the body does.
    """
    file, name = run / RECIPE, printable(str(run))
    made = [place for place in (file, run, *run.parents) if not os.path.lexists(place)]
    if file not in made:
        own = {key: config.digest()[key] for key in ("attention", "seed")}  # not the recipe's
        changed = differences(_json(file) | own, config)
        if changed:
            raise CheckpointError(f"{name}: holds runs of another recipe ({'; '.join(changed)}); choose another folder.")
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
    """The result of a finished run of this variant.

    Raises:
        CheckpointError: If it is missing, damaged or of another network.
    """
    told, name = _json(file), printable(str(file))
    measured = {key: told.get(key) for key in Outcome.__dataclass_fields__}
    counts = [measured[key] for key in ("parameters", "steps")]
    if not all(type(value) in (int, float) for value in measured.values()) or not all(
        type(count) is int and 0 <= count < 2**63 for count in counts
    ):
        raise CheckpointError(f"{name}: must hold {', '.join(measured)} as numbers, got {shown(told)}.")
    found = Outcome(**measured)  # type: ignore[arg-type] # numbers
    if not (0 <= found.accuracy <= 1 and abs(found.loss) < math.inf and 0 <= found.images_per_second < math.inf):
        raise CheckpointError(f"{name}: must hold an accuracy from 0 to 1, a finite loss and a speed, got {shown(told)}.")
    if found.parameters != variant.cost.parameters:
        raise CheckpointError(
            f"{name}: is of a network with {found.parameters:,} parameters, this one has {variant.cost.parameters:,}; "
            "choose another folder."
        )
    return found


def _json(file: Path) -> dict[str, Any]:
    """An object of JSON.

    Raises:
        CheckpointError: If the file holds none.
    """
    name = printable(str(file))
    try:
        told = json.loads(read_own(file))
    except (OSError, ValueError, RecursionError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"{name}: cannot be read ({cause.lower()}); remove it to train again.") from error
    if not isinstance(told, dict):
        raise CheckpointError(f"{name}: must hold a JSON object, got a {type(told).__name__}; remove it to train again.")
    return told


def _write(run: Path, config: Config, made: Mapping[str, Variant], outcomes: Outcomes, table: list[Row], machine: str) -> None:
    """The tables and the picture of what is finished."""
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
        from visattn.drawing.plots import learning_curves

        provenance = Provenance(model=config.model, method="comparison", parameters=config.digest())
        files["png"] = learning_curves.comparison(table, runs, title, provenance)
    for ending, content in files.items():
        write_whole(run / f"comparison.{ending}", content)
