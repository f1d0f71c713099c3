"""Folders of transformers made to run code, to read other files, or to build a network without bound: each is refused in one line."""

from __future__ import annotations

import io
import json
import pathlib
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from timm.models import _factory, _helpers

import visattn
from tests.loading.test_transformers_models import settings, vit
from visattn.core.loading import limits
from visattn.errors import ModelError


class Canary:
    """An object whose unpickling creates a file."""

    def __init__(self, file: Path) -> None:
        """Keep the file to create."""
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the call that creates it."""
        return pathlib.Path.touch, (self.file,)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture
def folder(tmp_path: Path, canary: Path) -> Path:
    """Folder with a small model, and beside it pickles and modules that create the canary."""
    place = tmp_path / "model"
    vit().save_pretrained(place)
    for name in ("checkpoint.pth", "adapter_model.bin", "pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        torch.save({"x": Canary(canary)}, place / name)
    for name in ("modeling_own.py", "configuration_own.py", "processing_own.py"):
        (place / name).write_text(f"import pathlib\npathlib.Path({str(canary)!r}).touch()\nclass Own: pass\n")
    (place / "custom_generate").mkdir()
    (place / "custom_generate" / "generate.py").write_text(f"import pathlib\npathlib.Path({str(canary)!r}).touch()\n")
    return place


@pytest.fixture
def wrapper(folder: Path) -> Path:
    """Fill the same folder with a model of timm in transformers' wrapper."""
    kind: Any = transformers.TimmWrapperConfig
    config = kind(architecture="test_vit", num_labels=3, label_names=["a", "b", "c"])
    torch.manual_seed(0)
    model: Any = transformers.TimmWrapperForImageClassification(config)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def old_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let timm load checkpoints as its old versions do, with pickle."""

    def load(model: Any, path: str, *_: Any, **__: Any) -> None:
        torch.load(path, weights_only=False)

    for module in (_factory, _helpers):
        monkeypatch.setattr(module, "load_checkpoint", load)


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        visattn.load_model(f"hf:{folder}", **options)
    assert caught.value.exit_code == 4
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_wrapped_model_of_timm_gives_the_same_output(wrapper: Path, canary: Path) -> None:
    pixels = torch.randn(1, 3, 160, 160)
    expected: Any = transformers.TimmWrapperForImageClassification.from_pretrained(wrapper)
    model: Any = visattn.load_model(f"hf:{wrapper}")
    with torch.no_grad():
        assert torch.allclose(model(pixels).logits, expected.eval()(pixels).logits, atol=1e-6)
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert not canary.exists()


def test_old_timm_would_have_run_the_pickle(old_timm: None, folder: Path, canary: Path) -> None:
    """Show that the canary works."""
    timm.create_model("test_vit", checkpoint_path=str(folder / "checkpoint.pth"))
    assert canary.exists()


@pytest.mark.parametrize("weights", ["auto", "none"])
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_args": {"checkpoint_path": "{}/checkpoint.pth"}}, "its setting model_args.checkpoint_path names code or a file"),
        ({"model_args": {"pretrained_cfg": {"file": "{}/checkpoint.pth"}}}, "model_args.pretrained_cfg names code or a file"),
        ({"model_args": {"pretrained_cfg_overlay": {"file": "x"}}}, "model_args.pretrained_cfg_overlay names code or a file"),
        ({"model_args": {"pretrained": True}}, "model_args.pretrained names code or a file"),
        ({"model_args": {"cache_dir": "{}"}}, "model_args.cache_dir names code or a file"),
        ({"pretrained_cfg": {"file": "{}/checkpoint.pth"}}, "pretrained_cfg.file names code or a file"),
        ({"pretrained_cfg": {"url": "http://localhost/x"}}, "pretrained_cfg.url names code or a file"),
        ({"architecture": "local-dir:{}/local"}, "its setting architecture names another place, 'local-dir:"),
        ({"architecture": "hf-hub:owner/name"}, "its setting architecture names another place, 'hf-hub:owner/name'"),
    ],
)
@pytest.mark.usefixtures("old_timm")
def test_a_wrapper_that_names_files_is_refused(
    changes: dict[str, Any], told: str, weights: str, wrapper: Path, canary: Path
) -> None:
    (wrapper / "local").mkdir()
    inner = {"architecture": "test_vit", "model_args": {"checkpoint_path": str(wrapper / "checkpoint.pth")}, "pretrained_cfg": {}}
    (wrapper / "local" / "config.json").write_text(json.dumps(inner))
    settings(wrapper, **json.loads(json.dumps(changes).replace("{}/", f"{wrapper}/").replace('"{}"', f'"{wrapper}"')))
    assert told in refused(wrapper, weights=weights)
    assert not canary.exists()


@pytest.mark.parametrize("weights", ["auto", "none"])
@pytest.mark.parametrize("nest", ["backbone_config", "vision_config", "a.b.c"])
@pytest.mark.usefixtures("old_timm")
def test_nested_settings_are_checked(nest: str, weights: str, folder: Path, canary: Path) -> None:
    inner: Any = {"model_type": "timm_wrapper", "model_args": {"checkpoint_path": str(folder / "checkpoint.pth")}}
    outer, *others = nest.split(".")
    for key in reversed(others):
        inner = [{key: inner}]
    settings(folder, **{outer: inner})
    assert f"its setting {nest}.model_args.checkpoint_path names code or a file" in refused(folder, weights=weights)
    assert not canary.exists()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "backbone in a folder": ({"backbone": "../other"}, "backbone names another place, '../other'"),
    "backbone of the hub": ({"backbone": "owner/name", "use_timm_backbone": False}, "backbone names another place"),
    "kernel of the hub": ({"attn_implementation": "owner/kernel"}, "attn_implementation may name code of a hub, 'owner/kernel'"),
    "kernel, private key": ({"_attn_implementation": "owner/kernel:f"}, "_attn_implementation may name code of a hub"),
    "kernel, for each part": ({"attn_implementation": {"": "owner/kernel"}}, "attn_implementation may name code of a hub"),
    "quantized": ({"quantization_config": {"quant_method": "bitsandbytes"}}, "replaces layers by quantized ones"),
    "other configuration": ({"configuration_files": ["config.4.0.0.json"]}, "configuration_files names code or a file"),
    "no type": ({"dtype": "load"}, "dtype is no type of numbers, 'load'"),
    "million layers": ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, at most 10,000"),
    "million stages": ({"depths": [10**6, 2]}, "depths has 2 values with the sum 1,000,002"),
    "many labels": ({"num_labels": 10**9, "id2label": None, "label2id": None}, "num_labels is 1000000000, at most"),
    "large number": ({"hidden_size": 10**30}, "hidden_size is 1000000000"),
    "infinite depth": ({"depth_multiplier": float("inf")}, "depth_multiplier is inf"),
    "large image": ({"image_size": 10**9}, r"billion parameters|far larger|cannot be"),
    "architectures is a number": ({"architectures": 7}, "its config.json names no class of transformers"),
    "architectures is a word": ({"architectures": "ViTModel"}, "its config.json names no class of transformers"),
    "architectures is a dictionary": ({"architectures": {"ViTModel": 1}}, "its config.json names no class of transformers"),
    "architectures has a number": ({"architectures": [7]}, "its config.json names no class of transformers"),
    "model type is a list": ({"model_type": ["vit"]}, "its config.json cannot be used"),
    "model type is missing": ({"model_type": None}, "its config.json cannot be used"),
    "labels are a number": ({"id2label": 3}, "its config.json cannot be used"),
    "class of a method": ({"__class__": "x"}, "its config.json cannot be used"),
    "size is a list": ({"hidden_size": [1]}, "cannot be used|cannot be built|cannot be loaded"),
    "size is a word": ({"hidden_size": "x"}, "cannot be used|cannot be built|cannot be loaded"),
    "size is zero": ({"hidden_size": 0}, "cannot be used|cannot be built|cannot be loaded|no values"),
    "size is negative": ({"hidden_size": -16}, "cannot be used|cannot be built|cannot be loaded"),
}


@pytest.mark.parametrize("weights", ["auto", "none"])
@pytest.mark.parametrize("name", REFUSED)
def test_settings_are_refused_in_one_line_and_at_once(name: str, weights: str, folder: Path, canary: Path) -> None:
    changes, told = REFUSED[name]
    if name == "size is zero" and weights == "none":
        pytest.skip("a network of width zero can be built")
    settings(folder, **changes)
    started = time.perf_counter()
    line = refused(folder, weights=weights)
    assert time.perf_counter() - started < 20
    assert any(part in line for part in told.split("|")), line
    assert not canary.exists()


def test_a_network_far_larger_than_its_weights_is_refused_before_it_is_built(folder: Path) -> None:
    settings(folder, num_hidden_layers=9_000)
    started = time.perf_counter()
    assert "its options make a network far larger than its weights" in refused(folder)
    assert time.perf_counter() - started < 20
    settings(folder, hidden_size=2_000_000, num_hidden_layers=10)
    assert "its options make a network far larger than its weights" in refused(folder)


def test_random_weights_have_an_absolute_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_MODULES", 3_000)
    settings(folder, num_hidden_layers=900)
    started = time.perf_counter()
    assert "asks for more than 20 billion parameters or 3,000 modules" in refused(folder, weights="none")
    settings(folder, hidden_size=2_000_000, num_hidden_layers=10)
    assert "asks for more than 20 billion parameters" in refused(folder, weights="none")
    assert time.perf_counter() - started < 60


@pytest.mark.parametrize(
    "part", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "pytorch_model.bin", "", 7, None, ["a"]]
)
def test_parts_of_weights_lie_beside_the_index(part: Any, folder: Path, canary: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "x.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"classifier.bias": part}}))
    assert "its model.safetensors.index.json names no files beside it for the tensors" in refused(folder)
    assert not canary.exists()


@pytest.mark.parametrize("places", [[], ["a"], 7, "x", None, {}])
def test_an_index_that_is_no_dictionary_is_refused(places: Any, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert "names no files beside it for the tensors" in refused(folder)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, " " * 30_000_000, "9" * 10_000, "[1]", "null"])
@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json", "generation_config.json"])
def test_files_that_are_too_large_or_too_deep_are_refused(content: str, file: str, folder: Path) -> None:
    (folder / file).write_text(content)
    assert f"{file}: " in refused(folder)


def test_deep_settings_are_refused(folder: Path) -> None:
    deep: Any = 1
    for _ in range(60):
        deep = {"a": deep}
    settings(folder, vision_config=deep)
    assert "its settings are nested deeper than 20 levels" in refused(folder)


def test_a_pickle_named_safetensors_is_refused(folder: Path, canary: Path) -> None:
    torch.save({"x": Canary(canary)}, folder / "model.safetensors")
    assert "is a file of torch.save, not safetensors as its name says" in refused(folder)
    assert not canary.exists()


def test_code_beside_the_model_is_not_run(folder: Path, canary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load, explain and prepare with every file beside the weights that could name code."""
    own = {"AutoConfig": "configuration_own.Own", "AutoModel": "modeling_own.Own", "AutoImageProcessor": "processing_own.Own"}
    settings(folder, auto_map=own, name_or_path=str(folder.parent), use_pretrained_backbone=True)
    adapter = {"base_model_name_or_path": str(folder.parent), "peft_type": "LORA", "auto_mapping": None, "auto_map": own}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    (folder / "generation_config.json").write_text(json.dumps({"auto_map": own, "transformers_version": "5"}))
    (folder / "config.5.0.0.json").write_text("{")
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # a question would fail
    model: Any = visattn.load_model(f"hf:{folder}")
    assert not hasattr(model.config, "auto_map")
    assert model.config._name_or_path == str(folder)
    visattn.prepare("photo:coffee", model)
    assert not canary.exists()
    assert not {"modeling_own", "configuration_own", "processing_own"} & sys.modules.keys()


def test_a_checkpoint_of_a_training_loop_fills_a_model_of_transformers(folder: Path, tmp_path: Path) -> None:
    expected = vit().state_dict()
    torch.save({"net": {f"module.{key}": value for key, value in expected.items()}, "epoch": 3}, tmp_path / "own.pth")
    model = visattn.load_model(f"hf:{folder}", weights=tmp_path / "own.pth")
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    assert "the prefix 'module.' of the checkpoint's names was removed" in str(visattn.families.provenance_of(model).notes)


def test_labels_may_be_any_words(folder: Path) -> None:
    words = ["file", "url", "checkpoint_path"]
    settings(folder, id2label=dict(enumerate(words)), label2id={word: index for index, word in enumerate(words)})
    model: Any = visattn.load_model(f"hf:{folder}")
    assert model.config.id2label == dict(enumerate(words))
