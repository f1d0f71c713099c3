"""Recordings of everything that a method needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from visattn._support.faces import Later
from visattn._support.language import option, worded
from visattn.core.families import cam_layer
from visattn.core.methods import METHODS, Method
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.passes import Pass, Run, answer_of, as_the_model, one_pass, with_readout
from visattn.core.pipeline.question import Question
from visattn.core.pipeline.targets import NoClasses, Target
from visattn.errors import NoAttentionCaptured, OptionError

if TYPE_CHECKING:
    from visattn.core.families import feature_maps as feature_maps_of
    from visattn.core.pipeline import evidence_layers, structure
else:
    feature_maps_of = Later("visattn.core.families.feature_maps")
    evidence_layers, structure = (Later(f"{__package__}.{name}") for name in ("evidence_layers", "structure"))

__all__ = ["last_map", "layer_of_cam", "recorded"]


def recorded(model: nn.Module, prepared: Prepared, question: Question, run: Run = one_pass) -> tuple[Question, Pass]:
    """Choose the method if it is `auto`, and run a pass that records everything it needs, by `one_pass` or as `run` does."""
    settled, passed = _recorded(model, prepared, question, run)
    asks = settled.method is not None and "query" in settled.method.parameters
    if not asks or settled.parameters.get("query", "auto") not in ("auto", "read"):
        return settled, passed
    return settled, passed._replace(recording=with_readout(model, prepared, passed.recording))


def _recorded(model: nn.Module, prepared: Prepared, question: Question, run: Run) -> tuple[Question, Pass]:
    if question.method is not None:
        return _wanted(model, prepared, question, question.method, run)
    explainable = prepared.spec_of(model).classifier and question.target.task != "embedding"
    if question.of_a_class or (set(question.among) != {"attention"} and explainable):
        layer = question.parameters.get("layer")
        named = isinstance(layer, str) and layer != "all"
        cam_layer_name = str(layer) if named else _likely_layer(model, prepared, question.target)
        try:
            passed = run(model, prepared, target=question.target, features="none" if cam_layer_name is None else [cam_layer_name])
        except NoClasses:
            if question.of_a_class:
                raise
        else:
            settled = question.settled(passed.recording)
            if (
                cam_layer_name is not None
                and layer is None
                and settled.method is not None
                and "cam layer" in settled.method.needs
            ):
                settled = at_layer(settled, cam_layer_name)
            if layer == "all" and settled.method is not None and "cam layer" in settled.method.needs:
                raise OptionError(
                    "feature maps of all layers are drawn by a method that is named: "
                    + worded(f"visattn.explain_stages(..., method='{settled.name}').", f"--method {settled.name} --layer all.")
                )
            return settled, passed
    last = question.among[-1]  # no class can be explained
    return Question(last, METHODS[last], question.parameters, question.target), run(model, prepared)


def at_layer(question: Question, layer: str) -> Question:
    """Return a question about one layer."""
    return replace(question, parameters={**question.parameters, "layer": layer})


def layer_of_cam(model: nn.Module, prepared: Prepared, parameters: Mapping[str, Any], target: Target | None = None) -> str:
    """Return the layer for class activation maps: the given one, else the model family's, else that of the last feature map.

    If no dry run tells which that is, or the `target` is a place in the output, it is the one that the target is computed from.

    Raises:
        OptionError: If the layer is unknown.
    """
    layer = parameters.get("layer", -1)
    if isinstance(layer, str):
        return layer
    name = last_map(model, prepared) if layer == -1 and not _is_place(target) else None
    return name or evidence_layers.layer_or_refusal(model, prepared, target)


def _likely_layer(model: nn.Module, prepared: Prepared, target: Target) -> str | None:
    """Return the layer for class activation maps; None where attention is likely to do, or none is found."""
    if _is_place(target):
        return evidence_layers.layer_behind(model, prepared, target)
    return last_map(model, prepared, search=False)


def _is_place(target: Target | None) -> bool:
    return target is not None and getattr(target.of, "on_image", False)


def last_map(model: nn.Module, prepared: Prepared, *, search: bool = True) -> str | None:
    """Return the layer for class activation maps: the family's, else the last feature map, else the input of the last attention."""
    _, channels, height, width = shape = prepared.pixels.shape
    inputs, keyword = prepared.inputs, prepared.spec_of(model).keyword
    name = cam_layer(model) or feature_maps_of.last_feature_map(model, channels, (height, width), inputs, keyword)
    if name is not None or not search:
        return name
    return structure.before_last_attention(
        model, lambda: answer_of(model, as_the_model(model, prepared.pixels), prepared), (*shape, keyword)
    )


def _wanted(model: nn.Module, prepared: Prepared, question: Question, method: Method, run: Run) -> tuple[Question, Pass]:
    layer, needs = question.parameters.get("layer", -1), method.wants(question.parameters)
    features: str | list[str] = "none" if needs & {"gates", "glimpses"} else "last"
    features = "positions" if "positions" in needs else features
    if "cam layer" in needs:
        if layer == -1 or isinstance(layer, str):
            question = at_layer(question, layer_of_cam(model, prepared, question.parameters, question.target))
            features = [str(question.parameters["layer"])]
        else:
            features = "all"
    elif "features" in needs:
        features = "last" if layer == -1 else "all"
    try:
        return question, run(
            model,
            prepared,
            target=question.target if method.targeted else None,
            each_layer="layer gradients" in needs,
            values="values" in needs,
            gates="gates" in needs,
            terms="terms" in needs,
            features="all" if "layer gradients" in needs else features,
        )
    except NoAttentionCaptured as nothing:
        if "cam layer" in needs and str(layer) in dict(model.named_modules()):  # the name of a part of an nn.Sequential
            return _wanted(model, prepared, at_layer(question, str(layer)), method, run)
        if "cam layer" in needs:
            raise OptionError(
                f"layer {layer} is an index of attention layers, and the model has none. Pass a layer name: {option('layer', 'NAME')}."
            ) from nothing
        if method.lacking is None:
            raise
        raise OptionError(method.lacking) from nothing
