"""The user's own checkpoints: unwrapping, casts and resampling are noted; a misfit is an error of one line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from torch import Tensor, nn

from visattn import capture, load_model, prepare
from visattn.core.families import provenance_of
from visattn.core.loading import timm_models
from visattn.core.loading.translation import fill
from visattn.core.pipeline.explaining import explain
from visattn.errors import ModelError, OptionError, UnsupportedModel, WeightsError

MODEL = "test_vit"  # 6 blocks of width 64, input 160, patch 16
Weights = dict[str, Tensor]
Save = Callable[[Any], Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def call(content: Any, suffix: str = ".pth") -> Path:
        torch.save(content, tmp_path / f"weights{suffix}")
        return tmp_path / f"weights{suffix}"

    return call


def weights(name: str = MODEL, seed: int = 3, **options: Any) -> Weights:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return {key: value.clone() for key, value in timm.create_model(name, **options).state_dict().items()}


def notes(model: nn.Module) -> tuple[str, ...]:
    return provenance_of(model).notes


def same(model: nn.Module, expected: Weights) -> bool:
    own = model.state_dict()
    return own.keys() == expected.keys() and all(torch.equal(own[key], value) for key, value in expected.items())


def refusal(file: Path, name: str = MODEL) -> str:
    with pytest.raises(WeightsError, match="does not fit the model") as caught:
        load_model(name, weights=file)
    line = str(caught.value)
    assert line.startswith(f"{file}: does not fit the model: ")
    assert line.endswith(
        "; choose the model that the checkpoint was trained with, or save model.state_dict() of the whole model."
    )
    assert "\n" not in line
    return line


def test_an_unknown_name_gets_the_nearest_names() -> None:
    with pytest.raises(UnsupportedModel, match=r"unknown model 'vit_tinny_patch16_224'\. Close matches: vit_tiny_patch16_224"):
        load_model("vit_tinny_patch16_224")


# ---- shapes ------------------------------------------------------------------------------------------------------------------

WRONG = {
    "head": ("head.weight", (5, 100), "head.weight: checkpoint 5x100, model 5x64;"),
    "head bias": ("head.bias", (5,), "head.bias: checkpoint 5, model 1000;"),
    "attention": ("blocks.2.attn.qkv.weight", (96, 64), "blocks.2.attn.qkv.weight: checkpoint 96x64, model 192x64;"),
    "class token": ("cls_token", (64,), "cls_token: checkpoint 64, model 1x1x64;"),
    "stem": ("patch_embed.proj.weight", (32, 3, 16, 16), "patch_embed.proj.weight: checkpoint 32x3x16x16, model 64x3x16x16;"),
    "non-square position embeddings": ("pos_embed", (1, 51, 64), "pos_embed: checkpoint 1x51x64, model 1x101x64;"),
    "one number": ("norm.weight", (), "norm.weight: checkpoint one number, model 64;"),
}


@pytest.mark.parametrize(("key", "shape", "told"), WRONG.values(), ids=list(WRONG))
def test_wrong_shape_error_names_both_shapes(save: Save, key: str, shape: tuple[int, ...], told: str) -> None:
    wrong = weights()
    wrong[key] = torch.zeros(shape)
    line = refusal(save(wrong))
    assert (
        f"{told} choose" in line or f"{told[:-1]} (and 1 more of another shape); choose" in line
    )  # the head's bias has another shape, too


def test_wrong_width_error_names_the_first_tensor_and_the_count(save: Save) -> None:
    line = refusal(save(weights("vit_tiny_patch16_224", depth=6)))
    assert re.search(r"\w: checkpoint 1x1x192, model 1x1x64 \(and \d+ more of another shape\); ", line)


def test_renamed_head_is_refused(save: Save) -> None:
    renamed = {key.replace("head.", "classifier."): value for key, value in weights(num_classes=5).items()}
    assert "model: 2 unexpected: classifier.weight, classifier.bias; choose" in refusal(save(renamed))


def test_number_of_classes_is_read_from_the_checkpoint(save: Save) -> None:
    expected = weights(num_classes=5)
    model = load_model(MODEL, weights=save(expected))
    assert same(model, expected)
    assert notes(model) == ()


def test_checkpoint_without_head_gives_a_headless_model_with_a_note(save: Save) -> None:
    expected = weights(num_classes=0)
    model = load_model(MODEL, weights=save(expected))
    assert same(model, expected)
    assert notes(model) == ("the checkpoint has no classification head; the model is built without one",)


def test_integer_weights_are_refused(save: Save) -> None:
    quantized = weights()
    quantized["norm.weight"] = torch.ones(64, dtype=torch.int8)
    with pytest.raises(WeightsError, match=r"norm.weight must hold floating-point numbers, got int8; save the weights as they"):
        load_model(MODEL, weights=save(quantized))


# ---- names -------------------------------------------------------------------------------------------------------------------


def test_missing_and_unexpected_names_are_counted_and_the_first_five_listed(save: Save) -> None:
    odd = weights()
    gone = [key for key in odd if key.startswith("blocks.1.")]
    for key in gone:
        del odd[key]
    odd |= {f"extra.{i}": torch.zeros(1) for i in range(7)}
    line = refusal(save(odd))
    assert f"model: {len(gone)} missing: {', '.join(gone[:5])}, ...; " in line
    assert "; 7 unexpected: extra.0, extra.1, extra.2, extra.3, extra.4, ...; choose" in line


@pytest.mark.parametrize("change", ["missing", "unexpected"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_one_missing_or_unexpected_name_is_refused(save: Save, change: str, prefix: str) -> None:
    odd = {prefix + key: value for key, value in weights().items()}
    if change == "missing":
        del odd[f"{prefix}norm.bias"]
    else:
        odd["stray\x1b[31m"] = torch.zeros(1)
    told = {"missing": "1 missing: norm.bias; ", "unexpected": r"1 unexpected: stray\x1b[31m; "}[change]
    assert f"model: {told}choose" in refusal(save(odd))


def test_weights_of_another_library_are_refused(save: Save) -> None:
    line = refusal(save({"embeddings.cls_token": torch.zeros(1, 1, 64), "encoder.layer.0.norm1.weight": torch.zeros(64)}))
    assert "80 missing: cls_token, pos_embed, " in line
    assert "2 unexpected: embeddings.cls_token, encoder.layer.0.norm1.weight; " in line


def test_weights_dropped_by_timm_are_noted_but_missing_weights_are_refused(save: Save) -> None:
    """Check SigLIP without its pooling head: timm drops that head's weights, but would also accept a checkpoint with missing ones."""
    name = "vit_base_patch16_siglip_gap_224"
    small: dict[str, Any] = {"embed_dim": 24, "depth": 1, "num_heads": 2}
    own = weights(name, **small)
    pool = {"attn_pool.latent": torch.zeros(1, 1, 24)}
    model = timm.create_model(name, **small)
    translate, lenient = timm_models._unfilled(name, None)[1:]
    assert lenient
    told = fill(model, own | pool, "w.pth", translate, lenient)
    assert told == ("1 tensors of the checkpoint are not used by this model: attn_pool.latent",)
    assert same(model, own)
    del own["norm.weight"]
    with pytest.raises(WeightsError, match=r"1 missing: norm.weight;"):
        fill(model, own, "w.pth", translate, lenient)


