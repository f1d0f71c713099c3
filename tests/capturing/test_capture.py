"""Captured attention is exact, on a pretrained model and on tiny models with names and locations."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visattn
from tests import tiny
from tests.capturing.written_out import run, write_out
from tests.conftest import Figures, Seen
from tests.oracles import maps as oracles
from tests.samples import sampled
from visattn import models
from visattn.core.operators import SoftmaxOperator
from visattn.core.records import AttentionRecord

every_model = pytest.mark.parametrize("name", list(tiny.MODELS))


real = pytest.mark.real


SIZES = {"224 px, 257 tokens": 224, "518 px, 1370 tokens": 518}


every_size = pytest.mark.parametrize(
    "size", [pytest.param(size, marks=[pytest.mark.full] if size > 224 else [], id=name) for name, size in SIZES.items()]
)


def softmax_operator(record: AttentionRecord) -> SoftmaxOperator:
    assert isinstance(record.operator, SoftmaxOperator)
    return record.operator


def photo_at(seen: Seen, size: int) -> Tensor:
    """Return the astronaut image at another size."""
    return F.interpolate(seen("astronaut")[0].pixels, (size, size), mode="bilinear", antialias=True)


def outputs_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a dict that the next forward pass fills with the output of each module, by name."""
    outputs: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, __, out, name=name: outputs.__setitem__(name, out))
    return outputs


def worst_rows(record: AttentionRecord, dtype: torch.dtype) -> float:
    """Return the largest difference of any weight from the float64 softmax of the same query and key."""
    operator = softmax_operator(record)
    judged = operator.to(dtype)
    worst = 0.0
    exact = [oracles.head_matrix(q, k) for q, k in zip(operator.query[0, :, 0], operator.key[0, :, 0], strict=True)]
    for tile in judged.tiles(256):
        for head, matrix in enumerate(exact):
            worst = max(worst, float((tile.weights[0, head].double() - matrix[tile.queries]).abs().max()))
    return worst


@pytest.mark.full
@real
@pytest.mark.parametrize("layer", sampled(range(12), 4))
def test_rows_of_dinov2_equal_float64_softmax_of_its_query_and_key(layer: int, seen: Seen, figures: Figures) -> None:
    record = seen("astronaut")[1][layer]
    assert record.operator.shape == (1, 6, 1370, 1370)
    default, double = worst_rows(record, torch.float32), worst_rows(record, torch.float64)
    figures(f"capture at 518 px, layer {layer:2}: rows against float64, default", default, "<= 5e-5")
    figures(f"capture at 518 px, layer {layer:2}: rows against float64, float64 mode", double, "<= 1e-6")
    assert default <= 5e-5
    assert double <= 1e-6


