"""Model card of a run: model, training data, training procedure, results and limits.

A card is a function of plain facts. Missing facts are stated as unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from visattn._support.checks import printable
from visattn._support.reprs import in_pixels
from visattn.training.config import Config, Recipe
from visattn.training.report.costs import Cost


@dataclass(frozen=True)
class Data:
    """Training and test data of a network.

    Attributes:
        name: Name of a folder or of a known dataset.
        classes: Names of the classes.
        train: Number of training images.
        test: Number of test images.
        fingerprints: sha256 of each split, by its name.
        license: License of the images; empty if unknown.
        meaning: What the classes are, where their names do not say it.
    """

    name: str
    classes: Sequence[str]
    train: int
    test: int
    fingerprints: Mapping[str, str]
    license: str = ""
    meaning: str = ""


@dataclass(frozen=True)
class Achieved:
    """Results of a run, its duration and its machine.

    Attributes:
        accuracy: Accuracy on the test images, from 0 to 1; for captioners, accuracy of the words.
        loss: Mean cross-entropy on the test images, in nats; for captioners, per word.
        epochs: Number of epochs trained.
        steps: Number of optimizer steps.
        seconds: Training time.
        images_per_second: Training throughput.
        machine: Description of the machine.
        top5: Share of the test images whose class is among the first five; None if there are no more classes.
    """

    accuracy: float
    loss: float
    epochs: float
    steps: int
    seconds: float
    images_per_second: float
    machine: str
    top5: float | None = None


@dataclass(frozen=True)
class Origin:
    """Command, software and weights of a network.

    Attributes:
        command: Command that trained it.
        versions: Versions of the libraries, by name.
        sha256: sha256 of the weights file.
        license: License of the weights.
        commit: Commit of visattn's source; empty if unknown.
    """

    command: str
    versions: Mapping[str, str]
    sha256: str = ""
    license: str = ""
    commit: str = ""


def card(
    config: Config,
    data: Data,
    reached: Achieved,
    origin: Origin,
    *,
    cost: Cost,
    shape: tuple[int, int, int],
    limits: Sequence[str] = (),
) -> str:
    """Return the model card of a classifier as Markdown. It depends only on the arguments.

    Args:
        config: Settings of the run.
        data: Training and test data.
        reached: Results.
        origin: Command, software and weights.
        cost: Cost of the network; 0 multiply-accumulates if they could not be counted.
        shape: `(channels, height, width)` of the input.
        limits: Further sentences for the section on limits.

    Returns:
        The page. Names given by the user are set in backticks, on one line.
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
            f"An image classifier: {'gray' if channels == 1 else 'color'} images of {in_pixels((height, width))} pixels, "
            f"{len(data.classes)} classes: {_first(data.classes)}.",
            data.meaning,
            f"Network: {code(config.model)}, "
            + ("plain." if config.attention == "none" else f"with attention modules `{config.attention}`."),
            counted(cost),
        ),
        results=(
            f"Test accuracy: {percent(reached.accuracy)}, 95 % confidence interval {percent(low)} to {percent(high)}.",
            *([] if reached.top5 is None else [f"Top-5 test accuracy: {percent(reached.top5)}."]),
            f"Test loss: {reached.loss:.4f} nats.",
        ),
        limits=(
            f"One run, with seed {config.seed}. The interval (Wilson) covers the choice of test images only; the accuracy with another "
            "seed may lie outside it.",
            "Measured on the test images above only. Performance on other data or other image sizes is unknown.",
            "The model predicts one of its classes for every image, whatever the image shows.",
            *limits,
        ),
    )


def page(
    title: str,
    config: Recipe,
    data: Data,
    reached: Achieved,
    origin: Origin,
    *,
    what: Sequence[str],
    results: Sequence[str],
    limits: Sequence[str],
) -> str:
    """Return the model card of any network as Markdown. The sentences that depend on the task are arguments; see `card`."""
    parts = {
        "Model details": _list(
            *what,
            f"Initial weights: {'random' if config.weights == 'none' else code(config.weights)}.",
            f"Final weights: sha256 `{origin.sha256}`." if origin.sha256 else "",
        ),
        "Training data": _list(
            f"{code(data.name)}: {data.train:,} training images, {data.test:,} test images.",
            *(f"Fingerprint ({split}): `{digest}`." for split, digest in data.fingerprints.items()),
            f"License of the images: {data.license or 'not stated'}.",
        ),
        "Training procedure": f"{_block(origin.command, 'console')}\n{_block(config.toml(), 'toml')}",
        "Evaluation results": _list(
            *results,
            f"Training: {reached.epochs:g} epochs, {reached.steps:,} steps, {reached.seconds / 60:,.1f} minutes, "
            f"{reached.images_per_second:,.0f} images/s.",
            f"Machine: {printable(reached.machine)}.",
            f"Software: {', '.join(f'{name} {number}' for name, number in origin.versions.items())}.",
            f"Commit of visattn: {f'`{origin.commit}`' if origin.commit else 'not known'}.",
        ),
        "Limits": _list(*limits),
        "License": f"{origin.license or 'Not stated.'}\n",
    }
    return f"# {title}\n" + "".join(f"\n## {head}\n\n{body}" for head, body in parts.items())


def counted(cost: Cost) -> str:
    """Format the cost of a network as a sentence."""
    return f"{cost.parameters:,} parameters" + (
        f"; {cost.macs / 1e6:,.1f} M multiply-accumulates per image (convolutions, matrix products, attention)."
        if cost.macs
        else "; multiply-accumulates could not be counted."
    )


def wilson(share: float, count: int) -> tuple[float, float]:
    """Compute the 95 % Wilson confidence interval of a proportion.

    Args:
        share: Observed proportion, from 0 to 1.
        count: Number of independent cases, 1 or more.

    Returns:
        Lower and upper end, within [0, 1].

    Reference:
        Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", JASA 1927.
    """
    z2 = NormalDist().inv_cdf(0.975) ** 2 / count
    middle, half = share + z2 / 2, (z2 * share * (1 - share) + z2**2 / 4) ** 0.5
    return max(0.0, (middle - half) / (1 + z2)), min(1.0, (middle + half) / (1 + z2))


def percent(share: float) -> str:
    """Format a share as percent with two decimals."""
    return f"{100 * share:.2f} %"


def _list(*lines: str) -> str:
    return "".join(f"- {line}\n" for line in lines if line)


def _first(names: Sequence[str], most: int = 100) -> str:
    more = len(names) - most
    return ", ".join(map(code, names[:most])) + (f" and {more:,} more" if more > 0 else "")


def code(name: str) -> str:
    """Format a name as Markdown code, in more backticks than its longest run of backticks."""
    text = printable(name)
    ticks = _ticks(text, 1)
    edge = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{ticks}{edge}{text}{edge}{ticks}"


def _block(text: str, language: str) -> str:
    ticks = _ticks(text, 3)
    return f"{ticks}{language}\n{text.strip()}\n{ticks}\n"


def _ticks(text: str, fewest: int) -> str:
    return "`" * max(fewest, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
