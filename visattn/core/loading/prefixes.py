"""Beginnings of the names of models of other libraries than timm."""

TORCHVISION, TRANSFORMERS, OPEN_CLIP = "tv:", "hf:", "clip:"
