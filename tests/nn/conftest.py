"""Shared networks for tests of `nn`."""

from __future__ import annotations

import pytest
from torch import nn

from tests.nn.small import Net


@pytest.fixture
def net() -> Net:
    model = Net().eval()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.normal_(part.weight)
            nn.init.normal_(part.running_mean)  # type: ignore[arg-type]
    return model
