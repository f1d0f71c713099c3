"""Gather-excite (GE)."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn import functional

from visattn._support.checks import at_least, one_of
from visattn._support.publish import publish
from visattn.errors import OptionError
from visattn.nn.shape_checks import bottleneck, check_maps, check_size, normed

Variant = Literal["theta-minus", "theta", "theta-plus"]


class GatherExcite(nn.Module):
    """Gather-excite: each position of each channel is scaled by a gate computed from its neighborhood in that channel.

    `g = sigmoid(up(gather(x)))`, `y = x g`, where `up` is nearest-neighbor upsampling. The variants differ in `gather`:

    - `theta-minus`: average pooling with kernel `2e - 1` and stride `e`, padding not counted; or the mean over the whole map.
    - `theta`: learned. `log2(e)` depthwise 3x3 convolutions of stride 2, each followed by a norm, with a ReLU between them; or one
      depthwise convolution as large as the map.
    - `theta-plus`: as `theta`, followed by the two layers of squeeze-and-excitation.

    Place it as squeeze-and-excitation: on the residual branch, after its last norm and before the addition.

    Args:
        channels: Number of channels, C.
        reduction: Reduction ratio of `theta-plus`. The bottleneck has `C // reduction` channels, at least 1.
        width: Number of channels in the bottleneck; overrides `reduction`.
        extent: Extent `e`: 2, 4 or 8, or 0 for the whole map.
        variant: One of the paper's three: `theta-minus`, `theta` or `theta-plus`.
        size: Size `(H, W)` of the maps. Required if a convolution gathers the whole map; the module then takes no other size.

    Shape:
        `(B, C, H, W)` to `(B, C, H, W)`.

    Publishes:
        `gate`, `(B, C, H, W)`, in `(0, 1)`; with `extent=0`, `channel_gate`, `(B, C)`.

    Raises:
        OptionError: If a width is below 1, the extent or variant is unknown, or `size` is missing.
        ShapeError: In the forward pass, if the input is not `(B, C, H, W)` or has another size, or if a batch norm in training mode gets
            one value per channel.

    Reference:
        Hu et al., "Gather-Excite: Exploiting Feature Context in Convolutional Neural Networks", NeurIPS 2018, arXiv:1810.12348. Differs:
        sizes that `e` does not divide are allowed; the gate is resized to the map, not upsampled by the factor `e`.
    """

    def __init__(
        self,
        channels: int,
        reduction: int = 16,
        *,
        width: int | None = None,
        extent: int = 0,
        variant: Variant = "theta-minus",
        size: tuple[int, int] | None = None,
    ) -> None:
        """Build with PyTorch's default initialization."""
        super().__init__()
        one_of(variant, get_args(Variant), "variant of GatherExcite")
        if extent not in (0, 2, 4, 8):
            raise OptionError(f"extent must be 2, 4 or 8, or 0 for the whole map, got {extent!r}.")
        self.channels, self.extent = channels, extent
        hidden = bottleneck(channels, reduction, width)
        convs: list[nn.Module] = []
        self.size: tuple[int, int] | None = None
        if variant != "theta-minus" and extent:
            steps = range(extent.bit_length() - 1)
            convs = [nn.Conv2d(channels, channels, 3, stride=2, padding=1, groups=channels, bias=False) for _ in steps]
        elif variant != "theta-minus":
            if size is None:
                raise OptionError(f"size must be given to gather the whole map in {variant}. Pass size=(H, W), or an extent.")
            self.size = at_least("height", size[0]), at_least("width", size[1])
            convs = [nn.Conv2d(channels, channels, self.size, groups=channels, bias=False)]
        self.convs = nn.ModuleList(convs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in convs)
        self.excite = (
            nn.Sequential(nn.Conv2d(channels, hidden, 1), nn.ReLU(), nn.Conv2d(hidden, channels, 1))
            if variant == "theta-plus"
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the gate."""
        check_maps(self, x, self.channels)
        gate: Tensor = self.excite(self._gather(x)).sigmoid()  # (B, C, h, w)
        if self.extent:
            gate = functional.interpolate(gate, size=x.shape[2:], mode="nearest")  # (B, C, H, W)
        publish(self, "gate" if self.extent else "channel_gate", gate)
        return x * gate

    def _gather(self, x: Tensor) -> Tensor:
        """Gather context for each cell of a coarse grid: `(B, C, h, w)`, where `h` is `ceil(H / e)`, or 1 for the whole map."""
        if self.size:
            check_size(self, x, self.size)
        for step, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = normed(norm, conv(x.relu() if step else x))
        if len(self.convs):
            return x
        if not self.extent:
            return x.mean((2, 3), keepdim=True)
        side = 2 * self.extent - 1
        return functional.avg_pool2d(x, side, self.extent, self.extent - 1, count_include_pad=False)
