"""Residual networks to read from top to bottom, with a place for attention: ResNet-18 and -50, and ResNet-20 and -56 for CIFAR.

He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, arXiv:1512.03385. Attention goes where its paper puts it: gates
(SE, CBAM, ECA) into every block, on the residual branch after its last norm and before the addition; BAM between the stages. Names of
parameters are torchvision's, so its checkpoints load strictly where there is no attention. Differs from the paper as torchvision does:
a bottleneck takes its stride in the 3x3 convolution ("v1.5").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from visattn._support.checks import one_of
from visattn.errors import OptionError
from visattn.nn import ATTENTION, BAM, CBAM

Attention = str | Callable[[int], nn.Module] | None


def resnet14(
    *, attention: Attention = None, widths: Sequence[int] = (16, 32, 64), num_classes: int = 10, in_channels: int = 3
) -> ResNet:
    """Not the paper's: ResNet-20 with two blocks a stage, and a stem that halves the resolution, for pictures of 64 pixels."""
    return ResNet(
        BasicBlock,
        (2, 2, 2),
        widths,
        small=True,
        stem_stride=2,
        attention=attention,
        num_classes=num_classes,
        in_channels=in_channels,
    )


def resnet18(
    *,
    attention: Attention = None,
    widths: Sequence[int] = (64, 128, 256, 512),
    num_classes: int = 1000,
    in_channels: int = 3,
) -> ResNet:
    """18 layers with weights: two basic blocks in each of four stages; 11.69 M parameters without attention."""
    return ResNet(BasicBlock, (2, 2, 2, 2), widths, attention=attention, num_classes=num_classes, in_channels=in_channels)


def resnet50(
    *,
    attention: Attention = None,
    widths: Sequence[int] = (64, 128, 256, 512),
    num_classes: int = 1000,
    in_channels: int = 3,
) -> ResNet:
    """50 layers with weights: 3, 4, 6 and 3 bottlenecks; 25.56 M parameters without attention."""
    return ResNet(Bottleneck, (3, 4, 6, 3), widths, attention=attention, num_classes=num_classes, in_channels=in_channels)


def resnet20(
    *, attention: Attention = None, widths: Sequence[int] = (16, 32, 64), num_classes: int = 10, in_channels: int = 3
) -> ResNet:
    """For CIFAR, section 4.2 of the paper: three basic blocks in each of three stages; 0.27 M parameters without attention."""
    return _for_cifar(3, attention, widths, num_classes, in_channels)


def resnet56(
    *, attention: Attention = None, widths: Sequence[int] = (16, 32, 64), num_classes: int = 10, in_channels: int = 3
) -> ResNet:
    """For CIFAR: nine basic blocks in each of three stages; 0.85 M parameters without attention."""
    return _for_cifar(9, attention, widths, num_classes, in_channels)


def _for_cifar(depth: int, attention: Attention, widths: Sequence[int], num_classes: int, in_channels: int) -> ResNet:
    """Of `6 depth + 2` layers."""
    return ResNet(
        BasicBlock, (depth,) * 3, widths, small=True, attention=attention, num_classes=num_classes, in_channels=in_channels
    )


