# mypy: disable-error-code="no-untyped-call"
"""Models of transformers: the advice of messages about their folders, followed literally."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

import visattn
from tests.advice.tensors import kept, same
from tests.loading.test_transformers_models import settings, vit
from visattn.core.loading import load_model
from visattn.errors import UnsupportedModel, WeightsError

pytestmark = pytest.mark.filterwarnings("ignore::visattn.errors.VisattnNote")


def test_weights_of_the_class_fill_a_folder_without_a_head(tmp_path: Path) -> None:
    vit().base_model.save_pretrained(tmp_path / "m")
    settings(tmp_path / "m", architectures=["ViTForImageClassification"])
    with pytest.raises(WeightsError, match=r"have no values for classifier\.bias and 1 more .*; pass the weights of this class"):
        load_model(f"hf:{tmp_path / 'm'}")
    head = vit().state_dict()
    settings(tmp_path / "m", id2label={0: "cat", 1: "dog", 2: "bird"}, label2id={"cat": 0, "dog": 1, "bird": 2})
    model = load_model(f"hf:{tmp_path / 'm'}", weights=kept(head, tmp_path / "own.pth"))
    assert same(model, head)


HF: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "words only": (
        {"architectures": ["BertModel"]},
        {"architectures": ["ViTForImageClassification"]},
        "auto",
        r"BertModel has no input pixel_values\. Pass a model that has one",
    ),
    "no class": (
        {"architectures": None},
        {"architectures": ["ViTForImageClassification"]},
        "auto",
        r'names no class of transformers\. Name it there: "architectures": \["CLASS"\]\.',
    ),
    "other sizes": (
        {"hidden_size": 32},
        {"hidden_size": 16},
        "auto",
        r"classifier\.weight is 3x16 in the weights and 3x32 by config\.json, and \d+ more tensors differ; check its files",
    ),
    "unknown type": ({"model_type": "new"}, {"model_type": "vit"}, "auto", r"cannot be used .*; check the file, or upgrade"),
    "cannot be built": ({"hidden_act": "no"}, {"hidden_act": "gelu"}, "none", r"cannot be built .*; check its config\.json"),
    "cannot be loaded": ({"hidden_act": "no"}, {"hidden_act": "gelu"}, "auto", r"cannot be loaded .*; check its files"),
    "too large": (
        {"hidden_size": 2_000_000},
        {"hidden_size": 16},
        "none",
        r"asks for more than 20 billion .*; check the file",
    ),
}


@pytest.mark.parametrize("how", HF)
def test_a_configuration_that_is_mended_loads(how: str, tmp_path: Path) -> None:
    wrong, right, chosen, message = HF[how]
    vit().save_pretrained(tmp_path / "m")
    settings(tmp_path / "m", **wrong)
    with pytest.raises((UnsupportedModel, WeightsError), match=message):
        load_model(f"hf:{tmp_path / 'm'}", weights=chosen)
    settings(tmp_path / "m", **right)
    assert isinstance(load_model(f"hf:{tmp_path / 'm'}", weights=chosen), transformers.ViTForImageClassification)


def test_pickled_weights_that_are_converted_load(tmp_path: Path) -> None:
    vit().save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    torch.save(vit().state_dict(), tmp_path / "m" / "pytorch_model.bin")
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.1] * 3).save_pretrained(tmp_path / "m")
    with pytest.raises(
        WeightsError,
        match=r"the only weights that are loaded\. .* save the model and its image processor with save_pretrained\(FOLDER\)",
    ):
        load_model(f"hf:{tmp_path / 'm'}")
    for kind in (transformers.ViTForImageClassification, transformers.ViTImageProcessor):
        kind.from_pretrained(tmp_path / "m").save_pretrained(tmp_path / "safe")
    model = load_model(f"hf:{tmp_path / 'safe'}")
    assert same(model, vit().state_dict())
    assert visattn.prepare(np.zeros((32, 32, 3), np.uint8), model).preprocessing["mean"]["value"] == pytest.approx([0.1] * 3)


def test_an_index_that_is_whole_again_is_read(tmp_path: Path) -> None:
    vit().save_pretrained(tmp_path / "m", max_shard_size="8KB")
    index = tmp_path / "m" / "model.safetensors.index.json"
    whole = index.read_text()
    index.write_text(json.dumps({"weight_map": {"classifier.bias": "../x.safetensors"}}))
    with pytest.raises(WeightsError, match=r"names no files beside it for the tensors; download it again"):
        load_model(f"hf:{tmp_path / 'm'}")
    index.write_text(whole)
    assert same(load_model(f"hf:{tmp_path / 'm'}"), vit().state_dict())


def test_code_of_a_repository_is_run_from_an_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "m"
    vit().save_pretrained(folder)
    (folder / "modeling_own.py").write_text(
        "from transformers import ViTForImageClassification\n\nclass NewViT(ViTForImageClassification):\n    pass\n"
    )
    own = {"AutoModelForImageClassification": "modeling_own.NewViT"}
    settings(folder, architectures=["NewViT"], auto_map=own)
    with pytest.raises(UnsupportedModel, match=r"load the model in a file of yours with trust_remote_code=True, and pass FILE"):
        load_model(f"hf:{folder}")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "own.py").write_text(
        "import transformers\n\ndef make():\n    kind = transformers.AutoModelForImageClassification\n"
        f"    return kind.from_pretrained({str(folder)!r}, trust_remote_code=True)\n"
    )
    model = load_model(f"{tmp_path / 'own.py'}:make")
    assert type(model).__name__ == "NewViT"
    assert same(model, vit().state_dict())


def test_weights_that_are_added_are_loaded(tmp_path: Path) -> None:
    vit().save_pretrained(tmp_path / "m")
    weights = (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "model.fp16.safetensors")
    with pytest.raises(WeightsError, match=r"has no model\.safetensors, the only weights that are loaded\. Add it, or"):
        load_model(f"hf:{tmp_path / 'm'}")
    weights.rename(weights.with_name("model.safetensors"))
    assert same(load_model(f"hf:{tmp_path / 'm'}"), vit().state_dict())


def test_a_folder_of_timm_is_loaded_by_the_name_in_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "test_vit", "num_classes": 1000}))
    with pytest.raises(
        UnsupportedModel, match=r"names no class of transformers\. It is the model test_vit of timm: pass test_vit\."
    ):
        load_model(f"hf:{tmp_path}")
    assert isinstance(load_model("test_vit", weights="none"), nn.Module)


@pytest.mark.parametrize("chosen", ["none", "auto"])
def test_a_missing_package_is_asked_for(chosen: str, tmp_path: Path) -> None:
    config = transformers.DinatConfig(depths=[1, 1], num_heads=[1, 1], embed_dim=8, architectures=["DinatForImageClassification"])
    config.save_pretrained(tmp_path)
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(
        (UnsupportedModel, WeightsError), match=r"requires the natten library .*; install the package that it names"
    ):
        load_model(f"hf:{tmp_path}", weights=chosen)


@pytest.mark.parametrize("width", [32, 2048])
def test_weights_of_the_model_are_passed_in_place_of_others(width: int, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 10 if width > 32 else 2}
    others: dict[str, Any] = {"num_attention_heads": 2, "image_size": 32, "patch_size": 8, "num_labels": 3}
    own = transformers.ViTConfig(**sizes, **others)
    own.architectures = ["ViTForImageClassification"]
    own.save_pretrained(tmp_path / "m")
    file = kept(vit().state_dict(), tmp_path / "own.pth")
    with pytest.raises(
        (UnsupportedModel, WeightsError), match=r"(more tensors differ|than its weights); pass the weights of this model"
    ):
        load_model(f"hf:{tmp_path / 'm'}", weights=file)
    if width == 32:
        right = transformers.ViTForImageClassification(own).state_dict()
        assert same(load_model(f"hf:{tmp_path / 'm'}", weights=kept(right, tmp_path / "own.pth")), right)
