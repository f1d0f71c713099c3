"""How far one map can be trusted: the tests' numbers beside loops, a truth that wins, maps that know nothing, and time that is kept."""

from __future__ import annotations

import copy
import gc
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

import visattn
from tests.cli.test_commands import Run, run
from visattn.errors import OptionError
from visattn.evaluation import Check, check, checking, nulls_of, shifted_copies
from visattn.evaluation.checking import AT_ONCE, SHARES

__all__ = ["run"]

SCENE = "scene:7"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return visattn.load_model("scenes_vit")


class Sum(nn.Module):
    """A classifier whose first logit is a weighted sum of the pixels, so that input x gradient is the truth."""

    def __init__(self) -> None:
        super().__init__()
        weights = (
            torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0)).repeat_interleave(16, 1).repeat_interleave(16, 2)
        )
        self.register_buffer("weights", torch.stack([weights, -weights]))
        self.weights: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, None] * self.weights).sum((2, 3, 4)) / 1000


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept maps that the model did not make."""
    monkeypatch.setattr(checking, "_same_map", lambda _asked: 0.0)


def with_values(explanation: visattn.Explanation, values: NDArray[Any]) -> visattn.Explanation:
    """Return an explanation with other values that still knows its model."""
    shown = replace(explanation.panel, values=torch.from_numpy(values), signed=bool((values < 0).any()))
    changed = replace(explanation, map=shown)
    vars(changed)["made_by"] = vars(explanation)["made_by"]
    return changed


@pytest.mark.usefixtures("accepted")
def test_the_truth_of_a_sum_is_first() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    options: dict[str, Any] = {"img_size": 64, "mean": (0.5,) * 3, "std": (0.5,) * 3}
    summing = Sum().eval()
    explanation = visattn.explain(summing, noise, method="captum.input_x_gradient", target=0, **options)
    found = explanation.check(sets=144)
    assert found.rank == (1, 1, 1)
    assert found.correlation == pytest.approx((1, 1, 1), abs=1e-4)
    assert found.nulls == 55
    worst = with_values(explanation, -explanation.panel.numpy()).check(sets=144)
    assert worst.correlation == pytest.approx((-1, -1, -1), abs=1e-4)
    assert worst.rank == (56, 56, 56)


def test_correlation_and_rank_equal_a_loop(model: nn.Module) -> None:
    explanation = visattn.explain(model, SCENE, method="relevance")
    found = explanation.check(sets=96, seed=5)
    assert found.sets == 96
    pixels = visattn.prepare(SCENE, model).pixels
    label, shown = int(model(pixels).argmax()), explanation.panel
    maps = [shown, *(null for several in nulls_of(shown, pixels, count=25, seed=5).values() for null in several)]
    rows, columns = shown.layout.grid
    by_share: list[list[tuple[list[float], float]]] = [[] for _ in SHARES]
    with torch.no_grad():
        whole = float(model(pixels)[0, label])
        for part in range(2):
            random = np.random.default_rng(5 + part)
            for share, found_of_share in zip(SHARES, by_share, strict=True):
                chosen = random.random((AT_ONCE // 3, rows * columns)).argsort(1) < round(share * rows * columns)
                for one in chosen:
                    changed = pixels.clone()
                    for cell in np.flatnonzero(one):
                        row, column = divmod(int(cell), columns)
                        changed[..., row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] = 0
                    sums = [sum(float(each.values.flatten()[cell]) for cell in np.flatnonzero(one)) for each in maps]
                    found_of_share.append((sums, whole - float(model(changed)[0, label])))
    correlations = np.mean(
        [
            [
                np.corrcoef([sums[number] for sums, _ in several], [loss for _, loss in several])[0, 1]
                for number in range(len(maps))
            ]
            for several in by_share
        ],
        0,
    )
    assert found.correlation is not None
    assert found.rank is not None
    assert found.correlation[0] == pytest.approx(correlations[0], abs=1e-6)
    assert found.rank[0] == 1 + sum(other > correlations[0] for other in correlations[1:])
    assert found.correlation[1] < found.correlation[0] < found.correlation[2]
    assert found.rank[1] <= found.rank[0] <= found.rank[2]


@pytest.mark.usefixtures("accepted")
def test_maps_that_know_nothing_have_any_rank(model: nn.Module) -> None:
    explanation = visattn.explain(model, SCENE, method="relevance")
    ranks = []
    for seed in range(8):
        values = shifted_copies(explanation.panel, 1, seed + 1000).at(copy=0).numpy()
        found = with_values(explanation, values).check(sets=96)
        assert found.rank is not None
        ranks.append(found.rank[0])
    assert 8 < np.mean(ranks) < 48
    assert max(ranks) - min(ranks) > 15


def test_the_same_sets_give_the_same_numbers(model: nn.Module) -> None:
    explanation = visattn.explain(model, SCENE, method="gradcam")
    first, second = (explanation.check(sets=48) for _ in range(2))
    for name in set(vars(first)) - {"seconds", "robustness"}:
        assert vars(first)[name] == vars(second)[name], name
    assert first.robustness is not None
    assert second.robustness is not None
    for name, values in vars(first.robustness).items():
        assert np.array_equal(values, vars(second.robustness)[name]), name


def test_time_is_kept(model: nn.Module) -> None:
    explanation = visattn.explain(model, SCENE, method="relevance")
    found = explanation.check(seconds=0)
    assert found.sets == AT_ONCE
    assert "take about" in found.left_out["robustness"]
    longer = explanation.check(seconds=4)
    assert AT_ONCE < longer.sets <= 1536
    assert longer.seconds < 12


@pytest.mark.parametrize(
    ("method", "other", "sinks"),
    [
        ("relevance", "gradcam", True),
        ("attention", "gradcam", True),
        ("gradcam", "rollout", False),
        ("eigencam", "gradcam", False),
    ],
)
def test_another_family_is_asked(method: str, other: str, sinks: bool, model: nn.Module) -> None:
    found = visattn.explain(model, SCENE, method=method).check(sets=48)
    assert found.other == other
    assert found.chance is not None
    assert found.chance[0] < found.chance[1]
    assert -1 <= (found.agreement or 0) <= 1
    assert (found.sinks is not None) == sinks
    assert not found.left_out


def test_sinks_hold_their_share(model: nn.Module) -> None:
    explanation = visattn.explain(model, SCENE, method="relevance")
    (sinks,) = explanation.map.facts.sinks
    assert len(sinks) == 1
    found = explanation.check(sets=48)
    values = explanation.panel.numpy()
    assert (found.sinks, found.share_of_sinks) == (1, pytest.approx(values[sinks[0].row, sinks[0].column] / values.sum()))


def test_maps_of_pixels_are_pooled(model: nn.Module) -> None:
    found = visattn.explain(model, SCENE, method="captum.saliency").check(sets=48)
    assert found.rank is not None
    assert found.robustness is not None
    assert found.robustness.noise.shape == (3,)


def test_a_model_without_classes_has_the_other_tests() -> None:
    import timm

    torch.manual_seed(0)
    backbone = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=0).eval()
    found = visattn.explain(backbone, SCENE, method="rollout").check(sets=48)
    assert found.rank is None
    assert "class" in found.left_out["perturbation"]
    assert found.robustness is not None


def test_a_copy_does_not_know_its_model(model: nn.Module) -> None:
    explanation = visattn.explain(model, SCENE, method="attention")
    assert len(pickle.dumps(explanation)) < 1e6
    one_head = visattn.explain(model, SCENE, method="attention").at(head=0)
    for other in (copy.deepcopy(explanation), pickle.loads(pickle.dumps(explanation)), one_head):
        assert torch.equal(other.panel.values, other.panel.values)
        with pytest.raises(OptionError, match="is not known"):
            other.check()


def test_an_explanation_does_not_keep_its_model() -> None:
    gone = visattn.load_model("scenes_vit")
    explanation = visattn.explain(gone, SCENE, method="attention")
    del gone
    gc.collect()
    with pytest.raises(OptionError, match="while the model lives"):
        explanation.check()


def test_a_score_that_does_not_change_has_no_rank(model: nn.Module) -> None:
    deaf = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in deaf.get_submodule("head").parameters():
            parameter.zero_()
        deaf.head.bias.add_(3)  # type: ignore[union-attr, operator]
    found = visattn.explain(deaf, SCENE, method="attention").check(sets=48)
    assert (found.rank, found.correlation) == (None, None)
    assert "does not change" in found.left_out["perturbation"]


@pytest.mark.usefixtures("accepted")
def test_constant_maps_have_no_rank_and_even_photos_no_edges(model: nn.Module) -> None:
    explanation = visattn.explain(model, SCENE, method="attention")
    for value in (1.0, 0.1, 1 / 3):  # the sum of many is not exact
        constant = with_values(explanation, np.full((8, 8), value)).check(sets=48)
        assert constant.rank is None
        assert "the map is constant" in constant.left_out["perturbation"]
    even = visattn.explain(model, np.full((64, 64, 3), 90, np.uint8), method="attention")
    found = with_values(even, np.random.default_rng(0).random((8, 8))).check(sets=48)
    assert found.nulls in (0, 54) or "perturbation" in found.left_out


class Corner(nn.Module):
    """The sum of the first 8 x 8 pixels."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1, :8, :8].sum((2, 3))


