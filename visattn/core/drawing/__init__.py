"""Drawing functions: heatmaps over photos, figures of many panels, filmstrips. Only `plots` uses matplotlib.

Names are imported on first use, so that commands can read the choices in `style` and `colormaps` without importing torch.
"""

from typing import TYPE_CHECKING

from visattn._support.faces import face

if TYPE_CHECKING:
    from visattn.core.drawing.filmstrips import (
        StripOptions as StripOptions,
        animation as animation,
        entropies as entropies,
        filmstrip as filmstrip,
    )
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
    from visattn.core.drawing.style import Style as Style
    from visattn.core.drawing.style_options import StyleOptions as StyleOptions
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            ".filmstrips": ["StripOptions", "animation", "entropies", "filmstrip"],
            ".gate_pages": ["gate_page"],
            ".marks": ["draw_box", "draw_glimpses", "draw_window", "outline", "ring", "spotlight"],
            ".matrices": ["matrix_page"],
            ".overlays": ["colorize", "overlay", "rgb_components"],
            ".pages": ["captioned", "side_by_side"],
            ".pictures": ["Picture"],
            ".sheets": ["contact_sheet"],
            ".style_options": ["StyleOptions"],
            ".style": ["Style"],
        },
    )
