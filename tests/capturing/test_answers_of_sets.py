"""What is known of the results of attention whose queries lie nowhere in the image, and of functions that receive scores."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from visattn.core.capturing.following.sums import _are_values, _differs, _read, _results
from visattn.core.capturing.following.tracing import TokenTracer
from visattn.core.capturing.placing.nodes import Facts, Node
from visattn.core.capturing.placing.places import Kind, Places, whole
from visattn.core.capturing.placing.steps import Step
from visattn.core.capturing.tokens.planes import PADDING
from visattn.core.capturing.tokens.points import Drift
from visattn.core.capturing.trace.operations import operation_of
from visattn.core.capturing.trace.product_axes import Permuted
from visattn.core.capturing.trace.tape import Attention, Entry, Operand, Outside, Ref, Tape
from visattn.core.geometry import Box

BOX, CPU = Box(0.0, 0.0, 12.0, 20.0), torch.device("cpu")
HEADS, QUERIES, KEYS, SIZE, WIDTH = 3, 5, 7, 4, 6
RESULT = 9
AWAY = Drift(math.inf)


class Scene:
    """Two images of two by three patches with a class token, and five object queries."""

    def __init__(self) -> None:
        self.tape = Tape(outside={0: Outside("pixels", "x", torch.Size((2, 3, 12, 20)), True)})
        self.tracer = TokenTracer(self.tape)
        self.planes = self.tracer.planes
        patches = self.planes.codes(self.planes.grid(2, 3, BOX)).flatten(1)
        self.tokens = torch.cat([self.planes.codes(self.planes.set_of("cls_token")), patches], 1)
        self.asking = self.planes.set_of("query_embed", QUERIES)
        self.free = self.planes.members(self.asking).expand(2, QUERIES)
        self.met = self.planes.codes(self.asking)
        self.keys = self.vectors(self.tokens)

    def put(self, slot: int, places: Places) -> Node:
        node = Node(len(self.tape.facts))
        self.tape.facts.append(Facts(places.shape, torch.empty(places.shape).stride(), 0, int(node), True, True))
        self.tape.nodes[slot] = node
        self.tracer.shadows.put(node, places)
        return node

    def vectors(self, tokens: Tensor, kind: Kind = "placed", **more: Any) -> Places:
        return Places(kind, tokens[:, None, :, None].expand(2, HEADS, tokens.shape[1], SIZE), **more)

    def answer(
        self,
        query: Places,
        *others: Places,
        kind: str = "pool",
        shape: tuple[int, ...] = (2, HEADS, QUERIES, WIDTH),
        result: Places | None = None,
        **more: Any,
    ) -> Places:
        """Return the places of the result of attention of these queries, behind it."""
        for slot, places in enumerate((query, *(others or (self.keys, self.keys))), 1):
            self.put(slot, places)
        self.put(RESULT, result or whole("lost", shape, CPU, "attention"))
        self.tracer.passed(attention(**more), RESULT, kind)
        return self.tracer.places(RESULT)


def attention(*, fused: bool = True, rows: int = QUERIES, columns: int = KEYS, at_keys: bool = False) -> Attention:
    axes = Permuted(None, None, (0, 1, 2, 3))
    product = Operand(1, axes=axes, weighs=True), Operand(2, axes=axes)
    operands = (Operand(1), Operand(2), Operand(3)) if fused else product
    position = None if fused else 0
    return Attention("attn", 2, 0, operands, fused, (2, HEADS), rows, columns, position, answers_at_keys=at_keys)


def wide(tokens: Tensor) -> Tensor:
    """Return the codes of a result that lies at these tokens."""
    return tokens[:, None, :, None].expand(2, HEADS, tokens.shape[1], WIDTH)


def test_queries_belong_to_the_image_that_they_have_asked() -> None:
    scene = Scene()
    found = scene.answer(scene.vectors(scene.free, "learned", name="query_embed"))
    assert (found.kind, found.name, found.behind) == ("learned", "query_embed", (1, "attn", 2))
    assert torch.equal(found.codes, wide(scene.met))
    foreign = scene.answer(scene.vectors(scene.free, "foreign", name="text"))
    assert (foreign.kind, foreign.name, foreign.behind) == ("foreign", "text", (2, "attn", 2))
    assert torch.equal(scene.answer(scene.vectors(scene.met, "learned")).codes, wide(scene.met))


def test_queries_that_ask_no_image_belong_to_none() -> None:
    scene = Scene()
    asking = scene.vectors(scene.free, "learned")
    nowhere = scene.vectors(scene.free, "learned")
    assert torch.equal(scene.answer(asking, nowhere, nowhere, columns=QUERIES).codes, wide(scene.free))
    padded = scene.vectors(torch.cat([scene.tokens[:1], torch.full((1, KEYS), PADDING, dtype=torch.int32)]))
    assert torch.equal(scene.answer(asking, padded, padded).codes, wide(scene.free))
    lost = whole("lost", (2, HEADS, KEYS, SIZE), CPU)
    assert torch.equal(scene.answer(asking, lost, lost).codes, wide(scene.free))
    other_shape = scene.answer(asking, shape=(2, HEADS, QUERIES + 1, WIDTH))
    assert (other_shape.kind, other_shape.located, other_shape.behind) == ("learned", False, None)


def test_queries_without_numbers_are_learned() -> None:
    scene = Scene()
    found = scene.answer(whole("learned", (2, HEADS, QUERIES, SIZE), CPU, "table"))
    assert (found.kind, found.name, found.located, found.behind) == ("learned", "table", False, None)
    lost = scene.answer(whole("lost", (2, HEADS, QUERIES, SIZE), CPU, "fft"))
    assert (lost.kind, lost.name) == ("learned", "")


def test_weights_that_sets_have_asked_for_answer_at_these() -> None:
    scene = Scene()
    columns = scene.tokens[:, None, None].expand(2, HEADS, QUERIES, KEYS)
    rows = scene.free[:, None, :, None].expand(2, HEADS, QUERIES, KEYS)
    weights = Places("placed", columns, others=rows)
    found = scene.answer(weights, scene.keys, kind="cross", fused=False)
    assert (found.kind, found.behind) == ("learned", (1, "attn", 2))
    assert torch.equal(found.codes, wide(scene.met))
    pairs = Places("placed", scene.tokens[:, None, :QUERIES, None].expand(2, HEADS, QUERIES, KEYS), columns, others=rows)
    found = scene.answer(pairs, scene.keys, fused=False)
    assert torch.equal(found.codes, wide(scene.tokens[:, :QUERIES]))
    without = scene.answer(Places("placed", columns), scene.keys, kind="cross", fused=False)
    assert without.kind == "lost"  # its queries lie in the image


def test_queries_of_the_image_answer_only_where_they_lie() -> None:
    scene = Scene()
    patches = scene.vectors(scene.tokens[:, :QUERIES])
    assert scene.answer(patches, kind="cross").kind == "lost"
    assert scene.answer(patches, kind="unplaced").kind == "lost"
    asking = scene.vectors(scene.free, "learned")
    assert scene.answer(asking, kind="cross").kind == "learned"
    assert scene.answer(asking, kind="unplaced").kind == "lost"
    assert scene.answer(patches, kind="pool").kind == "learned"


def test_queries_that_read_elsewhere_answer_if_they_are_known() -> None:
    scene = Scene()
    asking, away = scene.vectors(scene.free, "learned"), scene.keys._replace(drift=AWAY)
    assert scene.answer(asking, away, scene.keys, kind="unplaced").kind == "learned"
    assert scene.answer(asking, scene.keys, away, kind="unplaced").kind == "learned"
    assert scene.answer(asking, kind="unplaced").kind == "lost"
    varied = asking._replace(codes=asking.codes + torch.arange(SIZE))
    assert scene.answer(varied, away, away, kind="unplaced").kind == "lost"
    some = scene.free.clone()
    some[1, 2] = PADDING
    assert scene.answer(scene.vectors(some, "learned"), away, away, kind="unplaced").kind == "lost"
    assert scene.answer(scene.vectors(scene.tokens[:, 1:6], "learned"), away, away, kind="unplaced").kind == "lost"
    unknown = whole("learned", (2, HEADS, QUERIES, SIZE), CPU)
    assert scene.answer(unknown, away, away, kind="unplaced").kind == "lost"
    first = Scene()
    assert int(first.planes.set_of("cls_token").start) == 12
    zero = Scene()
    zero.planes._planes.clear()
    zero.planes._starts.clear()
    members = zero.planes.members(zero.planes.set_of("first", QUERIES)).expand(2, QUERIES)
    assert int(members.min()) == 0
    assert zero.tracer._reads_elsewhere(_with(zero, zero.vectors(members, "learned"), zero.vectors(members, drift=AWAY)))


def _with(scene: Scene, query: Places, key: Places) -> Attention:
    for slot, places in enumerate((query, key, key), 1):
        scene.put(slot, places)
    return attention()


def test_calls_that_answer_at_their_keys_have_their_values() -> None:
    scene = Scene()
    values = scene.keys._replace(name="v")
    result = scene.vectors(scene.tokens.flip(1))
    found = scene.answer(scene.keys, scene.keys, values, kind="self", result=result, rows=KEYS, at_keys=True)
    assert (found.kind, found.name, found.behind) == ("placed", "v", (1, "attn", 2))
    assert torch.equal(found.codes, values.codes)
    shorter = scene.vectors(scene.tokens[:, :QUERIES])
    found = scene.answer(scene.keys, scene.keys, values, kind="self", result=shorter, at_keys=True)
    assert torch.equal(found.codes, shorter.codes)
    assert found.behind is None
    lost = whole("lost", (2, HEADS, KEYS, SIZE), CPU)
    found = scene.answer(scene.keys, scene.keys, lost, kind="self", result=result, rows=KEYS, at_keys=True)
    assert found.behind is None


def test_streams_are_compared_by_embedding_and_attention() -> None:
    scene = Scene()
    first = scene.keys._replace(behind=(1, "a", 0), embedding=3)

    def one(query: Places, key: Places) -> bool:
        return scene.tracer.one_stream(_with(scene, query, key))

    assert one(first, first)
    assert not one(first, first._replace(behind=(2, "b", 0)))
    assert not one(first, first._replace(embedding=4))
    lost = whole("lost", (2, HEADS, KEYS, SIZE), CPU)
    assert one(lost, first)
    assert one(first, lost)
    for weights, same in ((first, True), (first._replace(one_stream=False), False), (lost._replace(one_stream=False), True)):
        scene.put(1, weights)
        assert scene.tracer.one_stream(attention(fused=False)) is same


def test_operands_without_places_are_unknown() -> None:
    scene = Scene()
    for places, known in (
        (scene.keys, True),
        (scene.vectors(scene.free, "learned"), True),
        (whole("learned", (2, 3), CPU), False),
        (whole("lost", (2, 3), CPU), False),
        (scene.keys._replace(kind="lost"), False),
        (Places("placed", torch.full((2, 3), PADDING)), True),
    ):
        scene.put(1, places)
        assert (scene.tracer.of(Operand(1)) is not None) is known
    scene.put(1, scene.vectors(scene.tokens))
    grouped = scene.tracer.of(Operand(1, 2))
    assert grouped is not None
    assert grouped.shape == (2, 2 * HEADS, KEYS, SIZE)
    outside = Outside("unknown", "", torch.Size((2, 3)), True)
    scene.tape.outside[50] = outside
    assert (scene.tracer.places(50).kind, scene.tracer.places(50).shape) == ("lost", (2, 3))


def scores(scene: Scene) -> Places:
    rows = scene.tokens[:, None, :QUERIES, None].expand(2, HEADS, QUERIES, KEYS)
    return Places("placed", rows, scene.tokens[:, None, None].expand(2, HEADS, QUERIES, KEYS))


@pytest.mark.parametrize(("own", "attends"), [(False, False), (True, False), (False, True)])
def test_functions_that_receive_scores_and_values_may_attend(own: bool, attends: bool) -> None:
    scene = Scene()
    learned = whole("learned", (KEYS, KEYS), CPU)

    def noted(*arguments: Places) -> dict[str, str]:
        scene.tracer.unseen.clear()
        for slot, places in enumerate(arguments, 1):
            scene.put(slot, places)
        refs = tuple(Ref(slot) for slot in range(1, len(arguments) + 1))
        operation = operation_of(torch.fft.fft)._replace(own=own, name="mix")
        scene.tracer.see(Entry(torch.fft.fft, operation, refs, {}, (), "blocks.3"), attends=attends)
        return dict(scene.tracer.unseen)

    told = {} if own or attends else {"blocks.3": "multiplies scores by values with mix"}
    assert noted(scores(scene), scene.keys) == told
    assert noted(scene.keys, scores(scene)) == told
    assert noted(scores(scene), whole("foreign", (KEYS, SIZE), CPU)) == told
    assert noted(scores(scene), learned) == {}
    assert noted(scores(scene), scores(scene)) == {}
    assert noted(scene.keys, scene.keys) == {}


def test_values_have_the_places_of_the_keys_of_scores() -> None:
    scene = Scene()
    pairs = scores(scene)
    values = Places("placed", scene.tokens[:, None, None].expand(2, HEADS, 1, KEYS))
    queries = Places("placed", scene.tokens[:, None, :QUERIES, None].expand(2, HEADS, QUERIES, 1))
    assert _are_values(values, pairs)
    assert _are_values(Places("placed", scene.tokens[:, None, None]), pairs)
    assert not _are_values(queries, pairs)
    assert not _are_values(values._replace(kind="learned"), pairs)
    assert not _are_values(values._replace(columns=values.codes), pairs)
    assert not _are_values(values, pairs._replace(columns=None))
    assert not _are_values(Places("placed", scene.tokens[:, None, None, :QUERIES]), pairs)
    assert pairs.columns is not None
    assert not _are_values(values, pairs._replace(codes=pairs.columns))


def test_tensors_differ_along_axes_that_are_not_expanded() -> None:
    facts = Facts(torch.Size((2, 1, 5)), (5, 5, 1), 0, 0, True, True)
    assert [_differs(facts, axis) for axis in (-1, -2, -3, -4)] == [True, False, True, False]
    expanded = facts._replace(shape=torch.Size((2, 3, 5)), stride=(0, 5, 1))
    assert [_differs(expanded, axis) for axis in (-1, -2, -3)] == [True, True, False]
    without = facts._replace(stride=())
    assert [_differs(without, axis) for axis in (-1, -2, -3)] == [True, False, True]


def test_steps_read_their_arguments_and_make_their_results() -> None:
    step = Step(None, {"self": Node(1), "others": [Node(2), 5], "out": Node(3)}, (Node(4), None), ((Node(6), Node(7)),))
    assert list(_read(step)) == [1, 2]
    assert _results(step) == [4, 7]