def test_a_score_of_few_cells_keeps_all_nulls() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    options: dict[str, Any] = {"img_size": 64, "mean": (0.5,) * 3, "std": (0.5,) * 3}
    corner = Corner().eval()
    for method in ("captum.saliency", "captum.input_x_gradient"):
        found = visattn.explain(corner, noise, method=method, target=0, **options).check(sets=144)
        assert found.nulls == 55, found.left_out
        assert "constant" not in found.left_out.get("perturbation", "")


def test_a_map_of_other_weights_is_refused(model: nn.Module) -> None:
    other: Any = copy.deepcopy(model)
    explanation = visattn.explain(other, SCENE, method="relevance")
    with torch.no_grad():
        other.head.weight.copy_(other.head.weight.flip(0))
    with pytest.raises(OptionError, match="another map of this photo now"):
        explanation.check(sets=48)


def test_a_cnn_without_attention_is_compared_with_another_family() -> None:
    cnn = visattn.load_model("scenes_cnn")
    assert visattn.explain(cnn, SCENE, method="gradcam").check(sets=48).other == "eigencam"


def test_maps_of_components_are_refused(model: nn.Module) -> None:
    with pytest.raises(OptionError, match="components"):
        visattn.explain(model, SCENE, method="pca").check(sets=48)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"nulls": 24}, "nulls"),
        ({"seconds": -1}, "seconds"),
        ({"sets": 0}, "sets"),
        ({"sets": -5}, "sets"),
        ({"seed": -1}, "seed"),
    ],
)
def test_wrong_numbers_are_refused(change: dict[str, Any], text: str, model: nn.Module) -> None:
    with pytest.raises(OptionError, match=text):
        check(visattn.explain(model, SCENE, method="attention"), **change)


