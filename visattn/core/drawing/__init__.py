"""Drawing functions: heatmaps over photos, figures of many panels, filmstrips. Only `plots` uses matplotlib.

Names are imported on first use, so that commands can read the choices in `style` and `colormaps` without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from visattn.core.drawing.filmstrips import animation as animation, entropies as entropies, filmstrip as filmstrip
    from visattn.core.drawing.gate_pages import gate_page as gate_page
    from visattn.core.drawing.marks import (
        draw_box as draw_box,
        draw_glimpses as draw_glimpses,
        draw_window as draw_window,
        outline as outline,
        ring as ring,
        spotlight as spotlight,
    )
    from visattn.core.drawing.matrices import matrix_page as matrix_page
    from visattn.core.drawing.overlays import colorize as colorize, overlay as overlay, rgb_components as rgb_components
    from visattn.core.drawing.pages import captioned as captioned, side_by_side as side_by_side
    from visattn.core.drawing.pictures import Picture as Picture
    from visattn.core.drawing.sheets import contact_sheet as contact_sheet
    from visattn.core.drawing.style import Style as Style, StyleOptions as StyleOptions

_NAMES = {
    "Picture": "pictures",
    "Style": "style",
    "StyleOptions": "style",
    "animation": "filmstrips",
    "captioned": "pages",
    "colorize": "overlays",
    "contact_sheet": "sheets",
    "draw_box": "marks",
    "draw_glimpses": "marks",
    "draw_window": "marks",
    "entropies": "filmstrips",
    "filmstrip": "filmstrips",
    "gate_page": "gate_pages",
    "matrix_page": "matrices",
    "outline": "marks",
    "overlay": "overlays",
    "rgb_components": "overlays",
    "ring": "marks",
    "side_by_side": "pages",
    "spotlight": "marks",
}

__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name in _NAMES:
        return getattr(import_module(f"visattn.core.drawing.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'visattn.core.drawing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
