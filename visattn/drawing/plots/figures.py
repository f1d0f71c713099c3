"""What all figures share: colors, a title that names its facts, and PNG bytes with their provenance.

Figures are made without pyplot, so that the caller's backend and open figures stay as they are.
"""

from __future__ import annotations

import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from visattn._support.tables import to_json
from visattn.provenance import Provenance

BLUE, VERMILION, FAINT = "#0072B2", "#D55E00", "#767676"  # Okabe and Ito's, told apart by every eye


def figure(title: str, facts: str, width: float, height: float) -> Figure:
    """An empty figure of a size in inches under two lines of title."""
    made = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(made)
    made.suptitle(f"{title}\n{facts}", x=0.01, ha="left", fontsize=10, parse_math=False)
    return made


def png(made: Figure, provenance: Provenance) -> bytes:
    """The figure as a PNG with its provenance."""
    stream = io.BytesIO()
    made.savefig(stream, format="png", metadata={"visattn": to_json(provenance.to_dict())})
    return stream.getvalue()
