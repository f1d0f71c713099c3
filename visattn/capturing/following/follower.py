"""Tracing of image tokens along a tape, operation by operation, from the pixels to each attention call.

Each tensor has a shadow tensor of the same shape, whose codes give the image location of each element. Views, windows, shifts and
padding move the codes as they move the elements. Layers that mix channels leave the codes unchanged. Pooling and strides merge them.
The layout of a call is therefore what the model did, not a guess. An unknown operation loses the locations; attention behind it is not
located in the image.

A tensor is placed, lost, learned (computed from parameters and constants only) or foreign (computed from another input of the model).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from visattn.capturing.following.members import Members
from visattn.capturing.following.packing import batch_of, cells_of, packed_size
from visattn.capturing.following.places import Behind, Places, Statuses, color_axis, later
from visattn.capturing.following.rules import Rules
from visattn.capturing.tokens.arrangement import Arrangement
from visattn.capturing.tokens.codes import same_along
from visattn.capturing.tokens.planes import compact
from visattn.capturing.trace.operations import COMBINE, FROM_PYTHON, LIKE, MAKE, PRODUCT, REDUCE
from visattn.capturing.trace.tape import Attention, Entry, Operand, Tape

_DIVIDE = frozenset({"div", "divide", "true_divide", "__truediv__", "__itruediv__"})
_WEIGHING = PRODUCT | {"einsum", "tensordot", "linear"}
UNWATCHED = "a tensor of an earlier forward pass, or of code that is not intercepted"


class TokenTracer:
    """Image locations of the tensors of a tape, as far as it has been traced.

    Attributes:
        known: Status of each slot.
        unseen: Layers that weight tokens in a way that is not recorded, and how.
        sampled: Codes `(N, rows, columns)` of the maps that were sampled at points, by index of the entry; None if they are unknown.
        at: Number of entries traced so far.
    """

    def __init__(self, tape: Tape) -> None:
        """Start at the pixels."""
        self._outside = tape.outside
        slot, pixels = next(((slot, known) for slot, known in tape.outside.items() if known.kind == "pixels"), (-1, None))
        self.image = pixels is not None
        shape = (1, 1, 1, 1) if pixels is None else pixels.shape
        first = next((entry.operation.name for entry in tape.entries if any(ref.slot == slot for ref in entry.refs)), "")
        colors = color_axis(shape, first)
        frames = int(shape[3 - colors]) if len(shape) == 5 else 0
        self._tape = tape
        if tape.packed:
            batch, count = batch_of(shape), sum(grid[0] for grid in tape.packed)
            self.known = Statuses(batch, packed_size(shape, tape.packed), tape.device, count if batch == 1 and count > 1 else 0)
        else:
            self.known = Statuses(int(shape[0]), (int(shape[-2]), int(shape[-1])), tape.device, frames, colors)
        self._rules, self._members = Rules(self.known), Members(self.known, tape.outside)
        self.arrangements: dict[Hashable, Arrangement] = {}  # by the codes of a call; reused for the same codes
        self._passed = 0
        self.at = 0
        self.unseen: dict[str, str] = {}
        self.sampled: dict[int, Tensor | None] = {}

    def see(self, entry: Entry, *, attends: bool) -> None:
        """Transfer locations from the arguments of an operation to its results. After any error the results count as lost.

        Args:
            entry: The operation.
            attends: Whether it is an attention call that is recorded.
        """
        for ref in entry.refs:
            self.meet(ref.slot)
        try:
            self._see(entry, attends)
        except Exception:  # an operation with unexpected behavior
            for made in entry.outs:
                if made is not None:
                    self.known.lose(made.slot, entry.operation.name)
        for made in entry.outs:
            if made is not None:
                self.known.shapes[made.slot] = made.shape
        for before, after in entry.rewritten:
            self.known.shapes[after] = self.known.shapes.get(before, torch.Size())
        self.at += 1

    def meet(self, slot: int) -> None:
        """Set the status of a tensor that no operation produced."""
        known = self.known
        if slot in known.shapes or slot not in self._outside:
            return
        outside = self._outside[slot]
        known.shapes[slot] = outside.shape
        if outside.kind == "pixels" and self._tape.packed:
            cells = cells_of(self._tape)
            if len(set(self._tape.packed)) > 1:
                known.lose(slot, "packed patches of images with different grids")
            elif cells is None:
                known.lose(slot, "packed patches whose places the model does not compute")
            else:
                known.places[slot] = known.patches(cells, self._tape.packed[0], outside.shape)
        elif outside.kind == "pixels":
            known.places[slot] = known.image(outside.shape)
        elif outside.kind == "input":
            known.foreign[slot] = outside.name
        elif outside.kind == "unknown" and outside.shape.numel() > 1:
            known.lose(slot, UNWATCHED)
        else:
            known.learned[slot] = outside.name

    def passed(self, attention: Attention, slot: int, kind: str) -> None:
        """Register a slot as the result of an attention call. The result of learned queries has no location; it counts as learned."""
        self._passed += 1
        known, places = self.known, self.known.places.get(slot)
        if attention.answers_at_keys:
            values = self.of(attention.operands[-1])
            places = values if values is not None and values.codes.shape == known.shapes[slot] else None
        elif places is not None and attention.rows != attention.columns:
            places = places.each(known.planes.coarsened)
        if places is not None:
            places = self._with_images(places, attention)
            known.places[slot] = places.after((self._passed, attention.layer, attention.call))
        elif kind == "pool" or (kind != "unplaced" and self._asks_by_members(attention)):
            self._answered(attention, slot)

    def _with_images(self, places: Places, attention: Attention) -> Places:
        """Give tokens that belonged to no image, such as a class token, to the image that they have attended to."""
        values = self.of(attention.operands[-1])
        if values is None or places.codes.ndim != len(attention.lead) + 2 or not self.known.planes.sets(places.codes):
            return places
        image = self.known.planes.images_of(compact(values.codes)[..., :1]).amax((-1, -2), keepdim=True)
        if bool((image < 0).any()) or places.codes.shape[:-2] != attention.lead:
            return places
        return places._replace(codes=self.known.planes.given(places.codes, image))

    def _asks_by_members(self, attention: Attention) -> bool:
        """Check whether the queries of a located call are members of a set."""
        asking = self.known.places.get(attention.operands[0].slot)
        return asking is None or (not attention.fused and asking.others is not None)

    def _answered(self, attention: Attention, slot: int) -> None:
        """Register the result of an attention call whose queries lie nowhere in the image."""
        known, asking = self.known, attention.operands[0]
        queries, keys = self.of(asking), self.of(attention.operands[1])
        foreign, name = known.foreign.get(asking.slot), known.learned.get(asking.slot, "")
        known.drop(slot)
        (known.learned if foreign is None else known.foreign)[slot] = name if foreign is None else foreign
        if queries is not None:
            self._members.answered(slot, queries, keys)
            if (made := known.members.get(slot)) is not None:
                known.members[slot] = made.after((self._passed, attention.layer, attention.call))

    def one_stream(self, attention: Attention) -> bool:
        """Check whether queries and keys come from the same tokens: the same embedding, behind the same attention call."""
        if not attention.fused:
            weights = self.of(attention.operands[0])
            return weights is None or weights.one_stream
        asking, asked = (self.of(operand) for operand in attention.operands[:2])
        return asking is None or asked is None or asking.stream == asked.stream

    def of(self, operand: Operand) -> Places | None:
        """Return the locations of an operand's elements, or the members of sets that they belong to; None if they are unknown."""
        places = self.known.places.get(operand.slot) or self._members.of(operand.slot)
        return None if places is None else places.each(operand.view)

    def behind(self, operands: Sequence[Operand]) -> Behind:
        """Return the last attention call that flowed into the operands."""
        return later(*(places.behind for operand in operands if (places := self.of(operand)) is not None))

    def _see(self, entry: Entry, attends: bool) -> None:
        known, operation = self.known, entry.operation
        slots = list(dict.fromkeys(ref.slot for ref in entry.refs))
        lost = next((known.lost[slot] for slot in slots if slot in known.lost), None)
        if operation.own and operation.name in LIKE and slots[1:]:  # the second operand only gives shape or type
            slots = slots[:1]
            lost = known.lost.get(slots[0])
        placed = [slot for slot in slots if slot in known.places]
        name = operation.name if operation.own else f"{operation.name} (not a torch function)"
        if operation.own and operation.name in MAKE and len(slots) <= 1:  # the operand only gives shape and type
            if entry.rewritten or operation.writes:
                known.rewrite(entry, None)
            for made in entry.outs:
                if made is not None:
                    known.learned[made.slot] = ""
            return
        if not placed and lost is None:
            self._unplaced(entry, slots)
            return
        found: Any = None
        if placed and operation.own:
            found = self._rules.apply(entry)
        results = [found] if not isinstance(found, list) else found
        mixes = operation.name in PRODUCT or operation.name in ("einsum", "linear")
        partly = lost if mixes or all(slot in known.lost for slot in placed) else None  # otherwise the known locations hold
        for made, places in zip_longest(entry.outs, results):
            if made is None:
                continue
            known.drop(made.slot)
            if isinstance(places, Places) and places.codes.shape == made.shape:
                known.places[made.slot] = places
                if partly is not None:
                    known.lost[made.slot] = partly
            else:
                known.lose(made.slot, known.culprit or lost or name)
        known.culprit = None
        self._watch_scores(entry, slots, attends)
        if operation.name == "grid_sample" and entry.outs[0] is not None and entry.outs[0].slot in known.places:
            self._note_map(entry)
        if entry.rewritten:
            known.rewrite(entry, results[0] if results else None)

    def _note_map(self, entry: Entry) -> None:
        """Note the locations of a map that is sampled at points."""
        values = self.known.places.get(entry.refs[0].slot)
        self.sampled[self.at] = values.codes[:, 0] if values is not None and same_along(values.codes, 1) else None

    def _unplaced(self, entry: Entry, slots: Sequence[int]) -> None:
        """Set the status of results that no pixel reaches. A learned token stays learned when expanded or given a position embedding."""
        known = self.known
        foreign = next((known.foreign[slot] for slot in slots if slot in known.foreign), None)
        name = next((known.learned[slot] for slot in slots if known.learned.get(slot)), "")
        for made in entry.outs:
            if made is not None and entry.operation.name in FROM_PYTHON and made.floating and made.shape.numel() > 1:
                known.lose(made.slot, "a conversion from Python numbers")  # these may come from the image
            elif made is not None:
                known.drop(made.slot)
                (known.learned if foreign is None else known.foreign)[made.slot] = name if foreign is None else foreign
        for before, after in entry.rewritten:
            known.take_over(before, after)
            known.members.pop(after, None)
        self._members.see(entry)

    def _watch_scores(self, entry: Entry, slots: Sequence[int], attends: bool) -> None:
        """Register products of scores and values that are not recorded as attention."""
        known, name = self.known, entry.operation.name
        outs = [made.slot for made in entry.outs if made is not None]
        known.scores.update(slot for slot in outs if slot in known.places and known.places[slot].columns is not None)
        scores = [slot for slot in slots if slot in known.scores]
        if not scores or attends:
            return
        others = [slot for slot in slots if slot not in known.scores and slot not in known.learned]
        if others and (name in _WEIGHING or not entry.operation.own):
            self.unseen[entry.layer] = f"multiplies scores by values with {name}"
            return
        mixed = any(slot in known.mixed for slot in scores)
        if mixed and name in REDUCE and not known.scores.issuperset(outs):
            self.unseen[entry.layer] = "multiplies scores by values elementwise"
            return
        if name in COMBINE - _DIVIDE and self._meets_values(scores, others):
            mixed = True
        going_on = [slot for slot in outs if slot in known.scores or slot in known.lost]
        known.scores.update(going_on)
        if mixed:
            known.mixed.update(going_on)

    def _meets_values(self, scores: Sequence[int], others: Sequence[int]) -> bool:
        """Check whether scores are multiplied by a tensor that has the locations of their keys."""
        known = self.known
        for slot in scores:
            pair = known.places.get(slot)
            if pair is None or pair.columns is None:
                continue
            for other in others:
                places = known.places.get(other)
                if places is None or places.columns is not None:
                    continue
                try:
                    codes, columns, rows = torch.broadcast_tensors(places.codes, pair.columns, pair.codes)  # type: ignore[no-untyped-call]
                except RuntimeError:
                    continue
                if bool((codes == columns).all()) and not bool((codes == rows).all()):
                    return True
        return False
