"""Attention over positions of feature maps, alone or together with channels."""
