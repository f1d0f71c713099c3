"""Gates of a network with CBAM pasted into its blocks, from the photo to the picture and the tables, on the command line."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import visattn
from tests.cli.test_commands import Run, run

__all__ = ["run"]

NET = '''
import torch
from torch import nn


class Channels(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.avg, self.max = nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool2d(1)
        self.mlp = nn.Sequential(nn.Conv2d(channels, 2, 1, bias=False), nn.ReLU(), nn.Conv2d(2, channels, 1, bias=False))
        self.sigmoid = nn.Sigmoid()

    def forward(self, x):
        return self.sigmoid(self.mlp(self.avg(x)) + self.mlp(self.max(x)))


class Positions(nn.Module):
    """Open where the features are large."""

    def __init__(self):
        super().__init__()
        self.conv, self.sigmoid = nn.Conv2d(2, 1, 1), nn.Sigmoid()
        with torch.no_grad():
            self.conv.weight.copy_(torch.tensor([0.0, 8.0])[None, :, None, None])
            self.conv.bias.fill_(-4.0)

    def forward(self, x):
        pooled = torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True)[0]], 1)
        return self.sigmoid(self.conv(pooled))


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv, self.relu = nn.Conv2d(channels, channels, 1), nn.ReLU(inplace=True)
        self.ca, self.sa = Channels(channels), Positions()

    def forward(self, x):
        identity = x
        out = self.relu(self.conv(x))
        out = self.ca(out) * out
        out = self.sa(out) * out
        out += identity
        return self.relu(out)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.layer1, self.fc = nn.Conv2d(3, 4, 8, 8), nn.Sequential(Block(4), Block(4)), nn.Linear(4, 3)
        for part in self.modules():
            if isinstance(part, nn.Conv2d) and part.in_channels > 2 and part.kernel_size != (1, 1):
                nn.init.constant_(part.weight, 1 / 192)
        for block in self.layer1:
            with torch.no_grad():
                block.conv.weight.copy_(torch.eye(4)[..., None, None])
                block.conv.bias.zero_()

    def forward(self, x):
        return self.fc(self.layer1(self.stem(x)).mean((2, 3)))


def make():
    return Net().eval()
'''
SIDE = 64
ASKED = "--model", "net.py:make", "--img-size", str(SIDE), "--mean", "0,0,0", "--std", "1,1,1"


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """Write a network, and a photo that is white on the right; return the photo."""
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")
    pixels = np.zeros((SIDE, SIDE, 3), np.uint8)
    pixels[:, SIDE // 2 :] = 255
    (tmp_path / "photos").mkdir()
    Image.fromarray(pixels).save(tmp_path / "photos" / "half.png")
    return tmp_path / "photos" / "half.png"


def test_gates_are_drawn_where_they_are_open(run: Run, half: Path) -> None:
    options = "--method", "gates", "--layer", "layer1.0.sa", "--opacity", "1", "--interpolation", "nearest"
    code, out, err = run("overlay", half, *ASKED, *options)
    assert code == 0, err
    assert "gates (layer layer1.0.sa" in err
    with Image.open(out.strip()) as picture:
        shown = np.asarray(picture.convert("RGB"))
    ends = visattn.colorize(np.array([[0.0, 1.0]]))
    assert (shown[:, : SIDE // 2] == ends.getpixel((0, 0))).all()
    assert (shown[:, SIDE // 2 :] == ends.getpixel((1, 0))).all()


def test_numbers_of_gates_are_those_of_the_factors(run: Run, half: Path) -> None:
    code, _, err = run("stats", half.parent, *ASKED)
    assert code == 0, err
    rows = {row["layer"]: row for row in csv.DictReader(Path("stats/gates.csv").read_text(encoding="utf-8").splitlines())}
    assert list(rows) == ["layer1.0.ca", "layer1.0.sa", "layer1.1.ca", "layer1.1.sa"]
    net, seen = visattn.load_model("net.py:make"), dict[str, Tensor]()
    for name in rows:
        net.get_submodule(name).register_forward_hook(lambda part, _args, out: seen.update({names[part]: out}))
    names: dict[nn.Module, str] = {net.get_submodule(name): name for name in rows}
    with torch.no_grad():
        net(visattn.prepare(visattn.load_image(half), net, img_size=SIDE, mean=(0, 0, 0), std=(1, 1, 1)).pixels)
    for name, row in rows.items():
        assert float(row["mean"]) == pytest.approx(float(seen[name].mean()), rel=1e-4)
        assert float(row["largest"]) == pytest.approx(float(seen[name].max()), rel=1e-4)


def test_page_shows_the_gates_of_each_module(run: Run, half: Path) -> None:
    code, out, err = run("heads", half, *ASKED, "--method", "gates")
    assert code == 0, err
    with Image.open(out.strip()) as page:
        assert '"method": "gates"' in page.info["visattn"]
