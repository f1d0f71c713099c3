"""Graphs that images start so that gradients reach attention, and layouts that are asked for before a forward pass has ended."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capturing.watched import Model, Network, Seen, attend, image, watched
from visattn.core.capturing.tokens.arrangement import Arrangement
from visattn.core.capturing.trace.tape import TAPES
from visattn.errors import CaptureError, LayoutError

# --- gradients


def pixels_of(model: nn.Module, x: Tensor, times: int = 1, **options: Any) -> list[Tensor]:
    """Return the images that a model received in each forward pass, if gradients are needed."""
    seen = Seen(model, gradients=True, **options)
    with seen.watch.watching():
        return [model(x) for _ in range(times)]


def layer_with(*trained: bool) -> nn.Module:
    """Return a model that attends and returns its input plus zero, with parameters some of which are trained."""
    model = Model(lambda x: attend(x) * 0 + x)
    for number, requires in enumerate(trained):
        model.register_parameter(f"p{number}", nn.Parameter(torch.zeros(1), requires_grad=requires))
    return model


@pytest.mark.parametrize(
    ("trained", "has_graph"), [((), True), ((True,), False), ((True, True), False), ((True, False), True), ((False,), True)]
)
def test_images_start_a_graph_unless_all_parameters_are_trained(trained: tuple[bool, ...], has_graph: bool) -> None:
    x = image()
    (out,) = pixels_of(layer_with(*trained), x)
    assert out.requires_grad == has_graph
    assert not x.requires_grad
    assert torch.equal(out, x)


def test_images_by_name_start_a_graph_too() -> None:
    model = Model(lambda x: attend(x) * 0 + torch.mul(input=x, other=3))
    (out,) = pixels_of(model, image())
    assert out.requires_grad
    assert torch.equal(out, image() * 3)


def test_image_that_starts_a_graph_is_no_other_input() -> None:
    seen, (out,) = watched(lambda x, mask: attend(x) + mask, image(), torch.ones(1), gradients=True)
    assert out.requires_grad
    assert [(source.kind, source.name) for source in seen.tape().outside.values()] == [("pixels", ""), ("input", "1")]


def test_images_with_a_graph_keep_it() -> None:
    x = image().requires_grad_()
    (out,) = pixels_of(layer_with(False), x)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.ones(x.shape))


def test_gradients_are_refused_without_a_graph() -> None:
    with torch.no_grad():
        with pytest.raises(CaptureError, match="under no_grad"):
            pixels_of(layer_with(False), image())
        Seen(layer_with(False))
    _, (out,) = watched(lambda x: x + 1, image())
    assert not out.requires_grad


@pytest.mark.parametrize("attends", [True, False])
def test_images_start_no_graph_in_a_model_that_is_known_to_attend_nowhere(attends: bool) -> None:
    model = Model(lambda x: (attend(x) if attends else x * 2) + 1)
    first, second = pixels_of(model, image(), times=2)
    assert first.requires_grad
    assert second.requires_grad == attends


def test_latest_forward_pass_tells_whether_a_model_attends() -> None:
    model = Model(lambda x: (attend(x) if len(outputs) == 1 else x * 2) + 1)
    seen, outputs = Seen(model, gradients=True), []
    with seen.watch.watching():
        for _ in range(4):
            outputs.append(model(image()))
    assert [out.requires_grad for out in outputs] == [True, False, True, False]


def gating(x: Tensor) -> Tensor:
    """Weight learned tokens, by weights without images: it may be a gate."""
    weights = torch.eye(3).softmax(-1)
    return weights @ x


@pytest.mark.parametrize("by_rule", [True, False])
def test_calls_that_are_gates_are_no_attention(by_rule: bool) -> None:
    def place(*_: Any) -> Any:
        raise LayoutError("no tokens")

    model = Model(lambda x: gating(x.flatten(2)))
    facts = {"place": place} if by_rule else {}
    seen = Seen(model, facts=facts)
    with seen.watch.watching():
        model(image())
        attends = seen.watch._attends(seen.tape())
        (attention,) = (attention for *_, attention in seen.calls)
    assert attention.doubtful
    located = seen.forwards[0].arrangement(seen.call, attention, model.attn)
    assert attends == (by_rule or located is not None)


def test_call_that_is_surely_attention_attends() -> None:
    model = Network()
    seen = Seen(model)
    with seen.watch.watching():
        model(image())
        assert seen.watch._attends(seen.tape())
        model(image())


# --- arrangements before the end


def test_layouts_may_be_asked_for_before_a_call_runs() -> None:
    found: list[Any] = []
    seen: Seen | None = None

    def replace(_layer: str, owner: nn.Module, call: Any, attention: Any, _compute: Any) -> None:
        assert seen is not None
        found.append(seen.watch.arranged(call, attention, owner))

    model = Network()
    seen = Seen(model, replace)
    with seen.watch.watching():
        for _ in range(2):
            model(image())
    kinds = [located[0].kind for located in found]
    assert kinds == ["self"] * 4
    for located in found:
        assert isinstance(located[0], Arrangement)
        assert located[0].queries.grid == (2, 3)


def test_conclusions_before_the_end_are_completed() -> None:
    seen: Seen | None = None

    def replace(_layer: str, owner: nn.Module, call: Any, attention: Any, _compute: Any) -> None:
        assert seen is not None
        seen.watch.arranged(call, attention, owner)

    model = Network()
    seen = Seen(model)
    with seen.watch.watching():
        model(image())
    assert seen.tape().conclusions is None
    seen = Seen(model, replace, remember=False)
    with seen.watch.watching():
        model(image())
    conclusions: Any = seen.tape().conclusions
    assert list(conclusions.calls) == [attention for *_, attention in seen.calls]
    assert seen.forwards[0].conclusions() is conclusions


@pytest.mark.parametrize(("remember", "whole", "kept"), [(True, True, 1), (False, True, 0), (True, False, 0), (False, False, 0)])
def test_only_whole_tapes_are_remembered(remember: bool, whole: bool, kept: int) -> None:
    model = Network()
    seen: Seen | None = None

    def replace(*_: Any) -> None:
        tracer = seen.watch._mode.tracer if seen is not None else None
        if tracer is not None and not whole:
            tracer.distrust()

    seen = Seen(model, replace, remember=remember)
    with seen.watch.watching():
        model(image())
    assert len(TAPES.of(model)) == kept
