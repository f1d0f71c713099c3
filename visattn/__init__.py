"""visattn: where does a vision model look, and can you believe it?

Names are loaded on first use (PEP 562), so `import visattn` costs nothing and imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from visattn import (
        captioning as captioning,
        data as data,
        evaluation as evaluation,
        families as families,
        methods as methods,
        models as models,
        nn as nn,
        training as training,
    )
    from visattn.drawing.filmstrips import filmstrip as filmstrip
    from visattn.drawing.overlays import colorize as colorize, overlay as overlay
    from visattn.drawing.sheets import contact_sheet as contact_sheet
    from visattn.errors import VisattnError as VisattnError
    from visattn.images import load_image as load_image
    from visattn.loading import load_model as load_model
    from visattn.maps import AttentionMap as AttentionMap, Heatmap as Heatmap, normalize as normalize
    from visattn.nn import attach as attach
    from visattn.pipeline.captures import capture as capture, intervene as intervene
    from visattn.pipeline.explanation import Explanation as Explanation, explain as explain
    from visattn.pipeline.inputs import prepare as prepare, prepare_batch as prepare_batch
    from visattn.records import (
        AttentionRecord as AttentionRecord,
        FeatureRecord as FeatureRecord,
        Recording as Recording,
        TokenLayout as TokenLayout,
    )

    __version__: str

# public name -> module that defines it; no module is called like a public function, or importing it would replace the function
_NAMES = {
    "AttentionMap": "maps",
    "AttentionRecord": "records",
    "Explanation": "pipeline.explanation",
    "FeatureRecord": "records",
    "Heatmap": "maps",
    "Recording": "records",
    "TokenLayout": "records",
    "VisattnError": "errors",
    "attach": "nn",
    "capture": "pipeline.captures",
    "colorize": "drawing.overlays",
    "contact_sheet": "drawing.sheets",
    "explain": "pipeline.explanation",
    "filmstrip": "drawing.filmstrips",
    "intervene": "pipeline.captures",
    "load_image": "images",
    "load_model": "loading",
    "normalize": "maps",
    "overlay": "drawing.overlays",
    "prepare": "pipeline.inputs",
    "prepare_batch": "pipeline.inputs",
}
_PACKAGES = ("captioning", "data", "evaluation", "families", "methods", "models", "nn", "training")

__all__ = sorted([*_NAMES, *_PACKAGES, "__version__"])


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name == "__version__":
        return version("visattn")
    if name in _NAMES:
        value = getattr(import_module(f"visattn.{_NAMES[name]}"), name)
        globals()[name] = value
        return value
    if name in _PACKAGES:
        return import_module(f"visattn.{name}")
    raise AttributeError(f"module 'visattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
