"""Comparison of attention variants that trains every run itself."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from visattn._support.checks import printable
from visattn._support.notes import warn
from visattn._support.tables import Row
from visattn.errors import OptionError
from visattn.training.config import Config
from visattn.training.loop import train
from visattn.training.report.comparison import compare
from visattn.training.report.run_files import machine
from visattn.training.tasks.beginning import going_on, run_of
from visattn.training.tasks.classification import blueprint_of


def compare_runs(config: Config, run: Path, variants: Sequence[str], seeds: int, *, quiet: bool = True) -> list[Row]:
    """Train every variant with every seed into one folder, or resume that; see `compare`.

    Returns:
        The rows of the table.

    Raises:
        OptionError: If the runs would begin with the weights of a run that has attention.
        VisattnError: If `compare` or `train` raises one.
    """
    begun = run_of(config)
    if begun is not None and begun.attention != "none":
        raise OptionError(
            f"{printable(config.weights)}: the network of the run has {begun.attention}, which every variant would continue with. Begin "
            "with weights of a network without attention."
        )
    config = going_on(config, begun)
    blueprint = blueprint_of(config, run=begun)

    def trained(recipe: Config, folder: Path) -> None:
        result = train(recipe, folder, quiet=quiet)
        for message in result.bad:
            warn(message)
        if result.stopped:
            signal.raise_signal(result.stopped)  # the signal was meant for the whole comparison

    return compare(
        config,
        run,
        variants,
        seeds,
        train=trained,
        build=lambda recipe: blueprint_of(recipe, like=blueprint).build(),
        shape=(blueprint.channels, *blueprint.size),
        machine=machine(),
    )
