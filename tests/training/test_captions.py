"""Captions are trained as classes are: real photos end to end, the same states, the same refusals; nothing else is learned than told."""

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
    "embedding": 8,
    "state": 12,
    "width": 8,
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


def test_help_tells_every_setting(run: Run) -> None:
    code, out, _ = run("train", "caption", "--help")
    assert code == 0
    for setting in fields(CaptionConfig):
        assert f"--{setting.name.replace('_', '-')}" in out


def test_two_hundred_photos_in_cocos_format_end_to_end(run: Run, photos: Path, tmp_path: Path) -> None:
    options = (
        "--model visattn_resnet14 --img-size 48 --epochs 12 --batch-size 20 --lr 3e-3 --embedding 32 --state 48 --dropout 0.1"
    )
    extra = "--regularizer 0.01 --maps-every 60 --device cpu -q -o run"
    code, out, err = run("train", "caption", "--data", photos, *options.split(), *extra.split())
    assert (code, err) == (0, "")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["accuracy"] > 0.7  # words after the true ones before; the first word and the photo's are to be seen
    card = (tmp_path / "run" / "README.md").read_text()
    assert "200 pictures to train on, 40 to test on" in card
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
def test_a_training_that_was_stopped_ends_with_the_same_bits(attention: str, stop: int, tmp_path: Path) -> None:
    config = recipe(attention=attention, word_dropout=0.2, gray=0.2, amp="bfloat16")
    train(config, tmp_path / "whole")
    begun = train_until(config, tmp_path / "begun", stop)
    train(config, begun)
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(begun)[name]), name
    assert (tmp_path / "whole" / "log.jsonl").read_bytes() == (begun / "log.jsonl").read_bytes()


def train_until(config: CaptionConfig, folder: Path, step: int) -> Path:
    """A run that crashes after a number of steps."""
    from visattn.training.trainer import Learner

    learn = Learner.learn

    def crashing(self: Learner, parts: Any, number: int) -> torch.Tensor:
        if number == step:
            raise KeyboardInterrupt
        return learn(self, parts, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "learn", crashing)
        with pytest.raises(KeyboardInterrupt):
            train(config, folder)
    return folder


def test_the_baseline_of_reinforce_is_learned_and_kept(tmp_path: Path) -> None:
    train(recipe(attention="hard"), tmp_path / "run")
    assert float(weights(tmp_path / "run")["baseline"]) > 0.1


@pytest.mark.filterwarnings("ignore:freeze .--freeze. leaves the encoder's random weights")
def test_a_frozen_encoder_stays_as_it_was(tmp_path: Path) -> None:
    config = recipe(freeze=True)
    before = {name: tensor.clone() for name, tensor in Captioning(config).build().state_dict().items()}
    torch.manual_seed(0)
    train(config, tmp_path / "run")
    after = weights(tmp_path / "run")
    buffers = [name for name in before if name.startswith("encoder.") and "running" in name]
    assert buffers
    for name in buffers:
        assert torch.equal(before[name], after[name]), name


def test_frozen_random_features_are_told(tmp_path: Path) -> None:
    with pytest.warns(VisattnWarning, match="freeze .--freeze. leaves the encoder's random weights as they are"):
        Captioning(recipe(freeze=True)).build()


def test_a_test_picture_that_is_too_narrow_to_be_drawn_ends_no_training(tmp_path: Path) -> None:
    lines = []
    for name, size, split in (("a.png", (64, 64), "train"), ("b.png", (10, 400), "test"), ("c.png", (64, 64), "test")):
        Image.new("RGB", size, "red").save(tmp_path / name)
        lines.append(json.dumps({"image": name, "caption": "red all over", "split": split}))
    (tmp_path / "captions.jsonl").write_text("\n".join(lines))
    counts = {"train_count": 0, "test_count": 0, "batch_size": 1, "img_size": 64, "maps_every": 1}
    train(recipe(data=str(tmp_path / "captions.jsonl"), **counts), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "maps").iterdir()] == ["step_00000001.png"]


