"""A small network to attach to, and what tests of attaching share."""

from __future__ import annotations

from torch import Tensor, nn

import visattn


class Silence(nn.Module):
    """Attention that lets nothing through."""

    def __init__(self, channels: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x * 0


def names(handle: visattn.nn.Attached) -> list[str]:
    return [site.name for site in handle.sites]
