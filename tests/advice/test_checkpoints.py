# mypy: disable-error-code="no-untyped-call"
"""Checkpoints: the advice of messages about files of weights, followed literally."""

from __future__ import annotations

import gzip
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from torch import nn

from tests.advice.tensors import kept, same
from tests.loading.test_models import weights
from visattn.core.loading import load_model
from visattn.errors import ResourceError, WeightsError

MODEL = "test_vit"
pytestmark = pytest.mark.filterwarnings("ignore::visattn.errors.VisattnNote")


LACKING: dict[str, tuple[Callable[[], Any], str]] = {
    "a list": (lambda: [weights()], r"is not a dictionary of tensors; save model\.state_dict\(\)"),
    "quantized": (
        lambda: weights() | {"norm.weight": torch.ones(64, dtype=torch.int8)},
        r"norm\.weight must hold floating-point numbers, got int8; save the weights as they were before quantization",
    ),
    "sparse": (
        lambda: weights() | {"head.weight": weights()["head.weight"].to_sparse()},
        r"head\.weight is sparse; save plain float tensors",
    ),
    "complex": (
        lambda: weights() | {"head.weight": weights()["head.weight"].to(torch.complex64)},
        r"head\.weight is complex; save plain float tensors",
    ),
    "without a block": (
        lambda: {name: tensor for name, tensor in weights().items() if not name.startswith("blocks.3.")},
        r"missing: blocks\.3.*, or save model\.state_dict\(\) of the whole model",
    ),
    "position of another rank": (
        lambda: weights() | {"pos_embed": torch.zeros(7)},
        r"does not fit the model: pos_embed: checkpoint 7, model 1x101x64; .* save model\.state_dict\(\) of the whole model",
    ),
    "too large for float32": (
        lambda: weights() | {"norm.weight": torch.full((64,), 1e300, dtype=torch.float64)},
        r"norm\.weight has 64 NaN or infinite values in float32; pass finite weights",
    ),
    "NaN": (
        lambda: weights() | {"norm.weight": torch.full((64,), torch.nan)},
        r"norm\.weight has 64 NaN or infinite values in float32; pass finite weights",
    ),
}


@pytest.mark.filterwarnings("ignore:Validating sparse tensor:UserWarning")
@pytest.mark.parametrize("how", LACKING)
def test_the_state_of_the_whole_model_loads(how: str, tmp_path: Path) -> None:
    content, message = LACKING[how]
    with pytest.raises(WeightsError, match=message):
        load_model(MODEL, weights=kept(content(), tmp_path / "w.pth"))
    model = timm.create_model(MODEL)
    assert same(load_model(MODEL, weights=kept(model.state_dict(), tmp_path / "w.pth")), model.state_dict())


def test_the_model_of_the_checkpoint_loads_it(tmp_path: Path) -> None:
    expected = weights("test_vit2")
    file = kept(expected, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=r"does not fit the model: .*; choose the model that the checkpoint was trained with"):
        load_model(MODEL, weights=file)
    assert same(load_model("test_vit2", weights=file), expected)


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", r"empty file; download it again"),
    "git-lfs": (lambda _: b"version https://git-lfs.github.com/spec/v1\n", r"is a git-lfs pointer, not the weights; run git lfs"),
    "page": (
        lambda _: b"\n<!DOCTYPE html><html>",
        r"starts with '<!DOCTYPE html>', like a web page or XML; pass the checkpoint itself",
    ),
    "cut": (lambda whole: whole[:-2000], r"truncated: an archive without|cannot be read as safetensors .*, or download it again"),
    "noise": (
        lambda _: b"\0\1\2\3" * 99,
        r"cannot be read as (a checkpoint|safetensors) .*; check the file, or download it again",
    ),
    "gone": (lambda _: b"gone", r"cannot be read \(no such file or directory\); check the file"),
}


@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
@pytest.mark.parametrize("how", DAMAGED)
def test_the_whole_file_in_place_of_a_damaged_one_loads(how: str, ending: str, tmp_path: Path) -> None:
    """Stand in for the download: the file is the one that the hub would give."""
    expected, file = weights(), tmp_path / f"w{ending}"
    torch.save(expected, file) if ending == ".pth" else safetensors.torch.save_file(expected, file)
    whole, (spoil, message) = file.read_bytes(), DAMAGED[how]
    file.unlink() if how == "gone" else file.write_bytes(spoil(whole))
    with pytest.raises(WeightsError, match=message):
        load_model(MODEL, weights=file)
    file.write_bytes(whole)
    assert same(load_model(MODEL, weights=file), expected)


def test_another_ending_loads(tmp_path: Path) -> None:
    file = kept(weights(), tmp_path / "w.safetensors")
    with pytest.raises(
        WeightsError, match=r"is a file of torch\.save, not safetensors as its name says; give it the ending \.pth, and"
    ):
        load_model(MODEL, weights=file)
    assert same(load_model(MODEL, weights=file.rename(file.with_suffix(".pth"))), weights())


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
def test_the_lines_for_a_newer_pickle_save_its_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(weights(), "w.pth", pickle_protocol=4)
    with pytest.raises(WeightsError, match=r"operations of a protocol above 2, .*; if you trust the file, save its") as caught:
        load_model(MODEL, weights="w.pth")
    exec(str(caught.value).partition("alone: ")[2].rstrip("."), {})
    assert same(load_model(MODEL, weights="tensors.pth"), weights())


