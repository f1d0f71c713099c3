"""The model card of a run: what it is, what it was trained on and how, what it reaches, and what is not known of it.

A function of plain facts. What is not among them is said to be unknown, never made up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from visattn._support.checks import printable
from visattn.training.config import Config, Recipe
from visattn.training.report.costs import Cost


@dataclass(frozen=True)
class Data:
    """What a network was trained and tested on.

    Attributes:
        name: A folder's, or that of a named data set.
        classes: Names of the classes.
        train: Number of training pictures.
        test: Number of test pictures.
        fingerprints: sha256 of both, by split.
        license: Of the pictures; empty where it is not known.
    """

    name: str
    classes: Sequence[str]
    train: int
    test: int
    fingerprints: Mapping[str, str]
    license: str = ""


@dataclass(frozen=True)
class Reached:
    """What a run reached, and where.

    Attributes:
        accuracy: Share of the test pictures that are told right, from 0 to 1.
        loss: Mean cross-entropy on them, in nats.
        epochs: That were trained.
        steps: Of the optimizer.
        seconds: That it took.
        images_per_second: Training throughput.
        machine: That it ran on.
    """

    accuracy: float
    loss: float
    epochs: float
    steps: int
    seconds: float
    images_per_second: float
    machine: str


@dataclass(frozen=True)
class Origin:
    """How a network was made.

    Attributes:
        command: That made it.
        versions: Of the libraries, by name.
        sha256: Of the weights' file.
        license: Of the weights.
    """

    command: str
    versions: Mapping[str, str]
    sha256: str = ""
    license: str = ""


def card(
    config: Config,
    data: Data,
    reached: Reached,
    origin: Origin,
    *,
    cost: Cost,
    shape: tuple[int, int, int],
    limits: Sequence[str] = (),
) -> str:
    """A page of Markdown; the same facts give the same page.

    Args:
        config: Of the run.
        data: What it was trained and tested on.
        reached: What it reached.
        origin: How it was made.
        cost: Of the network; no multiply-accumulates where they could not be counted.
        shape: `(channels, height, width)` of its input.
        limits: Sentences beside those that follow from the facts.

    Returns:
        The page. Names that come from outside stand between backticks, on one line.
    """
    channels, height, width = shape
    low, high = wilson(reached.accuracy, data.test)
    inside = "" if config.attention == "none" else f" with `{config.attention}`"
    return page(
        f"{code(config.model)}{inside} on {code(data.name)}",
        config,
        data,
        reached,
        origin,
        what=(
            f"An image classifier: from {'gray' if channels == 1 else 'color'} pictures of {height} x {width} pixels to one of "
            f"{len(data.classes)} classes, {_first(data.classes)}.",
            f"Network: {code(config.model)}, "
            + ("plain." if config.attention == "none" else f"with attention `{config.attention}`."),
            counted(cost),
        ),
        results=(
            f"Test accuracy: {percent(reached.accuracy)}, 95 % interval {percent(low)} to {percent(high)}.",
            f"Test loss: {reached.loss:.4f} nats.",
        ),
        limits=(
            f"One run, of seed {config.seed}. The interval is over test pictures (Wilson); another seed may give an accuracy outside it.",
            "Measured on the test pictures above only; nothing is known of others, or of other sizes.",
            "It answers with one of its classes whatever a picture shows.",
            *limits,
        ),
    )


def page(
    title: str,
    config: Recipe,
    data: Data,
    reached: Reached,
    origin: Origin,
    *,
    what: Sequence[str],
    results: Sequence[str],
    limits: Sequence[str],
) -> str:
    """The card of any network: what differs from one kind to the next is given in sentences; see `card` for the rest."""
    parts = {
        "What it is": _list(
            *what,
            f"Weights at the start: {'random' if config.weights == 'none' else code(config.weights)}.",
            f"Weights now: sha256 `{origin.sha256}`." if origin.sha256 else "",
        ),
        "What it was trained on": _list(
            f"{code(data.name)}: {data.train:,} pictures to train on, {data.test:,} to test on.",
            *(f"Fingerprint ({split}): `{digest}`." for split, digest in data.fingerprints.items()),
            f"License of the pictures: {data.license or 'not stated'}.",
        ),
        "How it was made": f"{_block(origin.command, 'console')}\n{_block(config.toml(), 'toml')}",
        "What it reaches": _list(
            *results,
            f"Training: {reached.epochs:g} epochs, {reached.steps:,} steps, {reached.seconds / 60:,.1f} minutes, "
            f"{reached.images_per_second:,.0f} images/s.",
            f"Machine: {printable(reached.machine)}.",
            f"Software: {', '.join(f'{name} {number}' for name, number in origin.versions.items())}.",
        ),
        "Limits": _list(*limits),
        "License": f"{origin.license or 'Not stated.'}\n",
    }
    return f"# {title}\n" + "".join(f"\n## {head}\n\n{body}" for head, body in parts.items())


def counted(cost: Cost) -> str:
    """What a network costs, in a sentence."""
    return f"{cost.parameters:,} parameters" + (
        f"; {cost.macs / 1e6:,.1f} M multiply-accumulates for an image (convolutions, matrix products, attention)."
        if cost.macs
        else "; multiply-accumulates could not be counted."
    )


def wilson(share: float, count: int) -> tuple[float, float]:
    """95 % interval of a share of independent cases, within [0, 1].

    Args:
        share: From 0 to 1.
        count: Of cases, 1 or more.

    Returns:
        Lower and upper end.

    Reference:
        Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", JASA 1927.
    """
    z2 = NormalDist().inv_cdf(0.975) ** 2 / count
    middle, half = share + z2 / 2, (z2 * share * (1 - share) + z2**2 / 4) ** 0.5
    return max(0.0, (middle - half) / (1 + z2)), min(1.0, (middle + half) / (1 + z2))


def percent(share: float) -> str:
    """A share as text, with two digits."""
    return f"{100 * share:.2f} %"


def _list(*lines: str) -> str:
    return "".join(f"- {line}\n" for line in lines if line)


def _first(names: Sequence[str], most: int = 100) -> str:
    more = len(names) - most
    return ", ".join(map(code, names[:most])) + (f" and {more:,} more" if more > 0 else "")


def code(name: str) -> str:
    """A name as it is, between more backticks than it has in a row."""
    text = printable(name)
    ticks = _ticks(text, 1)
    edge = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{ticks}{edge}{text}{edge}{ticks}"


def _block(text: str, language: str) -> str:
    ticks = _ticks(text, 3)
    return f"{ticks}{language}\n{text.strip()}\n{ticks}\n"


def _ticks(text: str, fewest: int) -> str:
    return "`" * max(fewest, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
