"""Tracing of image tokens along a tape, call by call, from the pixels to each attention call.

Each tensor has a shadow tensor of the same shape, whose codes give the image location of each element. What an operation does to
the codes is in the table of `visattn.capturing.placing`; here are the calls that are more than their operations: attention, and
weights that were edited.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from visattn.core.capturing.following.received import Images
from visattn.core.capturing.following.sums import SCORES, Sums
from visattn.core.capturing.placing.follow import Follower
from visattn.core.capturing.placing.nodes import Node
from visattn.core.capturing.placing.places import UNWATCHED, Behind, Kind, Places, later, whole
from visattn.core.capturing.placing.steps import Step
from visattn.core.capturing.tokens.arrangement import Arrangement
from visattn.core.capturing.tokens.codes import aligned, equal, same_along
from visattn.core.capturing.tokens.planes import compact
from visattn.core.capturing.trace.operations import EDITED
from visattn.core.capturing.trace.tape import Attention, Entry, Operand, Ref, Tape


class TokenTracer:
    """Image locations of the tensors of a tape, as far as it has been traced.

    Attributes:
        images: Images of the forward pass.
        planes: Planes of the forward pass.
        shadows: Places of all tensors.
        unseen: Layers that weight tokens in a way that is not recorded, and how.
        sampled: Codes `(N, rows, columns)` of the maps that were sampled at points, by index of the entry; None if unknown.
        at: Number of entries traced so far.
    """

    def __init__(self, tape: Tape) -> None:
        """Start at the pixels of a tape, before its first entry."""
        self._tape, self.images = tape, Images(tape)
        self.planes = self.images.planes
        self._follower = Follower(self.planes, tape.facts, self._of_source)
        self.shadows = self._follower.shadows
        self._sums = Sums(self.shadows)
        self.arrangements: dict[Hashable, Arrangement] = {}  # by the codes of a call; reused for the same codes
        self._passed = 0
        self.at = 0
        self.unseen: dict[str, str] = {}
        self.sampled: dict[int, Tensor | None] = {}

    def see(self, entry: Entry, *, attends: bool) -> None:
        """Trace a call: find where the elements of its results come from, from what is known of its arguments.

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
            unrecorded = None if attends else self._unrecorded_attention(step, entry)
            if unrecorded is not None:
                layer, what_it_does = unrecorded
                self.unseen[layer] = what_it_does
            self._follower.see(step)
            entry.choice = entry.choice if step.choice is None else step.choice
        if not entry.steps:
            if not attends and not entry.operation.own:
                self._note_unknown(entry)
            self._see_whole(entry)
        self.at += 1

    def _note_map(self, values: Places) -> None:
        """Note a feature map that is sampled at points, with the position code of each of its cells, or None if they are unknown.

        A learned table of positions is no such map.
        """
        if values.kind not in ("learned", "foreign"):
            is_one_cell_per_position = values.placed and not values.drift.away and same_along(values.codes, 1)
            self.sampled[self.at] = values.codes[:, 0] if is_one_cell_per_position else None

    def _note_unknown(self, entry: Entry) -> None:
        """Note the layer of a function that is not PyTorch's and receives scores and values: it may compute attention."""
        nodes = [self._tape.nodes[ref.slot] for ref in entry.refs if ref.slot in self._tape.nodes]
        are_scores = [self._sums.is_scores(node) for node in nodes]
        if any(are_scores) and any(
            not is_scores and self.shadows.of(node).kind != "learned" for is_scores, node in zip(are_scores, nodes, strict=True)
        ):
            self.unseen[entry.layer] = f"{SCORES} with {entry.operation.name}"

    def _unrecorded_attention(self, step: Step, entry: Entry) -> tuple[str, str] | None:
        """Return a layer that attends in this step in a way that is not recorded, and how; None if there is none."""
        try:
            return self._sums.see(step, entry.layer, entry.operation.name)
        except Exception:  # an operation with unexpected behavior; its results are lost
            return None

    def places(self, slot: int) -> Places:
        """Return what is known about the origin of the tensor in a slot."""
        node = self._tape.nodes.get(slot)
        if node is None:
            return whole("lost", self._tape.outside[slot].shape, self.planes.device, UNWATCHED)
        return self.shadows.of(node)

    def _see_whole(self, entry: Entry) -> None:
        """Store the places of the results of a call whose inner operations are not known, such as a fused attention call."""
        first_result: Places | None = None
        is_edited = entry.operation.name == EDITED
        try:
            if entry.attention is not None or entry.operation.name == "scaled_dot_product_attention":
                written_out = entry.attention is not None and not entry.attention.fused
                first_result = self._of_product(entry.attention) if written_out else self._of_fused(entry)
            elif is_edited:
                first_result = self._of_edited(entry)
        except Exception:  # an unusual call
            first_result = None
        for number, result in enumerate(entry.outs):
            if result is None or result.slot not in self._tape.nodes:
                continue
            existed_before = entry.before[number] is not None and not is_edited
            if existed_before:
                continue
            has_rule = number == 0 and first_result is not None and first_result.shape == result.shape
            places = first_result if has_rule else None
            if places is None:
                places = self._without_rule(entry, result.shape)
            self.shadows.put(self._tape.nodes[result.slot], places)

    def _without_rule(self, entry: Entry, shape: torch.Size) -> Places:
        """Return the places of a result of a call that no rule follows: lost, unless no argument comes from the image."""
        arguments = [self.places(ref.slot) for ref in entry.refs]
        is_lost = any(places.placed or places.kind == "lost" for places in arguments) or not arguments
        if is_lost:
            lost_behind = next((places.name for places in arguments if places.kind == "lost"), entry.operation.name)
            return whole("lost", shape, self.planes.device, lost_behind)
        input_name = next((places.name for places in arguments if places.kind == "foreign"), None)
        return whole("learned" if input_name is None else "foreign", shape, self.planes.device, input_name or "")

    def _of_fused(self, entry: Entry) -> Places | None:
        """Return the places of the result of a fused call: those of its queries, or of its values if channels attend to channels.

        Return None if they are unknown.
        """
        arguments = [*entry.args, *entry.kwargs.values()]
        query, key, value = (self.places(ref.slot) for ref in arguments[:3] if isinstance(ref, Ref))
        shape = next(result.shape for result in entry.outs if result is not None)
        behind = later(query.behind, key.behind, value.behind)
        for places, dim in ((query, -1), (value, -2)):  # tokens against tokens, or channels against channels
            if not places.placed or places.columns is not None:
                continue
            first_codes = places.codes.narrow(dim, 0, 1)
            if same_along(places.codes, dim) and first_codes.numel() > 1:
                copies = places.copies
                copies = None if copies is None or not same_along(copies, dim) else copies.narrow(dim, 0, 1).expand(shape)
                return places._replace(codes=first_codes.expand(shape), copies=copies, behind=behind, others=None)
        if any(places.placed or places.kind == "lost" for places in (query, key, value)):
            return None
        kind: Kind = "foreign" if "foreign" in (query.kind, key.kind, value.kind) else "learned"
        if query.located and same_along(query.codes, -1):  # tokens that lie nowhere in the image, such as words
            return query._replace(kind=kind, codes=query.codes[..., :1].expand(shape), behind=behind, others=None)
        return whole(kind, shape, self.planes.device)

    def _of_product(self, attention: Attention | None) -> Places | None:
        """Return where the result of attention weights times values lies: at the queries, which are the rows of the weights.

        For a call whose result an intervention has replaced, so that its operations did not run. None if the rows are unknown.
        """
        assert attention is not None  # noqa: S101 - the caller has checked it
        weights, values = (self.places(operand.slot) for operand in attention.operands)
        axes = attention.operands[0].axes
        if axes is None or weights.columns is None:
            return None
        channels = axes.values(values.codes).shape[-1]

        def at_queries(numbers: Tensor) -> Tensor | None:
            rows = axes.weights(numbers)  # of each query and key
            return axes.result(rows[..., :1].expand(*rows.shape[:-1], channels)) if same_along(rows, -1) else None

        codes = at_queries(weights.codes)
        if codes is None:
            return None
        copies = None if weights.copies is None else at_queries(weights.copies)
        return weights._replace(
            codes=codes, columns=None, copies=copies, others=None, behind=later(weights.behind, values.behind)
        )

    def _of_edited(self, entry: Entry) -> Places | None:
        """Return the places of edited weights, from query and key or from the weights that the model computed; None if unknown."""
        operands = [self.places(ref.slot) for ref in entry.refs[1:]]
        shape = next(result.shape for result in entry.outs if result is not None)
        if len(operands) == 1:
            return operands[0]
        lead = "abcdefghijklm"[: len(shape) - 2]
        query_codes, key_codes = [
            aligned(places.codes, lead[len(lead) + 2 - places.codes.ndim :] + axes, lead + "xy", shape)
            for places, axes in zip(operands, ("xd", "yd"), strict=True)
        ]
        query, key = operands
        if query_codes is None or key_codes is None or not (query.placed or key.placed):
            return None
        behind = later(query.behind, key.behind)
        base = (query if query.placed else key)._replace(copies=None, others=None, behind=behind)
        if not query.placed:
            return base._replace(codes=key_codes, others=query_codes)
        if not key.placed:
            return base._replace(codes=query_codes, others=key_codes)
        if equal(query_codes, key_codes):
            return base._replace(codes=query_codes)
        return base._replace(codes=query_codes, columns=key_codes, one_stream=query.stream == key.stream)

    def _of_source(self, node: int) -> Places:
        """Return the places of a tensor that no operation made, such as pixels, another input of the model, or a parameter."""
        facts = self._tape.facts[node]
        kind, name = self._tape.origins.get(node, ("unknown", ""))
        shape, device = facts.shape, self.planes.device
        if kind == "pixels":
            return self.images.places(shape)
        if kind == "unknown" and shape.numel() > 1:
            return whole("lost", shape, device, UNWATCHED)
        codes = self._token_codes(node, kind, name, shape, facts.floating)
        places = whole("foreign" if kind == "input" else "learned", shape, device, name)
        positions: Any = "given" if kind == "input" and not facts.floating else ""
        return places._replace(positions=positions, codes=places.codes if codes is None else codes.expand(shape))

    def _token_codes(self, node: int, kind: str, name: str, shape: torch.Size, floating: bool) -> Tensor | None:
        """Return codes that number the tokens in a tensor that lies nowhere in the image; None if it holds no tokens.

        Such tensors are parameters `(N, D)`, as object queries, and inputs of the model `(B, N, ...)`, as words.
        """
        planes = self.planes
        if kind == "input":
            if not 1 < len(shape) < 4 or shape[0] != planes.images:
                return None
            token_axes = [*shape[1:], 1] if len(shape) == 2 else [*shape[1:-1], 1]
            count = 1
            for side in token_axes:
                count *= side
            plane = planes.set_of(f"foreign {name}" if floating else "word", count)
            return planes.codes(plane).view(shape[0], *token_axes[: len(shape) - 1])
        token_axes = [side for side in shape[:-1] if side != 1]
        if not floating or not shape or len(token_axes) > 1:
            return None
        return planes.members(planes.set_of(f"{name}#{node}", shape[:-1].numel())).view(*shape[:-1], 1)

    # --- attention calls

    def passed(self, attention: Attention, slot: int, kind: str) -> None:
        """Note that a slot holds the result of an attention call of this kind, so that its tokens lie behind that call.

        The result of learned queries has no location; it counts as learned.
        """
        self._passed += 1
        node = self._tape.nodes[slot]
        places: Places | None = self.shadows.of(node)
        assert places is not None  # noqa: S101 - it was just made
        if attention.answers_at_keys:
            values = self.of(attention.operands[-1])
            places = values if values is not None and values.codes.shape == self._tape.facts[node].shape else None
        elif places.placed and attention.rows != attention.columns:
            places = places.each(self.planes.coarsened)
        behind = (self._passed, attention.layer, attention.call)
        if places is not None and places.placed:
            places = self._with_images(places, attention)
            # samples that are recorded count as values of their queries, and lie as far away as the queries do
            drift = self.places(attention.operands[0].slot).drift if kind == "sampled" else places.drift
            self.shadows.put(node, places.after(behind)._replace(drift=drift))
            return
        lies_nowhere = self._asks_from_nowhere(attention) and (kind != "unplaced" or self._reads_elsewhere(attention))
        if kind == "pool" or lies_nowhere:
            self._note_answer(attention, node, behind)

    def _with_images(self, places: Places, attention: Attention) -> Places:
        """Give tokens that belonged to no image, such as a class token, to the image that they have attended to."""
        values = self.of(attention.operands[-1])
        has_lead_of_call = places.codes.ndim == len(attention.lead) + 2
        if values is None or not has_lead_of_call or not self.planes.sets(places.codes):
            return places
        image = self.planes.images_of(compact(values.codes)[..., :1]).amax((-1, -2), keepdim=True)
        if bool((image < 0).any()) or places.codes.shape[:-2] != attention.lead:
            return places
        return places._replace(codes=self.planes.given(places.codes, image))

    def _asks_from_nowhere(self, attention: Attention) -> bool:
        """Check whether the queries of a located call lie nowhere in the image, as object queries and words do."""
        queries = self.places(attention.operands[0].slot)
        return not queries.placed or (not attention.fused and queries.others is not None)

    def _reads_elsewhere(self, attention: Attention) -> bool:
        """Check whether queries that lie nowhere in the image read values which may lie outside the cells of their tokens.

        Each query must be known, as an object query is by its number.
        """
        operands = [self.of(operand) for operand in attention.operands]
        queries = operands[0]
        if queries is None or not any(places is not None and places.drift.away for places in operands):
            return False
        codes = queries.codes if queries.others is None or queries.columns is not None else queries.others
        return same_along(codes, -1) and not self.planes.on_grid(codes) and not bool((compact(codes) < 0).any())

    def _note_answer(self, attention: Attention, node: Node, behind: Behind) -> None:
        """Store the places of the result of an attention call whose queries lie nowhere in the image: those of the queries.

        From then on each query belongs to the image that it has attended to.
        """
        origin = self.places(attention.operands[0].slot)
        queries, keys = self.of(attention.operands[0]), self.of(attention.operands[1])
        shape, planes = self._tape.facts[node].shape, self.planes
        kind: Kind = "foreign" if origin.kind == "foreign" else "learned"
        places = whole(kind, shape, planes.device, origin.name if origin.kind in ("foreign", "learned") else "")
        if queries is not None:
            codes = queries.others if queries.others is not None and queries.columns is None else queries.codes
            codes = codes[..., :1]
            if keys is not None:
                image = planes.images_of(keys.codes[..., 0]).amax(-1)[..., None, None]
                codes = planes.given(codes, image) if bool((image >= 0).all()) else codes
            if codes.shape[:-1] == shape[:-1]:
                places = places._replace(codes=codes.expand(shape)).after(behind)
        self.shadows.put(node, places)

    def one_stream(self, attention: Attention) -> bool:
        """Check whether queries and keys come from the same tokens: the same embedding, behind the same attention call."""
        if not attention.fused:
            weights = self.of(attention.operands[0])
            return weights is None or weights.one_stream
        queries, keys = (self.of(operand) for operand in attention.operands[:2])
        return queries is None or keys is None or queries.stream == keys.stream

    def of(self, operand: Operand) -> Places | None:
        """Return where the elements of an operand `(*lead, tokens, d)` come from; None if that is unknown."""
        places = self.places(operand.slot)
        if places.kind == "lost" or (not places.placed and not places.located):
            return None
        return places.each(operand.view)

    def softmaxes_behind(self, weights: Operand) -> list[Places]:
        """Return the places of the results of the softmaxes that weights come from."""
        entries = [self._tape.entries[number] for number in self._tape.weights.get(weights.slot, ())]
        return [self.places(out.slot) for entry in entries for out in entry.outs if out is not None]

    def behind(self, operands: Sequence[Operand]) -> Behind:
        """Return the last attention call that flowed into the operands; None if there is none."""
        return later(*(places.behind for operand in operands if (places := self.of(operand)) is not None))
