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

from visattn.capturing.following.inputs import Images
from visattn.capturing.following.sums import SCORES, Sums
from visattn.capturing.placing.follow import UNWATCHED, Follower
from visattn.capturing.placing.nodes import Node
from visattn.capturing.placing.places import Behind, Kind, Places, later, whole
from visattn.capturing.placing.steps import Step
from visattn.capturing.tokens.arrangement import Arrangement
from visattn.capturing.tokens.codes import aligned, equal, same_along
from visattn.capturing.tokens.planes import compact
from visattn.capturing.tokens.points import Drift
from visattn.capturing.trace.operations import EDITED
from visattn.capturing.trace.tape import Attention, Entry, Operand, Ref, Tape


class TokenTracer:
    """Image locations of the tensors of a tape, as far as it has been traced.

    Attributes:
        images: Images of the forward pass.
        planes: Planes of the forward pass.
        shadows: Places of all tensors.
        unseen: Layers that weight tokens in a way that is not recorded, and how.
        sampled: Codes `(N, rows, columns)` of the maps that were sampled at points, by index of the entry; None if they are unknown.
        at: Number of entries traced so far.
    """

    def __init__(self, tape: Tape) -> None:
        """Start at the pixels."""
        self._tape, self.images = tape, Images(tape)
        self.planes = self.images.planes
        self._follower = Follower(self.planes, tape.facts, self._first)
        self.shadows = self._follower.shadows
        self._sums = Sums(self.shadows)
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
            self.places(ref.slot)  # as it is before the call
        self._follower.call = entry.operation.name if entry.operation.own else f"{entry.operation.name} (not a torch function)"
        for step in entry.steps:
            if step.op is not None and step.op._schema.name == "aten::grid_sampler_2d":
                self._note_map(self.shadows.of(step.given["input"]))
            found = None if attends else self._found(step, entry)
            if found is not None:
                self.unseen[found[0]] = found[1]
            self._follower.see(step)
            entry.choice = entry.choice if step.choice is None else step.choice
        if not entry.steps:
            if not attends and not entry.operation.own:
                self._note_unknown(entry)
            self._see_whole(entry)
        self.at += 1

    def _note_map(self, values: Places) -> None:
        """Note a map that is sampled; a learned table of positions is none."""
        if values.kind not in ("learned", "foreign"):
            alike = values.placed and not values.drift.away and same_along(values.codes, 1)
            self.sampled[self.at] = values.codes[:, 0] if alike else None

    def _note_unknown(self, entry: Entry) -> None:
        """Note a function of other code that receives scores and values."""
        nodes = [self._tape.nodes[ref.slot] for ref in entry.refs if ref.slot in self._tape.nodes]
        scores = [self._sums.is_scores(node) for node in nodes]
        if any(scores) and any(
            not one and self.shadows.of(node).kind != "learned" for one, node in zip(scores, nodes, strict=True)
        ):
            self.unseen[entry.layer] = f"{SCORES} with {entry.operation.name}"

    def _found(self, step: Step, entry: Entry) -> tuple[str, str] | None:
        """Return a layer that attends in a step in a way that is not recorded, and how."""
        try:
            return self._sums.see(step, entry.layer, entry.operation.name)
        except Exception:  # an operation with unexpected behavior; its results are lost
            return None

    def places(self, slot: int) -> Places:
        """Return the places of a slot."""
        node = self._tape.nodes.get(slot)
        if node is None:
            return whole("lost", self._tape.outside[slot].shape, self.planes.device, UNWATCHED)
        return self.shadows.of(node)

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
                self.shadows.put(node, found)
            else:
                kinds = [self.places(ref.slot) for ref in entry.refs]
                lost = any(one.placed or one.kind == "lost" for one in kinds) or not kinds
                foreign = next((one.name for one in kinds if one.kind == "foreign"), None)
                kind = "lost" if lost else "learned" if foreign is None else "foreign"
                name = next((one.name for one in kinds if one.kind == "lost"), entry.operation.name) if lost else foreign or ""
                self.shadows.put(node, whole(kind, made.shape, self.planes.device, name))  # type: ignore[arg-type]

    def _attended(self, entry: Entry) -> Places | None:
        """Return the places of the result of a fused call: those of its queries."""
        given = [*entry.args, *entry.kwargs.values()]
        query, key, value = (self.places(ref.slot) for ref in given[:3] if isinstance(ref, Ref))
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
        if query.located and same_along(query.codes, -1):
            return query._replace(kind=kind, codes=query.codes[..., :1].expand(shape), behind=behind, others=None)
        return whole(kind, shape, self.planes.device)

    def _weighted(self, attention: Attention | None) -> Places | None:
        """Return the places of a product of weights and values whose result was replaced: those of the rows of the weights."""
        assert attention is not None  # noqa: S101 - the caller has checked it
        weights, values = (self.places(operand.slot) for operand in attention.operands)
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
        operands = [self.places(ref.slot) for ref in entry.refs[1:]]
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
        facts = self._tape.facts[node]
        kind, name = self._tape.origins.get(node, ("unknown", ""))
        shape, device = facts.shape, self.planes.device
        if kind == "pixels":
            return self.images.places(shape)
        if kind == "unknown" and shape.numel() > 1:
            return whole("lost", shape, device, UNWATCHED)
        codes = self._members(node, kind, name, shape, facts.floating)
        made = whole("foreign" if kind == "input" else "learned", shape, device, name)
        positions: Any = "given" if kind == "input" and not facts.floating else ""
        return made._replace(positions=positions, codes=made.codes if codes is None else codes.expand(shape))

    def _members(self, node: int, kind: str, name: str, shape: torch.Size, floating: bool) -> Tensor | None:
        """Return codes of a parameter `(N, D)`, or of an input of the model `(B, N, ...)`, as members of a set; None if it is none."""
        planes = self.planes
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
        places: Places | None = self.shadows.of(node)
        assert places is not None  # noqa: S101 - it was just made
        if attention.answers_at_keys:
            values = self.of(attention.operands[-1])
            places = values if values is not None and values.codes.shape == self._tape.facts[node].shape else None
        elif places.placed and attention.rows != attention.columns:
            places = places.each(self.planes.coarsened)
        mark = (self._passed, attention.layer, attention.call)
        if places is not None and places.placed:
            places = self._with_images(places, attention)
            self.shadows.put(node, places.after(mark)._replace(drift=self._drift(attention, places, kind)))
        elif kind == "pool" or (self._asks_by_members(attention) and (kind != "unplaced" or self._reads_elsewhere(attention))):
            self._answered(attention, node, mark)

    def _drift(self, attention: Attention, places: Places, kind: str) -> Drift:
        """Return the drift of a result: samples that are recorded count as those of their queries, as far as these are in place."""
        return self.places(attention.operands[0].slot).drift if kind == "sampled" else places.drift

    def _with_images(self, places: Places, attention: Attention) -> Places:
        """Give tokens that belonged to no image, such as a class token, to the image that they have attended to."""
        values = self.of(attention.operands[-1])
        if values is None or places.codes.ndim != len(attention.lead) + 2 or not self.planes.sets(places.codes):
            return places
        image = self.planes.images_of(compact(values.codes)[..., :1]).amax((-1, -2), keepdim=True)
        if bool((image < 0).any()) or places.codes.shape[:-2] != attention.lead:
            return places
        return places._replace(codes=self.planes.given(places.codes, image))

    def _asks_by_members(self, attention: Attention) -> bool:
        """Check whether the queries of a located call are members of a set."""
        asking = self.places(attention.operands[0].slot)
        return not asking.placed or (not attention.fused and asking.others is not None)

    def _reads_elsewhere(self, attention: Attention) -> bool:
        """Check whether each query is known to be one member of a set, and weights values that may lie outside their cells."""
        found = [self.of(operand) for operand in attention.operands]
        queries = found[0]
        if queries is None or not any(places is not None and places.drift.away for places in found):
            return False
        codes = queries.codes if queries.others is None or queries.columns is not None else queries.others
        return same_along(codes, -1) and not self.planes.on_grid(codes) and not bool((compact(codes) < 0).any())

    def _answered(self, attention: Attention, node: Node, mark: Any) -> None:  # noqa: ANN401
        """Register the result of an attention call whose queries lie nowhere in the image."""
        asking = self.places(attention.operands[0].slot)
        queries, keys = self.of(attention.operands[0]), self.of(attention.operands[1])
        shape, planes = self._tape.facts[node].shape, self.planes
        kind = "foreign" if asking.kind == "foreign" else "learned"
        made = whole(kind, shape, self.planes.device, asking.name if asking.kind in ("foreign", "learned") else "")  # type: ignore[arg-type]
        if queries is not None:
            codes = queries.others if queries.others is not None and queries.columns is None else queries.codes
            codes = codes[..., :1]
            if keys is not None:
                image = planes.images_of(keys.codes[..., 0]).amax(-1)[..., None, None]
                codes = planes.given(codes, image) if bool((image >= 0).all()) else codes
            if codes.shape[:-1] == shape[:-1]:
                made = made._replace(codes=codes.expand(shape)).after(mark)
        self.shadows.put(node, made)

    def one_stream(self, attention: Attention) -> bool:
        """Check whether queries and keys come from the same tokens: the same embedding, behind the same attention call."""
        if not attention.fused:
            weights = self.of(attention.operands[0])
            return weights is None or weights.one_stream
        asking, asked = (self.of(operand) for operand in attention.operands[:2])
        return asking is None or asked is None or asking.stream == asked.stream

    def of(self, operand: Operand) -> Places | None:
        """Return the locations of an operand's elements, or the members of sets that they belong to; None if they are unknown."""
        places = self.places(operand.slot)
        if places.kind == "lost" or (not places.placed and not places.located):
            return None
        return places.each(operand.view)

    def behind(self, operands: Sequence[Operand]) -> Behind:
        """Return the last attention call that flowed into the operands."""
        return later(*(places.behind for operand in operands if (places := self.of(operand)) is not None))
