"""Intercept the functions that a model calls, and tell attention among them."""
