"""Values that are put into a tensor, or added to it, at chosen places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capturing.steps import CPU, at_work, learned, noted, placed, two_images
from visattn.core.capturing.placing import writes
from visattn.core.capturing.placing.places import FOREIGN, LEARNED, LOST, Places, whole, zeros
from visattn.core.capturing.placing.work import Result, Unproven, Work
from visattn.core.capturing.tokens.planes import PADDING

P = PADDING


def codes_of(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def writing(name: str, shape: tuple[int, ...], contents: dict[str, Any] | None = None, **given: Any) -> Work:
    """Return a write at work; `contents` has the values of arguments that choose elements."""
    chosen = {
        key: learned(*value.shape) if isinstance(value, Tensor) else [learned(*item.shape) for item in value]
        for key, value in (contents or {}).items()
    }
    work = at_work(two_images(), name, shape, **(given | chosen))
    work.step.op, work.step.contents = torch.ops.aten.index_copy.default, contents or {}
    return work


def single(result: Result) -> Places:
    assert isinstance(result, Places)
    return result


VALUES = placed(codes_of([[10, 11, 12], [13, 14, 15]]))
ROWS, COLUMNS = torch.tensor([3, 1]), torch.tensor([[2, 0, 1], [0, 2, 1]])
PUT: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any], list[Any]]] = {
    "index_copy": ((4, 3), {"dim": 0, "source": VALUES}, {"index": ROWS}, [[P, P, P], [13, 14, 15], [P, P, P], [10, 11, 12]]),
    "index_put": ((4, 3), {"values": VALUES}, {"indices": [ROWS]}, [[P, P, P], [13, 14, 15], [P, P, P], [10, 11, 12]]),
    "_unsafe_index_put": ((4, 3), {"values": VALUES}, {"indices": [ROWS]}, [[P, P, P], [13, 14, 15], [P, P, P], [10, 11, 12]]),
    "_index_put_impl": (
        (4, 3),
        {"values": VALUES, "accumulate": False, "unsafe": True},
        {"indices": [ROWS]},
        [[P, P, P], [13, 14, 15], [P, P, P], [10, 11, 12]],
    ),
    "scatter": ((2, 4), {"dim": 1, "src": VALUES}, {"index": COLUMNS}, [[11, 12, 10, P], [13, 15, 14, P]]),
    "masked_scatter": (
        (2, 4),
        {"source": VALUES},
        {"mask": torch.tensor([[True, False, True, True], [False, False, False, True]])},
        [[10, P, 11, 12], [P, P, P, 13]],
    ),
    "put": ((2, 4), {"source": VALUES}, {"index": torch.tensor([[7, 0, 2], [4, 1, 3]])}, [[11, 14, 12, 15], [13, P, P, 10]]),
    "select_scatter": (
        (2, 3, 2),
        {"src": VALUES, "dim": 2, "index": 1},
        {},
        [[[P, 10], [P, 11], [P, 12]], [[P, 13], [P, 14], [P, 15]]],
    ),
    "slice_scatter": ((2, 4), {"src": VALUES, "dim": 1, "start": 1, "end": 4}, {}, [[P, 10, 11, 12], [P, 13, 14, 15]]),
}


@pytest.mark.parametrize("name", list(PUT))
def test_codes_are_put_where_the_values_are(name: str) -> None:
    shape, given, contents, expected = PUT[name]
    result = single(writes.written(writing(name, shape, contents, self=zeros(shape, CPU), **given)))
    assert result.codes.tolist() == expected
    assert result.kind == "placed"
    assert (result.columns, result.copies, result.others) == (None, None, None)


def test_a_diagonal_is_overwritten() -> None:
    given: dict[str, Any] = {"src": placed(codes_of([[10, 20], [11, 21]])), "offset": 1, "dim1": 1, "dim2": 2}
    result = single(writes.written(writing("diagonal_scatter", (2, 2, 3), self=zeros((2, 2, 3), CPU), **given)))
    assert result.codes.tolist() == [[[P, 10, P], [P, P, 20]], [[P, 11, P], [P, P, 21]]]


@pytest.mark.parametrize(("value", "code"), [(0, PADDING), (0.0, PADDING), (False, PADDING), (2, LEARNED), (-0.5, LEARNED)])
def test_a_number_that_is_written_is_a_constant_and_zero_is_padding(value: float, code: int) -> None:
    target = placed(codes_of([[1, 2, 3], [4, 5, 6]]))
    filled = writes.written(writing("index_fill", (2, 3), {"index": torch.tensor([2, 0])}, self=target, dim=1, value=value))
    assert single(filled).codes.tolist() == [[code, 2, code], [code, 5, code]]
    scattered = writes.written(writing("scatter", (2, 3), {"index": torch.tensor([[2], [0]])}, self=target, dim=1, value=value))
    assert single(scattered).codes.tolist() == [[1, 2, code], [code, 5, 6]]
    whole_tensor = single(writes.filled(writing("fill", (2, 3), self=target, value=value)))
    assert whole_tensor.codes.tolist() == [[code] * 3] * 2


def test_one_element_that_fills_others_gives_them_its_place() -> None:
    value = placed(codes_of(7))
    target = learned(2, 3)
    filled = single(
        writes.written(writing("index_fill", (2, 3), {"index": torch.tensor([2, 0])}, self=target, dim=1, value=value))
    )
    assert filled.codes.tolist() == [[7, LEARNED, 7]] * 2
    assert single(writes.filled(writing("fill", (2, 3), self=target, value=value))).codes.tolist() == [[7] * 3] * 2
    assert single(writes.filled(writing("fill", (2, 3), self=target))).codes.tolist() == [[PADDING] * 3] * 2


def test_a_copy_has_the_places_of_its_source_broadcast() -> None:
    source = placed(codes_of([1, 2, 3]), columns=codes_of([4, 5, 6]), copies=codes_of([7, 8, 9]), others=codes_of([1, 1, 1]))
    copied = single(writes.copied(writing("copy", (2, 3), self=learned(2, 3), src=source)))
    assert copied.codes.tolist() == [[1, 2, 3]] * 2
    assert copied.columns is not None
    assert copied.columns.tolist() == [[4, 5, 6]] * 2
    assert copied.copies is not None
    assert copied.copies.tolist() == [[7, 8, 9]] * 2
    assert copied.others is None


def put(target: Places, value: Places) -> Places:
    return single(writes.written(writing("slice_scatter", (2, 4), self=target, src=value, dim=1, start=1, end=4)))


def test_the_kind_of_a_target_behind_a_write() -> None:
    image = placed(codes_of([[1, 2, 3, 4], [5, 6, 7, 8]]))
    kinds: list[tuple[Places, Places, str]] = [
        (learned(2, 4), VALUES, "placed"),
        (image, learned(2, 3), "placed"),
        (image, whole("lost", (2, 3), CPU), "placed"),
        (learned(2, 4), learned(2, 3), "learned"),
        (learned(2, 4), whole("lost", (2, 3), CPU), "lost"),
        (whole("lost", (2, 4), CPU), learned(2, 3), "lost"),
        (whole("foreign", (2, 4), CPU), learned(2, 3), "foreign"),
        (learned(2, 4), whole("foreign", (2, 3), CPU), "learned"),
    ]
    for target, value, kind in kinds:
        assert put(target, value).kind == kind
    assert put(image, whole("lost", (2, 3), CPU)).codes.tolist() == [[1, LOST, LOST, LOST], [5, LOST, LOST, LOST]]


def test_notes_of_target_and_value_hold_for_both() -> None:
    image = placed(codes_of([[1, 2, 3, 4], [5, 6, 7, 8]]), name="target", embedding=3)
    for field in ("mixture", "leaning"):
        for a, b in ((False, False), (False, True), (True, False)):
            assert getattr(put(noted(image, **{field: a}), noted(VALUES, **{field: b})), field) is (a or b)
    assert put(image._replace(behind=(3, "a", 0)), VALUES._replace(behind=(2, "b", 0))).behind == (3, "a", 0)
    assert put(image, VALUES._replace(name="value")).name == "value"
    assert put(image, learned(2, 3, name="value")).name == "target"
    numbers = codes_of([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert put(image, VALUES).copies is None
    for target_copies, value_copies, expected in (
        (numbers, None, [[1, 0, 0, 0], [5, 0, 0, 0]]),
        (None, numbers[:, :3], [[0, 1, 2, 3], [0, 5, 6, 7]]),
        (numbers, numbers[:, :3], [[1, 1, 2, 3], [5, 5, 6, 7]]),
    ):
        copies = put(image._replace(copies=target_copies), VALUES._replace(copies=value_copies)).copies
        assert copies is not None
        assert copies.tolist() == expected


def test_scores_are_written_with_their_columns_and_constants_leave_them_as_they_are() -> None:
    image = placed(codes_of([[1, 2, 3, 4], [5, 6, 7, 8]]))
    scores = image._replace(columns=image.codes + 100)
    values = VALUES._replace(columns=VALUES.codes + 100)
    both = put(scores, values)
    assert both.codes.tolist() == [[1, 10, 11, 12], [5, 13, 14, 15]]
    assert both.columns is not None
    assert both.columns.tolist() == [[101, 110, 111, 112], [105, 113, 114, 115]]
    among_zeros = put(zeros((2, 4), CPU), values)
    assert among_zeros.columns is not None
    assert among_zeros.columns.tolist() == [[P, 110, 111, 112], [P, 113, 114, 115]]
    assert put(scores, learned(2, 3)) is scores
    for target, value in ((scores, VALUES), (image, values)):
        with pytest.raises(Unproven, match=r"^slice_scatter$"):
            put(target, value)


ADDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "index_add": ({"dim": 1, "source": VALUES}, {"index": torch.tensor([3, 0, 1])}),
    "scatter_add": ({"dim": 1, "src": VALUES}, {"index": torch.tensor([[3, 0, 1], [3, 0, 1]])}),
    "scatter_reduce": ({"dim": 1, "src": VALUES, "reduce": "amax"}, {"index": torch.tensor([[3, 0, 1], [3, 0, 1]])}),
}
PUT_BY_ADDING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "index_put": ({"values": VALUES, "accumulate": True}, {"indices": [torch.tensor([[0], [1]]), torch.tensor([3, 0, 1])]}),
    "put": ({"source": VALUES, "accumulate": True}, {"index": torch.tensor([[3, 0, 1], [7, 4, 5]])}),
    "scatter": ({"src": VALUES, "reduce": "add", "dim": 1}, {"index": torch.tensor([[3, 0, 1], [3, 0, 1]])}),
}


@pytest.mark.parametrize("name", [*ADDED, *PUT_BY_ADDING])
def test_values_that_are_added_to_zeros_keep_their_places(name: str) -> None:
    rule = writes.added if name in ADDED else writes.written
    given, contents = (ADDED | PUT_BY_ADDING)[name]
    result = single(rule(writing(name, (2, 4), contents, self=zeros((2, 4), CPU), **given)))
    assert result.codes.tolist() == [[11, 12, P, 10], [14, 15, P, 13]]
    for target in (placed(codes_of([[1, 2, 3, 4], [5, 6, 7, 8]])), whole("foreign", (2, 4), CPU), whole("lost", (2, 4), CPU)):
        with pytest.raises(Unproven, match=f"^{name}$"):
            rule(writing(name, (2, 4), contents, self=target, **given))


@pytest.mark.parametrize("alpha", [0.5, 2, -1])
def test_values_that_are_added_once_with_a_factor_keep_their_places(alpha: float) -> None:
    contents, given = {"index": torch.tensor([2, 0])}, {"dim": 0, "source": VALUES, "alpha": alpha}
    plain = single(writes.added(writing("index_add", (3, 3), contents, self=learned(3, 3), dim=0, source=VALUES)))
    result = single(writes.added(writing("index_add", (3, 3), contents, self=learned(3, 3), **given)))
    assert torch.equal(result.codes, plain.codes)
    assert not bool((result.codes == LOST).any())


def test_elements_to_which_several_values_are_added_are_lost() -> None:
    contents = {"index": torch.tensor([[3, 3, 1], [0, 1, 2]])}
    result = single(writes.added(writing("scatter_add", (2, 4), contents, self=learned(2, 4), dim=1, src=VALUES)))
    assert result.codes.tolist() == [[LEARNED, 12, LEARNED, LOST], [13, 14, 15, LEARNED]]
    contents = {"index": torch.tensor([2, 2])}
    result = single(writes.added(writing("index_add", (3, 3), contents, self=learned(3, 3), dim=0, source=VALUES)))
    assert result.codes.tolist() == [[LEARNED] * 3, [LEARNED] * 3, [LOST] * 3]
    for alpha in (0.5, 2, -1):
        factor = {"dim": 0, "source": VALUES, "alpha": alpha}
        result = single(writes.added(writing("index_add", (3, 3), contents, self=learned(3, 3), **factor)))
        assert result.codes.tolist() == [[LEARNED] * 3, [LEARNED] * 3, [LOST] * 3]
    pair = [torch.tensor([1, 1])]
    result = single(
        writes.written(writing("index_put", (3, 3), {"indices": pair}, self=learned(3, 3), values=VALUES, accumulate=True))
    )
    assert result.codes.tolist() == [[LEARNED] * 3, [LOST] * 3, [LEARNED] * 3]


def test_a_write_to_all_elements_of_a_tensor_of_unknown_content_replaces_it() -> None:
    lost = whole("lost", (2, 3), CPU)
    for name, value_name, contents, given in (
        ("index_put", "values", {"indices": [torch.tensor([1, 0])]}, {}),
        ("index_copy", "source", {"index": torch.tensor([1, 0])}, {"dim": 0}),
        ("scatter", "src", {"index": torch.tensor([[2, 0, 1], [0, 2, 1]])}, {"dim": 1}),
    ):
        arguments: dict[str, Any] = {"self": lost, value_name: VALUES, **given}
        assert writes.replaces_unknown(writing(name, (2, 3), contents, **arguments))
        assert not writes.replaces_unknown(writing(name, (2, 3), contents, **(arguments | {"self": learned(2, 3)})))
        assert not writes.replaces_unknown(writing(name, (2, 3), contents, **arguments, reduce="add"))
        assert not writes.replaces_unknown(writing(name, (2, 3), contents, **arguments, accumulate=True))
    twice = {"index": torch.tensor([1, 1])}
    assert not writes.replaces_unknown(writing("index_copy", (2, 3), twice, self=lost, dim=0, source=VALUES))
    contents = {"index": torch.tensor([1, 0])}
    assert not writes.replaces_unknown(writing("index_fill", (2, 3), contents, self=lost, dim=0, value=0))
    part = whole("foreign", (2, 3), CPU)._replace(codes=torch.full((2, 3), FOREIGN))
    assert not writes.replaces_unknown(writing("index_copy", (2, 3), contents, self=part, dim=0, source=VALUES))
