"""Queries and keys of attention that models write out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

import visattn
from visattn.core.records import Recording
from visattn.errors import OptionError

PHOTO = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))


def recorded(model: nn.Module, pixels: Tensor = PHOTO, *, twice: bool = False) -> Recording:
    """Record with values; with `twice`, a second forward pass."""
    for _ in range(1 + twice):
        with torch.no_grad(), visattn.capture(model, values=True) as recording:
            model(pixels)
    return recording


def outputs(model: nn.Module, name: str, pixels: Tensor = PHOTO) -> Tensor:
    """Return what a module of the model returns."""
    found: list[Tensor] = []
    hook = model.get_submodule(name).register_forward_hook(lambda _, __, out: found.append(out))
    with torch.no_grad():
        model(pixels)
    hook.remove()
    return found[0]


class Written(nn.Module):
    """Attention on 4 x 6 patches that is written out; `weigh` makes the weights of queries, keys and their scale."""

    def __init__(self, weigh: Callable[[Tensor, Tensor], Tensor], heads: int = 2) -> None:
        """Build the layers."""
        super().__init__()
        torch.manual_seed(1)
        self.patches, self.qkv, self.heads, self.weigh = nn.Conv2d(3, 16, 16, 16), nn.Linear(16, 48), heads, weigh

    def forward(self, x: Tensor) -> Tensor:
        """Attend, and average the tokens."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        q, k, v = (one.unflatten(2, (self.heads, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        mixed: Tensor = self.weigh(q, k) @ v
        return mixed.transpose(1, 2).flatten(2).mean(1)


def overwritten(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.mT
    q.zero_()
    return scores.softmax(-1)


def in_place(q: Tensor, k: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3))
    scores *= 0.3
    scores += torch.linspace(0, 1, 24)
    part = scores[:, :, 2:]
    part.add_(0.1)
    scores[:, :, 1:] = scores[:, :, 1:] + 0.2
    return scores.softmax(-1)


def by_windows(q: Tensor, k: Tensor) -> Tensor:
    """Score in groups of heads that are merged and split again."""
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(2, 2, 24, 24)
    return scores.permute(0, 2, 3, 1).softmax(2).permute(0, 3, 1, 2)


def moved(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.mT
    scores[:, :, 1:] = scores[:, :, :-1].clone()
    return scores.softmax(-1)


FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda q, k: (q * 0.5 @ k.mT).softmax(-1),
    "keys first": lambda q, k: torch.matmul(k, q.mT).mT.softmax(-1),
    "einsum": lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k).div(3).softmax(dim=-1),
    "einsum in another order": lambda q, k: torch.einsum("bhjd,bhid->hbij", k, q).softmax(-1).transpose(0, 1),
    "baddbmm": lambda q, k: torch.baddbmm(
        torch.zeros(4, 24, 24), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=0.2
    ).softmax(-1).view(2, 2, 24, 24),
    "in place": in_place,
    "merged heads": by_windows,
    "by hand": lambda q, k: torch.exp(torch.log_softmax(q @ k.mT, -1)),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("twice", [False, True], ids=["first", "second"])
def test_vectors_are_those_of_the_projection(form: str, twice: bool) -> None:
    model = Written(FORMS[form])
    recording = recorded(model, twice=twice)
    q, k, _ = outputs(model, "qkv").view(2, 24, 3, 2, 8).permute(2, 0, 3, 1, 4)
    scale = 0.5 if form == "matmul" else 1  # the product has the scaled queries
    torch.testing.assert_close(recording.queries(), q * scale, rtol=0, atol=0)
    torch.testing.assert_close(recording.keys(), k, rtol=0, atol=0)


def two_products(q: Tensor, k: Tensor) -> Tensor:
    """Add content to content and content to position, as disentangled attention does."""
    return (q @ k.mT + q.roll(1, 2) @ k.mT).softmax(-1)


def mixed_keys(q: Tensor, k: Tensor) -> Tensor:
    """Mix the scores of neighboring keys."""
    return nn.functional.linear(q @ k.mT, torch.eye(24) + torch.eye(24).roll(1, 0)).softmax(-1)


@pytest.mark.parametrize("form", [overwritten, moved, two_products, mixed_keys], ids=lambda form: form.__name__)
@pytest.mark.parametrize("twice", [False, True], ids=["first", "second"])
def test_vectors_that_are_not_those_of_the_weights_are_refused(form: Callable[[Tensor, Tensor], Tensor], twice: bool) -> None:
    recording = recorded(Written(form), twice=twice)
    with pytest.raises(OptionError, match="were not recorded"):
        recording.queries()


