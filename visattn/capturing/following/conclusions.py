"""What follows from a tape: where the tokens of each attention lie, what was not seen, and what the model reads out."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from visattn.capturing.following.follower import Follower
from visattn.capturing.following.locations import locate
from visattn.capturing.following.readouts import Readouts
from visattn.capturing.tokens.arrangement import Arrangement, Tokens, arrange_tokens
from visattn.capturing.tokens.codes import same_along
from visattn.capturing.trace.operations import EDITED, SOFTMAX
from visattn.capturing.trace.tape import Attention, Entry, Tape

Located = tuple[Arrangement, tuple[str, int] | None]


class Conclusions:
    """What follows from a tape, as far as it was followed.

    Attributes:
        calls: Of each attention its arrangement, and what it follows.
        unseen: Layers that attend in a way that is not recorded, and how.
        readout: The query that the model reads its output from, as methods spell it; empty where that could not be told.
    """

    def __init__(self, tape: Tape, wanted: Iterable[int] = ()) -> None:
        """Start at the pixels; the tokens of the slots that are `wanted` are arranged on the way."""
        self.calls: dict[Attention, Located] = {}
        self.unseen: dict[str, str] = {}
        self.readout = ""
        self._tokens: dict[int, Tokens | None] = {}
        self._wanted = frozenset(wanted)
        self._follower = Follower(tape)
        self._readouts = Readouts(self._follower.known)
        self._softmaxes: dict[int, tuple[str, str]] = {}  # entry -> layer, and what was done over which tokens

    def of_call(self, tape: Tape, attention: Attention) -> Located:
        """Of an attention that is about to be made, behind all that is on the tape."""
        self._follow(tape)
        self.calls[attention] = locate(self._follower, attention)
        return self.calls[attention]

    def completed(self, tape: Tape) -> Conclusions:
        """Of the whole tape."""
        last = _last_uses(tape)
        self._follow(tape, last)
        used = frozenset(number for attention in self.calls for number in attention.softmaxes)
        self.unseen = dict(self._follower.unseen)
        self.unseen.update(found for number, found in self._softmaxes.items() if number not in used)
        edited = {entry.refs[0].slot for entry in tape.entries if entry.operation.name == EDITED and entry.refs}
        unwatched = any(
            known.kind == "unknown" and known.floating and len(known.shape) > 2 and slot not in edited
            for slot, known in tape.outside.items()
        )
        if unwatched or -1 in tape.output:
            self.unseen[""] = "goes on with a tensor that comes from code that is not watched"
        record = next((attention for attention in reversed(self.calls) if self.calls[attention][0].keys.grid), None)
        layout = None if record is None else self.calls[record][0]
        self.readout = self._readouts.named(tape.output, layout)
        del self._follower, self._readouts
        return self

    def tokens(self, slot: int) -> Tokens | None:
        """Where the tokens of a slot that was wanted lie."""
        return self._tokens[slot]

    def has(self, slots: Iterable[int]) -> bool:
        """Whether the tokens of all these slots are known."""
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
                self.calls[entry.attention] = locate(follower, entry.attention)
            follower.see(entry)
            self._note(number, entry)
            for slot in (last or {}).get(number, ()):
                follower.known.drop(slot)

    def _note(self, number: int, entry: Entry) -> None:
        made = next((made for made in entry.outs if made is not None), None)
        kind = self.calls[entry.attention][0].kind if entry.attention is not None else ""
        if entry.attention is not None and made is not None and kind != "channel":
            self._follower.passed(entry.attention, made.slot, kind)
        with suppress(Exception):  # of what nobody thought of it stays unknown what the output is read from
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
        """What a softmax does, if it runs over tokens, or may."""
        known = self._follower.known
        made = entry.outs[0]
        if made is None:
            return None
        places = known.places.get(made.slot)
        if places is None:
            lost = known.lost.get(made.slot)
            return None if lost is None or len(made.shape) < 3 else f"has a softmax over what could not be followed beyond {lost}"
        dim = entry.args[1] if len(entry.args) > 1 else entry.kwargs.get("dim", -1)
        if entry.operation.name == "gumbel_softmax":
            dim = entry.kwargs.get("dim", entry.args[4] if len(entry.args) > 4 else -1)
        if not isinstance(dim, int):
            return None
        tokens = not same_along(places.codes, dim) or (places.columns is not None and not same_along(places.columns, dim))
        return "has a softmax over tokens that is not multiplied with values in a known way" if tokens else None


def _last_uses(tape: Tape) -> dict[int, list[int]]:
    """Slots by the number of the entry that is the last to use them."""
    last: dict[int, int] = {}
    for number, entry in enumerate(tape.entries):
        for made in entry.outs:
            if made is not None:
                last[made.slot] = number
        for ref in entry.refs:
            last[ref.slot] = number
        for pair in entry.rewritten:
            last.update(dict.fromkeys(pair, number))
    kept = set(tape.output)
    uses: dict[int, list[int]] = {}
    for slot, number in last.items():
        if slot not in kept:
            uses.setdefault(number, []).append(slot)
    return uses


def conclude(tape: Tape, wanted: Iterable[int] = ()) -> Conclusions:
    """All that follows from a tape."""
    return Conclusions(tape, wanted).completed(tape)
