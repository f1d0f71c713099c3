"""torchvision classifiers by name: architecture, weights, preprocessing, and token positions."""

from __future__ import annotations

import copy
import hashlib
import io
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import models

import visattn
from tests import zoo
from tests.serving import Store, store  # noqa: F401 - a fixture
from visattn import load_model, prepare
from visattn.core.families import FAMILIES, cam_layer, head, input_spec, labels, provenance_of, torchvision as family
from visattn.core.families.owners import owner
from visattn.core.loading import list_models, torchvision_models
from visattn.core.loading.downloads import url_file
from visattn.errors import OptionError, UnsupportedModel, WeightsError

SMALL = "tv:shufflenet_v2_x0_5"
Weights = dict[str, Tensor]
Save = Callable[[Any], Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def call(content: Any) -> Path:
        torch.save(content, tmp_path / "weights.pth")
        return tmp_path / "weights.pth"

    return call


@pytest.fixture
def photo() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 130, 3), dtype=np.uint8))


def weights(name: str, seed: int = 3, **options: Any) -> Weights:
    torch.manual_seed(seed)
    return {key: value.clone() for key, value in models.get_model(name, **options).state_dict().items()}


def same(model: nn.Module, expected: Weights) -> bool:
    own = model.state_dict()
    return own.keys() == expected.keys() and all(torch.equal(own[key], value) for key, value in expected.items())


# names


def test_a_model_is_built_by_its_name_with_random_weights_of_a_seed() -> None:
    model = load_model(SMALL, weights="none", seed=5)
    assert isinstance(model, models.ShuffleNetV2)
    assert not model.training
    assert same(model, weights("shufflenet_v2_x0_5", seed=5))
    provenance = provenance_of(model)
    assert (provenance.model, provenance.weights, provenance.random) == (SMALL, "random, seed 5", True)
    assert "the weights are random" in provenance.warnings[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tv:resnet51", "unknown model 'tv:resnet51'. Close matches: tv:resnet"),
        ("tv:qqqqqq", "unknown model 'tv:qqqqqq'. Close matches: none; see visattn.loading.list_models('tv:*')."),
        ("tv:fasterrcnn_resnet51_fpn", "unknown model 'tv:fasterrcnn_resnet51_fpn'. Close matches: tv:fasterrcnn_resnet50_fpn"),
        ("tv:r3d_18", "unknown model 'tv:r3d_18'"),
        ("tv:resnet50.IMAGENET1K", "unknown weights 'IMAGENET1K' for tv:resnet50; available: IMAGENET1K_V1, IMAGENET1K_V2."),
        ("tv:res\nnet", "unknown model 'tv:res\\nnet'"),
    ],
)
def test_unknown_names_get_close_matches(name: str, message: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        load_model(name)
    assert message in str(caught.value)


def test_names_have_published_weights_and_fit_a_pattern() -> None:
    every = torchvision_models.names()
    assert {"tv:resnet50.IMAGENET1K_V1", "tv:resnet50.IMAGENET1K_V2", "tv:vit_b_16.IMAGENET1K_SWAG_E2E_V1"} <= set(every)
    assert all(models.get_weight(_weights_name(name)) for name in every)
    assert torchvision_models.names("swin_t*") == torchvision_models.names("tv:swin_t*") == ["tv:swin_t.IMAGENET1K_V1"]
    assert list_models("*shufflenet*") == torchvision_models.names("*shufflenet*")
    assert "vit_tiny_patch16_224.augreg_in21k_ft_in1k" in list_models("*vit_tiny*")


def _weights_name(name: str) -> str:
    architecture, _, tag = name.removeprefix("tv:").partition(".")
    return f"{models.get_model_weights(architecture).__name__}.{tag}"


def test_family_owns_torchvision_classifiers_before_custom_models() -> None:
    class Mine(models.ResNet):  # type: ignore[misc]
        """Subclass of a torchvision model."""

    assert list(FAMILIES) == [
        *(
            "trained",
            "timm",
            "torchvision",
            "torchvision_detection",
            "torchvision_segmentation",
            "ultralytics",
            "huggingface",
            "custom",
        )
    ]
    assert owner(Mine(models.resnet.BasicBlock, [1, 1, 1, 1])) == "torchvision"
    assert owner(nn.Sequential(nn.Conv2d(3, 4, 3))) == "custom"
    assert owner(models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None)) == "torchvision_segmentation"


