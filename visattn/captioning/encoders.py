"""The feature map of any classifier, as what a captioner looks at.

In: a model of timm, torchvision or yours. Out: a module from images to `(B, channels, rows, columns)` whose parameters have the names of
the model's own, so that its published weights load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor

from visattn._support.checks import printable, whole_number
from visattn._support.modes import evaluating
from visattn.errors import OptionError, UnsupportedModel
from visattn.families.feature_maps import last_feature_map
from visattn.loading.blueprints import Blueprint

_MAP = "map"
_PICTURES = 8


class FeatureMap(nn.Module):
    """A model up to one of its feature maps; what comes behind is cut off."""

    def __init__(self, model: nn.Module, layer: str, channels: int, size: tuple[int, int]) -> None:
        """Cut.

        Args:
            model: A classifier.
            layer: Dotted name of the module that gives the map; or a number, of timm's intermediate maps, -1 the last; "" for the last
                map there is.
            channels: Of its input.
            size: Height and width of its input.

        Raises:
            OptionError: If there is no such layer.
            UnsupportedModel: If the model gives no map, or cannot be cut.
        """
        super().__init__()
        kind = type(model).__name__
        self.index: int | None = None
        if hasattr(model, "forward_intermediates") and (not layer or whole_number(layer) is not None):
            try:
                (self.index,) = model.prune_intermediate_layers([int(layer or -1)], prune_norm=False, prune_head=True)  # type: ignore[operator]
            except (AssertionError, IndexError, ValueError) as error:
                raise OptionError(f"{kind}: has no intermediate map {layer}. Choose another layer (--layer), or -1.") from error
            self.model = model
            return
        name = layer or last_feature_map(model, channels, size)
        if name is None:
            raise UnsupportedModel(f"{kind}: gives no feature map. Choose a CNN, a model of timm, or name a layer (--layer).")
        if name not in dict(model.named_modules()):
            raise OptionError(f"{kind}: has no layer '{printable(name)}'. See visattn inspect for its layers.")
        try:
            self.model = create_feature_extractor(model, {name: _MAP})
        except Exception as error:  # torch.fx raises whatever the model's own code meets
            cause = (str(error) or type(error).__name__).splitlines()[0]
            raise UnsupportedModel(
                f"{kind}: cannot be cut at '{printable(name)}' ({cause}). Choose another layer (--layer)."
            ) from error

    def forward(self, images: Tensor) -> Tensor:
        """`(B, C, H, W)` to `(B, channels, rows, columns)`."""
        if self.index is None:
            found: Tensor = self.model(images)[_MAP]
            return found
        (found,) = self.model.forward_intermediates(  # type: ignore[operator]
            images, indices=[self.index], norm=True, output_fmt="NCHW", intermediates_only=True
        )
        return found


@dataclass(frozen=True)
class Shape:
    """What an encoder gives.

    Attributes:
        channels: Of the map.
        grid: Its rows and columns.
    """

    channels: int
    grid: tuple[int, int]


def encoder(blueprint: Blueprint, layer: str = "") -> tuple[FeatureMap, Shape]:
    """The encoder of a blueprint, with random weights, and what it gives; parameters that reach no map are frozen.

    Raises:
        OptionError: If there is no such layer.
        UnsupportedModel: If the model gives no map of places.
    """
    one = replace(blueprint, classes=("",))  # some cannot be built without a class; its layer is cut off
    made = FeatureMap(one.build(), layer, blueprint.channels, blueprint.size).eval()
    name = printable(blueprint.model)
    try:
        with torch.enable_grad():
            maps = made(torch.zeros(1, blueprint.channels, *blueprint.size))
    except Exception as error:  # the model's own
        cause = (str(error) or type(error).__name__).splitlines()[0]
        raise UnsupportedModel(f"{name}: gives no map at {blueprint.size[0]} x {blueprint.size[1]} pixels ({cause}).") from error
    if maps.ndim != 4 or maps.shape[1] < 2 or maps.shape[2] * maps.shape[3] < 2:  # one channel: of the one class
        raise UnsupportedModel(
            f"{name}: must give a map (B, channels, rows, columns) with two channels and two places or more, got "
            f"{tuple(maps.shape)}. Name an earlier layer (--layer), or enlarge img_size (--img-size)."
        )
    if _apart(maps.shape[1:3], blueprint.size) < _apart(maps.shape[2:], blueprint.size):
        raise UnsupportedModel(
            f"{name}: must give a map (B, channels, rows, columns), got {tuple(maps.shape)} with channels last. Name a layer behind their "
            "permutation (--layer)."
        )
    parameters = [parameter for parameter in made.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(maps.sum(), parameters, allow_unused=True) if parameters else ()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.requires_grad_(gradient is not None)  # several processes would wait for its gradient
    return made.train(), Shape(maps.shape[1], (maps.shape[2], maps.shape[3]))


def receptive_field(made: nn.Module, channels: int, size: tuple[int, int]) -> tuple[int, int]:
    """Sides, in input pixels, of the part of the picture that the middle place of a map can know; 0 where it knows none.

    Seen from gradients, so of trained weights: a branch that starts at 0 lets none through. One picture closes some units and some
    places of a pool, so what any of a few random ones shows is taken together.

    Args:
        made: From `(1, channels, *size)` to `(1, D, rows, columns)`.
        channels: Of its input.
        size: Height and width of its input.
    """
    like = next(made.parameters())
    generator = torch.Generator().manual_seed(0)
    touched = torch.zeros(size, dtype=torch.bool, device=like.device)
    with evaluating(made), torch.enable_grad():
        for _ in range(_PICTURES):
            images = torch.randn(1, channels, *size, generator=generator).to(like).requires_grad_()
            maps = made(images)[0]
            middle = maps[:, maps.shape[1] // 2, maps.shape[2] // 2]
            weights = torch.randn(middle.shape, generator=generator).to(middle)  # a plain sum of normalized features is 0
            (reach,) = torch.autograd.grad((middle * weights).sum(), images)
            touched |= (reach[0] != 0).any(0)
    down, across = (touched.any(axis).nonzero().flatten().tolist() for axis in (1, 0))
    return (down[-1] - down[0] + 1, across[-1] - across[0] + 1) if down else (0, 0)


def _apart(grid: Sequence[int], size: tuple[int, int]) -> float:
    """How far cells are from square: the logarithm of their sides' ratio."""
    return abs(math.log(size[0] / grid[0] * grid[1] / size[1]))
