"""Loading from a model hub, tested with a small local server."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch

from tests.loading.hub import Hub
from visattn.data import photo_path

pytestmark = pytest.mark.full

MODEL = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return {name: value.clone() for name, value in timm.create_model(MODEL).state_dict().items()}


@pytest.fixture(params=["model.safetensors", "pytorch_model.bin"])
def hub(request: pytest.FixtureRequest, weights: dict[str, torch.Tensor], tmp_path: Path) -> Iterator[Hub]:
    file = tmp_path / request.param
    safetensors.torch.save_file(weights, file) if file.suffix == ".safetensors" else torch.save(weights, file)
    server = Hub({f"timm/{MODEL}/{file.name}": file.read_bytes(), f"timm/{MODEL}/README.md": b""})
    yield server
    server.close()


def overlay(endpoint: str, folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1"}
    options = ["--model", MODEL, "--img-size", "64", "--json", "-o", str(folder / name)]
    command = [sys.executable, "-m", "visattn", "overlay", str(photo_path("coffee")), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)


def test_weights_are_downloaded_once_and_then_read_from_the_cache(hub: Hub, tmp_path: Path) -> None:
    first = overlay(hub.address, tmp_path, "first.png")
    assert first.returncode == 0, first.stderr
    facts = json.loads(first.stdout)[0]["provenance"]
    assert (facts["weights"], facts["random"]) == (MODEL, False)
    assert facts["weights_sha256"] == hashlib.sha256(next(iter(hub.files.values()))).hexdigest()
    hub.files.clear()
    second = overlay(hub.address, tmp_path, "second.png")
    assert second.returncode == 0, second.stderr
    assert (tmp_path / "second.png").read_bytes() == (tmp_path / "first.png").read_bytes()


def test_repository_without_weights_is_an_error(hub: Hub, tmp_path: Path) -> None:
    hub.files.pop(next(iter(hub.files)))
    done = overlay(hub.address, tmp_path, "out.png")
    assert done.returncode == 4
    assert "has none of model.safetensors, pytorch_model.bin" in done.stderr
