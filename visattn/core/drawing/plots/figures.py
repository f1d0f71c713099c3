"""Common parts of all plots: colors, a two-line title, and PNG encoding with provenance.

Figures are made without pyplot, so the caller's backend and open figures are not affected.
"""

from __future__ import annotations

import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from visattn._support.tables import to_json
from visattn.core.provenance import Provenance

BLUE, VERMILION, FAINT = "#0072B2", "#D55E00", "#767676"  # Okabe and Ito's colors, which color-blind readers can distinguish


def figure(title: str, facts: str, width: float, height: float) -> Figure:
    """Create an empty figure, with its size in inches and a title of two lines."""
    made = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(made)
    made.suptitle(f"{title}\n{facts}", x=0.01, ha="left", fontsize=10, parse_math=False)
    return made


def png(made: Figure, provenance: Provenance) -> bytes:
    """Encode the figure as a PNG that stores its provenance."""
    stream = io.BytesIO()
    made.savefig(stream, format="png", metadata={"visattn": to_json(provenance.to_dict())})
    return stream.getvalue()
