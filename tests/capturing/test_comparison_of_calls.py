"""Comparison of calls with the entries of a known tape: which calls are the recorded ones, and which slots tensors get."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from visattn.core.capturing.placing.kernels import Kernel, kernel_of, kind_of
from visattn.core.capturing.placing.steps import Step
from visattn.core.capturing.trace.choices import Choices
from visattn.core.capturing.trace.comparing import Comparison
from visattn.core.capturing.trace.living import Living
from visattn.core.capturing.trace.members import Members
from visattn.core.capturing.trace.operations import operation_of
from visattn.core.capturing.trace.tape import STRANGE, Entry, Made, Outside, Ref, Tape


class Scene(NamedTuple):
    """Forward pass that is compared: tensors in slots 0 and 1, and a model with a weight that is not met yet."""

    comparison: Comparison
    living: Living
    members: Members
    model: nn.Linear
    x: Tensor
    y: Tensor


def scene(outside: Mapping[int, Outside] | None = None) -> Scene:
    model = nn.Linear(4, 5)
    living = Living(lambda _: None)
    members = Members({model: "layer"}, living.exposed)
    x, y = torch.zeros(2, 3), torch.zeros(2, 3)
    living.enlist(x)
    living.enlist(y)
    home = members.home(model.weight)
    weight = Outside("parameter", "layer", torch.Size((5, 4)), True, home)
    tape = Tape(outside={2: weight} if outside is None else dict(outside))
    return Scene(Comparison(tape, living, members), living, members, model, x, y)


def entry(*args: Any, func: Callable[..., Any] = torch.add, outs: Sequence[Made | None] = (), **kwargs: Any) -> Entry:
    return Entry(func, operation_of(func), args, kwargs, tuple(outs), "")


def both(at: Scene, known: Entry, *args: Any, func: Callable[..., Any] = torch.add, **kwargs: Any) -> bool:
    """Compare a call in the fast and in the thorough way, which must agree, and leave no slots behind."""
    answers = []
    count = len(at.living.refs)
    for check in (at.comparison.is_simple_call, at.comparison.is_call):
        answers.append(check(known, func, args, kwargs))
        assert answers[-1] or len(at.living.refs) == count
        at.living.back_to(count)
    assert answers[0] == answers[1]
    return answers[0]


# --- which call it is


def test_indices_are_equal_if_their_types_are() -> None:
    """`x[[True, True]]` picks rows 0 and 1, and `x[[1, 1]]` picks row 1 twice."""
    at = scene()
    for known, same, other in [([1, 1], [1, 1], [True, True]), ((slice(None), 0), (slice(None), 0), (slice(None), False))]:
        assert both(at, entry(Ref(0), known), at.x, same)
        assert not both(at, entry(Ref(0), known), at.x, other)
        assert not both(at, entry(Ref(0), other), at.x, known)
    assert not both(at, entry(Ref(0), (slice(1), 0)), at.x, (slice(2), 0))
    assert both(at, entry(Ref(0), slice(1, 2)), at.x, slice(1, 2))


def test_call_with_equal_arguments_is_the_recorded_one() -> None:
    at = scene()
    known = entry(Ref(0), Ref(1), 3, alpha=2)
    assert both(at, known, at.x, at.y, 3, alpha=2)
    assert not both(at, known, at.x, at.y, 3, alpha=2, func=torch.sub)
    assert not both(at, known, at.y, at.x, 3, alpha=2)
    assert not both(at, known, at.x, at.x, 3, alpha=2)
    assert not both(at, known, at.x, at.y, 4, alpha=2)
    assert not both(at, known, at.x, at.y, 3.0, alpha=2)
    assert not both(at, known, at.x, at.y, 3, alpha=1)
    assert not both(at, known, at.x, at.y, 3, beta=2)
    assert not both(at, known, at.x, at.y, 3)
    assert not both(at, known, at.x, at.y, alpha=2)
    assert not both(at, known, at.x, at.y, 3, 4, alpha=2)
    assert not both(at, known, at.x, 1, 3, alpha=2)
    assert not both(at, entry(Ref(0), 3), at.x, at.y)
    assert both(at, entry(Ref(0), alpha=1, out=None), at.x, alpha=1, out=None)


def test_a_call_by_position_is_not_the_one_that_was_recorded_by_name() -> None:
    at = scene()
    by_name = entry(Ref(0), func=torch.roll, dims=1, shifts=2)
    assert not both(at, by_name, at.x, 1, 2, func=torch.roll)
    assert not both(at, by_name, at.x, 1, shifts=2, func=torch.roll)
    assert both(at, by_name, at.x, func=torch.roll, dims=1, shifts=2)
    assert not at.comparison.is_simple_call(by_name, torch.roll, (at.x, 1, 2), None)
    assert not both(at, entry(Ref(0), alpha=1, out=None), at.x, out=None, alpha=1)


def test_functions_that_are_equal_are_the_same() -> None:
    at, values = scene(), [1]
    known = entry(Ref(0), func=values.append)
    assert values.append is not values.append
    assert both(at, known, at.x, func=values.append)
    assert not both(at, known, at.x, func=values.remove)


def test_call_with_keywords_is_known_by_their_order_and_values() -> None:
    at = scene()
    known = entry(Ref(0), other=Ref(1))
    assert both(at, known, at.x, other=at.y)
    assert not both(at, known, at.x, other=at.x)
    assert not at.comparison.is_call(known, torch.add, (at.x, at.y), {})


def test_fast_comparison_takes_no_keywords_as_none() -> None:
    at = scene()
    assert at.comparison.is_simple_call(entry(Ref(0), 1), torch.add, (at.x, 1), None)
    assert not at.comparison.is_simple_call(entry(Ref(0), 1), torch.add, (at.x, 2), None)


def test_overwritten_tensor_is_another() -> None:
    at = scene()
    at.x.add_(1)
    assert not both(at, entry(Ref(0), 1), at.x, 1)
    other = scene()
    other.x.add_(1)
    other.living.versions[0] = None
    assert both(other, entry(Ref(0), 1), other.x, 1)


def test_tensor_that_is_gone_is_no_argument() -> None:
    at = scene()
    gone = torch.zeros(2)
    slot = at.living.enlist(gone)
    del gone
    assert not both(at, entry(Ref(slot), 1), at.y, 1)


def test_parameter_that_is_met_first_gets_the_next_slot() -> None:
    at = scene()
    known = entry(Ref(0), Ref(2))
    for check in (at.comparison.is_simple_call, at.comparison.is_call):
        assert check(known, torch.add, (at.x, at.model.weight), {})
        assert len(at.living.refs) == 3
        assert at.living.slot(at.model.weight) == 2
        at.living.back_to(2)
    assert not both(at, entry(Ref(2), 1), at.model.bias, 1)
    assert not both(at, entry(Ref(2), 1), torch.zeros(5, 4), 1)
    assert not both(at, entry(Ref(2), 1), 7, 1)
    assert not both(at, entry(Ref(2), 1), at.model.weight, 2)
    assert not both(at, entry(Ref(3), 1), at.model.weight, 1)


def test_two_parameters_may_be_met_first_in_one_call() -> None:
    at = scene()
    at.comparison.tape.outside[3] = Outside("parameter", "bias", torch.Size((5,)), True, at.members.home(at.model.bias))
    known = entry(Ref(2), Ref(3), Ref(2))
    assert both(at, known, at.model.weight, at.model.bias, at.model.weight)
    assert not both(at, known, at.model.weight, at.model.bias, at.model.bias)
    assert not both(at, entry(Ref(3), Ref(2)), at.model.bias, at.model.weight)


def test_slot_of_another_call_is_not_met_first() -> None:
    at = scene(outside={})
    assert not both(at, entry(Ref(2), 1), at.model.weight, 1)


def unknown(**changes: Any) -> Outside:
    return Outside("unknown", "", torch.Size((5, 4)), True)._replace(**changes)


@pytest.mark.parametrize(
    ("changes", "fits"),
    [({}, True), ({"shape": torch.Size((4, 5))}, False), ({"floating": False}, False), ({"kind": "buffer"}, False)],
)
def test_tensor_of_unknown_origin_is_known_by_its_form(changes: Mapping[str, Any], fits: bool) -> None:
    at = scene(outside={2: unknown(**changes)})
    fresh = torch.zeros(5, 4)
    assert at.comparison.is_call(entry(Ref(2)), torch.add, (fresh,), {}) == fits
    assert at.living.slot(fresh) == (2 if fits else None)


def test_parameter_without_a_home_is_known_by_kind_and_name() -> None:
    at = scene(outside={2: unknown(kind="parameter", name="layer")})
    assert not at.comparison.is_call(entry(Ref(2)), torch.add, (torch.zeros(5, 4),), {})
    assert at.comparison.is_call(entry(Ref(2)), torch.add, (at.model.weight,), {})
    other = scene(outside={2: unknown(kind="parameter", name="other")})
    assert not other.comparison.is_call(entry(Ref(2)), torch.add, (other.model.weight,), {})


def test_parameter_is_known_by_its_name_where_memory_is_exposed() -> None:
    at = scene()
    at.living.exposed.add(at.x)
    assert not at.comparison.is_simple_call(entry(Ref(0)), torch.add, (at.x,), {})
    assert at.comparison.is_call(entry(Ref(0)), torch.add, (at.x,), {})
    assert at.comparison.is_call(entry(Ref(2)), torch.add, (at.model.weight,), {})
    renamed = scene()
    renamed.living.exposed.add(renamed.x)
    renamed.comparison.tape.outside[2] = renamed.comparison.tape.outside[2]._replace(name="other")
    assert not renamed.comparison.is_call(entry(Ref(2)), torch.add, (renamed.model.weight,), {})


def test_fast_comparison_stops_once_contents_are_exchanged() -> None:
    at = scene()
    at.members.exchange(at.y)
    assert not at.comparison.is_simple_call(entry(Ref(0)), torch.add, (at.x,), {})
    assert at.comparison.is_call(entry(Ref(0)), torch.add, (at.x,), {})


@pytest.mark.parametrize(
    ("value", "others"),
    [
        ((1, 2), [(1, 3), (1,), [1, 2], (1, 2, 3), 1]),
        ([1, (2, 3)], [[1, (2, 4)], [1, [2, 3]], (1, (2, 3))]),
        (slice(1, 5, 2), [slice(0, 5, 2), slice(1, 6, 2), slice(1, 5, 3), slice(1, 5), 1, (1, 5, 2)]),
        ({"a": 1, "b": 2}, [{"a": 1, "b": 3}, {"a": 1}, {"b": 2, "a": 1}, {"a": 1, "c": 2}, [1, 2]]),
        ("text", ["other", None]),
    ],
)
def test_nested_arguments_must_be_equal(value: Any, others: Sequence[Any]) -> None:
    at = scene()
    known = entry(Ref(0), value)
    assert at.comparison.is_call(known, torch.add, (at.x, value), {})
    for other in others:
        assert not at.comparison.is_call(known, torch.add, (at.x, other), {})


def test_tensors_in_nested_arguments_are_compared() -> None:
    at = scene()
    known = entry([Ref(0), Ref(1)], {"a": Ref(1)}, slice(Ref(0), None))
    assert at.comparison.is_call(known, torch.cat, ([at.x, at.y], {"a": at.y}, slice(at.x, None)), {}) is False
    known = entry([Ref(0), Ref(1)], {"a": Ref(1)}, slice(Ref(0), None), func=torch.cat)
    assert at.comparison.is_call(known, torch.cat, ([at.x, at.y], {"a": at.y}, slice(at.x, None)), {})
    assert not at.comparison.is_call(known, torch.cat, ([at.y, at.x], {"a": at.y}, slice(at.x, None)), {})
    assert not at.comparison.is_call(known, torch.cat, ([at.x, at.y], {"a": at.x}, slice(at.x, None)), {})
    assert not at.comparison.is_call(known, torch.cat, ([at.x, at.y], {"a": at.y}, slice(at.y, None)), {})
    assert not at.comparison.is_call(entry(STRANGE), torch.add, (STRANGE,), {})


# --- kernels and points


def test_kernel_that_leans_elsewhere_is_another() -> None:
    at = scene()
    kernel = torch.zeros(1, 1, 3, 3)
    kernel[0, 0, 1, 1] = 1
    slot = at.living.enlist(kernel)
    kind = kind_of((3, 3), {"padding": 1})
    assert kind is not None
    for noted in (kernel_of(kernel, kind), Kernel(centered=False, tap=(0, 0))):
        known = entry(Ref(slot), 1)
        known.steps = (Step(None, {}, kernel=noted),)
        known.kernels = ((slot, kind, noted),)
        tape = Tape([known])
        at.comparison.follow(tape)
        assert both(at, known, kernel, 1)  # its values are read when the forward pass has ended
        at.comparison.settle([])
        (settled,) = at.comparison.tape.entries
        assert (settled is known) == (noted.centered)
        assert settled.kernels == ((slot, kind, kernel_of(kernel, kind)),)
        assert settled.steps[0].kernel == kernel_of(kernel, kind)
        assert known.steps[0].kernel == noted


class _Points:
    """Stand-in for the points of an entry, which fit tensors of this sum."""

    def __init__(self, total: float) -> None:
        self.total = total

    def fits(self, positions: Tensor) -> bool:
        return float(positions.sum()) == self.total


def test_call_must_sample_at_the_recorded_points() -> None:
    at = scene()
    at.y.fill_(1)
    at.living.versions[1] = None
    points: Any = _Points(6), _Points(5)
    known = entry(Ref(0), Ref(1))
    known.quick = None
    known.points = ((1, points[0]),)
    assert at.comparison.is_call(known, torch.add, (at.x, at.y), {})
    known.points = ((1, points[0]), (1, points[1]))
    assert not at.comparison.is_call(known, torch.add, (at.x, at.y), {})


# --- tokens picked by content


def test_choices_with_one_number_pick_the_same_tokens() -> None:
    picked = torch.tensor([[1, 4, 2]])
    index, other = (tokens[..., None].expand(-1, -1, 7) for tokens in (picked, picked + 1))
    choices = Choices()
    assert choices.fits(3, index)
    assert choices.fits(3, index)
    assert not choices.fits(3, other)
    assert not choices.fits(4, index)
    assert choices.fits(4, other)
    assert not choices.fits(5, other)
    assert choices.fits(5, index[:, :2])
    known, without = entry(), entry()
    known.choice, known.contents = 4, {6: torch.zeros(1, 3, 7, dtype=torch.long)}
    without.contents = {6: torch.zeros(1, 3, 7, dtype=torch.long)}
    choices.renew([known, without])
    assert torch.equal(known.contents[6], other)
    assert not without.contents[6].any()


def test_picked_tokens_are_compared_by_their_first_channel() -> None:
    index = torch.tensor([[[1, 9], [4, 9]]])
    choices = Choices()
    assert choices.fits(0, index)
    assert choices.fits(0, torch.tensor([[[1, 8], [4, 7]]]))
    assert not choices.fits(0, torch.tensor([[[9, 1], [9, 4]]]))
    index[0, 0, 0] = 5
    assert choices.fits(0, torch.tensor([[[1, 9], [4, 9]]]))
