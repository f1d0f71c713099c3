"""The feature map that a score is computed from, found by its gradient where no dry run tells: of detectors, for example."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from visattn._support.attempts import Attempt
from visattn._support.modes import evaluating
from visattn._support.module_hooks import module_hooks
from visattn.core.families.feature_maps import is_map
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.passes import answer_of
from visattn.core.pipeline.targets import Target

Score = Callable[[Any], Tensor]


def layer_behind(model: nn.Module, prepared: Prepared, target: Target) -> str | None:
    """Return the module that outputs the last feature map of the image with a gradient of the target's score.

    For a box of a detector it is the last from which both its score and its corners are computed. So it is the level of a pyramid that the
    box was found on, and not a map of class scores.

    Args:
        model: The model; it runs forward and backward once.
        prepared: The preprocessed photo.
        target: Target that is a function of the output.

    Returns:
        Name of the module, with the index of its call if it is called several times; None if there is none, or the model fails.
    """
    maps: list[tuple[str, int, Tensor]] = []
    counts: Counter[str] = Counter()
    size = tuple(prepared.pixels.shape[2:])

    def keep(name: str, _module: nn.Module, _args: Any, output: Any) -> None:  # noqa: ANN401
        if isinstance(output, Tensor):
            if output.requires_grad and len(output) == len(prepared.pixels) and is_map(output, size):
                maps.append((name, counts[name], output))
            counts[name] += 1

    with Attempt() as attempt, evaluating(model, frozen=True), torch.enable_grad():
        pixels = prepared.pixels.detach().clone().requires_grad_()
        with module_hooks(model, after=keep):
            output = answer_of(model, pixels, prepared)
        score = target.resolve(output).score
        corners: Score | None = getattr(score, "corners", None)
        moving = _moving(maps, score(output))
        placed = set() if corners is None else moving & _moving(maps, corners(output))
    if attempt.failed or not moving:
        return None
    name, call, _ = maps[max(placed or moving)]
    return f"{name} #{call}" if counts[name] > 1 else name


def _moving(maps: list[tuple[str, int, Tensor]], score: Tensor) -> set[int]:
    """Return the numbers of the maps with a gradient of a score that is not zero everywhere."""
    if not maps or not score.requires_grad:
        return set()
    slopes = torch.autograd.grad(score.sum(), [feature for *_, feature in maps], allow_unused=True, retain_graph=True)
    return {number for number, slope in enumerate(slopes) if slope is not None and bool(slope.any())}
