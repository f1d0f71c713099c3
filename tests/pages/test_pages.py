"""Every command and every piece of Python in README and docs runs as printed, without a network.

README runs in an empty folder. A page of the docs runs in a folder that looks like a clone, with a few files of the reader's own. Blocks
that are marked *long* run as printed with the options of `LIMITS` added, a fraction of an epoch. Blocks marked *install* and *make* are
run by `make evidence`; those for a *cluster* need several machines, and tests/batch has one on this machine.
"""

from __future__ import annotations

import gzip
import json
import re
import runpy
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import safetensors.torch
import torch
import torchvision
import transformers
from PIL import Image

import visattn
from tests.batch import films
from tests.pages.blocks import PAGES, ROOT, Block, blocks_of, commands_of
from visattn import data
from visattn.cli.commands import _run
from visattn.data.labeled import downloaded as published

LIMITS = {  # a pattern in a command: options for a long one
    r"captum\.kernel_shap": "--samples 50",
    r"captum\.lime": "--samples 50",
    r"captum\.occlusion": "--grid-size 7 7",
    "^visattn train classify": "--epochs 0.02 --train-count 320 --test-count 32 --log-every 1 --workers 0",
    "^visattn train caption": "--epochs 0.02 --train-count 640 --test-count 16 --log-every 1 --workers 0",
    "^visattn batch photos": "--img-size 56",
    "^visattn (stats|heads) photos": "--img-size 112",
    "^visattn embed photos --img-size": "--img-size 56",
    "--compare": "--seeds 1",
    "comparison_gpu": "--img-size 48 --batch-size 16",
    "^torchrun": "--epochs 1 --img-size 32 --batch-size 4 --workers 0 --model visattn_resnet14",
    r"train_glimpses\.py": "--epochs 1 --root idx",
    r"train_draw\.py": "--root idx",
    r"train_transformer\.py": "--epochs 1 --seeds 1 --root idx",
}
MY_MODEL = """
from torch import nn

def build():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )
    for parameter in net.parameters():
        nn.init.uniform_(parameter, 0, 0.1)  # positive, so that no map is zero
    return net

make_model = build
"""
README, *EVERY = PAGES
DOCS = [page for page in EVERY if page.parent.name != "coming_from"]  # which have a test of their own


@pytest.fixture(scope="module", autouse=True)
def _weights() -> None:
    """Have the weights in the cache that `visattn demo` would fetch."""
    for model in ("vit_small_patch14_dinov2", "tf_efficientnet_lite0"):
        data.offline_weights(model)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse every connection, so that no page depends on a network."""

    def refused(*_: Any, **__: Any) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr("socket.socket.connect", refused)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a folder like a clone, with files that a reader would have."""
    for name in ("assets", "docs", "models", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(data.photo_path("rocket"), tmp_path / "dog.jpg")
    Image.effect_noise((28, 28), 50).save(tmp_path / "shirt.png")
    _folders_of_classes(tmp_path / "photos")
    (tmp_path / "my_model.py").write_text(MY_MODEL)
    (tmp_path / "my_file.py").write_text(MY_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    model = runpy.run_path(str(tmp_path / "my_model.py"))["build"]()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "my_weights.safetensors")
    frames = [films.scene(number) for number in range(6)]
    films.write(tmp_path / "film.mp4", frames)
    shutil.copy(data.photo_path("rocket"), tmp_path / "photo.jpg")
    (tmp_path / "list.txt").write_text("dog.jpg\nshirt.png\n")
    pictures = [Image.fromarray(frame) for frame in frames]
    pictures[0].save(tmp_path / "film.gif", save_all=True, append_images=pictures[1:], duration=100)
    _flickr(tmp_path)
    _fashion_mnist(tmp_path / "idx")
    monkeypatch.setattr(published, "PACKAGE", tmp_path / "idx")
    return tmp_path


def test_commands_of_the_readme_run_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(README)
    assert {path.name for path in tmp_path.iterdir()} >= {
        "heads.png",
        "cat.png",
        "chelsea.grid.png",
        "chelsea.tf_efficientnet_lite0.overlay.tiger_cat.png",
    }


@pytest.mark.full
@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_commands_of_a_page_run(page: Path, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clone)
    if page.stem == "libraries":
        _downloaded(clone / "cache", monkeypatch)
    run_page(page)


def run_page(page: Path) -> None:
    """Run the blocks of a page in order; its Python shares one namespace."""
    names: dict[str, Any] = {"visattn": visattn}
    for block in blocks_of(page):
        if block.mark in ("make", "install", "cluster"):
            continue
        if block.mark.endswith(".py"):
            Path(block.mark).write_text(block.text)
        elif block.kind == "python":
            exec(compile(block.text, page.name, "exec"), names)
        elif block.kind == "sh":
            before = set(Path.cwd().iterdir())
            for words in commands_of(block):
                run_command(words, block)
            for path in set(Path.cwd().iterdir()) - before if block.inline else ():  # such commands are tried one at a time
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def run_command(words: list[str], block: Block) -> None:
    """Run a command in this process, or with torchrun in others."""
    words = [
        one for word in words for one in (sorted(str(path) for path in Path.cwd().glob(word)) if "*" in word else []) or [word]
    ]
    limit = [option for part, options in LIMITS.items() if re.search(part, " ".join(words)) for option in options.split()]
    words += limit if block.mark == "long" else []
    if words[0] == "visattn":
        assert _run(words[1:], debug=False) == 0, " ".join(words)
    elif words[:2] == ["python", "-c"]:
        exec(compile(words[2], "command", "exec"), {})
    elif words[0] == "python":
        _script(words[1], words[2:])
    else:
        assert words[0] == "torchrun", words
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *words[1:]], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]


