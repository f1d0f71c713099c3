"""Recording by hand: which modules are kept, what becomes of their outputs, and what a recording without attention says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from visattn._support.parts import parts_of
from visattn.core.capturing import recorder
from visattn.core.capturing.description import ModelDescription
from visattn.core.capturing.no_attention import why
from visattn.core.capturing.recorder import _chosen, _first, _Session, _Stream
from visattn.core.capturing.tokens.arrangement import Tokens
from visattn.core.geometry import Box
from visattn.core.records import FeatureRecord, TokenLayout, UnseenAttention
from visattn.errors import CaptureError, NoAttentionCaptured, OptionError

BOX = Box(0.0, 0.0, 8.0, 12.0)
GRID = TokenLayout("tokens", (), (2, 3), BOX)
CLASS = TokenLayout("tokens", ("cls",), (2, 3), BOX)
LOOSE = TokenLayout("tokens", tuple(f"query{number}" for number in range(6)), (), BOX)


def numbers(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def network() -> nn.Module:
    """Return a network of three blocks, each of which has one layer."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(3)))


def described(model: nn.Module, **facts: Any) -> ModelDescription:
    return ModelDescription({name: model.get_submodule(name) for name in ("0", "1", "2")}, "cls", **facts)


def session(*, layers: str = "*", values: bool = False, gradients: bool = False, wants: int = 7, **facts: Any) -> Any:
    """Return a session in a running forward pass in which each tensor has the slot `wants`."""
    model = network()
    made: Any = _Session(model, described(model, **facts), layers, values, gradients, True)
    made.wanted = []
    state = {"forward": 0, "images": True, "whole": True, "ended": True, "hidden": {}}
    made.watch = SimpleNamespace(running=lambda: True, want=lambda tensor: made.wanted.append(tensor) or wants, **state)
    return made


def forward(tokens: Tokens | None = None, slot: int = 7, number: int = 0, **facts: Any) -> Any:
    """Return a forward pass that has ended, in which one slot has tokens."""
    facts = {"inputs": ((8, 12), 2), "conclusions": lambda: None} | facts
    return SimpleNamespace(number=number, tokens=lambda asked: tokens if asked == slot else None, **facts)


def kept(made: Any, call: Any = None) -> FeatureRecord:
    """Return the only feature, at the end of the forward pass."""
    (keep,) = made._features
    keep(call or forward())
    (feature,) = made.recording.features
    return cast(FeatureRecord, feature)


# --- chosen modules


@pytest.mark.parametrize(
    ("features", "ends", "tokens", "activations"),
    [
        ("none", (), [], []),
        ("all", (), ["0", "1", "2"], []),
        ("last", (), ["2"], []),
        ("last", ("0", "1"), ["0", "1"], []),
        ("*", (), [], ["0", "0.0", "1", "1.0", "2", "2.0"]),
        ("1*", (), [], ["1", "1.0"]),
        (["0", "2.?"], (), [], ["0", "2.0"]),
    ],
)
def test_features_are_tokens_by_word_and_activations_by_name(
    features: Any, ends: tuple[str, ...], tokens: list[str], activations: list[str]
) -> None:
    model = network()
    chosen = _chosen(parts_of(model), described(model, ends=ends), features)
    assert [list(found) for found in chosen] == [tokens, activations]
    assert all(module is model.get_submodule(name) for found in chosen for name, module in found.items())


def test_name_that_no_module_has_is_refused() -> None:
    model = network()
    with pytest.raises(OptionError, match="'3, x'"):
        _chosen(parts_of(model), described(model), ["3", "x"])


# --- outputs that are kept


def test_output_of_tokens_is_copied_and_brought_in_order() -> None:
    made, order = session(), torch.tensor([2, 0, 1, 5, 4, 3])
    output = numbers(2, 6, 4)
    given = output.clone()
    assert made.keep_output("block", tokens_alone=True)(nn.Identity(), (), (output, "more")) is None
    output.zero_()
    feature = kept(made, forward(Tokens(GRID, 2, order)))
    assert (feature.layer, feature.forward, feature.role, feature.layout, feature.source) == ("block", 0, "tokens", GRID, None)
    assert torch.equal(feature.value, given[:, order])
    assert [one is output for one in made.wanted] == [True]


