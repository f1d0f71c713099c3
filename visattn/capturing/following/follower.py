"""Following the tokens of an image along a tape, operation by operation, from the pixels to each attention.

Beside each tensor goes a tensor of the same shape that says which place each number stands for: views, windows, shifts and padding do
to the codes what they do to the numbers; layers that mix channels leave them; pooling and strides merge them. So the layout of a call
is what the model did, not a guess. An operation that is not known here loses the places, and the attention behind it is not put on
the image.

A tensor is placed, lost, learned (it descends from the model's parameters and from constants only) or foreign (from another input of
the model).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import zip_longest
from typing import Any

import torch

from visattn.capturing.following.places import Behind, Places, Statuses, later
from visattn.capturing.following.rules import Rules
from visattn.capturing.tokens.arrangement import Arrangement
from visattn.capturing.trace.operations import COMBINE, FROM_PYTHON, MAKE, PRODUCT, REDUCE
from visattn.capturing.trace.tape import Attention, Entry, Operand, Tape

_WEIGHING = PRODUCT | {"einsum", "tensordot", "linear"}
UNWATCHED = "code that is not watched"


class Follower:
    """Places of the tensors of a tape, as far as it was followed.

    Attributes:
        known: What is known of each slot.
        unseen: Layers that weigh tokens in a way that is not recorded, and what they do.
        at: Number of entries that were followed.
    """

    def __init__(self, tape: Tape) -> None:
        """Start at the pixels."""
        self._outside = tape.outside
        pixels = next((known for known in tape.outside.values() if known.kind == "pixels"), None)
        self.image = pixels is not None
        shape = (1, 1, 1, 1) if pixels is None else pixels.shape
        self.known = Statuses(int(shape[0]), (int(shape[-2]), int(shape[-1])), tape.device)
        self._rules = Rules(self.known)
        self.arrangements: dict[Hashable, Arrangement] = {}  # by the codes of a call, for others that have the same
        self._passed = 0
        self.at = 0
        self.unseen: dict[str, str] = {}

    def see(self, entry: Entry) -> None:
        """Take over the places of an operation's arguments to its results. Whatever goes wrong, places are lost by that."""
        for ref in entry.refs:
            self.meet(ref.slot)
        try:
            self._see(entry)
        except Exception:  # an operation that does what nobody thought of
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
        """Take note of a tensor from outside."""
        known = self.known
        if slot in known.shapes or slot not in self._outside:
            return
        outside = self._outside[slot]
        known.shapes[slot] = outside.shape
        if outside.kind == "pixels":
            known.places[slot] = known.image(outside.shape)
        elif outside.kind == "input":
            known.foreign[slot] = outside.name
        elif outside.kind == "unknown" and outside.shape.numel() > 1:
            known.lose(slot, UNWATCHED)
        else:
            known.learned[slot] = outside.name

    def passed(self, attention: Attention, slot: int, kind: str) -> None:
        """State that a slot is the result of an attention; what learned queries have read stays where they are, nowhere."""
        self._passed += 1
        known, places = self.known, self.known.places.get(slot)
        if attention.answers_at_keys:
            values = self.of(attention.operands[-1])
            places = values if values is not None and values.codes.shape == known.shapes[slot] else None
        elif places is not None and attention.rows != attention.columns:
            places = places.each(known.planes.coarsened)
        if places is not None:
            known.places[slot] = places.after((self._passed, attention.layer, attention.call))
        elif kind == "pool":
            known.drop(slot)
            known.learned[slot] = known.learned.get(attention.operands[0].slot, "")

    def one_stream(self, attention: Attention) -> bool:
        """Whether queries and keys come from the same tokens: the same embedding, behind the same attention."""
        if not attention.fused:
            weights = self.of(attention.operands[0])
            return weights is None or weights.one_stream
        asking, asked = (self.of(operand) for operand in attention.operands[:2])
        return asking is None or asked is None or asking.stream == asked.stream

    def of(self, operand: Operand) -> Places | None:
        """Where the numbers of an operand belong, if that is known."""
        places = self.known.places.get(operand.slot)
        if places is None:
            return None
        if operand.axes is not None:
            return places.each(lambda codes: codes.permute(operand.axes or ()))
        if operand.groups > 1:
            return places.each(lambda codes: codes.repeat_interleave(operand.groups, -3))
        return places

    def behind(self, operands: Sequence[Operand]) -> Behind:
        """The last attention that flowed into operands."""
        return later(*(places.behind for operand in operands if (places := self.of(operand)) is not None))

    def _see(self, entry: Entry) -> None:
        known, operation = self.known, entry.operation
        slots = list(dict.fromkeys(ref.slot for ref in entry.refs))
        lost = next((known.lost[slot] for slot in slots if slot in known.lost), None)
        placed = [slot for slot in slots if slot in known.places]
        name = operation.name if operation.own else f"{operation.name}, which is not torch's own,"
        if operation.own and operation.name in MAKE and len(slots) <= 1:  # of that tensor it takes the form alone
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
        partly = lost if mixes or all(slot in known.lost for slot in placed) else None  # else what is added lies at known places
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
        self._watch_scores(entry, slots)
        if entry.rewritten:
            known.rewrite(entry, results[0] if results else None)

    def _unplaced(self, entry: Entry, slots: Sequence[int]) -> None:
        """What comes from no pixel: a learned token is still that after it was expanded or had its position added."""
        known = self.known
        foreign = next((known.foreign[slot] for slot in slots if slot in known.foreign), None)
        name = next((known.learned[slot] for slot in slots if known.learned.get(slot)), "")
        for made in entry.outs:
            if made is not None and entry.operation.name in FROM_PYTHON and made.floating and made.shape.numel() > 1:
                known.lose(made.slot, "numbers of Python")  # which may have come from the image
            elif made is not None:
                known.drop(made.slot)
                (known.learned if foreign is None else known.foreign)[made.slot] = name if foreign is None else foreign
        for before, after in entry.rewritten:
            known.take_over(before, after)

    def _watch_scores(self, entry: Entry, slots: Sequence[int]) -> None:
        """Note products of scores with values that are not recorded as an attention."""
        known, name = self.known, entry.operation.name
        outs = [made.slot for made in entry.outs if made is not None]
        known.scores.update(slot for slot in outs if slot in known.places and known.places[slot].columns is not None)
        scores = [slot for slot in slots if slot in known.scores]
        if not scores or entry.attention is not None:
            return
        others = [slot for slot in slots if slot not in known.scores and slot not in known.learned]
        if others and (name in _WEIGHING or not entry.operation.own):
            self.unseen[entry.layer] = f"multiplies scores with values by {name}"
            return
        mixed = any(slot in known.mixed for slot in scores)
        if mixed and name in REDUCE and not known.scores.issuperset(outs):
            self.unseen[entry.layer] = "multiplies scores with values one by one"
            return
        if name in COMBINE and self._meets_values(scores, others):
            mixed = True
        going_on = [slot for slot in outs if slot in known.scores or slot in known.lost]
        known.scores.update(going_on)
        if mixed:
            known.mixed.update(going_on)

    def _meets_values(self, scores: Sequence[int], others: Sequence[int]) -> bool:
        """Whether scores are multiplied with something that lies where their keys do."""
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