def test_words_and_json_hold_the_numbers(model: nn.Module) -> None:
    found = visattn.explain(model, SCENE, method="relevance").check(sets=48)
    told, values = "\n".join(found.lines()), found.to_dict()
    assert found.rank is not None
    assert f"rank {found.rank[0]:.0f} ({found.rank[1]:.0f} to {found.rank[2]:.0f}) of 56" in told
    assert f"{found.agreement:.2f}" in told
    assert values["robustness"]["shift"] == pytest.approx(found.robustness.shift.tolist())
    assert "perturbation: left out, no" in "\n".join(Check(left_out={"perturbation": "no"}).lines())


def test_the_shell_notes_the_check_in_the_picture(run: Run, tmp_path: Path) -> None:
    code, _, told = run("overlay", SCENE, "--model", "scenes_vit", "--check", "0", "-o", "out.png")
    assert code == 0
    assert "check: perturbation: rank" in told
    with Image.open(tmp_path / "out.png") as picture:
        stored = json.loads(picture.info["visattn"])
    assert any(note.startswith("check: perturbation: rank") for note in stored["notes"])
    code, _, told = run("view", SCENE, "--model", "scenes_vit", "--methods", "relevance", "--check", "0", "-o", "out.html")
    assert code == 0
    assert "relevance, check: perturbation: rank" in told
    code, _, told = run("overlay", SCENE, "--model", "scenes_vit", "--check", "0", "--compare", "scenes_cnn")
    assert code > 0
    assert "--check" in told


@pytest.mark.parametrize("seed", range(6))
def test_maps_of_few_cells_are_checked(seed: int) -> None:
    torch.manual_seed(0)
    model = visattn.load_model("resnet18", weights="none")
    found = visattn.explain(model, SCENE, method="gradcam", img_size=64).check(sets=48, seed=seed)
    assert found.robustness is not None
    assert "nan" not in " ".join(found.lines())


def test_a_page_tells_which_map_cannot_be_checked(model: nn.Module) -> None:
    view = visattn.study(model, SCENE, methods=["relevance", "pca"], check=0)[0]
    notes = [note for note in view.recording.provenance.notes if "check" in note]
    assert "pca, check: a map of several components cannot be checked. Use another method." in notes
    assert any(note.startswith("relevance, check: perturbation") for note in notes)