def test_vectors_are_kept_with_the_values_only() -> None:
    model = Written(FORMS["matmul"])
    with torch.no_grad(), visattn.capture(model) as recording:
        model(PHOTO)
    with pytest.raises(OptionError, match=r"capture\(model, values=True\) records them"):
        recording.keys()


def test_vectors_with_gradients() -> None:
    model = Written(FORMS["matmul"])
    with visattn.capture(model, values=True, gradients=True) as recording:
        model(PHOTO)
    assert not recording.queries().requires_grad
    torch.testing.assert_close(
        recording.keys(), outputs(model, "qkv").view(2, 24, 3, 2, 8)[:, :, 1].transpose(1, 2), rtol=0, atol=0
    )


def eager(kind: str) -> nn.Module:
    """Build a model of transformers with its attention written out."""
    small: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(image_size=32, patch_size=8, **small)
    config._attn_implementation = "eager"
    model: nn.Module = getattr(transformers, f"{kind}Model")(config).eval()
    return model


def unfused(name: str, **options: Any) -> nn.Module:
    """Build a model of timm with its attention written out."""
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, **options).eval()
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            setattr(module, "fused_attn", False)  # noqa: B010 - no module declares it
    return model


UNBIASED: dict[str, Callable[[], tuple[nn.Module, int]]] = {
    "ViT of transformers": lambda: (eager("ViT"), 32),
    "DINOv2 of transformers": lambda: (eager("Dinov2"), 32),
    "ViT of timm": lambda: (unfused("vit_tiny_patch16_224", depth=2), 224),
    "PiT of timm": lambda: (unfused("pit_ti_224"), 224),
    "XCiT of timm": lambda: (unfused("xcit_nano_12_p16_224"), 224),
}


@pytest.mark.parametrize("name", UNBIASED)
def test_weights_are_the_softmax_of_the_vectors(name: str) -> None:
    """Within a row, differences of log-weights are those of query-key products, up to one scale per head."""
    model, side = UNBIASED[name]()
    recording = recorded(model, torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(3)))
    for record in recording:
        log = record.operator.dense().double().log()
        scores = record.operator.queries().double() @ record.operator.keys().double().mT
        log, scores = log - log.mean(-1, keepdim=True), scores - scores.mean(-1, keepdim=True)
        if record.operator.shape[3] == 1 or scores.abs().max() < 1e-6:
            continue
        scale = (log * scores).sum((-1, -2), keepdim=True) / (scores * scores).sum((-1, -2), keepdim=True)
        assert bool((scale > 0).all())
        assert float((log - scale * scores).abs().max()) < 1e-4 * max(1, float(log.abs().max())), record.layer


def test_vectors_of_shifted_windows() -> None:
    """Swin: the windows of a shifted layer, counted by hand."""
    model = unfused("swin_tiny_patch4_window7_224", depths=(2, 2, 2, 2))
    pixels = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(3))
    recording = recorded(model, pixels)
    heads = outputs(model, "layers.0.blocks.1.attn.qkv", pixels).view(64, 49, 3, 3, 32)
    q, k = recording.queries("layers.0.blocks.1.attn")[0], recording.keys("layers.0.blocks.1.attn")[0]
    for window in range(64):
        for place in range(49):
            row = (window // 8 * 7 + place // 7 + 3) % 56
            column = (window % 8 * 7 + place % 7 + 3) % 56
            token = 56 * row + column
            assert torch.equal(k[:, token], heads[window, place, 1])
            torch.testing.assert_close(q[:, token], heads[window, place, 0] * 32**-0.5, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "layer", "count"),
    [
        ("cait_xxs24_224", "blocks.3.attn", 4),
        ("convit_tiny", "blocks.2.attn", 4),
        ("mvitv2_tiny", "stages.1.blocks.1.attn", 2),
    ],
)
def test_every_layer_that_is_written_out_has_vectors(name: str, layer: str, count: int) -> None:
    """Heads that are mixed, gated positions and relative positions: the vectors of each head before that."""
    model = unfused(name)
    pixels = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(3))
    recording = recorded(model, pixels)
    for record in recording:
        assert record.operator.queries().shape[:3] == record.operator.shape[:3]
        assert record.operator.keys().shape[2] == record.operator.shape[3]
    if name == "cait_xxs24_224":
        k = outputs(model, f"{layer}.qkv", pixels).view(1, 196, 3, count, -1)[:, :, 1].transpose(1, 2)
    elif name == "convit_tiny":
        k = outputs(model, f"{layer}.qk", pixels).view(1, 196, 2, count, -1)[:, :, 1].transpose(1, 2)
    else:
        k = outputs(model, f"{layer}.norm_k", pixels)
    torch.testing.assert_close(recording.keys(layer), k, rtol=0, atol=0)
