"""Codes for tokens: cells of grids as numbers that lie beside the tensors of a forward, and what they say of an attention call."""
