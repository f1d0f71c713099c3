"""Contributions as `explain` gives them: what they sum to, for every kind of target, and where they are refused."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

import visattn
from tests.cli.test_commands import Run, run
from visattn.core.drawing.head_tables import head_table
from visattn.core.pipeline.inputs import prepare
from visattn.errors import OptionError
from visattn.evaluation import head_effects

__all__ = ["run"]

PHOTO = "photo:chelsea"


def vit(classes: int = 5, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, num_classes=classes, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model


def explained(model: nn.Module, **options: Any) -> visattn.Explanation:
    return visattn.explain(model, PHOTO, method="contributions", **options)


def total(found: visattn.Explanation) -> float:
    return math.fsum(value for _, value in found.map.facts.numbers)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(prepare(PHOTO, model).pixels)[0].double()
    return out


SCORES: dict[str, tuple[dict[str, Any], Any]] = {
    "class": ({"target": 2}, lambda out: out[2]),
    "two classes": ({"target": 2, "versus": 3}, lambda out: out[2] - out[3]),
    "labels": ({"target": "label:1,3", "task": "multi_label"}, lambda out: out[1] + out[3]),
    "minus an output": ({"target": "output:-2"}, lambda out: -out[2]),
    "a function": ({"target": lambda out: out[:, 1] - 0.5 * out[:, 2]}, lambda out: out[1] - 0.5 * out[2]),
}


@pytest.mark.parametrize("name", list(SCORES))
def test_everything_sums_to_the_score(name: str) -> None:
    model, (options, of) = vit(), SCORES[name]
    found = explained(model, **options)
    score, scale = float(of(logits(model))), sum(abs(value) for _, value in found.map.facts.numbers)
    assert total(found) == pytest.approx(score, abs=2e-6 * scale)
    patches = math.fsum(value for name, value in found.map.facts.numbers if name.endswith(": patches"))
    assert float(found.map.values.double().sum()) == pytest.approx(patches, abs=1e-5 * scale)
    assert found.map.signed
    assert any(note.startswith("the map sums to") for note in found.provenance.notes)


def test_a_similarity_freezes_the_length_of_the_embedding_and_says_so() -> None:
    model = vit(0)
    found = explained(model, target="similar:photo:astronaut")
    with torch.no_grad():
        one, other = (model(prepare(photo, model).pixels) for photo in (PHOTO, "photo:astronaut"))
    assert total(found) == pytest.approx(float(torch.cosine_similarity(one, other)), abs=1e-5)
    frozen = next(note for note in found.provenance.notes if note.startswith("frozen"))
    assert "statistics of norm" in frozen
    assert "length of the embedding in the target" in frozen


def test_the_note_on_all_terms_tells_each_kind_of_term() -> None:
    found = explained(vit(), target=1)
    note = next(text for text in found.provenance.notes if text.startswith("all terms: ")).removeprefix("all terms: ")
    told = {words.rpartition(" ")[0]: float(words.rpartition(" ")[2]) for words in note.split(", ")}
    assert list(told) == ["patches through heads", "class token and registers through heads", "MLPs", "embedding", "biases"]
    kinds: dict[str, Callable[[str], bool]] = {
        "patches through heads": lambda name: name.endswith(": patches"),
        "MLPs": lambda name: ".mlp" in name,
        "embedding": lambda name: "embed" in name,
    }
    for kind, is_of in kinds.items():
        whole = math.fsum(value for name, value in found.map.facts.numbers if is_of(name))
        assert told[kind] == pytest.approx(whole, rel=2e-3), kind
    assert math.fsum(told.values()) == pytest.approx(total(found), abs=1e-3 * sum(map(abs, told.values())))


def test_layers_and_heads_sum_to_the_whole() -> None:
    model = vit()
    whole = explained(model, target=1).map.values
    layers = [explained(model, target=1, layer=layer).map.values for layer in range(3)]
    heads = [explained(model, target=1, layer="blocks.2.attn", head=head).map.values for head in range(3)]
    assert torch.allclose(sum(layers, torch.zeros(1)), whole, atol=1e-6)
    assert torch.allclose(sum(heads, torch.zeros(1)), layers[2], atol=1e-6)


@pytest.mark.parametrize("space", ["prob", "logprob"])
def test_probabilities_are_refused(space: str) -> None:
    with pytest.raises(OptionError, match=r"is no linear function of the output.*target_space='logit'"):
        explained(vit(), target=1, target_space=space)


def test_half_precision_is_refused() -> None:
    model = vit()
    with pytest.raises(OptionError, match="in half precision, terms do not add up"), torch.autocast("cpu", dtype=torch.bfloat16):
        explained(model, target=1)
    with pytest.raises(OptionError, match="in half precision, terms do not add up"):
        explained(model.bfloat16(), target=1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"layer": 3}, r"must lie in \[-3, 2\]"),
        ({"head": 3}, r"must lie in \[-3, 2\]"),
        ({"layer": "patch_embed"}, "patch_embed"),
    ],
)
def test_layers_and_heads_that_are_not_there(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        explained(vit(), target=1, **given)


class Bottleneck(nn.Module):
    """A residual branch with attention and an activation behind it; `post`: another behind the sum."""

    def __init__(self, *, post: bool) -> None:
        super().__init__()
        self.stem, self.post = nn.Conv2d(3, 24, 16, 16), post
        self.out, self.head = nn.Linear(24, 24), nn.Linear(24, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).flatten(2).mT
        q, k, v = (x.unflatten(-1, (3, 8)).transpose(1, 2) for _ in range(3))
        mixed = ((q @ k.mT) * 0.3).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2).relu())
        scores: Tensor = self.head((x.relu() if self.post else x).mean(1))
        return scores


@pytest.mark.parametrize("post", [False, True])
def test_an_activation_behind_attention_is_named(post: bool) -> None:
    torch.manual_seed(0)
    model = Bottleneck(post=post).eval()
    with pytest.raises(OptionError, match=r"the score passes through relu in .*so .* has no direct contribution"):
        visattn.explain(model, Image.new("RGB", (64, 64), "red"), method="contributions", target=1, img_size=64)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("test_vit", "yes"),
        ("test_vit3", "yes"),
        ("resnet18", "no layer multiplied a softmax by values"),
        ("hiera_tiny_224", "which is not known to be linear and has no way around it"),
    ],
)
def test_inspect_says_whether_contributions_apply(run: Run, name: str, said: str) -> None:
    code, out, err = run("inspect", name, "--weights", "none", "--json")
    assert code == 0, err
    assert said in {row["method"]: row["applies"] for row in json.loads(out)["methods"]}["contributions"]


def saved(folder: Path, count: int) -> Path:
    folder.mkdir()
    for number in range(count):
        visattn.load_image(f"scene:{number}").save(folder / f"{number}.png")
    return folder


def test_statistics_of_a_batch_have_the_contributions_of_its_heads(run: Run, tmp_path: Path) -> None:
    folder, out = saved(tmp_path / "photos", 3), tmp_path / "out"
    asked = "--model", "scenes_vit", "--method", "contributions", "--target", "3"
    code, _, err = run("batch", folder, *asked, "--stats", "--no-pictures", "-o", out)
    assert code == 0, err
    rows = list(csv.DictReader(io.StringIO((out / "heads.csv").read_text())))
    known = head_effects("scenes_vit", [folder / f"{number}.png" for number in range(3)], target=3).rows()
    for row, expected in zip(rows, known, strict=False):
        assert (row["layer"], int(row["head"])) == (expected["layer"], expected["head"])
        for column, name in (
            ("direct", "direct"),
            ("direct_low", "low"),
            ("direct_high", "high"),
            ("direct_through_patches", "through_patches"),
        ):
            assert float(row[column]) == pytest.approx(expected[name], abs=1e-4)


def test_heads_of_another_photo_in_the_shell(run: Run, tmp_path: Path) -> None:
    asked = "heads", "scene:7", "--model", "scenes_vit", "--from", "scene:3"
    _, out, _ = run(*asked, "--json")
    heads = [(row["layer"], row["head"]) for row in json.loads(out)]
    assert heads == [(f"blocks.{block}.attn", head) for block in range(4) for head in range(4)]
    for more in ((), ("--contributions",)):
        page = tmp_path / f"page{len(more)}.png"
        code, _, err = run(*((more and (*asked[:4], *more)) or asked), "-o", page)
        assert code == 0, err
        with Image.open(page) as picture:
            assert picture.width > 300
    code, _, err = run(*asked, "--contributions")
    assert code == 2
    assert "--from has no effect with --contributions" in err


def test_cells_of_a_head_table_have_the_colors_of_their_numbers() -> None:
    numbers = {("a", 0): 2.0, ("a", 1): -2.0, ("b", 0): 0.0}
    page = np.asarray(head_table(numbers, meaning="number").convert("RGB")).astype(int)
    red, blue = ((page[..., 0] - page[..., 2] > 60).sum(), (page[..., 2] - page[..., 0] > 60).sum())
    assert min(red, blue) > 56 * 30
    with_star = np.asarray(head_table(numbers, meaning="number", marked=[("a", 0)]).convert("RGB"))
    assert with_star.shape == page.shape
    assert (with_star != page).any()


def test_padding_of_windows_is_a_term_of_its_own() -> None:
    torch.manual_seed(0)
    model = timm.create_model(
        "samvit_base_patch16",
        img_size=80,
        depth=2,
        embed_dim=48,
        num_heads=2,
        window_size=3,
        global_attn_indexes=(),
        num_classes=5,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    found = visattn.explain(model.eval(), PHOTO, method="contributions", target=1, img_size=80, resize="fit")
    numbers = dict(found.map.facts.numbers)
    padded = [share for name, share in numbers.items() if name.endswith(": padding")]
    scale = sum(map(abs, numbers.values()))
    assert len(padded) == 2
    assert max(map(abs, padded)) > 1e-3 * scale
    with torch.no_grad():
        score = float(model(prepare(visattn.load_image(PHOTO), model, img_size=80, resize="fit").pixels)[0, 1])
    assert total(found) == pytest.approx(score, abs=2e-6 * scale)
    assert any("padding of windows" in note for note in found.provenance.notes)
