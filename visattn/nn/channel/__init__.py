"""Attention over channels: each channel has a gate."""
