"""Analysis of a CNN that relies on a watermark: Grad-CAM layer by layer, with and without its mean map, and exchanged gates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import visattn
from truth.measure import touches, without_the_mean
from visattn import evaluation
from visattn.core.geometry import Geometry
from visattn.core.maps import AttentionMap
from visattn.core.pipeline.inputs import prepare_batch
from visattn.data.scenes import Scenes
from visattn.data.scenes.causes import CausedScenes
from visattn.evaluation.object_masks import cells_of
from visattn.nn import CBAM

Part = Literal["channel", "spatial"]
_BEFORE = {
    "channel": "fc2",
    "spatial": "norm",
}  # module that outputs the gate before the sigmoid; `fc2` runs twice, for mean and maximum


@dataclass(frozen=True)
class MarkedScenes:
    """Results of Grad-CAM for one layer, on marked scenes and on the same scenes without a mark.

    Attributes:
        grid: Rows and columns of the map.
        numbers: For each quantity, one number per scene.
    """

    grid: tuple[int, ...]
    numbers: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def layer_by_layer(
    model: nn.Module, layers: Sequence[str], marked: Scenes | CausedScenes, plain: Scenes | CausedScenes
) -> dict[str, MarkedScenes]:
    """Measure Grad-CAM of the true class, layer by layer.

    Args:
        model: A CNN.
        layers: Names of its layers.
        marked: Scenes with a mark.
        plain: The same scenes without it.

    Returns:
        Of each layer, for each scene: how its map finds the mark (`AUROC`), the same without the mean map of the other marked scenes
        (`without the mean map`), whether the largest cell has its middle on the mark (`middle`) or touches it (`touches`; of the plain
        scene the place where it would be: `touches the place`), and mean values as multiples of the mean over the map: of the cells
        that touch the mark (`marked corner`), of these in the other three corners (`other corners`), and of all cells that touch no
        edge of the map (`inside`).
    """
    found = {}
    for layer in layers:
        both = [[_gradcam(model, scenes, index, layer) for index in range(len(scenes))] for scenes in (marked, plain)]
        unlikes = without_the_mean([one for one, _ in both[0]])
        found[layer] = seen = MarkedScenes(unlikes[0].layout.grid)
        for index, ((shown, place), (bare, _), unlike) in enumerate(zip(*both, unlikes, strict=True)):
            mask = marked.scene(index).watermark
            cells, values = cells_of(shown, mask, place).share > 0, shown.values.numpy()
            others = [values[np.flip(cells, axes)].mean() for axes in ((0,), (1,), (0, 1))]
            numbers = {
                "AUROC": float(evaluation.auroc(shown, mask, place)),
                "without the mean map": float(evaluation.auroc(unlike, mask, place)),
                "middle": float(evaluation.pointing_game(shown, mask, place)),
                "touches": float(touches(shown, mask, place)),
                "touches the place": float(touches(bare, mask, place)),
                "marked corner": float(values[cells].mean() / values.mean()),
                "other corners": float(np.mean(others) / values.mean()),
                "inside": float(values[1:-1, 1:-1].mean() / values.mean()),
            }
            for name, value in numbers.items():
                seen.numbers[name].append(value)
    return found


def exchanged(model: nn.Module, scenes: Scenes | CausedScenes, others: Scenes | CausedScenes, part: Part) -> float:
    """Return the accuracy on scenes where every CBAM has the gates of one part that it has on the other scenes.

    Args:
        model: A classifier with CBAM.
        scenes: Input scenes.
        others: Scenes that the gates are taken from, as many as `scenes`.
        part: Gates to exchange: those of channels, or the spatial ones.
    """
    right, kept = 0, {}
    for start in range(0, len(scenes), 100):
        some = range(start, min(start + 100, len(scenes)))
        pixels, foreign = (prepare_batch([each[i][0] for i in some], model).pixels for each in (scenes, others))
        with torch.inference_mode():
            with _hooked(model, part, None) as kept:
                model(foreign)
            with _hooked(model, part, kept):
                found = model(pixels).argmax(1).tolist()
        right += sum(one == scenes[i][1] for one, i in zip(found, some, strict=True))
    return right / len(scenes)


@contextmanager
def _hooked(model: nn.Module, part: Part, given: dict[str, list[Tensor]] | None) -> Iterator[dict[str, list[Tensor]]]:
    """Record the inputs of every CBAM's gates, or replace them by recorded ones, inside a `with` block."""
    kept: dict[str, list[Tensor]] = defaultdict(list)
    rest = {name: iter(values) for name, values in (given or {}).items()}

    def hook(name: str) -> object:
        def kept_or_given(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
            kept[name].append(output)
            return output if given is None else next(rest[name])

        return kept_or_given

    names = [name for name, module in model.named_modules() if isinstance(module, CBAM)]
    handles = [model.get_submodule(f"{name}.{_BEFORE[part]}").register_forward_hook(hook(name)) for name in names]  # type: ignore[arg-type]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def _gradcam(model: nn.Module, scenes: Scenes | CausedScenes, index: int, layer: str) -> tuple[AttentionMap, Geometry]:
    scene = scenes.scene(index)
    found = visattn.explain(model, Image.fromarray(scene.image), method="gradcam", target=scene.label, layer=layer)
    return found.map, found.geometry
