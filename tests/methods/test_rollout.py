from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import visattn
from tests import tiny
from tests.conftest import Figures, Seen
from tests.oracles import maps as oracles
from tests.samples import sampled
from visattn.core import methods
from visattn.core.methods.sinks import THRESHOLD, find_sinks
from visattn.core.operators import MatrixOperator, SoftmaxOperator
from visattn.core.records import Recording
from visattn.errors import OptionError

CLOSE: Any = {"atol": 1e-6, "rtol": 2e-5}
both = pytest.mark.parametrize("implementation", ["tiles", "reversed"])
FUSIONS = ["mean", "max", "min"]


def layers_of(made: Recording, image: int) -> list[list[Tensor]]:
    """Compute each layer's heads of one image by nested loops."""
    return [list(tiny.matrices(record)[image]) for record in made if record.kind == "self"]


def on_grid(row: Tensor, made: Recording) -> Tensor:
    """Return the patches of a row of the rollout matrix."""
    layout = made[0].keys
    return row[len(layout.prefix) :].reshape(layout.grid)


def expected_maps(made: Recording, query: Tensor, **options: Any) -> Tensor:
    """Compute the dense rollout of each image, read by the weights of its queries."""
    images = range(made[0].operator.shape[0])
    return torch.stack([on_grid(query.double() @ oracles.rollout(layers_of(made, i), **options), made) for i in images])


def one_hot(token: int, tokens: int) -> Tensor:
    return F.one_hot(torch.tensor(token), tokens).float()


def captured(name: str, batch: int) -> Recording:
    model = tiny.MODELS[name].build()
    with torch.no_grad(), visattn.capture(model) as made:
        model(tiny.pixels(batch))
    return made


# comparison with the dense product


@both
@pytest.mark.parametrize("batch", [1, 3], ids=["one image", "three images"])
@pytest.mark.parametrize("name", list(tiny.MODELS))
def test_map_equals_the_dense_product(name: str, batch: int, implementation: Any) -> None:
    made = captured(name, batch)
    tokens = len(made[0].keys)
    result = methods.rollout(made, query="patch:1,2", implementation=implementation)
    assert (result.axes, result.layout) == (("batch",), made[0].keys)
    np.testing.assert_allclose(result.values, expected_maps(made, one_hot(tokens - 1, tokens)), **CLOSE)


READOUTS = {
    "cls": (("cls",), "cls", {0: 1.0}),
    "cls and distillation": (("cls", "distillation"), "cls+distillation", {0: 0.5, 1: 0.5}),
    "cls before 4 registers": (("cls", *tiny.REGISTERS), "cls", {0: 1.0}),
    "mean without prefix": ((), "mean", {i: 1 / 35 for i in range(35)}),
    "mean beside cls": (("cls",), "mean", {i: 1 / 35 for i in range(1, 36)}),
}


@both
@pytest.mark.parametrize("name", list(READOUTS))
def test_automatic_query_is_the_models_readout(name: str, implementation: Any) -> None:
    prefix, way, weights = READOUTS[name]
    made = tiny.recording(batch=3, layers=3, prefix=prefix, grid=(5, 7), readout=way)
    query = torch.zeros(len(made[0].keys))
    query[list(weights)] = torch.tensor(list(weights.values()))
    result = methods.rollout(made, implementation=implementation)
    np.testing.assert_allclose(result.values, expected_maps(made, query), **CLOSE)


def test_query_weights_are_applied_to_each_image_separately() -> None:
    made = tiny.recording(batch=2, layers=3)
    query = torch.stack([one_hot(2, 7), one_hot(5, 7)])
    result = methods.rollout(made, query=query)
    np.testing.assert_allclose(result.values[0], expected_maps(made, query[0])[0], **CLOSE)
    np.testing.assert_allclose(result.values[1], expected_maps(made, query[1])[1], **CLOSE)