class ResNet(nn.Module):
    """Image `(B, C, H, W)` to class scores `(B, classes)`: a stem, stages of blocks, the mean over all places, one linear layer."""

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        depths: Sequence[int],
        widths: Sequence[int],
        *,
        small: bool = False,
        stem_stride: int = 1,
        attention: Attention = None,
        num_classes: int = 1000,
        in_channels: int = 3,
    ) -> None:
        """Build with torchvision's initial values: normal, of variance 2 over a convolution's fan-out.

        Args:
            block: `BasicBlock` or `Bottleneck`.
            depths: Blocks in each stage; each stage but the first halves the resolution.
            widths: Channels in the 3x3 convolutions of each stage; those of a small network do not decrease.
            small: For small images: a 3x3 stem that keeps the resolution, and shortcuts without parameters (option A, the paper's
                choice for CIFAR). Otherwise a stem that divides it by 4, and projections where the shape changes (option B).
            stem_stride: Of the stem of a small network.
            attention: A name of `visattn.nn.ATTENTION`, or a function from a number of channels to a module that keeps the shape:
                `lambda channels: SqueezeExcite(channels, 8)`. BAM, also as `functools.partial(BAM, ...)`, goes between the stages.
            num_classes: Length of the output; 0 for the pooled features.
            in_channels: C.

        Raises:
            OptionError: If no attention goes by this name, or the widths fit no such network.
        """
        super().__init__()
        if len(widths) != len(depths) or min(widths) < 1 or (small and list(widths) != sorted(widths)):
            order = ", none smaller than the one before" if small else ""
            raise OptionError(f"widths must be {len(depths)} numbers of 1 or more{order}, got {tuple(widths)}.")
        make = ATTENTION[one_of(attention, list(ATTENTION), "attention")] if isinstance(attention, str) else attention
        between = make if getattr(make, "func", make) is BAM else None  # `func`: of a partial
        inside = None if between else make

        channels = widths[0]
        self.conv1 = conv(in_channels, channels, 3, stem_stride) if small else conv(in_channels, channels, 7, 2)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, padding=1)

        reduction = stem_stride if small else 4  # pixels of the image to a place of the map, by side
        self.feature_info: list[dict[str, int | str]] = [
            {"num_chs": channels, "reduction": stem_stride if small else 2, "module": "relu"}
        ]  # timm's keys
        self.stages: list[str] = []
        for number, (depth, width) in enumerate(zip(depths, widths, strict=True), start=1):
            stride = 1 if number == 1 else 2
            reduction *= stride
            blocks: list[nn.Module] = []
            for step in (stride, *(1,) * (depth - 1)):  # the first block of a stage does all that changes the shape
                shortcut = _shortcut(channels, width * block.expansion, step, project=not small)
                blocks.append(block(channels, width, step, shortcut, _plug(inside, width * block.expansion)))
                channels = width * block.expansion
            self._then(f"layer{number}", nn.Sequential(*blocks))
            self.feature_info.append({"num_chs": channels, "reduction": reduction, "module": f"layer{number}"})
            if between and number < len(depths):
                self._then(f"bam{number}", _plug(between, channels))

        self.in_chans, self.num_features = in_channels, channels
        self.reset_classifier(num_classes)

    def _then(self, name: str, module: nn.Module) -> None:
        """One more thing that the map goes through."""
        self.add_module(name, module)
        self.stages.append(name)  # names, not modules: who replaces a stage is then followed

    def forward(self, image: Tensor) -> Tensor:
        """Images to class scores."""
        return self.forward_head(self.forward_features(image))

    def forward_features(self, image: Tensor) -> Tensor:
        """Images to the last map, `(B, num_features, H / 32, W / 32)`, or `/ 4` of a small network."""
        x: Tensor = self.maxpool(self.relu(self.bn1(self.conv1(image))))
        for name in self.stages:
            x = getattr(self, name)(x)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The last map to class scores, or to the pooled features `(B, num_features)` that they are made of."""
        pooled = x.mean((2, 3))
        out: Tensor = pooled if pre_logits else self.fc(pooled)
        return out

    def get_classifier(self) -> nn.Module:
        """The last layer."""
        return self.fc

    def reset_classifier(self, num_classes: int) -> None:
        """A new last layer; with 0 classes none, and the output is the pooled features."""
        self.num_classes = num_classes
        last = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        self.fc = last.to(self.conv1.weight)  # its device and precision


class BasicBlock(nn.Module):
    """Two 3x3 convolutions: `relu(attention(bn(conv(relu(bn(conv(x)))))) + x)`."""

    expansion = 1  # channels that leave the block, in channels of its 3x3 convolution

    def __init__(self, inputs: int, width: int, stride: int, shortcut: nn.Module, attention: nn.Module) -> None:
        """Build one block around a shortcut and an attention."""
        super().__init__()
        self.conv1 = conv(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.attention = attention  # the map's shape stays
        self.downsample = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """`(B, inputs, H, W)` to `(B, width, H / stride, W / stride)`."""
        out = self.bn1(self.conv1(x)).relu()
        out = self.bn2(self.conv2(out))
        added: Tensor = self.attention(out) + self.downsample(x)
        return added.relu()


class Bottleneck(nn.Module):
    """A 3x3 convolution at a quarter of the channels, between two 1x1 convolutions."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, shortcut: nn.Module, attention: nn.Module) -> None:
        """Build one block around a shortcut and an attention over `4 width` channels."""
        super().__init__()
        self.conv1 = conv(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3, stride)  # the paper has the stride in conv1, which leaves three places of four unread
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = conv(width, 4 * width, 1)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.attention = attention
        self.downsample = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """`(B, inputs, H, W)` to `(B, 4 width, H / stride, W / stride)`."""
        out = self.bn1(self.conv1(x)).relu()
        out = self.bn2(self.conv2(out)).relu()
        out = self.bn3(self.conv3(out))
        added: Tensor = self.attention(out) + self.downsample(x)
        return added.relu()


class Subsample(nn.Module):
    """Option A: every `stride`-th place, and zeros for the channels that are new. Nothing to learn.

    A convolution with fixed weights, and so one that whoever follows places through a network understands.
    """

    kept: Tensor

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        """Keep each channel; the new ones come behind the last."""
        super().__init__()
        self.stride = stride
        self.register_buffer("kept", torch.eye(outputs, inputs)[..., None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """`(B, inputs, H, W)` to `(B, outputs, H / stride, W / stride)`."""
        return nn.functional.conv2d(x, self.kept, stride=self.stride)


def _shortcut(inputs: int, outputs: int, stride: int, *, project: bool) -> nn.Module:
    """What the block's input goes through to be added to its output."""
    if inputs == outputs and stride == 1:
        return nn.Identity()
    if not project:
        return Subsample(inputs, outputs, stride)
    return nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


def conv(inputs: int, outputs: int, side: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the resolution, but for its stride; a norm follows, so it has no bias."""
    layer = nn.Conv2d(inputs, outputs, side, stride, padding=side // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def _plug(make: Callable[[int], nn.Module] | None, channels: int) -> nn.Module:
    """The attention for so many channels, with its own initial values; those of CBAM and BAM are their authors' networks'."""
    if make is None:
        return nn.Identity()
    module = make(channels)
    if isinstance(module, (BAM, CBAM)):
        _as_published(module)
    return module


def _as_published(module: BAM | CBAM) -> None:
    """Convolutions by fan-out and biases 0; the norm of CBAM's spatial gate has weight 0, so that this gate is 1/2 everywhere at first."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            if part not in (module.fc1, module.fc2):  # linear layers in the authors' code, which leaves them to PyTorch
                nn.init.kaiming_normal_(part.weight, mode="fan_out")
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    if isinstance(module, CBAM):
        nn.init.zeros_(module.norm.weight)
