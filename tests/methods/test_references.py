"""Comparison with arrays computed by reference implementations, each at a stated commit; see `tests/golden/references`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

import visattn
from tests.conftest import Figures
from tests.oracles.vit_explain import vit_explain
from visattn.core import methods
from visattn.core.geometry import Box
from visattn.core.operators import MatrixGradient, MatrixOperator
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.passes import look
from visattn.core.pipeline.targets import Target
from visattn.core.records import AttentionRecord, Recording, TokenLayout

FOLDER = Path(__file__).parents[1] / "golden" / "references"
F64: Any = {"dtype": torch.float64}
BOUND = 1e-5  # relative to the largest value


class Golden:
    """Arrays of one reference."""

    def __init__(self, name: str) -> None:
        self.arrays = np.load(FOLDER / f"{name}.npz", allow_pickle=False)
        self.facts = json.loads((FOLDER / f"{name}.json").read_text())

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self.arrays[name])


def layout(grid: tuple[int, ...], prefix: Sequence[str] = (), space: str = "tokens") -> TokenLayout:
    return TokenLayout(space, tuple(prefix), grid, Box(0, 0, *(16 * side for side in grid or (1, 1))))


def record(
    name: str, weights: Tensor, gradient: Tensor | None, queries: TokenLayout, keys: TokenLayout, kind: Any = "self"
) -> AttentionRecord:
    operator = MatrixOperator(weights[None] if weights.ndim == 3 else weights)
    if gradient is not None:
        operator = operator.with_gradient(MatrixGradient(gradient[None] if gradient.ndim == 3 else gradient))
    return AttentionRecord(name, 0, 0, kind, operator, queries, keys)


def encoder(attention: Tensor, gradient: Tensor | None, place: TokenLayout) -> Recording:
    """Record self-attention `(layers, [B,] heads, N, N)`."""
    layers = range(len(attention))
    return Recording([record(f"{i}", attention[i], None if gradient is None else gradient[i], place, place) for i in layers])


def check(figures: Figures, name: str, found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert float(expected.abs().max()) > 0
    error = float((found.double() - expected).abs().max() / expected.abs().max())
    figures(f"reference: {name}", error, f"<= {BOUND:g}")
    assert error <= BOUND


def flat(result: Any) -> Tensor:
    values: Tensor = result.values
    return values.flatten(-2)


def small_vit(golden: Golden) -> nn.Module:
    """Load the vision transformer of `vit.safetensors`, in float64."""
    model: nn.Module = VisionTransformer(
        img_size=(32, 48), patch_size=16, embed_dim=32, depth=4, num_heads=2, num_classes=4, mlp_ratio=1
    ).double()
    model.load_state_dict({key: value.double() for key, value in safetensors.torch.load_file(FOLDER / "vit.safetensors").items()})
    model.eval()
    torch.testing.assert_close(model(pixels_of(golden)), golden["vit_logits" if "vit_logits" in golden.arrays else "logits"])
    return model


def pixels_of(golden: Golden) -> Tensor:
    return golden["vit_pixels" if "vit_pixels" in golden.arrays else "pixels"].double()


def classes(of_images: Sequence[int]) -> Callable[[Tensor], Tensor]:
    return lambda logits: logits[range(len(of_images)), of_images]


def seen(golden: Golden, target: Any, **options: Any) -> Recording:
    prepared = Prepared(pixels_of(golden), (), ())
    return look(small_vit(golden), prepared, target=Target(target), **options)


# vit-explain

VIT_EXPLAIN = Golden("vit_explain")
GRID = layout((4, 4), ("cls",))


def vit_explain_recording() -> Recording:
    return encoder(VIT_EXPLAIN["attention"], VIT_EXPLAIN["gradient"], GRID)


@pytest.mark.parametrize("discard", [0.0, 0.9])
@pytest.mark.parametrize("fusion", ["mean", "max", "min"])
def test_vit_explain_rollout_in_compat(figures: Figures, fusion: Any, discard: float) -> None:
    found = vit_explain(vit_explain_recording(), fusion=fusion, discard=discard, **F64)
    check(
        figures, f"vit-explain rollout {fusion}, discard {discard}", found.values[0], VIT_EXPLAIN[f"rollout_{fusion}_{discard}"]
    )


@pytest.mark.parametrize("discard", [0.0, 0.9])
@pytest.mark.parametrize(("published", "name"), [(True, "collected"), (False, "paired")])
def test_vit_explain_gradient_rollout_in_compat(figures: Figures, published: bool, name: str, discard: float) -> None:
    found = vit_explain(vit_explain_recording(), gradients=True, published=published, discard=discard, **F64)
    check(figures, f"vit-explain gradients {name}, {discard}", found.values[0], VIT_EXPLAIN[f"grad_rollout_{name}_{discard}"])


def test_rollout_equals_vit_explain_once_its_rows_are_normalized(figures: Figures) -> None:
    found = methods.rollout(vit_explain_recording(), **F64).values[0]
    check(figures, "vit-explain rollout, rows normalized", found / found.max(), VIT_EXPLAIN["rollout_mean_0.0_rows"])


def test_gradient_rollout_equals_vit_explain_once_its_rows_are_normalized(figures: Figures) -> None:
    found = methods.gradient_rollout(vit_explain_recording(), discard=0, **F64).values[0]
    check(
        figures, "vit-explain gradient rollout, rows normalized", found / found.max(), VIT_EXPLAIN["grad_rollout_paired_0.0_rows"]
    )


# Chefer, Gur & Wolf

MM = Golden("mm_explainability")


@pytest.mark.parametrize("target", range(4))
def test_relevance_of_a_vision_transformer(figures: Figures, target: int) -> None:
    by_arrays = methods.relevance(encoder(MM["vit_attention"], MM["vit_gradient"][target], layout((2, 3), ("cls",))), **F64)
    check(figures, f"Chefer relevance of class {target}, its arrays", flat(by_arrays)[0], MM["vit_relevance"][target])
    by_model = methods.relevance(seen(MM, target), **F64)
    check(figures, f"Chefer relevance of class {target}, the model", flat(by_model)[0], MM["vit_relevance"][target])


def part_of(model: str, case: int, name: str, number: int, queries: TokenLayout, keys: TokenLayout, kind: str) -> AttentionRecord:
    """Record one attention call of a part of the model."""
    weights, gradient = (MM[f"{model}_{name}_{what}"][case, number] for what in ("attention", "gradient"))
    return record(f"{name}.{number}", weights, gradient, queries, keys, kind)


def detr(case: int) -> Recording:
    image = layout((4, 5), space="image")
    objects = TokenLayout("objects", tuple(f"query{i}" for i in range(6)), (), image.box)

    part = partial(part_of, "detr", case)
    records = [part("encoder", i, image, image, "self") for i in range(2)]
    for i in range(3):
        records += [part("decoder", i, objects, objects, "self"), part("cross", i, objects, image, "cross")]
    return Recording(records)


@pytest.mark.parametrize("case", [i for i in range(5) if not bool(MM["detr_nan"][i].any())])
def test_relevance_of_detr(figures: Figures, case: int) -> None:
    query = int(MM["detr_case"][case][1])
    found = methods.relevance(detr(case), query=f"query:{query}", **F64)
    check(figures, f"Chefer relevance of DETR, case {case}", flat(found)[0], MM["detr_relevance"][case])


@pytest.mark.parametrize("case", [i for i in range(5) if bool(MM["detr_nan"][i].any())])
def test_relevance_of_detr_is_not_lost_where_the_reference_divides_zero_by_zero(case: int) -> None:
    query = int(MM["detr_case"][case][1])
    found = flat(methods.relevance(detr(case), query=f"query:{query}", **F64))[0]
    assert bool(found.isfinite().all())
    assert float(found.sum()) > float(MM["detr_relevance"][case].sum())


def test_the_reference_of_detr_contains_nan() -> None:
    assert bool(MM["detr_nan"].any())


@pytest.mark.parametrize("case", [0, 1])
def test_relevance_of_lxmert(figures: Figures, case: int) -> None:
    image = layout((2, 3), space="image")
    text = TokenLayout("text", tuple(f"query{i}" for i in range(5)), (), image.box)

    part = partial(part_of, "lxmert", case)
    records = [part("text", i, text, text, "self") for i in range(2)]
    records += [part("image", i, image, image, "self") for i in range(2)]
    for i in range(3):
        records.append(part("cross_text_image", i, text, image, "cross"))
        if i < 2:
            records.append(part("cross_image_text", i, image, text, "cross"))
        records.append(part("cross_text", i, text, text, "self"))
        if i < 2:
            records.append(part("cross_image", i, image, image, "self"))
    for token in range(5):
        query = F.one_hot(torch.tensor(token), 5)
        found = flat(methods.relevance(Recording(records), query=query, **F64))[0]
        check(figures, f"Chefer relevance of LXMERT, case {case}, token {token}", found, MM["lxmert_R_ti"][case, token])


@pytest.mark.parametrize("start", [0, 1])
def test_rollout_of_transformer_explainability(figures: Figures, start: int) -> None:
    golden = Golden("transformer_explainability")
    found = methods.rollout(encoder(golden["attention"], None, layout((2, 3), ("cls",))), start_layer=start, **F64)
    check(figures, f"Chefer rollout from layer {start}", flat(found), golden[f"rollout_{start}"])


# LeGrad

LEGRAD = Golden("legrad")


def upsampled(grid: Tensor) -> Tensor:
    return F.interpolate(grid[None, None], scale_factor=4, mode="bilinear")[0, 0]


@pytest.mark.parametrize(("count", "name"), [(4, "0"), (2, "-2")], ids=["all layers", "shipped"])
@pytest.mark.parametrize("text", [0, 1])
def test_legrad(figures: Figures, text: int, count: int, name: str) -> None:
    graded = encoder(LEGRAD["attention"][:, None], LEGRAD["gradient"][text][:, None], GRID)
    found = methods.legrad(graded, last_layers=count, **F64).values[0]
    check(figures, f"LeGrad, {count} layers, text {text}", upsampled(found * count), LEGRAD[f"raw_{name}"][text])


def test_legrad_of_the_model_with_its_own_score(figures: Figures) -> None:
    model = VisionTransformer(
        img_size=16,
        patch_size=4,
        embed_dim=16,
        depth=4,
        num_heads=2,
        mlp_ratio=2,
        pre_norm=True,
        norm_layer=_norm,
        num_classes=16,
    ).double()
    weights = {f"visual.{key}": value for key, value in safetensors.torch.load_file(FOLDER / "legrad.safetensors").items()}
    model.load_state_dict({key: value.double() for key, value in checkpoint_filter_fn(weights, model).items()})
    model.eval()
    with visattn.capture(model, gradients=True, features="all") as recording:
        model(LEGRAD["pixels"].double())
    text = LEGRAD["texts"][0].double()
    scores = {}
    for number, layer in enumerate(recording.layers):
        source = next(feature.source for feature in recording.features if feature.layer == f"blocks.{number}")
        assert source is not None
        embedded = model.head(model.norm(source.tensor.mean(1)))  # all tokens, as in the reference
        scores[layer] = F.normalize(embedded, dim=-1) @ text
    for number, layer in enumerate(recording.layers):
        assert float(scores[layer].detach()) == pytest.approx(float(LEGRAD["score"][0, number]), rel=1e-5)
    found = methods.legrad(recording.gradients(scores), **F64).values[0]
    check(figures, "LeGrad, the model", upsampled(found * 4), LEGRAD["raw_0"][0])


def _norm(width: int, **options: Any) -> nn.Module:
    return nn.LayerNorm(width, eps=1e-5, **options)


# transition attention, Grad-CAM on tokens, DINO


@pytest.mark.parametrize("start", [0, 1])
def test_transition_attention(figures: Figures, start: int) -> None:
    golden = Golden("transition_attention_maps")
    model, prepared = small_vit(golden), Prepared(pixels_of(golden), (), ())
    target = Target(classes(golden.facts["settings"]["classes"]))
    made = look(model, prepared)
    found = methods.transition_attention(
        made, replay=lambda edit: look(model, prepared, target=target, edit=edit), start_layer=start, **F64
    )
    check(figures, f"transition attention from layer {start}", flat(found), golden[f"tam_{start}"])


def test_gradcam_on_tokens(figures: Figures) -> None:
    golden = Golden("grad_cam")
    made = seen(golden, classes(golden.facts["settings"]["vit"]["classes"]), features=["blocks.3.norm1"])
    found = methods.gradcam(made, **F64)
    check(figures, "Grad-CAM on tokens", found.values, golden["vit_GradCAM"].clamp(min=0))


def test_heads_and_masks_of_dino(figures: Figures) -> None:
    golden = Golden("dino")
    made = encoder(golden["attention"][None], None, layout((4, 6), ("cls",)))
    found = methods.attention(made, **F64)
    check(figures, "DINO heads", found.values[0], golden["heads"])
    assert torch.equal(found.mass(0.6).values[0].bool(), golden["masks"])
