"""One forward pass over several images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from visattn._support.modes import evaluating
from visattn.core.pipeline.apart import apart
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.passes import Pass, answer_of, as_the_model


def joined(prepared: Sequence[Prepared]) -> Prepared:
    """Return photos of one size as a batch."""
    return replace(
        prepared[0],
        pixels=torch.cat([one.pixels for one in prepared]),
        photos=tuple(one.photo for one in prepared),
        geometries=tuple(one.geometry for one in prepared),
    )


def keeps_apart(model: nn.Module, prepared: Sequence[Prepared], passed: Pass) -> bool:
    """Check that a pass over several images gave each what it gets alone.

    It did if all attention could be placed, which the images of a batch may prevent, and if the model keeps them `apart`.

    Args:
        model: The model.
        prepared: The photos, of one size.
        passed: The pass over all of them.
    """
    if any(record.reason is not None or record.operator.shape[0] != len(prepared) for record in passed.recording):
        return False
    pixels = as_the_model(model, torch.cat([one.pixels for one in prepared]))

    def alone() -> Any:  # noqa: ANN401 - a model's own
        with evaluating(model), torch.no_grad():
            return answer_of(model, pixels[-1:], prepared[-1])

    return apart(model, pixels, passed.output, alone)