def test_maps_change_no_bit_of_the_training(tmp_path: Path) -> None:
    config = recipe(attention="hard")
    train(config, tmp_path / "without")
    train(replace(config, maps_every=1), tmp_path / "with")
    for name, tensor in weights(tmp_path / "without").items():
        assert torch.equal(tensor, weights(tmp_path / "with")[name]), name


def test_the_encoder_may_be_any_with_a_map(tmp_path: Path) -> None:
    for model, size in (("tv:resnet18", 64), ("vit_tiny_patch16_224", 64), ("visattn_resnet14", 64)):
        options = {"model": model, "img_size": size, "model_kwargs": {}, "train_count": 4, "test_count": 2}
        config = CaptionConfig(**SMALL | options)
        train(config, tmp_path / model.replace(":", "_"))
        captioner = load_captioner(tmp_path / model.replace(":", "_") / "final")
        (caption,) = captioner.tell([Image.new("RGB", (80, 60), "red")], longest=5)
        assert caption.map.values.shape[1:] == captioner.grid


@pytest.mark.filterwarnings("ignore:freeze .--freeze. leaves the encoder's random weights")
def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    options = {"freeze": True, "dropout": 0.0, "opt": "sgd", "lr": 0.05, "regularizer": 0.1}
    train(recipe(**options), tmp_path / "one")
    (tmp_path / "recipe.toml").write_text(recipe(**options).toml())
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "visattn"]
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
        torch.testing.assert_close(weights(tmp_path / "two0")[name], tensor, rtol=0, atol=1e-6, msg=name)
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "two2").values())


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "overlong": (
        {"longest": 3},
        DataError,
        "must have a caption of at most 3 words, got longer ones only; raise longest (--longest)",
    ),
    "rare words": ({"min_count": 10_000}, DataError, "no word occurs 10000 times or more in the captions"),
    "layer": ({"layer": "features.99"}, OptionError, "has no layer 'features.99'"),
    "attention": ({"attention": "firm"}, OptionError, "firm"),
    "temperature": ({"temperature": 0.0}, OptionError, "temperature must be a finite number above 0"),
    "data": ({"data": "no/such/file.json"}, DataError, "no/such/file.json"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_learned_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
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


def test_a_run_does_not_go_on_with_other_words(photos: Path, tmp_path: Path) -> None:
    config = recipe(data=str(photos), img_size=64)
    train_until(config, tmp_path / "run", 4)
    with pytest.raises(OptionError, match="was begun otherwise: min_count 1 -> 5"):
        train(replace(config, min_count=5), tmp_path / "run")


def test_a_classifier_is_no_captioner_and_the_other_way_round(run: Run, tmp_path: Path) -> None:
    train(recipe(), tmp_path / "run")
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    code, out, err = run("overlay", "red.png", "--model", "run/final")
    assert (code, out) == (4, "")
    assert "holds a captioner, which has no classes; use visattn caption" in err
    scenes = Path(__file__).parents[2] / "assets" / "checkpoints" / "scenes_cnn"
    with pytest.raises(WeightsError, match="holds a classifier, not a captioner"):
        load_captioner(scenes)


def test_ram_is_not_rewarded_for_mixed_pictures(tmp_path: Path) -> None:
    options = {"data": "scenes", "train_count": 8, "test_count": 2, "batch_size": 4, "mixup": 0.5, "epochs": 1.0, "device": "cpu"}
    with pytest.raises(OptionError, match="visattn_ram is rewarded for right classes, which mixed and smoothed labels have not"):
        train(Config(model="visattn_ram", **options), tmp_path / "run")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_published_weights_of_another_network_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe(model="visattn_resnet14", model_kwargs={})
    other = timm.create_model("visattn_resnet18")
    monkeypatch.setattr("visattn.training.tasks.captioning.load_model", lambda *_, **__: other)
    task = Captioning(config)
    task.config = replace(config, weights="auto")
    with pytest.raises(WeightsError, match=r"visattn_resnet14: \d+ tensors differ from the published ones"):
        task.build()
