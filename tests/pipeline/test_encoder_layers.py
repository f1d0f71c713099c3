"""The layer of Grad-CAM of masks and pixels: the end of the encoder, in networks whose end is known by construction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import visattn
from visattn.errors import OptionError

PIXELS = torch.rand(1, 3, 32, 48, generator=torch.Generator().manual_seed(2))


def conv(few: int, many: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(few, many, 3, stride, 1), nn.BatchNorm2d(many), nn.ReLU())


class UNet(nn.Module):
    """Two levels and a bottleneck of 16 channels, with skips; the center is a no-op, and `end` follows the logits."""

    def __init__(self, classes: int = 3, end: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.first, self.second, self.bottom = conv(3, 4, 2), conv(4, 8, 2), conv(8, 16, 2)
        self.center = nn.Identity()
        self.up, self.last = conv(16 + 8, 8), conv(8 + 4, 32)  # wider than the bottleneck
        self.head, self.end = nn.Conv2d(32, classes, 1), end

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(first)
        low = self.center(self.bottom(second))
        up = self.up(torch.cat([F.interpolate(low, size=second.shape[2:]), second], 1))
        last = self.last(torch.cat([F.interpolate(up, size=first.shape[2:]), first], 1))
        logits = F.interpolate(self.head(last), size=x.shape[2:], mode="bilinear")
        return self.end(logits)


class Pyramid(nn.Module):
    """Encoder whose end is pooled to 2 x 2 in a branch as wide as the encoder, and then a narrow head of the encoder's own size."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.branch, self.head = nn.Sequential(conv(3, 8, 4), conv(8, 16, 2)), conv(16, 16), conv(32, 8)
        self.classes = nn.Conv2d(8, 20, 1)  # wider than the encoder

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        feature = self.encoder(x)
        pooled = self.branch(F.adaptive_avg_pool2d(feature, 2))
        both = torch.cat([feature, F.interpolate(pooled, size=feature.shape[2:])], 1)
        return {"out": F.interpolate(self.classes(self.head(both)), size=x.shape[2:], mode="bilinear")}


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().eval()


def by_hand(model: nn.Module, part: nn.Module, score: Callable[[Any], Tensor]) -> Tensor:
    kept: list[Tensor] = []
    handle = part.register_forward_hook(lambda _module, _args, output: kept.append(output))
    output = model(PIXELS.clone().requires_grad_())
    handle.remove()
    (slope,) = torch.autograd.grad(score(output), kept)
    total = torch.zeros(kept[0].shape[2:])
    for channel in range(kept[0].shape[1]):
        total += slope[0, channel].mean() * kept[0][0, channel].detach()
    return total.clamp_min(0)


ENDS: dict[str, Callable[[Tensor], Tensor]] = {"logits": lambda x: x, "softmax": lambda x: x.softmax(1), "sigmoid": torch.sigmoid}


@pytest.mark.parametrize("end", ENDS)
def test_mask_of_a_unet_reads_its_bottleneck(end: str) -> None:
    model = seeded(lambda: UNet(3, ENDS[end]))
    index = int(model(PIXELS)[0].argmax(0).flatten().mode().values)
    inside = model(PIXELS)[0].argmax(0) == index
    explained = visattn.explain(model, pixels=PIXELS, method="gradcam", target=f"mask:{index}")
    assert explained.map.facts.layer == "bottom"
    expected = by_hand(model, model.get_submodule("bottom"), lambda out: out[0, index][inside].mean())
    torch.testing.assert_close(explained.map.values.view(4, 6), expected, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("end", ["logits", "sigmoid"])
def test_single_mask_and_pixel_read_the_bottleneck_too(end: str) -> None:
    model: Any = seeded(lambda: UNet(1, ENDS[end]))
    with torch.no_grad():
        model.head.bias -= model(PIXELS).median() if end == "logits" else model(PIXELS).logit().median()  # half is inside
    for target in ("mask:0", "pixel:20,10"):
        assert visattn.explain(model, pixels=PIXELS, method="gradcam", target=target).map.facts.layer == "bottom"


def test_auto_reads_it_too() -> None:
    explained = visattn.explain(seeded(UNet), pixels=PIXELS, target="pixel:20,10")
    assert explained.map.facts.layer == "bottom"


@pytest.mark.parametrize("method", ["layercam", "hirescam", pytest.param("ablationcam", marks=pytest.mark.full)])
def test_other_maps_of_features_read_it_too(method: Any) -> None:
    explained = visattn.explain(seeded(UNet), pixels=PIXELS, target="pixel:20,10", method=method)
    assert explained.map.facts.layer == "bottom"


def test_branches_of_a_fixed_size_heads_and_class_maps_are_not_the_encoder() -> None:
    explained = visattn.explain(seeded(Pyramid), pixels=PIXELS, target="pixel:20,10", method="gradcam")
    assert explained.map.facts.layer == "encoder"


def test_an_output_that_is_cut_off_at_zero_is_named_as_the_reason() -> None:
    model: Any = seeded(lambda: UNet(1, torch.relu))
    with torch.no_grad():
        model.head.bias.fill_(-9.0)
    with pytest.raises(OptionError, match=r"no gradient at the pixels.*occlusion"):
        visattn.explain(model, pixels=PIXELS, target="pixel:20,10", method="gradcam")


def test_weights_that_are_rounding_errors_are_zero() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.point = conv(3, 16, 4), nn.Conv2d(16, 4, 1)
            self.head = nn.Conv2d(4, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.head(F.instance_norm(self.point(self.encoder(x))).tanh())
            return output

    model = seeded(Normed)
    options: dict[str, Any] = {"pixels": PIXELS, "target": "pixel:20,10", "layer": "encoder"}
    assert 0 < float(by_hand(model, model.get_submodule("encoder"), lambda out: out[0, 0].mean()).max()) < 1e-6
    empty = visattn.explain(model, method="gradcam", **options)
    assert not bool(empty.map.values.any())
    assert "zero everywhere" in empty.provenance.warnings[-1]
    assert bool(visattn.explain(model, method="hirescam", **options).map.values.any())


class Counted(torch.autograd.Function):
    """Identity that counts its backward passes."""

    passes = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        Counted.passes += 1
        return slope


def test_the_search_takes_one_backward_pass() -> None:
    Counted.passes = 0
    model = seeded(lambda: UNet(3, lambda x: Counted.apply(x)))
    visattn.explain(model, pixels=PIXELS, target="pixel:20,10", method="gradcam")
    assert Counted.passes == 2  # of the search, and of the explanation


def test_half_precision() -> None:
    model = seeded(UNet).to(torch.bfloat16)
    assert visattn.explain(model, pixels=PIXELS, target="pixel:20,10", method="gradcam").map.facts.layer == "bottom"
