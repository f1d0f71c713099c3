"""Classes by name, and texts that look like a kind of target and are none."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from visattn._support.checks import printable, suggest
from visattn._support.language import worded
from visattn._support.notes import note
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.targets import KINDS, Target
from visattn.errors import OptionError

_FORMS = {"class": "K", "label": "A,B", "output": "N", "text": "WORDS", "similar": "IMAGE", "pixel": "X,Y"}  # of others: N
_SHOWN = 8  # names in a message


def completed(_model: nn.Module, prepared: Prepared, target: Target) -> tuple[Prepared, Target]:
    """Return a target whose text has a colon, and begins with no kind of target, if it is the name of a class.

    Raises:
        OptionError: If it is none; the message lists the kinds of targets.
    """
    assert isinstance(target.of, str)  # noqa: S101 - the step was looked up by it
    if not any(_word(target.of).search(label.lower()) for label in target.labels or ()):
        kind, text = target.of.partition(":")[0].strip(), printable(target.of)
        near = suggest(kind.lower(), KINDS, 1)
        hint = f"; did you mean {near[0]}:{_FORMS.get(near[0], 'N')}?" if near else "."
        known = ", ".join(f"{name}:{_FORMS.get(name, 'N')}" for name in KINDS)
        raise OptionError(f"unknown kind of target '{printable(kind)}' in '{text}'{hint} Known: {known}; or a class alone.")
    return prepared, target


def index_of(named: str, labels: Sequence[str] | None, count: int, noun: str = "class") -> int:
    """Return the index of a class that is given by name.

    Args:
        named: The name, or one of several that a label has between commas; or a word of it, if no other label has that.
        labels: Names of the classes, if they are known.
        count: Number of classes.
        noun: What they are called.

    Raises:
        OptionError: If there is no such class, or several; the message lists the closest.
    """
    last = count - 1
    if labels is None:
        raise OptionError(
            f"{noun} names are unknown for this model, so '{printable(named)}' cannot be looked up. Pass an index from 0 to {last}, or the "
            "names: " + worded("labels=[...], or labels='imagenet'.", "--labels FILE, or --labels imagenet.")
        )
    names = [_names(label) for label in labels[:count]]
    matching = [index for index, several in enumerate(names) if named.strip().lower() in several]
    holding = [index for index, several in enumerate(names) if any(_word(named).search(name) for name in several)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        told = ", ".join(f"{index} ({printable(labels[index])})" for index in matching[:_SHOWN])
        raise OptionError(f"'{printable(named)}' matches several classes: {told}. Pass an index.")
    if len(holding) == 1:
        note(f"{noun} '{printable(named)}' is understood as {holding[0]} ({printable(labels[holding[0]])})")
        return holding[0]
    words = [min((name for name in names[index] if _word(named).search(name)), key=len) for index in holding[:_SHOWN]]
    near = words or suggest(named.strip().lower(), sorted(set().union(*names)))
    written = {part.strip().lower(): part.strip() for label in labels[:count] for part in (label, *label.split(","))}
    close = f"Close matches: {listed([written[name] for name in near])}" if near else f"There are: {listed(labels[:count])}"
    raise OptionError(f"unknown {noun} '{printable(named)}'. {close}. Pass one of them, or an index from 0 to {last}.")


def _names(label: str) -> set[str]:
    """Return the names that a label has, in lower case: the whole, and the parts between commas."""
    return {label.lower(), *(part.strip().lower() for part in label.split(","))}


def _word(named: str) -> re.Pattern[str]:
    return re.compile(rf"\b{re.escape(named.strip().lower())}\b")


def listed(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(printable, names[:_SHOWN])) + more
