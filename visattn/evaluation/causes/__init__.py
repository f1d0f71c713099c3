"""Bench of methods on networks that decide by one known cause."""
