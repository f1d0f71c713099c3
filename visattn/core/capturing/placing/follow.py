"""Places of all tensors of a forward pass, step by step.

One function decides what is known of a result: it is *placed* by the rule of its operation, *learned* if all its arguments are,
*foreign* if another input took part, and *lost* in every other case: an operation without a rule, a rule that raises, memory that
was written by code that is not intercepted, numbers that were read from image tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from visattn.core.capturing.placing import moves, writes
from visattn.core.capturing.placing.nodes import Facts, Node, tensors_in_nodes
from visattn.core.capturing.placing.numbers import Numbers, holds_number
from visattn.core.capturing.placing.operation_table import SOFTMAXES, Row, row_of
from visattn.core.capturing.placing.places import Behind, Kind, Places, Positions, later, whole
from visattn.core.capturing.placing.products import is_sum
from visattn.core.capturing.placing.shadows import Shadows
from visattn.core.capturing.placing.steps import Step
from visattn.core.capturing.placing.work import Unproven, Work
from visattn.core.capturing.tokens.planes import Planes, compact
from visattn.core.capturing.tokens.points import Drift, widest


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
        """Follow one aten operation: note from which cells of the image the elements of its results come.

        After any error, this is unknown for its results and all tensors in the memory that it has written.
        """
        try:
            self._see(step)
        except Exception:  # an operation with unexpected behavior
            results = [node for node in step.outs if node is not None]
            written = [node for _, node in step.written]
            for node in (*results, *written, *step.sharing):
                self.shadows.lose(node, self.call)
            for node in written:
                self.shadows.lose_memory(self.shadows.facts[node].memory, self.call)

    def _see(self, step: Step) -> None:
        """Set the places of a step's results and of the tensors that it overwrites, or note a number that Python read."""
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
        new_nodes = [node for node in step.outs if node is not None]
        result_nodes = new_nodes or [node for _, node in step.written]
        work = Work(step, name, self.shadows, [self.shadows.facts[node] for node in result_nodes])
        if name == "_local_scalar_dense":
            self._numbers.leave(next(work.nodes()))
        results = self._results(work, row)
        self._numbers.note_lengths(work, row, new_nodes)
        overwritten = {node for _, node in step.written}
        for node, places in zip(new_nodes, results, strict=False):  # in-place operations on lists return nothing
            if node not in overwritten:
                self.shadows.put(node, places)
                self._note_values(work, node)
        for (before, node), places in zip(dict(step.written).items(), self._written_results(work, results), strict=True):
            self.shadows.write(before, node, places, step.sharing)

    def _note_values(self, work: Work, result: Node) -> None:
        """Note axes along which a copy repeats its elements, as behind `repeat`, and sums of a single flag (boolean) each."""
        if work.name in _COPYING:
            source, ndim = next(work.nodes()), len(work.shape)
            equal_axes = frozenset(dim for dim in range(ndim) if not work.varies(source, dim, ndim))
            self.shadows.note_even(result, equal_axes)
        if work.name == "sum":
            self._numbers.note_sum(work, result)

    def _written_results(self, work: Work, results: Sequence[Places]) -> list[Places]:
        """Return the new places of each tensor that a step overwrites; they are lost if results and tensors cannot be paired."""
        step = work.step
        count = len(step.written)
        has_one_each = len(results) == count or (not step.outs and len(results) >= count)
        if count and has_one_each:
            return list(results[:count])
        return [_lost(self.shadows.facts[node], work, work.name) for _, node in step.written]

    def _results(self, work: Work, row: Row | None) -> list[Places]:
        """Return the places of all results of an operation. This one function decides what is known of them.

        `row` has the rule of the operation, such as "moves elements" for `permute`; None for an operation without a rule.
        """
        if self.shadows.told and holds_number(work, row):
            return [_lost(facts, work, "numbers that were read from a tensor") for facts in work.outs]
        if row is not None and row.makes:
            return _listed(row.rule(work))
        arguments = _Arguments.of(work, row)
        work.sets = arguments.kind != "placed"
        if arguments.kind != "placed" and self._numbers.tells_length(work, row):
            return [_lost(facts, work, "a length that depends on the image") for facts in work.outs]
        if row is None:
            return [arguments.without_rule(facts, work, self.call or work.name) for facts in work.outs]
        results = self._ruled(work, row, arguments)
        results += [_lost(facts, work, work.name) for facts in work.outs[len(results) :]]
        return [arguments.limited(places, facts, work) for places, facts in zip(results, work.outs, strict=False)]

    def _ruled(self, work: Work, row: Row, arguments: _Arguments) -> list[Places]:
        """Return the places that the rule of an operation proves for its results; they are lost if it raises an error."""
        is_lost = arguments.kind == "lost"
        try:
            if is_lost:
                raise Unproven(arguments.cause)
            keeps_zeros = row.rule.__module__ in _MOVING or work.name == "embedding"
            # without an image among the arguments, rules are needed for tokens of sets only, such as words or object queries
            if work.sets and not keeps_zeros and not arguments.located:
                return [arguments.without_rule(facts, work) for facts in work.outs]
            return _listed(_run_rule(work, row))
        except Exception as error:
            if work.sets and not is_lost:
                return [arguments.without_rule(facts, work) for facts in work.outs]
            reason = (str(error) if isinstance(error, Unproven) else "") or work.name
            is_first_lost = not is_lost and reason == work.name  # this operation is the one beyond which places are unknown
            if is_first_lost:
                reason = self.call or reason
            is_softmax = work.name in SOFTMAXES
            summed = is_sum(error) or (not is_softmax and arguments.summed)
            of_channels = arguments.of_channels or is_sum(error)
            return [_lost(facts, work, reason)._replace(summed=summed, of_channels=of_channels) for facts in work.outs]


