"""Which module gives the last feature map before a CNN pools it: seen, not looked up.

A copy of the model without values runs once on the `meta` device, where nothing is computed. Libraries name the module differently,
some pool by a function and some register modules in another order than they run, so names tell less.
"""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_seen: WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], str | None]] = WeakKeyDictionary()

_POOLS = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.AvgPool2d, nn.MaxPool2d)  # of VGG: to 7 x 7, whatever the size


def last_feature_map(model: nn.Module, channels: int, size: tuple[int, int]) -> str | None:
    """Name of the module whose result is the last with several positions, if no tokens follow it.

    Args:
        model: A model of images; it is left alone.
        channels: Of its input.
        size: Height and width of its input.

    Returns:
        The outermost such module; None where tokens follow, or the model cannot run without values.
    """
    key = tuple((name, type(module)) for name, module in model.named_modules())
    if _seen.get(model, ((), None))[0] != key:
        _seen[model] = key, _observed(model, channels, size)
    return _seen[model][1]


def takes(model: nn.Module, channels: int, size: tuple[int, int]) -> bool:
    """Return whether a model can be given images of so many channels; False where it cannot run without values.

    Args:
        model: A model of images; it is left alone.
        channels: Of the images.
        size: Height and width of the images.
    """
    try:
        with torch.no_grad():
            _without_values(model)(torch.empty(1, channels, *size, device="meta"))
    except Exception:  # the model's own
        return False
    return True


def _observed(model: nn.Module, channels: int, size: tuple[int, int]) -> str | None:
    last: str | None = None
    version = -1  # of its result, which operations in place raise

    def watch(name: str) -> Any:  # noqa: ANN401
        def hook(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
            nonlocal last, version
            if not isinstance(output, Tensor) or (args and output is args[0] and output._version == version):
                return  # nothing was done
            if output.ndim == 3 and output.shape[1] > 1:
                last = None
            elif output.ndim == 4 and _spatial(output) and not isinstance(module, _POOLS):
                last, version = name, output._version

        return hook

    if any(isinstance(module, nn.RNNBase) for module in model.modules()):  # written out step by step there: minutes
        return None
    try:
        bare = _without_values(model)
        for name, module in bare.named_modules():
            if name:
                module.register_forward_hook(watch(name))
        with torch.no_grad():
            bare(torch.empty(1, channels, *size, device="meta"))
    except Exception:  # the model's own: what cannot run here is not known
        return None
    return last


def _spatial(output: Tensor) -> bool:
    """Whether a map, channels first or last, has more than one position."""
    return tuple(output.shape[2:]) != (1, 1) and tuple(output.shape[1:3]) != (1, 1)


def _without_values(model: nn.Module) -> nn.Module:
    """A copy on the `meta` device in evaluation mode, without the hooks of the model; no values are copied on the way."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        bare = torch.empty_like(tensor, device="meta", requires_grad=False)
        memo[id(tensor)] = nn.Parameter(bare, requires_grad=False) if isinstance(tensor, nn.Parameter) else bare
    made = copy.deepcopy(model, memo).eval()
    for module in made.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return made
