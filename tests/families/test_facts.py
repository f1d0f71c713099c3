"""Facts of weights: copies and wrappers keep them, changed weights do not, and nothing is taken from an architecture or a count."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import huggingface_hub.constants
import lightning
import pytest
import safetensors.torch
import timm
import torch
import torchvision
import transformers
from torch import nn
from torch.optim.swa_utils import AveragedModel

import visattn
from tests.samples import sampled
from visattn.core.families import input_spec, labels
from visattn.core.families.wrappers import unwrapped

PHOTO = "photo:chelsea"
Changed = Callable[[nn.Module], nn.Module]


def pickled(model: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded: nn.Module = torch.load(stream, weights_only=False)
    return loaded


def averaged(model: nn.Module) -> nn.Module:
    made = AveragedModel(model)
    made.update_parameters(model)
    return made


class Around(lightning.LightningModule):  # type: ignore[misc]
    """Module with a model in it; what it does before and after is given."""

    def __init__(
        self, net: nn.Module, before: Callable[[Any], Any] = lambda x: x, after: Callable[[Any], Any] = lambda x: x
    ) -> None:
        super().__init__()
        self.net, self.before, self.after = net, before, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.net(self.before(x)))  # type: ignore[no-any-return]


KEEPING: dict[str, Changed] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "average of equal weights": averaged,
    "DataParallel": nn.DataParallel,
    "compile": lambda model: cast("nn.Module", torch.compile(model)),
    "Lightning": lambda model: Around(model).eval(),
    "Lightning around DataParallel": lambda model: Around(nn.DataParallel(model)).eval(),
    "Lightning twice": lambda model: Around(Around(model)).eval(),
}


@pytest.mark.parametrize("name", sampled(["scenes_vit", "scenes_vit_shortcut", "scenes_cnn"], 3))
@pytest.mark.parametrize("how", list(KEEPING))
def test_copies_and_wrappers_have_the_facts_of_the_model(name: str, how: str) -> None:
    model = visattn.load_model(name)
    plain = visattn.explain(model, PHOTO)
    found = visattn.explain(KEEPING[how](model), PHOTO)
    assert torch.equal(found.map.values, plain.map.values)
    for fact in ("model", "weights", "weights_sha256", "preprocessing", "target", "scores", "warnings"):
        assert getattr(found.provenance, fact) == getattr(plain.provenance, fact)


def test_rounded_weights_are_the_same_weights() -> None:
    model = visattn.load_model("scenes_vit")
    for kind in (torch.float16, torch.bfloat16):
        assert labels(copy.deepcopy(model).to(kind)) == labels(model)


def test_changed_weights_lose_names_and_their_preprocessing_is_assumed() -> None:
    model = visattn.load_model("scenes_vit")
    with torch.no_grad():
        model.get_parameter("blocks.1.mlp.fc1.weight").mul_(1.01)
    spec = input_spec(model)
    assert labels(model) is None
    assert set(spec.sources.values()) == {"assumed"}
    found = visattn.explain(model, PHOTO).provenance
    assert found.weights == "scenes_vit, changed since"
    assert (
        "the weights have changed since their preprocessing and classes were stated; assumed: size 64 x 64" in found.warnings[0]
    )
    assert found.target[0].startswith("output ")


def test_a_trained_random_model_is_not_called_random() -> None:
    model = visattn.load_model("vit_tiny_patch16_224", weights="none")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    found = visattn.explain(model, PHOTO, method="attention").provenance
    assert not found.random
    assert not any("random" in text for text in found.warnings)


PUBLISHED = "resnet18.a1_in1k"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty cache of the hub, and of torch's."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.file_download, "HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    monkeypatch.setattr("visattn.core.families.published.try_to_load_from_cache", _from(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "torch"))
    (tmp_path / "torch" / "checkpoints").mkdir(parents=True)
    return tmp_path


def _from(folder: Path) -> Callable[[str, str], str | None]:
    def cached(repository: str, name: str) -> str | None:
        file = folder / repository.replace("/", "--") / name
        return str(file) if file.exists() else None

    return cached


def of_timm(seed: int, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    return timm.create_model(PUBLISHED, **options).eval()  # type: ignore[no-any-return]


def test_a_timm_model_with_the_weights_of_the_cached_file_has_the_published_facts(hub: Path) -> None:
    published, other = of_timm(0), of_timm(1)
    assert labels(published) is None
    folder = hub / "hub" / "timm--resnet18.a1_in1k"
    folder.mkdir(parents=True)
    safetensors.torch.save_file(published.state_dict(), folder / "model.safetensors")
    names = labels(published)
    assert names is not None
    assert names[282].startswith("tiger cat")
    assert set(input_spec(published).sources.values()) == {"model"}
    assert labels(other) is None
    assert input_spec(other).sources["mean"] == "assumed"
    own = of_timm(2, num_classes=1000)
    own.load_state_dict({key: value for key, value in published.state_dict().items() if not key.startswith("fc.")}, strict=False)
    assert labels(own) is None, "1000 classes of its own"
    assert input_spec(own).sources["mean"] == "model"


def test_a_torchvision_model_with_the_weights_of_the_cached_file_has_the_published_facts(hub: Path) -> None:
    published, other = torchvision.models.resnet18().eval(), torchvision.models.resnet18().eval()
    assert labels(published) is None
    torch.save(published.state_dict(), hub / "torch" / "checkpoints" / "resnet18-f37072fd.pth")
    names = labels(published)
    assert names is not None
    assert names[282] == "tiger cat"
    assert set(input_spec(published).sources.values()) == {"model"}
    assert labels(other) is None
    assert set(input_spec(other).sources.values()) == {"assumed"}


def test_a_damaged_cached_file_proves_nothing(hub: Path) -> None:
    (hub / "torch" / "checkpoints" / "resnet18-f37072fd.pth").write_bytes(b"not a checkpoint")
    assert labels(torchvision.models.resnet18()) is None


def test_what_model_json_says_of_the_file_beside_it_holds_for_its_weights(tmp_path: Path) -> None:
    folder = Path("models/scenes_cnn")
    whole = visattn.load_model(str(folder))
    made = visattn.load_model("visattn_cbam_resnet14", weights=folder / "model.safetensors")
    for fact in ("size", "mean", "std", "sources"):
        assert getattr(input_spec(made), fact) == getattr(input_spec(whole), fact)
    assert labels(made) == labels(whole)
    copied = tmp_path / "model.safetensors"
    copied.write_bytes((folder / "model.safetensors").read_bytes())
    alone = visattn.load_model("visattn_cbam_resnet14", weights=copied)
    assert labels(alone) is None
    assert input_spec(alone).sources["mean"] == "assumed"


PASSING: dict[str, tuple[Changed, bool, bool]] = {  # whether the input, and whether the output passes unchanged
    "nothing": (lambda net: Around(net), True, True),
    "a softmax behind": (lambda net: Around(net, after=lambda y: y.softmax(-1)), True, False),
    "a scale before": (lambda net: Around(net, before=lambda x: x * 2), False, False),
    "a scale of bright images": (lambda net: Around(net, before=lambda x: x / 255 if x.max() > 2 else x), False, False),
    "a look at values": (lambda net: Around(net, before=lambda x: x if any(x.flatten().tolist()) else -x), False, False),
    "a look at the shape": (lambda net: Around(net, before=lambda x: x if x.shape[-1] > 1 else -x), True, True),
    "a second model": (lambda net: nn.ModuleList([Around(net), visattn.load_model("scenes_cnn")])[0], True, True),
}


@pytest.mark.parametrize("name", list(PASSING))
def test_facts_of_the_model_inside_are_used_only_if_input_and_output_pass(name: str) -> None:
    net = visattn.load_model("scenes_vit")
    make, on, back = PASSING[name]
    model = make(net).eval()
    assert (unwrapped(model) is net) is back
    assert (input_spec(model).mean == input_spec(net).mean) is on
    assert labels(model) == (labels(net) if back else None)


def test_two_models_inside_prove_nothing() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = visattn.load_model("scenes_vit"), visattn.load_model("scenes_cnn")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x)  # type: ignore[no-any-return]

    model = Two().eval()
    assert unwrapped(model) is model
    assert "assumed" in input_spec(model).sources.values()


NAMES = {
    "compile": "_orig_mod.layer3",
    "DataParallel": "module.layer3",
    "Lightning": "net.layer3",
    "Lightning twice": "net.net.layer3",
}


@pytest.mark.parametrize("how", list(NAMES))
def test_layers_are_known_by_the_names_of_the_wrapper(how: str) -> None:
    model = visattn.load_model("scenes_cnn")
    plain = visattn.explain(model, PHOTO, method="gradcam", layer="layer3")
    with pytest.warns(UserWarning, match=f"layer {NAMES[how]} is understood as layer3"):
        found = visattn.explain(KEEPING[how](model), PHOTO, method="gradcam", layer=NAMES[how])
    assert torch.equal(found.map.values, plain.map.values)


@pytest.mark.parametrize("method", ["auto", "relevance", "gradcam", "legrad", "pca", "similarity", "attention"])
def test_adapters_of_peft_are_explained_like_the_model_that_they_change(method: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install -e '.[dev]'")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=5, depth=3).eval()
    query: dict[str, Any] = {"query": "patch:1,2"} if method == "similarity" else {}
    plain = visattn.explain(copy.deepcopy(model), PHOTO, method=method, **query)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["qkv"])).eval()
    found = visattn.explain(adapted, PHOTO, method=method, **query)  # adapters begin as 0
    torch.testing.assert_close(found.map.values, plain.map.values)
    assert found.map.facts.layer == plain.map.facts.layer


def test_the_processor_beside_the_weights_is_looked_for_each_time(tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32, patch_size=16
    )
    built = transformers.ViTForImageClassification(config)
    built.save_pretrained(tmp_path / "model")
    model = transformers.ViTForImageClassification.from_pretrained(tmp_path / "model")
    assert input_spec(model).sources["mean"] == "assumed"
    for mean in (0.1, 0.3):  # the second replaces the first
        transformers.ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[mean] * 3).save_pretrained(
            tmp_path / "model"
        )
        assert input_spec(model).mean == (mean,) * 3
        assert input_spec(model).sources["mean"] == "model"
    (tmp_path / "model" / "preprocessor_config.json").unlink()
    assert input_spec(model).sources["mean"] == "assumed"


def test_a_processor_in_the_current_folder_is_not_that_of_a_model_from_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.1] * 3).save_pretrained(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32, patch_size=16
    )
    assert input_spec(transformers.ViTForImageClassification(config)).sources["mean"] == "assumed"