@pytest.mark.parametrize("start", [0, 1, 2], ids=lambda start: f"from layer {start}")
@pytest.mark.parametrize("residual", sampled([0.5, 0, 0.8, 1], 4))
@pytest.mark.parametrize("fusion", FUSIONS)
def test_options_equal_the_dense_product(fusion: Any, residual: float, start: int) -> None:
    made = tiny.recording(batch=2, layers=3, heads=3, prefix=("cls", "register0"), grid=(5, 7))
    result = methods.rollout(made, fusion=fusion, residual=residual, start_layer=start)
    expected = expected_maps(made, one_hot(0, 37), fusion=fusion, residual=residual, start=start)
    np.testing.assert_allclose(result.values, expected, **CLOSE)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_float64_equals_the_dense_product_rounded_once(fusion: Any) -> None:
    made = tiny.recording(batch=2, layers=3)
    result = methods.rollout(made, fusion=fusion, dtype=torch.float64)
    np.testing.assert_allclose(result.values, expected_maps(made, one_hot(0, 7), fusion=fusion), atol=0, rtol=1e-7)


def test_residual_of_one_gives_the_query_itself() -> None:
    made = tiny.recording(grid=(5, 7))
    values = methods.rollout(made, residual=1, query="patch:2,3").values[0]
    assert values.nonzero().tolist() == [[2, 3]]
    assert float(values[2, 3]) == 1


def test_layers_are_multiplied_first_rightmost() -> None:
    made = tiny.recording(layers=3)
    turned = replace(made, records=made.records[::-1])
    difference = methods.rollout(made).values - methods.rollout(turned).values
    assert difference.abs().max() > 1e-2


def test_one_layer_without_residual_is_the_fused_attention() -> None:
    made = tiny.recording(layers=1, grid=(5, 7))
    rolled = methods.rollout(made, residual=0).values
    torch.testing.assert_close(rolled, methods.attention(made, fusion="mean").values)


def test_rollout_of_explicit_weights_equals_that_of_their_softmax() -> None:
    made = tiny.recording(batch=2, layers=3)
    explicit = [replace(record, operator=MatrixOperator(record.operator.dense())) for record in made]
    torch.testing.assert_close(methods.rollout(replace(made, records=explicit)).values, methods.rollout(made).values)


# rows of the rollout sum to one


@settings(derandomize=True, max_examples=20, deadline=None)
@given(
    fusion=st.sampled_from(FUSIONS),
    residual=st.floats(0, 1),
    treatment=st.sampled_from(["keep", "drop", "redistribute"]),
    batch=st.integers(1, 3),
    seed=st.integers(0, 50),
)
def test_rollout_rows_sum_to_one(fusion: Any, residual: float, treatment: Any, batch: int, seed: int) -> None:
    made = tiny.recording(batch=batch, prefix=(), readout="mean", seed=seed)
    values = methods.rollout(made, fusion=fusion, residual=residual, sinks=treatment, query="patch:1,0").values
    assert values.min() >= 0
    np.testing.assert_allclose(values.sum((1, 2)), 1, atol=1e-5)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_patches_and_what_reaches_the_prefix_sum_to_one(fusion: Any) -> None:
    made = tiny.recording(batch=3, layers=3, prefix=("cls", "register0"), grid=(5, 7))
    values = methods.rollout(made, fusion=fusion).values
    to_prefix = torch.stack([oracles.rollout(layers_of(made, i), fusion=fusion)[0, :2].sum() for i in range(3)])
    np.testing.assert_allclose(values.sum((1, 2)) + to_prefix, 1, atol=1e-6)
    assert to_prefix.min() > 0.1


@pytest.mark.parametrize("fusion", FUSIONS)
def test_heads_without_common_keys_give_finite_maps(fusion: Any) -> None:
    halves = torch.zeros(1, 2, 1, 7)
    halves[0, 0, 0, :3] = halves[0, 1, 0, 3:] = -math.inf
    place = tiny.layout()
    operator = SoftmaxOperator(*tiny.operands(7), halves)
    values = methods.rollout(Recording(records=[tiny.record(operator, place)]), fusion=fusion).values
    assert values.isfinite().all()
    assert values.min() >= 0


