"""Removal of wrappers that parallelize, compile or average a model."""

from __future__ import annotations

from timm.utils import ModelEmaV2, ModelEmaV3
from torch import distributed, nn
from torch.optim.swa_utils import AveragedModel

from visattn.errors import UnsupportedModel

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel, ModelEmaV2, ModelEmaV3)
_SHARDED = "FullyShardedDataParallel"


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers that parallelize, compile or average it.

    Raises:
        UnsupportedModel: If the parameters are sharded across processes.
    """
    if not hasattr(model, "modules"):  # an exported program: `capture` refuses it
        return model
    while isinstance(model, _WRAPPERS) or isinstance(getattr(model, "_orig_mod", None), nn.Module):
        model = model.module if isinstance(model, _WRAPPERS) else model._orig_mod  # type: ignore[assignment]
    split = type(model).__name__ == _SHARDED
    if distributed.is_available() and distributed.is_initialized():  # looking at every module and parameter takes milliseconds
        split = split or any(type(module).__name__ == _SHARDED for module in model.modules())
        split = split or any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
    if split:
        raise UnsupportedModel(
            f"{type(model).__name__}: each process must hold all parameters, but they are sharded, so the main process cannot "
            "draw alone. Draw from a checkpoint, with visattn.explain."
        )
    return model
