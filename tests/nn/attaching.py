"""Helpers for tests of attaching: a small network."""

from __future__ import annotations

from torch import Tensor, nn

import visattn


class Silence(nn.Module):
    """Attention that multiplies by 0."""

    def __init__(self, channels: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x * 0


def names(handle: visattn.nn.Attachment) -> list[str]:
    return [site.name for site in handle.sites]
