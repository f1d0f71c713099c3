"""A comparison of trainings that are run here."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from visattn._tables import Row
from visattn.training._compare import compare
from visattn.training._config import Config
from visattn.training._loop import blueprint_of, train


def compare_runs(config: Config, run: Path, variants: Sequence[str], seeds: int, *, quiet: bool = True) -> list[Row]:
    """Train all variants from all seeds into one folder; see `compare`.

    Returns:
        The rows of the table.

    Raises:
        VisattnError: As `compare` and `train` do.
    """
    blueprint = blueprint_of(config)
    return compare(
        config,
        run,
        variants,
        seeds,
        train=lambda recipe, folder: train(recipe, folder, quiet=quiet),
        build=lambda recipe: blueprint_of(recipe, like=blueprint).build(),
        shape=(blueprint.channels, *blueprint.size),
        machine=machine(),
    )


def machine() -> str:
    """What trains here, in words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
