"""Settings of augmentation and optimization: each is refused or changes the training, whatever the augmentation."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from tests.samples import sampled
from tests.training.small import pictures, recipe
from visattn.core.loading.blueprints import Blueprint
from visattn.errors import OptionError, VisattnWarning
from visattn.training import Config, train
from visattn.training.batches import training_transform
from visattn.training.config import AUGMENTATIONS
from visattn.training.optimizing import freeze, groups_of, head_of, optimizer_of, rate_of, schedule_of
from visattn.training.run.randomness import restoring, seed_cpu

CHANGES: dict[str, Any] = {  # a value other than the default for every setting that changes the results
    "train_count": 9, "test_count": 3, "img_size": 24, "model": "visattn_resnet20", "model_kwargs": {"branch_gain": 0.5}, "epochs": 1.0,
    "batch_size": 6, "accumulate": 2, "opt": "adamw", "lr": 0.01, "momentum": 0.5, "weight_decay": 0.1, "warmup_epochs": 0.0,
    "schedule": "linear", "min_lr": 0.02, "decay_epochs": 1.0, "decay_rate": 0.5, "clip_grad": 0.1, "auto_augment": "rand-m9-mstd0.5",
    "jitter": 0.7, "reprob": 1.0, "crop_scale": (0.5, 0.6), "crop_ratio": (1.0, 1.0), "ema": 0.5, "amp": "bfloat16", "seed": 1,
    "log_every": 1, "attention": "se", "attention_init": "identity", "widths": (4, 8, 8), "validation": 0.2, "keep": "best",
    "patience": 1, "layer_decay": 0.5, "head_lr": 0.2, "freeze": ("layer1",), "loss": "bce", "label_smoothing": 0.3, "mixup": 0.5,
    "cutmix": 0.5,
}  # fmt: skip
SAME = {  # results that need not change, and why
    "accumulate": "sums the same gradients but for batch norm",
    "channels_last": "the same numbers but for rounding",
    "compile": "the same numbers but for rounding",
    "nonfinite": "no loss is NaN",
}
ALREADY = {"weights", "split", "data", "augment"}  # need other data, and have their own tests
NEEDS: dict[str, dict[str, Any]] = {  # what a setting needs besides the augmentation
    "decay_epochs": {"schedule": "step"},
    "decay_rate": {"schedule": "step", "decay_epochs": 0.5},
    "attention_init": {"attention": "se"},
    "keep": {"validation": 0.2},
    "patience": {"validation": 0.2},
}
OF_AUGMENTATION = ("auto_augment", "jitter", "reprob", "crop_scale", "crop_ratio")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("photos"))


def drawn(config: Config, channels: int) -> list[bytes]:
    blueprint = Blueprint("m", ("a", "b"), channels, (16, 16), (0.5,) * channels, (0.25,) * channels)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 17, 3), dtype=np.uint8)
    picture = Image.fromarray(pixels).convert("L" if channels == 1 else "RGB")
    transform, found = training_transform(config, blueprint), []
    for seed in range(20):
        with restoring():
            seed_cpu(seed)
            made = transform(picture)
        assert made.shape == (channels, 16, 16)
        assert made.isfinite().all()
        found.append(made.numpy().tobytes())
    return found


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("augment", AUGMENTATIONS)
@pytest.mark.parametrize("name", OF_AUGMENTATION)
def test_each_setting_of_augmentation_is_refused_or_changes_pixels(augment: str, name: str, channels: int) -> None:
    if name.startswith("crop_") and augment != "imagenet":
        with pytest.raises(OptionError, match=f"{name} needs augment imagenet, got {augment}"):
            Config(augment=augment, **{name: CHANGES[name]})
    else:
        assert drawn(Config(augment=augment, **{name: CHANGES[name]}), channels) != drawn(Config(augment=augment), channels)


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5", "augmix-m3-w3", "original", "3a"])
@pytest.mark.parametrize("augment", AUGMENTATIONS)
def test_policies_work_with_every_augmentation(augment: str, policy: str) -> None:
    assert len(set(drawn(Config(augment=augment, auto_augment=policy), 3))) > 1


def test_jitter_beside_a_policy_takes_effect() -> None:
    with_policy = Config(augment="imagenet", auto_augment="rand-m9")
    assert drawn(replace(with_policy, jitter=0.9), 3) != drawn(with_policy, 3)
    assert drawn(replace(with_policy, jitter=0.0), 3) == drawn(with_policy, 3)


@pytest.mark.parametrize("policy", ["randaugment", "m9", "rand-q9", "augmix-z1", "\x1b"])
def test_unknown_policies_are_refused(policy: str) -> None:
    blueprint = Blueprint("m", ("a", "b"), 3, (16, 16), (0.5,) * 3, (0.25,) * 3)
    with pytest.raises(OptionError, match="unknown auto_augment") as caught:
        training_transform(Config(auto_augment=policy), blueprint)
    assert "\n" not in str(caught.value)


def results(config: Config, run: Path) -> tuple[str, bytes]:
    """Return the log and the weights of a training."""
    train(config, run)
    return (run / "log.jsonl").read_text(), (run / "final" / "model.safetensors").read_bytes()


def names() -> list[str]:
    """Return the settings that change results, each of which has a value in the table."""
    found = [item.name for item in fields(Config) if not item.metadata["free"] and item.name not in ALREADY | set(SAME)]
    assert not set(found) - set(CHANGES)
    return found


def check_effect(name: str, augment: str, photos: Path, base: dict[str, Any], folder: Path) -> None:
    model = {"model": "test_resnet", "widths": ()} if name == "layer_decay" else {}  # a model of timm
    around = NEEDS.get(name, {}) | model | {"augment": augment, "epochs": 1.5}
    if name in ("crop_scale", "crop_ratio") and augment != "imagenet":
        with pytest.raises(OptionError, match=f"{name} needs augment imagenet"):
            recipe(photos, **around, **{name: CHANGES[name]})
        return
    key = json.dumps(around, sort_keys=True)
    if key not in base:
        base[key] = results(recipe(photos, **around), folder / f"base{len(base)}")
    changed = recipe(photos, **(around | {name: CHANGES[name]}))
    if name == "keep":
        train(changed, folder / "changed")
        assert json.loads((folder / "changed" / "final" / "model.json").read_text())["steps"] <= 4
        return
    assert results(changed, folder / "changed") != base[key]


@pytest.mark.filterwarnings("ignore:freeze keeps random weights")
@pytest.mark.parametrize(
    "name", ["schedule", "min_lr", "decay_rate", "layer_decay", "head_lr", "freeze", "loss", "validation", "jitter"]
)
def test_new_settings_change_a_training(name: str, photos: Path, tmp_path: Path) -> None:
    check_effect(name, "crop", photos, {}, tmp_path)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:freeze keeps random weights")
@pytest.mark.parametrize("augment", sampled(["imagenet", "none"], 2))  # the fewest settings that apply, and the most
def test_every_setting_is_refused_or_changes_a_training(augment: str, photos: Path, tmp_path: Path) -> None:
    base: dict[str, Any] = {}
    for name in names():
        if name != "patience":
            check_effect(name, augment, photos, base, tmp_path / name)


# optimization


def rates(config: Config, steps: int = 40, epoch: float = 10) -> list[float]:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=config.lr)
    schedule, found = schedule_of(optimizer, config, steps, epoch), []
    for step in range(steps):
        schedule.step_update(step)
        found.append(rate_of(optimizer))
    return found


def test_schedules_follow_their_formulas() -> None:
    config = Config(lr=0.5, warmup_epochs=0.5, min_lr=0.1)  # 5 steps of warmup
    warm = [0.005 + (0.5 - 0.005) * step / 5 for step in range(5)]
    rest = np.arange(5, 40)
    expected = {
        "cosine": 0.1 + 0.2 * (1 + np.cos(np.pi * rest / 40)),
        "linear": 0.1 + 0.4 * (1 - rest / 40),
    }
    for name, late in expected.items():
        assert rates(replace(config, schedule=name)) == pytest.approx([*warm, *late])
    stepped = Config(lr=0.5, warmup_epochs=0.5, schedule="step", decay_epochs=1.2, decay_rate=0.25)
    assert rates(stepped) == pytest.approx([*warm, *(0.5 * 0.25 ** (rest // 12))])
    assert rates(Config(lr=0.5, warmup_epochs=0.5, schedule="constant")) == pytest.approx([*warm, *[0.5] * 35])


def test_layers_and_head_have_their_own_rates() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3, depth=3)
    head = head_of(model, 3)
    assert head == ["head.weight", "head.bias"]
    config = Config(lr=0.1, layer_decay=0.5, head_lr=0.7, opt="adamw", momentum=0.9)
    optimizer = optimizer_of(model, config, groups_of(config, head))
    schedule_of(optimizer, config, 10, 5).step_update(9)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    scales = {names[id(p)]: group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    assert scales["head.weight"] == pytest.approx(7)
    for block in range(3):  # the embedding, three blocks, the last norm, and the head
        assert scales[f"blocks.{block}.mlp.fc1.weight"] == pytest.approx(0.5 ** (3 - block))
    assert scales["patch_embed.proj.weight"] == scales["pos_embed"] == pytest.approx(0.5**4)
    decays = {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(scales) == len(names)
    assert (decays["head.weight"], decays["head.bias"], decays["pos_embed"]) == (config.weight_decay, 0.0, 0.0)
    assert rate_of(optimizer) == pytest.approx(0.1 * (1 + np.cos(np.pi * 9 / 10)) / 2)


def test_layer_decay_without_groups_of_layers_is_refused(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="layer_decay needs a model whose layers timm groups, got ResNet"):
        train(recipe(photos, layer_decay=0.5), tmp_path / "run")
    frozen = recipe(photos, model="test_resnet", widths=(), layer_decay=0.5, freeze=("backbone",))
    with (
        pytest.raises(OptionError, match=r"or one whose other layers are frozen. Leave it out"),
        pytest.warns(match="keeps random weights"),
    ):
        train(frozen, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def trained(config: Config, run: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the initial and the final weights of a training."""
    from visattn.training.run.processes import processes
    from visattn.training.tasks.task_table import task_of
    from visattn.training.trainer import Trainer

    with processes("cpu") as group:
        before = {name: tensor.clone() for name, tensor in Trainer(task_of(config), 3, 3, group).model.state_dict().items()}
    train(config, run)
    import visattn

    return before, visattn.load_model(str(run / "final")).state_dict()


