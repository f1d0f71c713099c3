"""Tracing of image tokens along a tape, call by call, from the pixels to each attention call.

Each tensor has a shadow tensor of the same shape, whose codes give the image location of each element. What an operation does to the
codes is in the table of `visattn.capturing.placing`; here are the calls that are more than their operations: attention, and weights that
were edited.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from visattn.capturing.following.packing import batch_of, cells_of, packed_size
from visattn.capturing.placing.follow import UNWATCHED, Follower
from visattn.capturing.placing.places import Behind, Kind, Places, later, whole
from visattn.capturing.placing.statuses import Statuses, color_axis
from visattn.capturing.placing.steps import Node
from visattn.capturing.tokens.arrangement import Arrangement
from visattn.capturing.tokens.codes import aligned, equal, same_along
from visattn.capturing.tokens.planes import compact
from visattn.capturing.trace.operations import COMBINE, EDITED, PRODUCT, REDUCE
from visattn.capturing.trace.tape import Attention, Entry, Operand, Ref, Tape

_DIVIDE = frozenset({"div", "divide", "true_divide", "__truediv__", "__itruediv__"})
_WEIGHING = PRODUCT | {"einsum", "tensordot", "linear"}


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
        self._follower = Follower(self.known.planes, tape.facts, self._first)
        self.arrangements: dict[Hashable, Arrangement] = {}  # by the codes of a call; reused for the same codes
        self._passed = 0
        self.at = 0
        self.unseen: dict[str, str] = {}
        self.sampled: dict[int, Tensor | None] = {}

    def see(self, entry: Entry, *, attends: bool) -> None:
        """Transfer locations from the arguments of a call to its results.

        Args:
            entry: The call.
            attends: Whether it is an attention call that is recorded.
        """
        for ref in entry.refs:
            self.meet(ref.slot)
        self._follower.call = entry.operation.name if entry.operation.own else f"{entry.operation.name} (not a torch function)"
        for step in entry.steps:
            if step.op is not None and step.op._schema.name == "aten::grid_sampler_2d":
                values = self._follower.of(step.given["input"])
                alike = values.placed and same_along(values.codes, 1)
                self.sampled[self.at] = values.codes[:, 0] if alike else None
            self._follower.see(step)
            entry.choice = entry.choice if step.choice is None else step.choice
        if not entry.steps:
            self._see_whole(entry)
        for made in entry.outs:
            if made is not None:
                self._note(made.slot)
        for _, after in entry.rewritten:
            self._note(after)
        self._watch_scores(entry, attends)
        self.at += 1

    def meet(self, slot: int) -> None:
        """Set the status of a tensor that no call produced."""
        if slot not in self.known.shapes and slot in self._tape.outside:
            self._note(slot)

    def _note(self, slot: int) -> None:
        """Note what is known of a slot."""
        node = self._tape.nodes.get(slot)
        shape = self._tape.outside[slot].shape if node is None else self._tape.facts[node].shape
        places = whole("lost", shape, self.known.device, UNWATCHED) if node is None else self._follower.of(node)
        self.known.set(slot, places)

    def _see_whole(self, entry: Entry) -> None:
        """Follow a call that was not taken apart."""
        found: Places | None = None
        try:
            if entry.attention is not None or entry.operation.name == "scaled_dot_product_attention":
                written_out = entry.attention is not None and not entry.attention.fused
                found = self._weighted(entry.attention) if written_out else self._attended(entry)
            elif entry.operation.name == EDITED:
                found = self._edited(entry)
        except Exception:  # an unusual call
            found = None
        for number, made in enumerate(entry.outs):
            if made is None or made.slot not in self._tape.nodes:
                continue
            node = self._tape.nodes[made.slot]
            if entry.before[number] is not None and entry.operation.name != EDITED:
                continue
            if number == 0 and found is not None and found.shape == made.shape:
                self._follower.put(node, found)
            else:
                kinds = [self._place(ref.slot) for ref in entry.refs]
                lost = any(one.placed or one.kind == "lost" for one in kinds) or not kinds
                foreign = next((one.name for one in kinds if one.kind == "foreign"), None)
                kind = "lost" if lost else "learned" if foreign is None else "foreign"
                name = next((one.name for one in kinds if one.kind == "lost"), entry.operation.name) if lost else foreign or ""
                self._follower.put(node, whole(kind, made.shape, self.known.device, name))  # type: ignore[arg-type]

    def _place(self, slot: int) -> Places:
        self.meet(slot)
        return self._follower.of(self._tape.nodes[slot])

    def _attended(self, entry: Entry) -> Places | None:
        """Return the places of the result of a fused call: those of its queries."""
        given = [*entry.args, *entry.kwargs.values()]
        query, key, value = (self._place(ref.slot) for ref in given[:3] if isinstance(ref, Ref))
        shape = next(made.shape for made in entry.outs if made is not None)
        behind = later(query.behind, key.behind, value.behind)
        for places, dim in ((query, -1), (value, -2)):  # tokens against tokens, or channels against channels
            if not places.placed or places.columns is not None:
                continue
            alike = places.codes.narrow(dim, 0, 1)
            if same_along(places.codes, dim) and alike.numel() > 1:
                copies = places.copies
                copies = None if copies is None or not same_along(copies, dim) else copies.narrow(dim, 0, 1).expand(shape)
                return places._replace(codes=alike.expand(shape), copies=copies, behind=behind, others=None)
        if any(one.placed or one.kind == "lost" for one in (query, key, value)):
            return None
        kind: Kind = "foreign" if "foreign" in (query.kind, key.kind, value.kind) else "learned"
        if bool((query.codes >= 0).any()) and same_along(query.codes, -1):
            return query._replace(kind=kind, codes=query.codes[..., :1].expand(shape), behind=behind, others=None)
        return whole(kind, shape, self.known.device)

    def _weighted(self, attention: Attention | None) -> Places | None:
        """Return the places of a product of weights and values whose result was replaced: those of the rows of the weights."""
        assert attention is not None  # noqa: S101 - the caller has checked it
        weights, values = (self._place(operand.slot) for operand in attention.operands)
        axes = attention.operands[0].axes
        if axes is None or weights.columns is None:
            return None
        rows = axes.weights(weights.codes)
        if not same_along(rows, -1):
            return None
        channels = axes.values(values.codes).shape[-1]
        codes = axes.result(rows[..., :1].expand(*rows.shape[:-1], channels))
        return weights._replace(codes=codes, columns=None, copies=None, others=None, behind=later(weights.behind, values.behind))

    def _edited(self, entry: Entry) -> Places | None:
        """Return the places of edited weights, from query and key or from the weights that the model computed."""
        operands = [self._place(ref.slot) for ref in entry.refs[1:]]
        shape = next(made.shape for made in entry.outs if made is not None)
        if len(operands) == 1:
            return operands[0]
        letters = "abcdefghijklm"[: len(shape) - 2]
        found = [
            aligned(one.codes, letters[len(letters) + 2 - one.codes.ndim :] + axes, letters + "xy", shape)
            for one, axes in zip(operands, ("xd", "yd"), strict=True)
        ]
        query, key = operands
        if found[0] is None or found[1] is None or not (query.placed or key.placed):
            return None
        base = (query if query.placed else key)._replace(copies=None, others=None, behind=later(query.behind, key.behind))
        if not (query.placed and key.placed):
            return base._replace(codes=found[0] if query.placed else found[1], others=found[1] if query.placed else found[0])
        if equal(found[0], found[1]):
            return base._replace(codes=found[0])
        return base._replace(codes=found[0], columns=found[1], one_stream=query.stream == key.stream)

    def _first(self, node: int) -> Places:
        """Return the places of a tensor that no step made."""
        known, device = self.known, self.known.device
        facts = self._tape.facts[node]
        kind, name = self._tape.origins.get(node, ("unknown", ""))
        shape = facts.shape
        if kind == "pixels" and self._tape.packed:
            cells = cells_of(self._tape)
            if len(set(self._tape.packed)) > 1:
                return whole("lost", shape, device, "packed patches of images with different grids")
            if cells is None:
                return whole("lost", shape, device, "packed patches whose places the model does not compute")
            return known.patches(cells, self._tape.packed[0], shape)
        if kind == "pixels":
            return known.image(shape)
        if kind == "unknown" and shape.numel() > 1:
            return whole("lost", shape, device, UNWATCHED)
        codes = self._members(node, kind, name, shape, facts.floating)
        made = whole("foreign" if kind == "input" else "learned", shape, device, name)
        positions: Any = "given" if kind == "input" and not facts.floating else ""
        return made._replace(positions=positions, codes=made.codes if codes is None else codes.expand(shape))

    def _members(self, node: int, kind: str, name: str, shape: torch.Size, floating: bool) -> Tensor | None:
        """Return codes of a parameter `(N, D)`, or of an input of the model `(B, N, ...)`, as members of a set; None if it is none."""
        planes = self.known.planes
        if kind == "input":
            if not 1 < len(shape) < 4 or shape[0] != planes.images:
                return None
            members = [*shape[1:], 1] if len(shape) == 2 else [*shape[1:-1], 1]
            size = 1
            for side in members:
                size *= side
            plane = planes.set_of(f"foreign {name}" if floating else "word", size)
            return planes.codes(plane).view(shape[0], *members[: len(shape) - 1])
        lead = [side for side in shape[:-1] if side != 1]
        if not floating or not shape or len(lead) > 1:
            return None
        return planes.members(planes.set_of(f"{name}#{node}", shape[:-1].numel())).view(*shape[:-1], 1)

    # --- attention calls

    def passed(self, attention: Attention, slot: int, kind: str) -> None:
        """Register a slot as the result of an attention call. The result of learned queries has no location; it counts as learned."""
        self._passed += 1
        node = self._tape.nodes[slot]
        places: Places | None = self._follower.of(node)
        assert places is not None  # noqa: S101 - it was just made
        if attention.answers_at_keys:
            values = self.of(attention.operands[-1])
            places = values if values is not None and values.codes.shape == self._tape.facts[node].shape else None
        elif places.placed and attention.rows != attention.columns:
            places = places.each(self.known.planes.coarsened)
        mark = (self._passed, attention.layer, attention.call)
        if places is not None and places.placed:
            places = self._with_images(places, attention)
            self._put(node, slot, places.after(mark)._replace(sampled=places.sampled and kind != "sampled"))
        elif kind == "pool" or (kind != "unplaced" and self._asks_by_members(attention)):
            self._answered(attention, node, slot, mark)

    def _put(self, node: Node, slot: int, places: Places) -> None:
        self._follower.put(node, places)
        self.known.set(slot, places)

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
        asking = self._place(attention.operands[0].slot)
        return not asking.placed or (not attention.fused and asking.others is not None)

    def _answered(self, attention: Attention, node: Node, slot: int, mark: Any) -> None:  # noqa: ANN401
        """Register the result of an attention call whose queries lie nowhere in the image."""
        asking = self._place(attention.operands[0].slot)
        queries, keys = self.of(attention.operands[0]), self.of(attention.operands[1])
        shape, planes = self._tape.facts[node].shape, self.known.planes
        kind = "foreign" if asking.kind == "foreign" else "learned"
        made = whole(kind, shape, self.known.device, asking.name if asking.kind in ("foreign", "learned") else "")  # type: ignore[arg-type]
        if queries is not None:
            codes = queries.others if queries.others is not None and queries.columns is None else queries.codes
            codes = codes[..., :1]
            if keys is not None:
                image = planes.images_of(keys.codes[..., 0]).amax(-1)[..., None, None]
                codes = planes.given(codes, image) if bool((image >= 0).all()) else codes
            if codes.shape[:-1] == shape[:-1]:
                made = made._replace(codes=codes.expand(shape)).after(mark)
        self._put(node, slot, made)

    def one_stream(self, attention: Attention) -> bool:
        """Check whether queries and keys come from the same tokens: the same embedding, behind the same attention call."""
        if not attention.fused:
            weights = self.of(attention.operands[0])
            return weights is None or weights.one_stream
        asking, asked = (self.of(operand) for operand in attention.operands[:2])
        return asking is None or asked is None or asking.stream == asked.stream

    def of(self, operand: Operand) -> Places | None:
        """Return the locations of an operand's elements, or the members of sets that they belong to; None if they are unknown."""
        places = self._place(operand.slot)
        if places.kind == "lost" or (not places.placed and not bool((places.codes >= 0).any())):
            return None
        return places.each(operand.view)

    def behind(self, operands: Sequence[Operand]) -> Behind:
        """Return the last attention call that flowed into the operands."""
        return later(*(places.behind for operand in operands if (places := self.of(operand)) is not None))

    def _watch_scores(self, entry: Entry, attends: bool) -> None:
        """Register products of scores and values that are not recorded as attention."""
        known, name = self.known, entry.operation.name
        slots = list(dict.fromkeys(ref.slot for ref in entry.refs))
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