# sinks

SUNK = {"blocks.0.attn": (3 + 9, 3 + 40), "blocks.1.attn": (3 + 9,)}  # patches 0,9 and 3,1 of a 7 x 13 grid


def sinking(batch: int = 1, layers: int = 3) -> Recording:
    """Record three prefix tokens and 7 x 13 patches with two sinks that receive a third of all attention each; only in the first image."""
    place = tiny.layout(("cls", "register0", "register1"), (7, 13))
    made = Recording()
    for i in range(layers):
        query, key = tiny.operands(len(place), batch=batch, heads=2, sharpness=0.7, seed=i)
        bias = torch.zeros(batch, 1, 1, len(place))
        bias[0, ..., list(SUNK.get(f"blocks.{i}.attn", ()))] = math.log(60)
        made.records.append(tiny.record(SoftmaxOperator(query, key, bias), place, layer=f"blocks.{i}.attn"))
    return made


def test_planted_sinks_are_found() -> None:
    found = find_sinks(sinking())
    assert {made.row * 13 + made.column + 3 for made in found[0]} == {12, 43}


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("treatment", ["keep", "drop", "redistribute"])
def test_treatment_of_sinks_equals_the_dense_product(treatment: Any, fusion: Any) -> None:
    made = sinking()
    result = methods.rollout(made, sinks=treatment, fusion=fusion)
    expected = expected_maps(made, one_hot(0, 94), sunk=(12, 43), treatment=treatment, fusion=fusion, prefix=3)
    np.testing.assert_allclose(result.values, expected, **CLOSE)
    assert result.provenance.parameters["sinks"] == treatment


@pytest.mark.parametrize(
    ("fusion", "treatment", "implementation"),
    [("mean", "keep", "tiles"), ("mean", "keep", "reversed"), ("max", "keep", "tiles"), ("mean", "redistribute", "tiles")],
)
def test_order_in_which_an_operator_keeps_its_tokens_does_not_matter(fusion: Any, treatment: Any, implementation: Any) -> None:
    made, records = sinking(), []
    order = torch.randperm(94, generator=torch.Generator().manual_seed(0))
    for record in made:
        operator = record.operator
        assert isinstance(operator, SoftmaxOperator)
        assert operator.bias is not None
        query, key, bias = operator.query[:, :, 0, order], operator.key[:, :, 0, order], operator.bias[:, :, 0][..., order]
        shuffled = SoftmaxOperator(query, key, bias, None, order[None], order[None])
        records.append(replace(record, operator=shuffled))
    expected, result = (
        methods.rollout(recording, fusion=fusion, sinks=treatment, implementation=implementation)
        for recording in (made, replace(made, records=records))
    )
    torch.testing.assert_close(result.values, expected.values, atol=1e-7, rtol=1e-5)


def test_each_image_has_its_own_sinks() -> None:
    made = sinking(batch=2)
    result = methods.rollout(made, sinks="drop")
    query = one_hot(0, 94)
    treated = expected_maps(made, query, sunk=(12, 43), treatment="drop", prefix=3)
    np.testing.assert_allclose(result.values[0], treated[0], **CLOSE)
    np.testing.assert_allclose(result.values[1], expected_maps(made, query)[1], **CLOSE)
    assert [len(sinks) for sinks in result.provenance.sinks] == [2, 0]


@pytest.mark.parametrize("treatment", ["drop", "redistribute"])
def test_treated_sinks_get_nothing_from_others(treatment: Any) -> None:
    values = methods.rollout(sinking(), sinks=treatment).values[0]
    assert float(values[0, 9]) == float(values[3, 1]) == 0
    assert values.sum() > 0.5


