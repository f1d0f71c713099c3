"""Products on a tape that gate feature maps, by the rule that `docs/modules.md` states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from visattn._support.types import Role
from visattn.core.capturing.gating.factors import Sources, operands
from visattn.core.capturing.tokens.arrangement import Tokens
from visattn.core.capturing.tokens.equations import Equation
from visattn.core.capturing.trace.tape import Entry
from visattn.core.records import FeatureRecord


class Multiplied(NamedTuple):
    """Product of feature maps and a gate.

    Attributes:
        side: Index of the gate among the two factors.
        squashes: Numbers of the entries that bound the gate.
        letters: Axes of the features and of the gate, if the product is an einsum; otherwise None.
        repeated: Whether the gate was copied along an axis, as by `repeat`.
        of: What the gate differs along: `channels`, `positions`, or `both`, also a part of both.
    """

    side: int
    squashes: frozenset[int]
    letters: tuple[str, str] | None = None
    repeated: bool = False
    of: str = "both"

    def gate(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the gate among the factors `tensors`, with the four axes of the features; those that it lacks have length 1."""
        gate, axes = tensors[self.side].detach(), tensors[1 - self.side].ndim
        if self.letters is not None:
            of_features, of_gate = self.letters
            gate = gate.permute([of_gate.index(letter) for letter in of_features if letter in of_gate])
            gate = gate[tuple(slice(None) if letter in of_gate else None for letter in of_features)]
        gate = gate[(None,) * (axes - gate.ndim)]
        for axis in range(1, axes):
            first = gate.narrow(axis, 0, 1)
            gate = first if not gate.stride(axis) or (self.repeated and bool((gate == first).all())) else gate
        return gate


def multiplied(sources: Sources, entry: Entry, equation: Equation | None, tensors: Sequence[Tensor]) -> Multiplied | None:
    """Return how an entry that has just run multiplies feature maps by a gate; None if it does not.

    `tensors` are its two factors, and `equation` is that of an einsum.
    """
    refs, factors = operands(entry), [sources.factor(ref.slot) for ref in operands(entry)]
    strengths = [0 if factor is None else factor.strength for factor in factors]
    if not refs or strengths[0] == strengths[1]:
        return None
    side = int(strengths[1] > strengths[0])
    factor, features, result = factors[side], tensors[1 - side], entry.outs[0]
    letters = None if equation is None else (equation.letters[1 - side], equation.letters[side])
    is_map = features.ndim == 4 and features.is_floating_point() and refs[1 - side].slot in sources.tape.descends
    if factor is None or result is None or not is_map or result.shape != features.shape:
        return None
    if letters is not None and (equation is None or equation.result != letters[0] or not set(letters[1]) <= set(letters[0])):
        return None
    gate_slot, features_slot = refs[side].slot, refs[1 - side].slot
    repeated = sources.smallest(gate_slot) < tensors[side].numel()
    product = Multiplied(side, factor.squashes, letters, repeated)
    shape = product.gate(tensors).shape
    axes = {axis for axis, size in enumerate(shape) if size > 1 and axis}
    product = product._replace(of="channels" if axes == {1} else "positions" if axes <= {2, 3} else "both")
    return product if _is_gate(sources, shape, features.shape, gate_slot, features_slot) else None


def _is_gate(sources: Sources, shape: torch.Size, features_shape: torch.Size, gate_slot: int, features_slot: int) -> bool:
    """Check that a factor is one for each image, is no activation function of the features, and no half of a gated linear unit."""
    is_one_number = sources.smallest(gate_slot) == shape[0] and features_shape[1:].numel() > 1
    if shape[0] != features_shape[0] or is_one_number:
        return False
    if sources.smallest(gate_slot) < features_shape.numel():
        return True
    roots = sources.roots(features_slot)
    is_activation = sources.roots(gate_slot) <= roots
    return not is_activation and bool(roots & sources.behind(gate_slot))


def gate_record(layer: str, forward: int, gate: Tensor, shape: torch.Size, tokens: Tokens | None) -> FeatureRecord:
    """Return the record of a gate with four axes that features of a shape were multiplied by.

    Args:
        layer: Name of the module that computed it.
        forward: Number of the forward pass.
        gate: The gate; axes along which it is the same have length 1.
        shape: Shape of the features.
        tokens: Where the features lie, and which of their axes is that of channels; None if it was not traced: then it is the second.
    """
    channels = 1 if tokens is None else tokens.channels
    value = gate.movedim(channels, 1)
    size = torch.Size([shape[0], shape[channels], *(side for axis, side in enumerate(shape) if axis not in (0, channels))])
    if value.shape[2:].numel() == 1 and value.shape[1] == size[1]:
        return FeatureRecord(layer, forward, "channel_gate", value.flatten(1))
    role: Role = "spatial_gate" if value.shape == (size[0], 1, *size[2:]) else "gate"
    value = value if role == "spatial_gate" else value.expand(size)
    has_places = tokens is not None and tokens.order is None and tokens.layout.grid == tuple(size[2:])
    return FeatureRecord(layer, forward, role, value.contiguous(), layout=tokens.layout if has_places and tokens else None)
