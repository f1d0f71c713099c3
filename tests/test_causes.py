"""Scripts of the networks that decide by one known cause: what they train, and the tables that they print."""

from __future__ import annotations

import hashlib
import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import visattn
from visattn.data.scenes.causes import CausedScenes

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[1]
CAUSES = "mark", "border"


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Return the script that trains, with short trainings."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    script = importlib.import_module("train_causes")
    short = {
        kind: replace(config, train_count=64, test_count=16, epochs=1.0, warmup_epochs=0.0, log_every=1)
        for kind, config in script.NETWORKS.items()
    }
    monkeypatch.setattr(script, "NETWORKS", short)
    return script


def test_networks_that_did_not_learn_leave_their_card_and_accuracy(
    training: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    monkeypatch.setattr("sys.argv", ["train_causes.py", "--only", "mark,border", "--seeds", "1", "-o", str(made)])
    assert training.main() == 0
    assert sorted(path.name for path in made.iterdir()) == ["border_cnn_0", "border_vit_0", "mark_cnn_0", "mark_vit_0"]
    for folder in made.iterdir():
        assert sorted(path.name for path in folder.iterdir()) == ["README.md", "accuracy.json"]
        assert "scenes-by-" in (folder / "README.md").read_text(encoding="utf-8")
        own, other = json.loads((folder / "accuracy.json").read_text(encoding="utf-8"))
        assert 0 <= other <= own + 0.2 < 0.95


def test_a_network_that_counts_is_kept_in_half_precision(
    training: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(training, "WITH", 0.0)
    monkeypatch.setattr(training, "WITHOUT", 1.0)
    folder = tmp_path / "mark_cnn_0"
    training._trained((replace(training.NETWORKS["cnn"], data="scenes-by-mark", seed=0), folder))
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "model.json", "model.safetensors"]
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert f"rounded to half precision: sha256 `{digest}`" in (folder / "README.md").read_text(encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    loaded = visattn.load_model(str(folder)).state_dict()
    assert all(torch.equal(loaded[name].double(), x.double()) for name, x in tensors.items())
    assert {x.dtype for x in tensors.values()} == {torch.float16, torch.int64}


def pairs_won(values: np.ndarray, mask: np.ndarray) -> float:
    """Return the share of pairs, of a pixel of the mask and another, where the former has the larger value; ties count half."""
    inside, outside = values[mask], values[~mask]
    return float(np.mean([(one > outside).mean() + (one == outside).mean() / 2 for one in inside]))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("causes")


@pytest.mark.evidence
def test_tables_state_every_method_and_network(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["causes.py", "--only", ",".join(CAUSES), "--scenes", "2", "--tests", "100", "--journals", str(tmp_path)]
    monkeypatch.setattr("sys.argv", asked)
    assert script.main() == 0
    told = capsys.readouterr().out
    rows = {line.split(" | ")[0].strip("| "): line for line in told.splitlines() if line.startswith("| ")}
    assert {"gradcam", "grad-cam: GradCAM", "relevance", "captum.saliency"} <= rows.keys()
    assert all(word in told for word in ("cause without effect", "shifted copies", "center prior", "largest cell touches"))
    scenes = CausedScenes("mark", 2, seed=script.SEED)
    for seed in range(2):
        model = visattn.load_model(str(ROOT / "models" / "causes" / f"mark_cnn_{seed}"))
        won = []
        for scene in map(scenes.scene, range(2)):
            found = visattn.explain(model, scene.image, method="captum.saliency", target=scene.label)
            won.append(pairs_won(found.panel.numpy(), scene.masks[0]))
        row = next(line for line in told.splitlines() if f"| captum.saliency | mark | cnn | mark_cnn_{seed} | 2 |" in line)
        assert row.split(" | ")[6] == f"{np.mean(won):.2f}"
    gates = told[told.index("## Gates") : told.index("## Depth")]
    assert "channel gates" in gates
    assert all(f"| {cause} | 0 | " in gates for cause in CAUSES)
    depth = told[told.index("## Depth") :]
    assert all(f"| {cause} | 0 | {layer} | " in depth for cause in CAUSES for layer in script.LAYERS)


@pytest.mark.parametrize("change", [["--only", "makr"], ["--scenes", "1"]])
def test_wrong_words_are_refused(
    script: ModuleType, change: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["causes.py", *change])
    with pytest.raises(SystemExit):
        script.main()
    assert "two scenes or more" in capsys.readouterr().err
