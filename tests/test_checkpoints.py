"""Checkpoints shipped with the project: they match their cards and load into the models that the cards name."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torchvision.transforms.functional import pil_to_tensor

import visattn
from tests.conftest import Figures
from tests.samples import sampled
from visattn import data
from visattn.captioning import exact_set, load_captioner
from visattn.core.methods import gates
from visattn.core.pipeline.passes import look
from visattn.data.labeled.downloaded import PACKAGE
from visattn.data.scenes import Mark, Pairs, Scenes
from visattn.data.scenes.causes import Cause, CausedScenes
from visattn.models.draw import Draw, bound

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "models"
CAUSES = FOLDER / "causes"  # written by scripts/train_causes.py


def test_every_checkpoint_has_a_card_with_its_digest() -> None:
    sections = (FOLDER / "README.md").read_text(encoding="utf-8").split("\n## ")[1:]
    cards = [section for section in sections if section.split("\n")[0].endswith(".safetensors")]
    assert sorted(card.split("\n")[0] for card in cards) == sorted(file.name for file in FOLDER.glob("*.safetensors"))
    for card in cards:
        file = FOLDER / card.split("\n")[0]
        digest = re.search(r"sha256: ([0-9a-f]{64})", card)
        assert digest is not None
        assert digest[1] == hashlib.sha256(file.read_bytes()).hexdigest()


NETWORKS: dict[str, Mark] = {
    "scenes_cnn": "none",
    "scenes_vit": "none",
    "scenes_sliding_vit": "none",
    "scenes_predictive_vit": "none",
    "scenes_cnn_shortcut": "label",
    "scenes_vit_shortcut": "label",
}


CAPTIONERS = {  # required share of exact sets
    "captions_soft": 0.95,
    "captions_hard": 0.9,
    "captions_local": 0.8,
    "captions_uniform": 0.0,
}
RAM, DRAW, TRANSFORMER = "ram_fashion_mnist", "draw_fashion_mnist", "stn_fashion_mnist"


def test_every_folder_is_listed_and_checkpoints_are_small() -> None:
    assert sorted(path.name for path in FOLDER.iterdir() if path.is_dir()) == sorted(
        [*CAPTIONERS, *NETWORKS, RAM, DRAW, TRANSFORMER, "causes", "patches"]
    )
    sizes = {path.name: sum(file.stat().st_size for file in path.iterdir()) for path in FOLDER.iterdir() if path.is_dir()}
    assert sizes["captions_soft"] + sizes["captions_hard"] < 8e6
    weights = {path: path.stat().st_size for path in FOLDER.rglob("*.safetensors")}
    assert sum(size for path, size in weights.items() if CAUSES not in path.parents) < 28e6
    assert sum(size for path, size in weights.items() if CAUSES in path.parents) < 22e6


@lru_cache(2)
def caused(cause: Cause, shown: Mark) -> list[tuple[Image.Image, int]]:
    """Return scenes, which all networks of the cause see."""
    scenes = CausedScenes(cause, 400, seed=2, shown=shown)
    return [scenes[i] for i in range(len(scenes))]


@pytest.mark.parametrize(
    "folder", sampled(sorted(path.parent for path in CAUSES.glob("*/model.safetensors")), 3), ids=lambda path: path.name
)
def test_a_network_of_a_cause_depends_on_it(folder: Path, figures: Figures) -> None:
    cause, kind, _ = folder.name.split("_")
    model = visattn.load_model(str(folder))
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert f"sha256 `{digest}`" in (folder / "README.md").read_text(encoding="utf-8")
    shares = []
    for shown in ("label", "random"):
        images, labels = zip(*caused(cause, shown), strict=True)
        with torch.inference_mode():
            answers = model(visattn.prepare_batch(images, model).pixels).argmax(1)
        shares.append(float((answers == torch.tensor(labels)).float().mean()))
    figures(f"{cause}, {kind}: accuracy with the cause", shares[0], ">= 0.94")
    figures(f"{cause}, {kind}: accuracy with an unrelated cause", shares[1], "<= 0.33")
    assert shares[0] >= 0.94  # the page's bounds are 0.95 and 0.30 on 1,000 scenes; a sampling error is added
    assert shares[1] <= 0.33


@pytest.mark.parametrize("name", CAPTIONERS)
def test_a_captioner_matches_its_card(name: str) -> None:
    card = (FOLDER / name / "README.md").read_text(encoding="utf-8")
    told = json.loads((FOLDER / name / "model.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256((FOLDER / name / "model.safetensors").read_bytes()).hexdigest()
    assert f"sha256 `{digest}`" in card
    assert told["sha256"] == digest
    assert f"--attention {told['attention']}" in card or told["attention"] == "soft"  # the default
    assert "Apache-2.0" in card
    recipe = tomllib.loads(card.split("```toml")[1].split("```")[0])
    shared = tomllib.loads((FOLDER / "captions.toml").read_text(encoding="utf-8"))
    assert recipe | shared | {"attention": told["attention"]} == recipe
    minutes = float(re.search(r"([\d.]+) minutes", card)[1])  # type: ignore[index]
    assert minutes <= 120


@pytest.mark.parametrize("pairs", sampled(["new", "known"], 2))
@pytest.mark.parametrize("name", CAPTIONERS)
def test_captioners_caption_unseen_scenes(name: str, pairs: Pairs, figures: Figures) -> None:
    scenes = Scenes(100, (64, 64), seed=99, distractors=(0, 2), pairs=pairs, margin=0.03)
    photos = [Image.fromarray(scenes.scene(i).image) for i in range(len(scenes))]
    told = [caption.text for caption in load_captioner(FOLDER / name).generate(photos)]
    exact = exact_set(told, [scenes.scene(i).caption for i in range(len(scenes))])
    figures(f"{name}, {pairs} pairs: exact sets of 100 scenes", exact, f">= {CAPTIONERS[name] - 0.06:.2f}")
    assert (
        exact >= CAPTIONERS[name] - 0.06
    )  # docs/captions.md has the result on 1,000 scenes; 100 scenes are within three standard errors


def test_attention_of_color_words_is_on_the_objects() -> None:
    scenes = Scenes(30, (64, 64), seed=99, distractors=(0, 2), pairs="known", margin=0.03)
    shares = []
    for name in ("captions_soft", "captions_hard"):
        for i, caption in enumerate(
            load_captioner(FOLDER / name).score(
                [Image.fromarray(scenes.scene(i).image) for i in range(len(scenes))],
                [scenes.scene(i).caption for i in range(len(scenes))],
            )
        ):
            covered = torch.from_numpy(scenes.scene(i).masks.any(0)).float()[None, None]
            cells = torch.nn.functional.avg_pool2d(covered, 8)[0, 0]
            color = caption.map.values[1]  # the second word
            shares.append(float((color * cells).sum() / cells.mean()))
    assert sum(shares) / len(shares) > 3  # times the share of a uniform map on objects


def card_of(name: str) -> tuple[str, dict[str, Any]]:
    """Return the card of a network and its facts, after a check that both state the digest of its weights."""
    card = (FOLDER / name / "README.md").read_text(encoding="utf-8")
    told = json.loads((FOLDER / name / "model.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256((FOLDER / name / "model.safetensors").read_bytes()).hexdigest()
    assert told["sha256"] == digest
    assert f"sha256 `{digest}`" in card
    return card, told


def test_the_recurrent_attention_model_matches_its_card() -> None:
    card, told = card_of(RAM)
    assert f"{told['test_accuracy']:.2%}" in card
    model = visattn.load_model(str(FOLDER / RAM))
    assert 0 <= int(model(torch.zeros(1, 1, 28, 28)).logits.argmax()) < 10


def test_the_spatial_transformer_matches_its_card(figures: Figures) -> None:
    card, told = card_of(TRANSFORMER)
    assert f"| spatial transformer | {told['test_accuracy']:.2%}" in card
    model = visattn.load_model(str(FOLDER / TRANSFORMER))
    assert f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters" in card
    if not PACKAGE.is_dir():
        pytest.skip("Debian's package dataset-fashion-mnist is not installed")
    tests = data.load_labeled(told["data"], "test")
    pictures, labels = zip(*(tests[i] for i in range(500)), strict=True)
    prepared = visattn.prepare_batch(list(pictures), model)
    with torch.no_grad(), visattn.capture(model, features="none") as recording:
        answers = model(prepared.pixels).argmax(1)
    share = float((answers == torch.tensor(labels)).float().mean())
    (window,) = (feature.value for feature in recording.features if feature.role == "transform")
    figures("spatial transformer: accuracy on 500 test images", share, f"within 0.06 of {told['test_accuracy']:.4f}")
    figures("spatial transformer: spread of the window's center", float(window[:, :, 2].std(0).min()), ">= 0.1")
    assert abs(share - told["test_accuracy"]) < 0.06  # three standard errors of 500 images
    assert float(window[:, :, 2].std(0).min()) >= 0.1  # in [-1, 1]: it moves with the item
    turned, size = torch.atan2(window[:, 1, 0], window[:, 0, 0]).rad2deg(), window[:, :, :2].det().abs().sqrt()
    figures("spatial transformer: spread of the window's angle in degrees", float(turned.std()), "<= 3")
    figures("spatial transformer: spread of the window's side over its mean", float(size.std() / size.mean()), "<= 0.03")
    assert float(turned.std()) <= 3  # items are turned by up to 60 degrees
    assert float(size.std() / size.mean()) <= 0.03


def test_the_network_that_paints_matches_its_card() -> None:
    card, told = card_of(DRAW)
    model = Draw(**told["options"] | {"img_size": tuple(told["options"]["img_size"])})
    assert f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters" in card


def test_the_network_that_paints_has_the_bound_of_its_card() -> None:
    if not PACKAGE.is_dir():
        pytest.skip("Debian's package dataset-fashion-mnist is not installed")
    card = (FOLDER / DRAW / "README.md").read_text(encoding="utf-8")
    told = json.loads((FOLDER / DRAW / "model.json").read_text(encoding="utf-8"))
    model = Draw(**told["options"] | {"img_size": tuple(told["options"]["img_size"])}).train()
    model.load_state_dict(load_file(FOLDER / DRAW / "model.safetensors"))
    tests = data.load_labeled("fashion-mnist", "test")
    pictures = torch.stack([pil_to_tensor(tests[i][0].convert("L")) for i in range(1000)])
    images = (pictures >= 128).float()
    torch.manual_seed(0)
    with torch.no_grad():
        nats = bound(model(images), images)
    low, high = (float(end) for end in re.findall(r"\(([\d.]+) to ([\d.]+), 95 %\)", card)[0])
    spread = float(nats.std()) / len(nats) ** 0.5
    assert low - 3 * spread < float(nats.mean()) < high + 3 * spread


@pytest.mark.parametrize("name", sampled(NETWORKS, 3))
def test_a_network_matches_its_card(name: str) -> None:
    card = (FOLDER / name / "README.md").read_text(encoding="utf-8")
    told = json.loads((FOLDER / name / "model.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256((FOLDER / name / "model.safetensors").read_bytes()).hexdigest()
    assert f"sha256 `{digest}`" in card
    assert told["sha256"] == digest
    assert f"Test accuracy: {100 * told['test_accuracy']:.2f} %" in card
    assert "Apache-2.0" in card
    assert f"--data {told['data']} --model {told['model']}" in card


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_classify_new_scenes(name: str) -> None:
    model = visattn.load_model(str(FOLDER / name))
    scenes = Scenes(200, (64, 64), seed=99, watermark=NETWORKS[name])
    pictures = [Image.fromarray(scenes.scene(i).image) for i in range(len(scenes))]
    with torch.no_grad():
        answers = model(visattn.prepare_batch(pictures, model).pixels).argmax(1)
    right = sum(int(answer) == scenes.scene(i).label for i, answer in enumerate(answers)) / len(scenes)
    assert right >= 0.95


@pytest.mark.real
def test_trained_gates_are_low_on_the_sky_and_high_on_the_rocket() -> None:
    model = visattn.load_model(f"{ROOT / 'scripts' / 'train_gates.py'}:gated")
    own = load_file(FOLDER / "efficientnet_lite0_cbam.safetensors")
    found = model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in own.items())
    prepared = visattn.prepare(visattn.load_image(data.photo_path("rocket")), model)
    gate = gates(look(model, prepared, features="none"), layer="blocks.2.attention").at(batch=0).values
    assert gate.shape == (28, 28)
    assert float(gate[:8].mean()) < 0.15  # sky
    assert float(gate[8:24, 13:15].mean()) > 0.5  # the rocket
