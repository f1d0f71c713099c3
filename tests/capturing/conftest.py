"""Pretrained model with unfused attention, and a count of traced forward passes, for tests of captures."""

from __future__ import annotations

import pytest
from torch import nn

import visattn
from tests.capturing.written_out import write_out
from visattn import data
from visattn.core.capturing.following.tracing import TokenTracer


@pytest.fixture(scope="module")
def eager() -> nn.Module:
    """Load DINOv2 with timm's unfused attention."""
    model = visattn.load_model(data.OFFLINE_MODEL, weights=data.offline_weights())
    write_out(model)
    return model


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that gets one entry for each forward pass whose tokens are traced."""
    times: list[None] = []
    begin = TokenTracer.__init__
    monkeypatch.setattr(TokenTracer, "__init__", lambda self, *args: times.append(begin(self, *args)))
    return times