def packed(folder: Path, how: str) -> Path:
    """Write the weights in another format."""
    file, numbers = folder / "file", {name: tensor.numpy() for name, tensor in weights().items()}
    if how == "npz":
        with file.open("wb") as stream:
            np.savez(stream, **numbers)  # type: ignore[arg-type]
    elif how == "pickle":
        file.write_bytes(pickle.dumps(numbers))
    elif how == "gzip":
        file.write_bytes(gzip.compress(kept(weights(), folder / "w.pth").read_bytes(), 1))
    elif how == "zip":
        with zipfile.ZipFile(file, "w") as archive:
            archive.write(kept(weights(), folder / "w.pth"), "w.pth")
    else:
        with tarfile.open(file, "w") as tape:
            tape.add(kept(weights(), folder / "w.pth"), "a" * 99)
    return file


def unpacked(file: Path, how: str) -> Path:
    """Do what the message says."""
    folder = file.parent
    if how in ("npz", "pickle"):
        numbers = np.load(file) if how == "npz" else pickle.loads(file.read_bytes())
        safetensors.torch.save_file({name: torch.from_numpy(numbers[name]) for name in numbers}, folder / "w.safetensors")
        return folder / "w.safetensors"
    (folder / "out").mkdir()
    if how == "gzip":
        (folder / "out" / "w.pth").write_bytes(gzip.decompress(file.read_bytes()))
    else:
        shutil.unpack_archive(file, folder / "out", how)
    return next((folder / "out").iterdir())


FORMATS = {
    "npz": r"is an archive of NumPy arrays \(npz\), .*; save its tensors with safetensors\.torch\.save_file",
    "pickle": r"is a pickle .* that torch\.save did not write, .*; if you trust it, save its tensors with safetensors",
    "gzip": r"is compressed with gzip, .*; unpack it, and pass the checkpoint in it",
    "zip": r"is a zip archive that torch\.save did not write .*; unpack it, and pass the checkpoint in it",
    "tar": r"is a tar archive, not a checkpoint; unpack it, and pass the checkpoint in it",
}


@pytest.mark.parametrize("how", FORMATS)
def test_tensors_of_another_format_load_once_they_are_saved_or_unpacked(how: str, tmp_path: Path) -> None:
    file = packed(tmp_path, how)
    with pytest.raises(WeightsError, match=FORMATS[how]):
        load_model(MODEL, weights=file)
    assert same(load_model(MODEL, weights=unpacked(file, how)), weights())


class Own:
    """A class that only this file has."""


NESTED: dict[str, Callable[[], Any]] = {
    **{key: partial(lambda key: {key: weights(), "config": Own()}, key) for key in ("model_state_dict", "net", "teacher")},
    "beside the name of the model": lambda: {"model": MODEL, "state_dict": weights(), "config": Own()},
    "beside the optimizer": lambda: {
        "optimizer": {"state": {0: {"step": torch.ones(1)}}},
        "state_dict": weights(),
        "config": Own(),
    },
    "a module": lambda: {"epoch": 3, "ema": None, "model": Whole()},
}


class Whole(nn.Module):
    """A module that is saved whole."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = timm.create_model(MODEL)
        self.backbone.load_state_dict(weights())


@pytest.mark.parametrize("how", NESTED)
def test_the_lines_for_a_file_with_classes_save_its_tensors(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(NESTED[how](), "w.pth")
    with pytest.raises(
        WeightsError, match=r"refused, because loading it would run code: .*; if you trust the file, save"
    ) as caught:
        load_model(MODEL, weights="w.pth")
    exec(str(caught.value).partition("alone: ")[2].rstrip("."), {})
    assert same(load_model(MODEL, weights="tensors.pth"), weights())


def test_a_safetensors_file_whose_header_looks_like_a_tag_loads(tmp_path: Path) -> None:
    """Choose a length of the header whose first bytes are " <"."""
    length = int.from_bytes(safetensors.torch.save(weights(), metadata={"note": ""})[:8], "little")
    safetensors.torch.save_file(weights(), tmp_path / "w.safetensors", metadata={"note": "x" * (0x3C20 - length)})
    assert (tmp_path / "w.safetensors").read_bytes()[:2] == b" <"
    assert same(load_model(MODEL, weights=tmp_path / "w.safetensors"), weights())


MASKED = """
import torch
from torch import nn

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

def make():
    return Masked()
"""


def test_a_mask_of_minus_infinity_is_loaded_where_the_model_has_one(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MASKED)
    name = f"{tmp_path / 'own.py'}:make"
    state = load_model(name).state_dict()
    assert same(load_model(name, weights=kept(state, tmp_path / "own.pth")), state)
    state["conv.bias"][0] = -torch.inf
    with pytest.raises(WeightsError, match=r"conv\.bias has 1 NaN or infinite values"):
        load_model(name, weights=kept(state, tmp_path / "own.pth"))


@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_too_little_memory_is_no_fault_of_the_file(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / f"w{ending}"
    torch.save(weights(), file) if ending == ".pth" else safetensors.torch.save_file(weights(), file)

    def full(*_: Any, **__: Any) -> Any:
        raise (RuntimeError("DefaultCPUAllocator: can't allocate memory") if ending == ".pth" else MemoryError)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", full)
        patch.setattr(safetensors.torch, "load_file", full)
        with pytest.raises(ResourceError, match=r"out of memory for the [\d,]+ bytes of .*; choose a smaller model"):
            load_model(MODEL, weights=file)
    assert same(load_model(MODEL, weights=file), weights())
