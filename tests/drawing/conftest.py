"""Figures that tests look at instead of their pixels."""

from __future__ import annotations

from typing import Any

import pytest

from visattn.core.drawing.plots import figures
from visattn.core.provenance import Provenance


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record all figures in place of encoding them."""
    kept: list[Any] = []

    def keep(figure: Any, provenance: Provenance) -> bytes:
        del provenance
        kept.append(figure)
        return b""

    monkeypatch.setattr(figures, "png", keep)
    return kept
