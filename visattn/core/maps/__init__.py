"""Maps on the token grid, and heatmaps in the photo's own pixels.

An `AttentionMap` holds the raw values of a method on the grid; a `Heatmap` holds them in pixels. Only `normalize` scales values to
[0, 1], and records the scaling in the provenance.
"""

from typing import TYPE_CHECKING

from visattn._support.faces import face

if TYPE_CHECKING:
    from visattn.core.maps.arithmetic import difference as difference, mean_map as mean_map
    from visattn.core.maps.attention_maps import AttentionMap as AttentionMap
    from visattn.core.maps.heatmaps import Heatmap as Heatmap
    from visattn.core.maps.map_facts import Detection as Detection, MapFacts as MapFacts
    from visattn.core.maps.map_files import (
        load_map as load_map,
        load_maps as load_maps,
        pack_maps as pack_maps,
        save_map as save_map,
    )
    from visattn.core.maps.scaling import normalize as normalize, value_range as value_range
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            ".arithmetic": ["difference", "mean_map"],
            ".attention_maps": ["AttentionMap"],
            ".map_facts": ["Detection", "MapFacts"],
            ".map_files": ["load_map", "load_maps", "pack_maps", "save_map"],
            ".heatmaps": ["Heatmap"],
            ".scaling": ["normalize", "value_range"],
        },
    )
