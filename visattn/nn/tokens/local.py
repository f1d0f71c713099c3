"""Local attention around a predicted position (Luong et al.)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from visattn._support.checks import at_least
from visattn._support.publish import is_heard, publish
from visattn.errors import OptionError, ShapeError
from visattn.nn.shape_checks import check_tokens, is_traced
from visattn.nn.tokens.multihead import check_mask, softmax
from visattn.nn.tokens.score_functions import check_value


class LocalMonotonic(nn.Module):
    """Local attention with monotonic alignment: query `t` attends to a window around position `t`.

    The softmax is over the positions at most `radius` away along each axis. The window is clipped at the borders; a window that covers the
    map gives global attention.

    Args:
        radius: Half width of the window, D.

    Shape:
        Scores `(B, T, N)`, values `(B, N, dv)` and a grid to the output `(B, T, dv)` and the weights `(B, T, N)`. The grid is `(N,)` or
        `(rows, columns)`, with N positions in row-major order. `first` is the index of the first query, for decoders that pass one query at
        a time. Queries beyond the last position attend around the last one. The mask is that of `attend`.

    Raises:
        OptionError: If the radius is below 1 or the mask is not boolean.
        ShapeError: In the forward pass, if a shape is wrong or the grid does not have N positions.

    Reference:
        Luong et al., "Effective Approaches to Attention-based Neural Machine Translation", EMNLP 2015, arXiv:1508.04025 (local-m). The
        extension to 2-d grids is ours: position `t` is in row-major order, and the window is square.
    """

    def __init__(self, radius: int) -> None:
        """Build the module; it has no parameters."""
        super().__init__()
        self.radius = at_least("radius", radius)

    def forward(
        self, scores: Tensor, value: Tensor, grid: Sequence[int], mask: Tensor | None = None, *, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Attend around the position of each query."""
        check_value(scores, value)
        check_mask(mask, scores.shape)
        places = _places(grid, scores)  # (N, axes)
        number = torch.arange(first, first + scores.shape[1], device=scores.device).clamp(max=len(places) - 1)
        centers = places[number]  # (T, axes)
        near = ((centers[:, None] - places).abs() <= self.radius).all(-1)  # (T, N)
        _publish(self, value, centers.expand(len(value), -1, -1), grid)
        weights = softmax(scores, near if mask is None else near & mask)
        return weights.to(value.dtype) @ value, weights


