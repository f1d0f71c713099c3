"""Pretrained model with unfused attention, for tests of captures."""

from __future__ import annotations

import pytest
from torch import nn

import visattn
from tests.capturing.written_out import write_out
from visattn import data


@pytest.fixture(scope="module")
def eager() -> nn.Module:
    """Load DINOv2 with timm's unfused attention."""
    model = visattn.load_model(data.OFFLINE_MODEL, weights=data.offline_weights())
    write_out(model)
    return model
