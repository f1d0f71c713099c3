"""Class-specific maps from a model and a photo, and inputs that must be refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import visattn
from tests import tiny
from visattn.core import methods
from visattn.core.geometry import Box
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.passes import look
from visattn.core.pipeline.targets import Target
from visattn.core.records import AttentionRecord, Recording, TokenLayout
from visattn.errors import ModelError, OptionError, ResourceError, VisattnError

AVERAGED = "cam"  # requires that features are averaged; refuses other networks
TARGETED = [name for name, each in methods.METHODS.items() if each.targeted and "score" not in each.needs and name != AVERAGED]


@pytest.fixture
def photo() -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def classifier(**options: Any) -> nn.Module:
    return tiny.vit(dynamic_img_size=True, **options)


def first_of(output: Tensor) -> Tensor:
    return output[:, 0]


class Odd(nn.Module):
    """Wrapper of an unknown type around a model of a known family."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny.vit()
        self.img_size = tiny.INPUT

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def parameters_of(name: str) -> dict[str, Any]:
    own: dict[str, dict[str, Any]] = {
        "transition_attention": {"start_layer": 0, "steps": 3},
        "patching": {"donor": Image.new("RGB", (48, 32), "navy"), "layer": 0},
    }
    return own.get(name, {})


@pytest.mark.parametrize("name", TARGETED)
def test_targeted_methods_explain_the_given_class(name: str, photo: Image.Image) -> None:
    maps = {}
    for target in (None, 0, 1):
        found = visattn.explain(classifier(), photo, method=name, target=target, **parameters_of(name))
        maps[target] = found.map.values
        assert found.map.axes == ()
        assert len(found.provenance.target) == 1
        assert (target is None) <= ("this is the largest of" in found.provenance.target[0])
        assert f"output {target}" in found.provenance.target[0] or target is None
    assert not torch.equal(maps[0], maps[1])


@pytest.mark.parametrize("name", TARGETED)
def test_class_without_a_head_is_refused_with_a_method_that_works(name: str, photo: Image.Image) -> None:
    headless = classifier(num_classes=0)
    with pytest.raises(OptionError) as caught:
        visattn.explain(headless, photo, method=name, **parameters_of(name))
    assert "has no classification head, so there is no class to explain. Use method 'attention' or 'rollout'" in str(caught.value)


@pytest.mark.parametrize("name", TARGETED)
def test_headless_model_is_explained_by_a_function_of_its_output(name: str, photo: Image.Image) -> None:
    found = visattn.explain(classifier(num_classes=0), photo, method=name, target=first_of, **parameters_of(name))
    assert float(found.map.values.max()) > 0
    assert found.provenance.target == ("first_of of the output",)


def test_auto_selects_relevance_for_a_classifier_and_attention_without_a_head(photo: Image.Image) -> None:
    assert visattn.explain(classifier(), photo).provenance.method == "relevance"
    assert visattn.explain(classifier(num_classes=0), photo).provenance.method == "attention"
    assert visattn.explain(classifier(), photo, head=1).provenance.method == "attention"
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=16, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1)
    )
    assert visattn.explain(swin, photo).provenance.method == "attention"
    assert visattn.explain(swin, photo, target=3).provenance.method == "gradcam"
    with pytest.raises(OptionError, match=r"method 'relevance' does not apply: .* attend over different tokens"):
        visattn.explain(swin, photo, target=3, method="relevance")


def test_target_of_a_method_without_one_is_refused(photo: Image.Image) -> None:
    with pytest.raises(OptionError, match="does not depend on a class"):
        visattn.explain(classifier(), photo, method="rollout", target=1)


def test_map_without_positive_evidence_leaves_the_photo_unchanged(photo: Image.Image) -> None:
    model: Any = classifier()
    nn.init.zeros_(model.head.weight)
    for name in sorted({*TARGETED} - {"contributions", "patching"}):
        found = visattn.explain(model, photo, method=name, target=1, **parameters_of(name))
        if name == "gradient_rollout":  # the result is the identity: the class token keeps everything
            assert float(found.map.values.max()) == 0
        assert not found.map.values.any()
        assert any("no positive evidence" in text for text in found.provenance.warnings)
        with pytest.warns(visattn.errors.VisattnWarning, match="constant"):
            assert found.overlay().tobytes() == photo.tobytes()


