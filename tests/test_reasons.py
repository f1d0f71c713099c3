"""Reasons in messages are what was seen: each is shown where it is true, and where the same symptom has another cause."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
import torchvision
from torch import Tensor, nn

import visattn
from visattn.core.images.sources import as_image
from visattn.errors import ImageError, ModelError, NoAttentionCaptured, WeightsError

NOISE = np.random.default_rng(0)


ARRAYS = {"normalized": NOISE.normal(0, 1, (8, 8, 3)), "CT": NOISE.integers(-1000, 2000, (8, 8)).astype(np.int16)}


@pytest.mark.parametrize("name", list(ARRAYS))
def test_values_outside_the_range_are_told_without_a_guess_of_why(name: str) -> None:
    array: Any = ARRAYS[name]
    with pytest.raises(
        ImageError, match=r"must lie in \[0, \d+\], got .*\. Scale its values to that range; of an image that was"
    ):
        as_image(array)
    low, high = float(array.min()), float(array.max())
    assert as_image((array - low) / (high - low)).size == (8, 8)


def tiff(bands: int) -> bytes:
    stream = io.BytesIO()
    tifffile.imwrite(stream, np.ones((4, 5, bands), np.uint16), photometric="minisblack", planarconfig="contig")
    return stream.getvalue()


def test_many_bands_are_not_sent_to_a_format_that_cannot_hold_them() -> None:
    with pytest.raises(
        ImageError, match=r"6 x 16-bit .*; read it into an array \(height, width, 6\), and pass that to a model with 6"
    ):
        visattn.load_image(tiff(6))

    class Six(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(6, 8, 3), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.conv(x).mean((2, 3)))  # type: ignore[no-any-return]

    array = NOISE.random((32, 32, 6))
    assert visattn.explain(Six().eval(), array, method="gradcam", img_size=32).map.layout.grid == (30, 30)


class Attends(nn.Module):
    """Model with a layer that is called attention, and a function that attends or does not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.qkv, self.head, self.how = nn.Conv2d(3, 8, 8, 8), nn.Linear(8, 24), nn.Linear(8, 3), how
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.patches(x).flatten(2).mT).chunk(3, -1)
        return self.head(self.attention(q, k, v, self.how).mean(1))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention whose softmax is written by hand, or that has none."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: str) -> Tensor:
        scores = q @ k.mT
        if how == "softmax by hand":
            scores = scores.exp()
            return scores / scores.sum(-1, keepdim=True) @ v
        return q * v.mean(1, keepdim=True)


UNSEEN = {
    "softmax by hand": "attention multiplies scores by values with matmul, which cannot be recorded",
    "none": "no layer of Attends multiplied a softmax with values",
}


@pytest.mark.parametrize("how", list(UNSEEN))
def test_no_attention_is_not_explained_by_the_name_of_a_class(how: str) -> None:
    with pytest.raises(NoAttentionCaptured, match=UNSEEN[how]) as caught:
        visattn.explain(Attends(how).eval(), "photo:chelsea", method="attention", img_size=32)
    assert "query x key matrix" not in str(caught.value)


def archive(kind: str, path: Path) -> Path:
    model = torchvision.models.resnet18(num_classes=5).eval()
    if kind == "export":
        torch.export.save(torch.export.export(model, (torch.zeros(1, 3, 64, 64),)), path)
    elif kind == "script":
        torch.jit.save(torch.jit.script(model), path)
    else:
        torch.save(model.state_dict(), path)
        path.write_bytes(path.read_bytes()[:-2000])
    return path


ARCHIVES = {
    "export": "is an archive of torch.export, which holds a program; save its tensors alone",
    "script": r"is a TorchScript archive \(torch.jit.save\), which holds code",
    "cut": "truncated: an archive without its end",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", list(ARCHIVES))
def test_archives_are_called_what_they_are_and_the_advice_works(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = archive(kind, tmp_path / "model.pth")
    with pytest.raises(WeightsError, match=ARCHIVES[kind]) as caught:
        visattn.load_model("tv:resnet18", weights=file)
    advice = str(caught.value).partition("alone: ")[2].rstrip(".")
    if advice:
        exec(advice, {})
        assert visattn.load_model("tv:resnet18", weights=tmp_path / "tensors.pth").get_parameter("fc.bias").shape == (5,)


class Asks(nn.Module):
    """Model whose forward takes something else."""

    def __init__(self, fails: str) -> None:
        super().__init__()
        self.conv, self.fails, self.head = nn.Conv2d(3, 8, 3), fails, nn.Linear(8 * 30 * 30, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "arguments":
            return self.inner(x, **{"img": x})
        return self.head(self.conv(x).flatten(1))  # type: ignore[no-any-return]

    def inner(self, img: Tensor) -> Tensor:
        return img


def test_a_size_is_advised_only_where_a_size_may_help() -> None:
    with pytest.raises(
        ModelError, match=r"multiple values for argument 'img'\. Check that the model runs on such pixels without visattn"
    ):
        visattn.explain(Asks("arguments").eval(), "photo:chelsea", method="gradcam", layer="conv")
    wrong = Asks("size").eval()
    assert visattn.explain(wrong, "photo:chelsea", method="gradcam", layer="conv").map.layout.grid == (30, 30), "32 is found"
