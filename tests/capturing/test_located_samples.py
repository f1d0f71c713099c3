"""Samples of maps whose cells are known, as the keys of the queries that weight them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.capturing.behind import put_in_slot
from visattn.core.capturing.following.sampling import sampled
from visattn.core.capturing.following.tape_readouts import _apart_from_the_model
from visattn.core.capturing.following.tracing import TokenTracer
from visattn.core.capturing.placing.places import Places, whole
from visattn.core.capturing.tokens.arrangement import SampledArrangement
from visattn.core.capturing.tokens.points import Drift
from visattn.core.capturing.trace.operations import operation_of
from visattn.core.capturing.trace.product_axes import Permuted
from visattn.core.capturing.trace.tape import Attention, Entry, Made, Operand, Outside, Ref, Tape
from visattn.core.geometry import Box

BATCH, QUERIES, SIZE = 2, 5, 4
BOX, CPU = Box(0.0, 0.0, 12.0, 20.0), torch.device("cpu")
WEIGHTS, VALUES = 8, 9


class Scene:
    """Five queries of each image that sample two points of a map of 2 x 3 cells, and three of one of 4 x 5."""

    def __init__(self) -> None:
        self.tape = Tape(outside={0: Outside("pixels", "x", torch.Size((BATCH, 3, 12, 20)), True)})
        for slot, points in ((4, 2), (5, 3)):
            self.call(F.grid_sample, Ref(slot - 2), Ref(7), "bilinear", "zeros", False, made=slot, points=points)
        self.call(torch.cat, [Ref(4), Ref(5)], -1, made=VALUES, points=5)
        self.tracer = TokenTracer(self.tape)
        self.planes = self.tracer.planes
        self.coarse, self.finest = (self.planes.codes(self.planes.grid(*size, BOX)) for size in ((2, 3), (4, 5)))
        self.tracer.sampled = {0: self.coarse, 1: self.finest}
        self.queries = self.planes.codes(self.planes.set_of("query_embed", QUERIES))
        self.values = Places("placed", self.queries[:, None, :, None].expand(BATCH, SIZE, QUERIES, 5))
        self.weights = whole("learned", (BATCH, QUERIES, 1, 5), CPU)

    def call(self, func: Any, *args: Any, made: int, points: int) -> None:
        result = Made(made, torch.Size((BATCH, SIZE, QUERIES, points)), True)
        self.tape.entries.append(Entry(func, operation_of(func), args, {}, (result,), "attn", before=(None,)))

    def put(self, slot: int, places: Places) -> None:
        put_in_slot(self.tape, self.tracer.shadows, slot, places)

    def found(self) -> SampledArrangement | None:
        self.put(WEIGHTS, self.weights)
        self.put(VALUES, self.values)
        operands = Operand(WEIGHTS), Operand(VALUES, axes=Permuted(None, (0, 2, 3, 1), (0, 1, 2)))
        call = Attention("attn", 0, 0, operands, False, (BATCH, QUERIES), 1, 5, samples=(0, 1))
        arrangement = sampled(self.tracer, self.tape, call)
        assert arrangement is None or isinstance(arrangement, SampledArrangement)
        return arrangement

    def with_map(self, codes: Tensor | None, number: int = 0) -> SampledArrangement | None:
        self.tracer.sampled[number] = codes
        return self.found()


def test_keys_of_samples_are_the_cells_of_the_finest_map() -> None:
    found = Scene().found()
    assert found is not None
    assert (found.kind, found.keys.grid, found.keys.box, found.queries.prefix[0]) == ("sampled", (4, 5), BOX, "query0")
    assert len(found.queries) == QUERIES
    samples = found.samples
    assert (samples.size, samples.lead, samples.order.tolist()) == ((4, 5), (BATCH, QUERIES), list(range(10)))
    assert samples.number[3].tolist() == [6, 7, 29, 30, 31]
    assert samples.maps == (((2.5, 2), (2, 1.5)), ((2.5, 2), (2, 1.5)))


def test_maps_of_unknown_cells_have_no_samples() -> None:
    assert Scene().with_map(None) is None
    scene = Scene()
    assert scene.with_map(scene.coarse.flip(2)) is None
    assert scene.with_map(F.pad(scene.coarse, (1, 0), value=-1)) is None
    assert scene.with_map(scene.coarse.flip(0)) is None  # of other images than the second map
    assert scene.with_map(scene.coarse) is not None
    assert scene.with_map(scene.finest[:1], 1) is None


def test_only_interpolated_samples_with_zeros_outside_are_located() -> None:
    for args in (("nearest", "zeros"), ("bilinear", "border")):
        scene = Scene()
        scene.tape.entries[0].args = (Ref(2), Ref(7), *args)
        assert scene.found() is None
    scene = Scene()
    scene.tape.entries[0].args = (Ref(2), Ref(7))
    assert scene.found() is not None
    scene.tape.entries[0].kwargs = {"mode": "bicubic"}
    assert scene.found() is None


def test_queries_must_be_known_and_hold_their_own_values() -> None:
    scene = Scene()
    scene.weights = scene.weights._replace(kind="placed", codes=scene.queries[:, :, None, None].expand(BATCH, QUERIES, 1, 5))
    assert scene.found() is not None
    scene.weights = scene.weights._replace(drift=Drift(0.75))
    assert scene.found() is None
    scene = Scene()
    scene.values = scene.values._replace(codes=scene.values.codes + torch.arange(5, dtype=torch.int32))
    assert scene.found() is None
    scene = Scene()
    scene.values = scene.values._replace(codes=scene.values.codes + torch.arange(SIZE, dtype=torch.int32)[:, None, None])
    assert scene.found() is None
    scene = Scene()
    tokens = torch.cat([scene.coarse.flatten(1)[:, :2], scene.finest.flatten(1)[:, :3]], 1)
    scene.values = scene.values._replace(codes=tokens[:, None, :, None].expand(BATCH, SIZE, QUERIES, 5))
    assert scene.found() is None  # of two grids
    scene.values = whole("lost", (BATCH, SIZE, QUERIES, 5), CPU)
    assert scene.found() is None


def test_graphs_are_recorded_apart_from_the_modes_of_a_model() -> None:
    saved: list[Tensor] = []
    weight = torch.ones(2, 2, requires_grad=True)

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, keep)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), hooks, _apart_from_the_model(CPU):
        product = weight @ (weight * 2)
    assert (product.dtype, product.requires_grad, product.is_inference(), saved) == (torch.float32, True, False, [])


def test_queries_may_lie_on_one_grid_each_once() -> None:
    scene = Scene()

    def at(tokens: Tensor) -> SampledArrangement | None:
        scene.values = scene.values._replace(codes=tokens[:, None, :, None].expand(BATCH, SIZE, QUERIES, 5))
        return scene.found()

    found = at(scene.coarse.flatten(1)[:, :QUERIES])
    assert found is not None
    assert (found.queries.grid, found.queries.holes, found.keys.grid) == ((2, 3), (5,), (4, 5))
    assert at(scene.coarse.flatten(1)[:, [0, 0, 1, 2, 3]]) is None


def test_maps_of_one_row_are_located_and_maps_with_padding_behind_are_not() -> None:
    scene = Scene()
    line = scene.planes.codes(scene.planes.grid(1, 4, BOX))
    column = scene.planes.codes(scene.planes.grid(4, 1, BOX))
    assert scene.with_map(line) is not None
    assert scene.with_map(column) is not None
    assert scene.with_map(F.pad(scene.coarse, (0, 1), value=-1)) is None
    assert scene.with_map(F.pad(scene.coarse, (0, 0, 1, 0), value=-1)) is None
