"""Conclusions from tapes whose calls and places are given: attention that is not recorded, wanted tokens, and calls in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.capturing.behind import put_in_slot
from visattn.core.capturing.following.conclusions import SAMPLED, Conclusions, Located, concluded
from visattn.core.capturing.placing.nodes import Facts, Node
from visattn.core.capturing.placing.places import UNWATCHED, Places, whole
from visattn.core.capturing.placing.steps import Step
from visattn.core.capturing.tokens.arrangement import Arrangement
from visattn.core.capturing.trace.operations import EDITED, Operation, operation_of
from visattn.core.capturing.trace.tape import Attention, Entry, Made, Operand, Outside, Ref, Tape
from visattn.core.geometry import Box
from visattn.core.records import TokenLayout

BOX, CPU = Box(0.0, 0.0, 12.0, 20.0), torch.device("cpu")
SDPA, HEADS, SIZE = F.scaled_dot_product_attention, 3, 4
GRID = TokenLayout("tokens", (), (2, 3), BOX)


class Scene:
    """Two images of two by three patches; tensors are put into slots with given places."""

    def __init__(self, *wanted: int) -> None:
        self.tape = Tape(outside={0: Outside("pixels", "x", torch.Size((2, 3, 12, 20)), True)})
        self.made = Conclusions(self.tape, wanted)
        self.tracer = self.made._follower
        planes = self.tracer.planes
        self.codes = planes.codes(planes.grid(2, 3, BOX)).flatten(1)

    def tokens(self, **more: Any) -> Places:
        return Places("placed", self.codes[:, None, :, None].expand(2, HEADS, 6, SIZE), **more)

    def put(self, slot: int, places: Places, *, descends: bool = True) -> Made:
        if descends:
            self.tape.descends.add(slot)
        return put_in_slot(self.tape, self.tracer.shadows, slot, places)

    def call(self, func: Any, reads: tuple[int, ...], *outs: Made | None, layer: str = "attn", **more: Any) -> Entry:
        more = {"before": (None,) * len(outs), "operation": operation_of(func)} | more
        operation = more.pop("operation")
        entry = Entry(func, operation, tuple(Ref(slot) for slot in reads), {}, outs, layer, **more)
        self.tape.entries.append(entry)
        return entry

    def attend(
        self, slot: int, *, layer: str = "attn", descends: bool = True, seconds: tuple[Made | None, ...] = ()
    ) -> Attention:
        """Add fused attention among the tokens in slot 1."""
        call = Attention(layer, 0, 0, (Operand(1), Operand(1), Operand(1)), True, (2, HEADS), 6, 6)
        self.call(SDPA, (1, 1, 1), self.put(slot, self.tokens(), descends=descends), *seconds, layer=layer, attention=call)
        return call


def located(kind: Any = "self", reason: str | None = None) -> tuple[Arrangement, tuple[str, int]]:
    return Arrangement(kind, GRID, GRID, reason=reason), ("", 0)


# --- attention that is not recorded


def numbers(softmaxes: tuple[int, ...] = (), samples: tuple[int, ...] = ()) -> Attention:
    return Attention("a", 0, 0, (), True, (2,), 6, 6, softmaxes=frozenset(softmaxes), samples=samples)


def test_softmaxes_and_samples_of_recorded_calls_are_seen() -> None:
    scene = Scene()
    for layer in ("a", "b", "c"):
        scene.call(F.grid_sample, (), None, layer=layer)
    scene.tracer.unseen = {"x": "does something"}
    scene.tracer.sampled = {0: None, 2: None}
    scene.made._softmaxes = {1: ("d", "one"), 3: ("e", "two")}
    scene.made._note_unseen(scene.tape, {})
    assert scene.made.unseen == {"x": "does something", "a": SAMPLED, "c": SAMPLED, "d": "one", "e": "two"}
    scene.made._note_unseen(scene.tape, {numbers((1,), (2,)): located()[0]})
    assert scene.made.unseen == {"x": "does something", "a": SAMPLED, "e": "two"}
    scene.made._note_unseen(scene.tape, {numbers((1, 3), (0, 2)): located()[0]})
    assert scene.made.unseen == {"x": "does something"}
    assert scene.tracer.unseen == {"x": "does something"}


@pytest.mark.parametrize(
    ("kind", "shape", "floating", "told"),
    [
        ("unknown", (2, 6, 4), True, True),
        ("unknown", (2, 3, 6, 4), True, True),
        ("unknown", (2, 6), True, False),
        ("unknown", (2, 6, 4), False, False),
        ("buffer", (2, 6, 4), True, False),
        ("buffer", (2, 6), False, False),
    ],
)
def test_tensors_of_unknown_origin_are_told_unless_they_are_small(
    kind: str, shape: tuple[int, ...], floating: bool, told: bool
) -> None:
    scene = Scene()
    scene.tape.outside[7] = Outside(kind, "", torch.Size(shape), floating)
    scene.made._note_unseen(scene.tape, {})
    assert scene.made.unseen == ({"": f"continues with {UNWATCHED}"} if told else {})


def test_edited_weights_are_known_although_no_call_made_them() -> None:
    scene = Scene()
    scene.tape.outside[7] = Outside("unknown", "", torch.Size((2, 3, 6, 6)), True)
    edited = Operation(EDITED, True, False, False, False, False, -1)
    scene.call(F.relu, (8, 7), None)
    scene.call(F.relu, (), None, operation=edited)
    scene.made._note_unseen(scene.tape, {})
    assert scene.made.unseen
    scene.call(F.relu, (8, 7), None, operation=edited)
    scene.made._note_unseen(scene.tape, {})
    assert scene.made.unseen
    scene.call(F.relu, (7, 8), None, operation=edited)
    scene.made._note_unseen(scene.tape, {})
    assert scene.made.unseen == {}


@pytest.mark.parametrize(("output", "told"), [((), False), ((-1,), True), ((3, -1), True), ((0, 1, 2, -2), False)])
def test_outputs_of_unknown_origin_are_told(output: tuple[int, ...], told: bool) -> None:
    scene = Scene()
    scene.tape.output = output
    scene.made._note_unseen(scene.tape, {})
    assert bool(scene.made.unseen) is told


# --- calls


def test_calls_are_located_in_the_order_of_the_tape() -> None:
    scene = Scene()
    scene.put(1, scene.tokens())
    first, second = scene.attend(2), scene.attend(3, layer="next")
    scene.made._follow(scene.tape)
    assert scene.tracer.at == 2
    assert list(scene.made.calls) == [first, second]
    for call in (first, second):
        found = scene.made.calls[call]
        assert found is not None
        assert (found[0].kind, found[0].queries, found[1]) == ("self", GRID, ("", 0))
    assert [scene.tracer.places(slot).behind for slot in (1, 2, 3)] == [None, (1, "attn", 0), (2, "next", 0)]
    third = Attention("last", 4, 0, (Operand(2), Operand(3), Operand(3)), True, (2, HEADS), 6, 6)
    answer = scene.made.of_call(scene.tape, third)
    assert answer is not None
    assert (answer[0].kind, answer[1]) == ("cross", ("next", 0))
    assert scene.made.calls[third] == answer


def test_a_call_that_was_located_before_is_not_located_again() -> None:
    scene = Scene()
    scene.put(1, scene.tokens())
    call = scene.attend(2)
    known: Located = located("channel")
    scene.made.calls[call] = known
    scene.made._follow(scene.tape)
    assert scene.made.calls[call] is known
    assert scene.tracer.places(2).behind is None  # channels keep the tokens of their values


def test_a_gate_is_no_attention_that_tokens_pass() -> None:
    scene = Scene()
    scene.put(1, scene.tokens())
    call = scene.attend(2)
    scene.made.calls[call] = None
    scene.made._follow(scene.tape)
    assert scene.tracer.places(2).behind is None


@pytest.mark.parametrize("descends", [True, False])
@pytest.mark.parametrize("lost", [True, False])
def test_calls_without_places_that_ignore_the_image_are_apart(descends: bool, lost: bool) -> None:
    scene = Scene()
    scene.put(1, whole("lost", (2, HEADS, 6, SIZE), CPU, "fft") if lost else scene.tokens())
    call = scene.attend(2, descends=descends, seconds=(scene.put(9, scene.tokens(), descends=not descends),))
    scene.made._follow(scene.tape)
    found = scene.made.calls[call]
    assert found is not None
    assert found[0].queries.space == ("tokens" if not lost else "unknown" if descends else "apart")
    assert (found[0].reason is not None) is lost


def test_softmaxes_of_torch_over_tokens_are_noted() -> None:
    scene = Scene()
    scene.put(1, scene.tokens())
    over, within = scene.tokens(), scene.tokens()
    for number, (places, dim, own) in enumerate([(over, 2, True), (within, 3, True), (over, 2, False)]):
        made = scene.put(number + 2, places)
        operation = operation_of(torch.softmax)._replace(own=own)
        entry = Entry(torch.softmax, operation, (Ref(1), dim), {}, (made,), f"layer{number}", before=(None,))
        scene.made._note(number, entry, None)
    relu = Entry(torch.relu, operation_of(torch.relu), (Ref(1), 2), {}, (scene.put(5, over),), "relu", before=(None,))
    scene.made._note(3, relu, None)
    told = "has a softmax over tokens whose product with values is not recognized"
    assert scene.made._softmaxes == {0: ("layer0", told)}


def test_results_of_a_call_that_are_no_tensors_are_passed_over() -> None:
    scene = Scene()
    scene.put(1, scene.tokens())
    made = scene.put(2, scene.tokens())
    call = Attention("attn", 0, 0, (Operand(1), Operand(1), Operand(1)), True, (2, HEADS), 6, 6)
    scene.made._note(0, Entry(SDPA, operation_of(SDPA), (), {}, (None, made), "", attention=call), located())
    assert scene.tracer.places(2).behind == (1, "attn", 0)
    scene.made._note(1, Entry(SDPA, operation_of(SDPA), (), {}, (None,), "", attention=call), located())
    scene.made._note(2, Entry(F.relu, operation_of(F.relu), (), {}, (scene.put(3, scene.tokens()),), ""), None)
    assert scene.tracer.places(3).behind is None


# --- tokens that are wanted


def arranged(scene: Scene) -> dict[int, bool]:
    return {slot: tokens is not None for slot, tokens in scene.made._tokens.items()}


def test_wanted_tensors_are_arranged_where_they_are_made_or_changed() -> None:
    scene = Scene(1, 2, 3, 5)
    rows = Places("placed", scene.codes[..., None].expand(2, 6, SIZE))
    for slot in (1, 2, 3, 4, 5):
        scene.put(slot, rows)
    scene.made._note(0, Entry(F.relu, operation_of(F.relu), (), {}, (None, Made(2, rows.shape, True)), ""), None)
    assert arranged(scene) == {2: True}
    changed = Entry(F.relu, operation_of(F.relu), (), {}, (Made(4, rows.shape, True),), "", rewritten=((2, 3), (4, 4)))
    scene.made._note(1, changed, None)
    assert arranged(scene) == {2: True, 3: True}
    scene.tape.outside[1] = scene.tape.outside[4] = Outside("input", "", rows.shape, True)
    scene.made._follow(scene.tape)
    assert arranged(scene) == {1: True, 2: True, 3: True}


def test_a_wanted_tensor_of_the_model_is_arranged_once_as_it_is_at_first() -> None:
    scene = Scene(1)
    rows = Places("placed", scene.codes[..., None].expand(2, 6, SIZE))
    scene.put(1, rows)
    scene.tape.outside[1] = Outside("input", "", rows.shape, True)
    scene.made._follow(scene.tape)
    scene.put(1, whole("lost", (2, 6, SIZE), CPU, "fft"))
    scene.made._follow(scene.tape)
    assert arranged(scene) == {1: True}
    tokens = scene.made.tokens(1)
    assert tokens is not None
    assert tokens.layout == GRID


def test_conclusions_are_drawn_again_if_more_is_wanted() -> None:
    tape = Tape(outside={0: Outside("pixels", "x", torch.Size((2, 3, 12, 20)), True)})
    tape.nodes[0], tape.origins[0] = Node(0), ("pixels", "x")
    tape.facts.append(Facts(torch.Size((2, 3, 12, 20)), (720, 240, 20, 1), 0, 0, True, True))
    first = concluded(tape)
    assert concluded(tape) is first
    wider = concluded(tape, [0])
    assert wider is not first
    assert concluded(tape) is wider
    assert concluded(tape, [0]) is wider
    tokens = wider.tokens(0)
    assert tokens is not None
    assert tokens.layout.grid == (12, 20)
    tape.conclusions = "others"
    assert isinstance(concluded(tape), Conclusions)


# --- the readout


def read(scene: Scene, arrangements: dict[Attention, Arrangement], *output: int) -> tuple[list[int], bool]:
    scene.tape.output = output
    scene.made._read(scene.tape, arrangements)
    cut = scene.made.cut
    assert (scene.made.readouts is None) is (cut is None)
    return ([] if cut is None else [part.slot for part in cut.parts]), cut is not None and cut.parts[0].tokens is None


def by_queries(scene: Scene, *, queries: int = 1, kind: Any = "pool") -> Any:
    """Return the cut behind two calls, the second of which has learned queries."""
    scene.put(1, scene.tokens())
    first, second = scene.attend(2), scene.attend(3)
    scene.put(3, whole("learned", (2, HEADS, queries, SIZE), CPU), descends=True)
    scene.put(4, whole("learned", (2, SIZE), CPU), descends=True)
    scene.call(torch.relu, (3,), Made(4, torch.Size((2, SIZE)), True))
    names = TokenLayout("pool", tuple(f"query{i}" for i in range(queries)), (), BOX)
    return read(scene, {first: located()[0], second: Arrangement(kind, names, GRID)}, 4)


def test_the_cut_lies_behind_the_last_call_that_comes_from_the_image() -> None:
    assert by_queries(Scene()) == ([3], True)
    assert by_queries(Scene(), queries=2) == ([], False)
    assert by_queries(Scene(), kind="cross") == ([], False)


def flat(scene: Scene, slot: int, *, descends: bool = True) -> Made:
    return scene.put(slot, Places("placed", scene.codes[..., None].expand(2, 6, SIZE)), descends=descends)


def test_calls_that_are_not_recorded_or_ignore_the_image_are_not_the_last() -> None:
    scene = Scene()
    recorded, ignored = numbers(), numbers()
    scene.call(torch.relu, (), flat(scene, 1))
    scene.call(SDPA, (1,), None, flat(scene, 2), attention=recorded)
    scene.call(torch.relu, (2,), flat(scene, 3))
    scene.call(SDPA, (3,), flat(scene, 5, descends=False), None, attention=ignored)
    both = {recorded: located()[0], ignored: located()[0]}
    assert read(scene, both, 3) == ([2], False)
    cut = scene.made.cut
    assert cut is not None
    assert (cut.entries, cut.outputs) == ((2,), (3,))
    other = Scene()
    other.call(SDPA, (), flat(other, 5, descends=False), attention=ignored)
    assert read(other, {ignored: located()[0]}, 5) == ([], False)
    assert read(other, {}, 5) == ([], False)


def test_all_layouts_of_recorded_calls_are_known_to_the_cut() -> None:
    names = TokenLayout("pool", ("query0", "query1"), (), BOX)
    for queries, keys, found in ((GRID, names, True), (names, GRID, True), (names, names, False)):
        scene = Scene()
        call = numbers()
        scene.call(SDPA, (), flat(scene, 5), attention=call)
        assert read(scene, {call: Arrangement("cross", queries, keys)}, 5) == (([5] if found else []), False)


def test_the_readout_is_unknown_behind_a_call_with_an_unexpected_result() -> None:
    scene = Scene()
    scene.put(1, scene.tokens())
    call = scene.attend(2)
    scene.call(F.relu, (2,), Made(77, torch.Size((2, 6)), True))  # a slot without a node
    scene.tape.output = (77,)
    done = scene.made.completed(scene.tape)
    assert done is scene.made
    assert (list(done.calls), done.cut, done.readouts) == ([call], None, None)
    assert not hasattr(done, "_follower")


# --- attention that may be recorded


@pytest.mark.parametrize("recorded", [True, False])
def test_products_of_a_call_that_is_a_gate_are_told(recorded: bool) -> None:
    scene = Scene()
    rows = Places("placed", scene.codes[..., None].expand(2, 6, SIZE))
    scores = Places("placed", scene.codes[..., None].expand(2, 6, 6), scene.codes[:, None].expand(2, 6, 6))
    for slot, places in ((1, scores), (2, rows), (3, rows)):
        scene.put(slot, places)
    call = Attention("attn", 0, 0, (Operand(1), Operand(2)), False, (2,), 6, 6)
    scene.made.calls[call] = located() if recorded else None
    nodes = scene.tape.nodes
    step = Step(torch.ops.aten.bmm.default, {"self": nodes[1], "mat2": nodes[2]}, (nodes[3],))
    scene.call(torch.bmm, (1, 2), Made(3, rows.shape, True), attention=call, steps=(step,))
    scene.made._follow(scene.tape)
    assert scene.tracer.unseen == ({} if recorded else {"attn": "multiplies scores by values with bmm"})


def test_a_softmax_that_returns_no_tensor_first_is_passed_over() -> None:
    scene = Scene()
    made = scene.put(2, whole("lost", (2, 6, SIZE), CPU, "fft"))
    for outs, told in (((None, made), False), ((made, None), True)):
        entry = Entry(torch.softmax, operation_of(torch.softmax), (Ref(1), 1), {}, outs, "attn")
        assert (scene.made._over_tokens(entry) is not None) is told
