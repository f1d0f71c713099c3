"""Comparison of a resumed run and its earlier results: the first kept image is explained anew."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import nn

from visattn._support.checks import printable
from visattn._support.language import flag
from visattn.batch.image_work import Work, sample_anew
from visattn.batch.journal import Journal
from visattn.batch.local_run import Ledger
from visattn.batch.map_samples import SAME, TOLERANCE, distance
from visattn.batch.settings import NUMBERS, differences
from visattn.errors import OutputError, VisattnError


def check_model(model: nn.Module, ledger: Ledger, journal: Journal, work: Work, *, accept: bool = False) -> Iterator[str]:
    """Compare the first kept image of a run with what the model computes now.

    Args:
        model: The model.
        ledger: Images of the run.
        journal: Journal of the run.
        work: Question, files and folders.
        accept: Whether another result is accepted, and noted in the journal.

    Yields:
        What the user should know: that other versions compute the same, or that a change was accepted.

    Raises:
        OutputError: If the model computes something else now, and that is not accepted.
    """
    yield from (f"accepted: {change}" for change in journal.changed)
    kept = ledger.first_kept()
    versions = differences(journal.before, journal.now) if journal.before else []
    made_by = f" ({', '.join(versions)})" if versions else ""
    tolerance = SAME if any(text.startswith(NUMBERS) for text in versions) else TOLERANCE
    if kept is None:
        return
    item, entry = kept
    shown = printable(item.source)
    try:
        other = distance(entry.sample, sample_anew(model, item, work.asked))
        how = f"differs by {other:.2g} of its largest value" if math.isfinite(other) else "has another form"
        change = f"the map of {shown} {how}"
    except VisattnError as error:
        other, change = math.inf, f"{shown} cannot be explained any more: {error}"
    if other <= tolerance:
        if versions:
            yield f"results of an earlier run are kept{made_by}: its first image is equal within {tolerance:g} of the largest value"
        return
    if not accept:
        raise OutputError(
            f"{printable(str(journal.path))}: the model computes something else now: {change}{made_by}. Choose another "
            f"folder{flag('output')}, or keep former results beside new ones{flag('accept_changes')}."
        )
    journal.accept([change])
    yield f"accepted: {change}{made_by}"
