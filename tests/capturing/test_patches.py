"""Results of attention heads of another forward pass, put in: bit for bit what a plain script of hooks gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import visattn
from tests.capturing.test_intervene import hiera, swin
from tests.capturing.test_terms import Small
from visattn.errors import LayoutError, OptionError, ShapeError


def vit() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.models.vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=3, num_classes=5, reg_tokens=1
    )
    return model.eval()


def images(count: int, seed: int, side: int = 32) -> Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def recorded(model: nn.Module, pixels: Tensor) -> visattn.Recording:
    with torch.no_grad(), visattn.capture(model, outputs=True) as recording:
        model(pixels)
    return recording


@torch.no_grad()
def patched(model: nn.Module, pixels: Tensor, **options: Any) -> Tensor:
    with visattn.intervene(model, **options):
        out: Tensor = model(pixels)
    return out


@torch.no_grad()
def by_hooks(model: nn.Module, pixels: Tensor, other: Tensor, change: Callable[[Tensor, Tensor], Tensor], layer: str) -> Tensor:
    """Run with the input of a layer's projection changed by a function of this input and that of the other images."""
    projection, kept = model.get_submodule(f"{layer}.proj"), list[Tensor]()
    handle = projection.register_forward_pre_hook(lambda _, args: kept.append(args[0].clone()))
    model(other)
    handle.remove()
    handle = projection.register_forward_pre_hook(lambda _, args: (change(args[0].clone(), kept[0]),))
    out: Tensor = model(pixels)
    handle.remove()
    return out


@pytest.mark.parametrize("count", [1, 4])
def test_heads_and_tokens_of_another_photo_equal_hooks_to_the_bit(count: int) -> None:
    model, pixels, other = vit(), images(count, 0), images(1, 1)

    def change(own: Tensor, theirs: Tensor) -> Tensor:
        for token in (0, 7):
            own[:, token, 8:16] = theirs[:, token, 8:16]  # head 1 of three
        return own

    expected = by_hooks(model, pixels, other, change, "blocks.1.attn")
    found = patched(model, pixels, layer="blocks.1.attn", patch=recorded(model, other), head=1, token=[0, 7])
    assert torch.equal(found, expected)
    assert not torch.allclose(found, model(pixels))


@pytest.mark.parametrize(("build", "side"), [(swin, 32), (hiera, 64)], ids=["shifted windows", "mask units"])
def test_all_heads_of_another_photo_in_windows_give_its_attention(build: Callable[[], nn.Module], side: int) -> None:
    torch.manual_seed(0)
    model = build()
    pixels, other = images(2, 0, side), images(2, 1, side)
    recording = recorded(model, other)
    name = recording[-1].layer
    expected = by_hooks(model, pixels, other, lambda _, theirs: theirs, name)
    assert torch.equal(patched(model, pixels, layer=name, patch=recording), expected)


def test_every_layer_of_another_photo_gives_its_attention_and_nothing_else() -> None:
    model, pixels, other = vit(), images(1, 0), images(1, 1)
    same = patched(model, pixels, layer="blocks.*", patch=recorded(model, pixels))
    with torch.no_grad():
        assert torch.equal(same, model(pixels))
    assert not torch.allclose(patched(model, pixels, layer="blocks.*", patch=recorded(model, other)), same)


def test_results_are_kept_in_the_order_of_the_record() -> None:
    model, pixels = vit(), images(2, 0)
    recording = recorded(model, pixels)
    for record in recording:
        assert record.output is not None
        expected = record.operator.dense() @ recording_values(model, pixels, record.layer)
        torch.testing.assert_close(record.output, expected, rtol=1e-4, atol=1e-6)
        assert torch.equal(record.image(1, 2).output, record.output[1:])  # type: ignore[arg-type]


def recording_values(model: nn.Module, pixels: Tensor, layer: str) -> Tensor:
    with torch.no_grad(), visattn.capture(model, values=True) as recording:
        model(pixels)
    return recording.values(layer)


def test_attention_that_is_written_out_is_patched_too() -> None:
    torch.manual_seed(0)
    model = Small(written=True).eval()
    pixels, other = images(1, 0, 16), images(1, 1, 16)
    recording = recorded(model, other)
    assert recording[0].output is not None
    assert torch.equal(patched(model, pixels, layer="*", patch=recorded(model, pixels)), model(pixels))
    found = patched(model, pixels, layer=recording[0].layer, patch=recording)
    assert not torch.allclose(found, model(pixels))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"token": [99]}, OptionError, "token must lie in"),
        ({"head": 5}, OptionError, "head must lie in"),
        ({"scale": 0.0}, OptionError, "no edit of its weights goes with it"),
    ],
)
def test_patches_that_do_not_fit_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model = vit()
    with pytest.raises(error, match=message):
        patched(model, images(1, 0), layer="blocks.1.attn", patch=recorded(model, images(1, 1)), **options)


def test_recordings_that_hold_no_such_results_are_refused() -> None:
    model = vit()
    with torch.no_grad(), visattn.capture(model) as recording:
        model(images(1, 1))
    with pytest.raises(OptionError, match=r"blocks\.1\.attn has no result in the other recording. Record it with"):
        patched(model, images(1, 0), layer="blocks.1.attn", patch=recording)
    with pytest.raises(ShapeError, match="Record the other photo alone or in as many"):
        patched(model, images(3, 0), layer="blocks.1.attn", patch=recorded(model, images(2, 1)))
    with pytest.raises(OptionError, match="token names queries whose result a patch replaces"):
        patched(model, images(1, 0), layer="blocks.1.attn", token=0)


def test_tokens_without_a_place_cannot_be_patched() -> None:
    class Unplaced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, pixels: Tensor) -> Tensor:
            tokens = pixels.flatten(1)[:, :64].sort(1).values.view(len(pixels), 8, 8)
            out, _ = self.attn(tokens, tokens, tokens, need_weights=False)
            return out  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Unplaced().eval()
    recording = recorded(model, images(1, 1))
    if recording[0].reason is None:
        pytest.skip("these tokens have a place")
    with pytest.raises(LayoutError, match="so its tokens cannot be numbered"):
        patched(model, images(1, 0), layer="attn", patch=recording)
