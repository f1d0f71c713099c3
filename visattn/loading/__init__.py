"""Models and their weights: by name, from files, from folders. Weights are checked before a network is given them."""

from visattn.loading.models import check_device, list_models, load_model

__all__ = ["check_device", "list_models", "load_model"]
