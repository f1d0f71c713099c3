"""Conclusions from a tape: token locations of each attention call, attention that is not recorded, and the readout of the model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

import torch

from visattn.core.capturing.following.cut import Cut, find_cut
from visattn.core.capturing.following.locations import locate
from visattn.core.capturing.following.tape_readouts import Readouts
from visattn.core.capturing.following.tracing import TokenTracer
from visattn.core.capturing.placing.places import UNWATCHED
from visattn.core.capturing.tokens.arrangement import Arrangement, Tokens, arrange_tokens
from visattn.core.capturing.tokens.codes import same_along
from visattn.core.capturing.trace.operations import EDITED, SOFTMAX
from visattn.core.capturing.trace.tape import Attention, Entry, Tape

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
        arrangements: dict[Attention, Arrangement] = {}
        for attention, located in self.calls.items():
            if located is not None:
                arrangements[attention], _ = located
        self._note_unseen(tape, arrangements)
        with suppress(Exception):  # after an unexpected operation the readout is unknown
            self._read(tape, arrangements)
        del self._follower
        return self

    def _note_unseen(self, tape: Tape, arrangements: Mapping[Attention, Arrangement]) -> None:
        """Note the layers whose attention is not among the recorded calls, and what they do instead."""
        recorded_softmaxes = frozenset(number for attention in arrangements for number in attention.softmaxes)
        recorded_samples = frozenset(number for attention in arrangements for number in attention.samples)
        self.unseen = dict(self._follower.unseen)
        for number in self._follower.sampled:
            if number not in recorded_samples:
                self.unseen[tape.entries[number].layer] = SAMPLED
        for number, (layer, what_it_does) in self._softmaxes.items():
            if number not in recorded_softmaxes:
                self.unseen[layer] = what_it_does
        edited = {entry.refs[0].slot for entry in tape.entries if entry.operation.name == EDITED and entry.refs}
        uses_unknown = any(
            outside.kind == "unknown" and outside.floating and len(outside.shape) > 2 and slot not in edited
            for slot, outside in tape.outside.items()
        )
        if uses_unknown or -1 in tape.output:
            self.unseen[""] = f"continues with {UNWATCHED}"

    def _read(self, tape: Tape, arrangements: Mapping[Attention, Arrangement]) -> None:
        """Find the tensors that the model's output is computed from, behind its last attention."""
        last = None
        for number, entry in enumerate(tape.entries):
            if entry.attention not in arrangements:
                continue
            if any(result is not None and result.slot in tape.descends for result in entry.outs):  # it comes from the image
                last = number
        if last is None:
            return
        layouts = dict.fromkeys(
            layout for arrangement in arrangements.values() for layout in (arrangement.queries, arrangement.keys)
        )
        last_call = tape.entries[last].attention
        pooling = None if last_call is None or arrangements[last_call].kind != "pool" else arrangements[last_call].queries
        single_query = pooling if pooling is not None and len(pooling) == 1 else None
        shadows = self._follower.shadows
        self.cut = find_cut(tape, last, shadows, layouts, single_query)
        self.readouts = None if self.cut is None else Readouts(tape, self.cut, shadows.planes.images)

    def tokens(self, slot: int) -> Tokens | None:
        """Return the arrangement of the tokens in a wanted slot; None if they are not one complete layout."""
        return self._tokens[slot]

    def has(self, slots: Iterable[int]) -> bool:
        """Check whether the tokens in all these slots were arranged."""
        return all(slot in self._tokens for slot in slots)

    def _follow(self, tape: Tape) -> None:
        """Trace the tape up to its current end, and locate each attention call on the way."""
        follower = self._follower
        for slot in self._wanted & tape.outside.keys() - self._tokens.keys():
            self._arrange(slot)
        while follower.at < len(tape.entries):
            number = follower.at
            entry = tape.entries[number]
            if entry.attention is not None and entry.attention not in self.calls:
                call = locate(follower, tape, entry.attention)
                result = entry.outs[0]
                ignores_image = result is not None and result.slot not in tape.descends
                if call is not None and ignores_image:
                    arrangement, follows = call
                    call = (arrangement.apart() if arrangement.reason else arrangement), follows
                self.calls[entry.attention] = call
            located = None if entry.attention is None else self.calls[entry.attention]
            follower.see(entry, attends=located is not None)
            self._note(number, entry, located)

    def _note(self, number: int, entry: Entry, located: Located | None) -> None:
        """Note what an entry that was traced has made: a result of attention, a softmax over tokens, or tokens that are wanted."""
        result = next((made for made in entry.outs if made is not None), None)
        kind = "" if located is None else located[0].kind
        if entry.attention is not None and located is not None and result is not None and kind != "channel":
            self._follower.passed(entry.attention, result.slot, kind)
        is_softmax = entry.operation.own and entry.operation.name in SOFTMAX
        what_it_does = self._over_tokens(entry) if is_softmax else None
        if what_it_does is not None:
            self._softmaxes[number] = entry.layer, what_it_does
        changed = [made.slot for made in entry.outs if made is not None] + [after for _, after in entry.rewritten]
        for slot in changed:
            if slot in self._wanted:
                self._arrange(slot)

    def _arrange(self, slot: int) -> None:
        """Store the layout of the tokens in a slot; None if it is not proven where they lie."""
        places = self._follower.places(slot)
        self._tokens[slot] = None
        if places.placed and places.columns is None and not places.drift.away:
            self._tokens[slot] = arrange_tokens(self._follower.planes, places.codes)

    def _over_tokens(self, entry: Entry) -> str | None:
        """Describe a softmax that runs, or may run, over tokens; return None for any other."""
        result = entry.outs[0]
        if result is None:
            return None
        places = self._follower.places(result.slot)
        if places.kind == "lost" and len(result.shape) > 2:
            return f"has a softmax over a tensor that could not be traced beyond {places.name}"
        if not places.placed:
            return None
        dim = entry.args[1] if len(entry.args) > 1 else entry.kwargs.get("dim", -1)
        if entry.operation.name == "gumbel_softmax":
            dim = entry.kwargs.get("dim", entry.args[4] if len(entry.args) > 4 else -1)
        if not isinstance(dim, int):
            return None
        rows_differ = not same_along(places.codes, dim)
        runs_over_tokens = rows_differ or (places.columns is not None and not same_along(places.columns, dim))
        return "has a softmax over tokens whose product with values is not recognized" if runs_over_tokens else None


def concluded(tape: Tape, wanted: Collection[int] = ()) -> Conclusions:
    """Return all conclusions from a tape; they are drawn once, or again if more slots are wanted."""
    conclusions = tape.conclusions
    if not isinstance(conclusions, Conclusions) or not conclusions.has(wanted):
        with torch._C.DisableTorchFunction():  # a capture around this one sees the model alone
            conclusions = tape.conclusions = Conclusions(tape, wanted).completed(tape)
    return conclusions
