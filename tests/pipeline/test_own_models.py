"""Models of a user: what they receive, and that maps lie where the pixels came from.

Inputs are compared with transforms applied by hand. For positions, the pixels under one cell are changed: that must change the features
of this cell most, as the model computes them outside of any capture of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import transforms

import visattn
from tests import tiny
from visattn.errors import OptionError

IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class Block(nn.Module):
    """A transformer block with fused attention."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj, self.heads = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads

    def forward(self, x: Tensor) -> Tensor:
        batch, count, dim = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(batch, count, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, count, dim))


class ViT(nn.Module):
    """A vision transformer with a learned position for each patch, so it takes one size."""

    def __init__(
        self, size: tuple[int, int], patch: int, channels: int = 3, token: bool = True, stem: nn.Module | None = None
    ) -> None:
        super().__init__()
        dim = 16
        self.stem = stem or nn.Conv2d(channels, dim, patch, patch)
        self.cls = nn.Parameter(torch.randn(1, 1, dim)) if token else None
        self.position = nn.Parameter(torch.randn(1, token + size[0] // patch * (size[1] // patch), dim))
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.head = nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = x if self.cls is None else torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        x = x + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1) if self.cls is None else x[:, 0])


def convolutions(channels: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, 2, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3, 2, 1),
    )


class CNN(nn.Module):
    """A convolutional network whose pooling is a module, a function, a mean, or flattening."""

    def __init__(self, pool: str, side: int = 0, channels: int = 3) -> None:
        super().__init__()
        self.features, self.pool = convolutions(channels), pool
        self.average = nn.AdaptiveAvgPool2d(1) if pool == "module" else None
        self.head = nn.Linear(12 * (side // 8) ** 2 if pool == "flatten" else 12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.features(x))
        if self.average is not None:
            return self.head(self.average(x).flatten(1))
        pooled = {
            "function": lambda: F.adaptive_avg_pool2d(x, 1).flatten(1),
            "mean": lambda: x.mean((2, 3)),
            "flatten": lambda: x.flatten(1),
        }
        return self.head(pooled[self.pool]())


class Declared(ViT):
    """A model that states its input, as open_clip's do."""

    def __init__(self) -> None:
        super().__init__((64, 128), 16)
        self.img_size = (64, 128)
        self.preprocess_cfg = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}


def stem() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 4, 4))


# a model, its options, and its input as (size, mean, std)
OWN: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], tuple[tuple[int, int], list[float], list[float]]]] = {
    "ViT of 96 px": (lambda: ViT((96, 96), 8), {}, ((96, 96), *IMAGENET)),
    "ViT of 64 x 128 px that declares it": (Declared, {}, ((64, 128), [0.1, 0.2, 0.3], [0.4, 0.5, 0.6])),
    "ViT of 128 x 64 px": (lambda: ViT((128, 64), 16), {"img_size": (128, 64)}, ((128, 64), *IMAGENET)),
    "ViT without a class token, own normalization": (
        lambda: ViT((112, 112), 14, token=False),
        {"mean": [0.5] * 3, "std": [0.25] * 3},
        ((112, 112), [0.5] * 3, [0.25] * 3),
    ),
    "gray ViT": (lambda: ViT((56, 56), 8, 1), {"mean": [0.3], "std": [0.2]}, ((56, 56), [0.3], [0.2])),
    "CNN with a pooling module": (lambda: CNN("module"), {"img_size": 512}, ((512, 512), *IMAGENET)),
    "CNN with a pooling function": (lambda: CNN("function"), {"img_size": 128}, ((128, 128), *IMAGENET)),
    "CNN with a mean": (lambda: CNN("mean"), {"img_size": (96, 160)}, ((96, 160), *IMAGENET)),
    "CNN that flattens": (lambda: CNN("flatten", 160), {}, ((160, 160), *IMAGENET)),
    "gray CNN": (lambda: CNN("mean", channels=1), {"mean": [0.5], "std": [0.5]}, ((224, 224), [0.5], [0.5])),
    "convolutions, then a transformer": (lambda: ViT((128, 128), 8, stem=stem()), {}, ((128, 128), *IMAGENET)),
}


@pytest.fixture
def photo() -> Image.Image:
    return visattn.load_image("photo:chelsea")


def received(model: nn.Module, call: Callable[[], Any]) -> Tensor:
    """Return the first input that a model receives in a call."""
    inputs: list[Tensor] = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: inputs.append((*args, *kwargs.values())[0]), with_kwargs=True
    )
    call()
    handle.remove()
    return inputs[0].detach()


@pytest.mark.parametrize("name", OWN)
def test_model_receives_its_input(name: str, photo: Image.Image) -> None:
    make, options, (size, mean, std) = OWN[name]
    model = make().eval()
    pixels = received(model, lambda: visattn.explain(model, photo, **options))
    steps = [
        transforms.Resize(min(size), transforms.InterpolationMode.BICUBIC),
        transforms.CenterCrop(size),
        transforms.ToTensor(),
    ]
    # the shorter side of the photo becomes that of the input if this covers it, as in the usual evaluation transform
    scale = max(size[0] / photo.height, size[1] / photo.width)
    steps[0] = transforms.Resize((round(photo.height * scale), round(photo.width * scale)), transforms.InterpolationMode.BICUBIC)
    gray = [transforms.Grayscale()] if len(mean) == 1 else []
    expected = transforms.Compose([*gray, *steps, transforms.Normalize(mean, std)])(photo)
    assert pixels.shape[1:] == expected.shape
    assert float((pixels[0] - expected).abs().mean()) * max(std) < 0.02


