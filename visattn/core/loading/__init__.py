"""Models and their weights: by name, from files, or from folders. Weights are validated before a network is filled with them."""

from typing import TYPE_CHECKING

from visattn._support.faces import face

if TYPE_CHECKING:
    from visattn.core.loading.models import (
        brings_weights as brings_weights,
        check_device as check_device,
        list_models as list_models,
        load_model as load_model,
    )
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            ".models": ["brings_weights", "check_device", "list_models", "load_model"],
        },
    )
