"""Labeled images for training and testing."""
