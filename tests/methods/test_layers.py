"""Unusual layers: several calls, several grids, parallel layers, and the error messages for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visattn
from tests import tiny
from visattn.core import methods
from visattn.errors import CaptureError, LayoutError, OptionError


def test_a_call_of_a_layer_that_calls_its_attention_twice_can_be_chosen() -> None:
    made = tiny.recording()
    made.records[1] = replace(made[1], layer=made[0].layer, call=1)
    first, second = (methods.attention(made, layer=0, call=call) for call in (0, 1))
    assert not torch.equal(first.values, second.values)
    assert "blocks.0.attn calls its attention 2 times; this is call 1" in second.provenance.notes
    with pytest.raises(OptionError, match=r"call must lie in \[0, 1\], got 2: blocks\.0\.attn calls its attention 2 times"):
        methods.attention(made, layer=0, call=2)
    with pytest.raises(OptionError, match=r"blocks\.0\.attn calls its attention several times, so layers cannot be multiplied"):
        methods.rollout(made)


def test_layers_of_two_grids_cannot_share_one_map() -> None:
    made = tiny.recording()
    other = tiny.layout(grid=(3, 2))
    made.records[1] = replace(made[1], queries=other, keys=other)
    with pytest.raises(
        OptionError, match=r"blocks\.0\.attn and blocks\.1\.attn attend over different tokens, so they cannot share one map"
    ):
        methods.attention(made, layer="all")


class Blocks(nn.Module):
    """Two attention layers, in sequence or in parallel."""

    def __init__(self, parallel: bool) -> None:
        super().__init__()
        self.parallel, self.embed = parallel, nn.Conv2d(3, 8, 16, 16)
        self.first, self.second = nn.MultiheadAttention(8, 2, batch_first=True), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, pixels: Tensor) -> Tensor:
        tokens = self.embed(pixels).flatten(2).transpose(1, 2)
        one: Tensor = tokens + self.first(tokens, tokens, tokens)[0]
        again = tokens if self.parallel else one
        out: Tensor = one + self.second(again, again, again)[0]
        return out


def test_parallel_layers_are_not_multiplied() -> None:
    def run(parallel: bool) -> visattn.Recording:
        model = Blocks(parallel)
        with torch.no_grad(), visattn.capture(model) as recording:
            model(tiny.pixels())
        return recording

    assert methods.rollout(run(parallel=False), query="mean").values.shape == (1, *tiny.GRID)
    with pytest.raises(
        OptionError, match=r"the query is not known: the model's output holds each token apart\. Choose the query: mean"
    ):
        methods.rollout(run(parallel=False))
    with pytest.raises(OptionError, match="second does not follow first but the pixels, so layers cannot be multiplied"):
        methods.rollout(run(parallel=True))


@pytest.mark.parametrize(
    ("query", "patch"), [("input:0,0", "patch:0,0"), ("input:31.9,16", "patch:1,1"), ("input:15,47", "patch:0,2")]
)
def test_a_pixel_of_the_input_is_the_patch_that_covers_it(query: str, patch: str) -> None:
    found, expected = (methods.attention(tiny.recording(), query=one) for one in (query, patch))
    assert found.provenance.parameters["query"] == patch
    assert torch.equal(found.values, expected.values)


def test_a_pixel_outside_or_without_numbers_is_refused() -> None:
    with pytest.raises(OptionError, match="no token covers the input pixel 32,0"):
        methods.attention(tiny.recording(), query="input:32,0")
    with pytest.raises(OptionError, match="an input query must be input:Y,X with numbers, got 'input:top'"):
        methods.attention(tiny.recording(), query="input:top")


def test_data_that_was_not_recorded_is_refused() -> None:
    with pytest.raises(OptionError, match="the output of the attention kernel was not kept"):
        tiny.recording()[0].error()
    with pytest.raises(OptionError, match="no module's name matches 'nothing'"), visattn.capture(tiny.vit(), features="nothing"):
        pass


def test_an_input_that_is_not_an_image_is_refused() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(CaptureError, match="the model was given no floating-point tensor"), visattn.capture(model):
        model(torch.zeros(2, 3))


class Hidden(nn.Module):
    """Module that attends in windows, whose size is stored outside the module."""

    def __init__(self, state: object) -> None:
        super().__init__()
        self.state, self.embed = state, nn.Conv2d(3, 8, 16, 16)

    def forward(self, pixels: Tensor) -> Tensor:
        tokens = self.embed(pixels).flatten(2).transpose(1, 2)
        tokens = tokens.reshape(-1, self.state.size, 8)[:, None]  # type: ignore[attr-defined]
        return F.scaled_dot_product_attention(tokens, tokens, tokens)


class State:
    size = 6


def test_a_forward_pass_that_took_another_path_is_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Hidden(State())

    def run() -> visattn.Recording:
        with torch.no_grad(), visattn.capture(model) as recording:
            model(tiny.pixels())
        return recording

    assert run()[0].operator.query_index is None
    monkeypatch.setattr(State, "size", 3)  # on the class: nothing on the model shows it
    for _ in range(3):
        assert run()[0].operator.query_index.tolist() == [[0, 1, 2], [3, 4, 5]]  # type: ignore[union-attr]


class FiveAxes(Hidden):
    def forward(self, pixels: Tensor) -> Tensor:
        tokens = self.embed(pixels).flatten(2).transpose(1, 2)[:, None, None]
        return F.scaled_dot_product_attention(tokens, tokens, tokens)


def test_a_given_grid_needs_operands_with_the_usual_axes() -> None:
    model = FiveAxes(State())
    with pytest.raises(LayoutError, match=r"operands must be \(B, heads, tokens, d\)"), visattn.capture(model, grid=tiny.GRID):
        model(tiny.pixels())
