"""Numbers of queries and keys on their way from scores to weights, and products of tokens with tokens, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.capturing.behind import OPS, SIZE, TOKENS, Chain
from visattn.core.capturing.following.sums import LINEAR, Sums, _are_values, _differs
from visattn.core.capturing.following.vectors import _letters, _mixes_no_tokens, _moved_to_weights, _numbered, _shape, vectors_of
from visattn.core.capturing.placing.nodes import Facts, Node
from visattn.core.capturing.placing.places import Places
from visattn.core.capturing.placing.steps import Step
from visattn.core.capturing.trace.operations import operation_of
from visattn.core.capturing.trace.product_axes import Permuted
from visattn.core.capturing.trace.tape import Attention, Entry, Made, Operand, Outside, Ref, Tape

PLAIN = Permuted(None, None, (0, 1))


def entry(func: Any, *args: Any, out: Made | None = None, more: tuple[Made | None, ...] = (), **fields: Any) -> Entry:
    return Entry(func, operation_of(func), args, {}, (out, *more), "", **fields)


def made(slot: int, *shape: int) -> Made:
    return Made(slot, torch.Size(shape), True)


def tape(*entries: Entry, **shapes: tuple[int, ...]) -> Tape:
    """Return a tape with tensors of the model in slots 0, 1, ... of these shapes."""
    outside = {number: Outside("input", name, torch.Size(shape), True) for number, (name, shape) in enumerate(shapes.items())}
    return Tape(list(entries), outside)


# --- numbers of vectors


def test_axes_of_a_product_have_letters() -> None:
    def letters(*shapes: tuple[int, ...], ndim: int) -> tuple[list[str], str]:
        found, result = _letters(tape(), entry(torch.matmul), [torch.Size(shape) for shape in shapes], ndim)
        return list(found), result

    assert letters((2, 3, 5, 4), (2, 3, 4, 7), ndim=4) == (["abcz", "abzd"], "abcd")
    assert letters((5, 4), (2, 4, 7), ndim=3) == (["bz", "azc"], "abc")
    assert letters((5, 4), (4, 7), ndim=2) == (["az", "zb"], "ab")
    wrong = entry(torch.einsum, "ij,jk,kl->il", Ref(0), Ref(1), Ref(1))
    assert _letters(tape(a=(2, 2), b=(2, 2)), wrong, [torch.Size((2, 2))] * 2, 2) == ((), "")
    assert _letters(tape(a=(2, 2), b=(2, 2)), entry(torch.einsum, Ref(0), [0, 1]), [torch.Size((2, 2))] * 2, 2) == ((), "")


def test_each_element_of_a_product_has_a_row_and_a_column() -> None:
    whole_tape = tape(a=(2, 3, 4), b=(2, 4, 5))
    numbered = _numbered(whole_tape, entry(torch.matmul, Ref(0), Ref(1), out=made(2, 2, 3, 5), more=(made(3, 7),)))
    assert numbered is not None
    (rows, row_axes), (columns, column_axes) = numbered
    assert torch.equal(rows, torch.arange(6).view(2, 3, 1).expand(2, 3, 5))
    assert torch.equal(columns, torch.arange(10).view(2, 1, 5).expand(2, 3, 5))
    assert (row_axes, column_axes) == ((0, 1, 2), (0, 2, 1))
    added = entry(torch.baddbmm, Ref(9), Ref(0), Ref(1), out=made(2, 2, 3, 5))
    again = _numbered(tape(a=(2, 3, 4), b=(2, 4, 5)), added)
    assert again is not None
    assert torch.equal(again[0][0], rows)
    whole_tape.outside[9] = Outside("input", "term", torch.Size((5,)), True)
    last = _numbered(whole_tape, added)
    assert last is not None
    assert torch.equal(last[1][0], columns)
    assert _numbered(whole_tape, entry(torch.matmul, Ref(0), Ref(1))) is None
    assert _numbered(whole_tape, entry(torch.matmul, Ref(0), Ref(8), out=made(2, 2, 3, 5))) is None


@pytest.mark.parametrize(
    ("equation", "first", "second", "result", "known"),
    [
        ("id,jd->ij", (3, 4), (5, 4), (3, 5), True),
        ("id,jd->ji", (3, 4), (5, 4), (5, 3), True),
        ("ide,jde->ij", (3, 2, 2), (5, 2, 2), (3, 5), False),  # two axes are summed
        ("id,je->ij", (3, 4), (5, 4), (3, 5), False),  # each axis alone
        ("ide,jd->ij", (3, 4, 2), (5, 4), (3, 5), False),
        ("id,jd->ijd", (3, 4), (5, 4), (3, 5, 4), False),  # nothing is summed
    ],
)
def test_scores_sum_over_one_axis_of_both(
    equation: str, first: tuple[int, ...], second: tuple[int, ...], result: tuple[int, ...], known: bool
) -> None:
    numbered = _numbered(tape(a=first, b=second), entry(torch.einsum, equation, Ref(0), Ref(1), out=made(2, *result)))
    assert (numbered is not None) is known
    if numbered is not None:
        (rows, _), (columns, _) = numbered
        expected = torch.arange(3)[:, None].expand(3, 5), torch.arange(5).expand(3, 5)
        assert torch.equal(rows, expected[0].T if result[0] == 5 else expected[0])
        assert torch.equal(columns, expected[1].T if result[0] == 5 else expected[1])


def test_shapes_are_those_of_the_model_of_calls_and_of_what_was_overwritten() -> None:
    calls = entry(F.relu, out=None, more=(made(5, 7), made(6, 8)), rewritten=((0, 7), (7, 9)))
    known = tape(calls, a=(2, 3))
    assert [_shape(known, slot) for slot in (0, 5, 6, 7, 9, 10)] == [(2, 3), (7,), (8,), (2, 3), (2, 3), None]


ROWS, COLUMNS = torch.arange(3)[:, None].expand(3, 5), torch.arange(5).expand(3, 5)


def moved(*entries: Entry, weights: int) -> list[Any] | None:
    """Return the numbers of rows and columns at the weights, from a product in entry 1 with its result in slot 2."""
    call = Attention("a", 0, 0, (Operand(weights, axes=PLAIN, weighs=True), Operand(1, axes=PLAIN)), False, (), 3, 5, scores=1)
    product = entry(torch.matmul, Ref(0), Ref(1), out=made(2, 3, 5), more=(None,))
    last = entry(torch.matmul, Ref(weights), Ref(1), out=made(50, 3, 5), attention=call)
    late = entry(F.relu, Ref(2), out=made(40, 3, 5))
    found = _moved_to_weights(
        Tape([entry(F.relu, Ref(2), out=made(30, 3, 5)), product, *entries, last, late]), call, ROWS, COLUMNS
    )
    return None if found is None else [number.tolist() for number in found]


def test_numbers_follow_scores_up_to_the_weights() -> None:
    rows, columns = ROWS.tolist(), COLUMNS.tolist()
    assert moved(weights=2) == [rows, columns]
    assert moved(entry(torch.softmax, Ref(2), -1, out=made(3, 3, 5), more=(None,)), weights=3) == [rows, columns]
    assert moved(weights=30) is None  # before the product
    assert moved(weights=40) is None  # behind the attention
    beside = entry(F.relu, Ref(20), out=made(21, 3, 5))
    turned = entry(torch.transpose, Ref(2), 0, 1, out=made(3, 5, 3))
    assert moved(beside, turned, weights=3) == [ROWS.T.tolist(), COLUMNS.T.tolist()]
    assert moved(entry(torch.transpose, Ref(2), 0, 1, out=made(3, 3, 5)), weights=3) is None
    assert moved(entry(torch.sum, Ref(2), 1, out=made(3, 3)), weights=3) is None
    foreign = entry(F.relu, Ref(2), out=made(3, 3, 5))
    foreign.operation = foreign.operation._replace(own=False)
    assert moved(foreign, weights=3) is None
    changed = entry(F.relu, Ref(2), out=None, rewritten=((2, 7), (20, 21)))
    assert moved(changed, weights=7) == [rows, columns]
    assert moved(changed, weights=21) is None


def test_a_layer_may_mix_heads_but_not_tokens() -> None:
    heads = torch.arange(12).view(2, 2, 3)  # each axis changes the vector

    def alone(func: Any, *numbers: Tensor) -> bool:
        return _mixes_no_tokens(entry(func, Ref(0)), {0: numbers}, numbers)

    last, second = torch.arange(3).expand(2, 2, 3), torch.arange(2)[:, None].expand(2, 2, 3)
    first = torch.arange(2)[:, None, None].expand(2, 2, 3)
    assert alone(F.linear, heads, last)
    assert not alone(F.linear, heads, second)
    assert not alone(F.linear, second, last)
    assert alone(F.linear, first, second)
    assert alone(F.conv2d, heads, second)
    assert not alone(F.conv2d, heads, last)
    assert alone(F.conv2d, first, last)
    assert alone(F.relu, heads, first)


def test_scores_that_are_written_come_back_to_their_place() -> None:
    numbers = {0: (ROWS, COLUMNS), 1: (ROWS[:2], COLUMNS[:2])}

    def alone(index: Any, value: Any, **more: Any) -> bool:
        written = entry(Tensor.__setitem__, Ref(0), index, value, **more)
        return _mixes_no_tokens(written, numbers, numbers[0])

    assert alone(slice(0, 2), Ref(1))
    assert not alone(slice(1, 3), Ref(1))
    assert not alone(torch.tensor([1, 0]), Ref(1))
    assert alone(slice(0, 2), 0.0)
    assert alone(slice(1, 3), Ref(9))
    assert not alone((Ref(5),), Ref(1))
    assert not alone((Ref(5), Ref(6)), Ref(1))


@pytest.mark.parametrize(
    ("rows", "columns", "side"), [(ROWS, COLUMNS, 0), (COLUMNS, ROWS, 1), (ROWS, ROWS, None), (COLUMNS, COLUMNS, None)]
)
def test_queries_are_those_with_one_vector_per_row(rows: Tensor, columns: Tensor, side: int | None, monkeypatch: Any) -> None:
    from visattn.core.capturing.following import vectors

    monkeypatch.setattr(vectors, "_numbered", lambda *_: ((rows, (0, 1)), (columns, (1, 0))))
    monkeypatch.setattr(vectors, "_moved_to_weights", lambda *_: (rows, columns))
    call = Attention("a", 0, 0, (Operand(2), Operand(1)), False, (), 3, 5, scores=0)
    found = vectors_of(Tape([entry(F.relu)]), call)
    if side is None:
        assert found is None
        return
    assert found is not None
    assert (found.query.side, found.key.side) == (side, 1 - side)
    assert (found.query.number.tolist(), found.key.number.tolist()) == ([0, 1, 2], [0, 1, 2, 3, 4])
    assert (found.query.axes, found.key.axes) == (((0, 1), (1, 0)) if side == 0 else ((1, 0), (0, 1)))


# --- products of tokens with tokens


@pytest.mark.parametrize(
    ("shape", "stride", "axes"),
    [
        ((2, 3, 4), (12, 4, 1), (False, True, True, True)),
        ((2, 1, 4), (4, 4, 1), (False, True, False, True)),
        ((2, 3, 4), (4, 0, 1), (False, True, False, True)),
        ((2, 3, 4), (), (False, True, True, True)),
        ((1, 3), (3, 1), (False, False, False, True)),
    ],
)
def test_a_tensor_differs_along_axes_that_it_has_and_does_not_repeat(
    shape: tuple[int, ...], stride: tuple[int, ...], axes: tuple[bool, ...]
) -> None:
    facts = Facts(torch.Size(shape), stride, 0, 0, True, True)
    assert tuple(_differs(facts, axis) for axis in range(-4, 0)) == axes


def test_values_have_the_places_of_the_keys_alone() -> None:
    codes = torch.arange(TOKENS)
    scores = Places("placed", codes[:, None].expand(TOKENS, TOKENS), codes.expand(TOKENS, TOKENS))
    values = Places("placed", codes)
    assert _are_values(values, scores)
    assert not _are_values(Places("placed", codes[:, None]), scores)
    assert not _are_values(Places("placed", codes + 1), scores)
    assert not _are_values(Places("placed", codes[:4]), scores)
    assert not _are_values(Places("learned", codes), scores)
    assert not _are_values(values._replace(columns=codes), scores)
    assert not _are_values(values, scores._replace(columns=None))
    assert not _are_values(values, scores._replace(codes=scores.columns))  # type: ignore[arg-type]


def places(chain: Chain, *sizes: int, kind: Any = "placed") -> Node:
    """Add tokens `(2, 6, *sizes)`."""
    shape = 2, TOKENS, *sizes
    return chain.put(Places(kind, chain.codes.view(2, TOKENS, *(1,) * len(sizes)).expand(shape)))


def is_linear(chain: Chain, left: Node, right: Node) -> bool:
    """Check whether the sum over tokens of an elementwise product makes linear attention."""
    sums = Sums(chain.shadows)
    product = places(chain, SIZE, SIZE)
    assert sums.see(Step(OPS.mul.Tensor, {"self": left, "other": right}, (product,)), "a", "mul") is None
    total = chain.lost(2, 1, SIZE, SIZE)
    assert sums.see(Step(OPS.sum.dim_IntList, {"self": product, "dim": [1]}, (total,)), "b", "sum") is None
    asked = Step(OPS.mul.Tensor, {"self": places(chain, SIZE, 1), "other": total}, (chain.lost(2, TOKENS, SIZE, SIZE),))
    return sums.see(asked, "c", "mul") == ("b", LINEAR)


def test_only_products_of_all_pairs_of_channels_of_tokens_make_linear_attention() -> None:
    chain = Chain()
    wide, flat, full = (SIZE, 1), (1, SIZE), (SIZE, SIZE)
    assert is_linear(chain, places(chain, *wide), places(chain, *flat))
    assert is_linear(chain, places(chain, *flat), places(chain, *wide))
    assert not is_linear(chain, places(chain, *full), places(chain, *flat))
    assert not is_linear(chain, places(chain, *wide), places(chain, *full))
    assert not is_linear(chain, places(chain, *wide), chain.learned(2, TOKENS, 1, SIZE))
    assert not is_linear(chain, chain.learned(2, TOKENS, SIZE, 1), places(chain, *flat))
    scores = chain.shadows.of(places(chain, *wide))
    pairs = chain.put(scores._replace(kind="lost", columns=scores.codes))
    assert not is_linear(chain, pairs, places(chain, *flat))
