"""Maps on the token grid, and heatmaps in the photo's own pixels.

An `AttentionMap` holds the raw values of a method on the grid; a `Heatmap` holds them in pixels. Only `normalize` scales values to
[0, 1], and records the scaling in the provenance.
"""

from visattn.core.maps.attention_maps import AttentionMap
from visattn.core.maps.facts import Detection, MapFacts
from visattn.core.maps.files import load_map, load_maps, pack_maps, save_map
from visattn.core.maps.heatmaps import Heatmap
from visattn.core.maps.scaling import normalize, value_range

__all__ = [
    "AttentionMap",
    "Detection",
    "Heatmap",
    "MapFacts",
    "load_map",
    "load_maps",
    "normalize",
    "pack_maps",
    "save_map",
    "value_range",
]
