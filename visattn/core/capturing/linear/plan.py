"""Plan of a forward pass whose output is a sum: which calls of its tape are linear in what, and where the summands begin.

A summand begins at the pixels, at the result of an attention call, and at the result of any other call that is not linear, such as an
activation. From there to the output the plan follows calls that are linear: layers, means, sums. Three kinds of calls are made so: the
statistics of a normalization are frozen, as are the weights of an attention pooling, and a factor that one operand of a product takes
from the other, as a gate is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from visattn.core.capturing.following.conclusions import concluded
from visattn.core.capturing.following.tape_readouts import is_linear
from visattn.core.capturing.placing import moves
from visattn.core.capturing.placing.mixing import in_one_and_term
from visattn.core.capturing.placing.operation_table import row_of
from visattn.core.capturing.trace.operations import MULTIPLY, words
from visattn.core.capturing.trace.tape import Attention, Entry, Ref, Tape

NORMS = words("layer_norm rms_norm group_norm normalize")
_PRODUCTS = MULTIPLY | words("div divide true_divide __truediv__ __itruediv__")
_PIXELS = 0  # number of the summand that the pixels begin


class Action(NamedTuple):
    """What to do about a call.

    Attributes:
        kind: `follow`: it is linear; `norm`: freeze its statistics; `freeze`: take the arguments in `slots` as numbers; `pool`: freeze its
            weights; `begin`: a summand begins at its result; `attention`: a summand begins at its result, which is attention.
        slots: Arguments that the summands reach, or that are frozen.
        adds: Whether it may add a constant.
        chooses: Whether it also reads what the image decides without being a sum, such as a mask or an index. That is frozen.
        summand: Number of the summand that begins here, or that a constant belongs to; None for a constant behind the sums of summands.
    """

    kind: Literal["follow", "norm", "freeze", "pool", "begin", "attention"]
    slots: frozenset[int]
    adds: bool = False
    chooses: bool = False
    summand: int | None = None

    @property
    def freezes(self) -> bool:
        """Whether something that the image decides is taken as a number."""
        return self.kind in ("norm", "freeze", "pool") or self.chooses


@dataclass
class Summand:
    """Where a summand of the output begins.

    Attributes:
        reads: Numbers of the summands that its call reads.
        attention: The attention call, if it is one.
        bypassed: Whether all that its call reads is later added to its result, so that it is a residual branch.
        inside: Attention inside a residual branch that only this summand passes on, by number.
    """

    reads: frozenset[int] = frozenset()
    attention: Attention | None = None
    bypassed: bool = False
    inside: frozenset[int] = frozenset()

    @property
    def passes_on(self) -> frozenset[int]:
        """Numbers of the summands that reach the output only through this one, as far as its own call tells."""
        return self.inside if self.bypassed else self.reads


@dataclass
class Plan:
    """Plan of a forward pass.

    Attributes:
        tape: Its tape.
        actions: What to do about each call that the output depends on linearly, by entry.
        summands: Where the summands begin, by number.
        layers: Module that ran at each call that was made linear, by entry, in the latest forward pass.
    """

    tape: Tape
    actions: dict[int, Action] = field(default_factory=dict)
    summands: list[Summand] = field(default_factory=lambda: [Summand()])
    layers: dict[int, str] = field(default_factory=dict)

    def hidden_behind(self, number: int) -> list[Attention]:
        """Return the attention calls that reach the output only through a summand that is no attention, such as an activation."""
        if self.summands[number].attention is not None:
            return []
        hidden, waiting, seen = dict[Attention, None](), sorted(self.summands[number].passes_on), set[int]()
        while waiting:
            each = waiting.pop(0)
            summand = self.summands[each]
            if summand.attention is not None:
                hidden[summand.attention] = None
            elif each not in seen:
                waiting += sorted(summand.passes_on)
            seen.add(each)
        return list(hidden)


def plan_of(tape: Tape) -> Plan:
    """Return the plan of a complete tape; it is made once."""
    if not isinstance(tape.plan, Plan):
        tape.plan = _Planning(tape).plan()
    return tape.plan


class _Planning:
    """Walk along a tape that finds out which tensors are sums of what.

    For each slot (number of a tensor) that is linear in summands, `_sums` holds their numbers.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape, self._plan = tape, Plan(tape)
        self._calls = concluded(tape).calls
        self._sums = {slot: frozenset({_PIXELS}) for slot, outside in tape.outside.items() if outside.kind == "pixels"}
        self._sums |= {
            slot: self._begun(Summand())
            for slot, outside in tape.outside.items()
            if outside.kind == "unknown" and outside.floating and slot in tape.descends
        }
        self._decided: dict[int, frozenset[int]] = {}  # summands that decide a mask or an index, by its slot
        self._joined: set[int] = set()  # slots behind the first sum of a residual branch and what it reads

    def plan(self) -> Plan:
        actions = {number: action for number, entry in enumerate(self._tape.entries) if (action := self._see(entry)) is not None}
        self._plan.actions = self._alive(actions)
        return self._plan

    def _see(self, entry: Entry) -> Action | None:
        """Note what the results of a call are sums of, and return what to do about it; None if it reads no summand."""
        reads = frozenset(ref.slot for ref in entry.refs if ref.slot in self._sums)
        decided = frozenset().union(*(self._decided.get(ref.slot, frozenset()) for ref in entry.refs))
        self._decide(entry, decided | self._all(reads))
        if not reads:
            return self._begin(entry, decided) if decided else None
        located = None if entry.attention is None else self._calls[entry.attention]
        if entry.attention is not None and located is not None:
            return self._see_attention(entry, entry.attention, reads, pools=located[0].kind == "pool")
        factors = self._factors(entry, reads)
        if factors is not None:
            frozen = reads - factors
            return self._follow(entry, factors, Action("freeze", frozen))
        nodes = [int(self._tape.nodes[slot]) for slot in reads]
        if is_linear(entry, nodes, in_place=not entry.rewritten) or _is_settled_batch_norm(entry, reads):
            return self._follow(entry, reads, Action("follow", reads, adds=_may_add(entry), chooses=bool(decided)))
        if entry.operation.own and entry.operation.name in NORMS and entry.refs[0].slot in reads:
            return self._follow(entry, reads, Action("norm", reads, adds=True))
        return self._begin(entry, decided | self._all(reads))

    def _decide(self, entry: Entry, summands: frozenset[int]) -> None:
        """Note by which summands the results of a call are decided that are no sums, such as masks."""
        self._decided |= {made.slot: summands for made in entry.outs if summands and made is not None and not made.floating}

    def _see_attention(self, entry: Entry, attention: Attention, reads: frozenset[int], *, pools: bool) -> Action:
        value = attention.operands[-1].slot
        if pools and value in reads:
            return self._follow(entry, frozenset({value}), Action("pool", frozenset({value})))
        summand = self._begun(Summand(self._all(reads), attention))
        self._give(entry, summand)
        return Action("attention", reads, summand=max(summand))

    def _begin(self, entry: Entry, summands: frozenset[int]) -> Action | None:
        """Begin a summand at the results of a call that reads these; nothing begins at masks and indices."""
        floating = [made for made in entry.outs if made is not None and made.floating]
        if not floating and not entry.rewritten:
            return None
        summand = self._begun(Summand(summands))
        self._give(entry, summand)
        return Action("begin", frozenset(), summand=max(summand))

    def _follow(self, entry: Entry, reads: frozenset[int], action: Action) -> Action:
        """Follow a call that is linear in what it reads."""
        sums, joins = self._all(reads), _is_sum(entry) and self._join(reads)
        self._give(entry, sums)
        if joins or reads & self._joined:
            self._joined.update(made.slot for made in entry.outs if made is not None)
            return action
        return action._replace(summand=max(sums)) if len(sums) == 1 else action

    def _join(self, reads: frozenset[int]) -> bool:
        """Mark the summands that a call adds to what they read; return whether there are any."""
        joins = False
        for slot in reads:
            others = self._all(reads - {slot})
            covered = self._covered(others) if self._sums[slot] - others else others
            for number in self._sums[slot] - others:
                summand = self._plan.summands[number]
                if summand.reads and summand.reads <= covered:
                    summand.bypassed, summand.inside = True, self._inside(summand, others | self._sums[slot])
                    joins = True
        return joins

    def _inside(self, summand: Summand, added: frozenset[int]) -> frozenset[int]:
        """Return the attention that reaches a sum only through this summand, where those in `added` are added too."""
        inside, waiting, seen = set[int](), set(summand.passes_on - added), set[int]()
        while waiting:
            number = waiting.pop()
            seen.add(number)
            if self._plan.summands[number].attention is not None:
                inside.add(number)
            else:
                waiting |= self._plan.summands[number].passes_on - added - seen
        return frozenset(inside)

    def _covered(self, sums: frozenset[int]) -> set[int]:
        """Return the summands that a sum has, and those whose call reads nothing but such summands."""
        covered = set(sums)
        for number, summand in enumerate(self._plan.summands):  # a call reads earlier ones only
            if summand.reads and summand.reads <= covered:
                covered.add(number)
        return covered

    def _factors(self, entry: Entry, reads: frozenset[int]) -> frozenset[int] | None:
        """Return the operand of a product of two summands that stays one when the other is frozen; None if it is no such product.

        That is the operand that the other one scales: the larger one, or else the result of an attention call that a gate multiplies.
        """
        if not entry.operation.own or entry.operation.name not in _PRODUCTS or entry.rewritten:
            return None
        operands = [value.slot for value in entry.args if isinstance(value, Ref)]
        if len(operands) != 2 or operands[0] == operands[1] or not reads >= set(operands):
            return None
        first, second = operands
        sizes = [self._tape.facts[self._tape.nodes[slot]].shape.numel() for slot in operands]
        divides = entry.operation.name not in MULTIPLY
        if sizes[0] > sizes[1] or (divides and sizes[0] == sizes[1] and self._is_attention(first)):
            return frozenset({first})
        if divides:
            return None
        if sizes[1] > sizes[0]:
            return frozenset({second})
        attentive = [slot for slot in operands if self._is_attention(slot)]
        return frozenset(attentive) if len(attentive) == 1 else None

    def _is_attention(self, slot: int) -> bool:
        """Check whether a tensor is the result of one attention call, before it is added to others."""
        return all(self._plan.summands[number].attention is not None for number in self._sums[slot]) and slot not in self._joined

    def _begun(self, summand: Summand) -> frozenset[int]:
        self._plan.summands.append(summand)
        return frozenset({len(self._plan.summands) - 1})

    def _all(self, slots: Iterable[int]) -> frozenset[int]:
        return frozenset().union(*(self._sums[slot] for slot in slots))

    def _give(self, entry: Entry, sums: frozenset[int]) -> None:
        for made in entry.outs:
            if made is not None and made.floating:
                self._sums[made.slot] = sums
        for _, after in entry.rewritten:
            self._sums[after] = sums

    def _alive(self, actions: dict[int, Action]) -> dict[int, Action]:
        """Return the actions of the calls from which the output is reached; attention always begins a summand."""
        alive, kept = {slot for slot in self._tape.output if slot in self._sums}, dict[int, Action]()
        for number, action in reversed(actions.items()):
            entry = self._tape.entries[number]
            results = {made.slot for made in entry.outs if made is not None} | {after for _, after in entry.rewritten}
            if not results & alive and action.kind != "attention":
                continue
            kept[number] = action
            if action.kind in ("follow", "norm", "pool"):
                alive |= action.slots
            elif action.kind == "freeze":
                alive |= {ref.slot for ref in entry.refs if ref.slot in self._sums} - action.slots
        return dict(reversed(kept.items()))


def _is_sum(entry: Entry) -> bool:
    """Check whether a call adds tensors, as `+` and `addmm` do, and does not only put them side by side."""
    rows = [row_of(step.op) for step in entry.steps if step.op is not None]
    return any(row is not None and (row.effect == "adds" or row.linear is in_one_and_term) for _, row in rows)


def _is_settled_batch_norm(entry: Entry, reads: frozenset[int]) -> bool:
    """Check whether a call normalizes by running statistics, which makes it linear."""
    if not entry.operation.own or entry.operation.name != "batch_norm" or entry.refs[0].slot not in reads:
        return False
    training = entry.args[5] if len(entry.args) > 5 else entry.kwargs.get("training", False)
    return training is False


def _may_add(entry: Entry) -> bool:
    """Check whether a linear call may add a constant: it does more than to move elements of one tensor."""
    if len({ref.slot for ref in entry.refs}) > 1 or not entry.steps:
        return True
    rows = [None if step.op is None else row_of(step.op)[1] for step in entry.steps]
    return any(row is None or row.rule.__module__ != moves.__name__ for row in rows)
