"""Interception of the functions that a model calls, and detection of attention among them."""
