"""Vision attention toolkit: where does a model look, and can you believe it?

Names are imported on first use (PEP 562), so `import visattn` is fast and does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from visattn import (
        captioning as captioning,
        data as data,
        drawing as drawing,
        embedding as embedding,
        errors as errors,
        evaluation as evaluation,
        families as families,
        geometry as geometry,
        images as images,
        loading as loading,
        maps as maps,
        methods as methods,
        models as models,
        nn as nn,
        operators as operators,
        provenance as provenance,
        records as records,
        studies as studies,
        training as training,
    )
    from visattn.batch.films import explain_video as explain_video
    from visattn.capturing import AttentionCall as AttentionCall, permuted as permuted
    from visattn.data.sources import load_image as load_image
    from visattn.drawing.filmstrips import animation as animation, filmstrip as filmstrip
    from visattn.drawing.gate_pages import gate_page as gate_page
    from visattn.drawing.matrices import matrix_page as matrix_page
    from visattn.drawing.overlays import colorize as colorize, overlay as overlay
    from visattn.drawing.sheets import contact_sheet as contact_sheet
    from visattn.errors import VisattnError as VisattnError
    from visattn.evaluation.survey import Survey as Survey
    from visattn.geometry import Geometry as Geometry
    from visattn.loading import load_model as load_model
    from visattn.maps import (
        AttentionMap as AttentionMap,
        Heatmap as Heatmap,
        load_map as load_map,
        load_maps as load_maps,
        normalize as normalize,
        save_map as save_map,
    )
    from visattn.nn import attach as attach
    from visattn.pipeline.batches import explain_batch as explain_batch
    from visattn.pipeline.captures import capture as capture, intervene as intervene
    from visattn.pipeline.explaining import explain as explain
    from visattn.pipeline.explanation import Explanation as Explanation
    from visattn.pipeline.inputs import Prepared as Prepared, prepare as prepare, prepare_batch as prepare_batch
    from visattn.pipeline.preprocessing import Preprocessing as Preprocessing
    from visattn.pipeline.stages import explain_stages as explain_stages, stage_page as stage_page
    from visattn.pipeline.tensors import prepare_tensor as prepare_tensor
    from visattn.provenance import Provenance as Provenance
    from visattn.records import (
        AttentionRecord as AttentionRecord,
        FeatureRecord as FeatureRecord,
        Recording as Recording,
        TokenLayout as TokenLayout,
    )
    from visattn.studies import Study as Study, load_study as load_study, study as study

    __version__: str

# public name -> module that defines it; no module shares its name with a public function, or importing it would replace the function
_NAMES = {
    "AttentionCall": "capturing",
    "AttentionMap": "maps",
    "AttentionRecord": "records",
    "Explanation": "pipeline.explanation",
    "FeatureRecord": "records",
    "Geometry": "geometry",
    "Heatmap": "maps",
    "Prepared": "pipeline.inputs",
    "Preprocessing": "pipeline.preprocessing",
    "Provenance": "provenance",
    "Recording": "records",
    "Study": "studies",
    "Survey": "evaluation.survey",
    "TokenLayout": "records",
    "VisattnError": "errors",
    "animation": "drawing.filmstrips",
    "attach": "nn",
    "capture": "pipeline.captures",
    "colorize": "drawing.overlays",
    "contact_sheet": "drawing.sheets",
    "explain": "pipeline.explaining",
    "explain_batch": "pipeline.batches",
    "explain_stages": "pipeline.stages",
    "explain_video": "batch.films",
    "filmstrip": "drawing.filmstrips",
    "gate_page": "drawing.gate_pages",
    "intervene": "pipeline.captures",
    "load_image": "data.sources",
    "load_map": "maps",
    "load_maps": "maps",
    "load_model": "loading",
    "load_study": "studies",
    "matrix_page": "drawing.matrices",
    "normalize": "maps",
    "overlay": "drawing.overlays",
    "permuted": "capturing",
    "prepare": "pipeline.inputs",
    "prepare_batch": "pipeline.inputs",
    "prepare_tensor": "pipeline.tensors",
    "save_map": "maps",
    "stage_page": "pipeline.stages",
    "study": "studies",
}
_PACKAGES = (
    "captioning",
    "data",
    "drawing",
    "embedding",
    "errors",
    "evaluation",
    "families",
    "geometry",
    "images",
    "loading",
    "maps",
    "methods",
    "models",
    "nn",
    "operators",
    "provenance",
    "records",
    "studies",
    "training",
)

__all__ = sorted([*_NAMES, *_PACKAGES, "__version__"])


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name == "__version__":
        return import_module("importlib.metadata").version("visattn")  # takes as long as click
    if name in _NAMES:
        value = getattr(import_module(f"visattn.{_NAMES[name]}"), name)
        globals()[name] = value
        return value
    if name in _PACKAGES:
        return import_module(f"visattn.{name}")
    raise AttributeError(f"module 'visattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
