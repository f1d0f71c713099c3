"""Activation patching beside a plain script of hooks: with the same batches to the bit, one image at a time to 1e-5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

import visattn
from visattn.core.capturing.interventions import each_part
from visattn.core.families import describe
from visattn.core.pipeline import replacing
from visattn.core.pipeline.inputs import prepare
from visattn.core.records.parts import Part
from visattn.errors import CaptureError, OptionError, ShapeError
from visattn.evaluation import patched_heads

MODELS: dict[str, tuple[str, dict[str, Any], str]] = {  # timm's name, its arguments, and the module that reads all heads
    "ViT": ("vit_tiny_patch16_224", {"img_size": 64, "depth": 3}, "attn.proj"),
    "DeiT with a second class token": ("deit_tiny_distilled_patch16_224", {"img_size": 64, "depth": 2}, "attn.proj"),
    "DINOv2 with registers": ("vit_small_patch14_reg4_dinov2", {"img_size": 56, "depth": 2}, "attn.proj"),
    "EVA with rotary positions": ("eva02_tiny_patch14_224", {"img_size": 56, "depth": 2}, "attn.proj"),
    "SigLIP": ("vit_base_patch16_siglip_224", {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 4}, "attn.proj"),
}
every = pytest.mark.parametrize("name", list(MODELS))
TARGET = 1


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    timm_name, arguments, _ = MODELS[name]
    model: nn.Module = timm.create_model(timm_name, num_classes=5, **arguments).eval().requires_grad_(requires_grad=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model


def photos(model: Any) -> list[Image.Image]:
    generator = np.random.default_rng(0)
    side = model.patch_embed.img_size[0]
    return [Image.fromarray(generator.integers(0, 255, (side, side, 3), dtype=np.uint8)) for _ in range(2)]


@torch.no_grad()
def by_hooks(
    model: Any, name: str, parts: list[tuple[int, int]], change: Callable[[Tensor, Tensor, int], None], at_once: int
) -> list[float]:
    """Return the score for each part of a block: `change(own, theirs, number)` puts part `number` of theirs, `(N, D)`, into own."""
    projections = [block.get_submodule(MODELS[name][2]) for block in model.blocks]
    pixels, other = (prepare(photo, model).pixels for photo in photos(model))
    kept = list[Tensor]()
    handles = [projection.register_forward_pre_hook(lambda _, args: kept.append(args[0].clone())) for projection in projections]
    model(other)
    for handle in handles:
        handle.remove()
    scores = list[float]()
    for start in range(0, len(parts), at_once):
        some = parts[start : start + at_once]

        def hook(module: nn.Module, args: tuple[Tensor, ...], some: list[tuple[int, int]] = some) -> tuple[Tensor, ...]:
            own = args[0].clone()
            for image, (block, number) in enumerate(some):
                if module is projections[block]:
                    change(own[image], kept[block][0], number)
            return (own,)

        handles = [projections[block].register_forward_pre_hook(hook) for block in {block for block, _ in some}]
        scores += model(pixels.expand(len(some), -1, -1, -1))[:, TARGET].tolist()
        for handle in handles:
            handle.remove()
    return scores


def plain(model: nn.Module) -> tuple[float, float]:
    with torch.no_grad():
        own, other = (float(model(prepare(photo, model).pixels)[0, TARGET]) for photo in photos(model))
    return own, other


def token(own: Tensor, theirs: Tensor, number: int) -> None:
    own[number] = theirs[number]


@every
def test_patches_equal_hooks(name: str) -> None:
    model = built(name)
    image, donor = photos(model)
    found = visattn.explain(model, image, method="patching", donor=donor, target=TARGET).map
    score, of_donor = plain(model)
    prefix, (rows, columns) = int(model.num_prefix_tokens), found.layout.grid  # type: ignore[arg-type]
    count = prefix + rows * columns
    for block, values in enumerate(found.values):
        parts = [(block, number) for number in range(count)]
        together = by_hooks(model, name, parts, token, replacing.AT_ONCE)
        alone = by_hooks(model, name, parts, token, 1)
        shares = [(each - score) / (of_donor - score) for each in together]
        assert values.flatten().tolist() == torch.tensor(shares[prefix:], dtype=torch.float64).float().tolist()
        assert np.allclose(together, alone, rtol=0, atol=1e-5 * max(1, abs(score)))
        named = dict(found.facts.numbers)
        of_prefix = [named[f"{found.labels['layer'][block]}: {token}"] for token in found.layout.prefix]
        assert of_prefix == shares[:prefix]


@every
def test_heads_equal_hooks(name: str) -> None:
    model: Any = built(name)
    image, donor = photos(model)
    found = patched_heads(model, image, donor, target=TARGET)
    score, of_donor = plain(model)
    assert (found.score, found.of_donor) == (score, of_donor)
    heads = model.blocks[0].attn.num_heads

    def head(own: Tensor, theirs: Tensor, number: int) -> None:
        width = own.shape[-1] // heads
        own[:, number * width : (number + 1) * width] = theirs[:, number * width : (number + 1) * width]

    parts = [(block, number) for block in range(len(model.blocks)) for number in range(heads)]
    expected = by_hooks(model, name, parts, head, replacing.AT_ONCE)
    assert list(found.shares.values()) == [(each - score) / (of_donor - score) for each in expected]
    assert [row["change"] for row in found.rows()] == pytest.approx([each - score for each in expected])


def test_one_layer_by_number_and_name() -> None:
    model = built("ViT")
    image, donor = photos(model)
    every = visattn.explain(model, image, method="patching", donor=donor, target=TARGET).map
    for layer in (1, -2, "blocks.1.attn"):
        one = visattn.explain(model, image, method="patching", donor=donor, target=TARGET, layer=layer).map
        assert one.axes == ()
        assert torch.equal(one.values, every.values[1])


@pytest.mark.parametrize("layer", [3, -4, "blocks.9.attn"])
def test_a_layer_that_is_not_there(layer: int | str) -> None:
    model = built("ViT")
    image, donor = photos(model)
    with pytest.raises(OptionError, match=r"must lie in \[-3, 2\]|has no layer blocks.9.attn"):
        visattn.explain(model, image, method="patching", donor=donor, target=TARGET, layer=layer)


def test_the_same_photo_has_no_difference() -> None:
    model = built("ViT")
    image, _ = photos(model)
    with pytest.raises(OptionError, match="both photos have the score"):
        visattn.explain(model, image, method="patching", donor=image, target=TARGET)


def test_a_donor_is_needed_and_named(tmp_path: Any) -> None:
    model = built("ViT")
    image, donor = photos(model)
    with pytest.raises(OptionError, match=r"method 'patching' needs donor\. For example: donor='other.jpg'"):
        visattn.explain(model, image, method="patching", target=TARGET)
    donor.save(tmp_path / "clean.png")
    found = visattn.explain(model, image, method="patching", target=TARGET, donor=tmp_path / "clean.png")
    assert found.provenance.parameters["donor"] == "clean.png"
    assert any("clean.png" in note for note in found.provenance.notes)


def test_a_photo_that_the_model_sees_at_another_size_is_refused() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, num_classes=5, dynamic_img_size=True).eval()
    small, wide = Image.new("RGB", (64, 64), "red"), Image.new("RGB", (128, 64), "blue")
    with pytest.raises(ShapeError, match="of the one photo and"):
        visattn.explain(model, small, method="patching", donor=wide, target=TARGET, resize="fit")


def test_small_differences_are_warned_of() -> None:
    model = built("ViT")
    image, _ = photos(model)
    pixels = np.array(image)
    pixels[:8, :8] = 255 - pixels[:8, :8]
    found = visattn.explain(model, image, method="patching", donor=Image.fromarray(pixels), target=TARGET, versus=2)
    whole = max(abs(share) for name, share in found.map.facts.numbers if name.endswith("all tokens"))
    assert any("choose a target in which the photos differ" in text for text in found.provenance.warnings) == (whole > 3)


class Mixing(nn.Module):
    """Classifier that subtracts the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = built("ViT")

    def forward(self, pixels: Tensor) -> Tensor:
        scores: Tensor = self.net(pixels)
        return scores - (scores.mean(0) if len(scores) > 1 else 0)


def test_models_that_mix_images_run_them_one_by_one() -> None:
    image, donor = photos(built("ViT"))
    mixing, plain_model = Mixing().eval(), built("ViT")
    found, expected = (
        visattn.explain(model, image, method="patching", donor=donor, target=TARGET, layer=0).map.values
        for model in (mixing, plain_model)
    )
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_call_that_did_not_run_is_refused() -> None:
    model = built("ViT")
    pixels = torch.rand(1, 3, 64, 64)
    with (
        pytest.raises(CaptureError, match="no call 1 of blocks"),
        torch.no_grad(),
        each_part(model, describe(model, None, 0), [Part("blocks.0.attn", 1)]),
    ):
        model(pixels)
