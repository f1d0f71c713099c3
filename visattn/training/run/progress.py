"""How far a run is: what a checkpoint holds beside the learner and the random streams."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

_MOST = 2**63


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        step: Steps of the optimizer.
        seen: Pictures.
        losses: Since the last row of the log.
        skipped: Steps in a row that were left out.
        bad: Messages about pictures, in the order in which they were met.
    """

    step: int = 0
    seen: int = 0
    losses: list[float] = field(default_factory=list)
    skipped: int = 0
    bad: dict[str, None] = field(default_factory=dict)

    @staticmethod
    def of(step: int, facts: dict[str, Any], rank: int, world: int) -> Progress:
        """Return the progress that the facts of a state tell of, for one of so many processes.

        Raises:
            KeyError: If a fact is missing.
            ValueError: If one cannot be.
        """
        each, bad = facts["losses_of_each"], facts["bad"]
        if not (isinstance(each, list) and each and all(isinstance(own, list) and all(map(_number, own)) for own in each)):
            raise ValueError("'losses_of_each' must be lists of numbers")
        if not (isinstance(bad, list) and all(isinstance(message, str) for message in bad)):
            raise ValueError("'bad' must be a list of messages")
        losses = each[rank] if len(each) == world else list(map(statistics.fmean, zip(*each, strict=True)))
        return Progress(step, count(facts, "seen"), list(map(float, losses)), count(facts, "skipped"), dict.fromkeys(bad))


def count(facts: dict[str, Any], name: str) -> int:
    """Return a fact that is how many.

    Raises:
        KeyError: If it is missing.
        ValueError: If it is no such number.
    """
    value = facts[name]
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"'{name}' must be a whole number, 0 or more")
    return value


def _number(value: object) -> bool:
    """Whether a value is a loss; one that diverged is infinite or none."""
    return type(value) is float or (type(value) is int and abs(value) < _MOST)
