"""Operations of a tape that only move elements, or leave each element where it is."""

from __future__ import annotations

import torch
from torch import Tensor

from visattn.core.capturing.trace.operations import words
from visattn.core.capturing.trace.tape import Entry, Ref

MOVES = words("""
    view reshape flatten unflatten permute transpose swapaxes swapdims movedim moveaxis squeeze unsqueeze T mT t contiguous clone
    __getitem__ narrow select
""")
NOTHING = words("dropout alpha_dropout feature_dropout contiguous clone detach to float type type_as alias requires_grad")


def moved_by(entry: Entry, features: Tensor, shape: torch.Size) -> Tensor | None:
    """Apply an operation of the tape that moves elements, such as `permute`, to a tensor that has a number for each element.

    `shape` is that of the operation's result. Return None if the operation takes several tensors.
    """
    if len(entry.refs) != 1 or not (entry.args and isinstance(entry.args[0], Ref)):
        return None
    if entry.operation.name == "view":  # the strides differ from those of the model
        return features.reshape(shape) if features.numel() == shape.numel() else None
    moved = entry.func(features, *entry.args[1:], **entry.kwargs)
    return moved if isinstance(moved, Tensor) else None