# ---- wrappings ---------------------------------------------------------------------------------------------------------------

PREFIXES = ["module.", "_orig_mod.", "model.", "backbone.", "encoder.", "student.", "teacher."]


@pytest.mark.parametrize(
    "prefix", [*PREFIXES, "module._orig_mod.", "_orig_mod.module.", "teacher.backbone.", "module.model.encoder."]
)
@pytest.mark.parametrize("classes", [1000, 5, 0])
def test_prefix_is_removed_with_a_note(save: Save, prefix: str, classes: int) -> None:
    expected = weights(num_classes=classes)
    model = load_model(MODEL, weights=save({prefix + key: value for key, value in expected.items()}))
    assert same(model, expected)
    assert notes(model)[0] == f"the prefix '{prefix}' of the checkpoint's names was removed"


def test_a_prefix_of_safetensors_is_removed(tmp_path: Path) -> None:
    expected = weights()
    safetensors.torch.save_file({"module." + key: value for key, value in expected.items()}, tmp_path / "w.safetensors")
    assert same(load_model(MODEL, weights=tmp_path / "w.safetensors"), expected)


NESTS = ["state_dict", "model", "model_state_dict", "teacher", "student", "state_dict_ema", "model_ema", "ema"]


@pytest.mark.parametrize("nest", NESTS)
def test_a_training_checkpoint_gives_its_weights_and_the_rest_is_ignored(save: Save, nest: str) -> None:
    expected = weights(num_classes=5)
    rest = {
        "epoch": 7,
        "args": argparse.Namespace(lr=0.1, name="run"),
        "optimizer": {"state": {0: {"exp_avg": torch.full((3,), torch.nan)}}, "param_groups": [{"lr": 0.1}]},
        "arch": "test_vit",
        "encoder": "none",
    }
    model = load_model(MODEL, weights=save({**rest, nest: {"module." + key: value for key, value in expected.items()}}))
    assert same(model, expected)
    assert notes(model) == (
        f"the weights were read from '{nest}' of the checkpoint",
        "the prefix 'module.' of the checkpoint's names was removed",
    )