@pytest.mark.parametrize("name", OWN)
def test_map_lies_where_the_pixels_came_from(name: str, photo: Image.Image) -> None:
    make, options, _ = OWN[name]
    model = make().eval()
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.stride != module.kernel_size:
            nn.init.constant_(module.weight, 0.1)  # overlapping windows: the middle of a window counts most
    prepared = visattn.prepare(photo, model, **options)
    found = visattn.explain(model, photo, method="attention" if isinstance(model, ViT) else "gradcam", **options)
    rows, columns = found.map.layout.grid
    box = found.map.layout.box
    layer = "blocks.0" if isinstance(model, ViT) else str(found.provenance.parameters["layer"])
    prefix = len(found.map.layout.prefix)
    plain = features(model, layer, prepared.pixels, prefix)
    for row, column in [(0, 0), (rows - 1, 0), (rows // 2, columns // 3), (rows - 1, columns - 1)]:
        top, left = (int(x) for x in (box.top + row * box.height / rows, box.left + column * box.width / columns))
        lit = prepared.pixels.clone()
        lit[..., top : top + int(box.height / rows), left : left + int(box.width / columns)] += 5
        change = (features(model, layer, lit, prefix) - plain).abs().sum(0)
        assert divmod(int(change.argmax()), columns) == (row, column)


def features(model: nn.Module, layer: str, pixels: Tensor, prefix: int) -> Tensor:
    """Return the features of a layer as `(channels, cells)`; for a transformer, before any token attended to another."""
    kept: list[Tensor] = []
    early = "blocks.0" if layer.startswith("blocks") else layer
    handle = model.get_submodule(early).register_forward_hook(
        lambda _, args, out: kept.append(args[0] if early != layer else out)
    )
    with torch.no_grad():
        model(pixels)
    handle.remove()
    one = kept[0][0]
    return one[prefix:].T if one.ndim == 2 else one.flatten(1)


TINY: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
HUGGING: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "ViT, squashed": (
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**TINY, image_size=64, patch_size=8)),
        lambda: transformers.ViTImageProcessor(size={"height": 64, "width": 64}, image_mean=[0.5] * 3, image_std=[0.5] * 3),
    ),
    "DeiT, resized and cropped": (
        lambda: transformers.DeiTForImageClassification(transformers.DeiTConfig(**TINY, image_size=96, patch_size=16)),
        lambda: transformers.DeiTImageProcessor(size={"height": 128, "width": 128}, crop_size={"height": 96, "width": 96}),
    ),
    "CLIP's image tower": (
        lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**TINY, image_size=112, patch_size=16)),
        lambda: transformers.CLIPImageProcessor(size={"shortest_edge": 112}, crop_size={"height": 112, "width": 112}),
    ),
    "ConvNeXt": (
        lambda: transformers.ConvNextForImageClassification(
            transformers.ConvNextConfig(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], image_size=128)
        ),
        lambda: transformers.ConvNextImageProcessor(size={"shortest_edge": 128}, crop_pct=0.875),
    ),
}


@pytest.fixture
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Any]:
    """Save a model of transformers with its image processor, and load both."""
    make, processor = HUGGING[request.param]
    torch.manual_seed(0)
    built = make()
    built.save_pretrained(tmp_path)
    processor().save_pretrained(tmp_path)
    return type(built).from_pretrained(tmp_path).eval(), transformers.AutoImageProcessor.from_pretrained(tmp_path)


@pytest.mark.parametrize("saved", HUGGING, indirect=True)
def test_model_of_transformers_gets_the_input_of_its_processor(saved: tuple[Any, Any], photo: Image.Image) -> None:
    model, processor = saved
    found = visattn.explain(model, photo)
    assert torch.equal(
        received(model, lambda: visattn.explain(model, photo)), processor(images=photo, return_tensors="pt")["pixel_values"]
    )
    assert {fact["source"] for fact in found.provenance.preprocessing.values()} == {"model"}
    assert not [text for text in found.provenance.warnings if "assumed" in text]


@pytest.mark.parametrize("saved", HUGGING, indirect=True)
def test_processor_given_by_hand_is_the_same(saved: tuple[Any, Any], photo: Image.Image) -> None:
    model, processor = saved
    own, given = visattn.prepare(photo, model), visattn.prepare(photo, model, transform=processor)
    assert torch.equal(own.pixels, given.pixels)
    assert own.geometries == given.geometries
    assert given.preprocessing["mean"]["source"] == "given"


