"""Encoders for captioners: a classifier from timm, torchvision or your own code, cut at a feature map.

An encoder maps images to `(B, channels, rows, columns)`. Its parameters keep the names that they have in the classifier, so that
published weights can be loaded.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

from visattn._support import norm_gradients
from visattn._support.checks import printable, whole_number
from visattn._support.language import option, worded
from visattn._support.modes import evaluating
from visattn._support.reprs import in_pixels
from visattn.core.families.feature_maps import last_feature_map
from visattn.core.loading.blueprints import Blueprint
from visattn.core.records import split_call
from visattn.errors import OptionError, UnsupportedModel

_MAP = "map"
_PICTURES = 8


class FeatureMap(nn.Module):
    """Model up to one of its feature maps. Later layers are removed."""

    def __init__(self, model: nn.Module, layer: str, channels: int, size: tuple[int, int]) -> None:
        """Cut the model at a layer.

        Args:
            model: Classifier.
            layer: Name of the module whose output is the feature map; or an index of timm's intermediate feature maps, where -1 is the
                last; or "" for the last feature map of the model.
            channels: Number of input channels.
            size: Height and width of the input.

        Raises:
            OptionError: If the layer does not exist.
            UnsupportedModel: If the model has no feature map, or cannot be cut.
        """
        super().__init__()
        kind = type(model).__name__
        self.index: int | None = None
        if hasattr(model, "forward_intermediates") and (not layer or whole_number(layer) is not None):
            try:
                (self.index,) = model.prune_intermediate_layers([int(layer or -1)], prune_norm=False, prune_head=True)  # type: ignore[operator]
            except (AssertionError, IndexError, ValueError) as error:
                raise OptionError(f"{kind}: has no intermediate map {layer}. Choose another {option('layer')}, or -1.") from error
            self.model = model
            return
        name = layer or last_feature_map(model, channels, size)
        if name is None:
            raise UnsupportedModel(
                f"{kind}: no feature map was found in it. Name its {option('layer')}, or choose another CNN or a timm model."
            )
        module, call = split_call(name)
        if module not in dict(model.named_modules()):
            listed = worded("model.named_modules() lists them", "`visattn inspect` lists them")
            raise OptionError(f"{kind}: has no layer '{printable(name)}'; {listed}.")
        try:
            self.model = create_feature_extractor(model, {f"{module}_{call}" if call else module: _MAP})
        except Exception as error:  # torch.fx may raise anything that the model's code raises
            cause = (str(error) or type(error).__name__).splitlines()[0]
            other = option("layer") if _is_traceable(model) else "model"
            raise UnsupportedModel(f"{kind}: cannot be cut at '{printable(name)}' ({cause}). Choose another {other}.") from error
        _leave_out_of_state(model, self.model)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the feature map `(B, channels, rows, columns)` of images `(B, C, H, W)`."""
        if self.index is None:
            found: Tensor = self.model(images)[_MAP]
            return found
        (found,) = self.model.forward_intermediates(  # type: ignore[operator]
            images, indices=[self.index], norm=True, output_fmt="NCHW", intermediates_only=True
        )
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> FeatureMap:
        """Return a copy in the same mode; torch.fx copies a graph into training mode."""
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        for part, other in zip(self.modules(), copied.modules(), strict=True):
            other.training = part.training
        return copied


def _leave_out_of_state(model: nn.Module, cut: nn.Module) -> None:
    """Leave the buffers out of the state of a cut model that the whole model leaves out; older versions of torch.fx put them in."""
    whole = dict(model.named_modules())
    for name, part in cut.named_modules():
        if name in whole:
            part._non_persistent_buffers_set |= whole[name]._non_persistent_buffers_set & part._buffers.keys()


@dataclass(frozen=True)
class Shape:
    """Shape of an encoder's feature map.

    Attributes:
        channels: Number of channels.
        grid: Number of rows and columns.
    """

    channels: int
    grid: tuple[int, int]


