"""Every architecture that torchvision lists, at reduced depth or size, with inputs that fit it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models import maxvit, swin_transformer, vision_transformer
from torchvision.models.video import mvit, swin_transformer as swin_transformer_3d

LIBRARY, VERSION = "torchvision", torchvision.__version__
LAYERS = 2
BATCH = 2
TASKS = {
    "classification": torchvision.models,
    "quantization": torchvision.models.quantization,
    "segmentation": torchvision.models.segmentation,
    "detection": torchvision.models.detection,
    "video": torchvision.models.video,
    "optical flow": torchvision.models.optical_flow,
}
LEFT_OUT: dict[str, str] = {}
_BUILDERS = (
    (vision_transformer, "_vision_transformer"),
    (swin_transformer, "_swin_transformer"),
    (maxvit, "_maxvit"),
    (mvit, "_mvit"),
    (swin_transformer_3d, "_swin_transformer3d"),
)
_DEPTH = "num_layers", "depths", "block_layers"
_SQUARE = "vit", "maxvit"  # take images of one size
_CLIP = 16, 96, 128
_IMAGE = 128, 192


def names() -> dict[str, str]:
    """Return all architectures, with the task of each."""
    return {name: task for task, module in TASKS.items() for name in torchvision.models.list_models(module=module)}


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model in evaluation mode with at most two layers in each stage of attention, and its inputs."""
    torch.manual_seed(0)
    task, options = names()[name], dict[str, Any]()
    if task in ("segmentation", "detection"):
        options["weights_backbone"] = None
    if task == "detection" and "ssd" not in name:
        options |= {"min_size": 96, "max_size": 160}
    with ExitStack() as stack:
        for module, builder in _BUILDERS:
            stack.enter_context(patch.object(module, builder, _shallow(getattr(module, builder))))
        model = torchvision.models.get_model(name, weights=None, **options).eval()
    return model, _inputs(name, task)


def _shallow(builder: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def build_(**given: Any) -> nn.Module:  # noqa: ANN401
        if "spatial_size" in given:
            given["spatial_size"] = _CLIP[1:]
        return builder(**{key: _less(value) if key in _DEPTH else value for key, value in given.items()})

    return build_


def _less(depth: Any) -> Any:  # noqa: ANN401
    return min(depth, LAYERS) if isinstance(depth, int) else [min(stage, LAYERS) for stage in depth]


def _inputs(name: str, task: str) -> dict[str, Any]:
    if task == "optical flow":
        return {"image1": _random(1, 3, 128, 160), "image2": _random(1, 3, 128, 160, seed=2)}
    if task == "detection":
        return {"images": _random(BATCH, 3, 96, 128).sigmoid()}
    if task == "video":
        return {"x": _random(1, 3, *((16, 224, 224) if name == "s3d" else _CLIP))}
    key = "input" if name.startswith("lraspp") else "x"
    return {key: _random(BATCH, 3, *((224, 224) if name.startswith(_SQUARE) else _IMAGE))}


def _random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
