"""Gather-excite (GE)."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn import functional

from visattn._support.checks import one_of
from visattn._support.publish import publish
from visattn.errors import OptionError
from visattn.nn.shapes import at_least, bottleneck, check_maps, check_size, normed

Variant = Literal["theta-minus", "theta", "theta-plus"]


class GatherExcite(nn.Module):
    """Gather-excite: each place of each channel is scaled by a gate that sees its surroundings in that channel.

    `g = sigmoid(up(gather(x)))`, `y = x g`, where `up` repeats the nearest value. In `theta-minus`, `gather` is the mean over
    `2e - 1` rows and columns at every `e`-th place, as far as they lie in the map, or over the whole map. In `theta` it is learned:
    `log2(e)` depthwise 3x3 convolutions of stride 2, each with a norm and all but the last with a ReLU, or one depthwise convolution
    as large as the map. `theta-plus` has squeeze-and-excitation's two layers between the learned `gather` and `up`. It belongs where
    squeeze-and-excitation does.

    Args:
        channels: C.
        reduction: In `theta-plus` the bottleneck has `C // reduction` channels, at least 1.
        width: The bottleneck's channels, in the place of `reduction`.
        extent: `e`: 2, 4 or 8, or 0 for the whole map.
        variant: Which of the paper's three.
        size: `(H, W)` of the maps; needed where the whole map is gathered by a convolution, which then takes no other size.

    Shape:
        `(B, C, H, W)` to the same.

    Publishes:
        `gate`, `(B, C, H, W)`, in `(0, 1)`; if the extent is the whole map, `channel_gate`, `(B, C)`.

    Raises:
        OptionError: If a width is below 1, the extent or the variant unknown, or `size` missing.
        ShapeError: In the forward, if the input is not `(B, C, H, W)`, or of another size, or a norm trains on a single value.

    Reference:
        Hu et al., "Gather-Excite: Exploiting Feature Context in Convolutional Neural Networks", NeurIPS 2018, arXiv:1810.12348.
        Differs: sizes that `e` does not divide are allowed; the gate is brought to the map's size, not multiplied by `e`.
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
        """Build with PyTorch's initial values of a convolution."""
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
        """Scale what was gathered around."""
        check_maps(self, x, self.channels)
        gate: Tensor = self.excite(self._gather(x)).sigmoid()
        if self.extent:
            gate = functional.interpolate(gate, size=x.shape[2:], mode="nearest")
        publish(self, "gate" if self.extent else "channel_gate", gate)
        return x * gate

    def _gather(self, x: Tensor) -> Tensor:
        """`(B, C, h, w)` with `h = ceil(H / e)`, or 1."""
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