def blocks_by_hand(model: nn.Module, names: list[str], pixels: Tensor) -> list[Tensor]:
    """Return what the named modules give, as `(patches and other tokens, channels)`."""
    kept: list[Any] = []
    handles = [model.get_submodule(name).register_forward_hook(lambda _m, _a, out: kept.append(out)) for name in names]
    with torch.no_grad():
        model(pixels)
    for handle in handles:
        handle.remove()
    firsts = [out[0] if isinstance(out, tuple) else out for out in kept]
    return [one[0] if one.ndim == 3 else one[0].flatten(1).T for one in firsts]


BLOCKS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "own": (lambda: ViT((64, 128), 16), ["blocks.0", "blocks.1"]),
    "own inside a module": (lambda: nn.Sequential(ViT((64, 64), 8)), ["0.blocks.0", "0.blocks.1"]),
    "convolutions, then a transformer": (OWN["convolutions, then a transformer"][0], ["blocks.0", "blocks.1"]),
    "ViT of transformers": (HUGGING["ViT, squashed"][0], ["vit.layers.0", "vit.layers.1"]),
    "Swin of transformers": (
        lambda: transformers.SwinModel(
            transformers.SwinConfig(image_size=64, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4)
        ),
        ["encoder.layers.0", "encoder.layers.1"],
    ),
    "SegFormer of transformers": (
        lambda: tiny.centered(
            transformers.SegformerModel(
                transformers.SegformerConfig(
                    depths=[1, 1], hidden_sizes=[8, 16], num_attention_heads=[1, 2], num_encoder_blocks=2
                )
            )
        ),
        ["stages.0", "stages.1"],
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_tokens_of_every_block_are_kept(name: str, photo: Image.Image) -> None:
    make, names = BLOCKS[name]
    torch.manual_seed(1)
    model = make().eval()
    prepared = visattn.prepare(photo, model, img_size=(64, 128)) if name == "own" else visattn.prepare(photo, model)
    with visattn.capture(model, features="all") as recording:
        model(prepared.pixels)
    assert [feature.layer for feature in recording.features] == names
    for feature, expected in zip(recording.features, blocks_by_hand(model, names, prepared.pixels), strict=True):
        assert torch.allclose(feature.value[0], expected, atol=1e-6)  # threads may add in another order
    with visattn.capture(model) as recording:
        model(prepared.pixels)
    assert [feature.layer for feature in recording.features] == names[-1:]


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("number", [0, 1])
def test_similarity_of_an_own_model_is_the_cosine_of_its_tokens(name: str, number: int, photo: Image.Image) -> None:
    make, names = BLOCKS[name]
    torch.manual_seed(1)
    model = make().eval()
    options: dict[str, Any] = {"img_size": (64, 128)} if name == "own" else {}
    found = visattn.explain(model, photo, method="similarity", query="patch:2,3", layer=number, **options)
    tokens = blocks_by_hand(model, names[number : number + 1], visattn.prepare(photo, model, **options).pixels)[0].double()
    patches = tokens[len(tokens) - found.map.values.numel() :]
    query = patches[2 * found.map.values.shape[1] + 3]
    expected = [float(one @ query / one.norm() / query.norm()) for one in patches]
    assert np.allclose(found.map.values.flatten(), expected, atol=1e-6)


def test_unknown_layer_of_a_cnn_is_refused_with_its_feature_maps(photo: Image.Image) -> None:
    class Hidden(CNN):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(x.sum() != 3)  # reads a value, which a dry run on the meta device has not

    with pytest.raises(OptionError, match=r"the layer for Grad-CAM is unknown. Name it: layer=NAME; feature maps: .*features"):
        visattn.explain(Hidden("mean").eval(), photo, method="gradcam")


@pytest.mark.parametrize("layer", [None, 0, 2])
def test_map_of_convolutions_without_padding_covers_a_part_of_the_input(layer: int | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 5), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(4 * 24 * 17, 3)).eval()
    photo = np.random.default_rng(0).integers(0, 256, (200, 144, 3), np.uint8)
    found = visattn.explain(model, photo, img_size=(100, 72), **({} if layer is None else {"layer": layer, "method": "gradcam"}))
    box = found.map.layout.box
    assert (box.top, box.left) == (2, 2)
    heat = found.heatmap()
    assert tuple(heat.seen) == (4, 4, 2 * box.bottom, 2 * box.right)
    painted = np.asarray(found.overlay(blend="constant"))
    assert np.array_equal(painted[:4], photo[:4])
    assert (painted[4:8, 4:8] != photo[4:8, 4:8]).any()


def test_height_and_width_are_taken_as_they_are(photo: Image.Image) -> None:
    model = visattn.load_model("vit_tiny_patch16_224", weights="none")
    pair, side = (visattn.prepare(photo, model, img_size=size, resize="fit") for size in ((224, 224), 224))
    assert pair.pixels.shape == (1, 3, 224, 224)
    assert side.pixels.shape == (1, 3, 176, 272)


def test_five_channels_come_as_an_array() -> None:
    model = ViT((64, 64), 8, 5).eval()
    found = visattn.explain(model, np.random.default_rng(0).integers(0, 256, (70, 90, 5), np.uint8), mean=[0.5], std=[0.5])
    assert found.map.layout.grid == (8, 8)
