from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from visattn._support.tables import Row, to_csv, to_json, to_markdown, to_text

ROWS: list[Row] = [
    {"layer": "blocks.0", "head": 0, "entropy": 1.23456789},
    {"layer": "blocks.10", "head": 11, "entropy": 0.00012345678},
]


def read_back(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_json_is_indented_and_round_trips() -> None:
    assert json.loads(to_json(ROWS)) == ROWS
    assert to_json({"a": [1]}) == '{\n  "a": [\n    1\n  ]\n}'


@pytest.mark.parametrize(
    "text", ["🦆", "\u2028", "\udcff", "</script>", 'say "x"\n'], ids=["emoji", "U+2028", "surrogate", "tag", "quote"]
)
def test_json_of_any_text_is_ascii_and_round_trips(text: str) -> None:
    assert to_json({"name": text}).isascii()
    assert json.loads(to_json({"name": text})) == {"name": text}


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_json_refuses_nan_and_infinity(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json({"a": value})


def test_json_refuses_unserializable_values() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        to_json({"a": object()})


def test_csv_has_a_header_and_a_line_for_each_row() -> None:
    assert to_csv(ROWS) == "layer,head,entropy\nblocks.0,0,1.23456789\nblocks.10,11,0.00012345678\n"


@pytest.mark.parametrize("cell", ["=1+1", "=cmd|' /C calc'!A0", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1"], ids=repr)
def test_csv_cell_that_a_spreadsheet_would_run_is_quoted(cell: str) -> None:
    found = read_back(to_csv([{"a": cell, "b": 1}]))[0]["a"]
    assert found[:1] == "'"
    assert found.endswith(cell.strip())


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        (-1.5, "-1.5"),
        (0, "0"),
        ("", ""),
        (None, ""),
        ("a=b", "a=b"),
        ("a-b", "a-b"),
        (True, "True"),
        ("a,b", "a,b"),
        ("a\nb", "a\nb"),
    ],
    ids=repr,
)
def test_harmless_csv_cell_is_unchanged(value: object, cell: str) -> None:
    assert read_back(to_csv([{"a": value, "b": 1}]))[0]["a"] == cell


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\0")), min_size=2, max_size=2))
def test_csv_of_any_text_round_trips_except_for_the_quote(cells: list[str]) -> None:
    back = read_back(to_csv([{"a": cells[0], "b": cells[1], "c": "end"}]))[0]
    assert [back["a"].removeprefix("'"), back["b"].removeprefix("'"), back["c"]] == [c.removeprefix("'") for c in cells] + ["end"]


def test_markdown_has_a_header_a_rule_and_short_numbers() -> None:
    assert to_markdown(ROWS) == (
        "| layer | head | entropy |\n| --- | --- | --- |\n| blocks.0 | 0 | 1.235 |\n| blocks.10 | 11 | 0.0001235 |\n"
    )


@pytest.mark.parametrize(
    ("value", "cell"), [("a|b", "a\\|b"), ("a\nb", "a b"), (None, ""), (1234567.0, "1.235e+06"), (7, "7")], ids=repr
)
def test_markdown_cell_is_escaped(value: object, cell: str) -> None:
    assert to_markdown([{"x": value}]).splitlines()[2] == f"| {cell} |"


def test_text_columns_are_aligned() -> None:
    assert to_text(ROWS) == "layer      head  entropy\nblocks.0   0     1.235\nblocks.10  11    0.0001235\n"


def test_text_is_not_escaped_as_markdown() -> None:
    assert to_text([{"a": "x|y"}]) == "a\nx|y\n"


def test_text_has_no_trailing_spaces() -> None:
    assert to_text([{"a": "x", "b": None}, {"a": "long", "b": ""}]) == "a     b\nx\nlong\n"


@pytest.mark.parametrize("render", [to_csv, to_markdown, to_text], ids=["csv", "markdown", "text"])
def test_empty_table_is_empty_text(render: Any) -> None:
    assert render([]).strip() == ""


def test_no_control_character_reaches_a_terminal() -> None:
    rows = [{"layer": "a\x1b]0;x\x07\u202eb"}]
    assert "a\\x1b]0;x\\x07\\u202eb" in to_text(rows)
    assert "\x1b" not in to_markdown(rows)
