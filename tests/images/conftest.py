"""Fixture for tests of images."""

from __future__ import annotations

import numpy as np
import pytest

from tests.images.making import Pixels


@pytest.fixture(scope="module")
def pixels() -> Pixels:
    """Return an image without any symmetry."""
    return np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
