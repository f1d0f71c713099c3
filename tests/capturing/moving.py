"""Model that moves its tokens before attention, and a check of the token locations that a recording claims.

The check uses only the claims of a record (prefix, grid, box and indices). It changes pixels and observes which vectors change. It
shares no code with the tracing of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visattn
from visattn.core.operators import SoftmaxOperator
from visattn.core.records import AttentionRecord, Recording
from visattn.errors import CaptureError, NoAttentionCaptured

SIZE, PATCH, GRID, WIDTH = (32, 48), 4, (8, 12), 16
Between = Callable[..., Tensor]  # takes the model, its tokens (B, N, C) and further arguments; returns tokens


class Moving(nn.Module):
    """Model with 4-pixel patches, the function `between` on its tokens, and attention that adds nothing."""

    def __init__(self, between: Between = lambda _, tokens: tokens) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
            self.part, self.norm, self.same = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Identity()
        self.between = [between]
        self.eval()

    def tokens(self, x: Tensor) -> Tensor:
        return self.embed(x).flatten(2).mT  # type: ignore[no-any-return]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        tokens = self.between[0](self, self.tokens(x), *args, **kwargs)
        heads = tokens[:, None]
        return (tokens + 0 * F.scaled_dot_product_attention(heads, heads, heads)[:, 0]).mean(1)  # type: ignore[no-any-return]


def image(seed: int = 0, batch: int = 1) -> Tensor:
    return torch.randn(batch, 3, *SIZE, generator=torch.Generator().manual_seed(seed))


def see(model: nn.Module, *args: Any, **kwargs: Any) -> Recording:
    with torch.no_grad(), visattn.capture(model, values=True) as recording:
        model(*args, **kwargs)
    return recording


def keys_of(record: AttentionRecord) -> Tensor:
    """Return key vectors in canonical order, `(B, K, d)`; NaN for missing tokens."""
    operator = record.operator
    assert isinstance(operator, SoftmaxOperator)
    index = operator.key_index
    batch, _, _, _, width = operator.key.shape
    keys = torch.full((batch, operator.shape[3], width), torch.nan)
    flat = operator.key[:, 0].flatten(1, 2)
    order = torch.arange(flat.shape[1]) if index is None else index.flatten()
    keys[:, order[order >= 0]] = flat[:, order >= 0]
    return keys


def on_cells(record: AttentionRecord) -> Tensor:
    """Return key vectors with one row for each prefix token and grid cell; NaN for cells without a token."""
    layout, keys = record.keys, keys_of(record)
    rows, columns = layout.grid
    cells = [cell for cell in range(rows * columns) if cell not in layout.holes]
    wide = torch.full((len(keys), len(layout.prefix) + rows * columns, keys.shape[-1]), torch.nan)
    wide[:, [*range(len(layout.prefix)), *(len(layout.prefix) + cell for cell in cells)]] = keys
    return wide


def right(model: Moving, x: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Check whether the key of each patch is recorded at the location of the patch."""
    record = see(model, x, *args, **kwargs)[0]
    assert record.reason is None, record.reason
    assert record.keys.grid == GRID
    with torch.no_grad():
        return torch.allclose(keys_of(record), model.tokens(x), atol=1e-5)


def judged(model: nn.Module, x: Tensor, probes: int = 12, reach: float = 1.0, covers: bool = True) -> str:
    """Judge the first record of a forward pass: return `right`, `refused: reason` or `wrong: error`.

    One pixel is changed at a time. All tokens that change by more than a fifth of the largest change must lie within `reach` cells of
    the pixel. If `covers` is set, the token whose cell covers the pixel must be among them. No learned token may change.
    """
    try:
        record = see(model, x)[0]
    except (CaptureError, NoAttentionCaptured) as error:
        return f"refused: {error}"
    if record.reason is not None:
        return f"refused: {record.reason}"
    if not record.keys.grid:
        return f"refused: no grid, {record.kind}"
    layout, before = record.keys, on_cells(record)
    rows, columns = layout.grid
    box, prefix = layout.box, len(layout.prefix)
    generator = torch.Generator().manual_seed(1)
    for _ in range(probes):
        y, column = (int(torch.randint(side, (1,), generator=generator)) for side in SIZE)
        changed = x.clone()
        changed[:, :, y, column] += 10
        other = see(model, changed)[0]
        if (other.keys.prefix, other.keys.grid, other.keys.box) != (layout.prefix, layout.grid, layout.box):
            continue  # the pixel changes which tokens exist
        after = on_cells(other)
        change = (after - before).abs().nan_to_num().amax((0, 2))
        for name in [layout.prefix[token] for token in range(prefix) if change[token] > 1e-6]:
            if not name.startswith(("mean", "foreign")):
                return f"wrong: {name} depends on the image"
        moved = [token for token in range(prefix, len(change)) if change[token] > max(0.2 * float(change[prefix:].max()), 1e-9)]
        for token in moved:
            row, cell = divmod(token - prefix, columns)
            height, width = box.height / rows, box.width / columns
            away = max(
                abs(box.top + (row + 0.5) * height - y - 0.5) / height,
                abs(box.left + (cell + 0.5) * width - column - 0.5) / width,
            )
            if away > 0.5 + reach:
                return (
                    f"wrong: the token of cell {row},{cell} of {rows} x {columns} over {tuple(box)} depends on pixel {y},{column}"
                )
        at = (y + 0.5 - box.top) / box.height * rows, (column + 0.5 - box.left) / box.width * columns
        under = prefix + int(at[0]) * columns + int(at[1])
        here = (
            0 <= at[0] < rows
            and 0 <= at[1] < columns
            and not bool(before[0, under].isnan().any() | after[0, under].isnan().any())
        )
        if covers and here and under not in moved:
            return (
                f"wrong: the token of cell {int(at[0])},{int(at[1])} of {rows} x {columns} does not depend on pixel {y},{column}"
            )
    return "right"
