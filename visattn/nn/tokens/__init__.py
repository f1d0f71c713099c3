"""Attention among tokens, and among positions of feature maps as tokens."""
