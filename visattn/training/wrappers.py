"""The model inside of what parallelizes, compiles or averages it."""

from __future__ import annotations

from timm.utils import ModelEmaV2, ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel

from visattn.errors import UnsupportedModel

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel, ModelEmaV2, ModelEmaV3)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of what parallelizes, compiles or averages it."""
    while isinstance(model, _WRAPPERS) or isinstance(getattr(model, "_orig_mod", None), nn.Module):
        model = model.module if isinstance(model, _WRAPPERS) else model._orig_mod  # type: ignore[assignment]
    split = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    if split or any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        raise UnsupportedModel(
            f"{type(model).__name__}: each process must hold all parameters, they are split among several, so that one alone cannot "
            "draw. Draw from a checkpoint, with visattn.explain."
        )
    return model