@pytest.mark.parametrize(
    ("name", "said"),
    [("contributions", "the score is zero and depends on nothing"), ("patching", "both photos have the score 0")],
)
def test_a_score_that_is_always_zero_is_refused_by_what_takes_it_apart(name: str, said: str, photo: Image.Image) -> None:
    model: Any = classifier()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    with pytest.raises(OptionError, match=said):
        visattn.explain(model, photo, method=name, target=1, **parameters_of(name))


def test_batch_equals_single_photos() -> None:
    model = tiny.vit()
    pixels = tiny.pixels(3)
    for name in ("relevance", "legrad", "attention_gradient", "gradcam"):
        function, layers = methods.METHODS[name].function, name == "legrad"
        features = "all" if layers else ["blocks.1.norm1"] if name == "gradcam" else "last"
        options: dict[str, Any] = {"target": Target(), "each_layer": layers, "features": features}
        whole = function(look(model, Prepared(pixels, (), ()), **options))
        alone = [function(look(model, Prepared(one[None], (), ()), **options)) for one in pixels]
        torch.testing.assert_close(whole.values, torch.cat([one.values for one in alone]), atol=1e-7, rtol=1e-4)
        assert whole.at(batch=1).provenance.target == alone[1].provenance.target


def test_gradcam_of_an_unknown_transformer_reads_the_input_of_its_last_attention(photo: Image.Image) -> None:
    model = Odd()
    found = visattn.explain(model, photo, method="gradcam")
    named = visattn.explain(model, photo, method="gradcam", layer="inner.blocks.1.norm1")
    assert torch.equal(found.map.values, named.map.values)