def test_kept_tensors_lie_in_their_own_order_in_memory() -> None:
    made = session()
    made.keep_output("block", tokens_alone=True)(nn.Identity(), (), numbers(2, 4, 2, 3))
    feature = kept(made, forward(Tokens(GRID, 1, None)))
    assert torch.equal(feature.value, numbers(2, 4, 2, 3).flatten(2).mT)
    assert feature.value.is_contiguous()


@pytest.mark.parametrize("tokens_alone", [True, False])
def test_only_tensors_of_the_running_forward_pass_are_kept(tokens_alone: bool) -> None:
    made = session()
    callback = made.keep_output("block", tokens_alone=tokens_alone)
    assert callback(nn.Identity(), (), None) is None
    assert callback(nn.Identity(), (), ("text", numbers(2, 6, 4))) is None
    assert callback(nn.Identity(), (), ()) is None
    made.watch.running = lambda: False
    assert callback(nn.Identity(), (), numbers(2, 6, 4)) is None
    assert (made._features, made.wanted) == ([], [])


def test_tokens_without_places_are_not_kept() -> None:
    made = session()
    made.keep_output("block", tokens_alone=True)(nn.Identity(), (), numbers(2, 6, 4))
    (keep,) = made._features
    keep(forward())
    assert made.recording.features == []


@pytest.mark.parametrize(
    ("shape", "tokens", "role", "layout"),
    [
        ((2, 6, 4), Tokens(GRID, 2, None), "tokens", GRID),
        ((2, 6, 4), None, "activation", None),
        ((2, 2, 3, 4), Tokens(GRID, 3, None), "activation", GRID),
        ((2, 2, 3, 4), Tokens(GRID, 3, torch.arange(6)), "activation", None),
        ((2, 2, 3, 4), Tokens(LOOSE, 3, None), "activation", None),
        ((2, 2, 3, 4), None, "activation", None),
        ((2, 5), Tokens(GRID, 1, None), "activation", None),
        ((2, 1, 2, 3, 4), Tokens(GRID, 4, None), "activation", None),
    ],
)
def test_activation_is_tokens_or_a_map_if_it_has_places(
    shape: tuple[int, ...], tokens: Tokens | None, role: str, layout: TokenLayout | None
) -> None:
    made = session()
    assert not made._wanted
    keep = made.keep_output("layer", tokens_alone=False)
    assert made._wanted
    given = numbers(*shape)
    assert keep(nn.Identity(), (), given) is None
    feature = kept(made, forward(tokens))
    assert (feature.role, feature.layout) == (role, layout)
    is_moved = role == "activation" and layout is not None
    assert torch.equal(feature.value, given.movedim(3, 1) if is_moved else given)
    assert len(made.wanted) == (len(shape) in (3, 4))


def test_output_without_a_graph_starts_one_if_gradients_are_needed() -> None:
    made, output = session(gradients=True), numbers(2, 6, 4)
    replaced, more = made.keep_output("block", tokens_alone=True)(nn.Identity(), (), (output, "more"))
    assert (replaced is output, replaced.requires_grad, replaced.is_leaf, more) == (False, True, True, "more")
    assert torch.equal(replaced, output)
    source = kept(made, forward(Tokens(GRID, 2, None))).source
    assert source is not None
    assert source.tensor is replaced
    in_graph = output.clone().requires_grad_() * 2
    assert made.keep_output("block", tokens_alone=True)(nn.Identity(), (), in_graph) is None


def test_activation_is_exchanged_for_a_copy_if_gradients_are_needed() -> None:
    made = session(gradients=True)
    output = numbers(2, 5).requires_grad_() * 2
    clone = made.keep_output("layer", tokens_alone=False)(nn.Identity(), (), output)
    clone.mul_(0)
    assert torch.equal(output, numbers(2, 5) * 2)
    source = kept(made).source
    assert source is not None
    assert source.tensor is output


# --- gates


