"""Calls that belong to attention, found on tapes: softmaxes, products behind them, samples, and operands that are kept."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visattn._support.parts import parts_of
from visattn.core.capturing.intercept import mode as modes
from visattn.core.capturing.intercept.calls import FusedCall
from visattn.core.capturing.intercept.held import Held, is_weighing, product_behind, sampled_behind
from visattn.core.capturing.intercept.mode import CaptureMode
from visattn.core.capturing.intercept.running_module import Owners
from visattn.core.capturing.intercept.written_out import note_weights
from visattn.core.capturing.trace.keywords import restored
from visattn.core.capturing.trace.operations import edited_weights, operation_of
from visattn.core.capturing.trace.tape import Entry, Made, Ref, Tape

SCORES = torch.Size((2, 3, 5, 7))


class Writing:
    """Tape that is written call by call; each call returns the slot of its result."""

    def __init__(self) -> None:
        self.tape = Tape()
        self.tensors: dict[int, Tensor] = {}
        self.count = 0

    def tensor(self, shape: tuple[int, ...] = SCORES, of_image: bool = True) -> int:
        """Return the slot of a tensor that no call has made."""
        self.count += 1
        self.tensors[self.count] = torch.zeros(shape)
        if of_image:
            self.tape.descends.add(self.count)
        return self.count

    def call(self, func: Callable[..., Any], *slots: int, shape: tuple[int, ...] = SCORES, of_image: bool = True) -> int:
        """Write a call on these tensors; return the slot of its result."""
        slot = self.tensor(shape, of_image)
        made = Made(slot, torch.Size(shape), True)
        self.tape.entries.append(Entry(func, operation_of(func), tuple(map(Ref, slots)), {}, (made,), ""))
        return slot

    @property
    def last(self) -> int:
        """Number of the last entry."""
        return len(self.tape.entries) - 1

    @property
    def tracer(self) -> Any:
        """Stand-in for a tracer of this tape."""
        slots = {id(tensor): slot for slot, tensor in self.tensors.items()}
        return SimpleNamespace(
            tape=self.tape,
            slot_of=lambda tensor: slots.get(id(tensor)),
            place_of=lambda tensor: slots[id(tensor)],
            descends=lambda tensor: slots.get(id(tensor)) in self.tape.descends,
        )


# --- the product behind a softmax


def behind(writing: Writing) -> int | None:
    return product_behind(writing.tape, frozenset({writing.last}))


def test_product_is_found_through_scaling_and_masks() -> None:
    writing = Writing()
    mask, scores = writing.tensor(of_image=False), writing.call(torch.matmul, writing.tensor(), writing.tensor())
    scaled = writing.call(torch.mul, scores)
    writing.call(torch.relu, writing.tensor())
    writing.call(torch.softmax, writing.call(torch.add, scaled, mask))
    assert behind(writing) == 0
    assert product_behind(writing.tape, frozenset()) is None


@pytest.mark.parametrize("func", [torch.bmm, torch.baddbmm, torch.einsum, Tensor.__matmul__])
def test_product_may_be_the_call_right_before_the_softmax(func: Callable[..., Any]) -> None:
    writing = Writing()
    writing.call(torch.relu, writing.tensor())
    writing.call(torch.softmax, writing.call(func, writing.tensor(), writing.tensor()))
    assert behind(writing) == 1


def test_only_products_of_two_tensors_of_the_image_are_scores() -> None:
    for changes in ({"shape": (2, 3, 5, 6)}, {"of_image": False}):
        writing = Writing()
        writing.call(torch.softmax, writing.call(torch.matmul, writing.tensor(), writing.tensor(), **changes))
        assert behind(writing) is None
    writing = Writing()
    writing.call(torch.softmax, writing.call(torch.einsum, writing.tensor()))
    assert behind(writing) is None


def test_other_calls_end_the_search_for_a_product() -> None:
    for func in (torch.relu, torch.sigmoid, lambda x: x):
        writing = Writing()
        scores = writing.call(torch.matmul, writing.tensor(), writing.tensor())
        writing.call(torch.softmax, writing.call(func, scores))
        assert behind(writing) is None


def test_sum_of_two_products_has_no_single_one() -> None:
    writing = Writing()
    terms = [writing.call(torch.matmul, writing.tensor(), writing.tensor()) for _ in range(2)]
    writing.call(torch.softmax, writing.call(torch.add, *terms))
    assert behind(writing) is None


def test_overwritten_scores_are_followed_to_their_old_slot() -> None:
    writing = Writing()
    scores = writing.call(torch.matmul, writing.tensor(), writing.tensor())
    later = writing.tensor()
    writing.call(Tensor.add_, writing.tensor())
    writing.tape.entries[-1].rewritten = ((scores, later),)
    writing.call(torch.softmax, later)
    assert behind(writing) == 0


@pytest.mark.parametrize(("between", "number"), [(63, 0), (64, None)])
def test_product_is_searched_64_calls_back(between: int, number: int | None) -> None:
    writing = Writing()
    scores = writing.call(torch.matmul, writing.tensor(), writing.tensor())
    for _ in range(between):
        writing.call(torch.relu, writing.tensor())
    writing.call(torch.softmax, scores)
    assert behind(writing) == number


# --- samples behind values


def test_samples_are_found_through_reshaping_and_joining() -> None:
    writing = Writing()
    samples = [writing.call(F.grid_sample, writing.tensor(), writing.tensor()) for _ in range(3)]
    writing.call(F.grid_sample, writing.tensor(), writing.tensor())
    joined = writing.call(torch.stack, *(writing.call(torch.flatten, sample) for sample in samples))
    assert sampled_behind(writing.tape, joined) == (0, 1, 2)
    assert sampled_behind(writing.tape, samples[1]) == (1,)
    assert sampled_behind(writing.tape, writing.tensor()) == ()
    writing.call(torch.stack, joined, writing.tensor())
    assert sampled_behind(writing.tape, writing.count) == ()
    assert sampled_behind(Tape(), 1) == ()


def test_values_that_are_changed_are_no_samples() -> None:
    for func in (torch.relu, lambda x: x):
        writing = Writing()
        sample = writing.call(F.grid_sample, writing.tensor(), writing.tensor())
        assert sampled_behind(writing.tape, writing.call(func, sample)) == ()


@pytest.mark.parametrize(("between", "found"), [(63, (0,)), (64, ())])
def test_samples_are_searched_64_calls_back(between: int, found: tuple[int, ...]) -> None:
    writing = Writing()
    sample = writing.call(F.grid_sample, writing.tensor(), writing.tensor())
    for _ in range(between):
        writing.call(torch.relu, writing.tensor())
    assert sampled_behind(writing.tape, sample) == found


# --- weights


def test_weights_times_data_of_the_image_are_weighing() -> None:
    writing = Writing()
    weights, data, learned = writing.tensor(), writing.tensor(), writing.tensor(of_image=False)
    writing.tape.weights[weights] = frozenset({0})

    def weighs(func: Callable[..., Any], *slots: int) -> bool:
        writing.call(func, *slots)
        return is_weighing(writing.tape, writing.tape.entries[-1])

    assert weighs(torch.mul, weights, data)
    assert weighs(Tensor.__mul__, data, weights)
    assert not weighs(torch.mul, weights, weights)
    assert not weighs(torch.mul, data, data)
    assert not weighs(torch.mul, weights, learned)
    assert not weighs(torch.mul, learned, weights)
    assert not weighs(torch.mul, weights)
    assert not weighs(torch.add, weights, data)
    assert not weighs(lambda a, b: a * b, weights, data)


def noted(writing: Writing, func: Callable[..., Any], *slots: int, shape: tuple[int, ...] = SCORES) -> int:
    """Write a call, and note whether its result is weights; return the slot of the result."""
    slot = writing.call(func, *slots, shape=shape)
    args = [writing.tensors[one] for one in slots]
    note_weights(writing.tracer, writing.tape.entries[-1], args, writing.tensors[slot])
    return slot


def test_weights_come_from_a_softmax() -> None:
    writing = Writing()
    writing.call(torch.relu, writing.tensor())
    weights = noted(writing, torch.softmax, writing.tensor())
    assert writing.tape.weights == {weights: frozenset({1})}
    noted(writing, torch.softmax, writing.tensor(), shape=(7,))
    noted(writing, torch.relu, weights)
    noted(writing, torch.relu, writing.tensor())
    noted(writing, torch.add, writing.tensor(), writing.tensor())
    assert list(writing.tape.weights) == [weights]
    other = noted(writing, F.softmin, writing.tensor(), shape=(5, 7))
    mixed = noted(writing, torch.add, weights, other)
    assert writing.tape.weights[mixed] == frozenset({1, 6})
    assert writing.tape.logarithms == {}


def test_weights_come_from_the_exponential_of_a_log_softmax() -> None:
    writing = Writing()
    logarithm = noted(writing, torch.log_softmax, writing.tensor())
    moved = noted(writing, torch.transpose, logarithm)
    assert writing.tape.weights == {}
    assert writing.tape.logarithms == {logarithm: frozenset({0}), moved: frozenset({0})}
    weights = noted(writing, torch.exp, moved)
    assert writing.tape.weights == {weights: frozenset({0})}
    assert weights not in writing.tape.logarithms
    assert noted(writing, torch.exp, weights) not in writing.tape.weights
    assert noted(writing, torch.relu, logarithm) not in writing.tape.logarithms


def test_weights_that_are_gated_are_none() -> None:
    writing = Writing()
    weights = noted(writing, torch.softmax, writing.tensor())
    assert noted(writing, torch.mul, weights, writing.tensor()) not in writing.tape.weights
    assert noted(writing, torch.mul, weights, writing.tensor(of_image=False)) in writing.tape.weights
    assert noted(writing, torch.add, weights, writing.tensor()) in writing.tape.weights
    assert noted(writing, torch.mul, weights) in writing.tape.weights


def test_edited_weights_come_from_their_own_call_and_those_before() -> None:
    writing = Writing()
    weights = noted(writing, torch.softmax, writing.tensor())
    edited = noted(writing, edited_weights, weights, writing.tensor())
    assert writing.tape.weights[edited] == frozenset({0, 1})
    assert list(writing.tape.weights) == [weights, edited]


# --- operands that are kept


def test_last_eight_products_are_held() -> None:
    writing, held = Writing(), Held()
    slots = [(writing.tensor(), writing.tensor()) for _ in range(9)]
    for number, pair in enumerate(slots):
        writing.call(torch.matmul, *pair)
        held.hold(number, [writing.tensors[slot] for slot in pair], None)
        assert held.operands(writing.tracer, 0) is not None or number == 8
    assert held.operands(writing.tracer, 0) is None
    for number in range(1, 9):
        operands = held.operands(writing.tracer, number)
        assert operands is not None
        assert [id(operand) for operand in operands] == [id(writing.tensors[slot]) for slot in slots[number]]
    assert held.operands(writing.tracer, None) is None
    held.clear()
    assert held.operands(writing.tracer, 8) is None


def test_last_two_tensors_of_a_call_are_held() -> None:
    writing, held = Writing(), Held()
    slots = [writing.tensor() for _ in range(3)]
    writing.call(torch.baddbmm, *slots)
    bias, left, right = (writing.tensors[slot] for slot in slots)
    held.hold(0, [bias, left], {"batch2": right, "beta": 1})
    operands = held.operands(writing.tracer, 0)
    assert operands is not None
    assert operands[0] is left
    assert operands[1] is right
    held.hold(1, [left], None)
    assert held.operands(writing.tracer, 1) is None
    del writing.tensors[slots[1]]
    assert held.operands(writing.tracer, 0) is None


def test_factors_of_an_elementwise_product_are_held() -> None:
    writing, held = Writing(), Held()
    pairs = [(writing.tensor(), writing.tensor()) for _ in range(3)]
    results = [writing.call(func, *pair) for func, pair in zip((torch.matmul, torch.mul, torch.mul), pairs, strict=True)]
    for number, pair in enumerate(pairs):
        held.hold(number, [writing.tensors[slot] for slot in pair], None)
    for number in (1, 2):
        factors = held.factors(writing.tracer, writing.tensors[results[number]])
        assert factors is not None
        assert factors[0] == number
        assert factors[1][0] is writing.tensors[pairs[number][0]]
    assert held.factors(writing.tracer, writing.tensors[results[0]]) is None
    assert held.factors(writing.tracer, torch.zeros(1)) is None
    assert held.factors(writing.tracer, 5) is None
    product = writing.tensors[results[2]]
    del writing.tensors[pairs[2][1]]
    assert held.factors(writing.tracer, product) is None
    assert Held().factors(writing.tracer, product) is None


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("are_kept", [False, True])
def test_weighted_samples_need_their_points(is_known: bool, are_kept: bool) -> None:
    writing, mode = Writing(), CaptureMode(Owners(parts_of(nn.Identity())), lambda *_: None, None, lambda _: False, vectors=False)
    value_map, points = writing.tensor(), writing.tensor()
    values = writing.call(F.grid_sample, value_map, points, shape=(2, 1, 7, 4))
    weights = writing.tensor((2, 5, 7, 1))
    writing.tape.weights[weights] = frozenset({0})
    product = writing.call(torch.mul, weights, values, shape=(2, 5, 7, 4))
    if are_kept:
        mode.held.hold(0, [writing.tensors[value_map], writing.tensors[points]], None)
    mode.held.hold(1, [writing.tensors[weights], writing.tensors[values]], None)
    attention = cast(Any, SimpleNamespace(position=0, samples=(0,))) if is_known else None
    found = mode._product(writing.tracer, torch.sum, (writing.tensors[product], 2), {}, attention)
    assert (found is None) == (is_known and not are_kept)
    assert [entry.kept for entry in writing.tape.entries] == [are_kept, True]
    if found is not None:
        assert found.operand is writing.tensors[weights]
        assert list(found.samples) == ([0] if are_kept else [])
        assert all(kept is writing.tensors[points] for kept in found.samples.values())


# --- the function mode


def test_one_tensor_is_replaced_in_nested_arguments() -> None:
    old, new, other = torch.zeros(1), torch.ones(1), torch.zeros(1)
    replaced = modes._exchanged([old, (other, {"a": old}), 5], old, new)
    assert replaced[0] is new
    assert replaced[1][0] is other
    assert replaced[1][1]["a"] is new
    assert (type(replaced), type(replaced[1]), replaced[2]) == (list, tuple, 5)


def test_result_is_pytorchs_own_if_the_call_repeats_it() -> None:
    a, b, function = torch.randn(5, 7), torch.randn(7, 4), F.scaled_dot_product_attention
    assert modes._is_own(torch.matmul, (a, b), {}, a @ b)
    assert not modes._is_own(torch.matmul, (a, b), {}, a @ b + 1)
    query = torch.randn(1, 5, 4)
    out = function(query, query, query)
    assert modes._is_own(function, (query, query, query), {}, out)
    assert modes._is_own(function, (query, query, query), {"dropout_p": 0.0}, out)
    assert not modes._is_own(function, (query, query, query), {"dropout_p": 0.5}, out)
    assert not modes._is_own(function, (query, query, query, None, 0.5), {}, out)
    assert modes._is_own(function, (query, query, query, None, 0.0), {}, out)


@pytest.mark.parametrize(("queries", "is_kept"), [(512, False), (513, True)])
def test_log_sum_exp_is_kept_for_many_queries(queries: int, is_kept: bool) -> None:
    query, key = torch.randn(1, 1, queries, 4), torch.randn(1, 1, 7, 4)
    call = FusedCall(query, key, key)
    run: Any = CaptureMode._run_call
    out = run(None, None, call, lambda args, kwargs: F.scaled_dot_product_attention(*args, **kwargs), (query, key, key), {})
    assert torch.equal(out, F.scaled_dot_product_attention(query, key, key))
    assert (call.lse is not None) == is_kept


def test_argument_that_pytorch_drops_is_restored() -> None:
    x, weight = torch.zeros(2), torch.ones(2)
    seen: list[Any] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(restored(func, kwargs))
            return func(*args, **(kwargs or {}))

    with Mode():
        F.l1_loss(x, x, weight=weight)  # type: ignore[call-arg]
        F.l1_loss(x, x)
        torch.add(x, x)
    losses = [kwargs for kwargs in seen if kwargs and "reduction" in kwargs]
    assert [kwargs.get("weight") is weight for kwargs in losses] == [True, False]
    assert restored(F.l1_loss, {"weight": 5}) == {"weight": 5}
    assert restored(torch.add, None) is None


def test_modules_are_named_as_torch_names_them() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared, nn.ReLU()), shared, nn.Identity())
    model.register_module("none", None)
    assert Owners(parts_of(model)).modules == [module for _, module in model.named_modules()]
