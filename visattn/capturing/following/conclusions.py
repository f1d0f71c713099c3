"""Conclusions from a tape: token locations of each attention call, attention that is not recorded, and the readout of the model."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from visattn.capturing.following.follower import UNWATCHED, TokenTracer
from visattn.capturing.following.locations import locate
from visattn.capturing.following.readouts import Readouts
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
        readout: Query that the model reads its output from, as methods spell it; empty if it is unknown.
    """

    def __init__(self, tape: Tape, wanted: Iterable[int] = ()) -> None:
        """Start at the pixels. Tokens in the `wanted` slots are arranged while the tape is traced."""
        self.calls: dict[Attention, Located | None] = {}
        self.unseen: dict[str, str] = {}
        self.readout = ""
        self._tokens: dict[int, Tokens | None] = {}
        self._wanted = frozenset(wanted)
        self._follower = TokenTracer(tape)
        self._readouts = Readouts(self._follower.known)
        self._softmaxes: dict[int, tuple[str, str]] = {}  # index of the entry -> layer, and what it does

    def of_call(self, tape: Tape, attention: Attention) -> Located | None:
        """Locate an attention call that is about to run, after all operations on the tape; None if it is a gate."""
        self._follow(tape)
        self.calls[attention] = locate(self._follower, tape, attention)
        return self.calls[attention]

    def completed(self, tape: Tape) -> Conclusions:
        """Trace the rest of the tape and draw all conclusions."""
        self._follow(tape, _last_uses(tape))
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
        last = next((found for found in reversed(located.values()) if found.keys.grid), None)
        self.readout = self._readouts.named(tape.output, last)
        del self._follower, self._readouts
        return self

    def tokens(self, slot: int) -> Tokens | None:
        """Return the arrangement of the tokens in a wanted slot; None if they are not one complete layout."""
        return self._tokens[slot]

    def has(self, slots: Iterable[int]) -> bool:
        """Check whether the tokens in all these slots were arranged."""
        return all(slot in self._tokens for slot in slots)

    def _follow(self, tape: Tape, last: dict[int, list[int]] | None = None) -> None:
        follower = self._follower
        for slot in self._wanted & tape.outside.keys() - self._tokens.keys():
            follower.meet(slot)
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
            for slot in (last or {}).get(number, ()):
                follower.known.drop(slot)

    def _note(self, number: int, entry: Entry, located: Located | None) -> None:
        made = next((made for made in entry.outs if made is not None), None)
        kind = "" if located is None else located[0].kind
        if entry.attention is not None and located is not None and made is not None and kind != "channel":
            self._follower.passed(entry.attention, made.slot, kind)
        with suppress(Exception):  # after an unexpected operation the readout is unknown
            self._readouts.note(entry, kind)
        if entry.operation.own and entry.operation.name in SOFTMAX and (over := self._over_tokens(entry)) is not None:
            self._softmaxes[number] = entry.layer, over
        for slot in [one.slot for one in entry.outs if one is not None] + [after for _, after in entry.rewritten]:
            if slot in self._wanted:
                self._arrange(slot)

    def _arrange(self, slot: int) -> None:
        places = self._follower.known.places.get(slot)
        self._tokens[slot] = None
        if places is not None and places.columns is None and slot not in self._follower.known.lost:
            self._tokens[slot] = arrange_tokens(self._follower.known.planes, places.codes)

    def _over_tokens(self, entry: Entry) -> str | None:
        """Describe a softmax that runs, or may run, over tokens; return None for any other."""
        known = self._follower.known
        made = entry.outs[0]
        if made is None:
            return None
        places = known.places.get(made.slot)
        if places is None:
            lost = known.lost.get(made.slot)
            return (
                None
                if lost is None or len(made.shape) < 3
                else f"has a softmax over a tensor that could not be traced beyond {lost}"
            )
        dim = entry.args[1] if len(entry.args) > 1 else entry.kwargs.get("dim", -1)
        if entry.operation.name == "gumbel_softmax":
            dim = entry.kwargs.get("dim", entry.args[4] if len(entry.args) > 4 else -1)
        if not isinstance(dim, int):
            return None
        tokens = not same_along(places.codes, dim) or (places.columns is not None and not same_along(places.columns, dim))
        return "has a softmax over tokens whose product with values is not recognized" if tokens else None


def _last_uses(tape: Tape) -> dict[int, list[int]]:
    """Group slots by the index of the last entry that uses them, without the slots of the output."""
    last: dict[int, int] = {}
    for number, entry in enumerate(tape.entries):
        for made in entry.outs:
            if made is not None:
                last[made.slot] = number
        for ref in entry.refs:
            last[ref.slot] = number
        for pair in entry.rewritten:
            last.update(dict.fromkeys(pair, number))
        for operand in entry.attention.operands if entry.attention is not None else ():
            last[operand.slot] = number
    kept = set(tape.output)
    uses: dict[int, list[int]] = {}
    for slot, number in last.items():
        if slot not in kept:
            uses.setdefault(number, []).append(slot)
    return uses


def conclude(tape: Tape, wanted: Iterable[int] = ()) -> Conclusions:
    """Return all conclusions from a tape."""
    return Conclusions(tape, wanted).completed(tape)
