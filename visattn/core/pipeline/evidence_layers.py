"""The feature map that a score is computed from, found by its gradient where no dry run tells: of detectors, for example."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
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
_NEAREST = 16  # maps before another one


def layer_behind(model: nn.Module, prepared: Prepared, target: Target) -> str | None:
    """Return the module that outputs the last feature map of the image through which all of the target's score is computed.

    For a box of a detector it is the last through which its score and its corners are computed. So it is the level of a pyramid that the
    box was found on, and not a map of class scores or of one branch.

    Args:
        model: The model; it runs forward once, and backward for each map that is tried.
        prepared: The preprocessed photo.
        target: Target that is a function of the output.

    Returns:
        Name of the module, with the index of its call if it is called several times; None if there is none.

    Raises:
        OptionError: If the target is not in the output.
        ModelError: If the model fails.
    """
    maps: list[tuple[str, int, Tensor]] = []
    counts: Counter[str] = Counter()
    size = tuple(prepared.pixels.shape[2:])

    def keep(name: str, _module: nn.Module, _args: Any, output: Any) -> None:  # noqa: ANN401
        if isinstance(output, Tensor):
            if output.requires_grad and len(output) == len(prepared.pixels) and is_map(output, size):
                maps.append((name, counts[name], output))
            counts[name] += 1

    number = None
    with evaluating(model, frozen=True), torch.enable_grad():
        pixels = prepared.pixels.detach().clone().requires_grad_()
        with module_hooks(model, after=keep):
            output = answer_of(model, pixels, prepared)
        score = target.resolve(output).score
        corners: Score | None = getattr(score, "corners", None)
        with Attempt():  # an operation of the model may have no gradient
            parts = [score(output).sum(), *([] if corners is None else [corners(output).sum()])]
            number = _last_on_all_ways([feature for *_, feature in maps], [part for part in parts if part.requires_grad])
    if number is None:
        return None
    name, call, _ = maps[number]
    return f"{name} #{call}" if counts[name] > 1 else name


def _last_on_all_ways(maps: Sequence[Tensor], scores: Sequence[Tensor]) -> int | None:
    """Return the number of the last map without which no score has a gradient at the maps before it; None if there is none.

    Only the nearest maps before are asked, so that no backward pass goes far.
    """
    if not maps or not scores:
        return None
    slopes = [torch.autograd.grad(score, maps, allow_unused=True, retain_graph=True) for score in scores]
    moving = [number for number in range(len(maps)) if all(_is_nonzero(of_score[number]) for of_score in slopes)]
    for at in range(len(moving) - 1, -1, -1):
        before = [maps[number] for number in moving[max(at - _NEAREST, 0) : at] if maps[number] is not maps[moving[at]]]
        stopped = maps[moving[at]].register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
        left = [torch.autograd.grad(score, before, allow_unused=True, retain_graph=True) for score in scores if before]
        stopped.remove()
        if not any(_is_nonzero(slope) for of_score in left for slope in of_score):
            return moving[at]
    return None


def _is_nonzero(slope: Tensor | None) -> bool:
    return slope is not None and bool(slope.any())
