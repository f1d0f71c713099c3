"""Training of captioners: real photos end to end, checkpoints, refusals, and frozen parameters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image

from tests.captioning.real import coco
from tests.cli.test_commands import Run, run
from visattn import data
from visattn.captioning import load_captioner
from visattn.errors import DataError, OptionError, VisattnWarning, WeightsError
from visattn.training import CaptionConfig, Checkpoints, Config, train
from visattn.training.tasks.captioning import Captioning

pytestmark = pytest.mark.full

__all__ = ["run"]

SMALL: dict[str, Any] = {
    "train_count": 24,
    "test_count": 6,
    "batch_size": 4,
    "epochs": 1.0,
    "embed_dim": 8,
    "hidden_dim": 12,
    "attention_dim": 8,
    "model_kwargs": {"width": 16},
    "coordinates": True,
    "device": "cpu",
    "log_every": 2,
    "save_every": 2,
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return coco(tmp_path_factory.mktemp("coco"))


def recipe(**options: Any) -> CaptionConfig:
    return CaptionConfig(**SMALL | options)


def weights(run: Path) -> dict[str, torch.Tensor]:
    state = Checkpoints(run / "checkpoints").latest()
    assert state is not None
    return state.tensors["model"]


def test_help_lists_every_setting(run: Run) -> None:
    code, out, _ = run("train", "caption", "--help")
    assert code == 0
    for setting in fields(CaptionConfig):
        assert f"--{setting.name.replace('_', '-')}" in out


def test_training_on_200_photos_in_coco_format_runs_end_to_end(run: Run, photos: Path, tmp_path: Path) -> None:
    options = "--model visattn_resnet14 --img-size 48 --epochs 12 --batch-size 20 --lr 3e-3 --embed-dim 32 --hidden-dim 48 --dropout 0.1"
    extra = "--regularizer 0.01 --maps-every 60 --device cpu -q -o run"
    code, out, err = run("train", "caption", "--data", photos, *options.split(), *extra.split())
    assert (code, err) == (0, "")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["accuracy"] > 0.7  # words with teacher forcing; only the first word and the name in the photo need the image
    card = (tmp_path / "run" / "README.md").read_text()
    assert "200 training images, 40 test images" in card
    assert "BLEU-4" in card
    assert sorted(path.name for path in (tmp_path / "run" / "maps").iterdir()) == ["step_00000060.png", "step_00000120.png"]
    tests = sorted((photos / "val2017").iterdir())[:8]
    code, out, _ = run("caption", *tests, "--checkpoint", "run/final", "--filmstrip", "strips", "--json")
    assert code == 0
    told = [row["caption"] for row in json.loads(out)]
    named = ["astronaut", "cat", "coffee", "rocket"] * 2
    assert sum(name in caption.split() for name, caption in zip(named, told, strict=True)) >= 6
    for row in json.loads(out):
        with Image.open(row["filmstrip"]) as strip:
            assert strip.width > 3 * 160


@pytest.mark.parametrize("attention", ["soft", "hard", "uniform"])
@pytest.mark.parametrize("stop", [2, 4])
def test_resumed_training_is_bit_identical(attention: str, stop: int, tmp_path: Path) -> None:
    config = recipe(attention=attention, word_dropout=0.2, grayscale=0.2, amp="bfloat16")
    train(config, tmp_path / "whole")
    begun = train_until(config, tmp_path / "begun", stop)
    train(config, begun)
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(begun)[name]), name
    assert (tmp_path / "whole" / "log.jsonl").read_bytes() == (begun / "log.jsonl").read_bytes()


def train_until(config: CaptionConfig, folder: Path, step: int) -> Path:
    """Train a run that crashes after a number of steps."""
    from visattn.training.trainer import Trainer

    learn = Trainer.learn

    def crashing(self: Trainer, parts: Any, number: int, stepping: Any) -> torch.Tensor:
        if number == step:
            raise KeyboardInterrupt
        return learn(self, parts, number, stepping)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "learn", crashing)
        with pytest.raises(KeyboardInterrupt):
            train(config, folder)
    return folder


def test_reinforce_baseline_is_learned_and_saved(tmp_path: Path) -> None:
    train(recipe(attention="hard"), tmp_path / "run")
    assert float(weights(tmp_path / "run")["baseline"]) > 0.1


@pytest.mark.filterwarnings("ignore:freeze keeps the random weights")
def test_frozen_encoder_is_not_changed_by_training(tmp_path: Path) -> None:
    config = recipe(freeze=True)
    before = {name: tensor.clone() for name, tensor in Captioning(config).build().state_dict().items()}
    torch.manual_seed(0)
    train(config, tmp_path / "run")
    after = weights(tmp_path / "run")
    buffers = [name for name in before if name.startswith("encoder.") and "running" in name]
    assert buffers
    for name in buffers:
        assert torch.equal(before[name], after[name]), name


def test_freezing_a_random_encoder_warns(tmp_path: Path) -> None:
    with pytest.warns(VisattnWarning, match="freeze keeps the random weights of the encoder"):
        Captioning(recipe(freeze=True)).build()


def test_too_narrow_test_image_does_not_stop_training(tmp_path: Path) -> None:
    lines = []
    for name, size, split in (("a.png", (64, 64), "train"), ("b.png", (10, 400), "test"), ("c.png", (64, 64), "test")):
        Image.new("RGB", size, "red").save(tmp_path / name)
        lines.append(json.dumps({"image": name, "caption": "red all over", "split": split}))
    (tmp_path / "captions.jsonl").write_text("\n".join(lines))
    counts = {"train_count": 0, "test_count": 0, "batch_size": 1, "img_size": 64, "maps_every": 1}
    train(recipe(data=str(tmp_path / "captions.jsonl"), **counts), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "maps").iterdir()] == ["step_00000001.png"]


def test_drawing_maps_does_not_change_trained_weights(tmp_path: Path) -> None:
    config = recipe(attention="hard")
    train(config, tmp_path / "without")
    train(replace(config, maps_every=1), tmp_path / "with")
    for name, tensor in weights(tmp_path / "without").items():
        assert torch.equal(tensor, weights(tmp_path / "with")[name]), name


def test_any_encoder_with_a_feature_map_can_be_trained(tmp_path: Path) -> None:
    for model, size in (("tv:resnet18", 64), ("vit_tiny_patch16_224", 64), ("visattn_resnet14", 64)):
        options = {"model": model, "img_size": size, "model_kwargs": {}, "train_count": 4, "test_count": 2}
        config = CaptionConfig(**SMALL | options)
        train(config, tmp_path / model.replace(":", "_"))
        captioner = load_captioner(tmp_path / model.replace(":", "_") / "final")
        (caption,) = captioner.generate([Image.new("RGB", (80, 60), "red")], max_length=5)
        assert caption.map.values.shape[1:] == captioner.grid


@pytest.mark.filterwarnings("ignore:freeze keeps the random weights")
def test_two_processes_match_one_process(tmp_path: Path) -> None:
    options = {"freeze": True, "dropout": 0.0, "opt": "sgd", "lr": 0.05, "regularizer": 0.1}
    train(recipe(**options), tmp_path / "one")
    (tmp_path / "recipe.toml").write_text(recipe(**options).toml())
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
        "--nproc-per-node=2",
        "-m",
        "visattn",
    ]
    words = ["train", "caption", "--config", str(tmp_path / "recipe.toml")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for more in ([], ["--attention", "hard"]):
        run = tmp_path / f"two{len(more)}"
        done = subprocess.run(
            [*start, *words, *more, "-q", "-o", str(run)],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            env=environment,
        )
        assert done.returncode == 0, done.stderr[-2000:]
    for name, tensor in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(tmp_path / "two0")[name], tensor, rtol=1e-6, atol=1e-6, msg=name)
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "two2").values())


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "overlong": (
        {"max_length": 3},
        DataError,
        "must have a caption of at most 3 words, got only longer ones. Raise max_length,",
    ),
    "rare words": ({"min_count": 10_000}, DataError, "no word occurs 10000 times or more in the captions"),
    "layer": ({"layer": "features.99"}, OptionError, "has no layer 'features.99'"),
    "attention": ({"attention": "firm"}, OptionError, "firm"),
    "temperature": ({"temperature": 0.0}, OptionError, "temperature must be a finite number above 0"),
    "data": ({"data": "no/such/file.json"}, DataError, "no/such/file.json"),
}


@pytest.mark.parametrize("case", BAD)
def test_unusable_settings_raise_a_one_line_error(case: str, tmp_path: Path) -> None:
    options, kind, text = BAD[case]
    with pytest.raises(kind) as caught:
        train(recipe(**options), tmp_path / "run")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_test_captions_of_another_language_are_refused(tmp_path: Path) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "one.png")
    lines = [{"image": "one.png", "caption": "ein roter Stern", "split": "train"}]
    Image.new("RGB", (32, 32)).save(tmp_path / "two.png")
    lines += [{"image": "two.png", "caption": "une étoile rouge", "split": "test"}]
    file = tmp_path / "captions.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    with pytest.raises(DataError, match="no word of the test captions occurs in the training captions"):
        Captioning(recipe(data=str(file), train_count=0, test_count=0, img_size=64))


def test_resume_with_another_vocabulary_is_refused(photos: Path, tmp_path: Path) -> None:
    config = recipe(data=str(photos), img_size=64)
    train_until(config, tmp_path / "run", 4)
    with pytest.raises(OptionError, match="was started with other settings: min_count 1 -> 5"):
        train(replace(config, min_count=5), tmp_path / "run")


def test_classifier_and_captioner_checkpoints_are_not_interchangeable(run: Run, tmp_path: Path) -> None:
    train(recipe(), tmp_path / "run")
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    code, out, err = run("overlay", "red.png", "--model", "run/final")
    assert (code, out) == (4, "")
    assert "holds a captioner, not a classifier; use visattn caption" in err
    with pytest.raises(WeightsError, match="holds a classifier, not a captioner"):
        load_captioner(data.network_path("scenes_cnn"))


def test_ram_refuses_mixup(tmp_path: Path) -> None:
    options = {"data": "scenes", "train_count": 8, "test_count": 2, "batch_size": 4, "mixup": 0.5, "epochs": 1.0, "device": "cpu"}
    with pytest.raises(OptionError, match="visattn_ram needs hard labels for its reward"):
        train(Config(model="visattn_ram", **options), tmp_path / "run")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_published_weights_of_another_network_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe(model="visattn_resnet14", model_kwargs={})
    other = timm.create_model("visattn_resnet18")
    monkeypatch.setattr("visattn.training.tasks.beginning.load_model", lambda *_, **__: other)
    task = Captioning(config)
    task.config = replace(config, weights="auto")
    with pytest.raises(WeightsError, match=r"visattn_resnet14: \d+ tensors differ from those of"):
        task.build()