@pytest.mark.parametrize(
    ("role", "shape", "stored_role", "stored_shape"),
    [
        ("channel_gate", (2, 5, 1, 1), "channel_gate", (2, 5)),
        ("channel_gate", (2, 5), "channel_gate", (2, 5)),
        ("gate", (2, 5, 1, 1), "channel_gate", (2, 5)),
        ("gate", (2, 5, 2, 3), "gate", (2, 5, 2, 3)),
        ("gate", (2, 5, 1, 3), "gate", (2, 5, 1, 3)),
        ("gate", (2, 5, 3, 1), "gate", (2, 5, 3, 1)),
        ("spatial_gate", (2, 1, 1, 1), "spatial_gate", (2, 1, 1, 1)),
        ("branch_gate", (2, 3, 5, 1, 1), "branch_gate", (2, 3, 5)),
    ],
)
def test_gates_have_the_axes_of_their_role(
    role: Any, shape: tuple[int, ...], stored_role: str, stored_shape: tuple[int, ...]
) -> None:
    made = session()
    (module, *_) = list(made._names)[1:]
    made.keep_gate(module, role, numbers(*shape), None)
    assert made._wanted
    assert len(made.wanted) == (stored_role in ("gate", "spatial_gate"))
    feature = kept(made)
    assert (feature.layer, feature.role, tuple(feature.value.shape), feature.layout) == ("0", stored_role, stored_shape, None)
    assert torch.equal(feature.value, numbers(*stored_shape))


@pytest.mark.parametrize(
    ("role", "shape", "tokens", "has_layout"),
    [
        ("gate", (2, 5, 2, 3), Tokens(GRID, 1, None), True),
        ("gate", (2, 5, 3, 2), Tokens(GRID, 1, None), False),
        ("gate", (2, 5, 2, 3), Tokens(GRID, 1, torch.arange(6)), False),
        ("transform", (2, 2, 3), Tokens(GRID, 1, None), True),
        ("glimpse", (2, 1, 4), Tokens(GRID, 1, None), True),
    ],
)
def test_gate_lies_on_the_grid_of_its_features(role: Any, shape: tuple[int, ...], tokens: Tokens, has_layout: bool) -> None:
    made, features = session(), numbers(2, 5, 2, 3)
    module = list(made._names)[1]
    made.keep_gate(module, role, numbers(*shape), features)
    assert [one is features for one in made.wanted] == [True]
    assert kept(made, forward(tokens)).layout == (GRID if has_layout else None)


def test_gate_without_features_lies_on_its_own_grid() -> None:
    made, gate = session(), numbers(2, 5, 2, 3)
    made.keep_gate(list(made._names)[1], "gate", gate, None)
    assert [one is gate for one in made.wanted] == [True]


def test_gates_of_other_modules_or_outside_a_forward_pass_are_not_kept() -> None:
    made = session()
    made.keep_gate(nn.Identity(), "gate", numbers(2, 5, 2, 3), None)
    made.watch.running = lambda: False
    made.keep_gate(next(iter(made._names)), "gate", numbers(2, 5, 2, 3), None)
    assert (made._features, made.wanted, made._wanted) == ([], [], False)


# --- residual streams


def test_streams_are_the_modules_that_attention_is_added_to() -> None:
    to: Callable[[nn.Module], str | None] = lambda module: "1" if isinstance(module, nn.Linear) else None  # noqa: E731
    made = session(values=True, adds_to=to)
    assert made.streams() == [("1", made._description.tokens["1"])]
    assert session(adds_to=to).streams() == []
    assert session(values=True, adds_to=to, place=cast(Any, len)).streams() == []


def test_input_of_a_block_is_copied() -> None:
    made, given = session(), numbers(2, 6, 4)
    keep = made.keep_stream("1")
    for args in ((), ("text", given)):
        keep(nn.Identity(), args)
    assert made._stream == {}
    keep(nn.Identity(), (given, numbers(1)))
    assert [one is given for one in made.wanted] == [True]
    stream = made._stream.pop("1")
    given.zero_()
    assert torch.equal(stream.value, numbers(2, 6, 4))
    assert stream.slot == 7
    made.watch.running = lambda: False
    keep(nn.Identity(), (given,))
    assert made._stream == {}


def test_residual_stream_has_the_order_of_the_queries() -> None:
    made, value, order = session(), numbers(2, 6, 4), torch.tensor([5, 4, 3, 2, 1, 0])
    tokens = Tokens(GRID, 2, order)
    residual = made._residual(forward(tokens), _Stream(value, 7), GRID)
    assert torch.equal(residual, value.flip(1))
    assert made._residual(forward(tokens), _Stream(value, 7), CLASS) is None
    assert made._residual(forward(tokens), _Stream(value, 8), GRID) is None
    assert made._residual(forward(tokens), None, GRID) is None


# --- several calls and branches


