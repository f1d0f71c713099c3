"""When a forward pass begins and ends: whole models and their parts, failures, images among the arguments, and gradients."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capturing.watched import Layer, Model, Network, Seen, attend, image, watched
from visattn.errors import UnsupportedModel


def state(seen: Seen) -> tuple[int, list[int], bool, bool]:
    """Return number of the running forward pass, the calls in each that has ended, and whether any had images and was whole."""
    watch = seen.watch
    ended = [sum(entry.attention is not None for entry in forward._tape.entries) for forward in seen.forwards]
    return watch.forward, ended, watch.images, watch.whole


# --- whole models and parts


def test_forward_pass_ends_with_the_call_of_the_whole_model() -> None:
    model = Network()
    seen = Seen(model)
    with seen.watch.watching():
        assert state(seen) == (-1, [], False, False)
        assert not seen.watch.running()
        model(image())
        assert state(seen) == (0, [2], True, True)
        assert not seen.watch.running()
        model(image())
        assert state(seen) == (1, [2, 2], True, True)
    assert seen.layers == [("first", 0), ("second", 0)] * 2
    assert [forward.number for forward in seen.forwards] == [0, 1]
    assert [tuple(forward.inputs) for forward in seen.forwards] == [((2, 3), 2)] * 2
    assert (seen.watch.ended, seen.drops) == (True, 0)


def test_part_begins_a_forward_pass_that_ends_with_the_block() -> None:
    model = Network()
    seen = Seen(model)
    with seen.watch.watching():
        model.first(image())
        assert state(seen) == (0, [], True, False)
        assert seen.watch.running()
        assert not seen.watch.ended
    assert state(seen) == (0, [1], True, False)
    assert seen.watch.ended


def test_parts_that_follow_each_other_are_one_forward_pass() -> None:
    model = Network()
    seen = Seen(model)
    with seen.watch.watching():
        for _ in range(2):
            model.second(model.first(image()))
    assert state(seen) == (1, [2, 2], True, False)
    assert seen.layers == [("first", 0), ("second", 0)] * 2


@pytest.mark.parametrize(
    ("again", "forwards"),
    [
        (lambda _: image(seed=1), [1, 1]),  # another image
        (lambda x: x, [2]),  # the image of the forward pass
        (lambda x: x * 2, [2]),  # what it has computed from the image
        (lambda x: torch.cat([image(), image()]), [1, 1]),  # a tensor that was made from other ones
        (lambda x: x[0], [2]),  # no images
    ],
)
def test_part_that_is_called_again_begins_anew_only_for_other_images(
    again: Callable[[Tensor], Tensor], forwards: list[int]
) -> None:
    def run(x: Tensor) -> Tensor:
        attend(x if x.ndim == 4 else x[None])
        return x

    model, x = nn.Sequential(Layer(run)), image()
    seen = Seen(model)
    with seen.watch.watching():
        model[0](x)
        model[0](again(x))
    assert state(seen)[1] == forwards


def test_part_without_tensors_continues_the_forward_pass() -> None:
    model = nn.Sequential(Layer(lambda x=None: None if x is None else attend(x)))
    seen = Seen(model)
    with seen.watch.watching():
        model[0](image())
        model[0]()
    assert state(seen) == (0, [1], True, False)


def test_first_tensor_tells_whether_a_part_continues() -> None:
    model, x, other = nn.Sequential(Layer(lambda *given: attend(given[-1]))), image(), image(seed=1)
    seen = Seen(model)
    with seen.watch.watching():
        model[0]("text", x)
        model[0]("text", x, other)
    assert state(seen) == (0, [2], True, False)


@pytest.mark.parametrize(("depth", "is_part"), [(1, True), (2, True), (3, False)])
def test_modules_of_the_two_upper_levels_are_parts(depth: int, is_part: bool) -> None:
    model = Network()
    part = model.get_submodule(".".join(["deep", "0", "0"][:depth]))
    seen = Seen(model)
    with seen.watch.watching():
        part(image())
    assert state(seen) == ((0, [1], True, False) if is_part else (-1, [], False, False))


def test_whole_model_ends_the_forward_pass_of_a_part() -> None:
    model = Network()
    seen = Seen(model)
    with seen.watch.watching():
        model.first(image())
        model(image())
        model.second(image())
        assert state(seen) == (2, [1, 2], True, True)
    assert state(seen) == (2, [1, 2, 1], True, True)


def test_model_that_calls_itself_runs_once() -> None:
    class Recursive(nn.Module):
        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            return attend(self(x, depth - 1) if depth else x)

    model = Recursive()
    seen = Seen(model)
    with seen.watch.watching():
        for _ in range(2):
            model(image())
    assert state(seen) == (1, [3, 3], True, True)
    assert seen.layers == [("", 0), ("", 1), ("", 2)] * 2


def test_callbacks_run_inside_the_forward_pass_of_a_part() -> None:
    model, running = Network(), []
    seen = Seen(model)
    before: Any = lambda *_: running.append(seen.watch.running())  # noqa: E731
    after: Any = lambda *_: running.append(not seen.watch.running())  # noqa: E731
    seen.watch.modules.before[model.first] = [before, before]
    seen.watch.modules.before[model] = [before]
    seen.watch.modules.after[model] = [before]
    with seen.watch.watching():
        model.first(image())
        model(image())
        seen.watch.modules.after[model].append(after)
        model(image())
    assert running == [True] * 11
    assert (seen.watch.modules.before, seen.watch.modules.after) == ({}, {})


def test_tensors_that_are_swapped_are_told_to_the_running_forward_pass() -> None:
    def run(x: Tensor) -> Tensor:
        swap(one, other)
        return x * one

    swap: Any = torch.utils.swap_tensors
    one, other = torch.ones(1), torch.zeros(1)
    model = Model(run)
    seen = Seen(model)
    with seen.watch.watching():
        swap(one, other)
        assert model(image()).equal(image())
        told: list[Tensor] = []
        mode: Any = seen.watch._mode
        mode.tracer = SimpleNamespace(exchanged=told.append)
        swap(one, other)
        mode.tracer = None
    assert {id(tensor) for tensor in told} == {id(one), id(other)}


def test_other_threads_run_no_forward_pass() -> None:
    model, answers = Network(), []
    seen = Seen(model)
    with seen.watch.watching():
        model.first(image())
        thread = threading.Thread(target=lambda: answers.append((seen.watch.running(), model(image()).shape)))
        thread.start()
        thread.join()
    assert answers == [(False, image().shape)]
    assert state(seen) == (0, [1], True, False)


# --- failures


def test_forward_pass_that_fails_is_dropped() -> None:
    def run(x: Tensor) -> Tensor:
        out = attend(x)
        if fails:
            raise ValueError("no")
        return out

    model = Model(run)
    seen = Seen(model)
    with seen.watch.watching():
        for fails in (True, False, True):  # noqa: B007 - read by the layer
            try:
                model(image())
            except ValueError:
                assert not seen.watch.running()
    assert (state(seen), seen.drops, seen.watch.ended) == ((2, [1], True, True), 2, True)
    assert seen.layers == [("attn", 0)] * 3


def test_part_needs_no_output() -> None:
    model = nn.Sequential(Layer(lambda x: (attend(x), None)[1]))
    seen = Seen(model)
    with seen.watch.watching():
        model[0](image())
    assert (state(seen), seen.drops) == ((0, [1], True, False), 0)


def test_error_inside_the_block_ends_no_forward_pass() -> None:
    model = Network()
    seen = Seen(model)

    def stopped() -> None:
        with seen.watch.watching():
            model.first(image())
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        stopped()
    assert (seen.forwards, seen.watch.ended) == ([], False)
    assert (seen.watch.modules.before, hasattr(seen.watch, "_mode")) == ({}, False)


# --- arguments


def named(**given: Any) -> Seen:
    model = Model(lambda **given: next(iter(given.values())) + 1)
    seen = Seen(model)
    with seen.watch.watching():
        model(**given)
    return seen


def test_images_by_name_are_found() -> None:
    x, mask = image(3), torch.ones(3, 1, 8, 9)
    seen = named(mask=mask, pixel_values=x)
    (forward,) = seen.forwards
    assert tuple(forward.inputs) == ((2, 3), 3)
    outside = sorted((source.kind, source.name) for source in seen.tape().outside.values())
    assert outside == [("input", "mask"), ("pixels", "")]


@pytest.mark.parametrize("shape", [(5, 3, 7, 4), (5, 2, 3, 7, 4)])
def test_size_of_images_and_clips_is_that_of_the_last_axes(shape: tuple[int, ...]) -> None:
    seen, _ = watched(lambda x: x + 1, torch.zeros(shape))
    assert tuple(seen.forwards[0].inputs) == ((7, 4), 5)


def test_images_in_nested_arguments_are_found() -> None:
    seen, _ = watched(lambda given: given["x"][0] + 1, {"x": [image(4), torch.zeros(2)]})
    assert tuple(seen.forwards[0].inputs) == ((2, 3), 4)
    assert [source.kind for source in seen.tape().outside.values()] == ["pixels", "input"]


def test_forward_pass_without_images_has_no_size() -> None:
    seen, _ = watched(lambda x: x + 1, torch.zeros(2, 3))
    assert (state(seen), tuple(seen.forwards[0].inputs)) == ((0, [0], False, True), ((0, 0), 0))


def test_packed_patches_have_the_size_of_their_grids() -> None:
    seen = named(pixel_values=torch.randn(10, 12), image_grid_thw=torch.tensor([[1, 2, 2], [1, 2, 3]]))
    assert seen.tape().packed == ((1, 2, 2), (1, 2, 3))
    assert seen.watch.images
    inputs = seen.forwards[0].inputs
    assert inputs.batch == 1
    assert inputs.size != (0, 0)
    assert inputs.size != (10, 12)


def test_packed_patches_may_have_their_own_axes() -> None:
    seen = named(pixel_values=torch.randn(10, 3, 2, 2), image_grid_thw=torch.tensor([[1, 2, 2], [1, 2, 3]]))
    assert seen.tape().packed == ((1, 2, 2), (1, 2, 3))
    other = named(pixel_values=torch.randn(10, 3, 2), image_grid_thw=torch.tensor([[1, 2, 2], [1, 2, 3]]))
    assert other.tape().packed == ()


def test_other_tables_may_come_before_the_grids() -> None:
    grids = torch.tensor([[1, 2, 2], [1, 2, 3]])
    seen = named(ids=torch.zeros(2, 3, dtype=torch.long), pixel_values=torch.randn(10, 12), grid_thw=grids)
    assert seen.tape().packed == ((1, 2, 2), (1, 2, 3))
    seen = named(pixel_values=torch.randn(10, 12), first_grid_thw=grids[:1], second_grid_thw=grids)
    assert seen.tape().packed == ((1, 2, 2), (1, 2, 3))


def test_notes_of_a_forward_pass_do_not_reach_the_next() -> None:
    model = Network()
    seen = Seen(model)
    with seen.watch.watching():
        model.first(image())
        seen.watch._mode.hidden["x"] = "reason"
        seen.watch._slots.add(3)
        model(image())
        assert (dict(seen.watch.hidden), seen.watch._slots) == ({}, set())
        assert dict(seen.watch._mode.calls) == {"first": 1, "second": 1}


@pytest.mark.parametrize("as_mapping", [False, True])
def test_output_is_the_logits_of_a_mapping(as_mapping: bool) -> None:
    def run(x: Tensor) -> Any:
        return {"hidden": x * 2, "logits": x + 1} if as_mapping else (x * 2, [x + 1])

    seen, _ = watched(run, image())
    made = [entry.outs[0].slot for entry in seen.tape().entries if entry.outs[0] is not None]
    assert list(seen.tape().output) == (made[1:] if as_mapping else made)


def test_output_without_logits_is_the_whole_mapping() -> None:
    seen, _ = watched(lambda x: {"a": x * 2, "b": x + 1}, image())
    assert len(seen.tape().output) == 2


# --- models that cannot be watched


def test_only_modules_that_run_in_python_are_watched() -> None:
    with pytest.raises(UnsupportedModel, match=r"must be a torch\.nn\.Module, got function\.$"):
        Seen(attend)  # type: ignore[arg-type]
    exported: Any = object.__new__(torch.export.ExportedProgram)
    with pytest.raises(UnsupportedModel, match=r"got ExportedProgram\. Pass its \.module\(\)\.$"):
        Seen(exported)
    with pytest.raises(UnsupportedModel, match="TorchScript"):
        Seen(scripted(nn.ReLU(), torch.zeros(1)))


def scripted(module: nn.Module, x: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(module, x)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("part", "is_hidden"), [(nn.Softmax(-1), True), (Layer(lambda x: x @ x.mT @ x), True), (nn.ReLU(), False), (nn.GELU(), False)]
)
def test_part_of_torchscript_that_may_attend_is_hidden(part: nn.Module, is_hidden: bool) -> None:
    model: Any = nn.Sequential(nn.Sequential(nn.Sequential(scripted(part, image()))), nn.Softmax(-1))
    seen = Seen(model)
    with seen.watch.watching():
        model[0][0][0](image())
        assert dict(seen.watch.hidden) == {}
        model(image())
        assert dict(seen.watch.hidden) == ({"0.0.0": "is compiled by TorchScript"} if is_hidden else {})
        assert state(seen) == (0, [0], True, True)
