"""Pretrained weights without access to a model hub."""