# files


def test_a_checkpoint_gives_its_weights_and_its_number_of_classes(save: Save) -> None:
    expected = weights("shufflenet_v2_x0_5", num_classes=5)
    file = save({"state_dict": {f"module.{key}": value for key, value in expected.items()}})
    model = load_model(SMALL, weights=file)
    assert same(model, expected)
    provenance = provenance_of(model)
    assert (provenance.weights, provenance.random) == ("weights.pth", False)
    assert provenance.weights_sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert any("the weights were read from 'state_dict'" in note for note in provenance.notes)
    assert labels(model) is None


def test_a_checkpoint_of_another_model_is_refused(save: Save) -> None:
    with pytest.raises(WeightsError, match=r"does not fit the model: .* missing"):
        load_model(SMALL, weights=save(weights("squeezenet1_1")))


@pytest.mark.parametrize("auxiliary", [False, True])
@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_auxiliary_heads_are_optional(name: str, auxiliary: bool, save: Save) -> None:
    expected = weights(name, num_classes=4, aux_logits=auxiliary, init_weights=False)
    model: Any = load_model(f"tv:{name}", weights=save(expected))
    assert same(model, expected)
    assert model.transform_input  # as the published weights require


def test_older_names_of_densenet_are_translated(save: Save) -> None:
    expected = weights("densenet121", num_classes=4)
    older = {
        key.replace("norm1.", "norm.1.")
        .replace("conv1.", "conv.1.")
        .replace("norm2.", "norm.2.")
        .replace("conv2.", "conv.2."): value
        for key, value in expected.items()
    }
    assert older.keys() != expected.keys()
    assert same(load_model("tv:densenet121", weights=save(older)), expected)


def test_mnasnet_accepts_tensors_without_version(save: Save) -> None:
    expected = weights("mnasnet0_5", num_classes=4)
    assert same(load_model("tv:mnasnet0_5", weights=save(expected)), expected)


def test_position_embeddings_are_resampled_for_another_size(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision_models, "_build", lambda _, **options: little_vit(**options))
    expected = {key: value.clone() for key, value in little_vit(num_classes=3).state_dict().items()}
    model: Any = load_model("tv:vit_b_16", weights=save(expected), img_size=96)
    assert model.image_size == 96
    assert input_spec(model).size == (96, 96)
    torch.testing.assert_close(model.encoder.pos_embedding[:, :1], expected["encoder.pos_embedding"][:, :1])
    assert "encoder.pos_embedding was resampled from 1x197x32 to 1x37x32" in provenance_of(model).notes
    assert model(torch.zeros(1, 3, 96, 96)).shape == (1, 3)


def little_vit(image_size: int = 224, **options: Any) -> nn.Module:
    model: nn.Module = models.VisionTransformer(image_size, 16, 2, 2, 32, 64, **options)
    return model


# published weights


@pytest.fixture
def published() -> Weights:
    return weights("shufflenet_v2_x0_5")


class File(NamedTuple):
    """Published file with the digest in its name, and one with a wrong name."""

    store: Store
    name: str
    digest: str
    wrong: str = "model-00000000.pth"


@pytest.fixture
def file(store: Store, published: Weights) -> File:  # noqa: F811
    stream = io.BytesIO()
    torch.save(published, stream)
    digest = hashlib.sha256(stream.getvalue()).hexdigest()
    found = File(store, f"model-{digest[:8]}.pth", digest)
    store.answers |= dict.fromkeys((found.name, found.wrong), (200, stream.getvalue()))
    return found


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return tmp_path / "torch" / "hub" / "checkpoints"


