"""Locations of attention calls, from operands whose places are given."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from visattn.core.capturing.following import locations, weight_codes
from visattn.core.capturing.following.locations import by_rule, locate
from visattn.core.capturing.following.tracing import TokenTracer
from visattn.core.capturing.placing.nodes import Facts, Node
from visattn.core.capturing.placing.places import FOREIGN, LEARNED, LOST, Kind, Places, whole
from visattn.core.capturing.tokens.arrangement import Arrangement
from visattn.core.capturing.tokens.planes import PADDING
from visattn.core.capturing.tokens.points import Drift
from visattn.core.capturing.trace.product_axes import Permuted
from visattn.core.capturing.trace.tape import Attention, Operand, Outside, Tape
from visattn.core.geometry import Box
from visattn.core.records import TokenLayout
from visattn.errors import LayoutError

BOX, CPU = Box(0.0, 0.0, 12.0, 20.0), torch.device("cpu")
HEADS, QUERIES, SIZE = 3, 5, 4
LAYOUT = TokenLayout("tokens", ("cls",), (2, 3), BOX)
PLAIN = Permuted(None, None, (0, 1, 2, 3))
MIXED = "its tokens mix several image locations each"


class Scene:
    """Two images of two by three patches with a class token; tensors are put into slots with given places."""

    def __init__(self, *, given: bool = True) -> None:
        pixels = {0: Outside("pixels", "x", torch.Size((2, 3, 12, 20)), True)} if given else {}
        self.tape = Tape(outside=pixels)
        self.tracer = TokenTracer(self.tape)
        self.planes = self.tracer.planes
        self.cls = self.planes.codes(self.planes.set_of("cls_token"))
        self.patches = self.planes.codes(self.planes.grid(2, 3, BOX)).flatten(1)
        self.tokens = torch.cat([self.cls, self.patches], 1) if given else torch.zeros(2, 7, dtype=torch.int32)
        self.asking = self.planes.codes(self.planes.set_of("query_embed", QUERIES))
        self.wide = self.placed(self.tokens)

    def placed(self, tokens: Tensor, kind: Kind = "placed", **more: Any) -> Places:
        """Return places of vectors `(B, heads, N, d)` of these tokens `(B, N)`."""
        return Places(kind, tokens[:, None, :, None].expand(2, HEADS, tokens.shape[1], SIZE), **more)

    def scores(self, rows: Tensor, columns: Tensor | None, **more: Any) -> Places:
        """Return places of weights `(B, heads, q, k)` between tokens."""
        keys = 7 if columns is None else columns.shape[1]
        codes = rows[:, None, :, None].expand(2, HEADS, rows.shape[1], keys)
        return Places("placed", codes, None if columns is None else columns[:, None, None].expand(codes.shape), **more)

    def put(self, slot: int, places: Places) -> None:
        stride = torch.empty(places.shape).stride()
        node = Node(len(self.tape.facts))
        self.tape.facts.append(Facts(places.shape, stride, 0, int(node), True, True))
        self.tape.nodes[slot] = node
        self.tracer.shadows.put(node, places)

    def fused(self, query: Places, key: Places, value: Places, **more: Any) -> tuple[Arrangement, tuple[str, int]] | None:
        """Locate a fused call."""
        for slot, places in enumerate((query, key, value), 1):
            self.put(slot, places)
        sizes: dict[str, Any] = {"lead": tuple(query.shape[:-2]), "rows": query.shape[-2], "columns": key.shape[-2]}
        call = Attention("attn", 0, 0, (Operand(1), Operand(2), Operand(3)), True, **(sizes | more))
        return locate(self.tracer, self.tape, call)

    def product(self, weights: Places, values: Places, **more: Any) -> tuple[Arrangement, tuple[str, int]] | None:
        """Locate a product of weights and values."""
        for slot, places in enumerate((weights, values), 1):
            self.put(slot, places)
        operands = Operand(1, axes=PLAIN, weighs=True), Operand(2, axes=PLAIN)
        sizes: dict[str, Any] = {"lead": tuple(weights.shape[:-2]), "rows": weights.shape[-2], "columns": weights.shape[-1]}
        call = Attention("attn", 0, 0, operands, False, **(sizes | more), position=0)
        return locate(self.tracer, self.tape, call)


def lost(name: str = "fft", *shape: int) -> Places:
    return whole("lost", shape or (2, HEADS, 7, SIZE), CPU, name)


def learned(*shape: int) -> Places:
    return whole("learned", shape or (2, HEADS, 7, SIZE), CPU, "table")


def foreign(*shape: int) -> Places:
    return whole("foreign", shape or (2, HEADS, 7, SIZE), CPU, "text")


def reason(found: tuple[Arrangement, tuple[str, int]] | None) -> str | None:
    assert found is not None
    arrangement = found[0]
    assert arrangement.kind == "unplaced"
    assert arrangement.order is not None
    return arrangement.reason


def kind(found: tuple[Arrangement, tuple[str, int]] | None) -> str:
    assert found is not None
    assert found[0].reason is None
    return found[0].kind


def test_layouts_by_rule_need_no_tracing() -> None:
    scores, keys = TokenLayout("queries", ("cls",), (), BOX), LAYOUT

    def of(lead: tuple[int, ...], images: int = 2) -> Arrangement:
        call: Any = type("Call", (), {"lead": lead, "rows": 5})()
        return by_rule(("cross", scores, keys), call, images)

    plain = of((2, 3))
    assert (plain.kind, plain.queries, plain.keys, plain.order) == ("cross", scores, keys, None)
    folded = of((6,))
    assert folded.order is not None
    assert folded.order.tolist() == [[[0], [1], [2]], [[3], [4], [5]]]
    assert (folded.kind, folded.queries, folded.keys) == ("cross", scores, keys)
    for lead, images in (((5,), 2), ((6,), 0), ((2, 3, 1), 2), ((), 2)):
        with pytest.raises(LayoutError, match="to be placed by grid and prefix"):
            of(lead, images)


def test_a_call_among_the_same_tokens_is_self_attention() -> None:
    scene = Scene()
    found = scene.fused(scene.wide, scene.wide, scene.wide)
    assert found is not None
    assert (found[0].kind, found[0].queries, found[0].keys, found[0].order, found[1]) == ("self", LAYOUT, LAYOUT, None, ("", 0))
    behind = scene.wide._replace(behind=(1, "blocks.0", 2))
    assert kind(scene.fused(behind, scene.wide, scene.wide)) == "cross"
    later = scene.wide._replace(behind=(4, "blocks.1", 3))
    found = scene.fused(later, behind, scene.wide)
    assert found is not None
    assert found[1] == ("blocks.1", 3)
    assert len(scene.tracer.arrangements) == 1  # the codes are the same
    narrow = scene.placed(scene.tokens[:, :QUERIES])
    assert kind(scene.fused(narrow, scene.wide, scene.wide)) == "cross"
    assert kind(scene.fused(scene.wide._replace(embedding=8), scene.wide, scene.wide)) == "cross"


def test_values_must_be_the_tokens_of_the_keys() -> None:
    scene = Scene()
    other = scene.placed(scene.tokens[:, torch.tensor([0, 2, 1, 3, 4, 5, 6])])
    assert reason(scene.fused(scene.wide, scene.wide, other)) == "its keys and values belong to different tokens"
    assert reason(scene.fused(scene.wide, scene.wide, learned())) == "its values belong to no image tokens"
    assert reason(scene.fused(scene.wide, scene.wide, lost())) == "its values could not be traced from the pixels beyond fft"
    channels = scene.placed(scene.tokens[:, :1].expand(2, 7))
    in_channels = channels._replace(codes=scene.tokens[:, None, None, :SIZE].expand(2, HEADS, 7, SIZE))
    assert reason(scene.fused(scene.wide, scene.wide, in_channels)) == "its keys and values belong to different tokens"
    shared = scene.wide._replace(codes=scene.wide.codes[:, :1])
    assert kind(scene.fused(scene.wide, scene.wide, shared)) == "self"


def test_values_without_places_stand_for_keys_that_lie_nowhere() -> None:
    scene = Scene()
    asking = scene.placed(scene.asking, "learned")
    constant = learned(2, HEADS, QUERIES, SIZE)
    assert kind(scene.fused(asking, asking, constant)) == "self"
    assert "values belong to no image" in str(reason(scene.fused(asking, asking, foreign(2, HEADS, QUERIES, SIZE))))


def test_keys_without_places_are_told() -> None:
    scene = Scene()
    assert reason(scene.fused(scene.wide, lost(), scene.wide)) == "its tokens could not be traced from the pixels beyond fft"
    assert reason(scene.fused(scene.wide, foreign(), scene.wide)) == "its tokens come from another input of the model (text)"
    assert reason(scene.fused(learned(), learned(), learned())) == "its tokens come from parameters alone, not from the image"
    assert "beyond fft" in str(reason(scene.fused(foreign(), foreign(), lost())))
    assert reason(scene.fused(scene.wide, learned(), scene.wide)) == MIXED
    assert reason(scene.fused(scene.wide, scene.wide, scene.wide, rows=0)) == "it has no tokens"
    assert reason(scene.fused(scene.wide, scene.wide, scene.wide, columns=0)) == "it has no tokens"
    nothing = Scene(given=False)
    assert "no floating-point image" in str(reason(nothing.fused(nothing.wide, nothing.wide, nothing.wide)))


def test_queries_without_places_are_learned_or_told() -> None:
    scene = Scene()
    found = scene.fused(learned(2, HEADS, QUERIES, SIZE), scene.wide, scene.wide)
    assert kind(found) == "pool"
    assert found is not None
    assert found[0].queries.prefix == tuple(f"query{i}" for i in range(QUERIES))
    assert reason(scene.fused(lost(), scene.wide, scene.wide)) == "its queries could not be traced from the pixels beyond fft"
    assert reason(scene.fused(foreign(), scene.wide, scene.wide)) == "its queries come from another input of the model (text)"
    padding = Places("placed", torch.full((2, HEADS, 7, SIZE), PADDING))
    varied = scene.wide._replace(codes=scene.tokens[:, None, :SIZE, None] + torch.arange(SIZE))
    assert "come neither from the pixels" in str(reason(scene.fused(varied, scene.wide, scene.wide)))
    assert kind(scene.fused(padding, scene.wide, scene.wide)) != "self"


def test_channels_attend_to_channels() -> None:
    scene = Scene()
    codes = scene.tokens[:, None, None].expand(2, HEADS, SIZE, 7)
    channels = Places("placed", codes)
    found = scene.fused(channels, channels, channels)
    assert kind(found) == "channel"
    assert found is not None
    assert found[0].queries.prefix == ("channel0", "channel1", "channel2", "channel3")
    assert kind(scene.fused(lost(), lost(), channels, columns=SIZE)) == "channel"
    wide = scene.placed(scene.tokens)
    assert reason(scene.fused(channels, wide, wide)) == "its queries are channels, its keys are tokens"
    of_none = channels._replace(kind="learned", codes=scene.asking[:, None, None].expand(2, HEADS, SIZE, QUERIES))
    assert "parameters alone" in str(reason(scene.fused(of_none, of_none, of_none)))


def test_tokens_of_whole_rows_and_columns_are_mixed() -> None:
    scene = Scene()
    crossed = scene.wide._replace(crossed=True)
    assert reason(scene.fused(scene.wide, crossed, scene.wide)) == MIXED
    twice = scene.placed(scene.tokens[:, torch.tensor([0, 1, 1, 3, 4, 5, 6])])
    assert reason(scene.fused(scene.wide, twice, twice)) == "a token occurs several times"
    assert reason(scene.fused(scene.wide, twice._replace(mixture=True), twice)) == MIXED
    exchanged = scene.placed(scene.tokens.clone().index_put_((torch.tensor(1), torch.tensor([2, 3])), scene.tokens[1, [3, 2]]))
    mixed = exchanged._replace(mixture=True)
    assert "arranged differently" in str(reason(scene.fused(mixed, mixed, mixed)))


def test_values_that_were_read_elsewhere_are_refused() -> None:
    scene = Scene()
    away, near = Drift(math.inf), Drift(0.5)
    assert kind(scene.fused(scene.wide, scene.wide._replace(drift=near), scene.wide)) == "self"
    found = scene.fused(scene.wide, scene.wide._replace(drift=away), scene.wide)
    assert reason(found) == "its tokens hold values read at points that the model computes"
    assert found is not None
    assert found[0].drift is away
    asking = scene.placed(scene.asking, "learned")
    assert kind(scene.fused(asking._replace(drift=away), scene.wide, scene.wide)) == "pool"
    found = scene.fused(asking._replace(drift=away._replace(of_sets=True)), scene.wide, scene.wide)
    assert "read at points" in str(reason(found))
    on_columns = scene.scores(scene.asking, scene.tokens, drift=away)
    assert "read at points" in str(reason(scene.product(on_columns, scene.wide)))
    with_others = scene.placed(scene.asking, "learned", drift=away, others=scene.wide.codes)
    assert "read at points" in str(reason(scene.fused(with_others, scene.wide, scene.wide)))


def test_a_mean_with_weights_that_leave_one_token_is_refused() -> None:
    scene = Scene()
    mean = scene.planes.codes(scene.planes.grid(1, 1, BOX)).flatten(1)
    tokens = scene.placed(torch.cat([mean, scene.patches], 1))
    assert kind(scene.fused(tokens, tokens, tokens)) == "self"
    leaning = tokens._replace(leaning=True)
    assert "weights that may leave one token" in str(reason(scene.fused(tokens, leaning, tokens)))
    assert kind(scene.fused(scene.wide._replace(leaning=True), scene.wide, scene.wide)) == "self"


def test_copies_of_an_image_are_no_heads() -> None:
    scene = Scene()
    by_head = torch.arange(HEADS)[None, :, None, None].expand(2, HEADS, 7, SIZE)
    copies = scene.wide._replace(copies=by_head)
    assert reason(scene.fused(copies, scene.wide, scene.wide)) == "the batch holds several copies of the image"
    by_image = torch.arange(2)[:, None, None, None].expand(2, HEADS, 7, SIZE)
    assert kind(scene.fused(scene.wide._replace(copies=by_image), scene.wide, scene.wide)) == "self"
    folded = Places("placed", scene.wide.codes.flatten(0, 1), copies=by_image.flatten(0, 1))
    assert kind(scene.fused(folded, folded, folded)) == "self"
    found = scene.fused(folded._replace(copies=by_head.flatten(0, 1)), folded, folded)
    assert "several copies" in str(reason(found))
    assert kind(scene.fused(copies, scene.wide, scene.wide, answers_at_keys=True)) == "self"


def test_calls_that_answer_at_their_keys_have_them_as_queries() -> None:
    scene = Scene()
    other = scene.placed(scene.tokens.flip(1))
    found = scene.fused(other, scene.wide, scene.wide, answers_at_keys=True)
    assert found is not None
    assert (found[0].kind, found[0].query_index) == ("self", None)
    found = scene.fused(other, scene.wide, scene.wide)
    assert found is not None
    assert found[0].query_index is not None
    fewer = scene.fused(scene.placed(scene.tokens[:, :4]), scene.wide, scene.wide, answers_at_keys=True)
    assert fewer is not None
    assert len(fewer[0].queries) == 4


def test_tokens_without_codes_are_numbered_in_sets() -> None:
    scene = Scene()
    tokens = scene.tokens.clone()
    tokens[:, 0] = LEARNED
    found = scene.fused(*[scene.placed(tokens)] * 3)
    assert kind(found) == "self"
    assert found is not None
    assert found[0].keys.prefix == ("token0",)
    tokens[:, 0] = FOREIGN
    found = scene.fused(*[scene.placed(tokens, name="text")] * 3)
    assert found is not None
    assert found[0].keys.prefix == ("foreign0",)
    tokens[1, 0] = LOST
    assert reason(scene.fused(*[scene.placed(tokens, name="sort")] * 3)) == (
        "its tokens could not be traced from the pixels beyond sort"
    )
    assert str(reason(scene.fused(*[scene.placed(tokens)] * 3))).endswith("beyond a write")


def test_products_with_parameters_or_one_token_are_gates() -> None:
    scene = Scene()
    weights = scene.scores(scene.tokens, scene.tokens)
    assert scene.product(weights, learned(), doubtful=True) is None
    assert scene.product(weights, learned()) is not None
    assert scene.product(weights, scene.wide, doubtful=True) is not None
    assert scene.product(weights, lost(), doubtful=True) is not None
    one = scene.placed(scene.tokens[:, 3:4].expand(2, 7))
    assert scene.product(weights, one, doubtful=True) is None
    of_both = scene.placed(torch.cat([scene.tokens[:1].expand(2, 7)[:, :6], scene.tokens[1:, 6:].expand(2, 1)], 1))
    assert scene.product(weights, of_both, doubtful=True) is None
    set_behind = scene.placed(scene.asking[:, [0, 1, 2, 3, 4, 0, 1]], "learned")
    assert scene.product(weights, set_behind, doubtful=True) is None
    assert scene.product(weights, set_behind._replace(behind=(1, "attn", 0)), doubtful=True) is not None
    assert scene.product(weights, weights._replace(codes=weights.codes), doubtful=True) is None


def test_weights_have_a_query_and_a_key() -> None:
    scene = Scene()
    weights = scene.scores(scene.tokens, scene.tokens)
    assert kind(scene.product(weights, scene.wide)) == "self"
    assert kind(scene.product(weights._replace(one_stream=False), scene.wide)) == "cross"
    fewer = scene.product(scene.scores(scene.tokens[:, :QUERIES], scene.tokens), scene.wide)
    assert fewer is not None
    assert (fewer[0].kind, len(fewer[0].queries), len(fewer[0].keys)) == ("cross", QUERIES, 7)
    for change in ((0, 0, 1, 2), (1, 2, 6, 6), (0, 1, 0, 6)):
        rows, columns = weights.codes.clone(), weights.codes.mT.clone()
        rows[change] = scene.tokens[change[0], 4]
        assert reason(scene.product(weights._replace(codes=rows), scene.wide)) == "its weights mix several pairs of tokens"
        columns[change] = scene.tokens[change[0], 4] + 1
        assert reason(scene.product(weights._replace(columns=columns), scene.wide)) == "its weights mix several pairs of tokens"


def test_sets_are_the_rows_of_weights() -> None:
    scene = Scene()
    asked = scene.scores(scene.asking, scene.tokens)
    assert kind(scene.product(asked, scene.wide)) == "pool"
    others = scene.scores(scene.tokens[:, :1].expand(2, QUERIES), None)
    codes = scene.tokens[:, None, None].expand(2, HEADS, QUERIES, 7)
    rows = scene.asking[:, None, :, None].expand(2, HEADS, QUERIES, 7)
    found = scene.product(others._replace(codes=codes, others=rows), scene.wide)
    assert kind(found) == "pool"
    assert found is not None
    assert (len(found[0].queries), found[0].keys) == (QUERIES, LAYOUT)
    answered = Places("placed", rows.mT, others=codes.mT)
    found = scene.product(answered._replace(codes=codes.mT, others=rows.mT), scene.placed(scene.asking))
    assert found is not None
    assert (found[0].kind, found[0].queries, len(found[0].keys)) == ("cross", LAYOUT, QUERIES)
    swapped = weight_codes.codes_of_pairs(scene.tracer, Places("placed", codes, rows), ())
    assert torch.equal(swapped[0], rows)
    assert swapped[1] is not None
    assert torch.equal(swapped[1], codes)


def test_weights_without_places_are_told() -> None:
    scene = Scene()
    shape = 2, HEADS, 7, 7
    parameters = "its weights come from parameters alone, not from queries and keys"
    assert reason(scene.product(learned(*shape), scene.wide)) == parameters
    beyond = "could not be traced from the pixels beyond fft"
    assert reason(scene.product(lost("fft", *shape), scene.wide)) == f"its queries or keys {beyond}"
    assert reason(scene.product(lost("fft", *shape), lost("other"))) == f"its tokens {beyond}"
    assert reason(scene.product(foreign(*shape), scene.wide)) == "its tokens come from another input of the model (text)"
    channels = Places("placed", scene.tokens[:, None, None].expand(2, HEADS, SIZE, 7))
    assert kind(scene.product(lost("fft", 2, HEADS, SIZE, SIZE), channels)) == "channel"


def test_weights_with_one_code_each_belong_to_learned_queries() -> None:
    scene = Scene()
    columns = scene.tokens[:, None, None].expand(2, HEADS, QUERIES, 7)
    asked = Places("placed", columns, asked=True)
    assert kind(scene.product(asked, scene.wide)) == "pool"
    over_keys = "its softmax runs over the keys alone: no weight belongs to a pair of tokens"
    assert reason(scene.product(asked._replace(asked=False), scene.wide)) == over_keys
    assert kind(scene.product(Places("placed", columns[:, :, :1]), scene.wide)) == "pool"
    alone = scene.tokens[:, 3:4, None, None].expand(2, 1, 1, 1)
    only = scene.product(Places("placed", alone), Places("placed", alone.expand(2, 1, 1, SIZE)))
    assert only is not None
    assert only[0].queries == only[0].keys


def test_rows_of_weights_that_a_query_gives_alone_have_the_values_as_keys() -> None:
    scene = Scene()
    values = Places("placed", scene.tokens[:, :, None].expand(2, 7, SIZE))
    rows = Places("placed", scene.tokens[:, :QUERIES, None].expand(2, QUERIES, 7))
    found = scene.product(rows, values)
    assert found is not None
    assert (kind(found), found[0].keys, len(found[0].queries)) == ("cross", LAYOUT, QUERIES)
    from_rows = "its weights come from one token each: no key comes from the image"
    assert reason(scene.product(rows._replace(asked=True), whole("learned", (2, 7, SIZE), CPU, "table"))) == from_rows
    lost_rows = rows.codes.clone()
    lost_rows[:, 1] = LOST
    named = reason(scene.product(Places("placed", lost_rows, name="sort"), values))
    assert named == "its tokens could not be traced from the pixels beyond sort"
    same_rows = Places("placed", rows.codes[:, :1].expand(2, QUERIES, 7))
    assert reason(scene.product(same_rows, values)) == from_rows


def test_rows_of_several_groups_may_be_heads_or_queries_of_one_cell_and_have_no_keys() -> None:
    scene = Scene()
    rows = Places("placed", scene.tokens[:, None, :QUERIES, None].expand(2, HEADS, QUERIES, 7))
    assert "no key comes from the image" in str(reason(scene.product(rows, scene.wide)))


def test_rows_whose_softmax_ran_over_pairs_of_tokens_have_no_keys() -> None:
    scene = Scene()
    values = Places("placed", scene.tokens[:, :, None].expand(2, 7, SIZE))
    rows = Places("placed", scene.tokens[:, :QUERIES, None].expand(2, QUERIES, 7))
    scene.put(3, rows._replace(columns=scene.tokens[:, None].expand(2, QUERIES, 7)))
    entry: Any = SimpleNamespace(outs=[None, SimpleNamespace(slot=3)])
    scene.tape.entries = [entry]
    scene.tape.weights = {1: frozenset({0})}
    assert "no key comes from the image" in str(reason(scene.product(rows, values)))
    scene.put(3, rows)
    assert kind(scene.product(rows, values)) == "cross"


def test_an_unexpected_arrangement_is_told() -> None:
    scene = Scene()
    flat = Places("placed", scene.tokens[0, 0].clone())
    scene.put(1, flat)
    scene.put(2, flat)
    call = Attention("attn", 0, 0, (Operand(1), Operand(2), Operand(2)), True, (2, HEADS), 7, 7)
    assert reason(locate(scene.tracer, scene.tape, call)) == "its tokens could not be traced from the pixels"


def test_one_query_of_two_and_two_of_two_are_told_apart() -> None:
    scene = Scene()
    two = scene.tokens[:, None, :2, None].expand(2, HEADS, 2, 7)
    assert "come from one token each" in str(reason(scene.product(Places("placed", two, asked=True), scene.wide)))
    mixed = torch.cat([two[..., :1], scene.tokens[:, None, None, 1:].expand(2, HEADS, 2, 6)], -1)
    told = "its weights come from one token each: no key comes from the image"
    assert reason(scene.product(Places("placed", mixed), scene.wide)) == told
    same = scene.tokens[:, 3:4, None, None].expand(2, HEADS, 2, 7)
    assert reason(scene.product(Places("placed", same), scene.wide)) == told


def test_products_without_heads_may_be_gates() -> None:
    scene = Scene()
    weights = Places("placed", scene.tokens[:, :, None].expand(2, 7, 7), scene.tokens[:, None].expand(2, 7, 7))
    plain = Permuted(None, None, (0, 1, 2))

    def gate(tokens: Tensor) -> bool:
        scene.put(1, weights)
        scene.put(2, Places("placed", tokens[..., None].expand(2, 7, SIZE)))
        operands = Operand(1, axes=plain, weighs=True), Operand(2, axes=plain)
        call = Attention("attn", 0, 0, operands, False, (2,), 7, 7, position=0, doubtful=True)
        return locate(scene.tracer, scene.tape, call) is None

    assert not gate(scene.tokens)
    assert gate(scene.tokens[:, 3:4].expand(2, 7))
    assert gate(torch.cat([scene.tokens[:1].expand(2, 7)[:, :6], scene.tokens[1:, 6:].expand(2, 1)], 1))
    assert not gate(torch.cat([scene.tokens[:, :6], torch.full((2, 1), PADDING)], 1))


def test_rows_and_columns_of_sets_are_exchanged_only_if_both_lie_so() -> None:
    scene = Scene()
    rows = scene.tokens[:, :, None].expand(2, 7, QUERIES)
    sets = scene.asking[:, None].expand(2, 7, QUERIES)

    def pairs(codes: Tensor, columns: Tensor) -> tuple[bool, bool]:
        """Return whether rows and columns stay, and whether they are exchanged."""
        first, second = weight_codes.codes_of_pairs(scene.tracer, Places("placed", codes, columns), ())
        assert second is not None
        stay = torch.equal(first, codes) and torch.equal(second, columns)
        return stay, torch.equal(first, columns) and torch.equal(second, codes)

    assert pairs(rows, sets) == (True, False)
    assert pairs(rows.mT, sets.mT) == (False, True)
    varied = rows.mT + torch.arange(7)[:, None].expand(7, 7)[:QUERIES]
    assert pairs(varied, sets.mT) == (True, False)
    assert pairs(rows.mT, sets.mT + torch.arange(7)) == (True, False)


def test_values_may_lack_the_axis_of_heads() -> None:
    keys = torch.arange(14).view(2, 1, 7).expand(2, HEADS, 7)
    assert locations._are_equal(torch.arange(7), keys[:1])
    assert not locations._are_equal(torch.arange(7), keys)
    assert locations._are_equal(keys, keys[:, :1])
    assert locations._are_equal(keys, keys)
    assert not locations._are_equal(keys, keys.flip(-1))
