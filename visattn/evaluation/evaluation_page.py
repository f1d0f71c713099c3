"""Page of an evaluation: curves beside those of nulls, ranks with their critical difference, and the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

import numpy as np

from visattn._support.tables import Row
from visattn.errors import MissingExtra, OptionError
from visattn.evaluation.map_numbers import LEAST, Evaluation
from visattn.evaluation.metric_table import LOCATED, METRICS, Protocol, is_higher_better
from visattn.evaluation.nulls import NULLS
from visattn.evaluation.rank_statistics import mean_ranks
from visattn.evaluation.report.figures import curve_panel, ranks_figure
from visattn.evaluation.report.page import Section, html_page


def evaluation_page(evaluation: Evaluation, model: str, weights: str, how: Protocol) -> str:
    """Return the page of an evaluation, one part for each metric.

    Args:
        evaluation: The numbers.
        model: Name of the model.
        weights: Origin of its weights.
        how: How the metrics were computed.
    """
    photos = len({one.place for one in evaluation.numbers})
    lead = [
        "Each value is a mean over photos, with its 95 % interval. Beside it stands the share of the map's nulls that it beats: shifted "
        "and flipped copies of the map, smooth noise, a center prior, and the edges of the photo. One half is chance. A kind of null is "
        f"beaten if the interval of the difference on the same photos lies on the better side of zero; with fewer than {LEAST} photos, "
        "intervals are too narrow, and no kind is called beaten.",
        "A metric tells how a score falls when parts of a photo are changed. It does not know what the model looks at: an edge map that "
        "never saw the model can have a good number. So a map that does not beat its edges has shown nothing.",
    ]
    rows = evaluation.rows()
    sections = [_section(evaluation, metric, [row for row in rows if row["metric"] == metric]) for metric in evaluation.metrics]
    left_out = list(dict.fromkeys(f"{one.map}: {one.left_out}" for one in evaluation.numbers if one.left_out))
    if left_out:
        sections.append(Section("Left out", left_out))
    baseline = f"replaced by: {how.baseline or 'the default of each metric'}"
    settings = f"steps {how.steps}, by {how.by}, {baseline}, {how.nulls} nulls of a kind, seed {how.seed}"
    foot = [f"{model}, weights: {weights}", settings, f"{photos} photo{'s' * (photos != 1)}, visattn {version('visattn')}"]
    return html_page(f"Maps of {model}", lead, sections, foot)


def _section(evaluation: Evaluation, metric: str, rows: Sequence[Row]) -> Section:
    text = METRICS[metric].text if metric in METRICS else LOCATED[metric].text
    lines = [f"{text[0].upper()}{text[1:]}. {'Higher' if is_higher_better(metric) else 'Lower'} is better."]
    figures = _curves(evaluation, metric)
    if figures:
        lines.append("Blue: mean score over photos. Gray: the mean of the map's nulls.")
    try:
        ranks = mean_ranks(evaluation, metric)
        figures.append(ranks_figure(ranks))
        lines.append(
            f"Mean ranks over {ranks.photos} photo{'s' * (ranks.photos != 1)}; a bar joins maps that the critical difference "
            "(Nemenyi, level 0.05) does not tell apart."
        )
    except (OptionError, MissingExtra) as error:
        lines.append(f"No ranks: {error}")
    return Section(metric, lines, figures, [_line(row) for row in rows])


def _line(row: Row) -> Row:
    """Return a row with intervals in one cell, and each kind of null with whether the map is better."""
    told = {"yes": ", beaten", "worse": ", better than the map", "no": "", None: ""}
    nulls = {name: None if row[name] is None else f"{row[name]:.3g}{told[row[f'above {name}']]}" for name in NULLS}
    return {"map": row["map"], "photos": row["photos"], **{name: _interval(row, name) for name in ("value", "beaten")}, **nulls}


def _interval(row: Row, name: str) -> str | None:
    if row[name] is None:
        return None
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return f"{row[name]:.3g}" + ("" if low is None else f" ({low:.3g} to {high:.3g})")


def _curves(evaluation: Evaluation, metric: str) -> list[str]:
    """Return a panel for each map whose metric has a curve; all have the same axis of scores."""
    means = {}
    for name in evaluation.maps:
        several = [one.curves[metric] for one in evaluation.numbers if one.map == name and metric in one.curves]
        if several:
            nulls = [curve.nulls for curve in several if curve.nulls]
            means[name] = (
                several[0].fractions,
                np.mean([curve.scores for curve in several], 0).tolist(),
                np.mean(nulls, 0).tolist() if nulls else [],
            )
    values = [value for _, scores, nulls in means.values() for value in (*scores, *nulls)]
    limits = (min(0.0, *values), max(values)) if values else (0.0, 1.0)
    return [curve_panel(name, *mean, limits) for name, mean in means.items()]
