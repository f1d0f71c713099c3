"""Targets that name numbers of an output: `class:K`, `label:K`, `output:N` and `text:WORDS`.

`class:K` is one class of several, as an index or a name alone. `label:K` is a label that is true or not, whatever the others are;
`label:A,B` is the sum of several. `output:N` is one number of the output, of which nothing is known, and `output:-N` the same number
with the other sign: what makes it smaller. `text:WORDS` is the similarity to a text, as `prompt` is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from visattn._support import nested
from visattn._support.checks import printable
from visattn._support.language import option, worded
from visattn.core.pipeline import class_names, prompts
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.output_places import Place, Score, check_plain
from visattn.core.pipeline.outputs import tensor_of
from visattn.core.pipeline.targets import Target
from visattn.errors import OptionError, ShapeError

_NUMBER = re.compile(r"([+-]?)\s*(\d{1,9})")


def completed(model: nn.Module, prepared: Prepared, target: Target) -> tuple[Prepared, Target]:
    """Return a target that names numbers of the output as a class, a label, or a function of the output.

    Args:
        model: The model.
        prepared: The preprocessed photo.
        target: The target, with the class names if they are known.

    Returns:
        The photo, with the tokens of a text, and the target.

    Raises:
        OptionError: If the text is malformed, or does not fit `task`, `versus` or `target_space`.
    """
    assert target.named is not None  # noqa: S101 - the step was looked up by it
    kind, which = target.named
    if not which or (kind == "label" and "" in map(str.strip, which.split(",")) and not _is_one(which, target.labels)):
        there = f" There are: {class_names.listed(target.labels)}." if target.labels and kind in ("class", "label") else ""
        raise OptionError(f"target {kind}:{printable(which)} names nothing.{there} {_EXAMPLES[kind]}")
    if kind == "text":
        return prompts.completed(model, prepared, replace(target, of=None, prompt=which))
    if kind == "class":
        return prepared, replace(target, of=which)
    if kind == "label":
        if target.task not in (None, "multi_label"):
            raise OptionError(
                f"target label:{printable(which)} names a label, and the outputs are stated as '{target.task}'. Leave one out."
            )
        target, several = replace(target, task="multi_label"), [one.strip() for one in which.split(",")]
        if len(several) == 1 or _is_one(which, target.labels):
            return prepared, replace(target, of=which)
        if target.versus is not None:
            raise OptionError(
                f"target label:{printable(which)} is a sum of labels, which has no versus. Leave {option('versus')} out."
            )
        return prepared, _sum_of(several, target)
    check_plain(target)
    return prepared, replace(target, of=Place(lambda output: _of_number(output, which)))


_EXAMPLES = {
    "class": f"Examples: {option('target', 'class:3')}, {option('target', 'class:tabby')}.",
    "label": f"Examples: {option('target', 'label:3')}, {option('target', 'label:cat,dog')}.",
    "output": f"Examples: {option('target', 'output:0')}, {option('target', 'output:-0')}.",
    "text": f"Example: {option('target', 'text:a photo of a cat')}.",
}


def _is_one(which: str, labels: Sequence[str] | None) -> bool:
    """Check whether a text with commas is the name of one label."""
    return labels is not None and which.lower() in (label.lower() for label in labels)


def _sum_of(which: Sequence[str], target: Target) -> Target:
    """Return the sum of the scores of several labels, each found as if it were asked for alone."""
    each = [replace(target, of=one) for one in which]

    def settled(output: Any) -> Score:  # noqa: ANN401
        found = [one.resolve(output) for one in each]
        names = [one.names[0] for one in found]
        if twice := [name for number, name in enumerate(names) if name in names[:number]]:
            once = ", ".join(dict.fromkeys(names))
            raise OptionError(f"target label:{printable(','.join(which))} names {twice[0]} twice. Name each label once: {once}.")
        described = " + ".join(one.texts[0].partition(" = ")[0] for one in found)
        total = sum(float(one.scores[0]["score"]) for one in found)
        return Score(
            lambda output: sum((one.score(output) for one in found[1:]), found[0].score(output)), f"{described} = {total:.3g}"
        )

    return replace(target, of=Place(settled), target_space="logit")


def _of_number(output: Any, which: str) -> Score:  # noqa: ANN401
    numbers, parts = _numbers(output), _NUMBER.fullmatch(which)
    last = numbers.shape[1] - 1
    if parts is None or int(parts[2]) > last:
        raise OptionError(
            f"the output has {last + 1} number{'s' * (last > 0)} for each image, and output:{printable(which)} is not among them. "
            f"Pass {'output:0' if last == 0 else f'output:0 to output:{last}'}, or with a minus, output:-{last}, for what makes it smaller."
        )
    sign, number = -1 if parts[1] == "-" else 1, int(parts[2])
    told = f"{'minus ' * (sign < 0)}output {number} = {sign * float(numbers[0, number].detach()):.3g}"
    return Score(lambda output: sign * _numbers(output)[:, number], told)


def _numbers(output: Any) -> Tensor:  # noqa: ANN401
    """Return the numbers of an output, `(B, k)`; one number for each image may come without an axis of its own."""
    numbers = tensor_of(output, "logits")
    if numbers is not None and numbers.ndim == 1:
        numbers = numbers[:, None]
    if numbers is None or numbers.ndim != 2 or not numbers.is_floating_point():
        shape = nested.described(output) if numbers is None else f"{tuple(numbers.shape)} of {numbers.dtype}"
        raise ShapeError(
            f"target output:N needs outputs (B, k) or (B,) of floating-point numbers, the model returned {shape}. "
            + worded("Pass a function of its output as target.", "Choose another target.")
        )
    return numbers
