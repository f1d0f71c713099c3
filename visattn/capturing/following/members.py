"""Members of sets: object queries, latents, words and other tokens that lie nowhere in the image.

They are followed by the same rules as image tokens, through operations that no image token takes part in. An attention call whose
queries are members gives its result to these members.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from visattn.capturing.following.places import Places, Statuses
from visattn.capturing.following.rules import Rules
from visattn.capturing.tokens.codes import same_along
from visattn.capturing.trace.tape import Entry, Outside, Ref


class Members(Rules):
    """Rules for operations on members, applied to the statuses of a forward pass."""

    def __init__(self, known: Statuses, outside: Mapping[int, Outside]) -> None:
        """Use the members as the places."""
        super().__init__(known.of_sets())
        self._statuses, self._outside = known, outside

    def of(self, slot: int) -> Places | None:
        """Return the members in a slot; those of a parameter `(N, D)`, or of an input of the model `(B, N, ...)`, on first use."""
        members, outside = self._statuses.members, self._outside.get(slot)
        if outside is not None and slot not in members and (slot in self._known.learned or slot in self._known.foreign):
            codes = self._first(slot, outside)
            if codes is not None:
                members[slot] = Places(codes.expand(outside.shape))
        return members.get(slot)

    def _first(self, slot: int, outside: Outside) -> Tensor | None:
        shape, planes = outside.shape, self._known.planes
        if outside.kind == "input":
            if not 1 < len(shape) < 4 or shape[0] != planes.images:
                return None
            members = [*shape[1:], 1] if len(shape) == 2 else [*shape[1:-1], 1]
            plane = planes.set_of(f"foreign {outside.name}" if outside.floating else "word", math.prod(members))
            return planes.codes(plane).view(shape[0], *members[: len(shape) - 1])
        lead = [side for side in shape[:-1] if side != 1]
        if not outside.floating or not shape or len(lead) > 1:
            return None
        return planes.members(planes.set_of(f"{outside.name}#{slot}", shape[:-1].numel())).view(*shape[:-1], 1)

    def _of(self, value: Any) -> Places | None:  # noqa: ANN401
        return self.of(value.slot) if isinstance(value, Ref) else None

    def _factor(self, value: Any) -> Places | None:  # noqa: ANN401
        """Return the members of an operand of a product; a matrix that the model learned is a weight, not a set."""
        known = self._known
        return None if value.slot in known.learned and len(known.shapes[value.slot]) < 3 else self._of(value)

    def see(self, entry: Entry) -> None:
        """Transfer the members among the arguments of an operation to its results."""
        members, outs = self._statuses.members, [made for made in entry.outs if made is not None]
        for made in outs:
            members.pop(made.slot, None)
        if not entry.operation.own or not any(ref.slot in members or ref.slot in self._outside for ref in entry.refs):
            return
        with suppress(Exception):  # an operation with unexpected behavior
            found = self._embedded(entry) if entry.operation.name == "embedding" else self.apply(entry)
            for out, places in zip(entry.outs, found if isinstance(found, list) else [found], strict=False):
                if out is not None and isinstance(places, Places) and places.codes.shape == out.shape:
                    members[out.slot] = self._by_image(places._replace(copies=False))

    def _by_image(self, places: Places) -> Places:
        """Give members to images once there is a copy for each: along the first axis, or the second of `(N, B, D)`."""
        planes, codes = self._known.planes, places.codes
        if planes.images == 1 or codes.ndim < 3 or places.columns is not None:
            return places
        for dim in (0, 1) if codes.ndim == 3 else (0,):
            if codes.shape[dim] == planes.images and same_along(codes, dim):
                form = [1] * codes.ndim
                form[dim] = planes.images
                return places._replace(codes=planes.given(codes, torch.arange(planes.images, device=codes.device).view(form)))
        return places

    def answered(self, slot: int, queries: Places, keys: Places | None) -> None:
        """Register the result of an attention call whose queries are members, `(*lead, Q, d)`; keys tell their images."""
        shape, planes = self._known.shapes[slot], self._known.planes
        codes = queries.others if queries.others is not None and queries.columns is None else queries.codes
        codes = codes[..., :1]
        if keys is not None:
            image = planes.images_of(keys.codes[..., 0]).amax(-1)[..., None, None]
            codes = planes.given(codes, image) if bool((image >= 0).all()) else codes
        if codes.shape[:-1] == shape[:-1]:
            self._statuses.members[slot] = Places(codes.expand(shape))

    def _embedded(self, entry: Entry) -> Places | None:
        """Return the members of rows that an embedding table gives: those of their indices, or their own."""
        given = [*entry.args, *entry.kwargs.values()]
        indices, table = (one for one in given[:2] if isinstance(one, Ref))
        shape = next(made.shape for made in entry.outs if made is not None)
        found = self.of(indices.slot)
        if found is not None:
            return found._replace(codes=found.codes[..., None].expand(shape))
        name = self._known.learned.get(table.slot, "")
        planes = self._known.planes
        codes = planes.members(planes.set_of(f"{name}#{table.slot}#{indices.slot}", shape[:-1].numel()))
        return Places(codes.view(*shape[:-1], 1).expand(shape))

    def _finer(self, a: Places, b: Places) -> Places | None:
        """Choose between two sets whose members meet elementwise: words before learned tokens, tokens of an image before others."""
        if a.same(b):
            return a
        if a.columns is not None or b.columns is not None:
            return super()._finer(a, b)
        first, second = (b, a) if self._rank(b) > self._rank(a) else (a, b)
        axes = range(first.codes.ndim - 1)
        return None if any(same_along(first.codes, d) and not same_along(second.codes, d) for d in axes) else first

    def _rank(self, places: Places) -> tuple[bool, bool]:
        met = self._known.planes.of(places.codes)
        given = any(plane.name.startswith(("word", "foreign")) for plane in met)
        return bool((self._known.planes.images_of(places.codes) >= 0).any()), given
