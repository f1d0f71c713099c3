"""Projections, vectors and samples that are found on tapes of a few calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from visattn.core.capturing.following import sampling
from visattn.core.capturing.following.projections import Projection, Projections, features_of
from visattn.core.capturing.following.tape_moves import moved_by
from visattn.core.capturing.following.vectors import Vectors, vectors_of
from visattn.core.capturing.tokens.arrangement import Arrangement, unplaced
from visattn.core.capturing.tokens.planes import Plane
from visattn.core.capturing.trace.operations import operation_of
from visattn.core.capturing.trace.product_axes import Permuted
from visattn.core.capturing.trace.tape import Attention, Entry, Made, Operand, Outside, Ref, Tape
from visattn.core.geometry import Box
from visattn.core.records import TokenLayout

BATCH, HEADS, QUERIES, KEYS, SIZE, WIDTH = 2, 3, 5, 7, 4, 6
BOX = Box(0.0, 0.0, 12.0, 20.0)
LAYOUT = TokenLayout("tokens", ("cls",), (2, 2), BOX)


class Taped:
    """Tape that grows with each call; it keeps the tensors, too."""

    def __init__(self) -> None:
        self.tape, self.tensors = Tape(), dict[int, Tensor]()

    def given(self, *shape: int, kind: str = "parameter") -> Ref:
        slot = len(self.tensors)
        self.tensors[slot] = torch.randn(shape)
        self.tape.outside[slot] = Outside(kind, "p", torch.Size(shape), True)
        return Ref(slot)

    def call(
        self, func: Callable[..., Any], *args: Any, own: bool = True, entry: dict[str, Any] | None = None, **kwargs: Any
    ) -> Ref:
        """Add a call, and return its result."""
        result = func(*self.filled(args), **kwargs)
        slot = len(self.tensors)
        self.tensors[slot] = result
        made = Made(slot, result.shape, result.is_floating_point())
        operation = operation_of(func)._replace(own=own)
        self.tape.entries.append(Entry(func, operation, args, kwargs, (made,), "", before=(None,), **(entry or {})))
        return Ref(slot)

    def filled(self, args: Any) -> Any:
        return [
            self.tensors[arg.slot] if isinstance(arg, Ref) else self.filled(arg) if isinstance(arg, list) else arg for arg in args
        ]


class Heads(NamedTuple):
    """Tape of an attention call, and its result."""

    taped: Taped
    call: Attention
    result: Ref

    def merged(self, *, exchanged: bool = False) -> Ref:
        """Join the heads of each token."""
        turned = self.result if exchanged else self.taped.call(torch.transpose, self.result, 1, 2)
        return self.taped.call(torch.reshape, turned, (BATCH, QUERIES, HEADS * SIZE))

    def weight(self, *, missing: int = -1, features: bool = True) -> Tensor | None:
        def used(slot: int) -> Tensor | None:
            return None if slot == missing else self.taped.tensors[slot]

        tape = self.taped.tape
        found = features_of(Arrangement("self", LAYOUT, LAYOUT), self.call, SIZE) if features else None
        return Projections(tape).weight(tape, self.call, lambda: found, used)


def attended() -> Heads:
    taped = Taped()
    operands = [taped.given(BATCH, HEADS, n, SIZE, kind="input") for n in (QUERIES, KEYS, KEYS)]
    call = Attention("attn", 0, 0, tuple(Operand(ref.slot) for ref in operands), True, (BATCH, HEADS), QUERIES, KEYS)
    result = taped.call(F.scaled_dot_product_attention, *operands, entry={"attention": call})
    return Heads(taped, call, result)


def test_features_are_counted_over_heads_and_channels() -> None:
    call = attended().call
    expected = (torch.arange(HEADS)[:, None, None] * SIZE + torch.arange(SIZE)).expand(BATCH, HEADS, QUERIES, SIZE)
    found = features_of(Arrangement("self", LAYOUT, LAYOUT), call, SIZE)
    assert found is not None
    assert torch.equal(found, expected)
    order = torch.arange(BATCH * HEADS).view(HEADS, BATCH, 1).transpose(0, 1)  # images come last
    turned = Attention("attn", 0, 0, call.operands, True, (HEADS, BATCH), QUERIES, KEYS)
    found = features_of(Arrangement("self", LAYOUT, LAYOUT, order), turned, SIZE)
    assert found is not None
    assert torch.equal(found, expected.transpose(0, 1))
    folded = Attention("attn", 0, 0, call.operands, True, (BATCH * HEADS,), QUERIES, KEYS)
    found = features_of(Arrangement("self", LAYOUT, LAYOUT, torch.arange(6).view(2, 3, 1)), folded, SIZE)
    assert found is not None
    assert torch.equal(found, expected.flatten(0, 1))


def test_calls_in_windows_or_without_places_have_no_features() -> None:
    call = attended().call
    order, index = torch.arange(6).view(2, 3, 1), torch.arange(QUERIES)[None]
    assert features_of(Arrangement("self", LAYOUT, LAYOUT, order, index, index), call, SIZE) is None
    assert features_of(unplaced((BATCH, HEADS), QUERIES, KEYS, BOX, "why"), call, SIZE) is None
    some = torch.tensor([[[1]], [[0]]])  # two of six groups
    assert features_of(Arrangement("self", LAYOUT, LAYOUT, some), call, SIZE) is None
    long = Attention("attn", 0, 0, call.operands, True, (BATCH, 1, HEADS), QUERIES, KEYS)
    assert features_of(Arrangement("self", LAYOUT, LAYOUT), long, SIZE) is None


@pytest.mark.parametrize("scales", [(), ((WIDTH,),), ((1, 1, WIDTH), (1,)), ((WIDTH,), (WIDTH,))])
def test_the_linear_layer_behind_the_heads_is_the_projection(scales: tuple[tuple[int, ...], ...]) -> None:
    heads = attended()
    taped, x = heads.taped, heads.merged()
    weight, bias, residual = (
        taped.given(WIDTH, HEADS * SIZE),
        taped.given(WIDTH),
        taped.given(BATCH, QUERIES, WIDTH, kind="input"),
    )
    x = taped.call(F.dropout, x, 0.0)
    x = taped.call(F.linear, x, weight, bias)
    expected = taped.tensors[weight.slot]
    for shape in scales:
        factor = taped.given(*shape)
        x = taped.call(torch.mul, factor, x)
        expected = expected * taped.tensors[factor.slot].reshape(-1, 1)
    taped.call(torch.add, residual, x)
    found = heads.weight()
    assert found is not None
    assert torch.equal(found, expected)
    assert heads.weight(missing=weight.slot) is None
    assert heads.weight(features=False) is None


def test_a_projection_multiplies_the_rows_of_its_weight() -> None:
    weight, scale = torch.randn(WIDTH, 12, requires_grad=True), torch.randn(WIDTH)
    found = Projection(0, (1,)).of({0: weight, 1: scale}.get)
    assert found is not None
    assert torch.equal(found, weight.detach() * scale[:, None])
    assert not found.requires_grad
    assert Projection(0, (1,)).of({0: weight}.get) is None


def projected(change: Callable[[Heads], Ref], *, kind: str = "parameter", before: bool = True, add: bool = True) -> Tensor | None:
    """Return the weight found on a tape with something else before, or behind, its linear layer."""
    heads = attended()
    taped = heads.taped
    x = change(heads) if before else heads.merged()
    x = taped.call(F.linear, x, taped.given(WIDTH, taped.tensors[x.slot].shape[-1], kind=kind))
    if not before:
        x = change(Heads(taped, heads.call, x))
    if add:
        taped.call(torch.add, x, taped.given(*taped.tensors[x.slot].shape, kind="input"))
    return heads.weight()


def test_moves_before_a_projection_may_be_of_any_kind() -> None:
    def viewed(heads: Heads) -> Ref:
        x = heads.taped.call(Tensor.permute, heads.result, (0, 2, 1, 3))
        x = heads.taped.call(Tensor.contiguous, x)
        return heads.taped.call(Tensor.view, x, BATCH, QUERIES, -1)

    assert projected(Heads.merged) is not None
    assert projected(viewed) is not None
    assert projected(Heads.merged, kind="buffer") is None
    assert projected(Heads.merged, add=False) is None
    assert projected(lambda heads: heads.merged(exchanged=True)) is None  # features of several tokens
    assert projected(lambda heads: heads.result) is None


BEFORE: dict[str, Callable[[Heads], Ref]] = {
    "activation": lambda heads: heads.taped.call(torch.relu, heads.merged()),
    "sum": lambda heads: heads.taped.call(torch.add, heads.merged(), heads.taped.given(1)),
    "scale": lambda heads: heads.taped.call(torch.mul, heads.merged(), heads.taped.given(12)),
    "part": lambda heads: heads.taped.call(torch.narrow, heads.merged(), -1, 1, 7),
    "exchange": lambda heads: heads.taped.call(torch.flip, heads.merged(), [2]),
    "foreign move": lambda heads: heads.taped.call(torch.clone, heads.merged(), own=False),
    "write": lambda heads: heads.taped.call(torch.clone, heads.merged(), entry={"writes": True}),
    "contents": lambda heads: heads.taped.call(torch.clone, heads.merged(), entry={"contents": {0: torch.ones(1)}}),
}


@pytest.mark.parametrize("name", BEFORE)
def test_anything_else_before_the_linear_layer_hides_the_projection(name: str) -> None:
    assert projected(BEFORE[name]) is None


def scaled(*shape: int, kind: str = "parameter") -> Callable[[Heads], Ref]:
    return lambda heads: heads.taped.call(torch.mul, heads.result, heads.taped.given(*shape, kind=kind))


def scaled_by_itself(heads: Heads) -> Ref:
    return heads.taped.call(torch.mul, heads.result, heads.result)


def scaled_when_turned(heads: Heads) -> Ref:
    turned = heads.taped.call(torch.transpose, heads.result, 1, 2)
    return heads.taped.call(torch.mul, turned, heads.taped.given(QUERIES))


def used_twice(heads: Heads) -> Ref:
    heads.taped.call(torch.relu, heads.result)
    return heads.taped.call(torch.clone, heads.result)


def added_to_a_number(heads: Heads) -> Ref:
    return heads.taped.call(torch.add, heads.result, 1.0)


def second_layer(heads: Heads) -> Ref:
    return heads.taped.call(F.linear, heads.result, heads.taped.given(WIDTH, WIDTH))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (scaled(WIDTH), True),
        (scaled(1), True),
        (scaled(), True),
        (scaled(WIDTH, kind="buffer"), False),
        (scaled(QUERIES, 1), False),  # each token by a factor of its own
        (scaled(QUERIES, WIDTH), False),
        (scaled_by_itself, False),
        (scaled_when_turned, False),
        (used_twice, False),
        (added_to_a_number, False),
        (second_layer, False),
    ],
)
def test_only_scales_of_channels_may_follow_the_linear_layer(change: Callable[[Heads], Ref], found: bool) -> None:
    assert (projected(change, before=False) is not None) is found


def test_a_call_that_returns_its_argument_is_the_same_use() -> None:
    heads = attended()
    taped, x = heads.taped, heads.merged()
    same = Made(x.slot, taped.tensors[x.slot].shape, True)
    taped.tape.entries.append(Entry(Tensor.contiguous, operation_of(Tensor.contiguous), (x,), {}, (same,), ""))
    x = taped.call(F.linear, x, taped.given(WIDTH, HEADS * SIZE))
    taped.call(torch.add, x, taped.given(BATCH, QUERIES, WIDTH, kind="input"))
    assert heads.weight() is not None
    silent = Entry(Tensor.contiguous, operation_of(Tensor.contiguous), (x,), {}, (None,), "")
    taped.tape.entries.insert(-1, silent)
    assert heads.weight() is None


def test_moves_need_one_tensor_of_the_right_size() -> None:
    number = torch.arange(6).view(2, 3)

    def entry(func: Callable[..., Any], *args: Any) -> Entry:
        return Entry(func, operation_of(func), args, {}, (), "")

    moved = moved_by(entry(torch.transpose, Ref(1), 0, 1), number, torch.Size((3, 2)))
    assert moved is not None
    assert torch.equal(moved, number.T)
    viewed = moved_by(entry(Tensor.view, Ref(1), 3, 2), number.T, torch.Size((1, 6)))
    assert viewed is not None
    assert viewed.tolist() == [[0, 3, 1, 4, 2, 5]]
    assert moved_by(entry(Tensor.view, Ref(1), 5), number, torch.Size((5,))) is None
    assert moved_by(entry(torch.Tensor.__getitem__, Ref(1), Ref(2)), number, number.shape) is None
    assert moved_by(entry(torch.Tensor.__getitem__, (Ref(1),)), number, number.shape) is None
    assert moved_by(Entry(torch.clone, operation_of(torch.clone), (), {"input": Ref(1)}, (), ""), number, number.shape) is None
    assert moved_by(entry(torch.unbind, Ref(1)), number, number.shape) is None


def written(
    score: Callable[[Taped, Ref, Ref], Ref], weigh: Callable[[Taped, Ref], Ref] | None = None
) -> tuple[Taped, Vectors | None]:
    """Return the vectors of attention whose scores and weights are computed so."""
    taped = Taped()
    query, key = (taped.given(BATCH, HEADS, n, SIZE, kind="input") for n in (QUERIES, KEYS))
    product = score(taped, query, key)
    scores = len(taped.tape.entries) - 1
    weights = taped.call(torch.softmax, product if weigh is None else weigh(taped, product), -1)
    value = taped.given(BATCH, HEADS, KEYS, WIDTH, kind="input")
    axes = Permuted(None, None, (0, 1, 2, 3))
    operands = Operand(weights.slot, axes=axes, weighs=True), Operand(value.slot, axes=axes)
    call = Attention("attn", 0, 0, operands, False, (BATCH, HEADS), QUERIES, KEYS, 0, scores=scores)
    taped.call(torch.matmul, weights, value, entry={"attention": call})
    return taped, vectors_of(taped.tape, call)


FORMS: dict[str, Callable[[Taped, Ref, Ref], Ref]] = {
    "product": lambda taped, query, key: taped.call(torch.matmul, query, taped.call(torch.transpose, key, 2, 3)),
    "exchanged": lambda taped, query, key: taped.call(
        torch.transpose, taped.call(torch.matmul, key, taped.call(torch.transpose, query, 2, 3)), 2, 3
    ),
    "einsum": lambda taped, query, key: taped.call(torch.einsum, "bhqd,bhkd->bhqk", query, key),
    "einsum of an ellipsis": lambda taped, query, key: taped.call(torch.einsum, "...kd,...qd->...qk", key, query),
}


@pytest.mark.parametrize("name", FORMS)
def test_vectors_are_the_rows_and_columns_of_the_scores(name: str) -> None:
    taped, vectors = written(lambda taped, query, key: FORMS[name](taped, query, key))
    if name == "exchanged":  # what was moved is no product
        assert vectors is None
        return
    assert vectors is not None
    query, key = taped.tensors[0], taped.tensors[1]
    entry = next(entry for entry in taped.tape.entries if len(entry.refs) == 2)
    operands = [taped.tensors[ref.slot] for ref in entry.refs]
    assert torch.equal(vectors.query.of(operands), query)
    assert torch.equal(vectors.key.of(operands), key)


def moved_heads(taped: Taped, product: Ref) -> Ref:
    turned = taped.call(torch.permute, product, (0, 2, 3, 1))
    return taped.call(torch.permute, taped.call(torch.mul, turned, taped.given(1)), (0, 3, 1, 2))


def mixed_heads(taped: Taped, product: Ref) -> Ref:
    turned = taped.call(torch.permute, product, (0, 2, 3, 1))
    return taped.call(torch.permute, taped.call(F.linear, turned, taped.given(HEADS, HEADS)), (0, 3, 1, 2))


def mixed_keys(taped: Taped, product: Ref) -> Ref:
    return taped.call(F.linear, product, taped.given(KEYS, KEYS))


def rolled(taped: Taped, product: Ref) -> Ref:
    return taped.call(torch.reshape, taped.call(torch.transpose, product, 2, 3), (BATCH, HEADS, QUERIES, KEYS))


@pytest.mark.parametrize(("weigh", "found"), [(moved_heads, True), (mixed_heads, True), (mixed_keys, False), (rolled, False)])
def test_vectors_stay_known_if_no_tokens_are_mixed(weigh: Callable[[Taped, Ref], Ref], found: bool) -> None:
    _, vectors = written(FORMS["product"], weigh)
    assert (vectors is not None) is found


def test_points_become_cells_of_the_finest_map() -> None:
    coarse, finest = Plane(0, (2, 3), Box(1, 2, 9, 20)), Plane(0, (4, 5), Box(1, 0, 13, 20))

    def cells(x: float, y: float, **options: Any) -> tuple[float, float]:
        entry = Entry(F.grid_sample, operation_of(F.grid_sample), (Ref(1), Ref(2)), options, (), "")
        (by_x, by_y), (from_x, from_y) = sampling._to_finest(coarse, finest, entry)
        return by_x * x + from_x, by_y * y + from_y

    assert cells(-1, -1) == pytest.approx((2 / 4 - 0.5, -0.5))  # the corner of the coarse map
    assert cells(1, 1) == pytest.approx((20 / 4 - 0.5, 8 / 3 - 0.5))
    assert cells(1, -1, align_corners=False) == pytest.approx((4.5, -0.5))
    assert cells(-1, -1, align_corners=True) == pytest.approx((5 / 4 - 0.5, 2 / 3 - 0.5))  # the center of its first cell
    assert cells(1, 1, align_corners=True) == pytest.approx((17 / 4 - 0.5, 6 / 3 - 0.5))


@pytest.mark.parametrize("channels", [1, SIZE])
def test_samples_of_each_query_are_counted_over_all_maps(channels: int) -> None:
    taped = Taped()
    maps = []
    for points in (2, 3):
        values, grid = taped.given(BATCH, channels, 4, 5, kind="input"), taped.given(BATCH, QUERIES, points, 2, kind="input")
        maps.append(taped.call(F.grid_sample, values, grid, "bilinear", "zeros", False))
    joined = taped.call(torch.cat, maps, -1)
    value = Operand(joined.slot, axes=Permuted(None, (0, 2, 3, 1), (0, 1, 2)))
    call = Attention("attn", 0, 0, (Operand(99), value), False, (BATCH, QUERIES), 1, 5, samples=(0, 1))
    entries = taped.tape.entries[:2]
    found = sampling._groups(taped.tape, call, entries)
    assert found is not None
    order, number, rows = found
    assert (order.tolist(), rows) == (list(range(BATCH * QUERIES)), QUERIES)
    sums = range(BATCH * QUERIES)
    assert number.tolist() == [[2 * i, 2 * i + 1, 20 + 3 * i, 21 + 3 * i, 22 + 3 * i] for i in sums]
    flipped = taped.call(torch.movedim, joined, 0, 2)
    turned = Operand(flipped.slot, axes=Permuted(None, (1, 2, 3, 0), (0, 1, 2)))
    by_query = sampling._groups(
        taped.tape, Attention("attn", 0, 0, (Operand(99), turned), False, (5, 2), 1, 5, samples=(0, 1)), entries
    )
    assert by_query is not None
    assert by_query[0].tolist() == [image + BATCH * query for image in range(BATCH) for query in range(QUERIES)]
    assert by_query[1].tolist() == number.tolist()
    wrong = Operand(joined.slot, axes=Permuted(None, (0, 3, 2, 1), (0, 1, 2)))
    assert (
        sampling._groups(taped.tape, Attention("attn", 0, 0, (wrong, wrong), False, (2, 5), 1, 5, samples=(0, 1)), entries)
        is None
    )
    unknown = taped.call(torch.relu, joined)
    other = Operand(unknown.slot, axes=value.axes)
    assert (
        sampling._groups(taped.tape, Attention("attn", 0, 0, (other, other), False, (2, 5), 1, 5, samples=(0, 1)), entries)
        is None
    )
