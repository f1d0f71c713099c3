"""The feature map that the score of a place in the output is computed from, found by its gradient: of detectors, for example."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from visattn._support.attempts import Attempt
from visattn._support.language import option
from visattn._support.modes import evaluating
from visattn._support.module_hooks import module_hooks
from visattn._support.nested import mapped
from visattn.core.families.forward_calls import is_image
from visattn.core.methods.taps import over_positions
from visattn.core.pipeline.captures import capture
from visattn.core.pipeline.gradient_graph import GradientGraph, Node
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.passes import answer_of, as_the_model
from visattn.core.pipeline.targets import Target
from visattn.core.records import FeatureRecord
from visattn.errors import OptionError

_SHOWN = 5  # feature maps in a message


class _Map(NamedTuple):
    """A feature map, or tokens, whose positions on the image are known.

    Attributes:
        name: Name of the module that returned it, with the index of its call if there were several.
        layer: The same without the index.
        node: Operation of autograd that made it.
        cells: Number of its positions.
        channels: Number of its channels.
    """

    name: str
    layer: str
    node: Node
    cells: int
    channels: int


def layer_behind(model: nn.Module, prepared: Prepared, target: Target) -> str | None:
    """Return the module whose output Grad-CAM reads for a place in the model's output; of several images, in the image's own branch.

    For a box it is the last feature map through which all of its score and its corners are computed: its level of a pyramid, and not a map
    of scores and corners, or of one branch. For pixels and masks it is the end of the encoder, as the bottleneck of a U-Net: of the
    feature maps before anything is enlarged, the last of those with the most channels. For a box it is that, too, if it is read from
    several levels, so that the last common map is followed by coarser ones.

    Args:
        model: The model; it runs forward and backward once.
        prepared: The preprocessed photo.
        target: Target that is a function of the output.

    Returns:
        Name of the module, with the index of its call if it is called several times; None if there is none.

    Raises:
        OptionError: If the target is not in the output, or its score has no gradient at the pixels.
        ModelError: If the model fails.
    """
    graph = None
    with evaluating(model, frozen=True), torch.enable_grad():
        pixels, others, given = _with_graph(model, prepared)
        with capture(model, features="*", gradients=True) as recording:
            output = answer_of(model, pixels, given)
        score = target.resolve(output).score
        corners: Callable[[Any], Tensor] | None = getattr(score, "corners", None)
        placed = [feature for feature in recording.features if _is_placed(feature) and _is_own(feature, pixels, others)]
        alive = _alive(placed)
        numbers = [score(output).sum(), *([] if corners is None else [corners(output).sum()])]
        with Attempt():  # an operation of the model may have no gradient
            graph = GradientGraph.of(numbers, pixels)
    if graph is None:
        return None
    if numbers[0].grad_fn not in graph.roots:  # as a gradient of zero
        raise OptionError(
            f"{type(model).__name__}: the score of this target has no gradient at the pixels, as where a ReLU gives 0 or a sigmoid 1, so "
            "Grad-CAM would be zero in every layer. Choose another target, or a method without gradients, such as 'captum.occlusion'."
        )
    maps = [_map(feature) for feature in placed if alive.get(feature.name, True)]
    maps = _of_makers([one for one in maps if one.node in graph.edges], graph)
    common = None if corners is None else _last_common(graph, maps)
    return common or _end_of_encoder(graph, maps)


def _with_graph(model: nn.Module, prepared: Prepared) -> tuple[Tensor, list[Tensor], Prepared]:
    """Return the pixels with a graph, the other inputs that may be images, with one too, and what is prepared with these."""
    others: list[Tensor] = []

    def followed(_path: str, leaf: Any) -> Any:  # noqa: ANN401
        if not is_image(leaf):
            return leaf
        others.append(leaf.detach().clone().requires_grad_())
        return others[-1]

    pixels = as_the_model(model, prepared.pixels).detach().clone().requires_grad_()
    inputs = mapped(dict(prepared.inputs), followed)
    return pixels, others, replace(prepared, inputs=inputs)


def _is_own(feature: FeatureRecord, pixels: Tensor, others: Sequence[Tensor]) -> bool:
    return feature.source is not None and _is_of_one_image(feature.source.tensor, pixels, others)


def _is_of_one_image(feature: Tensor, pixels: Tensor, others: Sequence[Tensor]) -> bool:
    """Check that a map is computed from the pixels and from no other image."""
    if not others or not feature.requires_grad:
        return not others
    slopes = torch.autograd.grad(feature.sum(), [pixels, *others], allow_unused=True, retain_graph=True)
    return slopes[0] is not None and all(slope is None for slope in slopes[1:])


def layer_or_refusal(model: nn.Module, prepared: Prepared, target: Target | None) -> str:
    """Return the module of `layer_behind` for a target that is a function of the output.

    Raises:
        OptionError: If there is none, or the target is no function; the message names feature maps.
    """
    name = layer_behind(model, prepared, target) if target is not None and callable(target.of) else None
    if name is not None:
        return name
    names = ", ".join(own_maps(model, prepared)[-_SHOWN:]) or f"none{' of this image alone' * bool(prepared.inputs)}"
    raise OptionError(
        f"{type(model).__name__}: the layer for Grad-CAM is unknown. Name it: {option('layer', 'NAME')}; feature maps: {names}."
    )


def own_maps(model: nn.Module, prepared: Prepared) -> list[str]:
    """Return the names of the modules that output feature maps of the image alone, with several positions, by a forward pass."""
    maps: dict[str, Tensor] = {}

    def watch(name: str, _module: nn.Module, _args: Any, output: Any) -> None:  # noqa: ANN401
        if isinstance(output, Tensor) and output.ndim == 4 and output.shape[2] * output.shape[3] > 1:
            maps[name] = output

    with evaluating(model, frozen=True), torch.set_grad_enabled(bool(prepared.inputs)), module_hooks(model, after=watch):
        pixels, others, given = _with_graph(model, prepared)
        answer_of(model, pixels, given)
    return [name for name, output in maps.items() if _is_of_one_image(output, pixels, others)]


def _is_placed(feature: FeatureRecord) -> bool:
    """Check whether a feature is a map with several positions, which are known."""
    layout = feature.layout
    has_places = feature.source is not None and layout is not None and len(layout.grid) == 2 and layout.cells > 1
    return has_places and feature.role in ("tokens", "activation")


def _map(feature: FeatureRecord) -> _Map:
    assert feature.source is not None  # noqa: S101 - it is placed
    assert feature.layout is not None  # noqa: S101
    channels = feature.value.shape[-1 if feature.role == "tokens" else 1]
    return _Map(feature.name, feature.layer, feature.source.tensor.grad_fn, feature.layout.cells, channels)


def _alive(placed: Sequence[FeatureRecord]) -> Mapping[str, bool]:
    """Return whether the cells of tokens have a gradient, by name; it is filled in by the backward pass.

    Tokens beside the cells may be all that is read, as the class token after the last attention.
    """
    alive: dict[str, bool] = {}

    def watch(feature: FeatureRecord) -> None:
        source, layout = feature.source, feature.layout
        assert source is not None  # noqa: S101 - it is placed
        assert layout is not None  # noqa: S101

        def look(slope: Tensor) -> None:
            alive[feature.name] = bool(over_positions(source.gradient(slope), layout).any())

        if source.tensor.requires_grad:
            source.tensor.register_hook(look)  # type: ignore[no-untyped-call]

    for feature in placed:
        if feature.role == "tokens":
            watch(feature)
    return alive


def _of_makers(maps: Sequence[_Map], graph: GradientGraph) -> list[_Map]:
    """Leave out maps of modules that return what they are given, such as `nn.Identity`: a capture passes on clones of outputs."""
    layers = {one.node: one.layer for one in maps}
    given = {one.name: layers.get(graph.edges[one.node][0], "") for one in maps if one.node.name() == "CloneBackward0"}
    return [one for one in maps if not given.get(one.name) or given[one.name].startswith(f"{one.layer}.")]


def _last_common(graph: GradientGraph, maps: Sequence[_Map]) -> str | None:
    """Return the last map that all ways pass, but none of scores and corners; None if there is none, or coarser ones follow."""
    common, at = graph.on_all_ways() - graph.before_weights(), {one.node: one for one in maps}
    least = None
    for node in graph.edges:
        if node in common and node in at:
            return None if least is not None and least < at[node].cells else at[node].name
        if node in at:
            least = min(at[node].cells, least or at[node].cells)
    return None


def _end_of_encoder(graph: GradientGraph, maps: Sequence[_Map]) -> str | None:
    """Return the last of the widest maps before anything is enlarged, without the parts of modules and what the output resizes."""
    contracting, itself = graph.before_enlarging({one.node: one.cells for one in maps}), graph.before_weights()
    before = [one for one in maps if one.node in contracting]
    features = [one for one in before if one.node not in itself]
    for wholes in (before, features, []):
        outer = [one for one in features if not any(_is_part(one, whole) for whole in wholes)]
        if outer:
            widest = max(one.channels for one in outer)
            return next(one.name for one in reversed(outer) if one.channels == widest)
    return None


def _is_part(one: _Map, whole: _Map) -> bool:
    """Check whether a map belongs to a part of a module that itself returns one with no more positions."""
    return one.cells >= whole.cells and one.layer.startswith(f"{whole.layer}.")
