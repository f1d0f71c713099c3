"""Models of transformers by name, from folders and from a hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from PIL import Image

import visattn
from tests.loading.hub import GATED, STALLED, Hub
from visattn.errors import UnsupportedModel, VisattnError, WeightsError

SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
LABELS = {0: "cat", 1: "dog", 2: "bird"}


def vit() -> Any:
    config = transformers.ViTConfig(**SMALL, image_size=32, patch_size=8, id2label=LABELS)
    torch.manual_seed(0)
    model: Any = transformers.ViTForImageClassification(config)
    return model.eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with a small model and its image processor."""
    vit().save_pretrained(tmp_path / "model")
    size = {"height": 32, "width": 32}
    transformers.ViTImageProcessor(size=size, image_mean=[0.1] * 3, image_std=[0.2] * 3).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def photo() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 64, 3), dtype=np.uint8)).resize((128, 80))


def settings(folder: Path, **changes: Any) -> None:
    """Change values of a configuration; None removes one."""
    file = folder / "config.json"
    known = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in known.items() if value is not None}))


def test_model_of_a_folder_gives_the_same_output_and_has_labels_and_processor(folder: Path, photo: Image.Image) -> None:
    model = visattn.load_model(f"hf:{folder}")
    pixels = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(pixels).logits, vit()(pixels).logits)
    assert not model.training
    seen = visattn.explain(model, photo)
    assert seen.provenance.scores[0]["name"] in LABELS.values()
    assert seen.provenance.preprocessing["mean"] == {"value": [0.1] * 3, "source": "model"}
    assert seen.provenance.weights_sha256
    assert seen.provenance.method == "relevance"


def test_folder_without_prefix_is_understood(folder: Path, recwarn: pytest.WarningsRecorder) -> None:
    assert type(visattn.load_model(str(folder))).__name__ == "ViTForImageClassification"
    assert f"is understood as hf:{folder}" in str(recwarn.pop(visattn.errors.VisattnNote).message)


