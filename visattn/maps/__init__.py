"""Values on the token grid, and the same values in the photo's own pixels.

In: what a method computed, raw. Out: `AttentionMap` (on the grid) and `Heatmap` (in pixels). Nothing is scaled to [0, 1] here
except by `normalize`, which writes down how it did it.
"""

from visattn.maps.attention_maps import AttentionMap
from visattn.maps.facts import MapFacts
from visattn.maps.files import load_map, save_map
from visattn.maps.heatmaps import Heatmap
from visattn.maps.scaling import normalize, value_range

__all__ = ["AttentionMap", "Heatmap", "MapFacts", "load_map", "normalize", "save_map", "value_range"]
