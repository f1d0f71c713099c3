"""Progress of a run: the part of a checkpoint besides the trainer and the random number generators."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

_MOST = 2**63


@dataclass
class Progress:
    """Progress of a run.

    Attributes:
        step: Number of optimizer steps taken.
        seen: Number of training images processed.
        losses: Losses since the last row of the log.
        skipped: Number of consecutive steps with a nonfinite loss.
        bad: Messages about unreadable images, in order of occurrence.
    """

    step: int = 0
    seen: int = 0
    losses: list[float] = field(default_factory=list)
    skipped: int = 0
    bad: dict[str, None] = field(default_factory=dict)

    @staticmethod
    def of(step: int, facts: dict[str, Any], rank: int, world: int) -> Progress:
        """Restore the progress of process `rank` of `world` from the facts of a checkpoint.

        Raises:
            KeyError: If a fact is missing.
            ValueError: If a fact is invalid.
        """
        each, bad = facts["losses_of_each"], facts["bad"]
        if not (isinstance(each, list) and each and all(isinstance(own, list) and all(map(_number, own)) for own in each)):
            raise ValueError("'losses_of_each' must be lists of numbers")
        if not (isinstance(bad, list) and all(isinstance(message, str) for message in bad)):
            raise ValueError("'bad' must be a list of messages")
        losses = each[rank] if len(each) == world else list(map(statistics.fmean, zip(*each, strict=True)))
        return Progress(step, count(facts, "seen"), list(map(float, losses)), count(facts, "skipped"), dict.fromkeys(bad))


def count(facts: dict[str, Any], name: str) -> int:
    """Return a fact that must be a count.

    Raises:
        KeyError: If the fact is missing.
        ValueError: If it is not an integer of 0 or more.
    """
    value = facts[name]
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"'{name}' must be a whole number, 0 or more")
    return value


def _number(value: object) -> bool:
    """Check whether a value is a loss. A loss that diverged is infinite or NaN."""
    return type(value) is float or (type(value) is int and abs(value) < _MOST)
