"""Start of a training: published weights, and incompatible options."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.training.small import pictures, recipe
from visattn.core.loading import load_model, model_folders as folders
from visattn.errors import DataError, OptionError, VisattnNote, WeightsError
from visattn.training import compare_runs, train
from visattn.training.config import Config
from visattn.training.tasks.beginning import beginning_of, fill
from visattn.training.tasks.caption_config import CaptionConfig
from visattn.training.tasks.captioning import Captioning
from visattn.training.tasks.classification import Classification, blueprint_of


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Save a checkpoint of a timm network with seven classes."""
    torch.manual_seed(5)
    state = timm.create_model("resnet10t", num_classes=7).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "published.safetensors")
    return tmp_path / "published.safetensors"


def fine_tuning(data: Path, weights: Path, **changes: object) -> Config:
    return replace(recipe(data), model="resnet10t", widths=(), img_size=32, weights=str(weights), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("attention", ["none", "se"])
def test_published_weights_are_loaded_except_the_last_layer(tmp_path: Path, published: Path, attention: str) -> None:
    config = fine_tuning(pictures(tmp_path / "data"), published, attention=attention)
    blueprint = blueprint_of(config)
    assert (blueprint.channels, blueprint.mean) == (3, (0.485, 0.456, 0.406))
    model = blueprint.build()
    fill(model, beginning_of(config, None), config, blueprint.classes)
    torch.manual_seed(5)
    donor = timm.create_model("resnet10t", num_classes=7).state_dict()
    own = {name.replace(".base.", "."): tensor for name, tensor in model.state_dict().items()}
    taken = [name for name in donor if not name.startswith("fc.")]
    assert len(taken) > 50
    assert all(torch.equal(own[name], donor[name]) for name in taken)
    assert own["fc.weight"].shape[0] == len(blueprint.classes) != 7


def test_published_weights_of_another_architecture_are_refused(tmp_path: Path, published: Path) -> None:
    config = fine_tuning(pictures(tmp_path / "data"), published, model_kwargs={"channels": (8, 8, 8, 8)})
    with pytest.raises(
        WeightsError, match=r"resnet10t: \d+ layers differ from those of published\.safetensors .* or pass weights='none'"
    ):
        train(config, tmp_path / "run")


def test_half_precision_with_a_scaler_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"float16 needs a GPU, .* Choose amp='bfloat16', or none\."):
        train(replace(recipe(pictures(tmp_path / "data")), amp="float16"), tmp_path / "run")


@pytest.mark.parametrize("maps_every", [0, 2])
def test_unreadable_test_set_is_an_error(tmp_path: Path, maps_every: int) -> None:
    data = pictures(tmp_path / "data")
    for path in (data / "test").rglob("*.png"):
        Image.new("RGB", (16, 16)).save(path)
        path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match=r"no test image can be read\.$"):
        train(replace(recipe(data), maps_every=maps_every, max_unreadable=1.0), tmp_path / "run")


def test_weights_of_a_run_bring_its_normalization(tmp_path: Path) -> None:
    first = replace(recipe(pictures(tmp_path / "data")), model="resnet10t", widths=(), img_size=32)
    train(first, tmp_path / "run")
    own = Classification(first).blueprint
    again = Classification(replace(first, weights=str(tmp_path / "run" / "final" / "model.safetensors"))).blueprint
    assert (again.mean, again.std) == (own.mean, own.std)
    assert own.mean != (0.485, 0.456, 0.406)
    alone = tmp_path / "model.safetensors"
    alone.write_bytes((tmp_path / "run" / "final" / "model.safetensors").read_bytes())
    assert Classification(replace(first, weights=str(alone))).blueprint.mean == (0.485, 0.456, 0.406)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config]:
    """Train a narrow network with attention on images of another size than usual."""
    place = tmp_path_factory.mktemp("first")
    config = replace(recipe(pictures(place / "data")), attention="se", img_size=24)
    train(config, place / "run")
    return place / "run", config


def continued(run: tuple[Path, Config], weights: Path, **changes: object) -> Config:
    """Return settings that begin with a run and say nothing of its network."""
    usual = {"attention": "none", "widths": (), "img_size": 0, **changes}
    return replace(run[1], weights=str(weights), **usual)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", [".", "final", "final/model.safetensors"])
def test_a_run_is_gone_on_with_as_it_is(run: tuple[Path, Config], what: str) -> None:
    task = Classification(continued(run, run[0] / what))
    with pytest.warns(VisattnNote, match="the last layer is kept: same classes"):
        model = task.build().eval()
    first, blueprint = load_model(str(run[0] / "final")), folders.read_run(run[0])
    assert task.blueprint == blueprint
    assert (blueprint.attention, blueprint.size, blueprint.options) == ("se", (24, 24), {"widths": [4, 4, 8]})
    x = torch.rand(2, 3, 24, 24)
    with torch.no_grad():
        assert torch.equal(model(x), first(x))
    assert task.title.startswith("visattn_resnet14 with se")


