"""Gates of a CNN's attention modules, and captions of pictures, on the command line."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.test_commands import Run, photo, run

__all__ = ["photo", "run"]

SE = ("--model", "visattn_se_resnet20", "--weights", "none", "--method", "gates")
CBAM = ("--model", "visattn_cbam_resnet20", "--weights", "none", "--method", "gates")


def test_page_of_gates_is_written_with_a_note_on_random_weights(run: Run, photo: Path) -> None:
    code, out, err = run("heads", photo, *CBAM)
    assert code == 0
    assert out.strip() == f"{photo.stem}.visattn_cbam_resnet20.none.gates.png"
    assert "the weights are random" in err
    with Image.open(out.strip()) as page:
        assert '"method": "gates"' in page.info["visattn"]


def test_gate_statistics_have_one_row_per_gate(run: Run, photo: Path) -> None:
    assert run("heads", photo, *CBAM, "--stats", "-o", "gates.csv")[0] == 0
    rows = list(csv.DictReader(Path("gates.csv").read_text(encoding="utf-8").splitlines()))
    assert len(rows) == 18  # nine blocks, each with channel and spatial gates
    assert {row["gate"] for row in rows} == {"channel_gate", "spatial_gate"}
    assert run("heads", photo, *CBAM, "--stats", "--layer", "layer1.0.attention", "-o", "one.csv")[0] == 0
    assert len(list(csv.DictReader(Path("one.csv").read_text(encoding="utf-8").splitlines()))) == 2


NET = """
import torch
from visattn.nn import CBAM

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 16, 16), CBAM(8), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
"""


def test_map_of_one_gate_is_drawn(run: Run, photo: Path) -> None:
    Path("net.py").write_text(NET, encoding="utf-8")
    code, out, err = run("overlay", photo, "--model", "net.py:make", "--method", "gates", "--layer", "1")
    assert code == 0
    assert "gates (layer 1" in err
    assert Path(out.strip()).exists()


REFUSED = {
    "option of heads": (
        ("heads", *SE, "--head", "2"),
        "--head applies to attention heads only. Leave it out with --method gates",
    ),
    "layer": (("heads", *SE, "--layer", "layer9"), "layer must be all or one of the modules with such gates, layer1.0.attention"),
    "layer in stats": (("heads", *SE, "--stats", "--layer", "99"), "layer must be all or one of the modules with such gates"),
    "no gates": (("heads", "--model", "visattn_resnet20", "--weights", "none", "--method", "gates"), "the network has no gates"),
    "no gates in stats": (
        ("heads", "--model", "vit_tiny_patch16_224", "--weights", "none", "--method", "gates", "--stats"),
        "the network has no gates",
    ),
    "channel gates have no positions": (("overlay", *SE), "its modules gate only channels, which cannot be drawn on the image"),
    "no gates to overlay": (
        ("overlay", "--model", "visattn_resnet20", "--weights", "none", "--method", "gates"),
        "the network has no gates",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_invalid_gate_options_are_refused(run: Run, photo: Path, case: str) -> None:
    (command, *options), message = REFUSED[case]
    code, _, err = run(command, photo, *options)
    assert code == 2
    assert message in err
    assert not list(Path().glob("*.gates.png"))


def test_caption_is_below_the_image(run: Run, photo: Path) -> None:
    cnn = ("--model", "visattn_resnet20", "--weights", "none", "--method", "gradcam")
    Image.open(photo).resize((240, 160)).save(photo)  # wide enough for text
    assert run("overlay", photo, *cnn, "-o", "bare.png")[0] == 0
    assert run("overlay", photo, *cnn, "--caption", "-o", "told.png")[0] == 0
    with Image.open("bare.png") as bare, Image.open("told.png") as told:
        assert told.width == bare.width
        assert told.height > bare.height
        assert told.crop((0, 0, *bare.size)).tobytes() == bare.tobytes()
        assert np.asarray(told)[bare.height :].min() < 100  # something is written
