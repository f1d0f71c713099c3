"""Attention for models that exist: where it may go, how it is put in, and how checkpoints load."""
