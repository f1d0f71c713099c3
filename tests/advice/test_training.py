# mypy: disable-error-code="no-untyped-call"
"""Training: the advice of messages, followed literally: the run goes on, or begins."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
from PIL import Image
from torch import Tensor, nn

import visattn
from tests.training.kills import state_of
from tests.training.small import begun, pictures, recipe, states
from tests.training.test_bad_training import POISONED
from tests.training.test_beginnings import fine_tuning
from tests.training.test_checkpoint import damage_file, signed
from tests.training.test_compare import CONFIG, Trainer as Fake, compared
from visattn.errors import CheckpointError, DataError, ModelError, TrainingError, UnsupportedModel, WeightsError
from visattn.training import CaptionConfig, Checkpoints, Config, train
from visattn.training.report.costs import cost
from visattn.training.run.checkpoints import read
from visattn.training.tasks.captioning import Captioning

pytestmark = pytest.mark.filterwarnings("ignore::visattn.errors.VisattnNote")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("data"))


def own(folder: Path, code: str, data: Path, **changes: Any) -> Config:
    """Write a Python file with a network, and return settings that train it."""
    (folder / "own.py").write_text(code)
    return recipe(data, model=f"{folder / 'own.py'}:small", widths=(), **changes)


def test_a_smaller_batch_is_trained(data: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a batch of 14 is more than the 13 images\. Choose a smaller batch_size"):
        train(recipe(data, batch_size=14, epochs=1.0), tmp_path / "run")
    assert train(recipe(data, batch_size=13, epochs=1.0), tmp_path / "run").steps == 1


@pytest.mark.parametrize("how", ["raise max_unreadable", "repair"])
def test_training_goes_on_with_images_that_are_repaired_or_allowed(how: str, data: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(data, tmp_path / "data"))
    bad = sorted((folder / "train").rglob("*.png"))[:2]
    whole = [path.read_bytes() for path in bad]
    for path in bad:
        path.write_bytes(b"no picture")
    config = recipe(folder, max_unreadable=0.1, epochs=1.0)
    with pytest.raises(DataError, match=r"at most 10\.00% may be\)\. Repair them or raise max_unreadable"):
        train(config, tmp_path / "run")
    if how == "repair":
        for path, content in zip(bad, whole, strict=True):
            path.write_bytes(content)
    else:
        config = replace(config, max_unreadable=0.2)
    assert len(train(config, tmp_path / how).bad) == (0 if how == "repair" else 2)


STEEP = """
from torch import nn

class Steep(nn.Module):
    '''Its outputs overflow in a test if its weights have grown.'''

    def __init__(self, classes, channels):
        super().__init__()
        self.last = nn.Linear(channels, classes)

    def forward(self, pixels):
        x = self.last(pixels.mean((2, 3)))
        return x if self.training else x * (10 * self.last.weight.abs().sum()).exp()

def small(num_classes, in_channels):
    return Steep(num_classes, in_channels)
