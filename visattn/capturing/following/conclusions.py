"""Conclusions from a tape: token locations of each attention call, attention that is not recorded, and the readout of the model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

import torch

from visattn.capturing.following.cut import Cut, find_cut
from visattn.capturing.following.locations import locate
from visattn.capturing.following.readouts import Readouts
from visattn.capturing.following.tracing import TokenTracer
from visattn.capturing.placing.follow import UNWATCHED
from visattn.capturing.tokens.arrangement import Arrangement, Tokens, arrange_tokens
from visattn.capturing.tokens.codes import same_along
from visattn.capturing.trace.operations import EDITED, SOFTMAX
from visattn.capturing.trace.tape import Attention, Entry, Tape

SAMPLED = "reads values at points that it computes (deformable attention)"
Located = tuple[Arrangement, tuple[str, int] | None]


class Conclusions:
    """Conclusions from a tape, as far as it has been traced.

    Attributes:
        calls: Arrangement of each attention call, with layer and index of the call that it follows; None for gates.
        unseen: Layers whose attention is not recorded, and what they do.
        cut: Tensors that the output is computed from; None if no tensor holds all tokens apart, or there was no attention.
        readouts: Gradients of the output there; None without a cut.
    """

    def __init__(self, tape: Tape, wanted: Iterable[int] = ()) -> None:
        """Start at the pixels. Tokens in the `wanted` slots are arranged while the tape is traced."""
        self.calls: dict[Attention, Located | None] = {}
        self.unseen: dict[str, str] = {}
        self.cut: Cut | None = None
        self.readouts: Readouts | None = None
        self._tokens: dict[int, Tokens | None] = {}
        self._wanted = frozenset(wanted)
        self._follower = TokenTracer(tape)
        self._softmaxes: dict[int, tuple[str, str]] = {}  # index of the entry -> layer, and what it does

    def of_call(self, tape: Tape, attention: Attention) -> Located | None:
        """Locate an attention call that is about to run, after all operations on the tape; None if it is a gate."""
        self._follow(tape)
        self.calls[attention] = locate(self._follower, tape, attention)
        return self.calls[attention]

    def completed(self, tape: Tape) -> Conclusions:
        """Trace the rest of the tape and draw all conclusions."""
        self._follow(tape)
        located = {attention: found[0] for attention, found in self.calls.items() if found is not None}
        used = frozenset(number for attention in located for number in attention.softmaxes)
        self.unseen = dict(self._follower.unseen)
        sampled = frozenset(number for attention in located for number in attention.samples)
        self.unseen.update((tape.entries[number].layer, SAMPLED) for number in self._follower.sampled if number not in sampled)
        self.unseen.update(found for number, found in self._softmaxes.items() if number not in used)
        edited = {entry.refs[0].slot for entry in tape.entries if entry.operation.name == EDITED and entry.refs}
        unwatched = any(
            known.kind == "unknown" and known.floating and len(known.shape) > 2 and slot not in edited
            for slot, known in tape.outside.items()
        )
        if unwatched or -1 in tape.output:
            self.unseen[""] = f"continues with {UNWATCHED}"
        with suppress(Exception):  # after an unexpected operation the readout is unknown
            self._read(tape, located)
        del self._follower
        return self

    def _read(self, tape: Tape, located: Mapping[Attention, Arrangement]) -> None:
        """Find where the model reads its tokens."""
        attending = (number for number, entry in enumerate(tape.entries) if entry.attention in located)
        last = max((number for number in attending if _descends(tape, tape.entries[number])), default=None)
        if last is None:
            return
        layouts = dict.fromkeys(layout for found in located.values() for layout in (found.queries, found.keys))
        call = tape.entries[last].attention
        asking = None if call is None or located[call].kind != "pool" else located[call].queries
        answer = asking if asking is not None and len(asking) == 1 else None
        shadows = self._follower.shadows
        self.cut = find_cut(tape, last, shadows, layouts, answer)
        self.readouts = None if self.cut is None else Readouts(tape, self.cut, shadows.planes.images)

    def tokens(self, slot: int) -> Tokens | None:
        """Return the arrangement of the tokens in a wanted slot; None if they are not one complete layout."""
        return self._tokens[slot]

    def has(self, slots: Iterable[int]) -> bool:
        """Check whether the tokens in all these slots were arranged."""
        return all(slot in self._tokens for slot in slots)

    def _follow(self, tape: Tape) -> None:
        follower = self._follower
        for slot in self._wanted & tape.outside.keys() - self._tokens.keys():
            self._arrange(slot)
        while follower.at < len(tape.entries):
            number = follower.at
            entry = tape.entries[number]
            if entry.attention is not None and entry.attention not in self.calls:
                found = locate(follower, tape, entry.attention)
                alone = entry.outs[0] is not None and entry.outs[0].slot not in tape.descends
                if found is not None and found[0].reason and alone:
                    found = found[0].apart(), found[1]
                self.calls[entry.attention] = found
            located = None if entry.attention is None else self.calls[entry.attention]
            follower.see(entry, attends=located is not None)
            self._note(number, entry, located)

    def _note(self, number: int, entry: Entry, located: Located | None) -> None:
        made = next((made for made in entry.outs if made is not None), None)
        kind = "" if located is None else located[0].kind
        if entry.attention is not None and located is not None and made is not None and kind != "channel":
            self._follower.passed(entry.attention, made.slot, kind)
        if entry.operation.own and entry.operation.name in SOFTMAX and (over := self._over_tokens(entry)) is not None:
            self._softmaxes[number] = entry.layer, over
        for slot in [one.slot for one in entry.outs if one is not None] + [after for _, after in entry.rewritten]:
            if slot in self._wanted:
                self._arrange(slot)

    def _arrange(self, slot: int) -> None:
        places = self._follower.places(slot)
        self._tokens[slot] = None
        if places.placed and places.columns is None and not places.drift.away:
            self._tokens[slot] = arrange_tokens(self._follower.planes, places.codes)

    def _over_tokens(self, entry: Entry) -> str | None:
        """Describe a softmax that runs, or may run, over tokens; return None for any other."""
        made = entry.outs[0]
        if made is None:
            return None
        places = self._follower.places(made.slot)
        if places.kind == "lost" and len(made.shape) > 2:
            return f"has a softmax over a tensor that could not be traced beyond {places.name}"
        if not places.placed:
            return None
        dim = entry.args[1] if len(entry.args) > 1 else entry.kwargs.get("dim", -1)
        if entry.operation.name == "gumbel_softmax":
            dim = entry.kwargs.get("dim", entry.args[4] if len(entry.args) > 4 else -1)
        if not isinstance(dim, int):
            return None
        tokens = not same_along(places.codes, dim) or (places.columns is not None and not same_along(places.columns, dim))
        return "has a softmax over tokens whose product with values is not recognized" if tokens else None


def _descends(tape: Tape, entry: Entry) -> bool:
    """Check whether the results of a call come from the image."""
    return any(made is not None and made.slot in tape.descends for made in entry.outs)


def concluded(tape: Tape, wanted: Collection[int] = ()) -> Conclusions:
    """Return all conclusions from a tape; they are drawn once, or again if more slots are wanted."""
    known = tape.conclusions
    if not isinstance(known, Conclusions) or not known.has(wanted):
        with torch._C.DisableTorchFunction():  # a capture around this one sees the model alone
            known = tape.conclusions = Conclusions(tape, wanted).completed(tape)
    return known