def feature(layer: str, number: int = 0, role: Any = "tokens", layout: TokenLayout | None = None) -> FeatureRecord:
    return FeatureRecord(layer, number, role, numbers(2, 6, 4) if role == "tokens" else numbers(2, 5), layout=layout)


def test_calls_of_a_module_are_numbered_in_each_forward_pass() -> None:
    made = session()
    given = [feature("a"), feature("a", 1), feature("b", 1), feature("a", 1), feature("a", 1, "channel_gate"), feature("a", 1)]
    made.recording.features = [*given, feature("b", 1, "channel_gate")]
    made._count_calls(forward(number=1))
    counted = [(one.layer, one.forward, one.call, one.calls) for one in made.recording.features]
    assert counted == [
        *(("a", 0, 0, 1), ("a", 1, 0, 3), ("b", 1, 0, 1), ("a", 1, 1, 3)),
        *(("a", 1, 0, 1), ("a", 1, 2, 3), ("b", 1, 0, 1)),
    ]


def test_two_calls_of_a_module_are_numbered() -> None:
    made = session()
    made.recording.features = [feature("a", role="activation"), feature("a", role="activation")]
    made._count_calls(forward())
    assert [(one.call, one.calls) for one in made.recording.features] == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("layouts", "last"),
    [((None, GRID, GRID, None), 2), ((None, GRID, LOOSE), 1), ((None, LOOSE), 1), ((None, None, None), 2), ((GRID,), 0)],
)
def test_last_tokens_on_a_grid_are_kept(layouts: Sequence[TokenLayout | None], last: int) -> None:
    made = session()
    others = [feature("other", 1, layout=GRID), feature("gate", 2, "channel_gate")]
    of_pass = [feature(str(number), 2, layout=layout) for number, layout in enumerate(layouts)]
    made.recording.features = [*others, *of_pass]
    made._keep_last(forward(number=2))
    assert [one.layer for one in made.recording.features] == ["other", "gate", str(last)]


# --- the end of a capture


def test_recording_of_a_model_that_did_not_run_is_refused() -> None:
    made = session()
    for number, message in ((-1, "not run inside"), (0, "no attention captured"), (1, "no attention captured")):
        made.watch.forward = number
        with pytest.raises(CaptureError if number < 0 else NoAttentionCaptured, match=message):
            made.finish()


@pytest.mark.parametrize(("whole", "message"), [(True, "was given no floating"), (False, "a part of the model ran before")])
def test_recording_without_images_is_refused(whole: bool, message: str) -> None:
    made = session()
    made.watch.images, made.watch.whole = False, whole
    with pytest.raises(CaptureError, match=message):
        made.finish()


@pytest.mark.parametrize("is_full", ["records", "wanted", ""])
@pytest.mark.parametrize("has_ended", [False, True])
def test_recording_needs_attention_or_features_that_were_asked_for(
    is_full: str, has_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = session()
    made.watch.ended = has_ended
    made._wanted = is_full == "wanted"
    made._finite = [lambda: True, lambda: False]
    checked: list[Any] = []
    monkeypatch.setattr(recorder, "check_finite", checked.append)
    if is_full == "records":
        made.recording.records.append(SimpleNamespace(layer="attn"))
    if is_full:
        made.finish()
        assert len(checked) == 1
        return
    with pytest.raises(
        NoAttentionCaptured if has_ended else CaptureError, match="multiplied" if has_ended else "returned an output"
    ):
        made.finish()


def test_recording_without_attention_says_why() -> None:
    unseen = [UnseenAttention("attn", 0, "runs elsewhere"), UnseenAttention("other", 0, "is lost")]
    nameless = [UnseenAttention("", 0, "runs elsewhere")]
    assert "matches '9'. The model's attention layers: a, b." in why(nn.ReLU(), "9", ["a", "b"], unseen)
    assert ": attn runs elsewhere, which" in why(nn.ReLU(), "*", [], unseen)
    assert ": ReLU runs elsewhere, which" in why(nn.ReLU(), "*", [], nameless)
    assert "no layer of ReLU multiplied" in why(nn.ReLU(), "*", [], [])


def test_first_part_of_an_output() -> None:
    given: list[Any] = [(1, 2), [3, 4, 5], (6,), (), 7, "89", {}]
    assert [_first(output) for output in given] == [1, 3, 6, (), 7, "89", {}]
