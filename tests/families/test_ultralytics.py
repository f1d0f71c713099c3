"""Ultralytics networks, by stand-ins with their class names and their outputs; the package itself is under AGPL and not installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import visattn
from visattn.core.families import labels, task
from visattn.core.families.owners import owner
from visattn.core.families.wrappers import unwrapped
from visattn.errors import OptionError

CELL = 32  # pixels


class Detect(nn.Module):
    """Head whose cell has a box around it, and scores that grow with red and with green."""

    nc, xyxy = 2, False

    def __init__(self, *, end2end: bool = False) -> None:
        """Build it."""
        super().__init__()
        self.end2end, self.scores = end2end, nn.Conv2d(3, self.nc, 1)
        self.scores.weight = nn.Parameter(8 * torch.eye(self.nc, 3)[..., None, None])
        self.scores.bias = nn.Parameter(torch.full((self.nc,), -4.0))

    def forward(self, features: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return rows of center, size and scores, as in evaluation mode; or of corners, score and class."""
        rows, columns = features.shape[2:]
        down, across = torch.meshgrid(torch.arange(rows) + 0.5, torch.arange(columns) + 0.5, indexing="ij")
        center = torch.stack([across, down]).flatten(1) * CELL
        boxes = torch.cat([center, torch.full_like(center, CELL)])[None].expand(len(features), -1, -1)
        chances = self.scores(features).flatten(2).sigmoid()
        if not self.end2end:
            return torch.cat([boxes, chances], 1), {}
        score, of_class = chances.max(1)
        corners = torch.cat([center - CELL / 2, center + CELL / 2]).T.expand(len(features), -1, -1)
        order = score.argsort(1, descending=True)
        found = torch.cat([corners, score[..., None], of_class[..., None]], 2)
        return found.gather(1, order[..., None].expand_as(found)), {}


class OBB(Detect):
    """Head of rotated boxes."""


class Classify(nn.Module):
    """Head of a classifier."""

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities and logits."""
        logits = 3 * features.mean((2, 3))
        return logits.softmax(1), logits


class DetectionModel(nn.Module):
    """Network of one convolution, which averages cells, and a head."""

    def __init__(self, head: nn.Module | None = None) -> None:
        """Build it."""
        super().__init__()
        means = nn.Conv2d(3, 3, CELL, CELL, bias=False)
        with torch.no_grad():
            means.weight.zero_()
            for color in range(3):
                means.weight[color, color] = CELL**-2
        self.model = nn.Sequential(means, head or Detect())
        self.names, self.args = {0: "red thing", 1: "green thing"}, {"imgsz": 192}

    def forward(self, x: Tensor) -> Any:
        """Return what the head returns."""
        return self.model(x)


class YOLO(nn.Module):
    """Wrapper whose call loads files."""

    def __init__(self, model: nn.Module) -> None:
        """Keep the network."""
        super().__init__()
        self.model = model

    def forward(self, _source: Any) -> Any:
        """Fail: a network is what runs."""
        raise AssertionError


DetectionModel.__module__ = "ultralytics.nn.tasks"
YOLO.__module__ = "ultralytics.models.yolo.model"


def _photo(row: int, column: int, color: tuple[int, int, int]) -> np.ndarray:
    """Return a gray photo of 5 x 6 cells, one of which has a color; the green one stands in a corner."""
    photo = np.full((5 * CELL, 6 * CELL, 3), 40, np.uint8)
    photo[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL] = color
    photo[:CELL, :CELL] = 0, 200, 0
    return photo


@pytest.mark.parametrize("end_to_end", [False, True])
@pytest.mark.parametrize(("row", "column"), [(1, 4), (4, 0)])
def test_the_cell_that_lights_a_box_is_its_evidence(row: int, column: int, end_to_end: bool) -> None:
    model = DetectionModel(Detect(end2end=end_to_end)).eval()
    found = visattn.explain(YOLO(model), _photo(row, column, (250, 0, 0)), method="gradcam", target="box:0")
    assert found.map.facts.layer == "model.0"
    expected = np.zeros((5, 6))
    expected[row, column] = 1
    assert np.array_equal(found.map.values.numpy() > 0.5 * float(found.map.values.max()), expected)
    (detection,) = found.map.facts.detections
    assert detection.label.startswith("red thing ")
    box = detection.box
    assert (box.top, box.left, box.bottom, box.right) == tuple(CELL * side for side in (row, column, row + 1, column + 1))


def test_boxes_that_are_not_there_are_told_with_those_that_are() -> None:
    with pytest.raises(OptionError, match=r"returned 2 boxes.*0: red thing 9\d%, 1: green thing 9\d%"):
        visattn.explain(DetectionModel().eval(), _photo(2, 2, (250, 0, 0)), method="gradcam", target="box:2")


def test_rotated_boxes_are_refused() -> None:
    with pytest.raises(OptionError, match="needs a detector"):
        visattn.explain(DetectionModel(OBB()).eval(), _photo(2, 2, (250, 0, 0)), method="gradcam", target="box:0")


def test_a_box_whose_score_is_one_has_no_gradient() -> None:
    model = DetectionModel().eval()
    with torch.no_grad():
        next(model.parameters()).mul_(40)
    with pytest.raises(OptionError, match="no gradient at the pixels"):
        visattn.explain(model, _photo(2, 2, (250, 0, 0)), method="gradcam", target="box:0")


def test_a_classifier_is_explained_by_its_logits() -> None:
    model = DetectionModel(Classify()).eval()
    model.names = {0: "red", 1: "green", 2: "blue"}
    photo = np.full((192, 192, 3), 20, np.uint8)
    photo[64:128, 64:128, 2] = 250
    found = visattn.explain(model, photo, method="gradcam")
    logits = model(torch.as_tensor(photo).permute(2, 0, 1)[None] / 255)[1][0].tolist()
    assert found.provenance.target[0].startswith(f"logit of blue (class 2) = {logits[2]:.3g}; this is the predicted class")
    assert task(model) == "classes"


def test_names_and_owners() -> None:
    model = DetectionModel()
    assert owner(model) == "ultralytics"
    assert unwrapped(YOLO(model)) is model
    assert labels(model) == ("red thing", "green thing")
    model.names = {0: "0", 1: "class1"}
    assert labels(model) is None


def test_photos_are_whole_and_in_whole_steps() -> None:
    model = DetectionModel().eval()
    model.args = {"imgsz": 640}
    prepared = visattn.prepare(np.zeros((300, 451, 3), np.uint8), model)
    assert tuple(prepared.pixels.shape) == (1, 3, 416, 640)
    assert prepared.geometry.seen() == (0, 0, 300, 451)
    assert float(prepared.pixels.abs().max()) == 0