def test_weights_in_several_files_are_the_same(folder: Path) -> None:
    whole = visattn.load_model(f"hf:{folder}").state_dict()
    (folder / "model.safetensors").unlink()
    vit().save_pretrained(folder, max_shard_size="8KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    parts = visattn.load_model(f"hf:{folder}")
    assert all(torch.equal(value, whole[name]) for name, value in parts.state_dict().items())
    assert "files; the digest is that of the first" in str(visattn.families.provenance_of(parts).notes)


def test_random_weights_need_only_the_configuration(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    one, same, other = (visattn.load_model(f"hf:{folder}", weights="none", seed=seed) for seed in (1, 1, 2))
    weights = [model.state_dict()["classifier.weight"] for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert visattn.families.provenance_of(one).random


def test_weights_of_another_file(folder: Path, tmp_path: Path) -> None:
    weights = {name: value + 1 for name, value in vit().state_dict().items()}
    safetensors.torch.save_file(weights, tmp_path / "own.safetensors")
    model = visattn.load_model(f"hf:{folder}", weights=tmp_path / "own.safetensors")
    assert torch.equal(model.state_dict()["classifier.bias"], weights["classifier.bias"])
    assert visattn.families.provenance_of(model).weights == "own.safetensors"


def test_settings_for_text_are_those_of_their_own_file(tmp_path: Path) -> None:
    words = {"vocab_size": 50, "max_position_embeddings": 20, "bos_token_id": 1, "eos_token_id": 2}
    vision = {**SMALL, "image_size": 32, "patch_size": 8}
    kind: Any = transformers.GitConfig
    own: Any = transformers.GitForCausalLM(kind(**SMALL, **words, vision_config=vision))
    own.generation_config.max_length = 7
    own.save_pretrained(tmp_path)
    model: Any = visattn.load_model(f"hf:{tmp_path}")
    assert model.generation_config.to_dict() == own.generation_config.to_dict()
    assert model.config._name_or_path == str(tmp_path)


def drop(folder: Path, name: str) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file({key: value for key, value in tensors.items() if key != name}, folder / "model.safetensors")


def pickled(folder: Path) -> None:
    torch.save(safetensors.torch.load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def spoil(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["classifier.bias"][0] = torch.nan
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


BAD: dict[str, tuple[Callable[[Path], Any], type[VisattnError], str]] = {
    "no configuration": (lambda folder: (folder / "config.json").unlink(), UnsupportedModel, r"has no config\.json"),
    "configuration is no JSON": (
        lambda folder: (folder / "config.json").write_text("{"),
        WeightsError,
        "cannot be read as a configuration",
    ),
    "no class is named": (
        lambda folder: settings(folder, architectures=None),
        UnsupportedModel,
        "names no class of transformers",
    ),
    "unknown class": (
        lambda folder: settings(folder, architectures=["NewViT"]),
        UnsupportedModel,
        "has no class NewViT. Upgrade",
    ),
    "not a model": (lambda folder: settings(folder, architectures=["AutoConfig"]), UnsupportedModel, "has no class AutoConfig"),
    "words only": (
        lambda folder: settings(folder, architectures=["BertModel"]),
        UnsupportedModel,
        "BertModel has no input pixel_values",
    ),
    "code of the repository": (
        lambda folder: settings(folder, architectures=["NewViT"], auto_map={"AutoModel": "new.NewViT"}),
        UnsupportedModel,
        r"needs Python code of its repository, which is not run\. If you trust",
    ),
    "unknown type": (lambda folder: settings(folder, model_type="new"), UnsupportedModel, r"config\.json cannot be used"),
    "pickled weights": (
        pickled,
        WeightsError,
        r"has no model\.safetensors, the only weights that are loaded\. .* save_pretrained",
    ),
    "truncated weights": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000]),
        WeightsError,
        r"model\.safetensors: cannot be read as safetensors",
    ),
    "missing tensor": (
        lambda folder: drop(folder, "classifier.weight"),
        WeightsError,
        r"no values for classifier\.weight of ViTFor",
    ),
    "other size": (
        lambda folder: settings(folder, hidden_size=32),
        WeightsError,
        r"classifier\.weight is 3x16 in the weights and 3x32 by",
    ),
    "NaN": (spoil, WeightsError, r"classifier\.bias has 1 NaN"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folder_is_refused_with_its_cause(name: str, folder: Path) -> None:
    change, kind, message = BAD[name]
    change(folder)
    with pytest.raises(kind, match=message):
        visattn.load_model(f"hf:{folder}")


def test_name_that_is_no_repository_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="no such folder, and it is not the name of a repository"):
        visattn.load_model("hf:./no/such/folder")


NAMES = "owner/vit", "owner/vit@main", "owner/vit@old", GATED, "owner/nothing", STALLED, "owner/text", "owner/pickled"
LOADING = """
import sys, warnings
import visattn
warnings.simplefilter("ignore")
for name in sys.argv[1:]:
    try:
        model = visattn.load_model(f"hf:{name}")
        facts = visattn.families.provenance_of(model)
        print(name, "|", type(model).__name__, facts.weights, visattn.prepare("photo:coffee", model).preprocessing["mean"]["value"])
    except visattn.VisattnError as error:
        print(name, "|", type(error).__name__, error)
"""


@pytest.fixture
def hub(folder: Path) -> Iterator[Hub]:
    files = {f"owner/vit/{file.name}": file.read_bytes() for file in folder.iterdir()}
    files["owner/text/README.md"] = b"only words"
    files["owner/pickled/config.json"] = files["owner/vit/config.json"]
    files["owner/pickled/pytorch_model.bin"] = b"anything"
    server = Hub(files)
    yield server
    server.close()


@pytest.mark.full
def test_hub_is_read_once_and_each_fault_is_named(hub: Hub, tmp_path: Path) -> None:
    def loaded(*names: str) -> dict[str, str]:
        environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-c", LOADING, *names]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=environment)
        return {name: rest for name, _, rest in (line.partition(" | ") for line in done.stdout.splitlines())}

    found = loaded(*NAMES)
    whole = f"ViTForImageClassification owner/vit@{'0' * 12} [0.1, 0.1, 0.1]"
    assert found["owner/vit"] == found["owner/vit@main"] == whole
    assert "has no revision old; check its name" in found["owner/vit@old"]
    assert "is gated; accept its terms on its page, log in with `hf auth login`" in found[GATED]
    assert "has no repository owner/nothing, or it is private" in found["owner/nothing"]
    assert "Unreachable" in found[STALLED]
    assert "pass a folder that has the model's files" in found[STALLED]
    assert "has no config.json, so it is no model of transformers" in found["owner/text"]
    assert "has no model.safetensors, the only weights that are loaded" in found["owner/pickled"]
    hub.close()
    assert loaded("owner/vit")["owner/vit"] == whole