"""


@pytest.mark.parametrize("changes", [{"lr": 1e-3}, {"clip_grad": 1e-6}], ids=str)
def test_slower_training_in_another_folder_has_a_finite_loss(changes: dict[str, Any], data: Path, tmp_path: Path) -> None:
    config = own(tmp_path, STEEP, data, lr=100.0, epochs=1.0)
    with pytest.raises(TrainingError, match=r"the loss on the test images is (nan|inf)\. Check these images, or lower lr, set"):
        train(config, tmp_path / "run")
    assert all(read(place).step for place in states(tmp_path / "run"))
    assert np.isfinite(train(replace(config, **changes), tmp_path / "other").loss)


def test_steps_with_nan_gradients_are_skipped(data: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(data, tmp_path / "data"))
    Image.new("RGB", (20, 18), (9, 9, 9)).save(folder / "train" / "cat" / "04.png")
    config = own(tmp_path, POISONED.replace("MODE", "'backward'"), folder, save_every=1)
    with pytest.raises(TrainingError, match=r"although the loss was finite\. Lower lr, .*, or pass nonfinite='skip'"):
        train(config, tmp_path / "run")
    assert train(replace(config, nonfinite="skip"), tmp_path / "run").steps == 8


def test_other_settings_are_compared_in_another_folder(tmp_path: Path) -> None:
    compared(tmp_path / "one", Fake(), ("se", "wide_baseline"), 1)
    with pytest.raises(CheckpointError, match=r"belongs to a network with .*\. Choose another folder"):
        compared(tmp_path / "one", Fake(), ("se", "cbam", "wide_baseline"), 1)
    assert len(compared(tmp_path / "two", Fake(), ("se", "cbam", "wide_baseline"), 1)) == 4
    with pytest.raises(CheckpointError, match=r"holds runs with other settings \(epochs .*\)\. Choose another folder"):
        compared(tmp_path / "one", Fake(), ("se",), 1, replace(CONFIG, epochs=3.0))
    assert len(compared(tmp_path / "three", Fake(), ("se",), 1, replace(CONFIG, epochs=3.0))) == 2


@pytest.mark.parametrize("file", ["se/seed0/result.json", "recipe.json"])
def test_a_damaged_result_that_is_removed_is_made_again(file: str, data: Path, tmp_path: Path) -> None:
    config, run = recipe(data, epochs=0.4), tmp_path / "run"
    first = visattn.training.compare_runs(config, run, ["none", "se"], 1)
    (run / file).write_text("{")
    with pytest.raises(CheckpointError, match=rf"{file}: cannot be read .*\. Remove it to train again"):
        visattn.training.compare_runs(config, run, ["none", "se"], 1)
    (run / file).unlink()
    again = visattn.training.compare_runs(config, run, ["none", "se"], 1)
    assert [row["accuracy"] for row in again] == [row["accuracy"] for row in first]


def wrong_step(place: Path) -> Path:
    file = place / "state.json"
    file.write_text(signed(json.loads(file.read_text()) | {"step": "4"}))
    return file


def no_tensors(place: Path) -> Path:
    file, facts = place / "model.safetensors", json.loads((place / "state.json").read_text())
    file.write_bytes(b"nothing")
    facts["sha256"][file.name] = hashlib.sha256(b"nothing").hexdigest()
    (place / "state.json").write_text(signed(facts))
    return file


def damaged(place: Path) -> Path:
    damage_file(place / "model.safetensors")
    return place / "model.safetensors"


CHECKPOINT: dict[str, tuple[Callable[[Path], Path], str]] = {
    "wrong step": (wrong_step, r"state\.json: step must be .*\. Restore the file"),
    "no tensors": (no_tensors, r"model\.safetensors: is no safetensors file .*\. Restore the file"),
    "damaged": (damaged, r"All checkpoints of this run are damaged\. Restore one, or start again in another folder"),
}


@pytest.mark.parametrize("how", CHECKPOINT)
def test_a_checkpoint_that_is_restored_is_read(how: str, tmp_path: Path) -> None:
    spoil, message = CHECKPOINT[how]
    place = Checkpoints(tmp_path).save(state_of(4))
    whole = {file: file.read_bytes() for file in place.iterdir()}
    file = spoil(place)
    with pytest.raises(CheckpointError, match=message):
        Checkpoints(tmp_path).latest()
    for name in {file, place / "state.json"}:
        name.write_bytes(whole[name])
    latest = Checkpoints(tmp_path).latest()
    assert latest is not None
    assert latest.step == 4


def test_another_network_is_trained_in_another_folder(data: Path, tmp_path: Path) -> None:
    run, other = begun(recipe(data), tmp_path / "run"), recipe(data, widths=(4, 8, 8))
    with pytest.raises(CheckpointError, match=r"the checkpoint of step 4 does not fit this model \(.*\)\. Choose another folder"):
        train(other, run, force=True)
    assert train(other, tmp_path / "other").steps == 8


@pytest.mark.parametrize("how", ["restore", "start again"])
def test_a_run_whose_log_is_restored_goes_on(how: str, data: Path, tmp_path: Path) -> None:
    run = begun(recipe(data), tmp_path / "run")
    log = run / "log.jsonl"
    whole = log.read_bytes()
    log.write_bytes(b"[" + whole[1:])
    with pytest.raises(CheckpointError, match=r"log\.jsonl, line 1: must be an object .*\. Restore the file, or start again in"):
        train(recipe(data), run)
    if how == "restore":
        log.write_bytes(whole)
    assert train(recipe(data), run if how == "restore" else tmp_path / "other").steps == 8


def test_training_on_the_device_that_is_named_works(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"device 'meta' does not work on this machine\. Choose one of: cpu\."):
        train(recipe(data, device="meta", epochs=0.4), tmp_path / "run")
    assert train(recipe(data, device="cpu", epochs=0.4), tmp_path / "other").steps == 1


def published(folder: Path) -> Path:
    state = {name: tensor.contiguous() for name, tensor in timm.create_model("resnet10t", num_classes=7).state_dict().items()}
    safetensors.torch.save_file(state, folder / "published.safetensors")
    return folder / "published.safetensors"


@pytest.mark.parametrize("changes", [{"model_kwargs": {}}, {"weights": "none"}], ids=str)
def test_training_begins_with_the_options_of_the_weights_or_without_weights(
    changes: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    config = fine_tuning(data, published(tmp_path), model_kwargs={"channels": (8, 8, 8, 8)}, epochs=0.4)
    with pytest.raises(
        WeightsError,
        match=r"layers differ from those of .* Use their model_kwargs and img_size, or pass weights=",
    ):
        train(config, tmp_path / "run")
    assert train(replace(config, **changes), tmp_path / "run").steps == 1


def captions(folder: Path, test: str, **changes: Any) -> CaptionConfig:
    """Write images with captions, and return settings to train on them."""
    told = [("red star", "train"), ("blue circle", "train"), (test, "test")]
    rows = []
    for number, (text, split) in enumerate(told):
        Image.new("RGB", (32, 32), (80 * number, 0, 0)).save(folder / f"{number}.png")
        rows.append(json.dumps({"image": f"{number}.png", "caption": text, "split": split}))
    (folder / "captions.jsonl").write_text("\n".join(rows))
    plain: dict[str, Any] = {"model": "visattn_local_features", "img_size": 32, "min_count": 1, "device": "cpu"}
    return CaptionConfig(data=str(folder / "captions.jsonl"), **plain | changes)


@pytest.mark.parametrize("changes", [{"model_kwargs": {}}, {"weights": "none"}], ids=str)
def test_an_encoder_begins_with_the_options_of_the_weights_or_without_weights(changes: dict[str, Any], tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": "resnet10t", "model_kwargs": {"channels": (8, 8, 8, 8)}}
    config = captions(tmp_path, "red circle", weights=str(published(tmp_path)), img_size=64, **options)
    with pytest.raises(
        WeightsError, match=r"tensors differ from those of .* Use their model_kwargs and img_size, or pass weights="
    ):
        Captioning(config).build()
    assert isinstance(Captioning(replace(config, **changes)).build(), nn.Module)


def test_test_captions_of_the_same_language_are_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no word of the test captions occurs .*\. Check that both have the same language"):
        Captioning(captions(tmp_path, "cercle bleu"))
    assert len(Captioning(captions(tmp_path, "blue circle")).tests) == 1


def test_longer_captions_are_allowed_or_left_out(tmp_path: Path) -> None:
    long = "a blue circle and a red star"
    with pytest.raises(DataError, match=r"must have a caption of at most 2 words, .*\. Raise max_length, or leave the image out"):
        Captioning(captions(tmp_path, long, max_length=2))
    config = captions(tmp_path, long, max_length=7)
    assert len(Captioning(config).tests) == 1
    rows = Path(config.data).read_text().splitlines()
    shutil.copy(tmp_path / "2.png", tmp_path / "3.png")
    Path(config.data).write_text("\n".join([*rows[:-1], json.dumps({"image": "3.png", "caption": "red star", "split": "test"})]))
    assert len(Captioning(replace(config, max_length=2)).tests) == 1


ODD = """
import torch
from torch import Tensor
from torch import nn

