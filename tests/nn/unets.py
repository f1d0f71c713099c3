"""Small U-Nets in the styles of other repositories, for images with sides that are multiples of 8."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def double(inputs: int, outputs: int) -> nn.Sequential:
    """Build two convolutions."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class Numbered(nn.Module):
    """U-Net with all modules in one list, down and up, with transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([double(3, 4), double(4, 8), double(8, 16), double(16, 8), double(8, 4)])
        self.ups = nn.ModuleList([nn.ConvTranspose2d(16, 8, 2, 2), nn.ConvTranspose2d(8, 4, 2, 2)])
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.blocks[:2]:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.blocks[2](x)
        for up, block in zip(self.ups, self.blocks[3:], strict=True):
            x = block(torch.cat([kept.pop(), up(x)], dim=1))
        return self.head(x)  # type: ignore[no-any-return]


class Up(nn.Module):
    """Decoder block that upsamples, concatenates and convolves."""

    def __init__(self, inputs: int, skipped: int, outputs: int) -> None:
        super().__init__()
        self.up: nn.Module = nn.Upsample(scale_factor=2, mode="bilinear")
        self.conv = double(inputs + skipped, outputs)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.conv(torch.cat([skip, self.up(x)], dim=1))  # type: ignore[no-any-return]


class Named(nn.Module):
    """U-Net with named parts and concatenations inside the decoder's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inc = double(3, 4)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), double(4, 8))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), double(8, 16))
        self.up1, self.up2 = Up(16, 8, 8), Up(8, 4, 4)
        self.outc = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.inc(x)
        two = self.down1(one)
        return self.outc(self.up2(self.up1(self.down2(two), two), one))  # type: ignore[no-any-return]


class Down(nn.Module):
    """Encoder block that returns the skip connection and its output."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.pool = double(inputs, outputs), nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(x)
        return self.pool(x), x


class Pairs(nn.Module):
    """U-Net with stages by name, in which encoder stages return two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.layer2, self.layer3 = Down(3, 4), Down(4, 8), double(8, 16)
        self.layer4, self.layer5 = Up(16, 8, 8), Up(8, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x, one = self.layer1(x)
        x, two = self.layer2(x)
        return self.layer5(self.layer4(self.layer3(x), two), one)  # type: ignore[no-any-return]


class Nested(nn.Module):
    """U-Net++: each node of a triangle concatenates all earlier nodes in its row."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Upsample(scale_factor=2)
        self.conv0_0, self.conv1_0, self.conv2_0 = double(3, 4), double(4, 8), double(8, 16)
        self.conv0_1, self.conv1_1 = double(4 + 8, 4), double(8 + 16, 8)
        self.conv0_2 = double(2 * 4 + 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x00 = self.conv0_0(x)
        x10 = self.conv1_0(F.max_pool2d(x00, 2))
        x01 = self.conv0_1(torch.cat([x00, self.up(x10)], 1))
        x20 = self.conv2_0(F.max_pool2d(x10, 2))
        x11 = self.conv1_1(torch.cat([x10, self.up(x20)], 1))
        return self.conv0_2(torch.cat([x00, x01, self.up(x11)], 1))  # type: ignore[no-any-return]


class Level(nn.Module):
    """Recursive U-Net around a smaller one."""

    def __init__(self, inputs: int, width: int, inside: nn.Module | None) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(inputs, width, 4, 2, 1), nn.BatchNorm2d(width), nn.LeakyReLU())
        self.inside = inside
        self.up = nn.ConvTranspose2d(width if inside is None else 2 * width, inputs, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.down(x)
        return torch.cat([x, self.up(inner if self.inside is None else self.inside(inner))], 1)


class Added(nn.Module):
    """U-Net with sums instead of concatenations, and separate modules for encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({f"layer{i}": double(3 if i == 1 else 2 ** (i + 1), 2 ** (i + 2)) for i in (1, 2, 3)})
        self.decoder = nn.ModuleDict({f"level{i}": nn.ConvTranspose2d(2 ** (i + 3), 2 ** (i + 2), 2, 2) for i in (2, 1)})
        self.merge = nn.ModuleDict({f"level{i}": double(2 ** (i + 2), 2 ** (i + 2)) for i in (2, 1)})

    def forward(self, x: Tensor) -> Tensor:
        one = self.encoder["layer1"](x)
        two = self.encoder["layer2"](F.max_pool2d(one, 2))
        x = self.encoder["layer3"](F.max_pool2d(two, 2))
        x = self.merge["level2"](self.decoder["level2"](x) + two)
        return self.merge["level1"](self.decoder["level1"](x) + one)  # type: ignore[no-any-return]


class Gate(nn.Module):
    """Gate that scales a map of the encoder by a function of both maps."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.score = nn.Conv2d(2 * channels, 1, 1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return skip * self.score(torch.cat([x, skip], 1)).sigmoid()  # type: ignore[no-any-return]


class GatedUp(Up):
    """Decoder block that upsamples, gates, concatenates and convolves."""

    def __init__(self, inputs: int, skipped: int, outputs: int) -> None:
        super().__init__(inputs, skipped, outputs)
        self.up = nn.ConvTranspose2d(inputs, skipped, 2, 2)
        self.gate, self.conv = Gate(skipped), double(2 * skipped, outputs)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = self.up(x)
        return self.conv(torch.cat([self.gate(x, skip), x], dim=1))  # type: ignore[no-any-return]


class Gated(Named):
    """Attention U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.up1, self.up2 = GatedUp(16, 8, 8), GatedUp(8, 4, 4)


class Flat(nn.Module):
    """U-Net of layers without blocks, with one shared activation and a last level without a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.enc1, self.enc2, self.mid = (nn.Conv2d(n, outputs, 3, padding=1) for n, outputs in ((3, 4), (4, 8), (8, 16)))
        self.dec2, self.dec1, self.dec0 = (nn.Conv2d(n, outputs, 3, padding=1) for n, outputs in ((24, 8), (12, 4), (4, 4)))
        self.relu, self.head = nn.ReLU(), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.relu(self.enc1(x))
        two = self.relu(self.enc2(F.max_pool2d(one, 2)))
        x = F.interpolate(self.relu(self.mid(F.max_pool2d(two, 2))), scale_factor=2)
        x = F.interpolate(self.relu(self.dec2(torch.cat([x, two], 1))), scale_factor=2)
        x = F.interpolate(self.relu(self.dec1(torch.cat([x, one], 1))), scale_factor=2)
        return self.head(self.relu(self.dec0(x)))  # type: ignore[no-any-return]


class Scaled(Named):
    """U-Net with a skip connection that is not the output of one module."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inc(x)
        one = x + x.tanh()
        two = self.down1(one)
        return self.outc(self.up2(self.up1(self.down2(two), two), one))  # type: ignore[no-any-return]


class Hidden(Down):
    """Encoder block whose skip connection is not the output of an inner module."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(x)
        x = x + x.tanh()
        return F.max_pool2d(x, 2), x


class HiddenPairs(Pairs):
    """U-Net with stages by name, in which encoder stages return maps that are not the output of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.layer2 = Hidden(3, 4), Hidden(4, 8)
