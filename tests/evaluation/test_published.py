"""The script of published tables, on small data sets in the layout of the real ones."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

import visattn
from tests.data.test_segmented import voc
from visattn.evaluation import best_head_jaccard

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("published")


def test_tables_hold_ours_beside_the_published_numbers(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = voc(tmp_path / "VOC2012")
    monkeypatch.setattr("sys.argv", ["published.py", "jaccard", str(data), "--model", "scenes_vit"])
    assert script.main() == 0
    (_, row) = capsys.readouterr().out.strip().splitlines()
    photo, model = visattn.data.load_segmented(data)[0], visattn.load_model("scenes_vit")
    image = script.squeezed(photo.image, model)
    shown = visattn.explain(model, image, resize="fit", method="attention").map
    masks = [script.Image.fromarray(mask).resize(image.size, 0) for mask in (() if photo.objects is None else photo.objects)]
    void = script.np.asarray(script.Image.fromarray(photo.labels < 0).resize(image.size, 0))
    expected = best_head_jaccard(shown, script.np.stack([script.np.asarray(mask) for mask in masks]), void=void)
    assert row.split() == ["attention", "jaccard", f"{100 * expected:.2f}", "45.9"]
    monkeypatch.setattr("sys.argv", ["published.py", "segmentation", str(data), "--model", "scenes_vit", "--methods", "rollout"])
    assert script.main() == 0
    rows = [line.split() for line in capsys.readouterr().out.strip().splitlines()[1:]]
    assert [row[1] for row in rows] == ["pixel_accuracy", "mean_iou", "mean_ap"]
    assert [row[3] for row in rows] == ["73.54", "55.42", "84.76"]
    assert all(0 < float(row[2]) < 100 for row in rows)


def test_areas_of_perturbations(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "n0").mkdir()
    for number in (3, 7):
        visattn.load_image(f"scene:{number}").save(tmp_path / "n0" / f"{number}.png")
    words = ["published.py", "perturbation", str(tmp_path), "--model", "scenes_vit", "--methods", "rollout,relevance"]
    monkeypatch.setattr("sys.argv", words)
    assert script.main() == 0
    rows = [line.split() for line in capsys.readouterr().out.strip().splitlines()[1:]]
    assert [row[:2] for row in rows] == [[name, sign] for name in ("rollout", "relevance") for sign in ("negative", "positive")]
    assert [row[3:] for row in rows] == [["53.1"], ["20.05"], [], []]
    assert all(0 <= float(row[2]) <= 90 for row in rows)