class Odd(nn.Module):
    def __init__(self, classes, channels):
        super().__init__()
        self.last = nn.Linear(channels, classes)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

    def forward(self, pixels):
        if FAILS and self.training:
            raise RuntimeError("this layer fails")
        return self.last(pixels.mean((2, 3))) * FACTOR

def small(num_classes, in_channels):
    return Odd(num_classes, in_channels)
"""


def odd(fails: bool = False, factor: str = "1") -> str:
    return ODD.replace("FAILS", str(fails)).replace("FACTOR", factor)


def test_a_network_with_a_mask_of_minus_infinity_is_trained(data: Path, tmp_path: Path) -> None:
    assert train(own(tmp_path, odd(), data, epochs=0.4), tmp_path / "run").steps == 1


def test_an_error_of_the_network_after_a_resume_is_its_own(data: Path, tmp_path: Path) -> None:
    run = begun(own(tmp_path, odd(), data), tmp_path / "run")
    config = own(tmp_path, odd(fails=True), data)
    for folder in (run, tmp_path / "other"):
        with pytest.raises(RuntimeError, match=r"^this layer fails$"):
            train(config, folder)


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_what_is_tried_already_is_not_advised(nonfinite: Any, data: Path, tmp_path: Path) -> None:
    config = own(tmp_path, odd(factor="float('nan')"), data, nonfinite=nonfinite, epochs=5.0)
    advice = "Lower lr or set clip_grad." if nonfinite == "skip" else "Lower lr, set clip_grad, or pass nonfinite='skip'."
    with pytest.raises(TrainingError, match=rf"The images are listed in nonfinite\.jsonl\. {advice}$"):
        train(config, tmp_path / "run")


def test_words_are_known_with_a_lower_min_count(tmp_path: Path) -> None:
    config = captions(tmp_path, "blue circle", min_count=2)
    rows = Path(config.data).read_text().splitlines()
    shutil.copy(tmp_path / "0.png", tmp_path / "3.png")
    Path(config.data).write_text("\n".join([*rows, rows[0].replace("0.png", "3.png")]))
    with pytest.raises(
        DataError,
        match=r"no word of the test captions occurs 2 times or more in the training captions\. Lower min_count, or check",
    ):
        Captioning(config)
    assert len(Captioning(replace(config, min_count=1)).tests) == 1


def test_an_error_of_several_lines_is_told_by_its_first() -> None:
    class Talkative(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("first.\nsecond")

    with pytest.raises(UnsupportedModel, match=r"got Talkative: first\. Give the image size of the network\. [^\n]*$"):
        cost(Talkative(), (3, 8, 8))