def test_published_weights_are_downloaded_once_into_the_torch_cache(
    file: File, cache: Path, published: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = file.store.url(file.name)
    monkeypatch.setattr(models.ShuffleNet_V2_X0_5_Weights.DEFAULT.value, "url", url)
    for _ in range(2):
        model = load_model(SMALL)
        assert same(model, published)
        provenance = provenance_of(model)
        assert (provenance.weights, provenance.random) == ("tv:shufflenet_v2_x0_5.IMAGENET1K_V1", False)
        assert provenance.weights_sha256 == file.digest
    assert file.store.sent == 1
    assert [path.name for path in cache.iterdir()] == [file.name]


def test_download_with_a_wrong_hash_is_not_kept(file: File, cache: Path) -> None:
    with pytest.raises(WeightsError, match=r"tv:x: the file from .* is damaged \([\d,]+ bytes\); try again, or pass"):
        url_file("tv:x", file.store.url(file.wrong))
    assert not cache.exists()


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://no.such.host.invalid"])
def test_unreachable_url_gives_a_fix_within_seconds(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if url.endswith(".invalid"):  # a real name server may take longer than any limit of ours

        def unknown(*_address: Any, **_options: Any) -> Any:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        monkeypatch.setattr(socket, "getaddrinfo", unknown)
    url = f"{url}/model-00000000.pth"
    started = time.monotonic()
    with pytest.raises(WeightsError) as caught:
        url_file("tv:x", url)
    text = str(caught.value)
    assert text.startswith("tv:x: weights are not cached and ")
    assert f"; save {url} in {cache}, or pass a checkpoint as weights=FILE, or weights='none'" in text
    assert "\n" not in text
    assert time.monotonic() - started < 10


def test_unwritable_cache_is_an_error(file: File, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file")
    with pytest.raises(WeightsError, match=r"cannot be written; set TORCH_HOME to a writable folder, or pass"):
        url_file("tv:x", file.store.url(file.name))


# pixels and classes


PRESETS = ["mobilenet_v2.IMAGENET1K_V1", "mobilenet_v2.IMAGENET1K_V2", "efficientnet_b1.IMAGENET1K_V1", "mobilenet_v3_small"]


@pytest.mark.parametrize("name", PRESETS)
def test_pixels_match_the_transform_of_the_weights(name: str, photo: Image.Image) -> None:
    model = load_model(f"tv:{name}", weights="none")
    architecture, _, tag = name.partition(".")
    expected = models.get_model_weights(architecture)[tag or "DEFAULT"].transforms()(photo)
    made = prepare(photo, model)
    torch.testing.assert_close(made.pixels[0], expected, rtol=0, atol=1e-6)
    assert input_spec(model).size == tuple(expected.shape[1:])


def test_another_size_keeps_the_crop_proportion(photo: Image.Image) -> None:
    model = load_model(SMALL, weights="none", img_size=112)
    spec = input_spec(model, 112)
    assert spec.size == (112, 112)
    usual = prepare(photo, load_model(SMALL, weights="none")).geometry.window
    assert tuple(prepare(photo, model).geometry.window) == pytest.approx(tuple(usual), abs=0.5)
    assert input_spec(model, (128, 224)).size == (128, 224)  # a CNN takes any size
    with pytest.raises(OptionError, match=r"takes only 64 x 64 pixels, got 224 x 224. Build it with load_model\(img_size=224\)"):
        input_spec(little_vit(image_size=64), 224)


def test_model_instance_gets_the_default_transform(photo: Image.Image) -> None:
    expected = models.ResNet18_Weights.DEFAULT.transforms()(photo)
    torch.testing.assert_close(prepare(photo, models.squeezenet1_1()).pixels[0], expected, rtol=0, atol=1e-6)
    assert input_spec(little_vit(image_size=64)).size == (64, 64)
    assert input_spec(little_vit(image_size=64)).stride == (16, 16)


def test_one_channel_model_receives_the_luminance(photo: Image.Image) -> None:
    model: Any = models.shufflenet_v2_x0_5()
    model.conv1[0] = nn.Conv2d(1, 24, 3, 2, 1)
    assert prepare(photo, model).pixels.shape == (1, 1, 224, 224)
    assert len(input_spec(model).mean) == len(input_spec(model).std) == 1


HEADS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "fc": (models.shufflenet_v2_x0_5, "fc"),
    "classifier": (models.mobilenet_v2, "classifier.1"),
    "classifier of convolutions": (models.squeezenet1_1, "classifier.1"),
    "heads": (lambda: little_vit(num_classes=1000), "heads.head"),
    "head": (lambda: zoo.FAMILIES["torchvision swin"].build((64, 96)), "head"),
}


@pytest.mark.parametrize("case", list(HEADS))
def test_classification_layer_is_found(case: str) -> None:
    build, expected = HEADS[case]
    model = build().eval()
    name, classes = family.head_of(model)
    assert name == expected
    assert classes == model(torch.zeros(2, 3, *((64, 96) if case == "head" else (224, 224)))).shape[1]
    assert input_spec(model).classifier


def test_model_without_head_is_not_a_classifier() -> None:
    model = models.shufflenet_v2_x0_5()
    model.fc = nn.Identity()
    assert not input_spec(model).classifier
    assert labels(model) is None


def test_classes_of_imagenet_have_names() -> None:
    model, entry = models.squeezenet1_1(), models.SqueezeNet1_1_Weights.DEFAULT
    assert labels(model) is None
    family.remember(model, entry.transforms(), entry.meta["categories"])
    known = labels(model)
    assert known is not None
    assert (len(known), known[282], known[967]) == (1000, "tiger cat", "espresso")


# tokens


@pytest.fixture
def vit() -> Any:
    torch.manual_seed(0)
    model = zoo.FAMILIES["torchvision vit"].build(zoo.SQUARE).eval()
    nn.init.normal_(dict(model.named_parameters())["heads.head.weight"])  # it is initialized to 0
    return model


def test_parts_of_a_vision_transformer_are_found(vit: Any) -> None:
    pixels = torch.randn(2, 3, *zoo.SQUARE)
    block: list[Tensor] = []
    handle = vit.encoder.layers[1].register_forward_hook(lambda _, args, out: block.extend((args[0], out)))
    with torch.no_grad(), visattn.capture(vit, values=True, features="all") as made:
        output = vit(pixels)
    handle.remove()
    assert made.readout == "cls"
    assert [feature.layer for feature in made.features] == [
        "encoder.layers.encoder_layer_0",
        "encoder.layers.encoder_layer_1",
        "encoder.ln",
    ]
    assert all(feature.layout is not None and feature.layout.prefix == ("cls",) for feature in made.features)
    assert made[1].residual is not None
    torch.testing.assert_close(made[1].residual, block[0])
    assert made[1].output_weight is not None
    assert torch.equal(made[1].output_weight, vit.encoder.layers[1].self_attention.out_proj.weight)
    read_out = head(vit)
    assert read_out is not None
    torch.testing.assert_close(read_out(block[1]), output)


def test_stages_of_swin_are_found_with_their_grids() -> None:
    model = zoo.FAMILIES["torchvision swin"].build((64, 96)).eval()
    with torch.no_grad(), visattn.capture(model, features="all") as made:
        model(torch.randn(1, 3, 64, 96))
    assert made.readout == "mean"
    assert [feature.layer for feature in made.features] == ["features.1", "features.3", "features.5", "norm"]
    assert [feature.layout.grid for feature in made.features if feature.layout] == [(16, 24), (8, 12), (4, 6), (4, 6)]


@pytest.mark.parametrize("name", ["relevance", "legrad", "norm_attention", "gradcam", "layercam"])
def test_methods_explain_a_vision_transformer_of_torchvision(name: str, vit: Any, photo: Image.Image) -> None:
    found = visattn.explain(vit, photo, method=name)
    assert found.map.layout.grid == (4, 4)
    assert float(found.map.values.max()) > 0


def test_deep_copy_gives_the_same_description(vit: Any) -> None:
    copied = copy.deepcopy(vit)
    assert cam_layer(copied) == cam_layer(vit) == "encoder.layers.encoder_layer_1.ln_1"
    assert input_spec(copied).size == input_spec(vit).size
