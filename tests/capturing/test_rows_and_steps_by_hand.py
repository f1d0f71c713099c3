"""Rows of operations, what operations do to single tokens, and the record of what has run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload

from tests.capturing.steps import at_work, learned, two_images
from visattn.core.capturing.placing import constants, mixing, moves, pointwise, products, reductions
from visattn.core.capturing.placing.kernels import Kernel
from visattn.core.capturing.placing.nodes import Nodes, shape_of, storage_of, tensors_in_nodes
from visattn.core.capturing.placing.operation_table import ROWS, SOFTMAXES, _plain_name, contents_of, row_of
from visattn.core.capturing.placing.steps import Recorder, Step, depends_on_values, signature_of
from visattn.core.capturing.placing.work import Rule

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("add_", "add"),
        ("add", "add"),
        ("_foreach_add_", "add"),
        ("_foreach_mul", "mul"),
        ("permute_copy", "permute"),
        ("_to_copy", "_to_copy"),
        ("index_copy", "index_copy"),
        ("index_copy_", "index_copy"),
        ("__iand__", "__and__"),
        ("__and__", "__and__"),
        ("__index__", "__index__"),
        ("__invert__", "__invert__"),
        ("_", "_"),
        ("copy_", "copy"),
        ("__irshift__", "__rshift__"),
        ("__i", "__i"),
    ],
)
def test_forms_of_one_operation_have_one_name(name: str, plain: str) -> None:
    assert _plain_name(name) == plain


@pytest.mark.parametrize(
    ("op", "name", "rule"),
    [
        (aten.add_.Tensor, "add", pointwise.combined),
        (aten.relu.default, "relu", pointwise.combined),
        (aten.gelu.default, "gelu", pointwise.combined),
        (aten.clone.default, "clone", moves.same),
        (aten.bernoulli.default, "bernoulli", moves.same),
        (aten.bernoulli_.float, "bernoulli", constants.constant),
        (aten.bernoulli.p, "bernoulli", constants.constant),
        (aten.max.dim, "max", reductions.reduced),
        (aten.max.other, "max", pointwise.combined),
        (aten.min.default, "min", reductions.reduced),
        (aten.minimum.default, "minimum", pointwise.combined),
        (aten.mm.default, "mm", products.multiplied),
        (aten.linalg_inv_ex.default, "linalg_inv_ex", None),
        (aten.permute_copy.default, "permute", moves.moved),
        (aten._foreach_add.List, "add", pointwise.combined),
        (aten._foreach_tanh.default, "tanh", pointwise.combined),
        (aten._foreach_norm.Scalar, "norm", reductions.reduced),
    ],
)
def test_each_operation_has_the_rule_of_its_name(op: OpOverload, name: str, rule: Rule | None) -> None:
    for _ in range(2):
        found, row = row_of(op)
        assert found == name
        assert (None if row is None else row.rule) is rule


def test_elementwise_operations_keep_their_own_row_and_others_share_one() -> None:
    assert row_of(aten.add.Tensor)[1] is ROWS["add"]
    assert row_of(aten.where.self)[1] is ROWS["where"]
    shared = row_of(aten.relu.default)[1]
    assert shared is row_of(aten.gelu.default)[1]
    assert shared is not None
    assert (shared.contents, shared.makes, shared.mixes, shared.linear, shared.effect) == ((), False, None, None, "")


def test_operations_of_other_libraries_have_no_row() -> None:
    with torch.library._scoped_library("visattn_rows", "DEF") as library:
        library.define("add(Tensor a) -> Tensor")
        assert row_of(torch.ops.visattn_rows.add.default) == ("add", None)
        assert contents_of(torch.ops.visattn_rows.add.default) == ()


def test_arguments_whose_values_choose_elements_are_known() -> None:
    assert contents_of(aten.index.Tensor) == ("indices",)
    assert contents_of(aten.gather.default) == ("index",)
    assert contents_of(aten.mm.default) == ()
    assert contents_of(aten.linalg_inv_ex.default) == ()


def test_the_table_tells_what_makes_tensors_and_what_is_a_softmax() -> None:
    made = {name for name, row in ROWS.items() if row.makes}
    rules = {constants.constant, constants.nothing, constants.uninitialized}
    assert made == {name for name, row in ROWS.items() if row.rule in rules}
    assert {"zeros", "full", "empty", "rand", "arange", "zero"} <= made
    assert frozenset({"_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax"}) == SOFTMAXES


# --- what operations do to single tokens


def test_a_product_mixes_the_summed_axis_of_each_factor() -> None:
    planes = two_images()
    work = at_work(planes, "mm", (12, 7), self=learned(12, 5), mat2=learned(5, 7))
    first, second = work.nodes()
    assert mixing.by_product(work, first) == [-1]
    assert mixing.by_product(work, second) == [-2]
    work = at_work(planes, "addmm", (12, 7), self=learned(7), mat1=learned(12, 5), mat2=learned(5, 7))
    term, first, second = work.nodes()
    assert [mixing.by_product(work, node) for node in (term, first, second)] == [None, [-1], [-2]]


def test_a_product_with_one_number_for_each_token_or_another_factor_for_each_image_mixes_tokens() -> None:
    planes = two_images()
    work = at_work(planes, "mm", (12, 1), self=learned(12, 5), mat2=learned(5, 1))
    first, second = work.nodes()
    assert [mixing.by_product(work, node) for node in (first, second)] == [None, [-2]]
    work = at_work(planes, "mm", (1, 7), self=learned(1, 5), mat2=learned(5, 7))
    first, second = work.nodes()
    assert [mixing.by_product(work, node) for node in (first, second)] == [[-1], None]
    work = at_work(planes, "bmm", (2, 12, 7), self=learned(2, 12, 5), mat2=learned(1, 5, 7))
    first, second = work.nodes()
    assert [mixing.by_product(work, node) for node in (first, second)] == [[-1], None]
    work = at_work(planes, "linear", (2, 12, 7), input=learned(2, 12, 5), weight=learned(7, 5))
    first, second = work.nodes()
    assert mixing.by_product(work, first) == [-1]
    work = at_work(planes, "linear", (2, 12, 7), input=learned(2, 12, 5))
    assert mixing.by_product(work, next(work.nodes())) is None
    work = at_work(planes, "dot", (), self=learned(5), tensor=learned(5))
    work.outs[0] = work.outs[0]._replace(shape=torch.Size([1]))
    assert mixing.by_product(work, next(work.nodes())) == [-1]


def test_normalizations_and_statistics_mix_their_axes() -> None:
    planes = two_images()

    def work(name: str, **given: Any) -> Any:
        return at_work(planes, name, (2, 7, 3, 4), **given)

    assert list(mixing.in_layer(work("native_layer_norm", normalized_shape=[3, 4]), None)) == [-2, -1]  # type: ignore[arg-type]
    assert mixing.in_batch(work("native_batch_norm"), None) == [1]  # type: ignore[arg-type]
    assert mixing.in_batch(work("native_batch_norm", training=False), None) == [1]  # type: ignore[arg-type]
    assert mixing.in_batch(work("native_batch_norm", training=True), None) is None  # type: ignore[arg-type]
    assert mixing.along(work("_softmax", dim=2), None) == [2]  # type: ignore[arg-type]
    assert mixing.over(work("mean", dim=[1, 2]), None) == [1, 2]  # type: ignore[arg-type]
    assert mixing.over(work("mean", dim=[]), None) is None  # type: ignore[arg-type]
    assert mixing.over(work("mean"), None) is None  # type: ignore[arg-type]
    assert mixing.over(work("mean", dim=1), None) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kernel", "given", "channels", "axes"),
    [
        ((1, 1), {"stride": [1, 1]}, 7, [1]),
        ((1, 1), {}, 7, [1]),
        ((1, 1), {}, 2, [1]),
        ((1, 1), {}, 1, None),
        ((1, 3), {}, 7, None),
        ((3, 1), {}, 7, None),
        ((1, 1), {"stride": [1, 2]}, 7, None),
        ((1, 1), {"stride": [1, 1], "transposed": True}, 7, None),
        ((1, 1), {"stride": [1, 1], "transposed": False}, 7, [1]),
    ],
)
def test_a_kernel_of_one_position_mixes_channels(kernel: tuple[int, int], given: Any, channels: int, axes: Any) -> None:
    work = at_work(
        two_images(), "convolution", (2, channels, 3, 4), input=learned(2, 5, 3, 4), weight=learned(7, 5, *kernel), **given
    )
    assert mixing.by_kernel(work, next(work.nodes())) == axes


def test_operations_are_linear_in_some_arguments_together() -> None:
    assert mixing.together({"self", "other"})
    assert mixing.together(set())
    cases = [
        (mixing.in_one, {"self"}, True),
        (mixing.in_one, {"self", "bias"}, True),
        (mixing.in_one, {"self", "other"}, False),
        (mixing.in_one, {"bias"}, False),
        (mixing.in_one_and_term, {"self"}, True),
        (mixing.in_one_and_term, {"self", "mat1"}, True),
        (mixing.in_one_and_term, {"mat2"}, True),
        (mixing.in_one_and_term, {"mat1", "mat2"}, False),
        (mixing.in_self, {"self"}, True),
        (mixing.in_self, {"self", "other"}, False),
        (mixing.in_self, {"other"}, False),
        (mixing.but("weight"), {"self", "end"}, True),
        (mixing.but("weight"), {"self", "weight"}, False),
    ]
    for linear, coming, expected in cases:
        assert linear(coming) is expected


# --- the record


def recorded(call: Any, *tensors: Tensor) -> tuple[Nodes, list[Step]]:
    """Return the tensors and the steps of a call; its arguments are the tensors 0, 1, ..."""
    nodes = Nodes(lambda _: None)
    for tensor in tensors:
        nodes.begin(tensor, "input", "x")
    recorder = Recorder(nodes, contents_of)
    with torch.no_grad(), recorder:
        call(*tensors)
    return nodes, recorder.taken()


def test_signatures_say_what_is_written_shared_and_counted() -> None:
    assert signature_of(aten.add.out).written == ("out",)
    assert signature_of(aten.add.out).shared == ("out",)
    assert signature_of(aten.add_.Tensor).written == ("self",)
    assert signature_of(aten.add.Tensor).written == ()
    assert signature_of(aten.add.Tensor).shared == (None,)
    assert signature_of(aten.view.default).shared == ("self",)
    assert signature_of(aten.split.Tensor).shared == ("self",)
    assert signature_of(aten.native_layer_norm.default).shared == (None, None, None)
    assert signature_of(aten.add.Tensor).names == ("self", "other", "alpha")
    assert [signature_of(op).composite for op in (aten.reshape.default, aten.flatten.using_ints, aten.add.Tensor)] == [
        True,
        True,
        False,
    ]
    assert [signature_of(op).counts for op in (aten.nonzero.default, aten.index.Tensor, aten.add.Tensor)] == [True, True, False]
    assert signature_of(aten.add.Tensor) is signature_of(aten.add.Tensor)


def test_views_share_the_memory_of_their_source_and_results_have_their_own() -> None:
    nodes, steps = recorded(lambda x: (x[1:], x.split(2), x + 1), torch.zeros(4, 3))
    memories = [[nodes.facts[node].memory for node in step.outs if node is not None] for step in steps]
    assert memories == [[0], [0, 0], [1]]
    facts = nodes.facts[steps[0].outs[0] or -1]
    assert (tuple(facts.shape), facts.stride, facts.offset) == ((3, 3), (3, 1), 3)
    assert (facts.floating, facts.number, facts.dynamic) == (True, True, False)


def test_an_overwritten_tensor_gets_a_new_number_and_the_others_in_its_memory_are_named() -> None:
    def call(x: Tensor) -> None:
        view = x[1:]
        view.add_(1)
        x.mul_(2)

    nodes, steps = recorded(call, torch.zeros(4, 3))
    assert [step.written for step in steps] == [(), ((1, 2),), ((0, 3),)]
    assert [step.sharing for step in steps] == [(), (0,), (2,)]
    assert [step.outs for step in steps] == [(1,), (2,), (3,)]
    assert len({facts.memory for facts in nodes.facts}) == 1


def test_writes_that_are_not_intercepted_are_steps_of_their_own() -> None:
    nodes = Nodes(lambda _: None)
    x, y = torch.zeros(3), torch.zeros(3)
    for tensor in (x, y):
        nodes.begin(tensor, "input", "x")
    nodes.settle()
    recorder = Recorder(nodes, contents_of)
    y.add_(1)
    with torch.no_grad(), recorder:
        torch.add(x, y)
    steps = recorder.taken()
    assert [(step.op is None, step.given) for step in steps[:1]] == [(True, {"memory": 1})]
    assert len(steps) == 2
    assert recorder.taken() == []
    nodes.overwritten(x)
    assert nodes.unseen == [0]
    nodes.overwritten(torch.zeros(3))
    assert nodes.unseen == [0]


def test_values_that_choose_elements_are_copied_before_they_are_overwritten() -> None:
    def call(x: Tensor, index: Tensor) -> None:
        x[index]
        index.add_(1)

    _, steps = recorded(call, torch.zeros(4, 3), torch.tensor([2, 0]))
    assert steps[0].contents["indices"][0].tolist() == [2, 0]
    assert steps[1].contents == {}


def test_a_shape_depends_on_what_tensors_hold_if_elements_are_counted() -> None:
    mask = torch.tensor([True, False, True])

    def call(x: Tensor, mask: Tensor) -> None:
        picked = x[mask]
        picked * 2
        picked + torch.zeros(2, 1)
        x[torch.tensor([0, 1])]

    nodes, steps = recorded(call, torch.zeros(3, 4), mask)
    dynamic = {
        step.op._schema.name: [nodes.facts[node].dynamic for node in step.outs if node is not None] for step in steps if step.op
    }
    assert dynamic["aten::mul"] == dynamic["aten::add"] == [True]
    results = [
        nodes.facts[node].dynamic for step in steps if step.op is aten.index.Tensor for node in step.outs if node is not None
    ]
    assert results == [True, False]
    assert nodes.dynamic
    whole = nodes.of(torch.zeros(2, 4))
    picked = next(number for number, facts in enumerate(nodes.facts) if facts.dynamic)
    given = {"self": type(whole)(picked), "other": whole}
    assert not depends_on_values(aten.add.Tensor, given, nodes, torch.Size([2, 4]))
    assert depends_on_values(aten.add.Tensor, given, nodes, torch.Size([3, 4]))
    assert depends_on_values(aten.cat.default, {"tensors": [whole, type(whole)(picked)]}, nodes, torch.Size([2, 4]))
    assert not depends_on_values(aten.index_copy.default, given, nodes, torch.Size([9, 4]))
    assert not depends_on_values(aten.mul.Tensor, {"self": whole}, nodes, torch.Size([9, 4]))


def test_lengths_are_noted_only_where_they_depend_on_values() -> None:
    nodes = Nodes(lambda _: None)
    x, y = torch.zeros(3), torch.zeros(3)
    recorder = Recorder(nodes, contents_of)
    first, second = nodes.begin(x, "input", "x"), nodes.begin(y, "input", "y")
    recorder.read_length(x)
    nodes.depends(second)
    recorder.read_length(x)
    recorder.read_length(y)
    recorder.read(x)
    assert [step.given for step in recorder.taken()] == [{"length": second}, {"read": first}]


def test_a_convolution_notes_what_its_kernel_says_about_places() -> None:
    weight = torch.zeros(7, 5, 3, 1)
    weight[0, 0, 2, 0] = 1
    calls = (lambda x: torch.conv2d(x, weight, padding=(1, 0)), lambda x: torch.conv2d(x, weight, stride=(3, 1)), lambda x: x + 1)
    kernels = [recorded(call, torch.zeros(2, 5, 6, 4))[1][-1].kernel for call in calls]
    assert kernels == [Kernel(centered=False, tap=(2, 0)), None, None]


def test_random_operations_are_told_by_their_tag() -> None:
    _, steps = recorded(lambda x: x.add_(1).normal_(), torch.zeros(3))
    assert [step.random for step in steps] == [False, True]
    assert not Step(None, {}).random


# --- tensors by number


def test_tensors_that_no_step_has_made_are_asked_for_once() -> None:
    asked = list[int]()

    def stored(tensor: Tensor) -> tuple[str, str] | None:
        asked.append(len(tensor))
        return ("parameter", "weight") if len(tensor) == 4 else None

    nodes, weight, other = Nodes(stored), torch.zeros(4), torch.zeros(5)
    assert [nodes.of(weight), nodes.of(other), nodes.of(weight), nodes.of(weight[1:])] == [0, 1, 0, 2]
    assert nodes.outside == {0: ("parameter", "weight"), 1: ("unknown", "")}
    assert asked == [4, 5]
    assert nodes.memory_of(weight) == 0
    assert [facts.memory for facts in nodes.facts] == [0, 1, 0]


def test_kinds_of_numbers_are_noted() -> None:
    nodes = Nodes(lambda _: None)
    for dtype, floating, number in (
        (torch.float16, True, True),
        (torch.complex64, True, True),
        (torch.int32, False, True),
        (torch.bool, False, False),
    ):
        facts = nodes.facts[nodes.of(torch.zeros(3, dtype=dtype))]
        assert (facts.floating, facts.number) == (floating, number)


def test_tensors_without_memory_of_their_own_have_neither_strides_nor_offset() -> None:
    nodes, sparse = Nodes(lambda _: None), torch.eye(3).to_sparse()
    facts = nodes.facts[nodes.of(sparse)]
    assert (facts.stride, facts.offset) == ((), 0)
    assert storage_of(sparse) is None
    assert storage_of(torch.zeros(3)) is not None
    assert shape_of(sparse) == (3, 3)
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)], layout=torch.jagged)
    assert shape_of(nested) == (9,)
    assert storage_of(nested) is None


def test_a_memory_that_numpy_shares_is_one_memory() -> None:
    nodes, array = Nodes(lambda _: None), np.zeros(6, dtype=np.float32)
    first, second = torch.from_numpy(array), torch.from_numpy(array)
    assert nodes.memory_of(first) == nodes.memory_of(second)


def test_a_forgotten_tensor_is_new() -> None:
    nodes, tensor, other = Nodes(lambda _: None), torch.zeros(3), torch.zeros(3)
    assert nodes.of(tensor) == 0
    view = tensor[1:]
    assert nodes.of(view) == 1
    nodes.forget(tensor)
    assert nodes.sharing([nodes.of(view)], []) == (1,)
    nodes.forget(other)
    assert nodes.of(tensor) == 2


def test_numbers_are_found_in_nested_lists() -> None:
    nodes = Nodes(lambda _: None)
    first, second = nodes.of(torch.zeros(1)), nodes.of(torch.zeros(2))
    assert list(tensors_in_nodes([first, 7, ("a", [second]), None])) == [first, second]
    assert list(tensors_in_nodes(7)) == []