class _Arguments(NamedTuple):
    """Facts that all arguments of an operation tell about its results.

    Attributes:
        kind: Most that can be known of a result: placed if any argument is, else lost, foreign or learned.
        cause: Name that says why.
        positions: See `Places.positions`.
        behind: Last attention call that flowed into an argument.
        drift: Largest drift of an argument.
        located: Whether some argument has places, or members of sets.
        summed: Whether some argument is a sum of products of tokens.
        of_channels: Whether those that are lost are matrices between channels, and all others come from parameters.
        weighted: Whether cells of some argument were weighted one by one.
    """

    kind: Kind
    cause: str
    positions: Positions
    behind: Behind
    drift: Drift
    located: bool
    summed: bool
    of_channels: bool
    weighted: bool

    @classmethod
    def of(cls, work: Work, row: Row | None) -> _Arguments:
        """Collect what the arguments that an operation reads tell about its results; `out=` is not read."""
        ignores_self = work.get("beta", 1) == 0 or writes.replaces_unknown(work)
        given = work.step.given.items()
        read = [(name, value) for name, value in given if not name.startswith("out") and not (ignores_self and name == "self")]
        places = [work.places(node) for _, value in read for node in tensors_in_nodes(value)]
        indices = [value for name, value in read if name in _INDICES and work.name in _READING]
        index_places = [work.places(node) for index in indices for node in tensors_in_nodes(index)]
        kind, cause = _most_known(places)
        lost = [argument for argument in places if argument.kind == "lost"]
        return cls(
            kind=kind,
            cause=cause,
            positions=_positions(places, index_places, row),
            behind=later(*(argument.behind for argument in places)),
            drift=widest(*(argument.drift for argument in places)),
            located=any(argument.located for argument in places),
            summed=any(argument.summed for argument in places),
            of_channels=bool(lost) and all(argument.of_channels or argument.kind == "learned" for argument in places),
            weighted=any(argument.weighted for argument in places),
        )

    def without_rule(self, facts: Facts, work: Work, why: str = "") -> Places:
        """Return what is known of a result if no rule follows its elements.

        With an image among the arguments it is lost, because of `why`. Otherwise it is what the arguments are, such as learned.
        """
        if self.kind == "placed":
            return _lost(facts, work, why or work.name)._replace(positions=self.positions)
        return whole(self.kind, facts.shape, work.device, self.cause)._replace(positions=self.positions)

    def limited(self, places: Places, facts: Facts, work: Work) -> Places:
        """Return the places that a rule has found for a result, limited to what the arguments allow.

        Without an image among the arguments, for example, nothing is placed.
        """
        if places.shape != facts.shape:
            places = self.without_rule(facts, work) if self.kind != "lost" else _lost(facts, work, work.name)
        elif self.kind != "placed":
            name = self.cause if self.kind == "foreign" else places.name or self.cause
            places = places._replace(kind=self.kind, name=name, copies=None, positions=self.positions)
        elif places.kind != "placed" or bool((compact(places.codes) < -1).all()):  # constants that were chosen by image tokens
            lost = _lost(facts, work, places.name or work.name)
            places = lost._replace(summed=places.summed, of_channels=places.of_channels)
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
    """Return the places of a result of which it is unknown where its elements come from; `why` is shown to the user."""
    return whole("lost", facts.shape, work.device, why)


def _most_known(arguments: Sequence[Places]) -> tuple[Kind, str]:
    """Return the most that can be known of a result, and the name of an argument that is the reason.

    One argument from the image suffices for `placed`. Otherwise, one of unknown origin makes the result `lost`.
    """
    for kind in ("placed", "lost", "foreign", "learned"):
        of_this_kind = [places for places in arguments if places.kind == kind]
        if of_this_kind:
            return kind, next((places.name for places in of_this_kind if places.name), "")
    return "learned", ""


def _positions(arguments: Sequence[Places], indices: Sequence[Places], row: Row | None) -> Positions:
    """Return whether a result holds positions or flags, such as masks and sizes that another input of the model gives.

    It does if all other inputs among the arguments hold whole numbers and booleans, and none picks rows of a table, as words do.
    """
    origins = {argument.positions for argument in arguments if argument.kind == "foreign"}
    if not origins or "" in origins:
        return ""
    is_table_read = any(index.positions == "given" for index in indices)
    if is_table_read:
        return ""
    is_moved = row is not None and row.rule.__module__ == moves.__name__
    return "given" if origins == {"given"} and is_moved else "computed"


def _listed(result: Any) -> list[Places]:  # noqa: ANN401
    """Return what a rule gives as a list, also where the operation has a single result."""
    return list(result) if isinstance(result, list) else [result]


def _run_rule(work: Work, row: Row) -> Any:  # noqa: ANN401
    """Run the rule of an operation; for `_foreach_add` and the like, which take lists of tensors, once for each tensor."""
    op = work.step.op
    assert op is not None  # noqa: S101 - a step of the model
    if not op._schema.name.startswith("aten::_foreach_"):
        return row.rule(work)
    results: list[Places] = []
    for number, facts in enumerate(work.outs):
        arguments = {}
        for name, value in work.step.given.items():
            is_tensor_list = isinstance(value, list) and any(isinstance(item, Node) for item in value)
            arguments[name] = value[number] if is_tensor_list else value
        single = Work(Step(op, arguments), work.name, work.shadows, [facts])
        single.sets = work.sets
        results += _listed(row.rule(single))[:1]
    return results