class Unnamed(nn.Module):
    """Attention over patches that no module outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Parameter(torch.randn(16, 3, 8, 8)), nn.Parameter(torch.randn(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        tokens = F.conv2d(x, self.stem, stride=8).flatten(2).mT
        logits: Tensor = F.scaled_dot_product_attention(tokens, tokens, tokens).mean(1) @ self.head
        return logits


def test_gradcam_without_a_layer_that_can_be_found_needs_one(photo: Image.Image) -> None:
    with pytest.raises(OptionError, match="the layer for Grad-CAM is unknown"):
        visattn.explain(Unnamed(), photo, method="gradcam", img_size=64)


def test_model_is_unchanged(photo: Image.Image) -> None:
    model = classifier().train()
    some = next(iter(model.parameters())).requires_grad_(False)
    visattn.explain(model, photo, method="relevance")
    assert all(module.training for module in model.modules())
    assert not some.requires_grad
    assert all(parameter.requires_grad == (parameter is not some) for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def heads_of(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda tokens: model.forward_head(model.norm(tokens))


def test_legrad_gives_each_layer_its_own_score() -> None:
    model = tiny.vit()
    made = look(model, Prepared(tiny.pixels(), (), ()), target=Target(1), each_layer=True, features="all")
    with visattn.capture(model, gradients=True, features="all") as recording:
        model(tiny.pixels())
    for number, record in enumerate(made):
        source = recording.features[number].source
        assert source is not None
        graded = recording.gradients(heads_of(model)(source.tensor)[:, 1])
        for mine, theirs in zip(record.operator.tiles(), graded[number].operator.tiles(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_legrad_of_an_unknown_transformer_uses_the_rest_of_the_model_as_head(photo: Image.Image) -> None:
    model = Odd()
    found, known = (visattn.explain(one, photo, method="legrad", resize="fit") for one in (model, model.inner))
    assert float(known.map.values.max()) > 0
    assert torch.allclose(found.map.values, known.map.values, atol=1e-5 * float(known.map.values.max()))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "discard of 1": ({"method": "rollout", "discard": 1.0}, "discard must be less than 1, got 1, which would leave nothing"),
    "discard of 2": ({"method": "gradient_rollout", "discard": 2}, "discard must be a number from 0 to 1, got 2"),
    "start layer": ({"method": "relevance", "start_layer": 2}, "start_layer must lie in [0, 1], got 2"),
    "layers": ({"method": "legrad", "last_layers": 3}, "last_layers must lie in [1, 2], got 3"),
    "steps": ({"method": "transition_attention", "steps": 1, "start_layer": 0}, "steps must be at least 2, got 1"),
    "norm and fusion": ({"method": "rollout", "weights_by": "norm", "fusion": "max"}, "fusion='max' does not apply"),
    "parameter": ({"method": "relevance", "discard": 0.5}, "method 'relevance' has no parameter 'discard'. It has: start_layer"),
    "parameter of auto": ({"discard": 0.5}, "method 'auto' has no parameters discard. Name the method"),
    "lack of a parameter": ({"method": "similarity"}, "method 'similarity' needs query. For example: query='pixel:120,80'"),
    "alias": ({"method": "cheffer"}, "unknown method 'cheffer'"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_wrong_options_are_refused(case: str, photo: Image.Image) -> None:
    options, message = WRONG[case]
    with pytest.raises(OptionError) as caught:
        visattn.explain(classifier(), photo, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("over", ["row", "layer"])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.999])
def test_discard_keeps_the_class_token_and_rows_sum_to_one(ratio: float, over: Any) -> None:
    made = tiny.recording(layers=3, prefix=(), grid=(5, 7), readout="mean")
    values = methods.rollout(made, discard=ratio, discard_over=over, dtype=torch.float64).values
    assert float(values.sum()) == pytest.approx(1, abs=1e-12)


def test_discarding_nearly_all_keeps_the_class_token_and_the_best_patch() -> None:
    made = tiny.recording(layers=1, grid=(5, 7))
    row = made[0].operator.to(torch.float64).dense()[0, :, 0].mean(0)
    values = methods.rollout(made, discard=0.999, residual=0, dtype=torch.float64).values[0].flatten()
    best = int(row[1:].argmax())
    assert values.nonzero().flatten().tolist() == [best]
    assert float(values[best]) == pytest.approx(float(row[1 + best] / (row[0] + row[1 + best])))


def test_flow_with_too_many_tokens_is_refused_with_an_alternative(photo: Image.Image) -> None:
    with pytest.raises(OptionError, match=r"at most 800 tokens, got 2302\. Use method 'rollout'"):
        visattn.explain(classifier(), photo, method="attention_flow", resize="fit", img_size=768)


def test_channels_as_a_heatmap_are_refused_with_an_alternative(photo: Image.Image) -> None:
    model = timm.create_model("davit_tiny", embed_dims=(16, 32, 32), depths=(1, 1, 1), num_heads=(1, 2, 2), window_size=3)
    for name in ("rollout", "relevance"):
        with pytest.raises(OptionError, match="Use method 'attention'"):
            visattn.explain(model, photo, method=name)


def test_flow_without_scipy_names_the_install_command(photo: Image.Image, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visattn._support.extras.find_spec", lambda name: None)
    with pytest.raises(visattn.errors.MissingExtra, match=r'attention_flow needs scipy, .* pip install -e "\.\[flow\]"'):
        visattn.explain(classifier(), photo, method="attention_flow")


def test_channel_attention_as_a_heatmap_is_refused_with_feature_methods() -> None:
    channels = TokenLayout("channels", tuple(f"channel{i}" for i in range(4)), (), Box(0, 0, 32, 48))
    operator = tiny.recording(prefix=(), grid=(2, 2))[0].operator
    record = AttentionRecord("blocks.0.attn", 0, 0, "channel", operator, channels, channels)
    features = tiny.recording().features
    made = Recording([record], features, (32, 48))
    with pytest.raises(OptionError, match=r"cannot be drawn on the image\. Use method 'similarity' or 'pca'"):
        methods.attention(made)
    assert methods.pca(made).layout.grid == tiny.GRID


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_model_in_half_precision_gets_inputs_of_its_dtype(precision: torch.dtype, photo: Image.Image) -> None:
    found = visattn.explain(classifier().to(precision), photo, method="relevance")
    exact = visattn.explain(classifier(), photo, method="relevance")
    assert float((found.map.values - exact.map.values).norm()) <= 0.1 * float(exact.map.values.norm())


def test_gradcam_by_layer_position_is_refused_without_tokens(photo: Image.Image) -> None:
    with pytest.raises(OptionError, match="layer -2 is an index of attention layers, and the model has none"):
        visattn.explain("resnet18", photo, method="gradcam", layer=-2, weights="none")


def test_cnn_takes_any_size(photo: Image.Image) -> None:
    found = visattn.explain("resnet18", photo, method="gradcam", weights="none", img_size=160)
    assert found.map.layout.grid == (5, 5)


class Failing(nn.Module):
    """Module that raises an error."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


