"""Local attention around a predicted position (Luong et al.)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from visattn.errors import OptionError, ShapeError
from visattn.nn.shapes import at_least, check_tokens, is_traced
from visattn.nn.tokens.heads import check_mask, softmax
from visattn.nn.tokens.scores import check_value


class LocalMonotonic(nn.Module):
    """Local attention around a place that moves on with the query: query `t` attends around place `t`.

    The softmax is taken over the places that lie at most `radius` from it along each axis. A window is clipped at the borders; one
    that covers the map is global attention.

    Args:
        radius: D.

    Shape:
        Scores `(B, T, N)`, values `(B, N, dv)` and a grid, `(N,)` or `(rows, columns)` of N places row by row, to `(B, T, dv)` and
        the weights, `(B, T, N)`. `first` is the number of the first query, for decoders that ask one by one; queries behind the last
        place attend around that. The mask is that of `attend`.

    Raises:
        OptionError: If the radius is below 1 or the mask is not boolean.
        ShapeError: In the forward, if the grid does not count the places or a shape is another.

    Reference:
        Luong et al., "Effective Approaches to Attention-based Neural Machine Translation", EMNLP 2015, arXiv:1508.04025 (local-m).
        On a grid of rows and columns it is ours: place `t` is counted row by row, and the window is square.
    """

    def __init__(self, radius: int) -> None:
        """Nothing is learned."""
        super().__init__()
        self.radius = at_least("radius", radius)

    def forward(
        self, scores: Tensor, value: Tensor, grid: Sequence[int], mask: Tensor | None = None, *, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Attend around the queries' own places."""
        check_value(scores, value)
        check_mask(mask, scores.shape)
        places = _places(grid, scores)
        number = torch.arange(first, first + scores.shape[1], device=scores.device).clamp(max=len(places) - 1)
        near = ((places[number][:, None] - places).abs() <= self.radius).all(-1)  # (T, N)
        weights = softmax(scores, near if mask is None else near & mask)
        return weights.to(value.dtype) @ value, weights


class LocalPredictive(nn.Module):
    """Local attention around a place that the query predicts.

    Along each axis of length S the center is `p = (S - 1) sigmoid(v . tanh(W q))`. The softmax is taken over the places at most
    `radius` from it and multiplied with a Gaussian around it, of standard deviation `radius / 2`; through that the center learns.

    Args:
        query_width: dq.
        radius: D.
        axes: 1 for a sequence, 2 for a grid.
        width: Of the hidden layer, by default dq.
        renormalize: Whether weights sum to 1: the Gaussian's logarithm is then added to the scores. The paper does not: its weights
            sum to less, on a grid to a tenth or a twentieth, and what is taken shrinks as much.
        cut: Whether places outside the window have no weight, as in the paper. Without, the Gaussian alone makes it local, and
            weights are a smooth function of the center.

    Shape:
        Queries `(B, T, dq)`, scores `(B, T, N)`, values `(B, N, dv)` and a grid, `(N,)` or `(rows, columns)` of N places row by row,
        to `(B, T, dv)` and the weights, `(B, T, N)`. The mask is that of `attend`.

    Raises:
        OptionError: If a number is below 1, there are other than 1 or 2 axes, or the mask is not boolean.
        ShapeError: In the forward, if the grid does not count the places or a shape is another.

    Reference:
        Luong et al., "Effective Approaches to Attention-based Neural Machine Translation", EMNLP 2015, arXiv:1508.04025 (local-p).
        Differs: the paper's `p` is `S sigmoid(...)`; ours ends at the last place, as in the authors' code, which also rounds the
        window's middle down. Rows and columns are ours: the Gaussian is round and the window square.
    """

    def __init__(
        self,
        query_width: int,
        radius: int,
        *,
        axes: int = 2,
        width: int | None = None,
        renormalize: bool = False,
        cut: bool = True,
    ) -> None:
        """Build with PyTorch's initial values of a linear layer: centers start in the middle."""
        super().__init__()
        if axes not in {1, 2}:
            raise OptionError(f"axes must be 1 or 2, got {axes}. A sequence has 1, an image 2.")
        self.query_width, self.radius = at_least("query_width", query_width), at_least("radius", radius)
        self.axes, self.renormalize, self.cut = axes, renormalize, cut
        width = query_width if width is None else at_least("width", width)
        self.hidden = nn.Linear(query_width, width, bias=False)
        self.vector = nn.Linear(width, axes, bias=False)

    def forward(
        self, query: Tensor, scores: Tensor, value: Tensor, grid: Sequence[int], mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend around the predicted centers."""
        return self.attend(scores, value, self.centers(query, grid), grid, mask)

    def centers(self, query: Tensor, grid: Sequence[int]) -> Tensor:
        """Where queries look: `(B, T, axes)`, in places from 0, rows before columns."""
        check_tokens(self, query, self.query_width)
        if len(grid) != self.axes:
            raise ShapeError(
                f"the grid must have {self.axes} axes, got {tuple(grid)}. Build LocalPredictive with axes={len(grid)}."
            )
        share: Tensor = self.vector(self.hidden(query).tanh())
        share = share.to(torch.promote_types(share.dtype, torch.float32)).sigmoid()  # places need more digits than bfloat16 has
        return share * torch.tensor([size - 1 for size in grid], dtype=share.dtype, device=share.device)

    def attend(
        self, scores: Tensor, value: Tensor, centers: Tensor, grid: Sequence[int], mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend around given centers, `(B, T, axes)`."""
        check_value(scores, value)
        check_mask(mask, scores.shape)
        away = _places(grid, scores) - centers[:, :, None]  # (B, T, N, axes)
        if self.cut:
            near = (away.abs() <= self.radius).all(-1)
            mask = near if mask is None else near & mask
        closeness = away.square().sum(-1) * (-2 / self.radius**2)  # the logarithm of the Gaussian
        weights = softmax(scores + closeness, mask) if self.renormalize else softmax(scores, mask) * closeness.exp()
        return weights.to(value.dtype) @ value, weights


def _places(grid: Sequence[int], scores: Tensor) -> Tensor:
    """Rows and columns of all places: `(N, axes)`."""
    axes = [torch.arange(size, device=scores.device) for size in grid]
    places = torch.stack([part.flatten() for part in torch.meshgrid(axes, indexing="ij")], -1)
    if not is_traced(scores) and len(places) != scores.shape[2]:
        raise ShapeError(
            f"the grid must count the {scores.shape[2]} places of the scores, got {tuple(grid)}. Pass (rows, columns)."
        )
    return places
