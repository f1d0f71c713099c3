"""Residual networks with optional attention: ResNet-18 and -50, and ResNet-20 and -56 for CIFAR.

He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, arXiv:1512.03385. Attention is placed as in its paper: gates (SE,
CBAM, ECA) in every block, on the residual branch after its last norm and before the addition; BAM between the stages. Parameter names are
torchvision's, so its checkpoints load strictly into networks without attention. Differs from the paper as torchvision does: a bottleneck
has its stride in the 3x3 convolution ("v1.5").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from visattn._support.checks import one_of
from visattn.errors import OptionError
from visattn.nn import ATTENTION, BAM, CBAM

__all__ = ["ResNet"]

Attention = str | Callable[[int], nn.Module] | None


def resnet14(
    *,
    attention: Attention = None,
    widths: Sequence[int] = (16, 32, 64),
    num_classes: int = 10,
    in_channels: int = 3,
    branch_gain: float = 1.0,
) -> ResNet:
    """Build a ResNet-14 for images of 64 pixels (not in the paper): two basic blocks per stage, and a stem that halves the resolution."""
    return ResNet(
        BasicBlock,
        (2, 2, 2),
        widths,
        small=True,
        stem_stride=2,
        attention=attention,
        num_classes=num_classes,
        in_channels=in_channels,
        branch_gain=branch_gain,
    )


def resnet18(
    *,
    attention: Attention = None,
    widths: Sequence[int] = (64, 128, 256, 512),
    num_classes: int = 1000,
    in_channels: int = 3,
    branch_gain: float = 1.0,
) -> ResNet:
    """Build a ResNet-18: two basic blocks in each of four stages; 11.69 M parameters without attention."""
    return ResNet(
        BasicBlock,
        (2, 2, 2, 2),
        widths,
        attention=attention,
        num_classes=num_classes,
        in_channels=in_channels,
        branch_gain=branch_gain,
    )


def resnet50(
    *,
    attention: Attention = None,
    widths: Sequence[int] = (64, 128, 256, 512),
    num_classes: int = 1000,
    in_channels: int = 3,
    branch_gain: float = 1.0,
) -> ResNet:
    """Build a ResNet-50: four stages of 3, 4, 6 and 3 bottlenecks; 25.56 M parameters without attention."""
    return ResNet(
        Bottleneck,
        (3, 4, 6, 3),
        widths,
        attention=attention,
        num_classes=num_classes,
        in_channels=in_channels,
        branch_gain=branch_gain,
    )


def resnet20(
    *,
    attention: Attention = None,
    widths: Sequence[int] = (16, 32, 64),
    num_classes: int = 10,
    in_channels: int = 3,
    branch_gain: float = 1.0,
) -> ResNet:
    """Build a ResNet-20 for CIFAR (section 4.2): three basic blocks in each of three stages; 0.27 M parameters without attention."""
    return _for_cifar(3, attention, widths, num_classes, in_channels, branch_gain)


def resnet56(
    *,
    attention: Attention = None,
    widths: Sequence[int] = (16, 32, 64),
    num_classes: int = 10,
    in_channels: int = 3,
    branch_gain: float = 1.0,
) -> ResNet:
    """Build a ResNet-56 for CIFAR: nine basic blocks in each of three stages; 0.85 M parameters without attention."""
    return _for_cifar(9, attention, widths, num_classes, in_channels, branch_gain)


def _for_cifar(
    depth: int, attention: Attention, widths: Sequence[int], num_classes: int, in_channels: int, branch_gain: float
) -> ResNet:
    """Build a CIFAR network with `6 * depth + 2` layers."""
    return ResNet(
        BasicBlock,
        (depth,) * 3,
        widths,
        small=True,
        attention=attention,
        num_classes=num_classes,
        in_channels=in_channels,
        branch_gain=branch_gain,
    )


class ResNet(nn.Module):
    """Residual network: image `(B, C, H, W)` to class scores `(B, num_classes)`.

    It has a stem, stages of blocks, global average pooling and one linear layer.
    """

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
        branch_gain: float = 1.0,
    ) -> None:
        """Build with torchvision's initialization: normal with variance `2 / fan_out` for convolutions.

        Args:
            block: Type of block, `BasicBlock` or `Bottleneck`.
            depths: Number of blocks in each stage. Each stage but the first halves the resolution.
            widths: Number of channels in the 3x3 convolutions of each stage. Those of a small network must not decrease.
            small: Whether the network is for small images: a 3x3 stem that keeps the resolution, and shortcuts without parameters (option
                A, the paper's choice for CIFAR). Otherwise the stem divides the resolution by 4, and shortcuts are projections where the
                shape changes (option B).
            stem_stride: Stride of the stem of a small network.
            attention: A name in `visattn.nn.ATTENTION`, or a function from the number of channels to a module that keeps the shape, such as
                `lambda channels: SqueezeExcite(channels, 8)`. BAM, also as `functools.partial(BAM, ...)`, is placed between the stages.
            num_classes: Number of classes; 0 to return the pooled features.
            in_channels: Number of input channels, C.
            branch_gain: First weight of the last norm of each residual branch. A gate that starts at 1/2 has the effect of 0.5.

        Raises:
            OptionError: If the name of the attention is unknown, or the widths are invalid for this network.
        """
        super().__init__()
        if len(widths) != len(depths) or min(widths) < 1 or (small and list(widths) != sorted(widths)):
            order = ", none smaller than the one before" if small else ""
            raise OptionError(f"widths must be {len(depths)} numbers of 1 or more{order}, got {tuple(widths)}.")
        make = ATTENTION[one_of(attention, list(ATTENTION), "attention")] if isinstance(attention, str) else attention
        between = make if getattr(make, "func", make) is BAM else None  # `func`: the class inside a partial
        inside = None if between else make

        channels = widths[0]
        self.conv1 = conv(in_channels, channels, 3, stem_stride) if small else conv(in_channels, channels, 7, 2)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, padding=1)

        reduction = stem_stride if small else 4  # downsampling factor per side
        self.feature_info: list[dict[str, int | str]] = [
            {"num_chs": channels, "reduction": stem_stride if small else 2, "module": "relu"}
        ]  # timm's keys
        self.stages: list[str] = []
        for number, (depth, width) in enumerate(zip(depths, widths, strict=True), start=1):
            stride = 1 if number == 1 else 2
            reduction *= stride
            blocks: list[nn.Module] = []
            for step in (stride, *(1,) * (depth - 1)):  # only the first block of a stage changes the shape
                shortcut = _shortcut(channels, width * block.expansion, step, project=not small)
                blocks.append(block(channels, width, step, shortcut, _plug(inside, width * block.expansion)))
                channels = width * block.expansion
            self._then(f"layer{number}", nn.Sequential(*blocks))
            self.feature_info.append({"num_chs": channels, "reduction": reduction, "module": f"layer{number}"})
            if between and number < len(depths):
                self._then(f"bam{number}", _plug(between, channels))

        for part in self.modules():
            if isinstance(part, (BasicBlock, Bottleneck)):
                nn.init.constant_(part.last_norm.weight, branch_gain)
        self.in_chans, self.num_features = in_channels, channels
        self.reset_classifier(num_classes)

    def _then(self, name: str, module: nn.Module) -> None:
        """Append a module to the stages."""
        self.add_module(name, module)
        self.stages.append(name)  # names, not modules, so that replaced stages take effect

    def forward(self, image: Tensor) -> Tensor:
        """Compute class scores, `(B, num_classes)`."""
        return self.forward_head(self.forward_features(image))

    def forward_features(self, image: Tensor) -> Tensor:
        """Compute the last feature map, `(B, num_features, H / 32, W / 32)`; small networks divide H and W by `4 * stem_stride`."""
        x: Tensor = self.maxpool(self.relu(self.bn1(self.conv1(image))))  # (B, widths[0], H / 4, W / 4), or H / stem_stride
        for name in self.stages:
            x = getattr(self, name)(x)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Compute class scores from the last feature map, or with `pre_logits` the pooled features `(B, num_features)`."""
        pooled = x.mean((2, 3))  # (B, num_features)
        out: Tensor = pooled if pre_logits else self.fc(pooled)
        return out

    def get_classifier(self) -> nn.Module:
        """Return the last layer."""
        return self.fc

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the last layer. With 0 classes there is none, and the output is the pooled features."""
        self.num_classes = num_classes
        last = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        self.fc = last.to(self.conv1.weight)  # its device and dtype


class BasicBlock(nn.Module):
    """Basic block of two 3x3 convolutions: `relu(attention(bn(conv(relu(bn(conv(x)))))) + x)`."""

    expansion = 1  # ratio of output channels to `width`

    def __init__(self, inputs: int, width: int, stride: int, shortcut: nn.Module, attention: nn.Module) -> None:
        """Build the block with the given shortcut and attention."""
        super().__init__()
        self.conv1 = conv(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.attention = attention  # keeps the shape
        self.downsample = shortcut

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """The norm that ends the residual branch."""
        return self.bn2

    def forward(self, x: Tensor) -> Tensor:
        """Compute `(B, width, H / stride, W / stride)` from `(B, inputs, H, W)`."""
        out = self.bn1(self.conv1(x)).relu()
        out = self.bn2(self.conv2(out))
        added: Tensor = self.attention(out) + self.downsample(x)
        return added.relu()


class Bottleneck(nn.Module):
    """Bottleneck block: a 3x3 convolution with a quarter of the output channels, between two 1x1 convolutions."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, shortcut: nn.Module, attention: nn.Module) -> None:
        """Build the block with the given shortcut and attention, both for `4 * width` output channels."""
        super().__init__()
        self.conv1 = conv(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3, stride)  # in conv1, as in the paper, the stride skips 3 of 4 positions
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = conv(width, 4 * width, 1)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.attention = attention
        self.downsample = shortcut

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """The norm that ends the residual branch."""
        return self.bn3

    def forward(self, x: Tensor) -> Tensor:
        """Compute `(B, 4 * width, H / stride, W / stride)` from `(B, inputs, H, W)`."""
        out = self.bn1(self.conv1(x)).relu()
        out = self.bn2(self.conv2(out)).relu()
        out = self.bn3(self.conv3(out))
        added: Tensor = self.attention(out) + self.downsample(x)
        return added.relu()


class Subsample(nn.Module):
    """Shortcut of option A: takes every `stride`-th position and fills new channels with zeros. It has no parameters.

    It is a convolution with fixed weights, an operation that position tracking supports.
    """

    kept: Tensor

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        """Build the fixed kernel, which keeps all channels and appends zeros."""
        super().__init__()
        self.stride = stride
        self.register_buffer("kept", torch.eye(outputs, inputs)[..., None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute `(B, outputs, H / stride, W / stride)` from `(B, inputs, H, W)`."""
        return nn.functional.conv2d(x, self.kept, stride=self.stride)


def _shortcut(inputs: int, outputs: int, stride: int, *, project: bool) -> nn.Module:
    """Build the shortcut of a block: the identity, option A or a projection."""
    if inputs == outputs and stride == 1:
        return nn.Identity()
    if not project:
        return Subsample(inputs, outputs, stride)
    return nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


def conv(inputs: int, outputs: int, side: int, stride: int = 1) -> nn.Conv2d:
    """Build a convolution that keeps the resolution up to its stride. It has no bias, because a norm follows."""
    layer = nn.Conv2d(inputs, outputs, side, stride, padding=side // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def _plug(make: Callable[[int], nn.Module] | None, channels: int) -> nn.Module:
    """Build the attention for a number of channels; CBAM and BAM get the initialization of their authors' networks."""
    if make is None:
        return nn.Identity()
    module = make(channels)
    if isinstance(module, (BAM, CBAM)):
        _as_published(module)
    return module


def _as_published(module: BAM | CBAM) -> None:
    """Initialize as the authors do: convolutions by fan-out, biases 0, and weight 0 in CBAM's spatial norm, so that gate starts at 1/2."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            if part not in (module.fc1, module.fc2):  # linear layers there, with PyTorch's default
                nn.init.kaiming_normal_(part.weight, mode="fan_out")
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    if isinstance(module, CBAM):
        nn.init.zeros_(module.norm.weight)
