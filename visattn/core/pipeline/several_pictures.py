"""Explanations of several pictures that a model receives together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from visattn._support.modes import in_own_modes
from visattn._support.options import with_options
from visattn._support.typed import typed
from visattn.core.methods.method_table import MethodName
from visattn.core.pipeline.asking import asked_of, model_of
from visattn.core.pipeline.explanation import DrawOptions, Explanation
from visattn.core.pipeline.preprocessing import PreprocessingOptions
from visattn.core.pipeline.question import parameter_names
from visattn.core.pipeline.running import explained
from visattn.core.pipeline.targets import Of, TargetOptions
from visattn.core.pipeline.tensors import prepare_inputs
from visattn.errors import OptionError

__all__ = ["explain_pictures"]


@with_options(PreprocessingOptions, TargetOptions, DrawOptions, more=parameter_names)
@typed(but=("weights", "method"))
@in_own_modes
def explain_pictures(
    model: nn.Module | str,
    inputs: Mapping[Any, Any],
    images: Sequence[str],
    *,
    method: MethodName | str = "auto",
    target: Of = None,
    weights: str | os.PathLike[str] = "auto",
    seed: int = 0,
    device: str | torch.device = "cpu",
    **options: Any,  # noqa: ANN401 - as in `explain`
) -> dict[str, Explanation]:
    """Explain each of several pictures that a model receives together, such as two views or a template and a search region.

    Args:
        model: See `visattn.explain`.
        inputs: See `visattn.explain`; the pictures are among them.
        images: Paths of the pictures, such as `template` or `views.1`.
        method: See `visattn.explain`.
        target: See `visattn.explain`.
        weights: See `visattn.load_model`; only if `model` is a name.
        seed: See `visattn.explain`.
        device: Device of a model that is given by name.
        options: See `visattn.explain`.

    Returns:
        The explanation of each picture by its path; `comparison_page` draws them. The model runs for each again.

    Raises:
        OptionError: If no picture is named, one is named twice, or a path names no picture.
        VisattnError: Any error of `visattn.explain`.
    """
    if isinstance(images, str) or not images or len({*images}) < len(images):
        raise OptionError(
            f"images must name one or more inputs, each once, got {images!r}. For example: images=['template', 'search']."
        )
    if drawing := [name for name in options if name in DrawOptions.__annotations__]:
        raise OptionError(f"{drawing[0]} is an option of the figure: comparison_page(..., {drawing[0]}=...).")
    asked = asked_of(method, target, options, seed)
    bare, notes = model_of(model, asked.how, weights=weights, seed=seed, device=device)
    prepared = {name: prepare_inputs(inputs, name, bare, asked.how).with_notes(*notes) for name in images}
    return {name: explained(bare, [one], asked.question, seed=seed)[0] for name, one in prepared.items()}
