"""What is known of the results of operations, and which numbers that leave the tensors tell of the image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capturing.steps import CPU, at_work, grid, learned, members, placed, two_images
from visattn.core.capturing.placing import constants
from visattn.core.capturing.placing.follow import Follower
from visattn.core.capturing.placing.nodes import Nodes
from visattn.core.capturing.placing.numbers import holds_number
from visattn.core.capturing.placing.operation_table import ROWS, contents_of
from visattn.core.capturing.placing.places import FOREIGN, LEARNED, LOST, Places, whole
from visattn.core.capturing.placing.steps import Recorder, Step
from visattn.core.capturing.placing.work import Unproven
from visattn.core.capturing.tokens.planes import PADDING, Planes

aten = torch.ops.aten


class Pass:
    """A forward pass over tensors with known places."""

    def __init__(self, planes: Planes, *origins: Places, dtypes: tuple[torch.dtype, ...] = ()) -> None:
        kinds = dtypes or (torch.float32,) * len(origins)
        self.tensors = [torch.ones(places.shape, dtype=dtype) for places, dtype in zip(origins, kinds, strict=True)]
        self.nodes = Nodes(lambda _: None)
        self.recorder = Recorder(self.nodes, contents_of)
        for tensor in self.tensors:
            self.nodes.begin(tensor, "input", "x")
        self.nodes.settle()
        self.follower = Follower(planes, self.nodes.facts, origins.__getitem__)

    def run(self, call: Callable[..., Any]) -> Any:
        """Run a call on the tensors and return its result, after each step was followed."""
        with torch.no_grad(), self.recorder:
            result = call(*self.tensors)
        self.nodes.settle()
        for step in self.recorder.taken():
            self.follower.see(step)
        return result

    def of(self, tensor: Tensor) -> Places:
        return self.follower.shadows.of(self.nodes.of(tensor))

    def behind(self, call: Callable[..., Any]) -> Places:
        return self.of(self.run(call))

    def tells(self) -> bool:
        """Check whether a number may have left that comes from the image."""
        return self.follower.shadows.told


def tokens(planes: Planes, **fields: Any) -> Places:
    return placed(grid(planes, 3, 4).flatten(1)[..., None].expand(2, 12, 5), **fields)


def foreign(*shape: int, **fields: Any) -> Places:
    return whole("foreign", shape, CPU, "text")._replace(**fields)


KINDS: list[tuple[Callable[[Planes], tuple[Places, ...]], str, str]] = [
    (lambda planes: (learned(2, 12, 5, name="w"), learned(5)), "learned", "w"),
    (lambda planes: (learned(2, 12, 5, name="w"), foreign(5)), "foreign", "text"),
    (lambda planes: (foreign(2, 12, 5), whole("lost", (5,), CPU, "roll")), "lost", "roll"),
    (lambda planes: (learned(2, 12, 5), whole("lost", (5,), CPU, "roll")), "lost", "roll"),
    (lambda planes: (tokens(planes), learned(5)), "placed", ""),
    (lambda planes: (tokens(planes), whole("lost", (5,), CPU, "roll")), "lost", "roll"),
]


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_the_least_known_argument_says_what_is_known_of_a_result(number: int) -> None:
    made, kind, name = KINDS[number]
    planes = two_images()
    origins = made(planes)
    for order in (origins, origins[::-1]):
        result = Pass(planes, *order).behind(lambda a, b: a * b)
        assert (result.kind, result.name, result.shape) == (kind, name, (2, 12, 5))


def test_an_operation_without_a_rule_loses_image_tokens_and_keeps_what_others_are() -> None:
    planes = two_images()
    square = placed(grid(planes, 3, 4)[:, :3, :3], positions="")
    lost = Pass(planes, square).behind(lambda x: torch.linalg.inv_ex(x + torch.eye(3))[0])
    assert (lost.kind, lost.name) == ("lost", "linalg_inv_ex")
    for origin in (learned(2, 3, 3, name="w"), foreign(2, 3, 3)):
        kept = Pass(planes, origin).behind(lambda x: torch.linalg.inv_ex(x)[0])
        assert (kept.kind, kept.name) == (origin.kind, origin.name)
    called = Pass(planes, square)
    called.follower.call = "block.attention"
    assert called.behind(lambda x: torch.linalg.inv_ex(x)[0]).name == "block.attention"
    assert called.behind(lambda x: x.flatten(1).mean(0)).name == "block.attention"


def test_results_have_the_notes_of_all_arguments() -> None:
    planes = two_images()
    for a, b in ((False, True), (True, False), (False, False)):
        result = Pass(planes, tokens(planes, weighted=a), tokens(planes, weighted=b)).behind(torch.add)
        assert result.weighted is (a or b)
    result = Pass(planes, tokens(planes, behind=(1, "a", 0)), learned(5)._replace(behind=(4, "b", 0))).behind(torch.mul)
    assert result.behind == (4, "b", 0)


def test_sums_over_tokens_are_known_as_such_until_a_softmax() -> None:
    planes = two_images()
    state = Pass(planes, tokens(planes), tokens(planes))
    summed = state.run(lambda q, k: q.mT @ k)
    assert (state.of(summed).kind, state.of(summed).summed, state.of(summed).of_channels) == ("lost", True, True)
    scaled = state.run(lambda q, k: summed * 2)
    assert (state.of(scaled).summed, state.of(scaled).of_channels) == (True, True)
    soft = state.run(lambda q, k: summed.softmax(-1))
    assert (state.of(soft).summed, state.of(soft).of_channels) == (False, True)
    mixed = state.run(lambda q, k: summed + k[:, :5] * q.mT[:, :, :5])
    assert state.of(mixed).of_channels is False


def test_positions_and_flags_of_other_inputs_stay_such_until_they_read_a_table() -> None:
    planes = two_images()
    given = foreign(3, 4, positions="given")
    cases: list[tuple[tuple[Places, ...], Callable[..., Tensor], str]] = [
        ((given,), lambda a: a.flip(0), "given"),
        ((given,), lambda a: a * 2, "computed"),
        ((given, learned(3, 4)), torch.add, "computed"),
        ((given, foreign(3, 4)), torch.add, ""),
        ((foreign(3, 4), given), torch.add, ""),
        ((given, foreign(3, 4, positions="computed")), lambda a, b: torch.cat([a, b]), "computed"),
        ((learned(3, 4),), lambda a: a.flip(0), ""),
    ]
    for origins, call, positions in cases:
        assert Pass(planes, *origins).behind(call).positions == positions
    for kind, positions in (("given", ""), ("computed", "computed")):
        index = foreign(2, positions=kind)
        looked_up = Pass(planes, learned(6, 4), index, dtypes=(torch.float32, torch.int64))
        assert looked_up.behind(lambda table, index: torch.embedding(table, index)).positions == positions


def test_rows_that_another_input_picks_have_the_name_of_that_input() -> None:
    state = Pass(two_images(), learned(6, 4, name="word"), foreign(2), dtypes=(torch.float32, torch.int64))
    rows = state.behind(lambda table, index: torch.embedding(table, index))
    assert (rows.kind, rows.name) == ("foreign", "text")
    assert Pass(two_images(), learned(6, 4, name="word")).behind(lambda table: table.flip(0)).name == "word"


def test_a_result_that_only_chooses_constants_is_lost() -> None:
    planes = two_images()
    codes = torch.full((2, 12, 5), LEARNED, dtype=torch.int32)
    result = Pass(planes, placed(codes, name="choice")).behind(lambda x: x.flip(1))
    assert (result.kind, result.name) == ("lost", "choice")
    mixed = codes.clone()
    mixed[0, 0, 0] = PADDING
    assert Pass(planes, placed(mixed)).behind(lambda x: x.flip(1)).kind == "placed"


def test_lists_of_tensors_are_followed_one_by_one() -> None:
    planes = two_images()
    state = Pass(planes, tokens(planes), placed(tokens(planes).codes.flip(1)), learned(5), learned(12, 1))
    first, second = state.run(lambda a, b, c, d: torch._foreach_mul([a, b], [c, d]))
    assert torch.equal(state.of(first).codes, tokens(planes).codes)
    assert torch.equal(state.of(second).codes, tokens(planes).codes.flip(1))
    assert (state.of(first).weighted, state.of(second).weighted) == (False, True)
    state.run(lambda a, b, c, d: torch._foreach_add_([c, d], [1.0, 2.0]))
    assert [state.of(tensor).kind for tensor in state.tensors[2:]] == ["learned", "learned"]


def test_writes_are_followed_into_the_tensor_and_its_views() -> None:
    planes = two_images()
    state = Pass(planes, tokens(planes), learned(2, 12, 5))
    target = state.tensors[1]
    view = state.run(lambda x, z: z[:, :6])
    state.run(lambda x, z: z[:, 3:].copy_(x[:, 3:]))
    codes = tokens(planes).codes.clone()
    codes[:, :3] = LEARNED
    assert torch.equal(state.of(target).codes, codes)
    assert torch.equal(state.of(view).codes, codes[:, :6])
    state.run(lambda x, z: z.normal_())
    assert state.of(target).kind == "learned"
    foreign_write = Step(None, {"memory": state.nodes.memory_of(target)})
    state.follower.see(foreign_write)
    assert (state.of(target).kind, state.of(target).name) == ("lost", "a write that was not intercepted")


def test_a_copy_that_repeats_its_source_does_not_vary_along_that_axis() -> None:
    planes = two_images()
    state = Pass(planes, tokens(planes), learned(1, 1, 5))
    for call in (lambda x, w: w.repeat(1, 12, 1), lambda x, w: w.expand(1, 12, 5).clone()):
        repeated = state.run(call)
        assert state.follower.shadows.even(state.nodes.of(repeated)) == frozenset({0, 1})
        product = state.run(lambda x, w, repeated=repeated: x * repeated)
        assert state.of(product).weighted is False
    wide = state.run(lambda x, w: w.repeat(1, 1, 2))
    assert state.follower.shadows.even(state.nodes.of(wide)) == frozenset({0, 1})


# --- numbers that leave the tensors


def test_numbers_of_image_tokens_tell_and_flags_and_learned_numbers_do_not() -> None:
    planes = two_images()
    image = placed(grid(planes, 3, 4))
    for call, told in (
        (lambda x, w, p: x[0, 0, 0].item(), True),
        (lambda x, w, p: (x[0, 0, 0] > 0).item(), False),
        (lambda x, w, p: w[0].item(), False),
        (lambda x, w, p: p[0].item(), False),
        (lambda x, w, p: (x > 0).sum().item(), True),
        (lambda x, w, p: (x[0, 0, 0] > 0).sum().item(), False),
        (lambda x, w, p: (x[0, 0, :1] > 0).sum(0).item(), False),
        (lambda x, w, p: x[0, 0, :1].sum(0).item(), True),
    ):
        state = Pass(planes, image, learned(2), foreign(2, positions="given"))
        state.run(call)
        assert state.tells() is told
    state = Pass(planes, image)
    state.recorder.read(state.tensors[0])
    state.run(lambda x: None)
    assert state.tells()


def test_a_flag_that_was_overwritten_is_none() -> None:
    state = Pass(two_images(), placed(grid(two_images(), 3, 4)))
    flag = state.run(lambda x: (x[0, 0, 0] > 0).sum())
    state.run(lambda x: flag.add_(3))
    state.run(lambda x: flag.item())
    assert state.tells()


def test_once_a_number_has_left_results_that_hold_a_number_are_lost() -> None:
    planes = two_images()
    state = Pass(planes, tokens(planes))
    assert state.behind(lambda x: torch.full((3,), 2.0)).kind == "learned"
    assert state.behind(lambda x: x * 2).kind == "placed"
    state.run(lambda x: x[0, 0, 0].item())
    for call in (lambda x: torch.full((3,), 2.0), lambda x: x * 2):
        result = state.behind(call)
        assert (result.kind, result.name) == ("lost", "numbers that were read from a tensor")
    assert state.behind(lambda x: torch.zeros(3)).kind == "learned"
    assert state.behind(lambda x: x.flip(1)).kind == "placed"


@pytest.mark.parametrize(
    ("name", "given", "holds"),
    [
        ("full", {"size": [3], "fill_value": 2}, True),
        ("full", {"size": [3], "fill_value": 0}, False),
        ("full", {"size": [3], "fill_value": True}, False),
        ("zeros", {"size": [3], "dtype": 6}, False),
        ("zeros", {"n": 3, "m": 4, "steps": 5}, False),
        ("arange", {"end": 4}, False),
        ("arange", {"end": 4, "start": 1}, True),
        ("linspace", {"start": 0, "end": 4, "steps": 3}, True),
        ("mul", {"other": 0.5}, True),
        ("mul", {"other": 1j}, True),
        ("flip", {"dims": [1], "other": 3}, False),
        ("fill", {"value": 3}, True),
        ("lift_fresh", {}, True),
        ("lift", {}, True),
        ("unknown", {"value": 3}, True),
        ("unknown", {"dim": 3}, False),
    ],
)
def test_a_result_holds_a_number_unless_it_is_zero_a_size_or_an_axis(name: str, given: dict[str, Any], holds: bool) -> None:
    work = at_work(two_images(), name, (3,), self=learned(3), **given)
    assert holds_number(work, ROWS.get(name)) is holds


def test_lengths_that_the_image_sets_are_told_from_others() -> None:
    planes = two_images()
    image = placed(grid(planes, 3, 4)[0])
    for picked, counted in (
        (lambda x, w: x[x > 0], False),  # a mask that picks all tells no more than one flag
        (lambda x, w: x[x > 2], True),
        (lambda x, w: (x > 0).nonzero(), True),
        (lambda x, w: (x[0, 0] > 0).nonzero(), False),
        (lambda x, w: w.nonzero(), False),
    ):
        state = Pass(planes, image, learned(3))
        result = state.run(picked)
        state.recorder.read_length(result)
        state.run(lambda x, w: None)
        assert state.tells() is counted


def test_a_sum_of_as_many_ones_as_the_image_sets_is_lost() -> None:
    planes = two_images()
    image = placed(grid(planes, 3, 4)[0])
    state = Pass(planes, image, learned(3, 4))
    ones = state.run(lambda x, w: torch.ones_like(w[x > 2]))
    assert state.of(ones).kind == "learned"
    for call in (lambda x, w: ones.sum(), lambda x, w: ones.cumsum(0)):
        result = state.behind(call)
        assert (result.kind, result.name) == ("lost", "a length that depends on the image")
    for call in (lambda x, w: ones + 1, lambda x, w: ones.view(-1, 1), lambda x, w: ones[:, None].t(), lambda x, w: w.sum()):
        assert state.behind(call).kind == "learned"
    assert state.behind(lambda x, w: ones.flip(0)).kind == "lost"


# --- tensors that are made, and tables


def test_made_tensors_are_constants_zeros_or_unknown() -> None:
    work = at_work(two_images(), "x", (2, 3), (4,))
    for rule, kind, code in (
        (constants.constant, "learned", LEARNED),
        (constants.nothing, "learned", PADDING),
        (constants.uninitialized, "lost", LOST),
    ):
        made = rule(work)
        assert isinstance(made, list)
        assert [places.kind for places in made] == [kind] * 2
        assert [tuple(places.shape) for places in made] == [(2, 3), (4,)]
        assert made[0].codes.tolist() == [[code] * 3] * 2
    unwritten = constants.uninitialized(work)
    assert isinstance(unwritten, list)
    assert unwritten[0].name == "memory that was never written"


def look_up(planes: Planes, table: Places, indices: Places, index: Tensor | None = None) -> Places:
    work = at_work(planes, "embedding", (*indices.shape, table.shape[-1]), weight=table, indices=indices)
    work.step.contents = {"indices": index}
    result = constants.embedded(work)
    assert isinstance(result, Places)
    return result


def test_rows_of_a_table_are_members_of_a_set_or_keep_their_cells() -> None:
    planes = two_images()
    words = look_up(planes, learned(9, 5, name="word"), foreign(2, 7))
    assert torch.equal(words.codes, members(planes, "word#0#1", 14).view(2, 7, 1).expand(2, 7, 5))
    assert (words.kind, words.name) == ("foreign", "word")
    assert look_up(planes, learned(9, 5), foreign(2, 7)).name == "text"
    of_image = placed(grid(planes, 3, 3)[0].flatten()[:, None].expand(9, 5))
    index = torch.tensor([[8, 0], [3, 3]])
    assert torch.equal(look_up(planes, of_image, learned(2, 2), index).codes, of_image.codes[index])
    located = Places("learned", members(planes, "query", 7), name="query")
    kept = look_up(planes, learned(9, 5, name="word"), located)
    assert torch.equal(kept.codes, located.codes[:, None].expand(7, 5))
    assert kept.kind == "learned"
    lost = whole("lost", (9, 5), CPU)
    for table, indices in ((lost, foreign(2)), (learned(9, 5), lost), (learned(9, 5), placed(grid(planes, 3, 4)))):
        with pytest.raises(Unproven, match=r"^embedding$"):
            look_up(planes, table, indices)
    assert FOREIGN in foreign(2).codes.tolist()