def test_warns_about_kept_sinks() -> None:
    warnings = methods.rollout(sinking()).at(batch=0).provenance.warnings
    assert len(warnings) == 1
    assert "2 sinks receive many times the uniform share of attention, averaged over queries: patch 0,9 (" in warnings[0]


def test_dropped_sinks_are_recorded_without_a_warning() -> None:
    provenance = methods.rollout(sinking(), sinks="drop").at(batch=0).provenance
    assert provenance.warnings == ()
    assert {(sink.row, sink.column) for sink in provenance.sinks[0]} == {(0, 9), (3, 1)}


def test_warning_of_one_image_is_not_given_to_another() -> None:
    result = methods.rollout(sinking(batch=2))
    assert len(result.at(batch=0).provenance.warnings) == 1
    assert result.at(batch=1).provenance.warnings == ()


@both
def test_both_implementations_find_the_same_sinks(implementation: Any) -> None:
    made = sinking()
    found = methods.rollout(made, implementation=implementation).provenance.sinks[0]
    expected = oracles.sinks(layers_of(made, 0), 3, THRESHOLD)
    assert {sink.row * 13 + sink.column + 3: pytest.approx(sink.score, abs=0.01) for sink in found} == expected


def test_sinks_of_skipped_layers_are_also_found() -> None:
    found = methods.rollout(sinking(), start_layer=2).provenance.sinks[0]
    assert {(sink.row, sink.column) for sink in found} == {(0, 9), (3, 1)}


