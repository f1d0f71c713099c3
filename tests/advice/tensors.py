"""Files of tensors, and their comparison with a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def same(model: nn.Module, expected: dict[str, Tensor]) -> bool:
    """Check that a model has exactly these tensors."""
    return all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def kept(content: Any, file: Path) -> Path:
    """Save something with `torch.save`, and return the file."""
    torch.save(content, file)
    return file