@pytest.mark.filterwarnings("ignore:freeze keeps random weights")
def test_frozen_modules_keep_parameters_and_statistics(photos: Path, tmp_path: Path) -> None:
    before, after = trained(recipe(photos, freeze=("layer1", "bn1"), model="resnet18", widths=()), tmp_path / "run")
    fixed = {name for name in before if torch.equal(before[name], after[name])}
    assert fixed == {name for name in before if name.startswith(("layer1.", "bn1."))}


def test_freezing_random_weights_is_warned_of(photos: Path) -> None:
    from visattn.training.tasks.classification import Classification

    with pytest.warns(VisattnWarning, match=r"freeze keeps random weights. Pass weights$"):
        Classification(recipe(photos, freeze=("layer1",))).build()


@pytest.mark.filterwarnings("ignore:freeze keeps random weights")
def test_frozen_backbone_trains_head_and_attention_only(photos: Path, tmp_path: Path) -> None:
    before, after = trained(recipe(photos, freeze=("backbone",), attention="se"), tmp_path / "run")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split(".")[0] for name in changed if "attention" not in name} == {"fc"}
    assert any("attention" in name for name in changed)


@pytest.mark.filterwarnings("ignore:freeze keeps random weights")
def test_frozen_backbone_trains_attention_that_starts_as_the_identity(photos: Path, tmp_path: Path) -> None:
    options = {"zero_init_last": False}  # norms that are frozen at 0 would stop all gradients
    config = recipe(photos, freeze=("backbone",), attention="se", model="resnet18", widths=(), model_kwargs=options)
    before, after = trained(config, tmp_path / "run")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.rpartition(".")[2] for name in changed if "gate" in name} == {"gate"}
    assert {name.split(".")[0] for name in changed if "gate" not in name and "attention" not in name} == {"fc"}
    assert any(".attention." in name for name in changed)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (("layer9",), r"freeze: Sequential has no module 'layer9'"),
        (("",), r"freeze: Sequential has no module ''"),
        (("0", "1"), "freeze leaves no parameter to train, got 0, 1"),
    ],
)
def test_wrong_modules_to_freeze_are_refused(modules: tuple[str, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        freeze(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)), modules, ())


def test_a_head_is_the_last_layer_with_as_many_outputs_as_classes() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 5))
    assert head_of(model, 3) == ["1.weight", "1.bias"]
    with pytest.raises(OptionError, match="need a last layer with 4 outputs, got none in Sequential"):
        head_of(model, 4)


def test_binary_cross_entropy_is_its_formula(photos: Path, tmp_path: Path) -> None:
    from visattn.training.tasks.classification import Classification

    logits = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 1, 0])
    goal = torch.full((4, 2), 0.05).scatter(1, labels[:, None], 0.95)  # smoothing 0.1 over two classes
    chance = logits.sigmoid()
    expected = -(goal * chance.log() + (1 - goal) * (1 - chance).log()).mean()
    task = Classification(recipe(photos, loss="bce", label_smoothing=0.1))
    assert task.loss(lambda pixels: logits, torch.zeros(4, 3, 2, 2), (labels,)) == pytest.approx(float(expected))
    told = task.measure(lambda pixels: logits, torch.zeros(4, 3, 2, 2), (labels,))  # type: ignore[arg-type]
    hard = F.one_hot(labels, 2).float()
    assert told.loss / 4 == pytest.approx(float(-(hard * chance.log() + (1 - hard) * (1 - chance).log()).mean()))
