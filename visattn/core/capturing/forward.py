"""Forward pass that has ended: where the tokens of its attention calls lie, and what its output is computed from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from visattn._support.faces import Later
from visattn.core.capturing.description import Place
from visattn.core.capturing.following.conclusions import Conclusions, Located, concluded
from visattn.core.capturing.following.locations import by_rule
from visattn.core.capturing.intercept.calls import Call
from visattn.core.capturing.tokens.arrangement import Arrangement, Tokens
from visattn.core.capturing.trace.tape import Attention, Tape
from visattn.core.capturing.trace.verdicts import Verdict
from visattn.core.records import TokenLayout
from visattn.errors import LayoutError

if TYPE_CHECKING:
    from visattn.core.capturing.following import (
        positions as positions_behind,
        projections as projections_of,
        vectors as vectors_behind,
    )
    from visattn.core.capturing.linear import plan as plans
else:
    plans = Later("visattn.core.capturing.linear.plan")
    positions_behind = Later("visattn.core.capturing.following.positions")
    projections_of = Later("visattn.core.capturing.following.projections")
    vectors_behind = Later("visattn.core.capturing.following.vectors")


class Inputs(NamedTuple):
    """Images that a forward pass received: `(height, width)` of each, `(0, 0)` without images, and their number."""

    size: tuple[int, int] = (0, 0)
    batch: int = 0


def placed(place: Place, call: Call, attention: Attention, owner: nn.Module, inputs: Inputs) -> Located | None:
    """Return the arrangement of a call whose tokens are placed by a rule; None if the call is a gate.

    Raises:
        LayoutError: If the rule does not fit.
    """
    try:
        return by_rule(place(owner, call.rows, call.columns, inputs.size), call, inputs.batch), None
    except LayoutError:
        if attention.doubtful:
            return None
        raise


class Forward:
    """Forward pass that has ended.

    Attributes:
        number: Index of the forward pass in the capture.
        inputs: Images that it received.
        normalizes: Whether batch or instance norms ran.
        readouts_fit: Whether the readouts of its tape are those of the present weights, if that was asked.
    """

    readouts_fit: Verdict | None = None

    def __init__(
        self,
        number: int,
        inputs: Inputs,
        tape: Tape,
        place: Place | None,
        wanted: Collection[int],
        used: Mapping[int, Callable[[], Tensor | None]],
        kept: Mapping[int, Tensor],
    ) -> None:
        """Store what is known.

        Args:
            number: Index of the forward pass.
            inputs: Images that it received.
            tape: Its tape.
            place: Rule that places tokens; None if they are traced.
            wanted: Slots whose tokens are asked for.
            used: Tensors that no operation made, by slot.
            kept: Tensors behind the last attention call, by slot, if gradients are needed.
        """
        self.number, self.inputs, self.normalizes = number, inputs, tape.normalizes
        self._tape, self._place, self._wanted, self._used, self._kept = tape, place, wanted, used, kept
        self._conclusions: Conclusions | None = None  # once they were asked for

    def conclusions(self) -> Conclusions | None:
        """Return the conclusions from the tape; None if tokens are placed by a rule."""
        if self._conclusions is None and self._place is None:
            self._conclusions = concluded(self._tape, self._wanted)
        return self._conclusions

    def arrangement(self, call: Call, attention: Attention, owner: nn.Module) -> Located | None:
        """Return the arrangement of a call's tokens, and the layer and call that it follows; None if the call is a gate.

        Raises:
            LayoutError: If the tokens are placed by a rule that does not fit.
        """
        if self._place is not None:
            return placed(self._place, call, attention, owner, self.inputs)
        conclusions = self._conclusions or self.conclusions()
        assert conclusions is not None  # noqa: S101 - tokens are traced
        return conclusions.calls[attention]

    def output_weight(self, call: Call, attention: Attention, arrangement: Arrangement) -> Tensor | None:
        """Return the weight of the output projection behind the heads of a call whose values were kept; see `Projections`."""
        if self._place is not None or arrangement.kind == "sampled":
            return None
        projections = self._tape.projections
        if not isinstance(projections, projections_of.Projections):
            projections = self._tape.projections = projections_of.Projections(self._tape)

        def features() -> Tensor | None:
            ordered = projections_of.features_of(arrangement, attention, call.value.shape[-1])
            return None if ordered is None else call.laid_out(ordered)

        return projections.weight(self._tape, attention, features, lambda slot: self._used[slot]())

    def vectors(self, attention: Attention) -> vectors_behind.Vectors | None:
        """Return where the queries and keys of a call are among the operands of its scores; None if it is unknown."""
        known_vectors = self._tape.vectors
        if attention not in known_vectors:
            known_vectors[attention] = vectors_behind.vectors_of(self._tape, attention)
        vectors = known_vectors[attention]
        return vectors if isinstance(vectors, vectors_behind.Vectors) else None

    def tokens(self, slot: int | None) -> Tokens | None:
        """Return the arrangement of the tokens in a slot that was asked for; None if there is none."""
        conclusions = self.conclusions()
        return None if slot is None or conclusions is None else conclusions.tokens(slot)

    def positions(self) -> tuple[str, Tensor, TokenLayout] | None:
        """Return the table of positions that the model adds to its tokens: its name, the table `(1, N, D)`, and the tokens' layout."""
        if self._place is not None:
            return None
        with torch.no_grad(), torch._C.DisableTorchFunction():
            found = positions_behind.positions_of(self._tape)
            return None if found is None else (found.name, found.tokens.take(found.table).clone(), found.tokens.layout)

    def plan(self) -> plans.Plan:
        """Return which summands the output is linear in."""
        return plans.plan_of(self._tape)

    def kept(self, slot: int) -> Tensor | None:
        """Return the tensor in a slot behind the last attention call, if gradients are needed."""
        return self._kept.get(slot)
