"""Reading and writing through a grid of Gaussian filters (DRAW)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from visattn._support.checks import at_least
from visattn._support.publish import publish
from visattn.errors import ShapeError
from visattn.nn.positions import exact, wide
from visattn.nn.shape_checks import check_maps, is_traced, shape_text


class DrawRead(nn.Module):
    """Read operation of DRAW: an N x N grid of Gaussian filters, positioned by the hidden state, extracts a patch of an image.

    `(x, y, log s^2, log d, log gamma) = W h + b`. The grid center is `((A + 1) / 2 (x + 1), (B + 1) / 2 (y + 1))` in pixels counted from 1,
    its spacing is `(max(A, B) - 1) / (N - 1) d`, and filter `i` of `1..N` lies at `center + (i - N / 2 - 0.5) spacing`. `F_X` and `F_Y` are
    the filter weights on columns and rows; their rows sum to 1. The output is `y = gamma F_Y image F_X^T`.

    The paper reads from the image and from the error image: concatenate both along the channels.

    Args:
        hidden_dim: Width of the hidden state `h`.
        patch_size: Filters per side, N.

    Shape:
        Images `(B, C, H, W)` and hidden state `(B, hidden_dim)` to `(B, C, N, N)`, with A = W and B = H. With `need_weights` also the
        weights of each filter on the pixels, `(B, 1, N * N, H * W)`, without `gamma`. Their rows sum to 1, or to 0 for a filter outside the
        image.

    Raises:
        OptionError: If a number is below 1.
        ShapeError: In the forward pass, if the images are not `(B, C, H, W)` or the hidden state is not `(B, hidden_dim)`.

    Reference:
        Gregor et al., "DRAW: A Recurrent Neural Network For Image Generation", ICML 2015, arXiv:1502.04623. Differs: a filter outside the
        image gives 0, because dividing by its sum would give NaN. Ports that count filters or pixels from 0 read next to the center.
    """

    def __init__(self, hidden_dim: int, *, patch_size: int = 12) -> None:
        """Build with PyTorch's default initialization."""
        super().__init__()
        self.hidden_dim, self.patch_size = at_least("hidden_dim", hidden_dim), at_least("patch_size", patch_size)
        self.window = nn.Linear(hidden_dim, 5)

    def forward(self, images: Tensor, state: Tensor, need_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Read a patch of each image."""
        check_maps(self, images, None)
        _check_state(state, self.hidden_dim)
        publish(self, "glimpse", lambda: self.boxes(state, (images.shape[2], images.shape[3]))[:, :, :4], images)
        with exact(images):
            rows, columns, log_gamma = _filters(self.window, state, images.shape[2], images.shape[3], self.patch_size)
            seen = rows.unsqueeze(1) @ wide(images) @ columns.transpose(1, 2).unsqueeze(1)  # (B, C, N, N)
            y = (log_gamma.exp() * seen).to(images.dtype)
            if not need_weights:
                return y
            weights = rows[:, :, None, :, None] * columns[:, None, :, None, :]  # (B, N, N, H, W)
            return y, weights.flatten(3).flatten(1, 2).unsqueeze(1)

    def boxes(self, state: Tensor, size: tuple[int, int]) -> Tensor:
        """Compute where the grid of filters lies on an image of `size` (height, width), for figures: see `DrawWrite.boxes`."""
        return _boxes(self.window, state, size, self.patch_size)


class DrawWrite(nn.Module):
    """Write operation of DRAW: a patch is added to a canvas through a grid of Gaussian filters, positioned by the hidden state.

    `w = U h + c`, and `y = canvas + F_Y^T w F_X / gamma`, with filters as in `DrawRead` but parameters of its own.

    Args:
        channels: Number of channels, C.
        hidden_dim: Width of the hidden state `h`.
        patch_size: Filters per side, N.

    Shape:
        Canvas `(B, C, H, W)` and hidden state `(B, hidden_dim)` to `(B, C, H, W)`. Filters outside the canvas write nothing.

    Raises:
        OptionError: If a number is below 1.
        ShapeError: In the forward pass, if the canvas is not `(B, C, H, W)` or the hidden state is not `(B, hidden_dim)`.

    Reference:
        Gregor et al., "DRAW: A Recurrent Neural Network For Image Generation", ICML 2015, arXiv:1502.04623. Differs: as `DrawRead`.
    """

    def __init__(self, channels: int, hidden_dim: int, *, patch_size: int = 5) -> None:
        """Build with PyTorch's default initialization."""
        super().__init__()
        self.channels, self.hidden_dim = at_least("channels", channels), at_least("hidden_dim", hidden_dim)
        self.patch_size = at_least("patch_size", patch_size)
        self.window = nn.Linear(hidden_dim, 5)
        self.patch = nn.Linear(hidden_dim, channels * patch_size**2)

    def forward(self, canvas: Tensor, state: Tensor) -> Tensor:
        """Add a patch to each canvas."""
        check_maps(self, canvas, self.channels)
        _check_state(state, self.hidden_dim)
        publish(self, "window", lambda: self.boxes(state, (canvas.shape[2], canvas.shape[3])), canvas)
        patch = torch.unflatten(self.patch(state), 1, (self.channels, self.patch_size, self.patch_size))  # (B, C, N, N)
        with exact(canvas):
            rows, columns, log_gamma = _filters(self.window, state, canvas.shape[2], canvas.shape[3], self.patch_size)
            written = rows.transpose(1, 2).unsqueeze(1) @ wide(patch) @ columns.unsqueeze(1)  # (B, C, H, W)
            return canvas + ((-log_gamma).exp() * written).to(canvas.dtype)

    def boxes(self, state: Tensor, size: tuple[int, int]) -> Tensor:
        """Compute where the grid of filters lies on a canvas, for figures.

        Args:
            state: Hidden state `(B, hidden_dim)`, as in the forward pass.
            size: Size `(height, width)` of the canvas in pixels.

        Returns:
            `(B, 1, 6)` in continuous pixels: top, left, bottom and right, half a spacing beyond the outer filters, then row and column of
            the center. The box may extend beyond the canvas.
        """
        return _boxes(self.window, state, size, self.patch_size)


def _check_state(state: Tensor, hidden_dim: int) -> None:
    if not is_traced(state) and (state.ndim != 2 or state.shape[1] != hidden_dim):
        raise ShapeError(f"the hidden state must be (B, {hidden_dim}), got {shape_text(state)}. Pass that of the decoder.")


def _filters(window: nn.Linear, state: Tensor, height: int, width: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the filters `F_Y`, `(B, N, H)`, and `F_X`, `(B, N, W)`, and `log gamma`, `(B, 1, 1, 1)`."""
    y, x, log_variance, spacing, log_gamma = _window(window, state, height, width, count)
    number = torch.arange(1, count + 1, device=state.device) - count / 2 - 0.5

    def along(center: Tensor, side: int) -> Tensor:
        at = center[:, None] + number * spacing[:, None]  # (B, N)
        pixel = torch.arange(1, side + 1, device=state.device)
        weights = (-((pixel - at[..., None]) ** 2) / (2 * log_variance.exp()[:, None, None])).exp()  # (B, N, side)
        return weights / weights.sum(2, keepdim=True).clamp_min(1e-8)

    return along(y, height), along(x, width), log_gamma[:, None, None, None]


def _window(window: nn.Linear, state: Tensor, height: int, width: int, count: int) -> tuple[Tensor, ...]:
    """Compute row and column of the center in pixels from 1, log variance, spacing and `log gamma`, `(B,)` each."""
    x, y, log_variance, log_spacing, log_gamma = wide(window(state.to(window.weight.dtype))).unbind(1)
    spacing = (max(height, width) - 1) / max(count - 1, 1) * log_spacing.exp()
    return (height + 1) / 2 * (y + 1), (width + 1) / 2 * (x + 1), log_variance, spacing, log_gamma


def _boxes(window: nn.Linear, state: Tensor, size: tuple[int, int], count: int) -> Tensor:
    """Return box and center of the grid of filters in continuous pixels, `(B, 1, 6)`."""
    y, x, _, spacing, _ = _window(window, state, *size, count)
    center = torch.stack((y, x), 1) - 0.5  # pixel 1 extends from 0 to 1
    half = spacing[:, None] * count / 2
    return torch.cat((center - half, center + half, center), 1)[:, None]
