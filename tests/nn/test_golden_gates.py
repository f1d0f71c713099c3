"""Gates of CNNs against numbers that the authors' code, timm and torchvision printed."""

from __future__ import annotations

import pytest
from torch import nn

from tests.nn.golden import check, filled, maps, parameters
from visattn.nn import CBAM, SqueezeExcite

GOLDEN: dict[str, tuple[nn.Module, int, tuple[float, float, float, float]]] = {
    "SE": (SqueezeExcite(32, width=2), 162, (1.094927632, 0.270749285, -0.030234348, 294.297787)),
    "CBAM official": (CBAM(32), 262, (0.053434374, 0.000464684, -0.000136646, 0.467229)),
    "CBAM paper": (CBAM(32, variant="paper"), 228, (1.266582176, 0.016126127, -0.038046724, 422.524949)),
}


@pytest.mark.parametrize("name", list(GOLDEN))
def test_gate_equals_the_published_code(name: str) -> None:
    module, count, expected = GOLDEN[name]
    assert parameters(module) == count
    check(filled(module)(maps()), expected)