@pytest.mark.parametrize(
    ("kept", "other"),
    [
        ("teacher", "student"),
        ("state_dict_ema", "state_dict"),
        ("model_ema", "model"),
        ("ema", "model_state_dict"),
        ("model", "student"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_averaged_weights_are_preferred_in_any_order(save: Save, kept: str, other: str, first: bool) -> None:
    expected = weights(seed=1)
    both = {kept: expected, other: weights(seed=2)}
    model = load_model(MODEL, weights=save(both if first else dict(reversed(both.items()))))
    assert same(model, expected)
    assert notes(model) == (f"the weights were read from '{kept}' of the checkpoint; '{other}' not used",)


def test_teacher_of_another_width_is_ignored(save: Save) -> None:
    expected = weights()
    teacher = weights("vit_tiny_patch16_224", depth=6)
    model = load_model(MODEL, weights=save({"teacher": teacher, "model": expected}))
    assert same(model, expected)


def test_weights_nested_twice_are_found(save: Save) -> None:
    expected = weights()
    model = load_model(MODEL, weights=save({"state_dict": {"model": expected}}))
    assert same(model, expected)
    assert notes(model) == ("the weights were read from 'state_dict.model' of the checkpoint",)


def test_backbone_of_a_larger_checkpoint_is_loaded_and_the_rest_noted(save: Save) -> None:
    expected = weights(num_classes=0)
    larger = {f"module.backbone.{key}": value for key, value in expected.items()}
    larger |= {f"module.head.mlp.{i}.weight": torch.zeros(2, 2) for i in range(7)}
    model = load_model(MODEL, weights=save({"teacher": larger}))
    assert same(model, expected)
    listed = ", ".join(f"module.head.mlp.{i}.weight" for i in range(5))
    assert f"7 tensors of the checkpoint without the prefix 'module.backbone.' were not used: {listed}, ..." in notes(model)


def test_head_next_to_a_prefixed_backbone_is_loaded(save: Save) -> None:
    expected = weights(num_classes=5)
    lightning = {key if key.startswith("head.") else f"backbone.{key}": value for key, value in expected.items()}
    model = load_model(MODEL, weights=save(lightning))
    assert same(model, expected)
    assert len(notes(model)) == 1


def test_prefix_that_does_not_match_is_kept(save: Save) -> None:
    strange = {f"model.{key}x": value for key, value in weights().items()}
    assert "80 unexpected: model.cls_tokenx, " in refusal(save(strange))


def test_prefix_is_kept_if_only_a_few_names_match(save: Save) -> None:
    line = refusal(
        save({"encoder.norm.weight": torch.zeros(64), "encoder.layer.0.weight": torch.zeros(64), "pooler": torch.zeros(1)})
    )
    assert "3 unexpected: encoder.norm.weight, encoder.layer.0.weight, pooler; " in line


@pytest.mark.parametrize("content", [{"epoch": 3}, [torch.zeros(3)], {"state_dict": {"epoch": 3}}, torch.zeros(3), {}, 3])
def test_a_file_without_a_dictionary_of_tensors_is_refused(save: Save, content: Any) -> None:
    with pytest.raises(WeightsError, match=r"weights.pth: is not a dictionary of tensors; save model.state_dict\(\)"):
        load_model(MODEL, weights=save(content))


# ---- what timm does to older checkpoints ------------------------------------------------------------------------------------------


def test_position_embeddings_are_resampled_as_in_timm_with_a_note(save: Save, tmp_path: Path) -> None:
    larger = weights(img_size=224, num_classes=5)
    file = save({"state_dict": {f"module.{key}": value for key, value in larger.items()}})
    model = load_model(MODEL, weights=file)
    torch.save(larger, tmp_path / "plain.pth")
    overlay = {"file": str(tmp_path / "plain.pth"), "num_classes": 5, "hf_hub_id": None, "url": ""}
    reference = timm.create_model(MODEL, pretrained=True, num_classes=5, pretrained_cfg_overlay=overlay, dynamic_img_size=True)
    assert same(model, reference.state_dict())
    assert "pos_embed was resampled from 1x197x64 to 1x101x64" in notes(model)


def test_older_names_are_translated_as_timm_does(save: Save) -> None:
    expected = weights("deit3_small_patch16_224", embed_dim=24, depth=1, num_heads=2)
    older = {re.sub(r"ls([12])\.gamma", r"gamma_\1", key): value for key, value in expected.items()}
    assert older.keys() != expected.keys()
    model = timm.create_model("deit3_small_patch16_224", embed_dim=24, depth=1, num_heads=2)
    fill(model, older, "w.pth", timm_models._unfilled("deit3_small_patch16_224", None)[1])
    assert same(model, expected)


def test_timm_loading_is_unchanged(save: Save) -> None:
    expected = weights()
    file = save(expected)
    load_model(MODEL, weights=file)
    overlay = {"file": str(file), "hf_hub_id": None, "url": ""}
    assert same(timm.create_model(MODEL, pretrained=True, pretrained_cfg_overlay=overlay), expected)


# ---- numbers and devices -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=["float16", "bfloat16", "float64"])
def test_other_precisions_are_cast_to_float32_with_a_note(save: Save, dtype: torch.dtype) -> None:
    stored = {key: value.to(dtype) for key, value in weights().items()}
    model = load_model(MODEL, weights=save(stored))
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    assert same(model, {key: value.float() for key, value in stored.items()})
    assert notes(model) == (f"weights stored as {str(dtype)[6:]} were cast to float32",)


def test_half_precision_is_cast_before_anything_is_computed(save: Save) -> None:
    halves = {key: value.half() for key, value in weights(img_size=224).items()}
    first = load_model(MODEL, weights=save({key: value.float() for key, value in halves.items()})).state_dict()
    assert same(load_model(MODEL, weights=save(halves)), first)


ODD = {
    "sparse": lambda value: value.to_sparse(),
    "complex": lambda value: value.to(torch.complex64),
    "without values": lambda value: value.to("meta"),
    "larger than its storage": lambda value: value[:, :1].clone().expand(-1, 2**40),
}


@pytest.mark.filterwarnings("ignore:Validating sparse tensor:UserWarning")
@pytest.mark.parametrize(("kind", "make"), ODD.items(), ids=list(ODD))
def test_tensor_that_is_not_a_plain_float_tensor_is_named(save: Save, kind: str, make: Callable[[Tensor], Tensor]) -> None:
    odd = weights()
    odd["head.weight"] = make(odd["head.weight"])
    with pytest.raises(WeightsError, match=f"weights.pth: head.weight is {kind}; save plain float tensors"):
        load_model(MODEL, weights=save(odd))


def test_a_checkpoint_of_a_gpu_loads_on_the_cpu(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = weights()
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda _storage: "cuda:0")
        file = save(expected)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="deserialize object on a CUDA device"):
            torch.load(file, weights_only=True)
    model = load_model(MODEL, weights=file)
    assert same(model, expected)
    assert {value.device.type for value in model.state_dict().values()} == {"cpu"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_missing_gpu_is_refused_before_loading(device: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"^device '{device}' does not work on this machine. Choose one of: cpu.$"):
        load_model(MODEL, weights=tmp_path / "not there.pth", device=device)


@pytest.mark.parametrize("device", ["gpu", "", "cuda:x", "cpu\n"])
def test_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(OptionError, match=r"^unknown device '.*'. Choose cpu, or cuda or cuda:N for a GPU.$") as caught:
        load_model(MODEL, weights="none", device=device)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["meta", "vulkan"])
def test_device_without_values_is_refused(device: str) -> None:
    with pytest.raises(ModelError, match=f"device '{device}' does not work on this machine"):
        load_model(MODEL, weights="none", device=device)


# ---- channels ----------------------------------------------------------------------------------------------------------------

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8))


