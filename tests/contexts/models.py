# mypy: disable-error-code="no-untyped-call"
"""Small models with random weights: CNNs with shared, in-place and reused modules, ViTs, models of libraries, and wrapped ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import torch
import torch.nn.functional as F
import torchvision
import transformers
from torch import Tensor, nn

SIDE = 64
CLASSES = 5


class Shared(nn.Module):
    """CNN with one ReLU for all convolutions."""

    def __init__(self, *, inplace: bool = False) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=inplace)
        self.one, self.two, self.three = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 12, 3, 2, 1), nn.Conv2d(12, 16, 3, 2, 1)
        self.norm, self.head = nn.BatchNorm2d(12), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.one(x))
        x = self.relu(self.norm(self.two(x)))
        return self.head(self.relu(self.three(x)).mean((2, 3)))  # type: ignore[no-any-return]


class Reused(nn.Module):
    """CNN that applies one block three times, with an addition in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = (
            nn.Conv2d(3, 12, 5, 4, 2),
            nn.Sequential(nn.Conv2d(12, 12, 3, 1, 1), nn.BatchNorm2d(12), nn.GELU()),
        )
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(3):
            y = self.block(x)
            y += x
            x = y
        return self.head(self.drop(x.mean((2, 3))))  # type: ignore[no-any-return]


class Vision(nn.Module):
    """ViT as people write it: class token, fused attention, dropout."""

    def __init__(self, width: int = 32, heads: int = 2, depth: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.cls, self.position = nn.Parameter(torch.randn(1, 1, width)), nn.Parameter(0.1 * torch.randn(1, 17, width))
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(width), "qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width)})
            for _ in range(depth)
        )
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.position
        for layer in self.layers:
            parts: Any = layer
            q, k, v = parts["qkv"](parts["norm"](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + self.drop(parts["out"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return self.head(x[:, 0])  # type: ignore[no-any-return]


class Around(nn.Module):
    """Module that passes on its input and output, as people write to add a method."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]


def of_timm(name: str, **options: Any) -> nn.Module:
    return timm.create_model(name, num_classes=CLASSES, **options)  # type: ignore[no-any-return]


def of_transformers(kind: str, **options: Any) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(num_labels=CLASSES, image_size=SIDE, **options)
    return getattr(transformers, f"{kind}ForImageClassification")(config)  # type: ignore[no-any-return]


def with_gates() -> nn.Module:
    import visattn

    model = of_timm("resnet10t")
    visattn.attach(model, "cbam", example=torch.zeros(2, 3, SIDE, SIDE))
    return model


def lora() -> nn.Module:
    import peft

    model = of_timm("vit_tiny_patch16_224", img_size=SIDE, depth=3)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["qkv"], init_lora_weights=False))


def lightning(model: nn.Module) -> nn.Module:
    import lightning as library

    class Module(library.LightningModule):  # type: ignore[misc]
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)  # type: ignore[no-any-return]

    return Module(model)


SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "one ReLU": Shared,
    "one ReLU in place": lambda: Shared(inplace=True),
    "one block three times": Reused,
    "own ViT": Vision,
    "CNN with attached CBAM": with_gates,
    "timm resnet10t": lambda: of_timm("resnet10t"),
    "timm mobilenetv3": lambda: of_timm("mobilenetv3_small_050"),
    "timm convnext": lambda: of_timm("convnext_atto", depths=(1, 1, 2, 1)),
    "timm vit": lambda: of_timm("vit_tiny_patch16_224", img_size=SIDE, depth=3, drop_rate=0.1),
    "timm deit distilled": lambda: of_timm("deit_tiny_distilled_patch16_224", img_size=SIDE, depth=3),
    "timm swin": lambda: of_timm("swin_tiny_patch4_window7_224", img_size=SIDE, window_size=4, depths=(1, 1, 1, 1), embed_dim=24),
    "torchvision resnet18": lambda: torchvision.models.resnet18(num_classes=CLASSES),
    "torchvision mobilenet": lambda: torchvision.models.mobilenet_v2(num_classes=CLASSES, width_mult=0.35),
    "torchvision vit": lambda: torchvision.models.VisionTransformer(SIDE, 16, 3, 2, 32, 48, num_classes=CLASSES),
    "transformers ViT": lambda: of_transformers("ViT", **SIZES, hidden_dropout_prob=0.1),
    "transformers ResNet": lambda: of_transformers("ResNet", embedding_size=8, hidden_sizes=[8, 16, 16, 24], depths=[1, 1, 1, 1]),
    "transformers ConvNext": lambda: of_transformers("ConvNext", hidden_sizes=[8, 12, 16, 24], depths=[1, 1, 1, 1]),
    "own module around timm": lambda: Around(of_timm("resnet10t")),
    "Lightning around timm": lambda: lightning(of_timm("vit_tiny_patch16_224", img_size=SIDE, depth=3)),
    "DataParallel around own": lambda: nn.DataParallel(Shared()),
    "averaged transformers": lambda: torch.optim.swa_utils.AveragedModel(of_transformers("ViT", **SIZES)),
    "LoRA on timm": lora,
}


def build(name: str) -> nn.Module:
    """Build a model in evaluation mode, with the same random weights each time."""
    torch.manual_seed(sum(map(ord, name)))
    return MODELS[name]().eval()
