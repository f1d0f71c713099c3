"""Forward passes whose output is a sum of terms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from visattn._support.modes import evaluating
from visattn._support.nested import leaves
from visattn.core.capturing import record
from visattn.core.capturing.linear.frozen import FrozenNorms
from visattn.core.capturing.linear.mode import OtherOperations
from visattn.core.families import describe
from visattn.core.methods.from_attention.contributions import refusal
from visattn.core.methods.selection import NOTHING
from visattn.core.pipeline.captures import capture
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.passes import answer_of, as_the_model
from visattn.core.records import Recording
from visattn.errors import NoAttentionCaptured, VisattnError

T = TypeVar("T")


def with_terms(model: nn.Module, run: Callable[[], T]) -> tuple[Recording, T]:
    """Run a model on one image with a linear graph, so that scores are sums of terms; see `Recording.terms`.

    Args:
        model: The model.
        run: Function that runs it, without a graph of its own. The first call for a model ends early and is made again after a plain pass,
            which tells which calls are linear; once more if the next one differs, as when the model has cached what it computed.

    Returns:
        The recording, and what `run` returned.

    Raises:
        CaptureError: If the operations of two passes differ again.
    """
    description = describe(model, None, 0)
    for left in (2, 1, 0):
        try:
            with (
                torch.enable_grad(),
                record(
                    model, description, layers="*", values=True, features="none", gradients=True, gates=False, terms=True
                ) as recording,
            ):
                output = run()
            break
        except OtherOperations:
            if not left:
                raise
        with torch.no_grad(), capture(model, features="none", gates=False):
            run()
    return recording, output


@contextmanager
def frozen_norms(recording: Recording) -> Iterator[None]:
    """Freeze the normalizations that a score does itself, inside the `with` block, and name them in the terms of a recording."""
    with FrozenNorms() as norms:
        yield
    if norms.ran and recording.terms is not None:
        recording.terms = replace(recording.terms, frozen=(*recording.terms.frozen, "the length of the embedding in the target"))


def terms_refusal(model: nn.Module, prepared: Prepared) -> str | None:
    """Return why the first number of the model's output is no sum of direct contributions, or None if it is."""
    with evaluating(model, frozen=True):
        try:
            recording, output = with_terms(model, lambda: answer_of(model, as_the_model(model, prepared.pixels), prepared))
        except NoAttentionCaptured:
            return NOTHING
        except VisattnError as error:
            return str(error)
        numbers = [leaf for _, leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not numbers:
            return "the output does not depend on the image through layers that are linear."
        with torch.enable_grad():
            return refusal(recording.gradients(numbers[0].flatten()[0]))
