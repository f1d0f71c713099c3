"""Readout of a model: the tokens that its output is computed from, such as the class token or the mean of the patches.

In a tensor with known locations, each element belongs to one token. Where tokens are merged, for example by a mean, the share of each
token is stored. From then on shares are only added. The shares in the output give the readout.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from visattn.capturing.following.places import Places, Statuses
from visattn.capturing.tokens.arrangement import Arrangement, token_names
from visattn.capturing.tokens.codes import same_along
from visattn.capturing.trace.operations import COMBINE, JOIN, REARRANGE, REDUCE, SAME
from visattn.capturing.trace.tape import Entry, Ref

Shares = Mapping[object, float]  # by code in the first image, or by name
_POOL = "pool"
_SLACK = 1e-6
_POOLING = frozenset({"adaptive_avg_pool2d", "adaptive_max_pool2d", "adaptive_avg_pool1d", "adaptive_max_pool1d", "avg_pool2d"})
_MOVING = (SAME | REARRANGE) - COMBINE
_ADDING = frozenset({"add", "__add__", "__radd__", "__iadd__", "sub", "subtract", "__sub__", "__rsub__", "__isub__", "rsub"})


class Readouts:
    """Shares of tokens in the slots that hold a single vector per image."""

    def __init__(self, known: Statuses) -> None:
        """Start without shares."""
        self._known = known
        self._shares: dict[int, Shares] = {}

    def note(self, entry: Entry, kind: str) -> None:
        """Update the shares after a traced operation; `kind` is its kind of attention, or empty."""
        outs = [made.slot for made in entry.outs if made is not None]
        if kind == "pool":
            self._shares[outs[0]] = {_POOL: 1.0}
        if kind or not outs or not entry.operation.own:
            return
        known, name = self._known, entry.operation.name
        slots = [ref.slot for ref in entry.refs]
        slots = [slot for slot in slots if slot in self._shares or slot in known.places or slot in known.lost]
        if not slots or self._moved(name, slots, outs):
            return
        read = [self.of(slot) for slot in slots]
        found: Shares | None = None
        if None not in read:
            settled = [shares for shares in read if shares is not None]
            if name in _ADDING | JOIN or name not in COMBINE:
                total: Counter[object] = Counter()
                for shares in settled:
                    total.update(dict(shares))
                found = total
            else:  # one of them is a gate
                found = max(settled, key=lambda shares: (_POOL in shares, -len(shares)))
        elif len(slots) == 1 and slots[0] in known.places:
            found = self._averaged(known.places[slots[0]], _summed(entry, known.places[slots[0]].codes.ndim))
        if found is not None:
            self._shares.update(dict.fromkeys(outs, found))

    def _moved(self, name: str, slots: Sequence[int], outs: Sequence[int]) -> bool:
        """Check whether an operation only moves or transforms elements; then the locations of its results describe them fully."""
        places, lost, shares = self._known.places, self._known.lost, self._shares
        if name == "linear":
            before, after = places.get(slots[0]), places.get(outs[0])
            kept = before is not None and after is not None and after.codes.stride(-1) == 0 == before.codes.stride(-1)
        else:
            kept = name in _MOVING
        return (
            kept and len(slots) == 1 and not any(slot in shares or slot in lost or slot not in places for slot in (*slots, *outs))
        )

    def of(self, slot: int) -> Shares | None:
        """Return the shares in a slot; None if it holds several separate tokens."""
        return self._shares.get(slot) or self._plain(slot)

    def _plain(self, slot: int) -> Shares | None:
        """Return the share of a slot whose elements all belong to one token; its first axis is the batch."""
        places = self._known.places.get(slot)
        if places is None or places.columns is not None or not places.codes.numel():
            return None
        if not all(same_along(places.codes, dim) for dim in reversed(range(1, places.codes.ndim))):
            return None
        planes, codes = self._known.planes, places.codes.flatten(1)[:, 0] if places.codes.ndim > 1 else places.codes
        met = planes.of(codes)
        if len(met) != 1 or bool((codes < 0).any()):
            return None
        cell = torch.unique((codes - met[0].base) % met[0].cells)
        return {met[0].base + int(cell[0]): 1.0} if len(cell) == 1 else None

    def _averaged(self, places: Places, dims: Sequence[int] | None) -> Shares | None:
        """Return the shares of tokens that are merged along `dims`; None if several tokens stay separate."""
        if dims is None or 0 in dims or places.columns is not None:
            return None
        codes = places.codes[:1]
        rest = [dim for dim in range(codes.ndim) if dim not in dims]
        rows = codes.permute(*rest, *dims).flatten(0, len(rest) - 1).flatten(1)
        if not rows.numel():
            return None
        first = rows[0][rows[0] >= 0]
        if not len(first) or not bool((rows == rows[:1]).all()):
            return None
        tokens, counts = torch.unique(first, return_counts=True)
        image = self._known.planes.images_of(tokens)
        if bool((image != image[0]).any()):
            return None
        number = int(image[0])
        cells = {plane.base: plane.cells for plane in self._known.planes.of(tokens)}
        bases = sorted(cells)
        total = int(counts.sum())
        shares = {}
        for token, count in zip(tokens.tolist(), counts.tolist(), strict=True):
            base = max(base for base in bases if base <= token)
            shares[token - number * cells[base]] = count / total
        return shares

    def named(self, output: Sequence[int], last: Arrangement | None) -> str:
        """Name the query that the output is read from; `last` is the last attention call with a grid. Empty if the query has no name."""
        found = {name for slot in output if (name := self._name(self.of(slot), last))}
        return found.pop() if len(found) == 1 else ""

    def _name(self, shares: Shares | None, last: Arrangement | None) -> str:
        if not shares:
            return ""
        if _POOL in shares:
            return _POOL if len(shares) == 1 else ""
        planes = self._known.planes
        patches: Counter[float] = Counter()
        prefix: dict[str, float] = {}
        cells = 0
        for code, share in shares.items():
            plane = planes.of(torch.tensor([int(str(code))], device=self._known.device))[0]
            if plane.grid:
                patches[round(share, 9)] += 1
                cells = plane.cells
            else:
                name = token_names(planes, torch.tensor([int(str(code))], device=self._known.device))[0]
                prefix[name] = prefix.get(name, 0.0) + share
        names = {name for name in prefix}
        if last is not None and not names <= {*last.queries.prefix, *last.keys.prefix}:
            return ""
        if patches and (len(patches) > 1 or sum(patches.values()) < cells):
            return ""
        if len({round(share, 6) for share in prefix.values()}) > 1:
            return ""
        if patches and prefix:
            share, each = next(iter(prefix.values())), next(iter(patches))
            if abs(share - each) < _SLACK:
                return "all" if last is None or names == set(last.queries.prefix) else ""
            return "+".join([*prefix, "mean"]) if abs(share - each * cells) < _SLACK else ""
        return "+".join(prefix) if prefix else "mean"


def _summed(entry: Entry, ndim: int) -> Sequence[int] | None:
    """Return the axes that an operation merges completely; None if it merges none."""
    name, args, kwargs = entry.operation.name, entry.args, entry.kwargs
    if name in _POOLING:
        out = next(made for made in entry.outs if made is not None)
        spatial = 1 if name.endswith("1d") else 2
        return [*range(ndim - spatial, ndim)] if math.prod(out.shape[-spatial:]) == 1 else None
    if name not in REDUCE:
        return None
    dims = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    if dims is None or isinstance(dims, (bool, Ref)):
        return None
    return [dim % ndim for dim in ([dims] if isinstance(dims, int) else dims)]
