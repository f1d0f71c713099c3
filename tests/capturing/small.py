"""Small models of timm families, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import timm
import torch
from timm.models.swin_transformer import SwinTransformer
from timm.models.tiny_vit import TinyVit
from timm.models.volo import VOLO
from torch import Tensor, nn

from tests import tiny


class Small(NamedTuple):
    """Small model: its build function and the side of its square input."""

    build: Callable[[], nn.Module]
    side: int = 64

    def __call__(self) -> tuple[nn.Module, Tensor]:
        """Return the model in evaluation mode and a batch of two images."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.build().eval()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "gamma" in name:  # layer scales of CaiT, XCiT and others start near zero
                        parameter.fill_(1)
                    elif "head" in name and name.endswith("weight"):  # some heads start at zero
                        parameter.copy_(torch.randn(parameter.shape))
        size = (self.side, self.side) if self.side else tiny.INPUT
        return model, tiny.pixels(2, size)


def named(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model: nn.Module = timm.create_model(name, num_classes=4, **options)
        return model

    return build


def _swin() -> nn.Module:
    sizes: dict[str, Any] = {"img_size": 64, "embed_dim": 16, "window_size": 4, "num_classes": 4}
    return SwinTransformer(**sizes, depths=(2, 2), num_heads=(2, 4))  # type: ignore[no-any-return]


def _volo() -> nn.Module:
    widths = {"embed_dims": (32, 32, 32, 32), "num_heads": (2, 2, 2, 2), "mlp_ratio": (2.0, 2.0, 2.0, 2.0)}
    outlook: dict[str, Any] = {"outlook_attention": (True, False, False, False), "post_layers": ("ca", "ca")}
    return VOLO(layers=(1, 1, 1, 1), img_size=64, num_classes=4, **widths, **outlook)  # type: ignore[no-any-return]


def _tiny_vit() -> nn.Module:
    sizes: dict[str, Any] = {"embed_dims": (16, 16, 32, 32), "num_heads": (1, 1, 2, 2), "window_sizes": (4, 4, 2, 2)}
    return TinyVit(depths=(1, 1, 2, 1), num_classes=4, **sizes)  # type: ignore[no-any-return]


_TWINS: dict[str, Any] = {"depths": (1, 1, 2, 1), "embed_dims": (16, 32, 32, 32), "num_heads": (1, 2, 2, 2)}
MODELS: dict[str, Small] = {
    "vit": Small(tiny.MODELS["cls"].build, 0),
    "vit pooled by attention": Small(tiny.MODELS["map pooling"].build, 0),
    "deit distilled": Small(tiny.MODELS["cls and distillation"].build, 0),
    "beit": Small(tiny.MODELS["beit with relative positions"].build, 0),
    "eva rope": Small(tiny.MODELS["eva with rope"].build, 0),
    "swin": Small(_swin),
    "maxvit": Small(named("maxvit_rmlp_pico_rw_256", img_size=64)),
    "hiera": Small(named("hiera_tiny_224", img_size=(64, 64), embed_dim=16, stages=(1, 1, 1, 1))),
    "cait": Small(named("cait_xxs24_224", img_size=64, embed_dim=32, depth=2, num_heads=2)),
    "xcit": Small(named("xcit_nano_12_p16_224", img_size=64, embed_dim=32, depth=2, num_heads=2)),
    "levit": Small(named("levit_128s"), 224),
    "crossvit": Small(named("crossvit_tiny_240"), 240),
    "volo": Small(_volo),
    "pvt_v2": Small(named("pvt_v2_b0", depths=(1, 1, 1, 1))),
    "twins": Small(named("twins_svt_small", img_size=64, **_TWINS)),
    "tiny_vit": Small(_tiny_vit),
}
