"""Non-local blocks."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor, nn

from visattn._support.checks import one_of
from visattn.errors import OptionError
from visattn.nn.feature_maps import attend, grid, halved, tokens
from visattn.nn.shapes import bottleneck, check_maps, normed

Scale = Literal["width", "channels"]

Kind = Literal["embedded_gaussian", "gaussian", "dot", "concat"]


class NonLocal(nn.Module):
    """Non-local block: to each place a mean over all places is added, weighted by how alike they are.

    `theta, phi, g` are 1 x 1 convolutions of `x` to `width` channels, and `z_i = x_i + BN(W sum_j A_ij g_j)` with

    - `embedded_gaussian`: `A_ij = softmax_j(theta_i . phi_j)`
    - `gaussian`: `A_ij = softmax_j(x_i . x_j)`
    - `dot`: `A_ij = theta_i . phi_j / N`
    - `concat`: `A_ij = relu(w . [theta_i, phi_j]) / N`

    over the `N` places of the keys. The norm's weight starts at zero, or `W` where there is no norm: the block changes nothing at
    first. A few of them belong in the later stages, since `A` has as many numbers as the square of the places.

    Args:
        channels: C.
        width: Channels of `theta`, `phi` and `g`; half of C by default.
        kind: How alike two places are.
        scale: What the two kinds with a softmax divide their scores by: nothing, the root of the keys' `width`, or that of
            `channels`, as in timm.
        pool: Whether keys and values are the largest of each 2 x 2 places, behind `phi` and `g`.
        norm: Whether there is the batch norm.

    Shape:
        `(B, C, H, W)` to the same; with `need_weights` also `A`, `(B, 1, H * W, N)`, (query, key); rows sum to 1 with a softmax.

    Publishes:
        Nothing: no numbers are multiplied by `A`.

    Raises:
        OptionError: If a width is below 1, a name unknown, or the scale given for a kind without softmax.
        ShapeError: In the forward, if the input is not `(B, C, H, W)`, the norm trains on a single value, or a side of what is
            pooled is 1.

    Reference:
        Wang et al., "Non-local Neural Networks", CVPR 2018, arXiv:1711.07971. Differs: the paper's formula has no scale, its code has
        one as an option, and pools before `phi` and `g`; initial values are PyTorch's in the place of a deviation of 0.01.
    """

    def __init__(
        self,
        channels: int,
        *,
        width: int | None = None,
        kind: Kind = "embedded_gaussian",
        scale: Scale | None = None,
        pool: bool = False,
        norm: bool = True,
    ) -> None:
        """Build as the identity."""
        super().__init__()
        one_of(kind, get_args(Kind), "kind of NonLocal")
        if scale is not None:
            one_of(scale, get_args(Scale), "scale of NonLocal")
            if kind in ("dot", "concat"):
                raise OptionError(f"scale must be None for kind '{kind}', got '{scale}': only a softmax has one.")
        width = bottleneck(channels, 2, width)
        embedded = kind != "gaussian"
        self.channels, self.width, self.kind, self.pool = channels, width, kind, pool
        self.scale = {None: 1.0, "width": (width if embedded else channels) ** -0.5, "channels": channels**-0.5}[scale]
        self.query = nn.Conv2d(channels, width, 1) if embedded else nn.Identity()
        self.key = nn.Conv2d(channels, width, 1) if embedded else nn.Identity()
        self.value = nn.Conv2d(channels, width, 1)
        if kind == "concat":  # w = [w_query, w_key]
            self.from_query = nn.Linear(width, 1, bias=False)
            self.from_key = nn.Linear(width, 1, bias=False)
        self.output = nn.Conv2d(width, channels, 1)
        self.norm = nn.BatchNorm2d(channels) if norm else None
        for parameter in (self.norm or self.output).parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Add to each place what the others hold."""
        check_maps(self, x, self.channels)
        key, value = self.key(x), self.value(x)
        if self.pool:
            key, value = halved(self, key), halved(self, value)
        mixed, weights = self._mix(tokens(self.query(x)), tokens(key), tokens(value), need_weights)
        change = self.output(grid(mixed, x))
        y: Tensor = x + (change if self.norm is None else normed(self.norm, change))
        return y if weights is None else (y, weights)

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool) -> tuple[Tensor, Tensor | None]:
        """`A g`, `(B, 1, H * W, width)`, and `A` if it is asked for."""
        if self.kind in ("embedded_gaussian", "gaussian"):
            return attend(query, key, value, scale=self.scale, need_weights=need_weights)
        if self.kind == "dot":
            weights = query / key.shape[2] @ key.transpose(2, 3)  # divided first: float16 holds no more than 65504
        else:
            weights = (self.from_query(query) + self.from_key(key).transpose(2, 3)).relu() / key.shape[2]
        return weights @ value, weights if need_weights else None
