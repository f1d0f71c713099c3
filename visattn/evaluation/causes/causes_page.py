"""Page of the findings of methods on networks of known causes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from visattn._support.tables import Row
from visattn.data.scenes import TITLES
from visattn.evaluation.causes.findings import CONTROLS, COPIES, ENOUGH, FEWEST, LEVEL, MARGIN, SURE, Causes
from visattn.evaluation.causes.networks import PATCH
from visattn.evaluation.report.figures import Interval, intervals_figure
from visattn.evaluation.report.page import Section, html_page

_KINDS = {"cnn": "CNN", "vit": "vision transformer"}
_DECIDES: dict[str, str] = {str(cause): title for cause, title in TITLES.items()}
_DECIDES[PATCH] = "adversarial patch that turns the answer to one class"


def causes_page(causes: Causes, scenes: int, seed: int) -> str:
    """Return the page: verdicts, then the numbers of each network by cause.

    Args:
        causes: The findings.
        scenes: Number of scenes that were asked for.
        seed: Their seed.
    """
    rows, verdicts = causes.rows(), causes.verdicts()
    names = list(dict.fromkeys(str(row["map"]) for row in rows))
    lead = [
        "Each network decides by one known thing, so the pixels that its answer depends on are known. "
        "AUROC is the probability that one of these pixels has a larger value than another pixel.",
        f"A method finds the cause of a network if the lower end of the 95 % interval of its AUROC is {SURE} or more, and if it is above "
        f"each of three controls by more than {MARGIN}: {COPIES} shifted copies of the same map, a center prior, and the same method where "
        f"the cause has no effect (paired t-tests, the largest of three p-values, Holm's correction over {len(rows)} rows, level {LEVEL}). "
        f"With fewer than {FEWEST} scenes there is no verdict.",
        f"A method may be trusted with a cause only if it finds it in each of {ENOUGH} networks or more. These networks are small and the "
        "scenes simple: a method that misses a cause here cannot be trusted with it; one that finds it here is not proven elsewhere.",
    ]
    sections = [Section("Verdicts", rows=verdicts)]
    for cause in dict.fromkeys(str(row["cause"]) for row in rows):
        for kind in dict.fromkeys(str(row["kind"]) for row in rows if row["cause"] == cause):
            chosen = [row for name in names for row in rows if (row["map"], row["cause"], row["kind"]) == (name, cause, kind)]
            shown = [{name: value for name, value in row.items() if name not in ("cause", "kind")} for row in chosen]
            title = f"{cause}, {_KINDS[kind]}"
            text = [f"What decides: {_DECIDES[cause]}. Blue: AUROC with its interval. Gray: its controls. Dashed: {SURE}."]
            sections.append(Section(title, text, [_figure(chosen)], _with_exponents(shown), "numbers"))
    left_out = [f"{one.map} on {one.network}: {one.left_out}" for one in causes.findings if one.left_out]
    if left_out:
        sections.append(Section("Left out", left_out))
    foot = [f"visattn {version('visattn')}, {scenes} scenes of each network, seed {seed}"]
    return html_page(f"Known causes: {', '.join(names)}", lead, sections, foot)


def _figure(rows: Sequence[Row]) -> str:
    lines = [
        Interval(
            f"{row['map']} on {row['network']}",
            float(row["auroc"]),
            (float(row["low"]), float(row["high"])),
            [float(row[name]) for name in CONTROLS if row[name] is not None],
        )
        for row in rows
    ]
    return intervals_figure("AUROC of each network, with its interval and its controls", lines, SURE)


def _with_exponents(rows: Sequence[Row]) -> list[Row]:
    return [{name: f"{value:.1e}" if name == "p" else value for name, value in row.items()} for row in rows]
