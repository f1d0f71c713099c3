"""Pages of results: they hold the numbers that were measured, draw them in their place, and refer to nothing outside."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from visattn.evaluation import Causes, Evaluation, Findings, MapNumbers, Protocol, mean_ranks
from visattn.evaluation.causes.causes_page import causes_page
from visattn.evaluation.evaluation_page import evaluation_page
from visattn.evaluation.map_numbers import Curves
from visattn.evaluation.nulls import NULLS
from visattn.evaluation.report.figures import ranks_figure


class Page(HTMLParser):
    """Tables of a page, its figures, and what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.references: list[str] = []
        self.open: list[str] = []
        self.lines: list[list[tuple[float, float]]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.references += [str(given[name]) for name in ("src", "href") if name in given]
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag == "polyline":
            self.lines.append([tuple(map(float, point.split(","))) for point in str(given["points"]).split()])  # type: ignore[misc]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1].append(data)


def evaluation(names: list[str], photos: int = 12) -> Evaluation:
    random, numbers = np.random.default_rng(0), []
    for place in range(photos):
        for number, name in enumerate(names):
            value = 0.2 + 0.1 * number + 0.01 * random.random()
            nulls = {kind: [0.9 + 0.01 * random.random()] for kind in NULLS}
            curves = {"deletion": Curves([0.0, 0.5, 1.0], [1.0, value, 0.0], [1.0, 0.9, 0.0])}
            numbers.append(MapNumbers(place, f"photo {place}", "class 3", name, {"deletion": value}, {"deletion": nulls}, curves))
    return Evaluation(numbers, ["deletion"])


def test_an_evaluation_shows_its_rows_and_curves() -> None:
    found = evaluation(["a", "<b>"])
    page = Page(evaluation_page(found, "a <model>", "trained", Protocol()))
    assert page.references == []
    head, *rows = page.tables[0]
    assert head == ["map", "photos", "value", "beaten", *NULLS]
    for row, expected in zip(rows, found.rows(), strict=True):
        assert row[:2] == [expected["map"], "12"]
        assert row[2].startswith(f"{expected['value']:.3g} (")
        assert all(cell.endswith(", beaten") for cell in row[4:])
    nulls, own = page.lines[:2]  # of the first panel
    heights = [y for _, y in own]
    assert heights[0] == min(heights)
    assert heights[1] == pytest.approx(heights[0] + (heights[2] - heights[0]) * (1 - float(found.rows()[0]["value"])), abs=0.1)
    assert [x for x, _ in own] == [x for x, _ in nulls]


def test_photos_without_nulls_and_one_photo_have_a_page() -> None:
    one = MapNumbers(0, "photo 0", "class 3", "a", {"saco": 0.5}, {"saco": {}})
    page = Page(evaluation_page(Evaluation([one], ["saco"]), "model", "none", Protocol()))
    assert page.tables[0][1] == ["a", "1", "0.5"]  # no share of nulls


def test_few_photos_beat_no_kind_of_null() -> None:
    rows = evaluation(["a"], 9).rows()
    assert {rows[0][f"above {kind}"] for kind in NULLS} == {None}
    assert {evaluation(["a"], 10).rows()[0][f"above {kind}"] for kind in NULLS} == {"yes"}


def test_a_page_tells_its_settings() -> None:
    text = evaluation_page(evaluation(["a"]), "model", "none", Protocol(steps=7, baseline="black", seed=3))
    assert "steps 7, by pixels, replaced by: black, 5 nulls of a kind, seed 3" in text
    assert "mean color" not in text


def test_ranks_stand_in_their_place() -> None:
    ranks = mean_ranks(evaluation(["best", "second", "third", "last"], 30), "deletion")
    assert ranks.ranks.tolist() == [1, 2, 3, 4]
    svg = ranks_figure(ranks)
    starts = [float(x) for x in re.findall(r'd="M([\d.]+),40V', svg)]
    assert np.diff(starts) == pytest.approx(np.full(3, 140), abs=0.2)
    words = re.findall(r">([a-z]+ \d\.\d\d)<", svg)
    assert words == ["best 1.00", "second 2.00", "third 3.00", "last 4.00"]
    assert f"critical difference {ranks.critical:.2f}" in svg
    bars = re.findall(r'd="M([\d.]+),\d+H([\d.]+)" class="bar"', svg)
    assert len(bars) == len(ranks.alike())


def test_causes_show_verdicts_and_networks() -> None:
    values: Any = np.linspace(0.85, 0.99, 40)
    controls = {name: np.full(40, 0.5) for name in ("shifted copies", "center prior", "cause without effect")}
    several = [
        Findings("mine & yours", "mark", "cnn", f"mark_cnn_{seed}", (8, 8), values, np.ones(40), controls) for seed in range(2)
    ]
    left_out = Findings("mine & yours", "mark", "vit", "mark_vit_0", left_out="needs a CNN")
    text = causes_page(Causes([*several, left_out]), 40, 2)
    page = Page(text)
    assert page.references == []
    verdict = dict(zip(*page.tables[0], strict=True))
    assert (verdict["verdict"], verdict["worst auroc"]) == ("found in 2 of 2", "0.920")
    assert [row[1] for row in page.tables[1][1:]] == ["mark_cnn_0", "mark_cnn_1"]
    assert "mine &amp; yours on mark_vit_0: needs a CNN" in text
    dots = [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', text)]
    start, length = map(float, re.findall(r'<path d="M(\d+),\d+h(\d+)" class="axis"', text)[0])
    expected = [float(row["auroc"]) for row in Causes(several).rows()]
    assert [(x - start) / length for x in dots] == pytest.approx(expected, abs=1e-3)
