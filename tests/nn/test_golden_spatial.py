"""Attention over positions against recorded outputs of the authors' code and timm, and parameter counts."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from tests.nn.golden import check, filled, maps, parameters, tokens
from visattn.nn import (
    AttentionAugmentedConv2d,
    ExternalAttention,
    GlobalContext,
    NonLocal,
    SelfAttention2d,
    StandAloneSelfAttention,
)

GOLDEN: dict[str, tuple[nn.Module, int, tuple[float, float, float, float]]] = {
    "GC": (GlobalContext(32), 199, (19.584803687, -0.142646715, 0.955566726, 1904.512203)),
    "NL as timm's": (NonLocal(32, width=8, scale="channels"), 1144, (57.386140371, 0.369519075, 0.489667853, 1324.177639)),
}

FORMULA: dict[str, tuple[nn.Module, int, tuple[float, float, float, float]]] = {
    "NL": (NonLocal(32, norm=False), 2128, (132.979439159, 0.403030139, 0.516500712, 1330.838593)),
    "NL scaled": (NonLocal(32, norm=False, scale="width"), 2128, (112.450638736, 0.394057161, 0.511886552, 1328.450747)),
}
"""What a formula gave that was written down elsewhere."""

PARAMETERS: dict[str, tuple[nn.Module, int]] = {
    "GC": (GlobalContext(64), 653),
    "GC scale": (GlobalContext(64, fusion="scale"), 653),
    "NL": (NonLocal(64), 3 * (64 * 32 + 32) + 32 * 64 + 64 + 2 * 64),
    "NL gaussian": (NonLocal(64, variant="gaussian"), 64 * 32 + 32 + 32 * 64 + 64 + 2 * 64),
    "NL concat": (NonLocal(64, variant="concat"), 3 * (64 * 32 + 32) + 32 * 64 + 64 + 2 * 64 + 2 * 32),
    "SAGAN": (SelfAttention2d(64), 64 * 64 // 2 + 1),
    "SAGAN official": (SelfAttention2d(64, variant="official"), 5 * 64 * 64 // 4 + 1),
    "SASA": (StandAloneSelfAttention(64, 96), 3 * 64 * 96 + 7 * 96),
    "augmented": (
        AttentionAugmentedConv2d(64, 80, key_dim=32, value_dim=16, size=(6, 9), bias=False),
        9 * 64 * (80 - 16) + 64 * (2 * 32 + 16) + 16 * 16 + (2 * 6 + 2 * 9 - 2) * 4,
    ),
    "external": (ExternalAttention(64), 2 * 64 * 64),
    "external official": (ExternalAttention(64, variant="official"), 2 * 64 * 64 + 64 * 64 + 64 + 64 * 64 + 2 * 64),
}
"""The number of parameters by the paper, in the default of each."""


@pytest.mark.parametrize("name", list(GOLDEN))
def test_module_equals_the_published_code(name: str) -> None:
    module, count, expected = GOLDEN[name]
    assert parameters(module) == count
    check(filled(module)(maps()), expected)


@pytest.mark.parametrize("name", list(FORMULA))
def test_module_equals_the_formula(name: str) -> None:
    module, count, expected = FORMULA[name]
    assert parameters(module) == count
    check(filled(module)(maps()), expected)


def test_external_attention_equals_the_formula() -> None:
    module, table = filled(ExternalAttention(32, slots=8)), tokens().mT.reshape(2, 32, 7, 7)
    y: Tensor = module(table)
    assert parameters(module) == 2 * 8 * 32
    check(y.flatten(2).mT, (0.005331334, -0.485260983, 0.487533949, 263.133496))


@pytest.mark.parametrize("name", list(PARAMETERS))
def test_module_has_the_papers_number_of_parameters(name: str) -> None:
    module, count = PARAMETERS[name]
    assert parameters(module) == count