def _script(file: str, options: list[str]) -> None:
    done = subprocess.run([sys.executable, file, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def _downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write caches of downloads that have the models of the page, with random values."""
    monkeypatch.setenv("TORCH_HOME", str(folder / "torch"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    checkpoints = folder / "torch" / "hub" / "checkpoints"
    checkpoints.mkdir(parents=True)
    torch.save(torchvision.models.resnet50().state_dict(), checkpoints / "resnet50-11ad3fa6.pth")
    transformers.Dinov2Model(transformers.Dinov2Config(num_hidden_layers=2)).save_pretrained(
        _snapshot(folder, "facebook/dinov2-small")
    )
    words_and_pictures = open_clip.create_model("ViT-B-32").state_dict()
    safetensors.torch.save_file(
        words_and_pictures, _snapshot(folder, "timm/vit_base_patch32_clip_224.openai") / "open_clip_model.safetensors"
    )


def _snapshot(folder: Path, repository: str) -> Path:
    """Make the folder in which the hub's client looks for a repository's files."""
    cached = folder / "hub" / f"models--{repository.replace('/', '--')}"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("1" * 40)
    made = cached / "snapshots" / ("1" * 40)
    made.mkdir(parents=True)
    return made


def _folders_of_classes(folder: Path) -> None:
    """Write photos of two classes, for training and test, and three beside them."""
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        for kind in ("cat", "dog"):
            (folder / split / kind).mkdir(parents=True)
            for number in range(4):
                Image.fromarray(random.integers(0, 256, (40, 40, 3), np.uint8)).save(folder / split / kind / f"{number}.png")
    for name in ("astronaut", "coffee", "rocket"):
        Image.open(data.photo_path(name)).convert("RGB").resize((200, 150)).save(folder / f"{name}.jpg")


def _flickr(folder: Path) -> None:
    """Write a small data set in the form of Karpathy's splits of Flickr8k."""
    images = folder / "Flicker8k_Dataset"
    images.mkdir()
    rows = []
    for number in range(660):
        Image.new("RGB", (32, 32), (number % 256,) * 3).save(images / f"{number}.jpg")
        sentence = {"tokens": ["a", "dog", "runs"], "raw": "a dog runs"}
        rows.append({"filename": f"{number}.jpg", "split": "train" if number < 640 else "test", "sentences": [sentence] * 5})
    (folder / "dataset_flickr8k.json").write_text(json.dumps({"dataset": "flickr8k", "images": rows}))


def _fashion_mnist(folder: Path) -> None:
    """Write a small data set in the form of Fashion-MNIST."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for split, count in (("train", 700), ("t10k", 100)):
        pixels = struct.pack(">4I", 2051, count, 28, 28) + random.integers(0, 256, count * 784, np.uint8).tobytes()
        labels = struct.pack(">2I", 2049, count) + (np.arange(count, dtype=np.uint8) % 10).tobytes()
        (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(pixels))
        (folder / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