# refusals


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"fusion": "median"}, "unknown fusion 'median'"),
        ({"sinks": "remove"}, "unknown sinks 'remove'"),
        ({"residual": 1.5}, "residual must be a number from 0 to 1, got 1.5"),
        ({"residual": -0.1}, "residual must be a number from 0 to 1"),
        ({"residual": math.nan}, "residual must be a number from 0 to 1, got nan"),
        ({"start_layer": 2}, r"start_layer must lie in \[0, 1\], got 2"),
        ({"start_layer": -1}, r"start_layer must lie in \[0, 1\], got -1"),
        ({"query": "clss"}, "unknown query 'clss'"),
        ({"implementation": "dense"}, "'dense'"),
        ({"implementation": "dense", "fusion": "max"}, "'dense'"),
        ({"implementation": "reversed", "fusion": "max"}, "supports only fusion='mean' and sinks='keep'"),
        ({"implementation": "reversed", "sinks": "drop"}, "supports only fusion='mean' and sinks='keep'"),
        ({"dtype": torch.float16}, "dtype must be"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_rollout_refuses(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        methods.rollout(tiny.recording(), **choice)


def test_reversed_implementation_of_explicit_weights_is_refused() -> None:
    made = tiny.recording()
    explicit = [replace(record, operator=MatrixOperator(record.operator.dense())) for record in made]
    with pytest.raises(OptionError, match="MatrixOperator computes r @ A only with implementation='tiles'"):
        methods.rollout(replace(made, records=explicit), implementation="reversed")


@pytest.mark.parametrize("second", [tiny.layout(grid=(3, 2)), tiny.layout(space="stage 2")], ids=["other grid", "other space"])
def test_layers_over_different_tokens_are_refused(second: Any) -> None:
    made = tiny.recording()
    made.records[1] = replace(made[1], queries=second, keys=second)
    with pytest.raises(
        OptionError, match=r"blocks\.0\.attn \(2 x 3\) and blocks\.1\.attn \(\d x \d\) attend over different tokens"
    ):
        methods.rollout(made)


def test_rows_that_are_not_distributions_are_refused() -> None:
    made = tiny.recording()
    made.records[1] = replace(made[1], operator=MatrixOperator(2 * made[1].operator.dense()))
    with pytest.raises(OptionError, match="attention rows do not sum to 1 in this model"):
        methods.rollout(made)


def test_recording_without_self_attention_is_refused() -> None:
    with pytest.raises(OptionError, match=r"there is no self-attention to multiply: no layer .*Use method 'gradcam'"):
        methods.rollout(Recording())


def test_several_forwards_are_refused() -> None:
    made = tiny.recording()
    made.records += [replace(record, forward=1) for record in made]
    with pytest.raises(OptionError, match="holds 2 forward passes"):
        methods.rollout(made)


# real photos


class RealLayers(Sequence[list[Tensor]]):
    """Float64 matrices of the first image, with one layer in memory at a time."""

    def __init__(self, made: Recording) -> None:
        self.made = made

    def __len__(self) -> int:
        return len(self.made)

    def __getitem__(self, index: Any) -> Any:
        operator = self.made[index].operator
        assert isinstance(operator, SoftmaxOperator)
        return [oracles.head_matrix(q, k) for q, k in zip(operator.query[0, :, 0], operator.key[0, :, 0], strict=True)]

    def __iter__(self) -> Iterator[list[Tensor]]:
        return (self[i] for i in range(len(self)))


@pytest.fixture(scope="module")
def real_rollout(seen: Seen, dinov2: nn.Module) -> Callable[[int], tuple[Recording, Tensor]]:
    """Return the recording of the astronaut at a size, and the dense rollout of the class token."""

    @cache
    def of(size: int) -> tuple[Recording, Tensor]:
        prepared, made = seen("astronaut")
        if size != 518:
            with torch.inference_mode(), visattn.capture(dinov2) as made:
                dinov2(F.interpolate(prepared.pixels, (size, size), mode="bilinear", antialias=True))
        return made, on_grid(oracles.rollout(RealLayers(made))[0], made)

    return of


@pytest.mark.full
@pytest.mark.real
@both
@pytest.mark.parametrize("size", [224, 518], ids=lambda size: f"{size} px")
def test_rollout_of_dinov2_equals_the_dense_product(
    size: int, implementation: Any, real_rollout: Callable[[int], tuple[Recording, Tensor]], figures: Figures
) -> None:
    made, expected = real_rollout(size)
    error = methods.rollout(made, implementation=implementation).values[0].double() - expected
    worst, total = float(error.abs().max() / expected.max()), float(error.abs().sum())
    figures(f"rollout at {size} px, {implementation}: worst error over largest value", worst, "<= 1e-5")
    figures(f"rollout at {size} px, {implementation}: L1 error", total, "<= 1e-5")
    assert len(made) == 12
    assert worst <= 1e-5
    assert total <= 1e-5


@pytest.mark.real
@pytest.mark.parametrize("fusion", ["max", "min"])
def test_fused_rollout_of_dinov2_equals_the_dense_product(fusion: Any, seen: Seen, dinov2: nn.Module, figures: Figures) -> None:
    x = F.interpolate(seen("coffee")[0].pixels, (140, 210), mode="bilinear", antialias=True)
    with torch.inference_mode(), visattn.capture(dinov2) as made:
        dinov2(x)
    expected = on_grid(oracles.rollout(RealLayers(made), fusion=fusion)[0], made)
    error = methods.rollout(made, fusion=fusion).values[0].double() - expected
    worst = float(error.abs().max() / expected.max())
    figures(f"rollout at 140 x 210 px, fusion {fusion}: worst error over largest value", worst, "<= 1e-5")
    assert worst <= 1e-5


def test_heads_without_common_keys_give_the_token_itself() -> None:
    """Use two heads that attend to different halves: their minimum is empty, and no mass is lost."""
    first = torch.tensor([[0.5, 0.5, 0, 0], [0, 0, 1, 0], [0.5, 0.5, 0, 0], [0, 0, 0, 1]])
    weights = torch.stack([first, first.roll(2, dims=1)])[None]
    layout = tiny.layout((), (2, 2))
    made = replace(tiny.recording(), records=[tiny.record(MatrixOperator(weights), layout)])
    values = methods.rollout(made, fusion="min", query="patch:0,1").values[0]
    assert values.flatten().tolist() == [0, 1, 0, 0]
