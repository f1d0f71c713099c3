"""Tables of a finished run: top-5 accuracy, classes and confusion matrix, against slow counts; and the log for TensorBoard."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.training.small import begun, pictures, recipe
from visattn.errors import MissingExtra
from visattn.training import train
from visattn.training.report.outcomes import as_rows, by_class, confusion, top

CLASSES = 7


def outcomes(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, CLASSES, generator=generator)
    labels = torch.randint(CLASSES - 1, (count,), generator=generator)  # the last class has no image
    above = (logits > logits.gather(1, labels[:, None])).sum(1)
    return torch.stack([labels, logits.argmax(1), above], 1), logits, labels


def test_top_k_counts_images_whose_class_is_among_the_highest() -> None:
    told, logits, labels = outcomes(200)
    for k in (1, 3, 5):
        hits = sum(
            int(label) in sorted(range(CLASSES), key=lambda c: -row[c])[:k] for row, label in zip(logits, labels, strict=True)
        )
        assert top(told, k, CLASSES) == pytest.approx(hits / 200)
    assert top(told, 5, 5) is None


def test_tables_are_slow_counts() -> None:
    told, logits, labels = outcomes(300, 1)
    found = [max(range(CLASSES), key=lambda c: float(row[c])) for row in logits]
    pairs = list(zip(labels.tolist(), found, strict=True))
    counts = confusion(told, CLASSES)
    names = ["a", "b", "a", "true class", "e", "f", "g"]
    assert all(int(counts[i, j]) == pairs.count((i, j)) for i in range(CLASSES) for j in range(CLASSES))
    for number, row in enumerate(by_class(counts, names)):
        right = pairs.count((number, number))
        images, predicted = labels.tolist().count(number), found.count(number)
        assert (row["class"], row["images"]) == (names[number], images)
        assert row["recall"] == (pytest.approx(right / images) if images else None)
        assert row["precision"] == pytest.approx(right / predicted)
        assert row["times"] == max(pairs.count((number, other)) for other in range(CLASSES) if other != number)
        if images and right:
            recall, precision = right / images, right / predicted
            assert row["f1"] == pytest.approx(2 / (1 / recall + 1 / precision))
    lines = as_rows(counts, names)
    assert list(lines[0]) == ["true class", "a", "b", "a (2)", "true class (3)", "e", "f", "g"]
    assert [list(line.values())[1:] for line in lines] == counts.tolist()


def test_a_run_writes_the_tables_of_its_model(tmp_path: Path) -> None:
    pictures(tmp_path / "photos", 24, 14, ("cat", "dog", "=cow", "d", "e", "f"))
    result = train(recipe(tmp_path / "photos"), tmp_path / "run")
    rows = list(csv.reader((tmp_path / "run" / "confusion.csv").read_text().splitlines()))
    counts = np.array([[int(cell) for cell in row[1:]] for row in rows[1:]])
    assert counts.sum() == 14
    assert np.trace(counts) / 14 == pytest.approx(result.accuracy)
    assert rows[0][1] == "'=cow"  # a spreadsheet would run it
    classes = list(csv.DictReader((tmp_path / "run" / "classes.csv").read_text().splitlines()))
    assert [int(row["images"]) for row in classes] == counts.sum(1).tolist()
    assert result.top5 == json.loads((tmp_path / "run" / "result.json").read_text())["top5"]
    assert result.top5 is not None
    assert result.accuracy <= result.top5 <= 1
    assert f"Top-5 test accuracy: {100 * result.top5:.2f} %." in (tmp_path / "run" / "README.md").read_text()
    with Image.open(tmp_path / "run" / "confusion.png") as plot:
        assert min(plot.size) > 300


def test_two_classes_have_no_top_5(tmp_path: Path) -> None:
    assert train(recipe(pictures(tmp_path / "photos")), tmp_path / "run").top5 is None


def test_tensorboard_holds_the_log_also_after_an_interruption(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed")
    config = recipe(pictures(tmp_path / "photos"), tensorboard=True)
    train(config, begun(config, tmp_path / "run", 5))
    reader = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    reader.Reload()
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    for name in ("loss", "lr", "epoch", "test_loss", "test_accuracy"):
        told = [(item.step, item.value) for item in reader.Scalars(name)]
        expected = [(row["step"], pytest.approx(row[name], rel=1e-5)) for row in rows if name in row]
        assert told == expected


def test_tensorboard_that_is_not_installed_is_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visattn._support.extras.find_spec", lambda _: None)
    config = recipe(pictures(tmp_path / "photos"), tensorboard=True)
    with pytest.raises(MissingExtra, match="needs tensorboard, which is not installed"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
