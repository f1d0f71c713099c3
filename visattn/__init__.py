"""Vision attention toolkit: where does a model look, and can you believe it?

Names are imported on first use (PEP 562), so `import visattn` is fast and does not import torch.
"""

from __future__ import annotations

import random
from importlib import import_module
from typing import TYPE_CHECKING, Any

from visattn.core.offers import offer

if TYPE_CHECKING:
    from visattn import (
        captioning as captioning,
        data as data,
        embedding as embedding,
        errors as errors,
        evaluation as evaluation,
        models as models,
        nn as nn,
        studies as studies,
        training as training,
    )
    from visattn.batch.films import explain_video as explain_video
    from visattn.core import (
        drawing as drawing,
        families as families,
        geometry as geometry,
        images as images,
        loading as loading,
        maps as maps,
        methods as methods,
        operators as operators,
        provenance as provenance,
        records as records,
    )
    from visattn.core.capturing.interventions import AttentionCall as AttentionCall, permuted as permuted
    from visattn.core.drawing.filmstrips import animation as animation, filmstrip as filmstrip
    from visattn.core.drawing.gate_pages import gate_page as gate_page
    from visattn.core.drawing.matrices import matrix_page as matrix_page
    from visattn.core.drawing.overlays import colorize as colorize, overlay as overlay
    from visattn.core.drawing.sheets import contact_sheet as contact_sheet
    from visattn.core.geometry import Geometry as Geometry
    from visattn.core.images.sources import load_image as load_image
    from visattn.core.loading import load_model as load_model
    from visattn.core.maps import (
        AttentionMap as AttentionMap,
        Heatmap as Heatmap,
        load_map as load_map,
        load_maps as load_maps,
        normalize as normalize,
        save_map as save_map,
    )
    from visattn.core.pipeline.captures import capture as capture
    from visattn.core.pipeline.comparisons import comparison_page as comparison_page
    from visattn.core.pipeline.editing import intervene as intervene
    from visattn.core.pipeline.explaining import explain as explain, explain_batch as explain_batch
    from visattn.core.pipeline.explanation import Explanation as Explanation
    from visattn.core.pipeline.inputs import Prepared as Prepared, prepare as prepare, prepare_batch as prepare_batch
    from visattn.core.pipeline.other_images import similar_to as similar_to
    from visattn.core.pipeline.preprocessing import Preprocessing as Preprocessing
    from visattn.core.pipeline.several_pictures import explain_pictures as explain_pictures
    from visattn.core.pipeline.stages import explain_stages as explain_stages, stage_page as stage_page
    from visattn.core.pipeline.tensors import prepare_tensor as prepare_tensor
    from visattn.core.provenance import Provenance as Provenance
    from visattn.core.records import (
        AttentionRecord as AttentionRecord,
        FeatureRecord as FeatureRecord,
        Recording as Recording,
        TokenLayout as TokenLayout,
    )
    from visattn.errors import VisattnError as VisattnError
    from visattn.evaluation import Survey as Survey
    from visattn.nn import attach as attach
    from visattn.studies import Study as Study, load_study as load_study, study as study

    __version__: str

# public name -> module that defines it; no module shares its name with a public function, or importing it would replace the function
_NAMES = {
    "AttentionCall": "core.capturing.interventions",
    "AttentionMap": "core.maps",
    "AttentionRecord": "core.records",
    "Explanation": "core.pipeline.explanation",
    "FeatureRecord": "core.records",
    "Geometry": "core.geometry",
    "Heatmap": "core.maps",
    "Prepared": "core.pipeline.inputs",
    "Preprocessing": "core.pipeline.preprocessing",
    "Provenance": "core.provenance",
    "Recording": "core.records",
    "Study": "studies",
    "Survey": "evaluation",
    "TokenLayout": "core.records",
    "VisattnError": "errors",
    "animation": "core.drawing.filmstrips",
    "attach": "nn",
    "capture": "core.pipeline.captures",
    "colorize": "core.drawing.overlays",
    "comparison_page": "core.pipeline.comparisons",
    "contact_sheet": "core.drawing.sheets",
    "explain": "core.pipeline.explaining",
    "explain_batch": "core.pipeline.explaining",
    "explain_pictures": "core.pipeline.several_pictures",
    "explain_stages": "core.pipeline.stages",
    "explain_video": "batch.films",
    "filmstrip": "core.drawing.filmstrips",
    "gate_page": "core.drawing.gate_pages",
    "intervene": "core.pipeline.editing",
    "load_image": "core.images.sources",
    "load_map": "core.maps",
    "load_maps": "core.maps",
    "load_model": "core.loading",
    "load_study": "studies",
    "matrix_page": "core.drawing.matrices",
    "normalize": "core.maps",
    "overlay": "core.drawing.overlays",
    "permuted": "core.capturing.interventions",
    "prepare": "core.pipeline.inputs",
    "prepare_batch": "core.pipeline.inputs",
    "prepare_tensor": "core.pipeline.tensors",
    "save_map": "core.maps",
    "similar_to": "core.pipeline.other_images",
    "stage_page": "core.pipeline.stages",
    "study": "studies",
}
_CORE = "drawing", "families", "geometry", "images", "loading", "maps", "methods", "operators", "provenance", "records"
_PACKAGES = {name: f"core.{name}" for name in _CORE} | {
    name: name for name in ("captioning", "data", "embedding", "errors", "evaluation", "models", "nn", "studies", "training")
}

offer("check", "map", "visattn.evaluation.checking:check")
offer("image source", "scene", "visattn.data.scenes.by_number:scene_image")
offer("study", ".attn", "visattn.studies:load_study")
offer("networks", "visattn", "visattn.models.building")
offer("notebook", "heatmap", "visattn.core.drawing.overlays:png_of")
offer("notebook", "map", "visattn.core.pipeline.comparisons:png_of")

__all__ = sorted([*_NAMES, *_PACKAGES, "__version__"])


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name == "__version__":
        return import_module("importlib.metadata").version("visattn")  # takes as long as click
    if name not in _NAMES and name not in _PACKAGES:
        raise AttributeError(f"module 'visattn' has no attribute {name!r}")
    state = random.getstate()  # rich draws a number when it is imported, and timm imports it
    try:
        module = import_module(f"visattn.{_PACKAGES.get(name) or _NAMES[name]}")
        value = module if name in _PACKAGES else getattr(module, name)  # which may import more
    finally:
        random.setstate(state)
    globals()[name] = value  # so that only a first use puts the state back: another thread may draw
    return value


def __dir__() -> list[str]:
    return list(__all__)
