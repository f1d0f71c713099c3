"""Errors of methods, each one line that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch

import visattn
from tests import tiny
from visattn.core import methods
from visattn.core.methods.sinks import find_sinks
from visattn.core.operators import SoftmaxOperator
from visattn.core.pipeline.again import scoring
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.targets import Target
from visattn.core.records import AttentionRecord, Recording
from visattn.errors import OptionError, ShapeError

MADE = tiny.recording()


def graded() -> Recording:
    model = tiny.vit()
    with visattn.capture(model, gradients=True) as recording:
        logits = model(tiny.pixels())
    return recording.gradients(logits[:, 1])


def crossing(grid: tuple[int, int]) -> Recording:
    """Record queries of one grid that attend to keys of another."""
    queries, keys = tiny.layout((), (2, 3), "queries"), tiny.layout((), grid, "keys")
    query, key = tiny.operands(len(queries))[0], tiny.operands(len(keys))[1]
    return Recording([AttentionRecord("blocks.0.attn", 0, 0, "cross", SoftmaxOperator(query, key), queries, keys)])


def windowed() -> Recording:
    value = MADE[0].value
    assert value is not None
    return replace(MADE, records=[replace(MADE[0], value=value[:, :, None], output_weight=torch.zeros(16, 16))])


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no gradient": (lambda: methods.relevance(MADE), "a score's gradient is needed. Use capture(model, gradients=True)"),
    "no gradient for LeGrad": (lambda: methods.legrad(MADE), "a score's gradient is needed"),
    "no gradient for Grad-CAM": (lambda: methods.gradcam(MADE), "a score's gradient is needed"),
    "no gradient in pieces": (lambda: next(MADE[0].operator.gradient_pieces()), "the operator has no gradient"),
    "head": (lambda: methods.attention_gradient(graded(), head=2), "head must lie in [-2, 1], got 2"),
    "several grids": (lambda: methods.relevance(crossing((4, 4))), "over several grids of the image (2 x 3, 4 x 4)"),
    "no values": (
        lambda: methods.norm_attention(replace(MADE, records=[replace(MADE[0], value=None)])),
        "values were not recorded. Use capture(model, values=True)",
    ),
    "no projection": (
        lambda: methods.norm_attention(MADE),
        "its output projection is not known. Use method 'attention'",
    ),
    "no stream": (
        lambda: methods.norm_attention(
            replace(MADE, records=[replace(MADE[0], output_weight=torch.zeros(16, 16))]), add_residual=True, query="patch:0,0"
        ),
        "the input of its residual connection is not known",
    ),
    "windows": (lambda: methods.norm_attention(windowed()), "norms are defined for attention over all tokens, not in windows"),
    "residual of a head": (
        lambda: methods.norm_attention(MADE, keep_heads=True, add_residual=True),
        "the residual vector belongs to no head. Leave out keep_heads=True or add_residual=True",
    ),
    "rollout by": (lambda: methods.rollout(MADE, weights_by="size"), "unknown weights_by 'size'"),  # type: ignore[arg-type]
    "discard over": (lambda: methods.rollout(MADE, discard_over="column"), "unknown discard_over 'column'"),  # type: ignore[arg-type]
    "sinks": (lambda: methods.attention(MADE, sinks="hide"), "unknown sinks 'hide'"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_method_refuses(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(OptionError) as caught:
        call()
    assert message in str(caught.value)


def test_scores_of_layers_must_be_of_every_layer() -> None:
    model = tiny.vit()
    with visattn.capture(model, gradients=True) as recording:
        logits = model(tiny.pixels())
    with pytest.raises(OptionError, match=r"scores must be given for every layer, but blocks\.1\.attn has none"):
        recording.gradients({"blocks.0.attn": logits.sum()})


def test_score_of_a_batch_of_two_is_refused() -> None:
    two = Prepared(tiny.pixels(2), (), ())
    with pytest.raises(ShapeError, match="a score needs a batch of one photo, got 2"), scoring(tiny.vit(), two, Target()):
        pass


@pytest.mark.parametrize("name", ["relevance", "legrad", "gradient_rollout", "rollout"])
def test_class_attention_after_the_layers_is_refused(name: str) -> None:
    model = timm.create_model("cait_xxs24_224", img_size=tiny.INPUT, embed_dim=32, depth=2, num_heads=2, num_classes=4).eval()
    with visattn.capture(model, gradients=True) as recording:
        logits = model(tiny.pixels())
    message = "pools tokens that these layers do not have, so layers cannot be multiplied. Use method 'attention'"
    made = recording.gradients(logits[:, 1])
    assert message in str(methods.METHODS[name].accepts(made))
    with pytest.raises(OptionError, match="pools tokens that these layers do not have"):
        methods.METHODS[name].function(made)
    assert methods.attention(made).layout.grid == tiny.GRID


@pytest.mark.parametrize("treatment", ["drop", "redistribute"])
def test_attention_without_sinks_equals_loops(treatment: Any) -> None:
    made = tiny.recording(batch=2, heads=3, grid=(8, 8))
    query, key = tiny.operands(65, batch=2, heads=3, seed=4)
    query[1, ..., 0], key[1, :, 21, 0] = 4.0, 8.0  # every query of the second image attends to one patch
    record = replace(made[0], operator=SoftmaxOperator(query, key))
    made = replace(made, records=[record, *made.records[1:]])
    sunk = [[made[0].keys.patch(sink.row, sink.column) for sink in found] for found in find_sinks(made)]
    assert sunk[1] == [21]
    found = methods.attention(made, layer=0, sinks=treatment, dtype=torch.float64).values
    for image in range(2):
        for head in range(3):
            row = tiny.matrices(record)[image, head, 0].tolist()
            lost = sum(row[token] for token in sunk[image])
            others = [token for token in range(1, 65) if token not in sunk[image]]
            for token in range(1, 65):
                share = row[token] / (1 - lost) if treatment == "drop" else row[token] + lost / len(others)
                expected = share if token in others else 0.0
                assert float(found[image, head].flatten()[token - 1]) == pytest.approx(expected, abs=1e-10)
