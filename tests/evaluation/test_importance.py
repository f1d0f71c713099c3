"""Importance of heads, compared with loops and with the model without a head."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import visattn
from tests import tiny
from tests.oracles import maps as oracles
from visattn.core.operators import MatrixGradient
from visattn.core.records import Recording
from visattn.evaluation.importance import head_ablation, head_importance


def graded() -> tuple[Recording, list[Tensor]]:
    """Build random attention and gradients."""
    made = tiny.recording(batch=2, heads=3, prefix=("cls", "register0"), grid=(3, 5))
    slopes = [torch.randn(record.operator.shape, dtype=torch.float64) for record in made]
    records = [
        replace(record, operator=record.operator.with_gradient(MatrixGradient(slope)))
        for record, slope in zip(made, slopes, strict=True)
    ]
    return replace(made, records=records), slopes


def test_importance_equals_the_sum_over_all_pairs() -> None:
    made, slopes = graded()
    for record, slope, found in zip(made, slopes, head_importance(made, dtype=torch.float64), strict=True):
        weights, gradient = oracles.array(tiny.matrices(record)), oracles.array(slope)
        batch, heads, queries, keys = weights.shape
        for b, h in np.ndindex(batch, heads):
            pairs = [weights[b, h, i, j] * gradient[b, h, i, j] for i in range(queries) for j in range(keys)]
            assert abs(float(found[b, h]) - abs(math.fsum(pairs))) < 1e-10


def test_importance_is_the_derivative_of_the_score_with_respect_to_the_head_scale() -> None:
    model = tiny.vit().double()
    pixels = tiny.pixels(2).double()
    with visattn.capture(model, gradients=True) as recording:
        score = model(pixels)[:, 1]
    found = head_importance(recording.gradients(score), dtype=torch.float64)
    step = 1e-4
    for record, importance in zip(recording, found, strict=True):
        for head in range(tiny.HEADS):
            sides = []
            for scale in (1 - step, 1 + step):
                with torch.no_grad(), visattn.intervene(model, record.layer, head=head, scale=scale):
                    sides.append(model(pixels)[:, 1])
            slope = (sides[1] - sides[0]) / (2 * step)
            torch.testing.assert_close(importance[:, head], slope.abs(), rtol=1e-4, atol=1e-7)


def test_ablation_is_the_drop_of_the_score_without_a_head() -> None:
    model = tiny.vit()
    pixels = tiny.pixels(2)
    with torch.no_grad(), visattn.capture(model) as recording:
        score = model(pixels)[:, 1]

    def without(layer: str, head: int) -> Tensor:
        with torch.no_grad(), visattn.intervene(model, layer, head=head, scale=0):
            logits: Tensor = model(pixels)
        return logits[:, 1]

    found = head_ablation(recording, score, without)
    assert [value.shape for value in found] == [(2, tiny.HEADS)] * tiny.LAYERS
    for number in range(tiny.LAYERS):
        for head in range(tiny.HEADS):
            projection: Any = model.get_submodule(f"blocks.{number}.attn.proj")
            weight = projection.weight
            columns = slice(head * 16, head * 16 + 16)
            kept = weight.detach()[:, columns].clone()
            with torch.no_grad():
                weight[:, columns] = 0  # the head's part of the projection
                expected = score - model(pixels)[:, 1]
                weight[:, columns] = kept
            torch.testing.assert_close(found[number][:, head], expected, atol=1e-5, rtol=1e-4)
            assert float(expected.abs().max()) > 1e-4
