"""Places of all tensors of a forward pass, step by step.

One function decides what is known of a result: it is *placed* by the rule of its operation, *learned* if all its arguments are, *foreign*
if another input took part, and *lost* in every other case: an operation without a rule, a rule that raises, memory that was written by
code that is not intercepted, numbers that were read from image tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from visattn.capturing.placing import moves, writes
from visattn.capturing.placing.nodes import Facts, Node, tensors_in_nodes
from visattn.capturing.placing.numbers import Numbers, holds_number
from visattn.capturing.placing.places import Behind, Kind, Places, Positions, later, whole
from visattn.capturing.placing.products import is_sum
from visattn.capturing.placing.shadows import Shadows
from visattn.capturing.placing.steps import Step
from visattn.capturing.placing.table import SOFTMAXES, Row, row_of
from visattn.capturing.placing.work import Unproven, Work
from visattn.capturing.tokens.planes import Planes, compact
from visattn.capturing.tokens.points import Drift, widest

UNWATCHED = "a tensor of an earlier forward pass, or of code that is not intercepted"


class Follower:
    """Places of the tensors of a forward pass, as far as it was followed.

    Attributes:
        shadows: Places of each tensor.
        call: Name of the call that the steps belong to, for reasons.
    """

    def __init__(self, planes: Planes, facts: Sequence[Facts], first: Callable[[int], Places]) -> None:
        """Start without places; `first` returns those of a tensor that no step has made."""
        self.shadows, self.call = Shadows(planes, facts, first), ""
        self._numbers = Numbers(self.shadows)

    def see(self, step: Step) -> None:
        """Follow a step; after any error its results, and all tensors in the memory that it has written, are lost."""
        try:
            self._see(step)
        except Exception:  # an operation with unexpected behavior
            written = [node for _, node in step.written]
            for node in (*(node for node in step.outs if node is not None), *written, *step.sharing):
                self.shadows.lose(node, self.call)
            for node in written:
                self.shadows.lose_memory(self.shadows.facts[node].memory, self.call)

    def _see(self, step: Step) -> None:
        if step.op is None and "read" in step.given:
            self._numbers.leave(step.given["read"])
            return
        if step.op is None and "length" in step.given:
            self._numbers.leave_length(step.given["length"])
            return
        if step.op is None:
            self.shadows.lose_memory(step.given["memory"], "a write that was not intercepted")
            return
        name, row = row_of(step.op)
        made = [node for node in step.outs if node is not None]
        outs = made or [node for _, node in step.written]
        work = Work(step, name, self.shadows, [self.shadows.facts[node] for node in outs])
        if name == "_local_scalar_dense":
            self._numbers.leave(next(work.nodes()))
        found = self._results(work, row)
        self._numbers.note_lengths(work, row, made)
        after = {node for _, node in step.written}
        for node, places in zip(made, found, strict=False):  # in-place operations on lists return nothing
            if node not in after:
                self.shadows.put(node, places)
                self._note_values(work, node)
        for (before, node), places in zip(dict(step.written).items(), self._written_results(work, found), strict=True):
            self.shadows.write(before, node, places, step.sharing)

    def _note_values(self, work: Work, node: Node) -> None:
        """Note what copies and sums of flags have in common, whatever their values are."""
        if work.name in _COPYING:
            source, ndim = next(work.nodes()), len(work.shape)
            self.shadows.note_even(node, frozenset(dim for dim in range(ndim) if not work.varies(source, dim, ndim)))
        if work.name == "sum":
            self._numbers.note_sum(work, node)

    def _written_results(self, work: Work, found: Sequence[Places]) -> list[Places]:
        """Return the new places of each overwritten tensor."""
        step, count = work.step, len(work.step.written)
        if count and (len(found) == count or (not step.outs and len(found) >= count)):
            return list(found[:count])
        return [_lost(self.shadows.facts[node], work, work.name) for _, node in step.written]

    def _results(self, work: Work, row: Row | None) -> list[Places]:
        """Return the places of all results: the one function that decides what is known."""
        if self._numbers.read and holds_number(work, row):
            return [_lost(facts, work, "numbers that were read from a tensor") for facts in work.outs]
        if row is not None and row.makes:
            return _listed(row.rule(work))
        known = _Known.of(work, row)
        work.sets = known.kind != "placed"
        if known.kind != "placed" and self._numbers.tells_length(work, row):
            return [_lost(facts, work, "a length that depends on the image") for facts in work.outs]
        if row is None:
            return [known.passed_on(facts, work, self.call or work.name) for facts in work.outs]
        found = self._ruled(work, row, known)
        found += [_lost(facts, work, work.name) for facts in work.outs[len(found) :]]
        return [known.carried(places, facts, work) for places, facts in zip(found, work.outs, strict=False)]

    def _ruled(self, work: Work, row: Row, known: _Known) -> list[Places]:
        """Return what the rule of an operation proves; where no argument comes from the image, it follows members of sets, if any."""
        try:
            if known.kind == "lost":
                raise Unproven(known.cause)
            keeps_zeros = row.rule.__module__ in _MOVING or work.name == "embedding"
            if work.sets and not keeps_zeros and not known.located:
                return [known.passed_on(facts, work) for facts in work.outs]
            return _listed(_each(work, row))
        except Exception as error:
            if work.sets and known.kind != "lost":
                return [known.passed_on(facts, work) for facts in work.outs]
            why = (str(error) if isinstance(error, Unproven) else "") or work.name
            if known.kind != "lost" and why == work.name:  # this operation is the one beyond which places are unknown
                why = self.call or why
            summed = is_sum(error) or (work.name not in SOFTMAXES and known.summed)
            return [_lost(facts, work, why)._replace(summed=summed) for facts in work.outs]


class _Known(NamedTuple):
    """Facts that all arguments of an operation tell about its results.

    Attributes:
        kind: Most that can be known of a result: placed if any argument is, else lost, foreign or learned.
        cause: Name that says why.
        positions: See `Places.positions`.
        behind: Last attention call that flowed into an argument.
        drift: Largest drift of an argument.
        located: Whether some argument has places, or members of sets.
        summed: Whether some argument is a sum of products of tokens.
        weighted: Whether cells of some argument were weighted one by one.
    """

    kind: Kind
    cause: str
    positions: Positions
    behind: Behind
    drift: Drift
    located: bool
    summed: bool
    weighted: bool

    @classmethod
    def of(cls, work: Work, row: Row | None) -> _Known:
        """Look at the arguments that are read."""
        unread = work.get("beta", 1) == 0 or writes.replaces_unknown(work)
        given = work.step.given.items()
        read = [(key, value) for key, value in given if not key.startswith("out") and not (unread and key == "self")]
        places = [work.places(node) for _, value in read for node in tensors_in_nodes(value)]
        indices = [value for key, value in read if key in _INDICES and work.name in _READING]
        chosen = [work.places(node) for value in indices for node in tensors_in_nodes(value)]
        kind, cause = _kind(places)
        return cls(
            kind,
            cause,
            _positions(places, chosen, row),
            later(*(one.behind for one in places)),
            widest(*(one.drift for one in places)),
            any(one.located for one in places),
            any(one.summed for one in places),
            any(one.weighted for one in places),
        )

    def passed_on(self, facts: Facts, work: Work, why: str = "") -> Places:
        """Return what is known of a result whose elements no rule has followed; places are lost, because of `why`."""
        if self.kind == "placed":
            return _lost(facts, work, why or work.name)._replace(positions=self.positions)
        return whole(self.kind, facts.shape, work.device, self.cause)._replace(positions=self.positions)

    def carried(self, places: Places, facts: Facts, work: Work) -> Places:
        """Return what a rule has found, as far as the arguments allow, with what they carry along."""
        if places.shape != facts.shape:
            places = self.passed_on(facts, work) if self.kind != "lost" else _lost(facts, work, work.name)
        elif self.kind != "placed":
            places = places._replace(kind=self.kind, name=places.name or self.cause, copies=None, positions=self.positions)
        elif places.kind != "placed" or bool((compact(places.codes) < -1).all()):  # constants that were chosen by image tokens
            places = _lost(facts, work, places.name or work.name)._replace(summed=places.summed)
        return places._replace(
            behind=later(places.behind, self.behind),
            drift=widest(places.drift, self.drift),
            weighted=places.weighted or self.weighted,
        )


_READING = frozenset({"embedding", "index", "_unsafe_index", "gather", "index_select", "take"})  # rows of tables
_INDICES = "indices", "index"
_COPYING = frozenset({"repeat", "clone", "_to_copy"})  # each element of a result is one of the source, aligned at the last axes
_MOVING = frozenset({moves.__name__, writes.__name__})  # their rules keep zeros


def _lost(facts: Facts, work: Work, why: str) -> Places:
    return whole("lost", facts.shape, work.device, why)


def _kind(known: Sequence[Places]) -> tuple[Kind, str]:
    """Return what is known of a result from its arguments, and the name that says it."""
    for kind in ("placed", "lost", "foreign", "learned"):
        of = [places for places in known if places.kind == kind]
        if of:
            return kind, next((places.name for places in of if places.name), "")
    return "learned", ""


def _positions(known: Sequence[Places], chosen: Sequence[Places], row: Row | None) -> Positions:
    """Return whether a result comes, of other inputs, from whole numbers and booleans only; see `Places.positions`."""
    found = {one.positions for one in known if one.kind == "foreign"}
    if not found or "" in found or any(one.positions == "given" for one in chosen):
        return ""
    return "given" if found == {"given"} and row is not None and row.rule.__module__ == moves.__name__ else "computed"


def _listed(found: Any) -> list[Places]:  # noqa: ANN401
    return list(found) if isinstance(found, list) else [found]


def _each(work: Work, row: Row) -> Any:  # noqa: ANN401
    """Run a rule; for an operation on lists of tensors, once for each."""
    op = work.step.op
    assert op is not None  # noqa: S101 - a step of the model
    if not op._schema.name.startswith("aten::_foreach_"):
        return row.rule(work)
    made: list[Places] = []
    for number, facts in enumerate(work.outs):
        given = {
            key: value[number] if isinstance(value, list) and any(isinstance(x, Node) for x in value) else value
            for key, value in work.step.given.items()
        }
        one = Work(Step(op, given), work.name, work.shadows, [facts])
        one.sets = work.sets
        made += _listed(row.rule(one))[:1]
    return made
