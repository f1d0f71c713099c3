"""Recipes of CONTRIBUTING, followed literally in a copy: the cost of a contribution, and that it works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[1]
Files = dict[str, list[str]]


class Copy:
    """Copy of the package and its tests, to be changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("visattn", "tests"):
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.npz"))
        for name in ("assets", "models"):
            (folder / name).symlink_to(ROOT / name)
        shutil.copy(ROOT / "pyproject.toml", folder)
        self._before = self._files()
        noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
        Image.fromarray(noise).save(folder / "photo.png")

    def _files(self) -> Files:
        return {
            str(path.relative_to(self.folder)): path.read_text().splitlines()
            for name in ("visattn", "tests")
            for path in (self.folder / name).rglob("*.py")
        }

    def write(self, name: str, text: str) -> None:
        """Write a new file."""
        assert not (self.folder / name).exists()
        (self.folder / name).write_text(text)

    def insert(self, name: str, after: str, line: str) -> None:
        """Insert a line after another."""
        lines = (self.folder / name).read_text().splitlines()
        where = next(number for number, each in enumerate(lines) if each == after)
        (self.folder / name).write_text("\n".join([*lines[: where + 1], line, *lines[where + 1 :]]) + "\n")

    def cost(self) -> tuple[list[str], dict[str, int]]:
        """Count new files, and lines added to or removed from existing files."""
        now = self._files()
        new = sorted(set(now) - set(self._before))
        changed = {}
        for name, lines in self._before.items():
            if now[name] != lines:
                changed[name] = sum(line not in lines for line in now[name]) + sum(line not in now[name] for line in lines)
        return new, changed

    def run(self, *arguments: str) -> str:
        """Run Python in the copy, without the project under test."""
        environment = os.environ | {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def visattn(self, *arguments: str) -> dict[str, object]:
        """Run a command and return the provenance of its picture."""
        model = ("--model", "vit_tiny_patch16_224", "--weights", "none") if "--model" not in arguments else ()
        self.run("-m", "visattn", *arguments, *model, "-o", "out.png", "--overwrite", "--quiet")
        with Image.open(self.folder / "out.png") as picture:
            found: dict[str, object] = json.loads(picture.info["visattn"])
        return found


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


METHOD = '''"""Attention of the last layer against its mean: which keys draw more than their share."""

from __future__ import annotations

from visattn.core.maps import AttentionMap
from visattn.core.methods.method import attention_method
from visattn.core.methods.result import to_map
from visattn.core.methods.selection import chain, chain_refusal
from visattn.core.records import Recording


def surplus(recording: Recording, *, times: float = 1.0) -> AttentionMap:
    """What each patch draws beyond the uniform share, mean over heads and queries.

    Args:
        recording: One forward pass.
        times: How often the uniform share is taken off.
    """
    record = chain(recording)[-1]
    drawn = record.operator.dense().mean((1, 2)) - times / len(record.keys)
    return to_map(recording, "surplus", "surplus", drawn, record.keys, {"times": times}, signed=True)


METHODS = {"surplus": attention_method(surplus, chain_refusal)}
'''
ORACLE = '''"""Loops."""


def surplus(weights, prefix):
    heads, queries, keys = weights.shape
    found = []
    for key in range(prefix, keys):
        total = 0.0
        for head in range(heads):
            for query in range(queries):
                total += float(weights[head, query, key])
        found.append(total / heads / queries - 1 / keys)
    return found
'''
TEST = """import numpy as np
import timm
import torch

import visattn
from tests.oracles import surplus as by_loops
from visattn.core import methods


def test_surplus_equals_loops():
    model = timm.create_model("vit_tiny_patch16_224").eval()
    with torch.no_grad(), visattn.capture(model) as recording:
        model(torch.rand(1, 3, 224, 224))
    weights = recording.records[-1].operator.dense()[0]
    expected = by_loops.surplus(weights, 1)
    np.testing.assert_allclose(methods.surplus(recording).values.flatten(), expected, atol=1e-6)
"""


def test_a_method_is_three_files_and_two_lines(copy: Copy) -> None:
    copy.write("visattn/core/methods/from_attention/surplus.py", METHOD)
    copy.write("tests/oracles/surplus.py", ORACLE)
    copy.write("tests/methods/test_surplus.py", TEST)
    copy.insert("visattn/core/methods/method_table.py", "MODULES = {", '    "surplus": "from_attention.surplus",')
    copy.insert("visattn/core/methods/method_table.py", "MethodName = Literal[", '    "surplus",')
    new, changed = copy.cost()
    assert len(new) == 3
    assert changed == {"visattn/core/methods/method_table.py": 2}
    assert "1 passed" in copy.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/methods/test_surplus.py")
    assert "surplus" in copy.run("-m", "visattn", "list", "--methods")
    assert "--times FLOAT" in copy.run("-m", "visattn", "overlay", "--help")
    made = copy.visattn("overlay", "photo.png", "--method", "surplus", "--times", "0.5")
    assert made["parameters"] == {"times": 0.5, "interpolation": "bilinear"}
    assert made["normalization"] == "symmetric"
    assert isinstance(made["drawing"], dict)
    assert made["drawing"]["colormap"] == "blue-white-red"


def test_a_render_option_is_three_files_and_works_everywhere(copy: Copy) -> None:
    """Add `invert`, which reverses the color map."""
    style, names, overlays = (f"visattn/core/drawing/{name}.py" for name in ("style", "style_options", "overlays"))
    copy.insert(names, "    marks: bool", "    invert: bool")
    copy.insert(
        style,
        '    marks: bool = option(True, "Draw rings around attention sinks and the query.")',
        '    invert: bool = option(False, "Inverted.")',
    )
    text = (copy.folder / overlays).read_text()
    used = "mix(inner[part], levels, "
    assert text.count(used) == 1
    (copy.folder / overlays).write_text(text.replace(used, "mix(inner[part], 255 - levels if style.invert else levels, "))
    new, changed = copy.cost()
    assert not new
    assert set(changed) == {style, names, overlays}
    pages: dict[str, Callable[..., dict[str, object]]] = {
        "overlay": lambda *more: copy.visattn("overlay", "photo.png", "--method", "rollout", "--normalize", "minmax", *more),
        "heads": lambda *more: copy.visattn("heads", "photo.png", *more),
        "gates": lambda *more: copy.visattn(
            "heads",
            "photo.png",
            "--method",
            "gates",
            "--model",
            "visattn_bam_resnet18",
            "--weights",
            "none",
            "--normalize",
            "minmax",
            *more,
        ),
    }
    for name, draw in pages.items():
        plain = draw()
        before = (copy.folder / "out.png").read_bytes()
        inverted = draw("--invert")
        assert (plain["drawing"]["invert"], inverted["drawing"]["invert"]) == (False, True), name  # type: ignore[index]
        with Image.open(copy.folder / "out.png") as after:
            shown = np.asarray(after)
        (copy.folder / "before.png").write_bytes(before)
        with Image.open(copy.folder / "before.png") as first:
            assert (np.asarray(first) != shown).any(), name
    code = """
import numpy as np, torch, timm, visattn
from PIL import Image
from visattn.training import AttentionLogger
photo = Image.open("photo.png")
found = visattn.explain(timm.create_model("vit_tiny_patch16_224").eval(), photo, method="attention")
words = visattn.AttentionMap(found.map.values[:3], ("word",), found.map.layout, {"word": ("a", "b", "c")}, "attention")
for draw in (visattn.contact_sheet, visattn.filmstrip):
    shown = found.map if draw is visattn.contact_sheet else words
    one, other = (np.asarray(draw(photo, shown, found.geometry, invert=invert)) for invert in (False, True))
    assert (one != other).any(), draw
model = timm.create_model("vit_tiny_patch16_224")
images = torch.rand(1, 3, 224, 224)
pages = []
for invert in (False, True):
    logger = AttentionLogger(model, images, to=lambda *_: None, method="attention", style={"invert": invert})
    pages.append(np.asarray(logger.draw(0)))
assert (pages[0] != pages[1]).any()
print("everywhere")
"""
    assert "everywhere" in copy.run("-c", code)


MODULE = '''"""A gate that halves every channel."""

from __future__ import annotations

from torch import Tensor, nn

from visattn._support.publish import publish


class Half(nn.Module):
    """Half of everything.

    Publishes: `channel_gate`.
    """

    def __init__(self, channels: int) -> None:
        """A gate for `channels`."""
        super().__init__()
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        """`(B, C, H, W)` to the same."""
        gate = x.new_full((len(x), self.channels, 1, 1), 0.5)
        publish(self, "channel_gate", gate)
        return x * gate
'''


def test_an_attention_module_is_a_file_and_a_line_with_its_import(copy: Copy) -> None:
    copy.write("visattn/nn/channel/half.py", MODULE)
    table, beside = "visattn/nn/module_table.py", "from visattn.nn.channel.global_context import GlobalContext"
    copy.insert(table, beside, "from visattn.nn.channel.half import Half")
    copy.insert(table, '    "ge": GatherExcite,', '    "half": Half,')
    new, changed = copy.cost()
    assert (new, changed) == (["visattn/nn/channel/half.py"], {"visattn/nn/module_table.py": 2})
    code = """
import torch, visattn
from torchvision.models import resnet18
model = resnet18().eval()
visattn.attach(model, "half", "stage")
with torch.no_grad(), visattn.capture(model) as recording:
    model(torch.rand(1, 3, 64, 64))
print([feature.role for feature in recording.features if feature.role == "channel_gate"])
"""
    assert "channel_gate" in copy.run("-c", code)


FAMILY = '''"""Models that call themselves lamps."""

from __future__ import annotations

from visattn.core.families.custom import cam_layer, describe, head, input_spec

__all__ = ["cam_layer", "describe", "head", "input_spec", "labels"]


def labels(_model):
    """Two classes."""
    return "off", "on"
'''


def test_a_family_is_a_file_and_a_line(copy: Copy) -> None:
    copy.write("visattn/core/families/lamps.py", FAMILY)
    table = "visattn/core/families/owners.py"
    copy.insert(table, '    "timm": _is_of_timm,', '    "lamps": lambda model: type(model).__name__ == "Lamp",')
    new, changed = copy.cost()
    assert (new, changed) == (["visattn/core/families/lamps.py"], {table: 1})
    code = """
from torch import nn
from visattn.core.families import labels
class Lamp(nn.Module): pass
print(labels(Lamp()))
"""
    assert "('off', 'on')" in copy.run("-c", code)


TASK = '''"""Nothing is learned: a task that is only named."""

from __future__ import annotations

from dataclasses import dataclass

from visattn.training.config import Recipe
from visattn.training.tasks.classification import Classification


@dataclass(frozen=True)
class Idle(Recipe):
    """A recipe of its own."""

    command = "idle"


class Idling(Classification):
    """Classification under another name."""

    def __init__(self, config):
        """Keep the recipe."""
        self.config = config
'''


def test_a_task_is_a_file_and_a_line_with_its_import(copy: Copy) -> None:
    copy.write("visattn/training/tasks/idle.py", TASK)
    table = "visattn/training/tasks/task_table.py"
    copy.insert(
        table,
        "from visattn.training.tasks.classification import Classification",
        "from visattn.training.tasks.idle import Idle, Idling",
    )
    copy.insert(table, '    "classify": (Config, Classification),', '    "idle": (Idle, Idling),')
    new, changed = copy.cost()
    assert (new, changed) == (["visattn/training/tasks/idle.py"], {table: 2})
    code = """
from visattn.training.tasks.idle import Idle
from visattn.training.tasks.task_table import task_of
print(type(task_of(Idle())).__name__)
"""
    assert "Idling" in copy.run("-c", code)