def encoder(blueprint: Blueprint, layer: str = "") -> tuple[FeatureMap, Shape]:
    """Build the encoder of a blueprint with random weights. Return it with the shape of its feature map.

    Parameters that do not affect the feature map are frozen.

    Raises:
        OptionError: If the layer does not exist.
        UnsupportedModel: If the model gives no feature map with two or more cells.
    """
    one = replace(
        blueprint, classes=("",)
    )  # some models cannot be built without classes; their classifier layer is removed later
    made = FeatureMap(one.build(), layer, blueprint.channels, blueprint.size).eval()
    name = printable(blueprint.model)
    try:
        with torch.enable_grad():
            maps = made(torch.zeros(1, blueprint.channels, *blueprint.size))
    except Exception as error:  # the model may raise anything
        cause = (str(error) or type(error).__name__).splitlines()[0]
        raise UnsupportedModel(f"{name}: gives no map at {in_pixels(blueprint.size)} pixels ({cause}).") from error
    if maps.ndim != 4 or maps.shape[1] < 2 or maps.shape[2] * maps.shape[3] < 2:  # one channel is the score of the one class
        larger = f", or enlarge {option('img_size')}" if maps.ndim == 4 and maps.shape[1] > 1 else ""
        raise UnsupportedModel(
            f"{name}: must give a feature map (B, channels, rows, columns) with two channels and two cells or more, got "
            f"{tuple(maps.shape)}. Name an earlier {option('layer')}{larger}."
        )
    if _apart(maps.shape[1:3], blueprint.size) < _apart(maps.shape[2:], blueprint.size):
        raise UnsupportedModel(
            f"{name}: must give a feature map (B, channels, rows, columns), got {tuple(maps.shape)}, whose cells are closer to square with "
            f"channels last. Name another {option('layer')}, or choose another model."
        )
    parameters = [parameter for parameter in made.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(maps.sum(), parameters, allow_unused=True) if parameters else ()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.requires_grad_(gradient is not None)  # DistributedDataParallel would wait for its gradient
    return made.train(), Shape(maps.shape[1], (maps.shape[2], maps.shape[3]))


def receptive_field(made: nn.Module, channels: int, size: tuple[int, int]) -> tuple[int, int]:
    """Measure the receptive field of the middle cell of a feature map: height and width in input pixels; 0 if it has none.

    It is measured from gradients, so the weights should be trained: a branch with zero weights passes no gradient. For one image, some
    ReLUs and inputs of max pooling pass no gradient, so the union over several random images is used.

    Args:
        made: Encoder, from `(1, channels, *size)` to `(1, D, rows, columns)`.
        channels: Number of input channels.
        size: Height and width of the input.
    """
    like = next(made.parameters())
    generator = torch.Generator().manual_seed(0)
    touched = torch.zeros(size, dtype=torch.bool, device=like.device)
    with evaluating(made), torch.enable_grad():
        for _ in range(_PICTURES):
            images = torch.randn(1, channels, *size, generator=generator).to(like).requires_grad_()
            maps = made(images)[0]
            middle = maps[:, maps.shape[1] // 2, maps.shape[2] // 2]
            weights = torch.randn(middle.shape, generator=generator).to(
                middle
            )  # weighted, because a plain sum of normalized features is constant
            reached = (middle * weights).sum()
            norm_gradients.set_right(reached)
            (reach,) = torch.autograd.grad(reached, images)
            touched |= (reach[0] != 0).any(0)
    down, across = (touched.any(axis).nonzero().flatten().tolist() for axis in (1, 0))
    return (down[-1] - down[0] + 1, across[-1] - across[0] + 1) if down else (0, 0)


def _is_traceable(model: nn.Module) -> bool:
    try:
        get_graph_node_names(model)
    except Exception:  # torch.fx may raise anything that the model's code raises
        return False
    return True


def _apart(grid: Sequence[int], size: tuple[int, int]) -> float:
    """Compute how far cells are from square: the absolute logarithm of the ratio of their sides."""
    return abs(math.log(size[0] / grid[0] * grid[1] / size[1]))
