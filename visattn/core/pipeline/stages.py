"""Explanations of a photo by each stage of a CNN, and their figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

from torch import nn

from visattn._support.language import worded
from visattn._support.modes import in_own_modes
from visattn._support.options import with_options
from visattn._support.typed import typed
from visattn.core.drawing.pages import sheet
from visattn.core.drawing.pictures import Picture, carrying
from visattn.core.drawing.sheets import Panels
from visattn.core.drawing.style import Style
from visattn.core.drawing.style_options import PAGE, StyleOptions
from visattn.core.families.feature_maps import stages
from visattn.core.methods import METHODS
from visattn.core.methods.method_table import MethodName
from visattn.core.pipeline.explaining import ask_about
from visattn.core.pipeline.explanation import DrawOptions, Explanation
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.preprocessing import PreprocessingOptions
from visattn.core.pipeline.question import Question, parameter_names
from visattn.core.pipeline.running import explained
from visattn.core.pipeline.targets import TargetOptions
from visattn.errors import OptionError

__all__ = ["by_stages", "explain_stages", "stage_page"]


def _arguments() -> list[str]:
    return [*parameter_names(), "target", "pixels", "inputs", "weights", "seed", "device"]


@with_options(PreprocessingOptions, TargetOptions, DrawOptions, more=_arguments)
@typed(but=("method",))
@in_own_modes
def explain_stages(
    model: nn.Module | str,
    image: Any = None,  # noqa: ANN401
    *,
    method: MethodName | str = "gradcam",
    layers: Sequence[str] = (),
    **options: Any,  # noqa: ANN401 - arguments of `explain`
) -> list[Explanation]:
    """Explain an image by the feature maps of each stage of a CNN; `stage_page` draws them in one figure.

    The feature maps of the last layer show where evidence lies when it is summed. That need not be where the network found it: gates and
    large receptive fields carry evidence to other cells. Earlier stages show where it was.

    Args:
        model: See `visattn.explain`.
        image: See `visattn.explain`.
        method: Grad-CAM, or another method that reads the feature maps of one layer.
        layers: Dotted names of layers. By default the modules that output the last feature map of each size.
        options: Other arguments of `visattn.explain`.

    Returns:
        An explanation for each layer, from the first to the last. The model runs for each again.

    Raises:
        OptionError: If the method does not read feature maps of a layer, or the stages cannot be found.
        VisattnError: Any error of `visattn.explain`.
    """
    if "layer" in options:
        raise OptionError("several layers are named by layers=[...]; leave it out for all stages.")
    bare, prepared, asked = ask_about(model, image, method, **options)
    return by_stages(bare, prepared, asked.question, layers, seed=asked.seed)


@in_own_modes
def by_stages(
    model: nn.Module, prepared: Prepared, question: Question, layers: Sequence[str] = (), *, seed: int = 0
) -> list[Explanation]:
    """Explain one preprocessed photo by the feature maps of several layers; see `explain_stages`.

    Raises:
        OptionError: If the method does not read feature maps of a layer, or the stages cannot be found.
        VisattnError: The errors of `explain` after preprocessing.
    """
    if question.method is None or "cam layer" not in question.method.needs:
        able = ", ".join(name for name, method in METHODS.items() if "cam layer" in method.needs)
        raise OptionError(f"method '{question.name}' does not read the feature maps of a layer. Methods that do: {able}.")
    _, channels, height, width = prepared.pixels.shape
    keyword = prepared.spec_of(model).keyword
    names = list(layers) or stages(model, channels, (height, width), prepared.inputs, keyword)
    if not names:
        raise OptionError(
            f"{type(model).__name__}: the stages of a CNN were not found. Name "
            + worded("layers: layers=['...'].", "one: --layer NAME.")
        )
    questions = [replace(question, parameters={**question.parameters, "layer": name}) for name in names]
    return [explained(model, [prepared], question_of_layer, seed=seed)[0] for question_of_layer in questions]


@with_options(StyleOptions)
@typed()
def stage_page(explanations: Sequence[Explanation], *, panel: int = 224, **style: Unpack[StyleOptions]) -> Picture:
    """Draw the explanations of one photo by several layers, one panel each, on its own color scale.

    Args:
        explanations: Explanations with one map each, from `explain_stages`.
        panel: Width of a panel in pixels.
        style: See `visattn.drawing.Style`. By default `opacity` is 0.6, `blend` is `constant` and `interpolation` is `nearest`, which
            shows every cell.

    Returns:
        The figure, with the layer above each panel, and below it the size and the range of its map. PNG files of it store its
        provenance.

    Raises:
        OptionError: If there is no explanation.
    """
    if not explanations:
        raise OptionError("a figure needs at least one explanation, got none.")
    chosen = Style(**PAGE | style).opaque()
    panels = [
        Panels(explanation.photo, explanation.panel, explanation.geometry, panel=panel, shared_axes=(), style=chosen, ranges=True)
        for explanation in explanations
    ]
    layers = [explanation.map.facts.layer for explanation in explanations]
    sizes = [" x ".join(map(str, explanation.map.layout.grid)) for explanation in explanations]
    drawn = [each.cell() for each in panels]
    cells = [
        replace(cell, caption=f"{size} cells\n{cell.caption}", heading=layer)
        for cell, size, layer in zip(drawn, sizes, layers, strict=True)
    ]
    facts = explanations[-1].provenance
    warned = [f"warning: {text}" for explanation in explanations for text in explanation.provenance.warnings]
    notes = list(dict.fromkeys([*facts.target[:1], *warned]))
    page = sheet([cells], panel=panel, title=facts.title, notes=notes, bar=panels[-1].bar())
    return carrying(page, panels[-1].provenance(layers=layers).but(parameters={**facts.parameters, "layer": layers}))
