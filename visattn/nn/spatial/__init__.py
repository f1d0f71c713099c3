"""Spatial attention over the positions of feature maps, alone or combined with channel attention."""
