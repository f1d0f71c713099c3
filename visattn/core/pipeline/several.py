"""Whether a model takes several images together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from visattn.core.pipeline.apart import apart, known_apart
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.passes import answer_of
from visattn.errors import ModelError

__all__ = ["takes_several"]


def takes_several(model: nn.Module, pixels: Tensor, output: Any, prepared: Prepared) -> bool:  # noqa: ANN401 - a model's own
    """Check that a model gives an image among others the output that it gave it alone, with the photo behind its negative."""
    if (known := known_apart(model, pixels)) is not None:
        return known
    pair = torch.cat([-pixels, pixels])
    try:
        together = answer_of(model, pair, prepared)
    except ModelError:  # it takes one image only
        return False
    return apart(model, pair, together, lambda: output)