FAILURES: dict[str, tuple[BaseException, type[VisattnError], str]] = {
    "an error of its own": (
        ValueError("no\nsuch thing"),
        ModelError,
        r"1\.mlp fails for pixels \(1, 3, 32, 48\): ValueError: no\. Check",
    ),
    "an assertion": (AssertionError(), ModelError, r"blocks\.1\.mlp fails for pixels .*: AssertionError: \. Check"),
    "a program exit": (SystemExit(0), ModelError, "SystemExit: 0. Check"),
    "endless recursion": (RecursionError("too deep"), ModelError, "RecursionError: too deep"),
    "memory of torch": (
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
        ResourceError,
        "out of memory for pixels",
    ),
    "memory": (MemoryError(), ResourceError, "out of memory for pixels"),
}


@pytest.mark.parametrize("method", ["attention", "relevance", "occlusion"])
@pytest.mark.parametrize("name", list(FAILURES))
def test_error_of_the_model_names_the_module_and_the_shape(name: str, method: str) -> None:
    error, kind, message = FAILURES[name]
    model: Any = tiny.vit()
    model.blocks[1].mlp = Failing(error)
    photo = np.random.default_rng(0).integers(0, 256, (32, 48, 3), np.uint8)
    with pytest.raises(kind, match=message) as caught:
        visattn.explain(model, photo, method=method, target=1 if method != "attention" else None)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_error_inside_the_capture_is_not_blamed_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visattn.core.capturing.trace.tracer.operation_of", None)
    with pytest.raises(TypeError, match="not callable"):
        visattn.explain(tiny.vit(), np.zeros((32, 48, 3), np.uint8), method="attention")


@pytest.mark.parametrize(("width", "told"), [(64, False), (114, False), (180, True), (512, True)])
def test_a_photo_of_which_much_is_cut_off_has_a_warning(width: int, told: bool) -> None:
    photo = Image.effect_noise((width, 64), 80).convert("RGB")
    found = visattn.explain("scenes_cnn", photo)
    share = 64 / width
    warned = [text for text in found.provenance.warnings if "of the photo" in text]
    assert warned == [f"the model received {share:.0%} of the photo; with resize='fit' it receives all"] * told
    assert not visattn.explain("scenes_cnn", photo, resize="fit").provenance.warnings


def test_a_small_photo_is_enlarged_by_a_whole_factor_above_a_band_only() -> None:
    small = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8))
    found = visattn.explain(tiny.vit(), small, method="attention", query="patch:1,1")
    assert found.overlay(opacity=0).tobytes() == small.tobytes()
    assert found.overlay(legend=True, opacity=0).crop((0, 0, 256, 192)).tobytes() == small.resize((256, 192), 0).tobytes()
    told = found.overlay(caption=True, legend=True, mass=0.5, box="quantile:0.8")
    assert (told.width, told.provenance.drawing["enlarged"]) == (256, 4)
    assert told.provenance.drawing["box"] == found.overlay(box="quantile:0.8").provenance.drawing["box"], "in pixels of the photo"
    large = replace(found, photo=small.resize((256, 192), 0), geometry=found.geometry.resized((192, 256)))
    assert found.overlay(caption=True).crop((0, 0, 256, 192)).tobytes() == large.overlay().tobytes(), "rings are drawn large"
