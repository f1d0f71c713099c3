"""Scripts of the networks that decide by one known cause: what they train, and the tables that they print."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

import visattn
from visattn.data.scenes.causes import CausedScenes

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[1]
CAUSES = "mark", "border"


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train one network of each kind and cause for a few steps, through the script."""
    folder = tmp_path_factory.mktemp("causes")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "scripts"))
        patched.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        script = importlib.import_module("train_causes")
        short = {
            kind: replace(config, train_count=64, test_count=16, epochs=1.0, warmup_epochs=0.0, log_every=1)
            for kind, config in script.NETWORKS.items()
        }
        patched.setattr(script, "NETWORKS", short)
        patched.setattr("sys.argv", ["train_causes.py", "--only", ",".join(CAUSES), "--seeds", "1", "-o", str(folder / "made")])
        assert script.main() == 0
    return folder / "made"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    module = importlib.import_module("causes")
    monkeypatch.setattr(module, "SEEDS", 1)
    return module


def test_each_network_is_stored_with_its_card(networks: Path) -> None:
    assert sorted(path.name for path in networks.iterdir()) == ["border_cnn_0", "border_vit_0", "mark_cnn_0", "mark_vit_0"]
    for folder in networks.iterdir():
        assert "scenes-by-" in (folder / "README.md").read_text(encoding="utf-8")
        assert visattn.load_model(str(folder))


def pairs_won(values: np.ndarray, mask: np.ndarray) -> float:
    """Return the share of pairs, of a pixel of the mask and another, where the former has the larger value; ties count half."""
    inside, outside = values[mask], values[~mask]
    return float(np.mean([(one > outside).mean() + (one == outside).mean() / 2 for one in inside]))


@pytest.mark.evidence
def test_tables_state_every_method_with_its_controls(
    networks: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["causes.py", "--only", ",".join(CAUSES), "--scenes", "2", "--tests", "8", "--checkpoints", str(networks)]
    monkeypatch.setattr("sys.argv", asked)
    assert script.main() == 1  # after a few steps no network depends on its cause
    told = capsys.readouterr().out
    rows = {line.split(" | ")[0].strip("| "): line for line in told.splitlines() if line.startswith("| ")}
    assert {"gradcam", "grad-cam: GradCAM", "relevance", "captum.saliency"} <= rows.keys()
    assert "another network" in told
    assert "shifted copies" in told
    assert "center prior" in told
    model = visattn.load_model(str(networks / "mark_cnn_0"))
    scenes = CausedScenes("mark", 2, seed=script.SEED)
    won = []
    for scene in map(scenes.scene, range(2)):
        found = visattn.explain(model, Image.fromarray(scene.image), method="captum.saliency", target=scene.label)
        won.append(pairs_won(found.panel.numpy(), scene.masks[0]))
    cnn = told[told.index("## CNN") : told.index("## Vision transformer")]
    row = next(line for line in cnn.splitlines() if line.startswith("| captum.saliency | "))
    assert row.split(" | ")[1].rstrip("*") == f"{np.mean(won):.2f}"
    gates = told[told.index("## Gates") : told.index("## Depth")]
    assert "channel gates" in gates
    assert all(f"| {cause} | 0 | " in gates for cause in CAUSES)
    depth = told[told.index("## Depth") :]
    assert all(f"| {cause} | 0 | {layer} | " in depth for cause in CAUSES for layer in script.LAYERS)


def test_two_causes_are_needed(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["causes.py", "--only", "mark"])
    with pytest.raises(SystemExit):
        script.main()
    assert "two or more of the causes" in capsys.readouterr().err
