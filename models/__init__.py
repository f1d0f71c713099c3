"""Reference architectures, one readable file each. Import them as `visattn.models`."""

from visattn.models.vit import VisionTransformer

__all__ = ["VisionTransformer"]
