"""Places of the results of whole calls, such as fused attention, and of tensors that no call made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from visattn.core.capturing.following.tracing import TokenTracer
from visattn.core.capturing.placing.nodes import Facts, Node
from visattn.core.capturing.placing.places import FOREIGN, LEARNED, UNWATCHED, Kind, Places, whole
from visattn.core.capturing.placing.steps import Step
from visattn.core.capturing.tokens.points import Drift
from visattn.core.capturing.trace.operations import EDITED, Operation, operation_of
from visattn.core.capturing.trace.product_axes import Permuted
from visattn.core.capturing.trace.tape import Attention, Entry, Made, Operand, Outside, Ref, Tape
from visattn.core.geometry import Box

BOX, CPU = Box(0.0, 0.0, 12.0, 20.0), torch.device("cpu")
HEADS, QUERIES, KEYS, SIZE, WIDTH = 3, 5, 7, 4, 6
SDPA = F.scaled_dot_product_attention
RESULT = 9


class Scene:
    """Two images of two by three patches with a class token; tensors are put into slots with given places."""

    def __init__(self) -> None:
        self.tape = Tape(outside={0: Outside("pixels", "x", torch.Size((2, 3, 12, 20)), True)})
        self.tracer = TokenTracer(self.tape)
        self.planes = self.tracer.planes
        self.cls = self.planes.set_of("cls_token")
        self.patches = self.planes.codes(self.planes.grid(2, 3, BOX)).flatten(1)
        self.tokens = torch.cat([self.planes.codes(self.cls), self.patches], 1)
        self.asking = self.planes.set_of("query_embed", QUERIES)

    def node(self, slot: int, *shape: int, floating: bool = True) -> Node:
        node = Node(len(self.tape.facts))
        self.tape.facts.append(Facts(torch.Size(shape), torch.empty(shape).stride(), 0, int(node), floating, True))
        self.tape.nodes[slot] = node
        return node

    def put(self, slot: int, places: Places) -> None:
        self.tracer.shadows.put(self.node(slot, *places.shape), places)

    def vectors(self, tokens: Tensor, size: int = SIZE, kind: Kind = "placed", **more: Any) -> Places:
        return Places(kind, tokens[:, None, :, None].expand(2, HEADS, tokens.shape[1], size), **more)

    def called(self, *arguments: Places, shape: tuple[int, ...], entry: Entry | None = None, **more: Any) -> Places:
        """Return the places of the result of a call of these arguments."""
        for slot, places in enumerate(arguments, 1):
            self.put(slot, places)
        self.node(RESULT, *shape)
        refs = tuple(Ref(slot) for slot in range(1, len(arguments) + 1))
        made = Made(RESULT, torch.Size(shape), True)
        made_entry = entry or Entry(SDPA, operation_of(SDPA), refs, {}, (made,), "attn", before=(None,), **more)
        self.tracer.see(made_entry, attends=True)
        return self.tracer.places(RESULT)

    def passed(self, call: Attention, kind: str, result: Places) -> Places:
        """Return what is known of the result of an attention call behind it."""
        self.put(RESULT, result)
        self.tracer.passed(call, RESULT, kind)
        return self.tracer.places(RESULT)


def attention(*, fused: bool = True, rows: int = QUERIES, columns: int = KEYS, **more: Any) -> Attention:
    axes = Permuted(None, None, (0, 1, 2, 3))
    product = Operand(1, axes=axes, weighs=True), Operand(2, axes=axes)
    operands = (Operand(1), Operand(2), Operand(3)) if fused else product
    return Attention("attn", 2, 0, operands, fused, (2, HEADS), rows, columns, None if fused else 0, **more)


def lost(*shape: int) -> Places:
    return whole("lost", shape or (2, HEADS, KEYS, SIZE), CPU, "fft")


def learned(*shape: int) -> Places:
    return whole("learned", shape or (2, HEADS, KEYS, SIZE), CPU, "table")


def foreign(*shape: int) -> Places:
    return whole("foreign", shape or (2, HEADS, KEYS, SIZE), CPU, "text")


@pytest.mark.parametrize("size", [SIZE, 1])
def test_fused_attention_answers_at_its_queries(size: int) -> None:
    scene = Scene()
    shape = 2, HEADS, QUERIES, WIDTH
    queries = scene.vectors(scene.tokens[:, 1:6], size, behind=(1, "a", 0), others=torch.zeros(2, HEADS, QUERIES, size))
    keys, values = scene.vectors(scene.tokens, size, behind=(3, "c", 0)), scene.vectors(scene.tokens, WIDTH, behind=(2, "b", 0))
    found = scene.called(queries, keys, values, shape=shape)
    assert torch.equal(found.codes, scene.tokens[:, None, 1:6, None].expand(shape))
    assert (found.kind, found.behind, found.others, found.copies) == ("placed", (3, "c", 0), None, None)
    copies = torch.arange(2 * HEADS * QUERIES).view(2, HEADS, QUERIES, 1)
    found = scene.called(queries._replace(copies=copies.expand(2, HEADS, QUERIES, size)), keys, values, shape=shape)
    assert found.copies is not None
    assert torch.equal(found.copies, copies.expand(shape))
    varied = torch.arange(2 * HEADS * QUERIES * SIZE).view(2, HEADS, QUERIES, SIZE)
    wide = scene.vectors(scene.tokens[:, 1:6])
    assert scene.called(wide._replace(copies=varied), keys, values, shape=shape).copies is None


@pytest.mark.parametrize("rows", [QUERIES, 1])
def test_channels_that_attend_keep_the_tokens_of_their_values(rows: int) -> None:
    scene = Scene()
    codes = scene.tokens[:, None, None].expand(2, HEADS, rows, KEYS)
    channels = Places("placed", codes, behind=(2, "b", 0))
    found = scene.called(channels, learned(2, HEADS, rows, KEYS), channels, shape=(2, HEADS, SIZE, KEYS))
    assert found.kind == "placed"
    assert torch.equal(found.codes, codes[:, :, :1].expand(2, HEADS, SIZE, KEYS))
    assert found.behind == (2, "b", 0)
    folded = Places("placed", codes.flatten(0, 1))
    assert scene.called(folded, folded, folded, shape=(2 * HEADS, SIZE, KEYS)).kind == "placed"
    varied = channels._replace(codes=scene.tokens[:, None, :rows, None] + torch.arange(KEYS))
    by_columns = scene.called(varied, varied, channels, shape=(2, HEADS, SIZE, KEYS))
    assert torch.equal(by_columns.codes, found.codes)
    scores = channels._replace(columns=codes)
    assert scene.called(scores, scores, scores, shape=(2, HEADS, SIZE, KEYS)).kind == "lost"


def test_one_query_alone_has_no_place_of_its_own() -> None:
    scene = Scene()
    one = Places("placed", scene.patches[:1, :1, None, None].expand(1, 1, 1, SIZE))
    two = Places("placed", scene.patches[:1, None, :2, None].expand(1, 1, 2, SIZE))
    assert scene.called(one, two, two, shape=(1, 1, 1, SIZE)).kind == "lost"
    assert scene.called(two, two, two, shape=(1, 1, 2, SIZE)).kind == "placed"


def test_fused_attention_of_parameters_and_inputs_lies_nowhere() -> None:
    scene = Scene()
    shape = 2, HEADS, QUERIES, WIDTH
    queries = learned(2, HEADS, QUERIES, SIZE)
    found = scene.called(queries, learned(), learned(), shape=shape)
    assert (found.kind, found.shape) == ("learned", shape)
    for arguments in ((queries, foreign(), learned()), (queries, learned(), foreign())):
        assert scene.called(*arguments, shape=shape).kind == "foreign"
    tokens = scene.vectors(scene.tokens)
    assert scene.called(queries, tokens, tokens, shape=shape).kind == "lost"
    for arguments in (
        (queries, lost(), learned()),
        (queries, learned(), lost()),
        (lost(2, HEADS, QUERIES, SIZE), queries, queries),
    ):
        found = scene.called(*arguments, shape=shape)
        assert (found.kind, found.name) == ("lost", "fft")


def test_members_of_sets_keep_their_numbers_in_fused_attention() -> None:
    scene = Scene()
    shape = 2, HEADS, QUERIES, WIDTH
    members = scene.planes.members(scene.asking).expand(2, QUERIES)
    queries = scene.vectors(members, kind="learned", behind=(1, "a", 0))
    found = scene.called(queries, foreign()._replace(behind=(4, "d", 0)), learned(), shape=shape)
    assert (found.kind, found.behind) == ("foreign", (4, "d", 0))
    assert torch.equal(found.codes, members[:, None, :, None].expand(shape))
    varied = queries._replace(codes=queries.codes + torch.arange(SIZE))
    assert not scene.called(varied, learned(), learned(), shape=shape).located


def test_results_that_are_no_new_tensors_keep_their_places() -> None:
    scene = Scene()
    tokens = scene.vectors(scene.tokens)
    for slot in (1, 2, 3):
        scene.put(slot, tokens)
    made = Made(1, tokens.shape, True)
    refs = Ref(1), Ref(2), Ref(3)
    scene.tracer.see(
        Entry(torch.fft.fft, operation_of(torch.fft.fft), refs, {}, (made, None), "", before=(1, None)), attends=False
    )
    assert scene.tracer.places(1) is tokens
    made = Made(77, tokens.shape, True)  # a slot without a node
    scene.tracer.see(Entry(torch.fft.fft, operation_of(torch.fft.fft), refs, {}, (made,), "", before=(None,)), attends=False)
    assert scene.tracer.at == 2


def test_calls_without_a_rule_lose_what_comes_from_the_image() -> None:
    scene = Scene()
    for slot, places in enumerate((scene.vectors(scene.tokens), lost(), foreign(), learned()), 1):
        scene.put(slot, places)
    scene.put(5, whole("foreign", (2,), CPU, "mask"))

    def of(*slots: int) -> tuple[str, str, tuple[int, ...]]:
        entry = Entry(torch.fft.fft, operation_of(torch.fft.fft), tuple(Ref(slot) for slot in slots), {}, (), "")
        places = scene.tracer._without_rule(entry, torch.Size((4, 3)))
        return places.kind, places.name, tuple(places.shape)

    assert of(1) == ("lost", "fft", (4, 3))
    assert of(4, 2) == ("lost", "fft", (4, 3))
    assert of() == ("lost", "fft", (4, 3))
    assert of(4, 3, 5) == ("foreign", "text", (4, 3))
    assert of(4) == ("learned", "", (4, 3))
    scene.put(2, whole("lost", (2,), CPU, "sort"))
    assert of(1, 2) == ("lost", "sort", (4, 3))


def test_a_result_of_another_shape_follows_no_rule() -> None:
    scene = Scene()
    tokens = scene.vectors(scene.tokens)
    refs, made = (Ref(1), Ref(2), Ref(3)), Made(RESULT, torch.Size((2, HEADS, KEYS, SIZE)), True)
    second = Made(10, torch.Size((2, HEADS, KEYS, SIZE)), True)
    scene.node(10, 2, HEADS, KEYS, SIZE)
    entry = Entry(SDPA, operation_of(SDPA), refs, {}, (made, second), "attn", before=(None, None))
    assert scene.called(tokens, tokens, tokens, shape=(2, HEADS, KEYS, SIZE), entry=entry).placed
    assert scene.tracer.places(10).kind == "lost"


def product(scene: Scene, weights: Places, values: Places, shape: tuple[int, ...]) -> Places:
    return scene.called(weights, values, shape=shape, attention=attention(fused=False))


def test_a_replaced_product_answers_at_the_rows_of_its_weights() -> None:
    scene = Scene()
    shape = 2, HEADS, QUERIES, SIZE
    rows = scene.tokens[:, None, :QUERIES, None].expand(2, HEADS, QUERIES, KEYS)
    columns = scene.tokens[:, None, None].expand(2, HEADS, QUERIES, KEYS)
    weights = Places("placed", rows, columns, behind=(1, "a", 0), others=rows)
    values = scene.vectors(scene.tokens, behind=(2, "b", 0))
    found = product(scene, weights, values, shape)
    assert torch.equal(found.codes, scene.tokens[:, None, :QUERIES, None].expand(shape))
    assert (found.kind, found.columns, found.copies, found.others, found.behind) == ("placed", None, None, None, (2, "b", 0))
    copies = torch.arange(QUERIES)[:, None].expand(2, HEADS, QUERIES, KEYS)
    found = product(scene, weights._replace(copies=copies), values, shape)
    assert found.copies is not None
    assert torch.equal(found.copies, torch.arange(QUERIES)[:, None].expand(shape))
    assert product(scene, weights._replace(columns=None), values, shape).kind == "lost"
    assert product(scene, weights._replace(codes=columns), values, shape).kind == "lost"


def edited(scene: Scene, *arguments: Places, shape: tuple[int, ...]) -> Places:
    operation = Operation(EDITED, True, False, False, False, False, -1)
    refs = tuple(Ref(slot) for slot in (20, *range(1, len(arguments) + 1)))
    scene.put(20, learned(*shape))
    made = Made(RESULT, torch.Size(shape), True)
    entry = Entry(SDPA, operation, refs, {}, (made,), "attn", before=(20,))
    return scene.called(*arguments, shape=shape, entry=entry)


def test_edited_weights_lie_between_queries_and_keys() -> None:
    scene = Scene()
    shape = 2, HEADS, QUERIES, KEYS
    queries, keys = scene.vectors(scene.tokens[:, :QUERIES], behind=(1, "a", 0)), scene.vectors(scene.tokens, behind=(2, "b", 0))
    rows = scene.tokens[:, None, :QUERIES, None].expand(shape)
    columns = scene.tokens[:, None, None].expand(shape)
    found = edited(scene, queries, keys, shape=shape)
    assert found.columns is not None
    assert torch.equal(found.codes, rows)
    assert torch.equal(found.columns, columns)
    assert (found.behind, found.one_stream, found.copies, found.others) == ((2, "b", 0), False, None, None)
    assert edited(scene, queries, keys._replace(behind=(1, "a", 0)), shape=shape).one_stream
    shared = Places("placed", scene.tokens[:, :, None].expand(2, KEYS, SIZE)[:, None])
    found = edited(scene, queries, shared._replace(codes=scene.tokens[:1, :, None].expand(1, KEYS, SIZE)), shape=shape)
    assert found.columns is not None
    assert torch.equal(found.columns[0], columns[0])
    weights = Places("placed", rows, columns)
    assert edited(scene, weights, shape=shape) == weights
    assert edited(scene, lost(2, HEADS, QUERIES, SIZE), learned(), shape=shape).kind == "lost"


def test_edited_weights_of_tokens_that_lie_nowhere_have_those_of_the_image() -> None:
    scene = Scene()
    shape = 2, HEADS, QUERIES, KEYS
    members = scene.planes.members(scene.asking).expand(2, QUERIES)
    asking, keys = scene.vectors(members, kind="learned"), scene.vectors(scene.tokens)
    found = edited(scene, asking, keys, shape=shape)
    assert found.others is not None
    assert torch.equal(found.codes, scene.tokens[:, None, None].expand(shape))
    assert torch.equal(found.others, members[:, None, :, None].expand(shape))
    assert (found.kind, found.columns) == ("placed", None)
    found = edited(scene, keys, asking, shape=(2, HEADS, KEYS, QUERIES))
    assert found.others is not None
    assert torch.equal(found.codes, scene.tokens[:, None, :, None].expand(2, HEADS, KEYS, QUERIES))
    assert torch.equal(found.others, members[:, None, None].expand(2, HEADS, KEYS, QUERIES))
    first = scene.tokens[:, :1].expand(2, QUERIES)
    same = edited(scene, scene.vectors(first), scene.vectors(first), shape=(2, HEADS, QUERIES, QUERIES))
    assert (same.kind, same.columns) == ("placed", None)


def source(scene: Scene, kind: str, *shape: int, floating: bool = True, name: str = "embed") -> Places:
    """Return the places of a tensor that no call made."""
    node = scene.node(30, *shape, floating=floating)
    scene.tape.origins[node] = kind, name
    return scene.tracer.places(30)


def test_parameters_and_inputs_lie_nowhere() -> None:
    scene = Scene()
    assert source(scene, "pixels", 2, 3, 12, 20).placed
    unknown = source(scene, "unknown", 2)
    assert (unknown.kind, unknown.name) == ("lost", UNWATCHED)
    number = source(scene, "unknown")
    assert (number.kind, number.positions) == ("learned", "")
    assert source(scene, "unknown", 1, 1).kind == "learned"
    parameter = source(scene, "parameter", 4, SIZE, KEYS)
    assert (parameter.kind, parameter.name, parameter.positions) == ("learned", "embed", "")
    assert torch.equal(parameter.codes, torch.full((4, SIZE, KEYS), LEARNED))
    flags = source(scene, "input", 3, 4, floating=False)
    assert (flags.kind, flags.positions) == ("foreign", "given")
    numbers = source(scene, "input", 3, 4)
    assert (numbers.kind, numbers.positions) == ("foreign", "")
    assert torch.equal(numbers.codes, torch.full((3, 4), FOREIGN))
    assert source(scene, "buffer", 3, floating=False).positions == ""


def test_rows_of_parameters_are_members_of_a_set() -> None:
    scene = Scene()
    start = scene.planes.members(scene.asking)[-1] + 1 + 2 * QUERIES
    found = source(scene, "parameter", 4, SIZE)
    assert torch.equal(found.codes, (start + torch.arange(4))[:, None].expand(4, SIZE))
    assert scene.planes.of(found.codes)[0].name == f"embed#{len(scene.tape.facts) - 1}"
    again = source(scene, "parameter", 1, 4, 1, SIZE)
    assert again.located
    assert again.codes[0, :, 0, 0].diff().tolist() == [1, 1, 1]
    assert source(scene, "parameter", SIZE).located
    assert source(scene, "parameter", 1, 1, SIZE).located
    for shape, floating in (((), True), ((3, 4, SIZE), True), ((4, SIZE), False)):
        assert not source(scene, "parameter", *shape, floating=floating).located


def test_inputs_of_each_image_are_words() -> None:
    scene = Scene()
    words = source(scene, "input", 2, KEYS, floating=False, name="ids")
    (plane,) = scene.planes.of(words.codes)
    assert (words.kind, plane.name, plane.count) == ("foreign", "word", KEYS)
    assert torch.equal(words.codes, scene.planes.codes(plane))
    vectors = source(scene, "input", 2, KEYS, SIZE, name="text")
    (plane,) = scene.planes.of(vectors.codes)
    assert (plane.name, plane.count) == ("foreign text", KEYS)
    assert torch.equal(vectors.codes, scene.planes.codes(plane)[..., None].expand(2, KEYS, SIZE))
    for shape in ((2,), (3, KEYS), (2, KEYS, SIZE, SIZE)):
        assert not source(scene, "input", *shape).located


def test_tokens_behind_a_call_know_it() -> None:
    scene = Scene()
    scene.put(1, scene.vectors(scene.tokens[:, :QUERIES], drift=Drift(0.25)))
    scene.put(2, scene.vectors(scene.tokens))
    scene.put(3, scene.vectors(scene.tokens))
    result = scene.vectors(scene.tokens[:, :QUERIES], drift=Drift(0.5))
    first = scene.passed(attention(), "cross", result)
    assert (first.behind, first.drift.cells) == ((1, "attn", 2), 0.5)
    assert torch.equal(first.codes, result.codes)
    sampled = scene.passed(attention(), "sampled", result)
    assert (sampled.behind, sampled.drift.cells) == ((2, "attn", 2), 0.25)
    assert scene.tracer.behind([Operand(RESULT), Operand(1)]) == (2, "attn", 2)
    assert scene.tracer.behind([Operand(1)]) is None


def test_every_second_query_becomes_a_coarser_grid() -> None:
    scene = Scene()
    grid = scene.planes.codes(scene.planes.grid(4, 6, BOX))
    tokens, kept = grid.flatten(1), grid[:, ::2, ::2].flatten(1)
    for slot, places in enumerate((kept, tokens, tokens), 1):
        scene.put(slot, scene.vectors(places))
    found = scene.passed(attention(rows=6, columns=24), "cross", scene.vectors(kept))
    assert torch.equal(found.codes, scene.vectors(scene.patches).codes)
    same = scene.passed(attention(rows=24, columns=24), "self", scene.vectors(kept))
    assert torch.equal(same.codes, scene.vectors(kept).codes)


@pytest.mark.parametrize("fused", [True, False])
def test_a_class_token_belongs_to_the_image_that_it_attended_to(fused: bool) -> None:
    scene = Scene()
    free = torch.cat([scene.planes.members(scene.cls).expand(2, 1), scene.patches[:, :4]], 1)
    values = scene.vectors(scene.tokens)
    weights = Places(
        "placed", free[:, None, :, None].expand(2, HEADS, QUERIES, KEYS), values.codes.mT[:, :, :1].expand(-1, -1, 5, -1)
    )
    scene.put(1, scene.vectors(free) if fused else weights)
    scene.put(2, scene.vectors(free) if fused else values)
    scene.put(3, values)
    found = scene.passed(attention(fused=fused), "self", scene.vectors(free))
    assert torch.equal(found.codes, scene.vectors(scene.tokens[:, :QUERIES]).codes)
    scene.put(3 if fused else 2, scene.vectors(free[:, :1].expand(2, KEYS)))
    other = scene.passed(attention(fused=fused), "self", scene.vectors(free))
    assert torch.equal(other.codes, scene.vectors(free).codes)
    scene.put(3 if fused else 2, values)
    folded = Places("placed", scene.vectors(free).codes.flatten(0, 1))
    assert torch.equal(scene.passed(attention(fused=fused), "self", folded).codes, folded.codes)
    other_lead = Places("placed", free[:, None, :, None].expand(2, 1, QUERIES, SIZE))
    assert torch.equal(scene.passed(attention(fused=fused), "self", other_lead).codes, other_lead.codes)
    if fused:
        scene.put(3, learned())
        assert torch.equal(scene.passed(attention(), "self", scene.vectors(free)).codes, scene.vectors(free).codes)


def test_sampled_maps_are_noted_with_their_cells() -> None:
    scene = Scene()
    grid = scene.planes.codes(scene.planes.grid(2, 3, BOX))
    values = Places("placed", grid[:, None].expand(2, SIZE, 2, 3))

    def noted(places: Places) -> Any:
        scene.put(1, places)
        scene.node(RESULT, 2, SIZE, 5, 7)
        step = Step(torch.ops.aten.grid_sampler_2d.default, {"input": scene.tape.nodes[1]}, (scene.tape.nodes[RESULT],))
        entry = Entry(F.grid_sample, operation_of(F.grid_sample), (Ref(1),), {}, (), "read", steps=(step,))
        scene.tracer.sampled.clear()
        scene.tracer.see(entry, attends=False)
        return scene.tracer.sampled.get(scene.tracer.at - 1, "nothing")

    assert torch.equal(noted(values), grid)
    assert noted(values._replace(drift=Drift(0.75))) is None
    assert noted(values._replace(codes=values.codes + torch.arange(SIZE)[:, None, None])) is None
    assert noted(lost(2, SIZE, 2, 3)) is None
    assert noted(learned(2, SIZE, 2, 3)) == "nothing"
    assert noted(foreign(2, SIZE, 2, 3)) == "nothing"
    assert scene.tracer.at == 6