@pytest.mark.parametrize(
    ("classes", "said"),
    [(("cat", "dog"), "the last layer is kept: same classes"), (("dogs", "hats"), "the last layer is new")],
)
def test_the_last_layer_is_that_of_the_classes(
    run: tuple[Path, Config], tmp_path: Path, classes: tuple[str, ...], said: str
) -> None:
    data = pictures(tmp_path / "data", classes=classes)
    with pytest.warns(VisattnNote, match=said):
        model = Classification(continued(run, run[0], data=str(data))).build()
    first = load_model(str(run[0] / "final")).state_dict()
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, first[name])]
    head = [name for name in first if name.startswith(("fc", "head", "classifier"))]
    assert head
    assert set(changed) == (set() if "kept" in said else set(head)) or set(changed) == {head[0]}  # a bias may start at 0


def test_settings_beside_a_run_are_those_that_are_given(run: tuple[Path, Config]) -> None:
    task = Classification(continued(run, run[0], img_size=32, attention="eca"))
    assert task.blueprint.size == (32, 32)
    assert task.blueprint.attention == "eca"
    assert task.blueprint.options == {"widths": [4, 4, 8]}


def test_a_run_of_another_network_or_kind_is_refused(run: tuple[Path, Config], tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"the weights are those of visattn_resnet14, got model resnet10t. Pass model='visattn_resnet14'"
    ):
        Classification(continued(run, run[0], model="resnet10t"))
    with pytest.raises(WeightsError, match="holds a captioner, not a classifier"):
        Classification(continued(run, Path(__file__).parents[2] / "models" / "captions_soft"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsError, match="cannot be read"):
        Classification(continued(run, tmp_path / "empty"))


def test_variants_of_attention_begin_without_attention(run: tuple[Path, Config], tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"has se, which every variant would continue with. Begin with weights of a network without"
    ):
        compare_runs(continued(run, run[0]), tmp_path / "compared", ["none", "se"], 1)
    assert not (tmp_path / "compared").exists()
    plain = replace(run[1], attention="none", img_size=24)
    train(plain, tmp_path / "plain")  # what the message says to do
    config = continued((tmp_path / "plain", plain), tmp_path / "plain", epochs=0.5)
    with pytest.warns(VisattnNote, match="last layer is kept"):
        rows = compare_runs(config, tmp_path / "compared", ["none", "se"], 1)
    assert [row["attention"] for row in rows] == ["none", "se"]


def test_a_trained_run_is_better_than_chance_before_its_first_step(run: tuple[Path, Config], tmp_path: Path) -> None:
    with pytest.warns(VisattnNote, match="last layer is kept"):
        result = train(continued(run, run[0], epochs=0.25, lr=1e-9, warmup_epochs=0.0), tmp_path / "again")
    before = json.loads((run[0] / "result.json").read_text())
    assert result.accuracy == before["accuracy"]


def test_the_encoder_of_a_captioner_goes_on_with_a_run(run: tuple[Path, Config]) -> None:
    config = CaptionConfig(
        data="scenes", img_size=64, train_count=8, test_count=4, model="visattn_resnet14", weights=str(run[0]), device="cpu"
    )
    task = Captioning(config)
    first = load_model(str(run[0] / "final")).state_dict()
    own = task.build().encoder.model.state_dict()  # type: ignore[union-attr]
    assert len(own) > 20
    assert all(torch.equal(tensor, first[name]) for name, tensor in own.items())
    assert task.blueprint.encoder.attention == "se"
    assert task.blueprint.mean == folders.read_run(run[0]).mean


def sized(folder: Path, *sizes: tuple[int, int]) -> Path:
    """Write a folder of images with these heights and widths in turn."""
    for split in ("train", "test"):
        for number in range(8):
            path = folder / split / ("cat", "dog")[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            height, width = sizes[number // 2 % len(sizes)]
            Image.new("RGB", (width, height), (30 * number, 90, 20)).save(path)
    return folder


@pytest.mark.parametrize(
    ("sizes", "img_size", "expected"),
    [
        ([(32, 32)], 0, (32, 32)),
        ([(32, 48)], 0, (32, 48)),
        ([(32, 32)], 64, (64, 64)),
        ([(28, 30), (40, 36)], 0, (40, 40)),
        ([(224, 224)], 0, (224, 224)),
        ([(600, 400)], 0, (224, 224)),
        ([(32, 32), (600, 400)], 0, (224, 224)),
    ],
    ids=str,
)
def test_small_images_are_trained_on_at_their_own_size(
    sizes: list[tuple[int, int]], img_size: int, expected: tuple[int, int], tmp_path: Path
) -> None:
    config = replace(recipe(sized(tmp_path / "data", *sizes)), img_size=img_size)
    assert Classification(config).blueprint.size == expected


def test_files_with_captions_are_trained_on_at_their_own_size(tmp_path: Path) -> None:
    rows = []
    for number in range(4):
        Image.new("RGB", (64, 64), (50 * number, 0, 0)).save(tmp_path / f"{number}.png")
        rows.append(
            json.dumps({"image": f"{number}.png", "captions": ["a red square"], "split": "train" if number < 2 else "test"})
        )
    (tmp_path / "captions.jsonl").write_text("\n".join(rows))
    config = CaptionConfig(data=str(tmp_path / "captions.jsonl"), model="visattn_local_features", min_count=1, device="cpu")
    assert Captioning(config).blueprint.size == (64, 64)


def test_published_weights_are_trained_at_their_size(published: Path, tmp_path: Path) -> None:
    config = fine_tuning(sized(tmp_path / "data", (32, 32)), published)
    assert Classification(replace(config, img_size=0)).blueprint.size == (176, 176)
