"""Attention between tokens, and between the positions of feature maps."""
