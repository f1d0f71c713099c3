"""Models and their weights: by name, from files, or from folders. Weights are validated before a network is filled with them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from visattn.core.loading.models import (
        brings_weights as brings_weights,
        check_device as check_device,
        list_models as list_models,
        load_model as load_model,
    )

__all__ = ["brings_weights", "check_device", "list_models", "load_model"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - on first use: they import torch and timm
    if name in __all__:
        return getattr(import_module("visattn.core.loading.models"), name)
    raise AttributeError(f"module 'visattn.core.loading' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
