"""Non-local blocks."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor, nn

from visattn._support.checks import one_of
from visattn.errors import OptionError
from visattn.nn.positions import attend, grid, halved, tokens
from visattn.nn.shape_checks import bottleneck, check_maps, normed

Scale = Literal["width", "channels"]

Variant = Literal["embedded_gaussian", "gaussian", "dot", "concat"]


class NonLocal(nn.Module):
    """Non-local block: a weighted mean over all positions is added to each position; the weights are pairwise similarities.

    `theta, phi, g` are 1 x 1 convolutions of `x` to `width` channels, and `z_i = x_i + BN(W sum_j A_ij g_j)` with

    - `embedded_gaussian`: `A_ij = softmax_j(theta_i . phi_j)`
    - `gaussian`: `A_ij = softmax_j(x_i . x_j)`
    - `dot`: `A_ij = theta_i . phi_j / N`
    - `concat`: `A_ij = relu(w . [theta_i, phi_j]) / N`

    over the `N` key positions. The batch norm's weight starts at zero, or `W` if there is no norm, so the block starts as the identity.
    Place a few of them in the later stages: the size of `A` grows with the square of the number of positions.

    Args:
        channels: Number of channels, C.
        width: Number of channels of `theta`, `phi` and `g`; half of C by default.
        variant: Pairwise similarity function, one of the four above.
        scale: Divisor of the scores in the two variants with a softmax. None: no scaling. `width`: the square root of the width of the
            keys. `channels`: the square root of `channels`, as in timm.
        pool: Whether to apply 2 x 2 max pooling to keys and values, after `phi` and `g`.
        norm: Whether to use the batch norm.

    Shape:
        `(B, C, H, W)` to `(B, C, H, W)`; with `need_weights` also `A`, `(B, 1, H * W, N)`, (query, key). Rows sum to 1 in the variants with
        a softmax.

    Publishes:
        Nothing: attention weights are not gates.

    Raises:
        OptionError: If a width is below 1, a name is unknown, or `scale` is given for a variant without a softmax.
        ShapeError: In the forward pass, if the input is not `(B, C, H, W)`, if the batch norm in training mode gets one value per channel,
            or if a map to be pooled has a side of 1.

    Reference:
        Wang et al., "Non-local Neural Networks", CVPR 2018, arXiv:1711.07971. Differs: the paper's formula has no scale, and its code
        offers one as an option. The paper pools before `phi` and `g`. The initialization is PyTorch's default instead of a standard
        deviation of 0.01.
    """

    def __init__(
        self,
        channels: int,
        *,
        width: int | None = None,
        variant: Variant = "embedded_gaussian",
        scale: Scale | None = None,
        pool: bool = False,
        norm: bool = True,
    ) -> None:
        """Build as the identity."""
        super().__init__()
        one_of(variant, get_args(Variant), "variant of NonLocal")
        if scale is not None:
            one_of(scale, get_args(Scale), "scale of NonLocal")
            if variant in ("dot", "concat"):
                raise OptionError(
                    f"scale must be None for variant '{variant}', got '{scale}'. Only the variants with a softmax have a scale."
                )
        width = bottleneck(channels, 2, width)
        embedded = variant != "gaussian"
        self.channels, self.width, self.variant, self.pool = channels, width, variant, pool
        self.scale = {None: 1.0, "width": (width if embedded else channels) ** -0.5, "channels": channels**-0.5}[scale]
        self.query = nn.Conv2d(channels, width, 1) if embedded else nn.Identity()
        self.key = nn.Conv2d(channels, width, 1) if embedded else nn.Identity()
        self.value = nn.Conv2d(channels, width, 1)
        if variant == "concat":  # w = [w_query, w_key]
            self.from_query = nn.Linear(width, 1, bias=False)
            self.from_key = nn.Linear(width, 1, bias=False)
        self.output = nn.Conv2d(width, channels, 1)
        self.norm = nn.BatchNorm2d(channels) if norm else None
        for parameter in (self.norm or self.output).parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Add the attention output to each position."""
        check_maps(self, x, self.channels)
        key, value = self.key(x), self.value(x)
        if self.pool:
            key, value = halved(self, key), halved(self, value)
        mixed, weights = self._mix(tokens(self.query(x)), tokens(key), tokens(value), need_weights)
        change = self.output(grid(mixed, x))  # (B, C, H, W)
        y: Tensor = x + (change if self.norm is None else normed(self.norm, change))
        return y if weights is None else (y, weights)

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool) -> tuple[Tensor, Tensor | None]:
        """Compute `A g`, `(B, 1, H * W, width)`, and `A` on request."""
        if self.variant in ("embedded_gaussian", "gaussian"):
            return attend(query, key, value, scale=self.scale, need_weights=need_weights)
        if self.variant == "dot":
            weights = query / key.shape[2] @ key.transpose(2, 3)  # divided first, because float16 ends at 65504
        else:
            weights = (self.from_query(query) + self.from_key(key).transpose(2, 3)).relu() / key.shape[2]
        return weights @ value, weights if need_weights else None