@contextmanager
def weights_of_eager(model: nn.Module, receive: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Pass the attention weights of timm's unfused branch to `receive`, layer by layer."""
    blocks: Any = model.blocks
    handles = []
    for i, block in enumerate(blocks):
        handles.append(block.attn.attn_drop.register_forward_pre_hook(lambda _, args, i=i: receive(i, args[0])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.full
@real
def test_rows_of_dinov2_equal_timms_eager_branch(seen: Seen, eager: nn.Module, figures: Figures) -> None:
    prepared, recording = seen("astronaut")
    worst = {}

    def compare(layer: int, weights: Tensor) -> None:
        worst[layer] = max(
            float((weights[:, :, tile.queries] - tile.weights).abs().max()) for tile in recording[layer].operator.tiles()
        )

    with torch.no_grad(), weights_of_eager(eager, compare):
        eager(prepared.pixels)
    figures("capture at 518 px: rows against timm's eager branch, worst of 12 layers", max(worst.values()), "<= 5e-5")
    assert sorted(worst) == list(range(12))
    assert max(worst.values()) <= 5e-5


@real
@pytest.mark.full
def test_rows_of_dinov2_equal_the_model_written_out(seen: Seen, dinov2: nn.Module, figures: Figures) -> None:
    prepared, recording = seen("astronaut")
    plain = models.VisionTransformer((518, 518), 14)
    plain.load_state_dict(dinov2.state_dict())
    with torch.no_grad():
        tokens, weights = plain.eval()(prepared.pixels)
    worst = max(
        float((expected[:, :, tile.queries] - tile.weights).abs().max())
        for record, expected in zip(recording, weights, strict=True)
        for tile in record.operator.tiles()
    )
    figures("capture at 518 px: rows against visattn.models.VisionTransformer", worst, "<= 5e-5")
    assert worst <= 5e-5
    torch.testing.assert_close(recording.features[-1].value, tokens, atol=2e-3, rtol=1e-3)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "grad": nullcontext,
}


@real
@every_size
@pytest.mark.parametrize("mode", list(MODES))
def test_output_of_dinov2_is_the_same_bit_for_bit(size: int, mode: str, seen: Seen, dinov2: nn.Module) -> None:
    x = photo_at(seen, size)
    with MODES[mode]():
        plain = dinov2(x)
        with visattn.capture(dinov2) as recording:
            captured = dinov2(x)
    assert torch.equal(plain, captured)
    assert captured.requires_grad == (mode == "grad")
    assert len(recording) == 12
    assert not any(softmax_operator(record).query.requires_grad for record in recording)


@every_size
def test_log_sum_exp_is_read_above_512_tokens_only(size: int) -> None:
    side = size // 14 * 16
    _, recording = run(tiny.vit(img_size=(side, side)), tiny.pixels(size=(side, side)))
    assert all((softmax_operator(record).lse is not None) == (size == 518) for record in recording)


@pytest.mark.parametrize("sharp", [1, 4], ids=["peaky", "nearly one-hot"])
def test_rows_with_the_kernels_log_sum_exp_equal_float64(sharp: int) -> None:
    model = tiny.vit(img_size=(23 * 16, 24 * 16))
    with torch.no_grad():
        model.get_parameter("blocks.1.attn.qkv.weight").mul_(sharp)
    _, recording = run(model, tiny.pixels(size=(23 * 16, 24 * 16)))
    assert softmax_operator(recording[1]).lse is not None
    assert worst_rows(recording[1], torch.float32) <= 5e-5


@pytest.mark.parametrize("side", [2, 24], ids=["short", "long"])
@pytest.mark.parametrize("options", [{}, {"qk_norm": True}], ids=["plain", "query and key norm"])
def test_rows_of_a_model_under_autocast_sum_to_one(side: int, options: dict[str, Any]) -> None:
    size = (side * 16, (side + 1) * 16)
    with torch.autocast("cpu", torch.bfloat16):
        _, recording = run(tiny.vit(img_size=size, **options), tiny.pixels(size=size))
    np.testing.assert_allclose(recording[1].operator.dense().sum(-1), 1, atol=1e-5)


class Kernel:
    """Replacement for `scaled_dot_product_attention` that computes the float64 weights of its arguments and then calls the original."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights: list[Tensor] = []
        self._real = F.scaled_dot_product_attention
        monkeypatch.setattr(F, "scaled_dot_product_attention", self)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        bias = None
        if attn_mask is not None:
            shape = (*query.shape[:3], key.shape[2])
            bias = np.broadcast_to(oracles.array(attn_mask), shape)[:, :, None]
        scale = options.get("scale") or query.shape[-1] ** -0.5
        weights = oracles.block_weights(oracles.array(query)[:, :, None], oracles.array(key)[:, :, None], bias, scale)
        self.weights.append(torch.from_numpy(weights[:, :, 0]))
        return self._real(query, key, value, attn_mask=attn_mask, **options)


@every_model
@pytest.mark.parametrize("batch", [1, 3], ids=["one image", "three images"])
def test_weights_equal_nested_loops_over_the_kernels_arguments(name: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = tiny.MODELS[name].build(), tiny.pixels(batch)
    _, recording = run(model, x)
    with torch.no_grad():
        kernel = Kernel(monkeypatch)
        model(x)
    assert len(kernel.weights) == len(recording) >= 2
    assert all(
        np.allclose(record.operator.dense(), expected, atol=5e-6)
        for record, expected in zip(recording, kernel.weights, strict=True)
    )


@every_model
def test_attention_of_the_tiny_models_is_far_from_uniform(name: str) -> None:
    _, recording = run(tiny.MODELS[name].build(), tiny.pixels())
    assert min(float(record.operator.dense().max()) for record in recording.select(kind="self")) > 0.5


@pytest.mark.parametrize("name", ["cls", "cls and 4 registers", "beit with relative positions", "eva with rope"])
def test_weights_equal_timms_eager_branch(name: str) -> None:
    model, x = tiny.MODELS[name].build(), tiny.pixels(3)
    _, recording = run(model, x)
    seen: dict[int, Tensor] = {}
    write_out(model)
    with torch.no_grad(), weights_of_eager(model, seen.__setitem__):
        model(x)
    torch.testing.assert_close([record.operator.dense() for record in recording], [seen[0], seen[1]], atol=5e-6, rtol=1e-4)


@every_model
def test_prefix_tokens_and_grid_are_named(name: str) -> None:
    _, recording = run(tiny.MODELS[name].build(), tiny.pixels(2))
    records = recording.select(kind="self")
    assert records.layers == ["blocks.0.attn", "blocks.1.attn"]
    assert {record.keys for record in records} == {tiny.layout(tiny.MODELS[name].prefix)}
    assert {record.queries for record in records} == {tiny.layout(tiny.MODELS[name].prefix)}
    assert recording.input_size == tiny.INPUT


@pytest.mark.parametrize("name", ["map pooling", "map pooling beside cls"])
def test_pooling_head_attends_from_its_own_query_to_the_patches(name: str) -> None:
    _, recording = run(tiny.MODELS[name].build(), tiny.pixels(2))
    pool = recording[-1]
    assert (pool.layer, pool.kind, recording.readout) == ("attn_pool", "pool", "pool")
    assert (pool.queries.prefix, pool.queries.grid) == (("query0",), ())
    assert (pool.keys.prefix, pool.keys.grid) == ((), tiny.GRID)


@pytest.mark.parametrize(
    ("name", "readout"),
    [
        ("cls", "cls"),
        ("no prefix", "mean"),
        ("registers only", "mean"),
        ("cls and distillation", "cls+distillation"),
        ("eva with rope", "mean"),
    ],
)
def test_readout_names_the_tokens_that_the_model_classifies_from(name: str, readout: str) -> None:
    assert run(tiny.MODELS[name].build(), tiny.pixels())[1].readout == readout


@every_model
def test_output_of_tiny_models_is_the_same_bit_for_bit(name: str) -> None:
    model, x = tiny.MODELS[name].build(), tiny.pixels(3)
    with torch.no_grad():
        plain = model(x)
    assert torch.equal(run(model, x)[0], plain)


def test_gradients_are_the_same_bit_for_bit() -> None:
    gradients = []
    for context in (nullcontext, visattn.capture):
        model = tiny.vit()
        with context(model):
            model(tiny.pixels(2)).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("size", [(80, 112), (64, 32)], ids=["5 x 7", "4 x 2"])
def test_other_input_sizes_have_their_own_grid(size: tuple[int, int]) -> None:
    _, recording = run(tiny.vit(dynamic_img_size=True), tiny.pixels(size=size))
    assert recording[0].keys.grid == (size[0] // 16, size[1] // 16)
    assert list(recording[0].keys.box) == [0, 0, *size]
    assert recording.input_size == size


def test_two_forward_passes_are_recorded_separately() -> None:
    model = tiny.vit(dynamic_img_size=True)
    with torch.no_grad(), visattn.capture(model) as recording:
        model(tiny.pixels(2))
        model(tiny.pixels(1, (80, 112)))
    assert recording.forwards == [0, 1]
    assert [record.keys.grid for record in recording.select(forward=0)] == [(2, 3)] * 2
    assert [record.keys.grid for record in recording.select(forward=-1)] == [(5, 7)] * 2
    assert [record.call for record in recording] == [0] * 4
    alone = run(model, tiny.pixels(1, (80, 112)))[1]
    assert torch.equal(recording.select(forward=1)[1].operator.dense(), alone[1].operator.dense())


@pytest.mark.parametrize(
    ("features", "layers"),
    [("last", ["norm"]), ("all", ["blocks.0", "blocks.1", "norm"]), ("none", [])],
    ids=["last", "all", "none"],
)
def test_chosen_features_are_the_modules_outputs(features: Any, layers: list[str]) -> None:
    model = tiny.vit(reg_tokens=4)
    outputs = outputs_of(model)
    _, recording = run(model, tiny.pixels(2), features=features)
    assert [feature.layer for feature in recording.features] == layers
    assert all(torch.equal(feature.value, outputs[feature.layer]) for feature in recording.features)
    assert all(feature.layout == recording[0].keys for feature in recording.features)


def test_values_and_projection_reproduce_the_attention_output() -> None:
    model = tiny.vit()
    outputs = outputs_of(model)
    _, recording = run(model, tiny.pixels(2), values=True)
    record = recording[0]
    assert record.value is not None
    assert record.output_weight is not None
    gathered = (record.operator @ record.value).transpose(1, 2).flatten(2)
    expected = gathered @ record.output_weight.T + model.get_parameter("blocks.0.attn.proj.bias")
    torch.testing.assert_close(outputs["blocks.0.attn"], expected, atol=1e-5, rtol=1e-5)


def test_values_are_kept_only_on_request() -> None:
    assert all(record.value is None for record in run(tiny.vit(), tiny.pixels())[1])


@every_model
def test_kept_tensors_own_their_memory(name: str) -> None:
    _, recording = run(tiny.MODELS[name].build(), tiny.pixels(2), values=True, features="all")
    kept = [x for r in recording for x in (softmax_operator(r).query, softmax_operator(r).key, r.value) if x is not None]
    kept += [feature.value for feature in recording.features]
    assert [x.untyped_storage().nbytes() for x in kept] == [x.numel() * x.element_size() for x in kept]


def test_dropped_recording_is_freed_at_once() -> None:
    """Check that a dropped recording is freed without the garbage collector, so that the next forward pass can reuse its memory."""
    model = tiny.vit()
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            _, recording = run(model, tiny.pixels())
            alive = weakref.ref(recording)
            del recording
            assert alive() is None
    finally:
        gc.enable()


def test_recording_is_not_changed_by_later_forwards() -> None:
    model = tiny.vit()
    _, recording = run(model, tiny.pixels())
    before = recording[0].operator.dense()
    with torch.no_grad():
        model(tiny.pixels(seed=1))
    assert len(recording) == 2
    assert torch.equal(recording[0].operator.dense(), before)


def test_training_mode_records_weights_before_dropout() -> None:
    model = tiny.vit(attn_drop_rate=0.5).train()
    _, recording = run(model, tiny.pixels())
    np.testing.assert_allclose(recording[0].operator.dense().sum(-1), 1, atol=1e-6)
