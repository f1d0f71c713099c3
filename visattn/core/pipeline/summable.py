"""Whether the output of a model is a sum of direct contributions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from visattn._support.modes import evaluating
from visattn._support.nested import leaves
from visattn.core.methods.from_attention.contributions import refusal
from visattn.core.methods.selection import NOTHING
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.passes import answer_of, as_the_model
from visattn.core.pipeline.summing import with_terms
from visattn.errors import NoAttentionCaptured, VisattnError

__all__ = ["terms_refusal"]


def terms_refusal(model: nn.Module, prepared: Prepared) -> str | None:
    """Return why the first number of the model's output is no sum of direct contributions, or None if it is."""
    with evaluating(model, frozen=True):
        try:
            recording, output = with_terms(model, lambda: answer_of(model, as_the_model(model, prepared.pixels), prepared))
        except NoAttentionCaptured:
            return NOTHING
        except VisattnError as error:
            return str(error)
        tensors = [leaf for _, leaf in leaves(output) if isinstance(leaf, Tensor) and not leaf.is_meta]
        numbers = [tensor for tensor in tensors if tensor.requires_grad and tensor.numel()]
        if not numbers:
            return "the output does not depend on the image through layers that are linear."
        with torch.enable_grad():
            return refusal(recording.gradients(numbers[0].flatten()[0]))
