"""Reading and writing through a grid of Gaussian filters (DRAW)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from visattn.errors import ShapeError
from visattn.nn.feature_maps import exact, wide
from visattn.nn.shapes import at_least, check_maps, is_traced, shape_text


class DrawRead(nn.Module):
    """The reader of DRAW: a grid of Gaussian filters, placed and spaced by a state, that looks at an image.

    `(x, y, log s^2, log d, log gamma) = W h + b`; the center is `((A + 1) / 2 (x + 1), (B + 1) / 2 (y + 1))` in pixels counted from 1,
    the spacing `(max(A, B) - 1) / (N - 1) d`, and filter `i` of `1..N` lies at `center + (i - N / 2 - 0.5) spacing`. With the filters'
    weights on columns and rows, `F_X` and `F_Y`, whose rows sum to 1, `y = gamma F_Y image F_X^T`. The paper reads the image and what
    is missing of it: concatenate both along the channels.

    Args:
        width: Length of `h`.
        glimpse: N.

    Shape:
        `(B, C, H, W)` and `(B, width)` to `(B, C, N, N)`, with A = W and B = H; with `need_weights` also `(B, 1, N * N, H * W)`, by
        which each filter mixes the pixels, without `gamma`. Rows sum to 1, or to 0 for a filter off the image.

    Raises:
        OptionError: If a number is below 1.
        ShapeError: In the forward, if the images are not `(B, C, H, W)` or the state not `(B, width)`.

    Reference:
        Gregor et al., "DRAW: A Recurrent Neural Network For Image Generation", ICML 2015, arXiv:1502.04623. Differs: a filter off the
        image gives 0; dividing by its sum would give NaN. Ports that count filters or pixels from 0 look beside the center.
    """

    def __init__(self, width: int, *, glimpse: int = 12) -> None:
        """Build with PyTorch's initial values of a linear layer."""
        super().__init__()
        self.width, self.glimpse = at_least("width", width), at_least("glimpse", glimpse)
        self.window = nn.Linear(width, 5)

    def forward(self, images: Tensor, state: Tensor, need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Look where the state says."""
        check_maps(self, images, None)
        _check_state(state, self.width)
        with exact(images):
            rows, columns, log_gamma = _filters(self.window, state, images.shape[2], images.shape[3], self.glimpse)
            seen = rows.unsqueeze(1) @ wide(images) @ columns.transpose(1, 2).unsqueeze(1)
            y = (log_gamma.exp() * seen).to(images.dtype)
            if not need_weights:
                return y
            weights = rows[:, :, None, :, None] * columns[:, None, :, None, :]  # (B, N, N, H, W)
            return y, weights.flatten(3).flatten(1, 2).unsqueeze(1)


class DrawWrite(nn.Module):
    """The writer of DRAW: a patch, laid on a canvas by a grid of Gaussian filters that a state places and spaces.

    `w = U h + c`, and `y = canvas + F_Y^T w F_X / gamma`, with filters as in `DrawRead` from numbers of its own.

    Args:
        channels: C.
        width: Length of `h`.
        glimpse: N.

    Shape:
        Canvas `(B, C, H, W)` and state `(B, width)` to `(B, C, H, W)`. Filters off the canvas write nothing.

    Raises:
        OptionError: If a number is below 1.
        ShapeError: In the forward, if the canvas is not `(B, C, H, W)` or the state not `(B, width)`.

    Reference:
        Gregor et al., "DRAW: A Recurrent Neural Network For Image Generation", ICML 2015, arXiv:1502.04623. Differs as `DrawRead`.
    """

    def __init__(self, channels: int, width: int, *, glimpse: int = 5) -> None:
        """Build with PyTorch's initial values of a linear layer."""
        super().__init__()
        self.channels, self.width = at_least("channels", channels), at_least("width", width)
        self.glimpse = at_least("glimpse", glimpse)
        self.window = nn.Linear(width, 5)
        self.patch = nn.Linear(width, channels * glimpse**2)

    def forward(self, canvas: Tensor, state: Tensor) -> Tensor:
        """Write where the state says."""
        check_maps(self, canvas, self.channels)
        _check_state(state, self.width)
        patch = torch.unflatten(self.patch(state), 1, (self.channels, self.glimpse, self.glimpse))
        with exact(canvas):
            rows, columns, log_gamma = _filters(self.window, state, canvas.shape[2], canvas.shape[3], self.glimpse)
            written = rows.transpose(1, 2).unsqueeze(1) @ wide(patch) @ columns.unsqueeze(1)
            return canvas + ((-log_gamma).exp() * written).to(canvas.dtype)


def _check_state(state: Tensor, width: int) -> None:
    if not is_traced(state) and (state.ndim != 2 or state.shape[1] != width):
        raise ShapeError(f"the state must be (B, {width}), got {shape_text(state)}. Pass the decoder's hidden state.")


def _filters(window: nn.Linear, state: Tensor, height: int, width: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """`F_Y`, `(B, N, H)`, `F_X`, `(B, N, W)`, and `log gamma`, `(B, 1, 1, 1)`."""
    x, y, log_variance, log_spacing, log_gamma = wide(window(state.to(window.weight.dtype))).unbind(1)
    spacing = (max(height, width) - 1) / max(count - 1, 1) * log_spacing.exp()
    number = torch.arange(1, count + 1, device=state.device) - count / 2 - 0.5

    def along(center: Tensor, side: int) -> Tensor:
        at = ((side + 1) / 2 * (center + 1))[:, None] + number * spacing[:, None]  # (B, N)
        pixel = torch.arange(1, side + 1, device=state.device)
        weights = (-((pixel - at[..., None]) ** 2) / (2 * log_variance.exp()[:, None, None])).exp()
        return weights / weights.sum(2, keepdim=True).clamp_min(1e-8)

    return along(y, height), along(x, width), log_gamma[:, None, None, None]
