"""What the tracer notes of calls that it sees, and samples and patches whose places are known only in part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.capturing.behind import BOX, CPU, OPS, SIZE, TOKENS, put_in_slot
from visattn.core.capturing.following import sampling
from visattn.core.capturing.following.received import cells_of, color_axis
from visattn.core.capturing.following.sums import SCORES
from visattn.core.capturing.following.tracing import TokenTracer
from visattn.core.capturing.placing.nodes import Node
from visattn.core.capturing.placing.places import Places, whole
from visattn.core.capturing.placing.steps import Step
from visattn.core.capturing.tokens.planes import Plane
from visattn.core.capturing.trace.operations import operation_of
from visattn.core.capturing.trace.tape import Attention, Entry, Made, Operand, Outside, Ref, Tape
from visattn.core.geometry import Box


class Scene:
    """Two images of two by three patches; tensors are put into slots with given places."""

    def __init__(self) -> None:
        self.tape = Tape(outside={0: Outside("pixels", "x", torch.Size((2, 3, 12, 20)), True)})
        self.tracer = TokenTracer(self.tape)
        planes = self.tracer.planes
        self.codes = planes.codes(planes.grid(2, 3, BOX)).flatten(1)
        self.rows = Places("placed", self.codes[..., None].expand(2, TOKENS, SIZE))
        self.scores = Places(
            "placed", self.codes[..., None].expand(2, TOKENS, TOKENS), self.codes[:, None].expand(2, TOKENS, TOKENS)
        )

    def put(self, slot: int, places: Places) -> Made:
        return put_in_slot(self.tape, self.tracer.shadows, slot, places)

    def node(self, slot: int) -> Node:
        return self.tape.nodes[slot]

    def see(self, reads: tuple[int, ...], *outs: Made | None, own: bool = True, attends: bool = False, **more: Any) -> Entry:
        more = {"before": (None,) * len(outs), "layer": "attn"} | more
        operation = operation_of(F.relu)._replace(own=own)
        entry = Entry(F.relu, operation, tuple(Ref(slot) for slot in reads), {}, outs, **more)
        self.tracer.see(entry, attends=attends)
        return entry


def learned(*shape: int) -> Places:
    return whole("learned", shape, CPU, "w")


@pytest.mark.parametrize("attends", [True, False])
def test_products_of_scores_and_values_are_told_unless_they_are_recorded(attends: bool) -> None:
    scene = Scene()
    scene.put(1, scene.scores)
    scene.put(2, scene.rows)
    made = scene.put(3, learned(2, TOKENS, SIZE))
    step = Step(OPS.bmm.default, {"self": scene.node(1), "mat2": scene.node(2)}, (scene.node(3),))
    scene.see((1, 2), made, attends=attends, steps=(step,))
    assert scene.tracer.unseen == ({} if attends else {"attn": f"{SCORES} with relu"})
    assert scene.tracer.at == 1


@pytest.mark.parametrize(
    ("own", "attends", "reads", "told"),
    [
        (False, False, "sr", True),
        (False, False, "rs", True),
        (False, False, "swr", True),
        (False, False, "s", False),
        (False, False, "ss", False),
        (False, False, "sw", False),
        (False, False, "rr", False),
        (False, False, "rw", False),
        (True, False, "sr", False),
        (False, True, "sr", False),
        (True, True, "sr", False),
    ],
)
def test_a_foreign_function_of_scores_and_values_may_be_attention(own: bool, attends: bool, reads: str, told: bool) -> None:
    scene = Scene()
    for slot, places in enumerate((scene.scores, scene.rows, learned(SIZE)), 1):
        scene.put(slot, places)
    made = scene.put(9, learned(2, TOKENS, SIZE))
    scene.see(tuple("?srw".index(kind) for kind in reads), made, own=own, attends=attends)
    assert scene.tracer.unseen == ({"attn": f"{SCORES} with relu"} if told else {})


@pytest.mark.parametrize(("own", "name"), [(True, "relu"), (False, "relu (not a torch function)")])
def test_what_an_unknown_operation_loses_is_named_after_the_call(own: bool, name: str) -> None:
    scene = Scene()
    scene.put(1, scene.rows)
    made = scene.put(2, scene.rows)
    scene.see((1,), made, own=own, steps=(Step(OPS._fft_r2c.default, {"self": scene.node(1)}, (scene.node(2),)),))
    found = scene.tracer.places(2)
    assert (found.kind, found.name) == ("lost", name)


def test_a_choice_of_a_step_is_that_of_its_call() -> None:
    scene = Scene()
    scene.put(1, scene.rows)
    steps = [Step(OPS.relu.default, {"self": scene.node(1)}, (scene.node(1),), choice=choice) for choice in (None, 4)]
    assert scene.see((1,), steps=tuple(steps)).choice == 4
    assert scene.see((1,), steps=tuple(steps[::-1])).choice == 4
    assert scene.see((1,), steps=tuple(steps[:1]), choice=2).choice == 2
    assert scene.see((1,), steps=(Step(None, {"read": scene.node(1)}),)).choice is None


def test_each_new_result_of_a_call_without_steps_gets_places() -> None:
    scene = Scene()
    scene.put(1, scene.rows)
    made = scene.put(2, scene.rows)
    scene.see((1,), None, Made(77, scene.rows.shape, True), Made(1, scene.rows.shape, True), made, before=(None, None, 1, None))
    assert scene.tracer.places(1) is scene.rows
    assert (scene.tracer.places(2).kind, scene.tracer.places(2).name) == ("lost", "relu")


@pytest.mark.parametrize(
    ("kind", "members", "known"),
    [("placed", True, True), ("placed", False, True), ("learned", True, True), ("learned", False, False), ("lost", True, False)],
)
def test_operands_are_known_if_they_are_placed_or_members_of_a_set(kind: Any, members: bool, known: bool) -> None:
    scene = Scene()
    scene.put(1, Places(kind, scene.rows.codes if members else torch.full((2, TOKENS, SIZE), -2)))
    assert (scene.tracer.of(Operand(1)) is not None) is known


# --- samples


def test_points_on_maps_of_odd_size_become_cells_of_the_finest() -> None:
    coarse, finest = Plane(0, (2, 3), Box(1, 2, 10, 21)), Plane(0, (4, 5), Box(0, 0, 16, 40))
    entry = Entry(F.grid_sample, operation_of(F.grid_sample), (Ref(1), Ref(2)), {}, (), "")
    (by_x, by_y), (from_x, from_y) = sampling._to_finest(coarse, finest, entry)
    assert (from_x - by_x, from_y - by_y) == pytest.approx((-0.25, -0.25))
    assert (from_x + by_x, from_y + by_y) == pytest.approx((2.125, 2.0))


def taped(*calls: tuple[Any, tuple[Any, ...], int, tuple[int, ...]]) -> Tape:
    """Return a tape of calls, each with its function, arguments, slot of its result, and shape."""
    entries = [
        Entry(func, operation_of(func), args, {}, (Made(slot, torch.Size(shape), True),), "") for func, args, slot, shape in calls
    ]
    return Tape(entries)


def test_numbers_move_with_the_samples_from_the_first_map_to_the_product() -> None:
    tape = taped(
        (F.grid_sample, (Ref(0), Ref(1)), 2, (2, 3)),
        (torch.transpose, (Ref(2), 0, 1), 3, (3, 2)),
        (torch.relu, (Ref(50),), 51, (3, 2)),
        (torch.sigmoid, (Ref(3),), 52, (3, 2)),
        (F.grid_sample, (Ref(0), Ref(1)), 4, (3, 1)),
        (torch.cat, ([Ref(3), Ref(4)], 1), 5, (3, 3)),
        (torch.matmul, (Ref(9), Ref(5)), 6, (3, 3)),
        (torch.transpose, (Ref(3), 0, 1), 7, (2, 3)),
    )
    operands = Operand(9), Operand(5)
    call = Attention("attn", 0, 0, operands, False, (), 1, 3, samples=(0, 4))
    tape.entries[6].attention = call

    def moved(slot: int = 5) -> Any:
        starts = {2: torch.arange(6).view(2, 3), 4: torch.arange(6, 9).view(3, 1)}
        other = Attention("attn", 0, 0, (Operand(9), Operand(slot)), False, (), 1, 3, samples=(0, 4))
        tape.entries[6].attention = other
        found = sampling._at_product(tape, other, starts)
        return None if found is None else found.tolist()

    assert moved() == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert moved(3) == [[0, 3], [1, 4], [2, 5]]
    assert moved(51) is None
    assert moved(52) is None
    assert moved(7) is None  # behind the product
    tape.entries[1].operation = tape.entries[1].operation._replace(own=False)
    assert moved() is None
    tape.entries[1].operation = operation_of(torch.transpose)
    tape.entries[1].outs = (None,)
    assert moved() is None
    tape.entries[1].outs = (Made(3, torch.Size((2, 3)), True),)  # of another shape than the move has
    assert moved() is None


def test_only_moves_and_joins_of_samples_have_their_numbers() -> None:
    numbers = {1: torch.arange(3), 2: torch.arange(3, 5)}

    def moved(func: Any, *args: Any) -> Any:
        found = sampling._moved(Entry(func, operation_of(func), args, {}, (), ""), numbers, torch.Size((3,)))
        return None if found is None else found.tolist()

    assert moved(torch.clone, Ref(1)) == [0, 1, 2]
    assert moved(torch.clone, Ref(3)) is None
    assert moved(torch.clone, 5) is None
    assert moved(torch.clone) is None
    assert moved(torch.cat, [Ref(1), Ref(2)]) == [0, 1, 2, 3, 4]
    assert moved(torch.cat, (Ref(2), Ref(1)), 0) == [3, 4, 0, 1, 2]
    assert moved(torch.cat, [Ref(1), Ref(3)]) is None
    assert moved(torch.cat, [Ref(1), 3]) is None
    assert moved(torch.cat, Ref(1)) is None
    assert moved(torch.cat) is None
    assert moved(torch.maximum, [Ref(1), Ref(1)]) is None


# --- received images


def test_single_images_have_their_colors_second_whatever_their_size() -> None:
    assert color_axis((2, 7, 3, 5)) == 1
    assert color_axis((2, 7, 3, 5, 5)) == 2


def test_a_single_padded_sequence_has_cells() -> None:
    rows = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij"), -1).flatten(0, 1)
    positions = F.pad(rows.flip(0), (0, 0, 0, 2))[None]
    found = cells_of(Tape(packed=((1, 2, 3),), positions=[positions]))
    assert found is not None
    assert found.tolist() == [5, 4, 3, 2, 1, 0, -1, -1]