class LocalPredictive(nn.Module):
    """Local attention with predictive alignment: each query predicts the position around which it attends.

    Along each axis of length S the center is `p = (S - 1) sigmoid(v . tanh(W q))`. The softmax over the positions at most `radius` away is
    multiplied by a Gaussian around the center, with standard deviation `radius / 2`. The center gets its gradient through this Gaussian.

    Args:
        query_dim: Width of a query, dq.
        radius: Half width of the window, D.
        axes: Number of axes: 1 for a sequence, 2 for a grid.
        attention_dim: Width of the hidden layer, dq by default.
        renormalize: Whether to make the weights sum to 1, by adding the logarithm of the Gaussian to the scores. The paper does not: its
            weights sum to less than 1 (0.05 to 0.1 on a grid), and the output shrinks in proportion.
        truncate: Whether positions outside the window get weight 0, as in the paper. Otherwise only the Gaussian makes attention local, and
            the weights are a smooth function of the center.

    Shape:
        Queries `(B, T, dq)`, scores `(B, T, N)`, values `(B, N, dv)` and a grid to the output `(B, T, dv)` and the weights `(B, T, N)`.
        The grid is `(N,)` or `(rows, columns)`, with N positions in row-major order. The mask is that of `attend`.

    Raises:
        OptionError: If a number is below 1, `axes` is not 1 or 2, or the mask is not boolean.
        ShapeError: In the forward pass, if a shape is wrong or the grid does not have N positions.

    Reference:
        Luong et al., "Effective Approaches to Attention-based Neural Machine Translation", EMNLP 2015, arXiv:1508.04025 (local-p). Differs:
        the paper's `p` is `S sigmoid(...)`; ours ends at the last position, as in the authors' code, which also rounds the center of the
        window down. The extension to 2-d grids is ours: the Gaussian is isotropic and the window square.
    """

    def __init__(
        self,
        query_dim: int,
        radius: int,
        *,
        axes: int = 2,
        attention_dim: int | None = None,
        renormalize: bool = False,
        truncate: bool = True,
    ) -> None:
        """Build with PyTorch's default initialization; predicted centers start near the middle."""
        super().__init__()
        if axes not in {1, 2}:
            raise OptionError(f"axes must be 1 or 2, got {axes}. A sequence has 1, an image 2.")
        self.query_dim, self.radius = at_least("query_dim", query_dim), at_least("radius", radius)
        self.axes, self.renormalize, self.truncate = axes, renormalize, truncate
        attention_dim = query_dim if attention_dim is None else at_least("attention_dim", attention_dim)
        self.hidden = nn.Linear(query_dim, attention_dim, bias=False)
        self.vector = nn.Linear(attention_dim, axes, bias=False)

    def forward(
        self, query: Tensor, scores: Tensor, value: Tensor, grid: Sequence[int], mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend around the predicted centers."""
        return self.attend(scores, value, self.centers(query, grid), grid, mask)

    def centers(self, query: Tensor, grid: Sequence[int]) -> Tensor:
        """Predict the center of each query's window: `(B, T, axes)`, as indices from 0, row before column."""
        check_tokens(self, query, self.query_dim)
        if len(grid) != self.axes:
            raise ShapeError(
                f"the grid must have {self.axes} axes, got {tuple(grid)}. Build LocalPredictive with axes={len(grid)}."
            )
        share: Tensor = self.vector(self.hidden(query).tanh())  # (B, T, axes)
        share = share.to(torch.promote_types(share.dtype, torch.float32)).sigmoid()  # bfloat16 is too coarse for positions
        return share * torch.tensor([size - 1 for size in grid], dtype=share.dtype, device=share.device)

    def windows(self, centers: Tensor, grid: Sequence[int]) -> Tensor:
        """Compute which cells of a grid lie in the windows around centers `(B, T, 2)`, for figures.

        Returns:
            `(B, T, 6)` in cells: top, left, bottom and right of each window, clipped at the borders, then row and column of its center,
            where cell `i` extends from `i` to `i + 1`.
        """
        return _windows(centers, self.radius, grid)

    def attend(
        self, scores: Tensor, value: Tensor, centers: Tensor, grid: Sequence[int], mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend around given centers, `(B, T, axes)`."""
        check_value(scores, value)
        check_mask(mask, scores.shape)
        _check_grid(grid, scores)
        away = [torch.arange(size, device=scores.device) - centers[:, :, axis, None] for axis, size in enumerate(grid)]
        if self.truncate:
            _publish(self, value, centers, grid)
            near = _over_grid([distance.abs() <= self.radius for distance in away], torch.logical_and)  # (B, T, N)
            mask = near if mask is None else near & mask
        closeness = _over_grid([distance.square() * (-2 / self.radius**2) for distance in away], torch.add)  # log of the Gaussian
        weights = softmax(scores + closeness, mask) if self.renormalize else softmax(scores, mask) * closeness.exp()
        return weights.to(value.dtype) @ value, weights


def _publish(module: LocalMonotonic | LocalPredictive, value: Tensor, centers: Tensor, grid: Sequence[int]) -> None:
    """Publish the cells in reach of each query, and its center, `(B, T, axes)`, if the grid is that of a map."""
    if len(grid) == 2 and is_heard():
        publish(module, "window", lambda: _windows(centers, module.radius, grid), torch.unflatten(value.mT, 2, tuple(grid)))


def _windows(centers: Tensor, radius: int, grid: Sequence[int]) -> Tensor:
    """Return which cells lie at most `radius` away from centers along each axis, see `LocalPredictive.windows`."""
    last = torch.tensor(tuple(grid), dtype=torch.float64, device=centers.device) - 1
    exact = centers.detach().double()
    low, high = ((exact + side).clamp_min(0).minimum(last) for side in (-radius, radius))
    return torch.cat((low.ceil(), high.floor() + 1, exact + 0.5), -1)


def _over_grid(axes: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return a value of each position, `(B, T, N)`, from those of its row and its column, `(B, T, rows)` and `(B, T, columns)`."""
    first, *others = axes
    for other in others:
        first = combine(first[..., None], other[..., None, :]).flatten(2)
    return first


def _places(grid: Sequence[int], scores: Tensor) -> Tensor:
    """Return the row and column of each position, `(N, axes)`."""
    _check_grid(grid, scores)
    axes = [torch.arange(size, device=scores.device) for size in grid]
    return torch.stack([part.flatten() for part in torch.meshgrid(axes, indexing="ij")], -1)


def _check_grid(grid: Sequence[int], scores: Tensor) -> None:
    if not is_traced(scores) and math.prod(grid) != scores.shape[2]:
        raise ShapeError(
            f"the grid must have the {scores.shape[2]} positions of the scores, got {tuple(grid)}. Pass (rows, columns)."
        )
