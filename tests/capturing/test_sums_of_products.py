"""Attention without a recorded softmax, found step by step, and softmaxes over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.capturing.behind import put_in_slot
from visattn.core.capturing.following.conclusions import Conclusions
from visattn.core.capturing.following.sums import LINEAR, SCORES, UNTRACED, Sums
from visattn.core.capturing.placing.nodes import Facts, Node
from visattn.core.capturing.placing.places import Places, whole
from visattn.core.capturing.placing.shadows import Shadows
from visattn.core.capturing.placing.steps import Step
from visattn.core.capturing.tokens.planes import Planes
from visattn.core.capturing.tokens.points import Drift
from visattn.core.capturing.trace.operations import operation_of
from visattn.core.capturing.trace.tape import Entry, Made, Outside, Ref, Tape
from visattn.core.geometry import Box

BOX, CPU = Box(0.0, 0.0, 12.0, 20.0), torch.device("cpu")
BATCH, TOKENS, SIZE, WIDTH = 2, 6, 4, 7
OPS = torch.ops.aten


class Seen:
    """Steps of a forward pass with given places."""

    def __init__(self) -> None:
        self.facts: list[Facts] = []
        self.planes = Planes(BATCH, (12, 20), CPU)
        self.tokens = self.planes.codes(self.planes.grid(2, 3, BOX)).flatten(1)
        self.shadows = Shadows(self.planes, self.facts, lambda node: whole("lost", self.facts[node].shape, CPU, "fft"))
        self.sums = Sums(self.shadows)

    def put(self, places: Places, stride: tuple[int, ...] | None = None) -> Node:
        node = Node(len(self.facts))
        strides = torch.empty(places.shape).stride() if stride is None else stride
        self.facts.append(Facts(places.shape, strides, 0, int(node), True, True))
        self.shadows.put(node, places)
        return node

    def rows(self, size: int = SIZE) -> Node:
        """Add vectors `(B, N, D)` of tokens."""
        return self.put(Places("placed", self.tokens[:, :, None].expand(BATCH, TOKENS, size)))

    def columns(self, size: int = SIZE) -> Node:
        """Add vectors `(B, D, N)` of tokens."""
        return self.put(Places("placed", self.tokens[:, None].expand(BATCH, size, TOKENS)))

    def scores(self, keys: int = TOKENS) -> Node:
        shape = BATCH, TOKENS, keys
        return self.put(Places("placed", self.tokens[:, :, None].expand(shape), self.tokens[:, None, :keys].expand(shape)))

    def learned(self, *shape: int) -> Node:
        return self.put(whole("learned", shape, CPU, "w"))

    def lost(self, *shape: int) -> Node:
        return self.put(whole("lost", shape, CPU, "fft"))

    def step(self, op: Any, /, *shape: int, layer: str = "attn", **given: Any) -> tuple[Node, tuple[str, str] | None]:
        """See a step; return its result, which is lost, and what was found."""
        result = self.lost(*shape)
        return result, self.sums.see(Step(op, given, (result,)), layer, "call")

    def product(self, left: Node, right: Node, layer: str = "attn") -> tuple[Node, tuple[str, str] | None]:
        shape = (*self.facts[left].shape[:-1], self.facts[right].shape[-1])
        return self.step(OPS.bmm.default, *shape, layer=layer, self=left, mat2=right)

    def times(self, left: Node, right: Node) -> tuple[Node, tuple[str, str] | None]:
        shape = (torch.empty(self.facts[left].shape) + torch.empty(self.facts[right].shape)).shape
        return self.step(OPS.mul.Tensor, *shape, self=left, other=right)

    def total(self, node: Node, dims: Any) -> tuple[Node, tuple[str, str] | None]:
        return self.step(OPS.sum.dim_IntList, *self.facts[node].shape[:-1], self=node, dim=dims)

    def key_values(self) -> Node:
        """Sum products of keys and values over tokens, in another layer."""
        result, found = self.product(self.columns(SIZE), self.rows(WIDTH), "sum")
        assert found is None
        return result


def test_queries_times_sums_of_keys_and_values_are_linear_attention() -> None:
    for turned in (False, True):
        seen = Seen()
        pair = (seen.rows(), seen.key_values())
        _, found = seen.product(*(reversed(pair) if turned else pair))
        assert found == ("sum", LINEAR)
    seen = Seen()
    product, found = seen.product(seen.rows(), seen.columns())  # queries and keys: sums over channels
    assert found is None
    assert seen.product(product, seen.rows())[1] == ("attn", UNTRACED)


def test_sums_stay_sums_behind_parameters_and_scales() -> None:
    seen = Seen()
    sums = seen.key_values()
    weighed, found = seen.product(sums, seen.learned(BATCH, WIDTH, WIDTH))
    assert found is None
    scaled, found = seen.times(weighed, seen.learned(1))
    assert found is None
    doubled, found = seen.product(scaled, seen.put(whole("lost", (BATCH, WIDTH, 3), CPU)))
    assert found == ("sum", LINEAR)
    assert seen.product(seen.rows(), doubled)[1] is None
    activated, found = seen.step(OPS.relu.default, BATCH, SIZE, WIDTH, self=sums)
    assert found is None
    assert seen.product(seen.rows(), activated)[1] == ("sum", LINEAR)
    shares, _ = seen.step(OPS._softmax.default, BATCH, SIZE, WIDTH, self=sums, dim=-1, half_to_float=False)
    assert seen.product(seen.rows(), shares)[1] is None
    added, _ = seen.step(OPS.add.Tensor, BATCH, SIZE, WIDTH, self=sums, other=seen.rows())
    assert seen.product(seen.rows(), added)[1] is None
    both, found = seen.product(sums, seen.step(OPS.relu.default, BATCH, WIDTH, 3, self=sums)[0])
    assert found is None
    assert seen.product(seen.rows(), both)[1] == ("sum", LINEAR)


@pytest.mark.parametrize("dims", [1, [1], [1, 2], None, [], -3])
def test_sums_of_elementwise_products_over_tokens_are_sums(dims: Any) -> None:
    seen = Seen()
    keys = seen.put(Places("placed", seen.tokens[:, :, None, None].expand(BATCH, TOKENS, SIZE, 1)))
    values = seen.put(Places("placed", seen.tokens[:, :, None, None].expand(BATCH, TOKENS, 1, WIDTH)))
    pairs = seen.put(Places("placed", seen.tokens[:, :, None, None].expand(BATCH, TOKENS, SIZE, WIDTH)))
    assert seen.sums.see(Step(OPS.mul.Tensor, {"self": keys, "other": values}, (pairs,)), "attn", "mul") is None
    scaled = seen.put(Places("placed", seen.tokens[:, :, None, None].expand(BATCH, TOKENS, SIZE, WIDTH)))
    assert seen.sums.see(Step(OPS.mul.Tensor, {"self": pairs, "other": seen.learned(1)}, (scaled,)), "", "mul") is None
    for node in (pairs, scaled):
        total, found = seen.step(OPS.sum.dim_IntList, BATCH, 1, SIZE, WIDTH, layer="sum", self=node, dim=dims)
        assert found is None
        wide = seen.put(Places("placed", seen.tokens[:, :, None].expand(BATCH, TOKENS, SIZE)))
        assert seen.product(wide, total)[1] == ("sum", LINEAR)
        assert seen.times(seen.put(Places("placed", seen.tokens[:, :, None, None].expand(BATCH, TOKENS, SIZE, 1))), total)[1] == (
            "sum",
            LINEAR,
        )
        over_channels, _ = seen.step(OPS.sum.dim_IntList, BATCH, TOKENS, SIZE, layer="sum", self=node, dim=[3])
        assert seen.product(seen.columns(), over_channels)[1] == ("attn", UNTRACED)


def test_products_of_a_vector_with_itself_are_no_pairs_of_channels() -> None:
    seen = Seen()
    tokens, other = seen.rows(), seen.rows()
    squares = seen.rows()
    assert seen.sums.see(Step(OPS.mul.Tensor, {"self": tokens, "other": other}, (squares,)), "attn", "mul") is None
    total, _ = seen.step(OPS.sum.dim_IntList, BATCH, 1, SIZE, self=squares, dim=[1])
    assert seen.times(seen.rows(), total)[1] is None


def test_scores_in_a_product_with_values_are_told() -> None:
    seen = Seen()
    told = "attn", f"{SCORES} with call"
    assert seen.product(seen.scores(), seen.rows())[1] == told
    assert seen.product(seen.columns(), seen.scores())[1] == told
    assert seen.product(seen.scores(), seen.learned(BATCH, TOKENS, SIZE))[1] is None
    assert seen.product(seen.learned(BATCH, SIZE, TOKENS), seen.scores())[1] is None
    assert seen.product(seen.scores(), seen.scores())[1] is None
    squared, _ = seen.product(seen.scores(), seen.scores())
    assert seen.sums.is_scores(squared)
    assert seen.product(squared, seen.rows())[1] == told
    assert not seen.sums.is_scores(seen.lost(BATCH, TOKENS, TOKENS))
    assert seen.sums.is_scores(seen.scores())


def test_scores_that_weigh_values_elementwise_are_told_when_they_are_summed() -> None:
    def found(op: Any, dims: list[int], *, by_rows: bool = False) -> tuple[str, str] | None:
        seen = Seen()
        scores = seen.scores(5)
        shape = BATCH, TOKENS, 5
        codes = seen.tokens[:, :, None] if by_rows else seen.tokens[:, None, :5]
        values = seen.put(Places("placed", codes.expand(shape)))
        weighted = seen.scores(5)
        assert seen.sums.see(Step(op, {"self": scores, "other": values}, (weighted,)), "attn", "mul") is None
        scaled = seen.scores(5)
        assert seen.sums.see(Step(OPS.relu.default, {"self": weighted}, (scaled,)), "attn", "relu") is None
        return seen.total(scaled, dims)[1]

    told = "attn", f"{SCORES} elementwise"
    assert found(OPS.mul.Tensor, [2]) == told
    assert found(OPS.mul.Tensor, [1]) == told
    assert found(OPS.mul.Tensor, [0]) == told
    assert found(OPS.div.Tensor, [2]) is None
    assert found(OPS.mul.Tensor, [2], by_rows=True) is None
    seen = Seen()
    assert seen.total(seen.scores(), [2])[1] is None


def test_tokens_that_are_summed_with_lost_weights_are_told() -> None:
    seen = Seen()
    told = "attn", UNTRACED
    assert seen.product(seen.lost(BATCH, 3, TOKENS), seen.rows())[1] == told
    assert seen.product(seen.columns(), seen.lost(BATCH, TOKENS, 3))[1] == told
    assert seen.product(seen.lost(BATCH, 3, SIZE), seen.columns())[1] is None
    assert seen.product(seen.rows(), seen.lost(BATCH, SIZE, 3))[1] is None
    assert seen.product(seen.learned(BATCH, 3, TOKENS), seen.rows())[1] is None
    vector = seen.put(Places("placed", seen.tokens[0]))
    assert seen.step(OPS.mv.default, 3, self=seen.lost(3, TOKENS), vec=vector)[1] == told
    weights = seen.lost(WIDTH, SIZE, 3)
    maps = seen.put(Places("placed", seen.tokens[:, None].expand(BATCH, SIZE, TOKENS)))
    convolved: dict[str, Any] = {"input": maps, "weight": weights, "bias": None, "stride": [1]}
    assert seen.step(OPS.convolution.default, BATCH, WIDTH, TOKENS, **convolved)[1] is None
    kernel: dict[str, Any] = {"input": maps, "weight": seen.key_values(), "bias": None, "stride": [1]}
    assert seen.step(OPS.convolution.default, BATCH, WIDTH, TOKENS, **kernel)[1] == ("sum", LINEAR)


def test_outer_products_are_pairs_of_channels() -> None:
    seen = Seen()
    wide = seen.put(Places("placed", seen.tokens.flatten()[:, None, None].expand(12, SIZE, 1)))
    flat = seen.put(Places("placed", seen.tokens.flatten()[:, None, None].expand(12, 1, WIDTH)))
    pairs = seen.put(Places("placed", seen.tokens.flatten()[:, None, None].expand(12, SIZE, WIDTH)))
    assert seen.sums.see(Step(OPS.bmm.default, {"self": wide, "mat2": flat}, (pairs,)), "attn", "bmm") is None
    total, found = seen.step(OPS.sum.dim_IntList, 1, SIZE, WIDTH, layer="sum", self=pairs, dim=[0])
    assert found is None
    assert seen.product(seen.rows(), total)[1] == ("sum", LINEAR)


def test_what_is_no_operation_of_the_model_is_passed_over() -> None:
    seen = Seen()
    assert seen.sums.see(Step(None, {"read": seen.scores()}), "attn", "item") is None


class Followed:
    """Conclusions from a tape whose tensors have given places."""

    def __init__(self) -> None:
        self.tape = Tape(outside={0: Outside("pixels", "x", torch.Size((2, 3, 12, 20)), True)})
        self.conclusions = Conclusions(self.tape, [5])
        self.tracer = self.conclusions._follower
        planes = self.tracer.planes
        self.tokens = planes.codes(planes.grid(2, 3, BOX)).flatten(1)

    def put(self, slot: int, places: Places) -> Made:
        return put_in_slot(self.tape, self.tracer.shadows, slot, places)

    def told(self, places: Places, *args: Any, func: Any = torch.softmax, **kwargs: Any) -> str | None:
        entry = Entry(func, operation_of(func), (Ref(1), *args), kwargs, (self.put(2, places),), "attn")
        return self.conclusions._over_tokens(entry)


OVER = "has a softmax over tokens whose product with values is not recognized"


def test_softmaxes_over_tokens_are_described() -> None:
    seen = Followed()
    rows = Places("placed", seen.tokens[:, :, None].expand(BATCH, TOKENS, SIZE))
    assert [seen.told(rows, dim) for dim in (0, 1, 2, -1, -2)] == [OVER, OVER, None, None, OVER]
    assert (seen.told(rows), seen.told(rows, dim=1), seen.told(rows, dim=2)) == (None, OVER, None)
    columns = Places("placed", seen.tokens[:, None].expand(BATCH, SIZE, TOKENS))
    assert seen.told(columns) == OVER
    assert seen.told(columns, "1") is None
    pairs = rows._replace(columns=torch.zeros_like(rows.codes))
    assert seen.told(pairs, 2) is None
    assert rows.codes.ndim == 3
    varied = rows._replace(columns=torch.arange(SIZE).expand(BATCH, TOKENS, SIZE))
    assert seen.told(varied, 2) == OVER
    assert seen.told(whole("learned", (2, 3, 4), CPU), 1) is None
    lost = "has a softmax over a tensor that could not be traced beyond fft"
    assert seen.told(whole("lost", (2, 3, 4), CPU, "fft"), 1) == lost
    assert seen.told(whole("lost", (3, 4), CPU, "fft"), 1) is None
    nothing = Entry(torch.softmax, operation_of(torch.softmax), (Ref(1), 1), {}, (None,), "attn")
    assert seen.conclusions._over_tokens(nothing) is None


def test_the_axis_of_a_gumbel_softmax_is_its_fifth_argument() -> None:
    seen = Followed()
    rows = Places("placed", seen.tokens[:, :, None].expand(BATCH, TOKENS, SIZE))
    columns = Places("placed", seen.tokens[:, None].expand(BATCH, SIZE, TOKENS))
    for places, last, middle in ((rows, None, OVER), (columns, OVER, None)):
        assert seen.told(places, 1, func=F.gumbel_softmax) == last
        assert seen.told(places, 1.0, False, 1e-10, 1, func=F.gumbel_softmax) == middle
        assert seen.told(places, 1.0, False, 1e-10, func=F.gumbel_softmax) == last
        assert seen.told(places, dim=1, func=F.gumbel_softmax) == middle


def test_wanted_tokens_are_arranged_where_they_are_known() -> None:
    seen = Followed()
    rows = Places("placed", seen.tokens[:, :, None].expand(BATCH, TOKENS, SIZE))

    def arranged(places: Places) -> bool:
        seen.put(5, places)
        seen.conclusions._arrange(5)
        assert seen.conclusions.has([5])
        assert not seen.conclusions.has([5, 6])
        return seen.conclusions.tokens(5) is not None

    assert arranged(rows)
    assert arranged(rows._replace(drift=Drift(0.5)))
    assert not arranged(rows._replace(drift=Drift(0.75)))
    assert not arranged(rows._replace(columns=rows.codes))
    assert not arranged(whole("learned", (2, 3, 4), CPU))
