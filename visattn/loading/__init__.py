"""Models and their weights: by name, from files, or from folders. Weights are validated before a network is filled with them."""

from visattn.loading.models import check_device, list_models, load_model

__all__ = ["check_device", "list_models", "load_model"]
