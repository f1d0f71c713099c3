"""Attention as modules, one readable page each, for any network of your own.

Those for CNNs take and give `(B, C, H, W)`, channels first. `ATTENTION` holds, by the name that `attach` knows, those that are built
from the number of channels alone and keep the shape.
"""

from torch import nn

from visattn.nn._cbam import CBAM
from visattn.nn._se import SqueezeExcite

ATTENTION: dict[str, type[nn.Module]] = {
    "cbam": CBAM,
    "se": SqueezeExcite,
}

__all__ = ["ATTENTION", "CBAM", "SqueezeExcite"]
