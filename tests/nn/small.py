"""Small CNNs to attach to, one for each way of adding a residual branch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def example() -> Tensor:
    """Return two images whose height, width and channels all differ."""
    return torch.randn(2, 3, 14, 10, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """Basic block as in ResNet."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        projects = stride > 1 or channels != width
        self.downsample = nn.Sequential(nn.Conv2d(channels, width, 1, stride), nn.BatchNorm2d(width)) if projects else None

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x += shortcut
        return self.relu(x)  # type: ignore[no-any-return]


class Net(nn.Module):
    """Network of three ResNet blocks in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.layer1 = nn.Sequential(Block(8, 8), Block(8, 8))
        self.layer2 = nn.Sequential(Block(8, 12, 2))
        self.fc = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))  # type: ignore[no-any-return]


def around(block: nn.Module) -> nn.Sequential:
    """Build a network with one block for eight channels, named `1`."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(5))


class PreActivation(nn.Module):
    """Pre-activation block: norm and activation come first, and the shortcut projects their output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8)
        self.conv1, self.conv2, self.project = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 12, 3, 1, 1), nn.Conv2d(8, 12, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(x))
        shortcut = self.project(x)
        return self.conv2(self.conv1(x).relu()) + shortcut  # type: ignore[no-any-return]


class Padded(nn.Module):
    """Block whose shortcut skips pixels and pads channels with zeros, by functions alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(8, 12, 3, 2, 1), nn.Conv2d(12, 12, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2)) + self.conv2(self.conv1(x).relu())  # type: ignore[no-any-return]


class ScaledLast(nn.Module):
    """ConvNeXt-like block: the branch ends channels-last, with a scale, a permutation and stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(8, 8, 3, 1, 1, groups=8)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.gamma = nn.Parameter(torch.ones(8))
        self.drop_path = nn.Dropout2d(0.1)

    def forward(self, x: Tensor) -> Tensor:
        branch = (self.mlp(self.depthwise(x).permute(0, 2, 3, 1)) * self.gamma).permute(0, 3, 1, 2)
        return x + self.drop_path(branch)  # type: ignore[no-any-return]


class Pieces(nn.Module):
    """Res2Net-like block: additions between pieces, and a final one that closes the block."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.end = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.first, self.second = nn.Conv2d(4, 4, 3, 1, 1), nn.Conv2d(4, 4, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        one, two = torch.split(self.begin(x), 4, 1)
        one = self.first(one)
        two = self.second(one + two)
        return self.end(torch.cat([one, two], 1)) + x  # type: ignore[no-any-return]


def deep() -> nn.Sequential:
    """Build two layers."""
    return nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, 1, 1))


class SideBySide(nn.Module):
    """RepVGG-like block with three deeper parallel branches, none of them residual."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = deep(), deep()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.one(x) + self.two(x)  # type: ignore[no-any-return]


class Normed(nn.Module):
    """MobileOne-like block: a norm beside a convolution, to be merged into one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(x) + self.conv(x))


class Twins(nn.Module):
    """Block with two similar branches."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = deep(), deep()

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.two(x)  # type: ignore[no-any-return]


class Pyramid(nn.Module):
    """FPN-like network: a coarse map is added to a fine one."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.fine, self.coarse = nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.up = nn.Upsample(scale_factor=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fine(x) + self.up(self.coarse(self.down(x)))  # type: ignore[no-any-return]


class OneActivation(nn.Module):
    """Block whose branch ends in a ReLU that runs again after the addition, where attention must not be inserted."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x + self.relu(self.conv(x)))  # type: ignore[no-any-return]
