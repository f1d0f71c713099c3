"""Registration in timm: it builds our networks by name once `visattn.models` is imported."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import timm.data
import torch
from timm.models import _registry as timms

from visattn import load_model, models
from visattn.core.loading import timm_models
from visattn.errors import OptionError, WeightsError

OTHERS = "visattn_local_features", "visattn_predictive_vit", "visattn_sliding_vit", "visattn_vit_c"
BUILT = {
    f"visattn_{attention}_{build}" if attention else f"visattn_{build}": (build, attention)
    for attention in (None, "se", "cbam", "eca", "bam")
    for build in ("resnet14", "resnet18", "resnet20", "resnet50", "resnet56")
}


def test_exactly_our_names_are_registered_in_timm() -> None:
    assert sorted(timm.list_models("visattn_*")) == sorted([*BUILT, *OTHERS])
    assert timm.list_models("visattn_*", pretrained=True) == []
    assert not set(BUILT) & set(timms._module_to_models["resnet"])  # the file of that name is timm's


@pytest.mark.parametrize("name", BUILT)
def test_a_name_builds_the_named_architecture_and_attention(name: str) -> None:
    build, attention = BUILT[name]
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=5, in_chans=2)
        same = getattr(models, build)(attention=attention, num_classes=5, in_channels=2)
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    assert isinstance(model, models.ResNet)
    assert shapes == {key: value.shape for key, value in same.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "size", "mean", "classes"),
    [
        ("visattn_cbam_resnet18", (3, 224, 224), (0.485, 0.456, 0.406), 1000),
        ("visattn_cbam_resnet20", (3, 32, 32), (0.4914, 0.4822, 0.4465), 10),
    ],
)
def test_timm_resolves_the_preprocessing(name: str, size: tuple[int, ...], mean: tuple[float, ...], classes: int) -> None:
    model = timm.create_model(name)
    config = timm.data.resolve_model_data_config(model)
    assert (config["input_size"], config["mean"], model.num_classes) == (size, mean, classes)
    assert model.get_classifier().out_features == classes


def test_unpublished_pretrained_weights_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"[Nn]o pretrained weights exist for visattn_se_resnet20.*pretrained=False"):
        timm.create_model("visattn_se_resnet20", pretrained=True)
    with pytest.raises(WeightsError, match="visattn_se_resnet20: has no published weights"):
        load_model("visattn_se_resnet20")


def test_nonzero_dropout_is_refused() -> None:
    timm.create_model("visattn_resnet20", drop_rate=0.0)
    with pytest.raises(OptionError, match=r"visattn_resnet20 has no dropout, got drop_rate=0\.1"):
        timm.create_model("visattn_resnet20", drop_rate=0.1)


@pytest.mark.parametrize("name", ["visattn_bam_resnet18", "visattn_cbam_resnet20", "visattn_resnet14"])
def test_features_only_returns_the_intermediate_feature_maps(name: str) -> None:
    image = torch.randn(2, 3, 64, 64)
    torch.manual_seed(1)
    model = timm.create_model(name).eval()
    torch.manual_seed(1)
    features = timm.create_model(name, features_only=True).eval()
    maps = features(image)
    assert [x.shape[1] for x in maps] == features.feature_info.channels()
    assert [64 // x.shape[2] for x in maps] == features.feature_info.reduction()
    assert torch.equal(maps[-1], model.forward_features(image))


def test_our_loader_loads_registered_models_by_name() -> None:
    model, provenance = timm_models.load("visattn_cbam_resnet20", "none", 0, None)
    assert isinstance(model, models.ResNet)
    assert provenance.random
    assert not model.training


def test_a_custom_checkpoint_is_loaded_with_its_number_of_classes(tmp_path: Path) -> None:
    trained = models.resnet20(attention="cbam", num_classes=4)
    torch.save(trained.state_dict(), tmp_path / "trained.pth")
    model = load_model("visattn_cbam_resnet20", weights=str(tmp_path / "trained.pth"))
    image = torch.randn(1, 3, 32, 32)
    assert torch.equal(model(image), trained.eval()(image))
