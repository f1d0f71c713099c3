"""Forward passes whose output is a sum of terms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from visattn.core.capturing import record
from visattn.core.capturing.linear.frozen import FrozenNorms
from visattn.core.capturing.linear.mode import OtherOperations
from visattn.core.families import describe
from visattn.core.methods.selection import NOTHING
from visattn.core.records import Recording
from visattn.errors import NoAttentionCaptured

__all__ = ["frozen_norms", "with_terms"]

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
        OtherOperations: If the operations of two passes differ again.
        NoAttentionCaptured: If the model has no attention.
    """
    description = describe(model, None, 0)
    # a plain pass keeps the same, as tensors that are kept change which others share their memory
    kept: Any = {"layers": "*", "values": True, "features": "none", "gradients": True, "gates": False}
    for left in (2, 1, 0):
        try:
            with torch.enable_grad(), record(model, description, **kept, terms=True) as recording:
                output = run()
            break
        except OtherOperations:
            if not left:
                raise
        with torch.enable_grad(), record(model, description, **kept):
            run()
    if not len(recording):
        raise NoAttentionCaptured(f"{type(model).__name__}: method 'contributions' does not apply: {NOTHING}")
    return recording, output


@contextmanager
def frozen_norms(recording: Recording) -> Iterator[None]:
    """Freeze the normalizations that a score does itself, inside the `with` block, and name them in the terms of a recording."""
    with FrozenNorms() as norms:
        yield
    if norms.ran and recording.terms is not None:
        recording.terms = replace(recording.terms, frozen=(*recording.terms.frozen, "the length of the embedding in the target"))
