from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import visattn
from tests import tiny
from visattn.core.geometry import Box
from visattn.core.operators import SoftmaxOperator
from visattn.core.records import FeatureRecord, Recording, TokenLayout
from visattn.errors import LayoutError, OptionError, ShapeError

PREFIX = ("cls", "register0")
PLACE = tiny.layout(PREFIX, (5, 7))


@pytest.mark.parametrize(
    ("prefix", "grid", "tokens", "cells"),
    [((), (2, 3), 6, 6), (PREFIX, (5, 7), 37, 35), (("query0",), (), 1, 0), (("cls",), (4, 2, 3), 25, 24)],
    ids=["patches only", "two prefix tokens", "no grid", "frames"],
)
def test_layout_counts_prefix_and_grid(prefix: tuple[str, ...], grid: tuple[int, ...], tokens: int, cells: int) -> None:
    layout = TokenLayout("tokens", prefix, grid, Box(0, 0, 32, 48))
    assert len(layout) == tokens
    assert layout.cells == cells


@pytest.mark.parametrize(("cell", "token"), [((0, 0), 2), ((0, 6), 8), ((1, 0), 9), ((4, 6), 36)], ids=str)
def test_patches_are_numbered_row_by_row_after_the_prefix(cell: tuple[int, int], token: int) -> None:
    assert PLACE.patch(*cell) == token
    assert PLACE.cell(token) == cell


@pytest.mark.parametrize("token", [0, 1])
def test_prefix_tokens_have_no_cell(token: int) -> None:
    assert PLACE.cell(token) is None


@pytest.mark.parametrize("cell", [(5, 0), (0, 7), (-1, 0), (0, -1)], ids=str)
def test_patch_outside_the_grid_is_refused(cell: tuple[int, int]) -> None:
    with pytest.raises(OptionError, match=rf"patch {cell[0]},{cell[1]} lies outside the grid of 5 x 7"):
        PLACE.patch(*cell)


def test_patch_of_a_layout_without_grid_is_refused() -> None:
    with pytest.raises(OptionError, match="lies outside the grid"):
        TokenLayout("pool", ("query0",), (), Box(0, 0, 32, 48)).patch(0, 0)


def test_layouts_are_equal_only_with_one_grid() -> None:
    assert tiny.layout(grid=(2, 3)) == tiny.layout(grid=(2, 3))
    assert tiny.layout(grid=(2, 3)) != tiny.layout(grid=(3, 2))


@pytest.mark.parametrize("grid", [(3, 3), (2, 4)], ids=str)
def test_record_whose_layout_has_another_number_of_tokens_is_refused(grid: tuple[int, int]) -> None:
    operator = SoftmaxOperator(*tiny.operands(7))
    with pytest.raises(LayoutError, match=r"blocks\.0\.attn: the layout has .* the model used 7 and 7"):
        tiny.record(operator, tiny.layout(grid=grid))


def test_record_of_a_transposed_grid_is_accepted() -> None:
    operator = SoftmaxOperator(*tiny.operands(7))
    assert tiny.record(operator, tiny.layout(grid=(3, 2))).keys.cell(3) == (1, 0)


def test_features_whose_layout_has_another_number_of_tokens_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"blocks\.0: tokens must be \(B, 7, D\) according to the layout, got \(1, 6, 4\)"):
        FeatureRecord("blocks.0", 0, "tokens", torch.zeros(1, 6, 4), layout=tiny.layout())


def two_forwards() -> Recording:
    """Record two forward passes of two self-attention layers and a pooling head."""
    made = Recording()
    pooled = TokenLayout("pool", ("query0",), (), Box(0, 0, 32, 48))
    head = SoftmaxOperator(tiny.operands(1)[0], tiny.operands(7)[1])
    for forward in (0, 1):
        once = tiny.recording(seed=forward)
        pool = replace(once[0], layer="attn_pool", kind="pool", operator=head, queries=pooled, value=None)
        made.records += [replace(record, forward=forward) for record in [*once.records, pool]]
        made.features += [replace(feature, forward=forward) for feature in once.features]
    return made


def test_recording_is_a_sequence_in_the_order_of_the_calls() -> None:
    made = two_forwards()
    assert len(made) == 6
    assert [record.layer for record in made] == ["blocks.0.attn", "blocks.1.attn", "attn_pool"] * 2
    assert made[-1] is made.records[5]
    assert made[1:3] == made.records[1:3]
    assert made.layers == ["blocks.0.attn", "blocks.1.attn", "attn_pool"]
    assert made.forwards == [0, 1]


@pytest.mark.parametrize(("forward", "number"), [(0, 0), (1, 1), (-1, 1), (-2, 0)])
def test_select_separates_forwards(forward: int, number: int) -> None:
    chosen = two_forwards().select(forward=forward)
    assert [record.forward for record in chosen] == [number] * 3
    assert [feature.forward for feature in chosen.features] == [number] * 2


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (0, ["blocks.0.attn"]),
        (-1, ["attn_pool"]),
        ("blocks.1.attn", ["blocks.1.attn"]),
        ([0, "attn_pool"], ["blocks.0.attn", "attn_pool"]),
    ],
    ids=["first", "last", "by name", "several"],
)
def test_select_finds_layers(layer: int | str | list[int | str], expected: list[str]) -> None:
    chosen = two_forwards().select(layer=layer, forward=0)
    assert [record.layer for record in chosen] == expected
    assert len(chosen.features) == 2


def test_select_finds_a_kind() -> None:
    assert two_forwards().select(kind="pool").layers == ["attn_pool"]


def test_select_finds_a_token_set() -> None:
    assert two_forwards().select(space="tokens").layers == ["blocks.0.attn", "blocks.1.attn"]


def test_layer_index_counts_within_the_kind() -> None:
    assert two_forwards().select(kind="self", layer=-1).layers == ["blocks.1.attn"]


def test_select_does_not_change_the_recording() -> None:
    made = two_forwards()
    made.select(forward=0, layer=0)
    assert len(made) == 6


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"layer": 3}, r"layer must lie in \[-3, 2\], got 3"),
        ({"layer": -4}, r"layer must lie in \[-3, 2\], got -4"),
        ({"layer": "blocks.9.attn"}, r"layer must be one of blocks.0.attn, .*, got 'blocks.9.attn'"),
        ({"forward": 2}, "forward must be one of 2 recorded passes, got 2"),
    ],
    ids=["too late", "too early", "unknown name", "forward"],
)
def test_select_refuses_what_was_not_recorded(choice: dict[str, int | str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        two_forwards().select(**choice)  # type: ignore[arg-type]


def test_error_of_outputs_that_are_all_zero_is_zero() -> None:
    """Take the values of a block away, as the first queries of a DETR have none."""
    model: Any = tiny.vit()
    for part in (model.blocks[0].attn.qkv.weight, model.blocks[0].attn.qkv.bias):
        torch.nn.init.zeros_(part)
    with visattn.capture(model, gradients=True) as recording:
        model(tiny.pixels())
    assert recording[0].error() == 0.0
    assert 0 < recording[1].error() < 1e-4
