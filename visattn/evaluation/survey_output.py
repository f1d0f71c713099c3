"""Files of a survey: tables, and plots if matplotlib is installed."""

from __future__ import annotations

from typing import Any

from visattn._support.extras import need
from visattn._support.tables import to_csv, to_json
from visattn.core.command_line.talk import note
from visattn.core.provenance import Provenance
from visattn.errors import MissingExtra
from visattn.evaluation.survey import Survey


def survey_files(survey: Survey, provenance: Provenance, quiet: bool) -> dict[str, bytes]:
    """Return the files of a survey by name: tables, and plots if matplotlib is installed."""
    rows = {"heads": survey.heads(), "layers": survey.layers(), "gates": survey.gates(), "photos": survey.photos}
    files = {f"{name}.csv": to_csv(table) for name, table in rows.items() if table}
    files["stats.json"] = to_json({"provenance": provenance.to_dict(), **rows})
    plots = _plots(rows["heads"], rows["layers"], len(rows["photos"]), provenance, quiet) if rows["heads"] else {}
    return {name: text.encode() for name, text in files.items()} | plots


def _plots(heads: Any, layers: Any, photos: int, provenance: Any, quiet: bool) -> dict[str, bytes]:  # noqa: ANN401
    """Draw the plots, by file name; none without matplotlib."""
    try:
        need("matplotlib", "figures", "a plot")
    except MissingExtra as missing:
        note(quiet, f"only tables are written: {missing}")
        return {}
    from visattn.core.drawing.plots import head_statistics

    drawn = {
        "distance.png": head_statistics.distance(heads, layers, photos, provenance),
        "entropy.png": head_statistics.entropy(heads, layers, photos, provenance),
        "mass.png": head_statistics.mass(layers, photos, provenance),
    }
    return {name: png for name, png in drawn.items() if png is not None}
