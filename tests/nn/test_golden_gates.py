"""Gates of CNNs against recorded outputs of the authors' code, timm and torchvision."""

from __future__ import annotations

import pytest
from torch import nn

from tests.nn.golden import check, filled, maps, parameters
from visattn.nn import (
    BAM,
    CBAM,
    ECA,
    SCSE,
    CoordinateAttention,
    GatherExcite,
    SelectiveKernel,
    SimAM,
    SqueezeExcite,
    TripletAttention,
)

GOLDEN: dict[str, tuple[nn.Module, int, tuple[float, float, float, float]]] = {
    "SE": (SqueezeExcite(32, width=2), 162, (1.094927632, 0.270749285, -0.030234348, 294.297787)),
    "CBAM official": (CBAM(32), 262, (0.053434374, 0.000464684, -0.000136646, 0.467229)),
    "CBAM paper": (CBAM(32, variant="paper"), 228, (1.266582176, 0.016126127, -0.038046724, 422.524949)),
    "scSE": (SCSE(32), 1105, (137.971938024, 0.394986742, -0.027006154, 345.807047)),
    "ECA": (ECA(32), 3, (0.903685706, 0.418314176, -0.022532228, 280.167520)),
    "coordinate": (CoordinateAttention(32), 856, (0.756508991, 0.108902249, -0.018675152, 83.870711)),
    # The sum of squares was printed as 0.348223; the explicit permutations of the paper give the other digits
    "triplet": (TripletAttention(32), 300, (0.203097958, 0.123385776, -0.000215868, 0.348222842)),
    "SimAM": (SimAM(32), 0, (1.091923359, 0.582543930, -0.027702860, 553.986352)),
    "SK": (SelectiveKernel(32, width=8, groups=1), 19344, (134.505742958, 0.0, 0.374405037, 37.154210)),
}

FORMULA: dict[str, tuple[nn.Module, int, int, tuple[float, float, float, float]]] = {
    "BAM official, square": (BAM(32), 5, 323, (-4.547814090, 1.033779866, 1.602158386, 1809.617076)),
    "BAM paper, square": (BAM(32, variant="paper"), 5, 323, (-4.760973820, 1.434755404, 1.750763440, 2304.363933)),
    "BAM official": (BAM(32), 7, 323, (2.962135559, 1.034861441, -0.076866454, 2538.675967)),
    "GE of all": (GatherExcite(32), 7, 0, (1.850813119, 0.429919598, -0.022823818, 280.338412)),
    "GE of 2": (GatherExcite(32, extent=2), 7, 0, (131.322366947, 0.578439692, -0.028656573, 297.727374)),
    "GE of 4": (GatherExcite(32, extent=4), 7, 0, (19.814667763, 0.391195286, -0.022065732, 281.773592)),
}
"""What formulas gave that were written down elsewhere; the first row is also what the authors' code gives, once it runs."""

PARAMETERS: dict[str, tuple[nn.Module, int]] = {
    "SE": (SqueezeExcite(64), 580),
    "scSE": (SCSE(64), 4257),
    "CBAM official": (CBAM(64), 680),
    "CBAM paper": (CBAM(64, variant="paper"), 612),
    "BAM": (BAM(64), 1173),
    "coordinate": (CoordinateAttention(64), 1688),
    "triplet": (TripletAttention(64), 300),
    "GE theta of 8": (GatherExcite(64, extent=8, variant="theta"), 3 * 11 * 64),
    "GE theta of all": (GatherExcite(64, variant="theta", size=(5, 7)), 64 * 35 + 128),
    "GE theta-plus of 2": (GatherExcite(64, extent=2, variant="theta-plus"), 11 * 64 + 580),
    "SK": (SelectiveKernel(64), 2 * (9 * 64 * 2 + 128) + 64 * 32 + 64 + 2 * 32 * 64),
}
"""The published number of parameters at 64 channels, in the default of each."""


@pytest.mark.parametrize("name", list(GOLDEN))
def test_gate_equals_the_published_code(name: str) -> None:
    module, count, expected = GOLDEN[name]
    assert parameters(module) == count
    check(filled(module)(maps()), expected)


@pytest.mark.parametrize("name", list(FORMULA))
def test_gate_equals_the_formula(name: str) -> None:
    module, columns, count, expected = FORMULA[name]
    assert parameters(module) == count
    check(filled(module)(maps(columns)), expected)


@pytest.mark.parametrize("name", list(PARAMETERS))
def test_gate_has_the_published_number_of_parameters(name: str) -> None:
    module, count = PARAMETERS[name]
    assert parameters(module) == count
