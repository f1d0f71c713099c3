"""Explanations of several pictures that a model receives together, and their figure on one color scale."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np
import torch
from torch import nn

from visattn._support.modes import in_own_modes
from visattn._support.options import with_options
from visattn._support.typed import typed
from visattn.core.drawing.pages import Cell, sheet
from visattn.core.drawing.pictures import Picture, carrying
from visattn.core.drawing.sheets import Panels
from visattn.core.drawing.style import Style
from visattn.core.drawing.style_options import PAGE, StyleOptions
from visattn.core.maps import value_range
from visattn.core.methods.method_table import MethodName
from visattn.core.pipeline.asking import asked_of, model_of
from visattn.core.pipeline.explanation import DrawOptions, Explanation
from visattn.core.pipeline.preprocessing import PreprocessingOptions
from visattn.core.pipeline.question import parameter_names
from visattn.core.pipeline.running import explained
from visattn.core.pipeline.targets import Of, TargetOptions
from visattn.core.pipeline.tensors import prepare_inputs
from visattn.errors import OptionError

__all__ = ["explain_pictures", "picture_page"]


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
        The explanation of each picture by its path; `picture_page` draws them. The model runs for each again.

    Raises:
        OptionError: If no picture is named, one is named twice, or a path names no picture.
        VisattnError: Any error of `visattn.explain`.
    """
    if isinstance(images, str) or not images or len({*images}) < len(images):
        raise OptionError(
            f"images must name one or more inputs, each once, got {images!r}. For example: images=['template', 'search']."
        )
    if drawing := [name for name in options if name in DrawOptions.__annotations__]:
        raise OptionError(f"{drawing[0]} is an option of the figure: picture_page(..., {drawing[0]}=...).")
    asked = asked_of(method, target, options, seed)
    bare, notes = model_of(model, asked.how, weights=weights, seed=seed, device=device)
    prepared = {name: prepare_inputs(inputs, name, bare, asked.how).with_notes(*notes) for name in images}
    return {name: explained(bare, [one], asked.question, seed=seed)[0] for name, one in prepared.items()}


@with_options(StyleOptions)
@typed()
def picture_page(explanations: Mapping[str, Explanation], *, panel: int = 224, **style: Unpack[StyleOptions]) -> Picture:
    """Draw the explanations of several pictures side by side, on one color scale with one color bar.

    Args:
        explanations: Explanations by the method of one forward pass, from `explain_pictures`.
        panel: Width of a panel in pixels.
        style: See `visattn.drawing.Style`. By default `opacity` is 0.6, `blend` is `constant` and `interpolation` is `nearest`, which
            shows every cell.

    Returns:
        The figure, with the input's path above each panel, and below it the range of its map. PNG files of it store its provenance.

    Raises:
        OptionError: If there is no explanation, or they have no common scale because they show different things.
    """
    _check_alike(explanations)
    chosen = Style(**PAGE | style).opaque()
    heats = [explanation.heatmap(chosen.interpolation) for explanation in explanations.values()]
    pooled = np.concatenate([heat.grid.ravel() for heat in heats])
    scale = value_range(pooled, chosen.normalize, heats[0].signed, holes=True)
    panels = [
        Panels(one.photo, one.panel, one.geometry, panel=panel, shared_axes=("picture",), style=chosen, scale=scale)
        for one in explanations.values()
    ]
    ranges = [f"{float(np.nanmin(heat.grid)):.2g} to {float(np.nanmax(heat.grid)):.2g}" for heat in heats]
    cells = [Cell(one.cell().picture, ends, name) for name, one, ends in zip(explanations, panels, ranges, strict=True)]
    every = [explanation.provenance for explanation in explanations.values()]
    told = [*every[0].target[:1], *(f"warning: {text}" for facts in every for text in facts.warnings)]
    page = sheet([cells], panel=panel, title=every[0].model, notes=list(dict.fromkeys(told)), bar=panels[0].bar())
    files = {name: facts.image for name, facts in zip(explanations, every, strict=True)}
    return carrying(page, panels[0].provenance(pictures=files))


def _check_alike(explanations: Mapping[str, Explanation]) -> None:
    """Check that maps can be drawn on one color scale.

    Raises:
        OptionError: If there are none, they are of several quantities, or one has several panels.
    """
    quantities = {name: explanation.map.meaning for name, explanation in explanations.items()}
    if len({*quantities.values()}) != 1:
        given = ", ".join(f"{name}: {quantity}" for name, quantity in quantities.items()) or "none"
        raise OptionError(f"maps on one scale must be of one quantity, got {given}. Name one method for all.")
    several = next((name for name, explanation in explanations.items() if explanation.panel.axes), None)
    if several is not None:
        raise OptionError(f"{several}: its map has several panels. Choose one: explanation.at(component=0).")
