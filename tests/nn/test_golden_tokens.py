"""Attention over tokens against recorded outputs of timm and torchvision, and scores against a second implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.nn.golden import check, filled, parameters, tokens
from visattn import nn as ours

Row = tuple[float, float, float, float]

MODULES: dict[str, tuple[nn.Module, tuple[Any, ...], int, Row]] = {
    "multi-head": (ours.MultiHeadAttention(32, 4), (), 4224, (84.474747317, -5.876082309, 5.629401426, 36865.051569)),
    "class attention": (ours.ClassAttention(32, 4), (), 4128, (0.006706485, -0.501537241, 0.475608687, 5.538238)),
    "talking heads": (ours.TalkingHeadsAttention(32, 4), (), 4168, (29.274724682, -1.360932242, -0.163013168, 1143.111878)),
    "cross-covariance": (ours.CrossCovarianceAttention(32, 4), (), 4132, (0.439721397, -2.588462128, 2.843771539, 5692.112907)),
    "window": (ours.WindowAttention(32, 4), ((7, 7),), 4900, (84.433615837, -5.886279889, 5.617868510, 36860.994174)),
}

SCORES: dict[str, tuple[nn.Module, int, Row]] = {
    "additive": (ours.AdditiveScore(32, 32, attention_dim=16), 1056, (0.352497418, 0.323977032, 0.229396079, 2.966632310)),
    "dot": (ours.DotScore(), 0, (0.993268016, 0.830514044, 0.884803945, 30.332589)),
    "scaled dot": (ours.ScaledDotScore(), 0, (0.831682185, 0.708389306, 0.714021468, 20.748278)),
    "general": (ours.GeneralScore(32, 32), 1024, (0.001949933, -0.008239192, 0.006306281, 1.783026258)),
    "cosine": (ours.CosineScore(5.0), 0, (0.918937338, 0.776802385, 0.802370750, 25.829202)),
}

LOCAL: dict[bool, Row] = {
    False: (0.082037804, 0.103210751, 0.046851921, 0.266229897),
    True: (1.005039246, 0.843555427, 0.926454663, 29.992941),
}


def queries() -> Tensor:
    """Return queries `(2, 1, 32)`."""
    return torch.sin(1 + torch.arange(64, dtype=torch.float64)).reshape(2, 1, 32)


@pytest.mark.parametrize("name", list(MODULES))
def test_attention_equals_the_published_code(name: str) -> None:
    module, arguments, count, expected = MODULES[name]
    assert parameters(module) == count
    check(filled(module)(tokens(), *arguments), expected)
    check(module(tokens(), *arguments, need_weights=True)[0], expected)


@pytest.mark.parametrize("name", list(SCORES))
def test_attention_by_a_score_equals_the_golden_numbers(name: str) -> None:
    score, count, expected = SCORES[name]
    assert parameters(score) == count
    out, _ = ours.attend(filled(score)(queries(), tokens()), tokens())
    check(out, expected)


@pytest.mark.parametrize("renormalize", [False, True])
def test_a_gaussian_without_a_window_equals_the_golden_numbers(renormalize: bool) -> None:
    centers = torch.tensor([[[2.3, 4.1]], [[5.0, 0.7]]], dtype=torch.float64)
    local = ours.LocalPredictive(32, 2, truncate=False, renormalize=renormalize)
    out, _ = local.attend(queries() @ tokens().mT, tokens(), centers, (7, 7))
    check(out, LOCAL[renormalize])


COUNTS: dict[str, tuple[nn.Module, int]] = {
    "class attention": (ours.ClassAttention(64), 16448),
    "talking heads": (ours.TalkingHeadsAttention(64), 16592),
    "cross-covariance": (ours.CrossCovarianceAttention(64), 16456),
    "window": (ours.WindowAttention(64), 17992),
    "sliding window": (ours.SlidingWindowAttention(64, radius=1), 4 * 64 * 64 + 4 * 64),
    "sliding window with global tokens": (ours.SlidingWindowAttention(64, radius=1, global_tokens=2), 7 * 64 * 64 + 7 * 64),
    "soft attention": (ours.SoftAttention(32, 24, attention_dim=16), 32 * 16 + 24 * 16 + 16 + 16 + 1),
    "hard attention": (ours.HardAttention(32, 24, attention_dim=16), 32 * 16 + 24 * 16 + 16 + 16 + 1),
    "location": (ours.LocationScore(32, 49), 32 * 49),
    "cosine, learned": (ours.CosineScore(learned=True), 1),
    "concat": (ours.AdditiveScore(32, 24, attention_dim=16, bias=False), 16 * (32 + 24) + 16),
    "local-p": (ours.LocalPredictive(32, 2, attention_dim=16), 16 * 32 + 2 * 16),
}


@pytest.mark.parametrize("name", list(COUNTS))
def test_a_module_has_as_many_parameters_as_its_formula(name: str) -> None:
    module, count = COUNTS[name]
    assert parameters(module) == count