def test_one_channel_checkpoint_receives_the_luminance_with_a_note(save: Save) -> None:
    expected = weights(in_chans=1, num_classes=5)
    model = load_model(MODEL, weights=save(expected))
    assert same(model, expected)
    assert notes(model) == ("the model takes 1 channel, like the first layer of the checkpoint",)
    gray = np.asarray(PHOTO, float) @ (0.299, 0.587, 0.114)
    prepared = prepare(PHOTO, model, resize="fit")
    assert prepared.pixels.shape[1] == 1
    mean, std = np.mean(model.pretrained_cfg["mean"]), np.mean(model.pretrained_cfg["std"])  # type: ignore[index]
    assert float(prepared.pixels.mean()) == pytest.approx((gray.mean() / 255 - mean) / std, abs=0.02)
    found = explain(model, PHOTO)
    assert any("it received the photo's luminance" in note for note in found.provenance.notes)


def test_four_channel_checkpoint_loads_but_refuses_photos(save: Save) -> None:
    expected = weights(in_chans=4)
    model = load_model(MODEL, weights=save(expected))
    assert same(model, expected)
    assert notes(model) == ("the model takes 4 channels, like the first layer of the checkpoint",)
    with pytest.raises(UnsupportedModel, match=r"takes 4 channels, got an image of mode RGB. Pass an array \(H, W, 4\)"):
        prepare(PHOTO, model)
    with torch.inference_mode(), capture(model) as recording:
        model(torch.zeros(1, 4, 160, 160))
    assert len(recording) == 6


def test_checkpoint_filter_without_a_model_argument_is_supported(tmp_path: Path) -> None:
    """Load a model whose checkpoint filter takes only the tensors, like timm's filters for RegNet and VGG."""
    own = timm.create_model("regnetx_002")
    torch.save(own.state_dict(), tmp_path / "regnet.pth")
    assert same(load_model("regnetx_002", weights=tmp_path / "regnet.pth"), own.state_dict())
