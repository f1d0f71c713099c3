"""Small models of the kinds that research code has, attacked from outside: is each recorded token where the recording says?

Every model keeps its own weights, and can multiply its attention results by zero, so that each token holds only what its own pixels
gave. The checks replace the pixels of one cell of one image, and compare matrices with the model's own, rearranged by hand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visattn
from tests.samples import sampled
from visattn.core.records import AttentionRecord, Recording, TokenLayout
from visattn.errors import NoAttentionCaptured

BATCH, SIZE = 2, (32, 48)
PATCH, ROWS, COLUMNS, WIDTH, HEADS = 4, 8, 12, 16, 2
CELLS = ROWS * COLUMNS
FULL = (0.0, 0.0, 32.0, 48.0)  # top, left, height, width


class Truth(NamedTuple):
    """Truth of one recorded call: its weights in canonical order, and where its keys lie."""

    weights: Tensor
    grid: tuple[int, ...]
    prefix: int = 0
    box: tuple[float, ...] = FULL
    holes: tuple[int, ...] = ()


def spread(weights: Tensor, queries: Tensor, keys: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return weights `(B * blocks, heads, q, k)` as `(B, heads, Q, K)`; the indices are `(blocks, q)` and `(blocks, k)`, -1 for none."""
    split = unflat(weights, 0, (-1, len(queries)))
    whole = weights.new_zeros(len(split), weights.shape[1], *shape)
    for block, (rows, columns) in enumerate(zip(queries, keys, strict=True)):
        part = split[:, block][..., columns >= 0]
        whole[:, :, rows[:, None], columns[columns >= 0][None]] = part
    return whole


def unflat(tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    split: Tensor = tensor.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return split


def cells_of(grid: tuple[int, int] = (ROWS, COLUMNS)) -> Tensor:
    return torch.arange(grid[0] * grid[1]).view(grid)


class Odd(nn.Module):
    """Attention written in one of several styles, which remembers its weights; subclasses say what they do with the tokens."""

    expected: ClassVar[tuple[str, ...]] = ()  # patterns, one for each call: kind and grid, or `refused: ` and the reason
    absent: ClassVar[str] = ""  # pattern of what `unseen` or NoAttentionCaptured says
    shared: ClassVar[bool] = False  # several cells hold the same pixels
    style: ClassVar[str] = "matmul"

    def __init__(self, width: int = WIDTH, patch: int = PATCH) -> None:
        super().__init__()
        self.gain = 1.0
        self.seen: list[tuple[Tensor, ...]] = []
        self.orders: list[Tensor] = []
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)
        with torch.no_grad():
            self.q.weight *= 3
            self.k.weight *= 3

    def prepare(self) -> None:
        """Do what precedes a forward pass."""

    def rows(self, image: int, call: int) -> list[int]:
        """Return the batch entries of a call that belong to an image."""
        return [image]

    def truths(self) -> list[Truth | None]:
        """Return what is true of each call; None where it has no place."""
        raise NotImplementedError

    def weights(self, call: int = 0) -> Tensor:
        kept = self.seen[call]
        if len(kept) == 1:
            return kept[0]
        scores: Tensor = kept[0] @ kept[1].mT / math.sqrt(kept[0].shape[-1])
        return scores.softmax(-1)

    def note(self, *kept: Tensor) -> None:
        self.seen.append(tuple(one.detach().clone() for one in kept))

    def tokens(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.embed(x).flatten(2).mT
        return tokens

    def heads(self, tokens: Tensor) -> Tensor:
        return unflat(tokens, -1, (HEADS, -1)).transpose(1, 2)

    def over(self, tokens: Tensor, others: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Return the attention of tokens over themselves or others, multiplied by the gain."""
        others = self.norm(tokens) if others is None else others
        q, k, v = self.heads(self.q(self.norm(tokens))), self.heads(self.k(others)), self.heads(self.v(others))
        return self.gain * self.attend(q, k, v, bias).transpose(1, 2).flatten(2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        scale = 1 / math.sqrt(q.shape[-1])
        if self.style == "fused":
            self.note(q, k)
            return F.scaled_dot_product_attention(q, k, v)
        if self.style == "einsum":
            weights = torch.einsum("b h i d, b h j d -> b h i j", q * scale, k).softmax(dim=3)
            self.note(weights)
            return torch.einsum("b h i j, b h j d -> b h i d", weights, v)
        if self.style == "bmm":
            flat = torch.empty(len(q) * HEADS, q.shape[2], k.shape[2])
            flat = torch.baddbmm(flat, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=scale)
            weights = F.softmax(flat, dim=-1)
            self.note(unflat(weights, 0, (-1, HEADS)))
            return unflat(torch.bmm(weights, v.flatten(0, 1)), 0, (-1, HEADS))
        scores = (q * scale) @ k.transpose(-2, -1)
        weights = torch.softmax(scores if bias is None else scores + bias, -1)
        self.note(weights)
        return weights @ v

    def read(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(tokens).mean(1))
        return out


def plain(model: Odd, calls: int = 1) -> list[Truth | None]:
    """Return what is true of calls over all patches in raster order."""
    return [Truth(model.weights(call), (ROWS, COLUMNS)) for call in range(calls)]


def reordered(model: Odd, order: Tensor, calls: int = 1) -> list[Truth | None]:
    """Return what is true of calls whose token i is the patch `order[i]`."""
    return [
        Truth(spread(model.weights(call), order[None], order[None], (CELLS, CELLS)), (ROWS, COLUMNS)) for call in range(calls)
    ]


# Order of the tokens


class Zigzag(Odd):
    """Patches visited on diagonals through a buffer, with the class token in the middle, as in Vision Mamba."""

    expected = ("self 8x12",) * 2
    order: Tensor

    def __init__(self) -> None:
        super().__init__()
        places = [(row, column) for row in range(ROWS) for column in range(COLUMNS)]
        places.sort(key=lambda at: (sum(at), at[0] if sum(at) % 2 else at[1]))
        self.register_buffer("order", torch.tensor([row * COLUMNS + column for row, column in places]))
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)[:, self.order]
        t = torch.cat([t[:, : CELLS // 2], self.cls.expand(len(x), -1, -1), t[:, CELLS // 2 :]], 1)
        for _ in range(2):
            t = t + self.over(t)
        return self.read(t[:, CELLS // 2][:, None])

    def truths(self) -> list[Truth | None]:
        at = torch.cat([1 + self.order[: CELLS // 2], torch.zeros(1, dtype=torch.long), 1 + self.order[CELLS // 2 :]])[None]
        return [Truth(spread(self.weights(call), at, at, (CELLS + 1, CELLS + 1)), (ROWS, COLUMNS), 1) for call in range(2)]


class Shuffled(Odd):
    """Tokens in a new random order in each forward pass, put back after attention."""

    expected = ("self 8x12",) * 2
    style = "fused"

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        order = torch.randperm(CELLS)
        self.orders.append(order)
        mixed = t[:, order]
        mixed = mixed + self.over(mixed)
        t = mixed[:, order.argsort()]
        return self.read(t + self.over(t))

    def truths(self) -> list[Truth | None]:
        return [*reordered(self, self.orders[-1]), Truth(self.weights(1), (ROWS, COLUMNS))]


class ShuffledEach(Odd):
    """A random order of its own for each image of the batch, by gather; put back before the second layer."""

    expected = ("refused: the images of the batch are arranged differently", "self 8x12")

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        order = torch.rand(len(x), CELLS).argsort(1)[..., None].expand(-1, -1, WIDTH)
        mixed = t.gather(1, order)
        mixed = mixed + self.over(mixed)
        t = mixed.gather(1, order.argsort(1))
        return self.read(t + self.over(t))

    def truths(self) -> list[Truth | None]:
        return [None, Truth(self.weights(1), (ROWS, COLUMNS))]


class Written(Odd):
    """Patches written into an empty buffer in serpentine order, by assignment, `index_copy_` and a list of single tokens."""

    expected = ("self 8x12",) * 3
    style = "bmm"

    def __init__(self) -> None:
        super().__init__()
        places = cells_of()
        places[1::2] = places[1::2].flip(1)
        self.order = places.flatten()

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        one, two = torch.zeros_like(t), torch.empty_like(t)
        one[:, self.order] = t
        one = one + self.over(one)
        two.index_copy_(1, self.order, t)
        two = two + self.over(two)
        three = torch.stack([t[:, i] for i in self.order.tolist()], 1)
        return self.read(one + two + self.over(three))

    def truths(self) -> list[Truth | None]:
        inverse = self.order.argsort()
        places = [inverse, inverse, self.order]
        return [
            Truth(spread(self.weights(call), at[None], at[None], (CELLS, CELLS)), (ROWS, COLUMNS))
            for call, at in enumerate(places)
        ]


class SortedByBrightness(Odd):
    """Tokens sorted by what they hold, each image in its own order."""

    expected = ("refused: the images of the batch are arranged differently",)

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        order = t.mean(-1).argsort(1, descending=True)
        return self.read(self.over(torch.take_along_dim(t, order[..., None], 1)))

    def truths(self) -> list[Truth | None]:
        return [None]


class SortedChannels(Odd):
    """Every channel is sorted by itself, so that a token holds values of many places."""

    expected = ("refused: its tokens could not be traced from the pixels beyond sort",)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.over(self.tokens(x).sort(1).values))

    def truths(self) -> list[Truth | None]:
        return [None]


# How the image is cut


class ColumnMajor(Odd):
    """Patches cut by reshape and permute, counted down the columns, then a Linear over `(p1 p2 c)`."""

    expected = ("self 8x12",)

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(3 * PATCH * PATCH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        cut = x.reshape(len(x), 3, ROWS, PATCH, COLUMNS, PATCH).permute(0, 4, 2, 3, 5, 1)  # b w h p1 p2 c
        t: Tensor = self.project(cut.flatten(3).flatten(1, 2))
        return self.read(t + self.over(t))

    def truths(self) -> list[Truth | None]:
        return reordered(self, cells_of().mT.flatten())


class Mirrored(Odd):
    """The image is flipped from left to right before it is cut."""

    expected = ("self 8x12",)
    style = "einsum"

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x.flip(-1))
        return self.read(t + self.over(t))

    def truths(self) -> list[Truth | None]:
        return reordered(self, cells_of().flip(1).flatten())


class Turned(Odd):
    """The image is turned by a quarter before it is cut."""

    expected = ("self 8x12",)

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(torch.rot90(x, 1, (2, 3)))
        return self.read(t + self.over(t))

    def truths(self) -> list[Truth | None]:
        return reordered(self, torch.rot90(cells_of(), 1, (0, 1)).flatten())


class Unfolded(Odd):
    """Pixels moved into channels by `pixel_unshuffle` and by F.unfold, one layer each."""

    expected = ("self 8x12",) * 2

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(3 * PATCH * PATCH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        one: Tensor = self.project(F.pixel_unshuffle(x, PATCH).permute(0, 2, 3, 1).reshape(len(x), CELLS, -1))
        two: Tensor = self.project(F.unfold(x, PATCH, stride=PATCH).mT)
        return self.read(self.over(one) + self.over(two))

    def truths(self) -> list[Truth | None]:
        return plain(self, 2)


class CircularPadding(Odd):
    """The image continues at its opposite side by one patch, so that the tokens at the border hold what lies across."""

    expected = ("refused: a token occurs several times",)

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(F.pad(x, (PATCH,) * 4, mode="circular"))
        return self.read(t + self.over(t))

    def truths(self) -> list[Truth | None]:
        return [None]


class ReflectedPadding(Odd):
    """The image is mirrored beyond its border by two patches."""

    expected = ("refused: its tokens could not be traced from the pixels beyond conv2d",)

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(F.pad(x, (2 * PATCH,) * 4, mode="reflect"))
        return self.read(t + self.over(t))

    def truths(self) -> list[Truth | None]:
        return [None]


class BothDirections(Odd):
    """Each token is the sum of a patch and of its mirror image."""

    expected = ("refused: its tokens could not be traced from the pixels beyond add",) * 2

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x) + self.tokens(x.flip(-1))
        u = self.tokens(x)
        return self.read(self.over(t) + self.over(u + u.flip(1)))

    def truths(self) -> list[Truth | None]:
        return [None, None]


# Several grids


class UShaped(Odd):
    """Tokens are merged 2x2 by strided slices, attend, and are added to the fine ones, which attend too."""

    expected: ClassVar[tuple[str, ...]] = (
        "self 4x6",
        "self 8x12|refused: its tokens could not be traced from the pixels beyond add",
    )
    style = "bmm"

    def __init__(self) -> None:
        super().__init__()
        self.merge = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        t = unflat(self.tokens(x), 1, (ROWS, COLUMNS))
        four = [t[:, 0::2, 0::2], t[:, 1::2, 0::2], t[:, 0::2, 1::2], t[:, 1::2, 1::2]]
        small: Tensor = self.merge(torch.cat(four, -1)).flatten(1, 2)
        small = small + self.over(small)
        wide = unflat(small, 1, (ROWS // 2, COLUMNS // 2)).repeat_interleave(2, 1).repeat_interleave(2, 2)
        fine = (t + 0.1 * wide).flatten(1, 2)
        return self.read(fine + self.over(fine))

    def truths(self) -> list[Truth | None]:
        return [Truth(self.weights(0), (ROWS // 2, COLUMNS // 2)), Truth(self.weights(1), (ROWS, COLUMNS))]


class Interpolated(UShaped):
    """Attention as before, with average pooling and interpolation; at last the tokens attend at twice their resolution."""

    expected = ("self 4x6", "self 8x12", "self 16x24")
    shared = True

    def forward(self, x: Tensor) -> Tensor:
        t = unflat(self.tokens(x).mT, 2, (ROWS, COLUMNS))
        small = F.avg_pool2d(t, 2).flatten(2).mT
        small = small + self.over(small)
        wide = F.interpolate(unflat(small.mT, 2, (ROWS // 2, COLUMNS // 2)), scale_factor=2, mode="bilinear")
        fine = (t + 0.1 * wide).flatten(2).mT
        fine = fine + self.over(fine)
        wide = F.interpolate(unflat(fine.mT, 2, (ROWS, COLUMNS)), scale_factor=2).flatten(2).mT
        return self.read(wide + self.over(wide))

    def truths(self) -> list[Truth | None]:
        return [Truth(self.weights(i), (4 * 2**i, 6 * 2**i)) for i in range(3)]


class TwoScales(Odd):
    """Two streams, of the image and of its half size, which attend to each other."""

    expected = ("cross 4x6", "cross 8x12")
    style = "einsum"

    def forward(self, x: Tensor) -> Tensor:
        fine, coarse = self.tokens(x), self.tokens(F.interpolate(x, scale_factor=0.5, mode="bilinear", align_corners=False))
        return self.read(fine + self.over(fine, coarse)) + self.read(coarse + self.over(coarse, fine))

    def truths(self) -> list[Truth | None]:
        return [Truth(self.weights(0), (ROWS // 2, COLUMNS // 2)), Truth(self.weights(1), (ROWS, COLUMNS))]


class Fovea(Odd):
    """A coarse look at the whole image and a fine one at its center: the coarse tokens attend to the fine ones."""

    expected = ("cross 4x6",)

    def forward(self, x: Tensor) -> Tensor:
        coarse, center = self.tokens(F.avg_pool2d(x, 2)), self.tokens(x[..., 8:24, 12:36])
        return self.read(coarse + self.over(coarse, center))

    def truths(self) -> list[Truth | None]:
        return [Truth(self.weights(), (4, 6), box=(8.0, 12.0, 16.0, 24.0))]


class FoveaJoined(Odd):
    """The coarse and the fine tokens in one sequence: some pixels have two tokens."""

    expected = ("refused: tokens of several grids attend together.*",)

    def forward(self, x: Tensor) -> Tensor:
        t = torch.cat([self.tokens(F.avg_pool2d(x, 2)), self.tokens(x[..., 8:24, 12:36])], 1)
        return self.read(t + self.over(t))

    def truths(self) -> list[Truth | None]:
        return [None]


class PooledKeys(Odd):
    """Keys are pooled patches, and registers come after the patches among queries and keys."""

    expected = ("cross 4x6",)
    style = "fused"

    def __init__(self) -> None:
        super().__init__()
        self.registers = nn.Parameter(torch.randn(1, 3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        patches, registers = self.tokens(x), self.registers.expand(len(x), -1, -1)
        pooled = F.adaptive_avg_pool2d(unflat(patches.mT, 2, (ROWS, COLUMNS)), (4, 6)).flatten(2).mT
        t = torch.cat([patches, registers], 1)
        t = t + self.over(t, torch.cat([pooled, registers], 1))
        return self.read(t)

    def truths(self) -> list[Truth | None]:
        queries = torch.cat([3 + torch.arange(CELLS), torch.arange(3)])
        keys = torch.cat([3 + torch.arange(24), torch.arange(3)])
        return [Truth(spread(self.weights(), queries[None], keys[None], (CELLS + 3, 27)), (4, 6), 3)]


class Agents(Odd):
    """A few pooled patches attend to all patches, and all patches to them, as in Agent Attention."""

    expected = ("cross 8x12", "cross 2x3")

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        agents = F.avg_pool2d(unflat(t.mT, 2, (ROWS, COLUMNS)), 4).flatten(2).mT
        found = agents + self.over(agents, t)
        return self.read(t + self.over(t, found))

    def truths(self) -> list[Truth | None]:
        return [Truth(self.weights(0), (ROWS, COLUMNS)), Truth(self.weights(1), (2, 3))]


# Parts of the grid


def windows_of(order: Tensor, side: int = 4) -> Tensor:
    """Return the cells of each window, `(windows, side * side)`, of cells that were moved to other places."""
    return order.unfold(0, side, side).unfold(1, side, side).flatten(0, 1).flatten(1)


class Axial(Odd):
    """Attention along the rows, then along the columns."""

    expected = ("self 8x12",) * 2
    style = "bmm"

    def forward(self, x: Tensor) -> Tensor:
        t = unflat(self.tokens(x), 1, (ROWS, COLUMNS))
        lines = t.flatten(0, 1)
        t = unflat(lines + self.over(lines), 0, (-1, ROWS))
        lines = t.transpose(1, 2).flatten(0, 1)
        t = unflat(lines + self.over(lines), 0, (-1, COLUMNS)).transpose(1, 2)
        return self.read(t.flatten(1, 2))

    def truths(self) -> list[Truth | None]:
        lines = [cells_of(), cells_of().mT]
        return [Truth(spread(self.weights(i), at, at, (CELLS, CELLS)), (ROWS, COLUMNS)) for i, at in enumerate(lines)]


class SlicedShift(Odd):
    """Windows of 4x4 after a cyclic shift by two, made of slices and cat, then shifted back."""

    expected = ("self 8x12",) * 2

    def forward(self, x: Tensor) -> Tensor:
        t = unflat(self.tokens(x), 1, (ROWS, COLUMNS))
        t = torch.cat([t[:, 2:], t[:, :2]], 1)
        t = torch.cat([t[:, :, 2:], t[:, :, :2]], 2)
        w = t.reshape(-1, 2, 4, 3, 4, WIDTH).transpose(2, 3).reshape(-1, 16, WIDTH)
        w = w + self.over(w)
        t = w.view(-1, 2, 3, 4, 4, WIDTH).transpose(2, 3).reshape(-1, ROWS, COLUMNS, WIDTH)
        t = torch.cat([t[:, -2:], t[:, :-2]], 1)
        t = torch.cat([t[:, :, -2:], t[:, :, :-2]], 2).flatten(1, 2)
        return self.read(t + self.over(t))

    def truths(self) -> list[Truth | None]:
        at = windows_of(cells_of().roll((-2, -2), (0, 1)))
        return [Truth(spread(self.weights(0), at, at, (CELLS, CELLS)), (ROWS, COLUMNS)), Truth(self.weights(1), (ROWS, COLUMNS))]


class Misshapen(Odd):
    """Height and width are confused: windows of the tokens as if the image were upright, then 2x2 pools of them."""

    expected = ("self 8x12", "refused: its tokens could not be traced from the pixels beyond avg_pool2d")

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x).view(-1, 3, 4, 2, 4, WIDTH).transpose(2, 3).reshape(-1, 16, WIDTH)
        t = (t + self.over(t)).view(-1, 3, 2, 4, 4, WIDTH).transpose(2, 3).reshape(-1, CELLS, WIDTH)
        pooled = F.avg_pool2d(unflat(t.mT, 2, (COLUMNS, ROWS)), 2).flatten(2).mT
        return self.read(pooled + self.over(pooled))

    def truths(self) -> list[Truth | None]:
        at = windows_of(cells_of().view(COLUMNS, ROWS))
        return [Truth(spread(self.weights(0), at, at, (CELLS, CELLS)), (ROWS, COLUMNS)), None]


class PaddedWindows(Odd):
    """Windows of 5x5 on a grid that they do not divide, padded with zeros that nobody masks."""

    expected = ("self 8x12",)

    def forward(self, x: Tensor) -> Tensor:
        t = F.pad(unflat(self.tokens(x), 1, (ROWS, COLUMNS)), (0, 0, 1, 2, 2, 0))
        w = t.reshape(-1, 2, 5, 3, 5, WIDTH).transpose(2, 3).reshape(-1, 25, WIDTH)
        w = w + self.over(w)
        t = w.view(-1, 2, 3, 5, 5, WIDTH).transpose(2, 3).reshape(-1, 10, 15, WIDTH)[:, 2:, 1:-2]
        return self.read(t.flatten(1, 2))

    def truths(self) -> list[Truth | None]:
        at = windows_of(F.pad(cells_of(), (1, 2, 2, 0), value=-1), 5)
        split = unflat(self.weights(), 0, (-1, len(at)))
        whole = split.new_zeros(BATCH, HEADS, CELLS, CELLS)
        for block, line in enumerate(at):
            whole[:, :, line[line >= 0][:, None], line[line >= 0][None]] = split[:, block][..., line >= 0, :][..., line >= 0]
        return [Truth(whole, (ROWS, COLUMNS))]


class Neighborhood(Odd):
    """Each patch attends to the nine around it, cut by F.unfold."""

    expected = ("self 8x12",)

    def around(self, tokens: Tensor) -> Tensor:
        cut = F.unfold(unflat(tokens.mT, 2, (ROWS, COLUMNS)), 3, padding=1)
        return cut.view(len(tokens), HEADS, WIDTH // HEADS, 9, CELLS).permute(0, 1, 4, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        q, k, v = self.heads(self.q(t))[..., None, :], self.around(self.k(t)), self.around(self.v(t))
        weights = (q @ k.mT).softmax(-1)
        self.note(weights[:, :, :, 0])
        return self.read(t + self.gain * (weights @ v)[:, :, :, 0].transpose(1, 2).flatten(2))

    def truths(self) -> list[Truth | None]:
        near = F.pad(cells_of(), (1, 1, 1, 1), value=-1).unfold(0, 3, 1).unfold(1, 3, 1).reshape(CELLS, 9)
        whole = torch.zeros(BATCH, HEADS, CELLS, CELLS)
        for query, keys in enumerate(near):
            whole[:, :, query, keys[keys >= 0]] = self.weights()[:, :, query, keys >= 0]
        return [Truth(whole, (ROWS, COLUMNS))]


class QueriesInChunks(Odd):
    """The queries attend in three chunks, to save memory."""

    expected = ("cross 8x12",) * 3

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        return self.read(t + torch.cat([self.over(part, self.norm(t)) for part in t.chunk(3, 1)], 1))

    def truths(self) -> list[Truth | None]:
        return plain(self, 3)


class Checkerboard(Odd):
    """Even and odd tokens attend apart, each to their own kind."""

    expected = ("self 8x12",) * 2

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x).clone()
        board = cells_of().div(COLUMNS, rounding_mode="floor").add(cells_of() % COLUMNS).flatten() % 2 == 0
        one, two = t[:, board], t[:, ~board]
        t[:, board] = one + self.over(one)
        t[:, ~board] = two + self.over(two)
        return self.read(t)

    def truths(self) -> list[Truth | None]:
        holes = [tuple(i for i in range(CELLS) if (i // COLUMNS + i % COLUMNS) % 2 != kind) for kind in range(2)]
        return [Truth(self.weights(i), (ROWS, COLUMNS), holes=holes[i]) for i in range(2)]


class Pruned(Odd):
    """The best tokens by their score are kept, of each image its own."""

    expected = ("self 8x12", "refused: the images of the batch are arranged differently")

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        t = t + self.over(t)
        kept = self.head(t)[..., 0].topk(40, 1).indices
        t = t[torch.arange(len(x))[:, None], kept]
        return self.read(t + self.over(t))

    def truths(self) -> list[Truth | None]:
        return [Truth(self.weights(0), (ROWS, COLUMNS)), None]


class PrunedTogether(Odd):
    """Pruning that keeps the same tokens of all images."""

    expected = ("self 8x12",)

    def keep(self, t: Tensor) -> tuple[Tensor, Tensor]:
        order = self.head(t)[..., 0].mean(0).argsort(descending=True)
        self.orders.append(order[:40].sort().values)
        return t[:, self.orders[-1]], t[:, order[40:]]

    def forward(self, x: Tensor) -> Tensor:
        t, _ = self.keep(self.tokens(x))
        return self.read(t + self.over(t))

    def truths(self) -> list[Truth | None]:
        holes = tuple(sorted(set(range(CELLS)) - set(self.orders[-1].tolist())))
        return [Truth(self.weights(), (ROWS, COLUMNS), holes=holes)]


class RestInOne(PrunedTogether):
    """The mean of the tokens that are not kept is one more token, as in EViT."""

    expected = ("self 8x12|refused: its tokens could not be traced from the pixels beyond mean",)

    def forward(self, x: Tensor) -> Tensor:
        t, rest = self.keep(self.tokens(x))
        t = torch.cat([t, rest.mean(1, keepdim=True)], 1)
        return self.read(t + self.over(t))

    def truths(self) -> list[Truth | None]:
        at = torch.cat([1 + torch.arange(40), torch.zeros(1, dtype=torch.long)])[None]
        holes = tuple(sorted(set(range(CELLS)) - set(self.orders[-1].tolist())))
        return [Truth(spread(self.weights(), at, at, (41, 41)), (ROWS, COLUMNS), 1, holes=holes)]


class PairsMerged(Odd):
    """Each two neighbors become one token, their mean."""

    expected = ("self 8x6",)

    def forward(self, x: Tensor) -> Tensor:
        t = unflat(self.tokens(x), 1, (-1, 2)).mean(2)
        return self.read(t + self.over(t))

    def truths(self) -> list[Truth | None]:
        return [Truth(self.weights(), (ROWS, COLUMNS // 2))]


class SimilarMerged(Odd):
    """The most similar tokens are averaged, as in ToMe: each image merges its own."""

    expected = ("self 8x12", "refused: its tokens could not be traced from the pixels beyond scatter_reduce")

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        t = t + self.over(t)
        metric = t / t.norm(dim=-1, keepdim=True)
        best, partner = (metric[:, ::2] @ metric[:, 1::2].mT).max(-1)
        order = best.argsort(-1, descending=True)[..., None]
        even, odd = t[:, ::2], t[:, 1::2]
        left = even.gather(1, order[:, 16:].expand(-1, -1, WIDTH))
        moved = even.gather(1, order[:, :16].expand(-1, -1, WIDTH))
        goal = partner[..., None].gather(1, order[:, :16]).expand(-1, -1, WIDTH)
        t = torch.cat([left, odd.scatter_reduce(1, goal, moved, "mean")], 1)
        return self.read(t + self.over(t))

    def truths(self) -> list[Truth | None]:
        return [Truth(self.weights(0), (ROWS, COLUMNS)), None]


# Tokens that are no patches


class LatentsInALoop(Odd):
    """Latents read the patches and each other three times, with the same weights."""

    expected = ("pool 8x12", "self") * 3

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(6, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        t = self.norm(self.tokens(x))
        latents = self.latents[None].repeat(len(x), 1, 1)
        for _ in range(3):
            latents = latents + self.over(latents, t)
            latents = latents + self.over(latents)
        return self.read(latents)

    def truths(self) -> list[Truth | None]:
        return [Truth(self.weights(i), () if i % 2 else (ROWS, COLUMNS), 6 if i % 2 else 0) for i in range(6)]


class CachedDecoder(Odd):
    """A captioner that is given three words in turn, each with one call over a growing cache and one over the patches."""

    expected = ("self", "pool 8x12", *("self|cross|refused: (?!the images).*", "cross 8x12|refused: (?!the images).*") * 2)
    given: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.words = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Embedding(5, WIDTH)
        self.register_buffer("given", torch.tensor([3, 1]))

    def forward(self, x: Tensor) -> Tensor:
        t = self.norm(self.tokens(x))
        fixed = self.heads(self.k(t)), self.heads(self.v(t))
        word: Tensor = self.begin.expand(len(x), -1, -1)
        past: tuple[Tensor, Tensor] | None = None
        said = []
        for step in range(3):
            keys, values = self.heads(self.k(word)), self.heads(self.v(word))
            past = (keys, values) if past is None else (torch.cat([past[0], keys], 2), torch.cat([past[1], values], 2))
            h = word + self.gain * self.attend(self.heads(self.q(word)), *past).transpose(1, 2).flatten(2)
            h = h + self.gain * self.attend(self.heads(self.q(h)), *fixed).transpose(1, 2).flatten(2)
            said.append(self.head(h)[:, 0])
            if step < 2:
                word = self.words(self.given[step].expand(len(x), 1))
        return torch.stack(said, 1)

    def truths(self) -> list[Truth | None]:
        return [Truth(self.weights(i), (ROWS, COLUMNS) if i % 2 else (), 0 if i % 2 else 1 + i // 2) for i in range(6)]


class TokenLearner(Odd):
    """Maps computed from the patches gather eight tokens from everywhere, which then attend to each other."""

    expected = (
        "refused: its softmax runs over the keys alone.*",
        "refused: its tokens could not be traced from the pixels beyond bmm",
    )

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Conv2d(WIDTH, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        maps = self.maps(unflat(t.mT, 2, (ROWS, COLUMNS))).flatten(2).softmax(-1)
        self.note(maps[:, None])
        gathered = torch.bmm(maps, t)
        return self.read(gathered + self.over(gathered))

    def truths(self) -> list[Truth | None]:
        return [Truth(self.weights(0), (ROWS, COLUMNS)), None]


class Slots(Odd):
    """Slots compete for patches: softmax over the slots, then each slot's weights are divided by their sum."""

    expected = ("pool 8x12",) * 2

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(1, 4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        t = self.norm(self.tokens(x))
        slots = self.slots.expand(len(x), -1, -1)
        for _ in range(2):
            weights = torch.einsum("bkd,bnd->bkn", self.q(slots), self.k(t)).softmax(1) + 1e-6
            weights = weights / weights.sum(-1, keepdim=True)
            self.note(weights[:, None])
            slots = slots + self.gain * torch.einsum("bkn,bnd->bkd", weights, self.v(t))
        return self.read(slots)

    def truths(self) -> list[Truth | None]:
        return plain(self, 2)


class Instances(Odd):
    """Multiple-instance pooling: softmax scores times patches, summed."""

    expected = ("pool 8x12",)

    def scores(self, t: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.q(t)) * torch.sigmoid(self.k(t)))[..., :1].softmax(1)
        self.note(scores.mT[:, None])
        return scores

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        return self.read(self.gain * (self.scores(t) * t).sum(1, keepdim=True))

    def truths(self) -> list[Truth | None]:
        return plain(self)


class InstancesByEinsum(Instances):
    """Pooling as before, as an einsum."""

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        return self.read(torch.einsum("bnd,bn->db", t, self.scores(t)[..., 0]).mT[:, None])


class CaptionStep(Instances):
    """Pooling with weights `(B, N)` that depend on a state, as tutorials of image captioning write it."""

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        state = torch.tanh(t.mean(1))
        alpha = F.softmax(self.head(F.relu(self.q(t) + self.k(state)[:, None]))[..., 0], dim=1)
        self.note(alpha[:, None, None])
        return self.read(torch.sum(alpha.unsqueeze(2) * self.v(t), dim=1)[:, None])


class SpatialMap(Instances):
    """Pooling of a feature map by one map of weights for each head, summed over rows and columns."""

    expected = ("pool 8x12",)

    def forward(self, x: Tensor) -> Tensor:
        features = self.embed(x)
        maps = self.head(features.movedim(1, -1)).movedim(-1, 1)[:, :HEADS]
        maps = maps.flatten(2).softmax(-1).view(BATCH, HEADS, 1, ROWS, COLUMNS)
        self.note(maps.flatten(3))
        pooled = (unflat(features, 1, (HEADS, -1)) * maps).sum(axis=(-1, -2), keepdims=True)
        return self.read(pooled.flatten(1)[:, None])


class PairsBySum(Odd):
    """Attention of patches to patches, without a product of matrices."""

    expected = ("self 8x12",)

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        q, k, v = self.heads(self.q(t)), self.heads(self.k(t)), self.heads(self.v(t))
        weights = (q @ k.mT).softmax(-1)
        self.note(weights)
        mixed = (v[:, :, None] * weights[..., None]).sum(3)
        return self.read(t + self.gain * mixed.transpose(1, 2).flatten(2))

    def truths(self) -> list[Truth | None]:
        return plain(self)


class AroundEach(Odd):
    """Each patch weights its nine neighbors by a softmax of its own features (CARAFE, involution): no weight belongs to a neighbor."""

    expected = ("refused: its keys and values belong to different tokens",)

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        around = unflat(F.unfold(unflat(t.mT, 2, (ROWS, COLUMNS)), 3, padding=1), 1, (WIDTH, 9))
        weights = self.q(t)[..., :9].softmax(-1).mT[:, None]
        self.note(weights)
        return self.read(t + self.gain * (around * weights).sum(2).mT)

    def truths(self) -> list[Truth | None]:
        return [None]


class BranchesWeighted(Odd):
    """A softmax over two branches of the same patches (selective kernels): a gate, not attention."""

    absent = ".*no layer of BranchesWeighted multiplied a softmax with values.*"

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        both = torch.stack([self.q(t), self.k(t)], 1)
        gate = torch.stack([self.v(t.mean(1)), self.norm(t.mean(1))], 1).softmax(1)
        return self.read((both * gate[:, :, None]).sum(1))

    def truths(self) -> list[Truth | None]:
        return []


class MeanOfClasses(Odd):
    """Class probabilities times an embedding of each class: a product of flat matrices that is no attention."""

    absent = ".*no layer of MeanOfClasses multiplied a softmax with values.*"

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.read(self.tokens(x)).softmax(-1)
        return self.read((probabilities @ self.classes)[:, None])

    def truths(self) -> list[Truth | None]:
        return []


class InstancesByProduct(Odd):
    """Pooling as before, as a product of matrices."""

    expected = ("pool 8x12",)

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        scores = self.head(torch.tanh(self.q(t)) * torch.sigmoid(self.k(t)))[..., :1].mT.softmax(-1)
        self.note(scores[:, None])
        return self.read(torch.bmm(scores, t))

    def truths(self) -> list[Truth | None]:
        return plain(self)


class Channels(Odd):
    """Channels attend to channels, as in XCiT; there are as many channels in the head as patches."""

    expected = ("channel",)

    def __init__(self) -> None:
        super().__init__(24, 8)
        self.temperature = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        q, k, v = (layer(self.norm(t)).mT[:, None] for layer in (self.q, self.k, self.v))
        weights = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.temperature).softmax(-1)
        self.note(weights)
        return self.read(t + self.gain * (weights @ v)[:, 0].mT)

    def truths(self) -> list[Truth | None]:
        return [Truth(self.weights(), (), 24)]


# What happens to the weights


class ByHand(Odd):
    """Attention in einsums with a learned temperature; exponentials are divided by their sum."""

    absent = ".*multiplies scores by values with einsum, which cannot be recorded."

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def normalized(self, scores: Tensor) -> Tensor:
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return weights / weights.sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        q, k, v = (self.heads(layer(t)) for layer in (self.q, self.k, self.v))
        weights = self.normalized(torch.einsum("b h i d, b h j d -> b h i j", q, k) * self.temperature)
        self.note(weights)
        out = torch.einsum("b h i j, b h j d -> b i h d", weights, v)
        return self.read(t + self.gain * out.flatten(2))

    def truths(self) -> list[Truth | None]:
        return plain(self)


class ByNorm(ByHand):
    """Exponentials divided by F.normalize."""

    def normalized(self, scores: Tensor) -> Tensor:
        return F.normalize(scores.exp(), p=1.0, dim=-1)


class ByLog(ByHand):
    """Exponential of scores minus their logsumexp."""

    def normalized(self, scores: Tensor) -> Tensor:
        return (scores - scores.logsumexp(-1, keepdim=True)).exp()


class ByLogSoftmax(ByHand):
    """Exponential of log_softmax."""

    expected, absent = ("self 8x12",), ""

    def normalized(self, scores: Tensor) -> Tensor:
        return F.log_softmax(scores, -1).exp()


class BySoftmax(ByHand):
    """Same einsums with softmax."""

    expected, absent = ("self 8x12",), ""

    def normalized(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)


class HalfMasked(Odd):
    """Half of the keys have the score minus infinity."""

    expected = ("self 8x12",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(CELLS))
        self.get_buffer("bias")[torch.randperm(CELLS)[: CELLS // 2]] = -torch.inf

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        return self.read(t + self.over(t, bias=self.get_buffer("bias")))

    def truths(self) -> list[Truth | None]:
        assert int((self.weights() == 0).all(2).sum()) == BATCH * HEADS * CELLS // 2
        return plain(self)


class Renormalized(Odd):
    """Weights are masked after the softmax and divided by what is left."""

    expected = ("self 8x12",)

    def __init__(self) -> None:
        super().__init__()
        self.mask = (torch.rand(CELLS) < 0.5).float()

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        q, k, v = (self.heads(layer(t)) for layer in (self.q, self.k, self.v))
        weights = (q @ k.mT).softmax(-1) * self.mask
        weights = weights / weights.sum(-1, keepdim=True)
        self.note(weights)
        return self.read(t + self.gain * (weights @ v).transpose(1, 2).flatten(2))

    def truths(self) -> list[Truth | None]:
        return plain(self)


class BothNormalized(Odd):
    """Weights are divided by the sum of each key, then of each query, as by one step of Sinkhorn."""

    expected = ("self 8x12",)
    absent = "(?!.*multiplies scores by values elementwise).*"

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        q, k, v = (self.heads(layer(t)) for layer in (self.q, self.k, self.v))
        weights = (q @ k.mT).softmax(-1)
        weights = weights / weights.sum(-2, keepdim=True)
        weights = weights / weights.sum(-1, keepdim=True)
        self.note(weights)
        return self.read(t + self.gain * (weights @ v).transpose(1, 2).flatten(2))

    def truths(self) -> list[Truth | None]:
        return plain(self)


# Each model multiplies a softmax by values, even if one of both is learned.
MULTIPLIED = r"(?!.*no layer of \w+ multiplied a softmax with values\.).*"  # but with values of the image it did not


class LearnedWeights(Odd):
    """The scores are a parameter, as in the random Synthesizer."""

    expected = ("(self|cross) 8x12|refused: (?!its tokens mix several image locations).+",)  # each token is one patch
    absent = MULTIPLIED

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.randn(HEADS, CELLS, CELLS))

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        weights = self.scores.softmax(-1)
        self.note(weights.expand(len(x), -1, -1, -1))
        return self.read(t + self.gain * (weights @ self.heads(self.v(t))).transpose(1, 2).flatten(2))

    def truths(self) -> list[Truth | None]:
        return plain(self)


class LearnedMemory(Odd):
    """Keys and values are parameters: the patches read a memory."""

    expected = ("cross|refused: .+",)
    absent = MULTIPLIED

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Parameter(torch.randn(20, WIDTH)), nn.Parameter(torch.randn(20, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        weights = (self.q(t) @ self.keys.mT).softmax(-1)
        self.note(weights[:, None])
        return self.read(t + self.gain * (weights @ self.values))

    def truths(self) -> list[Truth | None]:
        return [Truth(self.weights(), (), 20)]


class Sink(Odd):
    """A learned score takes part in the softmax and is then cut off, so that rows sum to less than 1."""

    expected = ("self 8x12|refused: its tokens could not be traced from the pixels beyond cat",)

    def __init__(self) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.randn(1, HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        q, k, v = (self.heads(layer(t)) for layer in (self.q, self.k, self.v))
        scores = torch.cat([q @ k.mT, self.sink.expand(len(x), -1, CELLS, -1)], -1)
        weights = scores.softmax(-1)[..., :-1]
        self.note(weights)
        return self.read(t + self.gain * (weights @ v).transpose(1, 2).flatten(2))

    def truths(self) -> list[Truth | None]:
        return plain(self)


class Differential(Odd):
    """The difference of two softmaxes times the values, as in the Differential Transformer."""

    expected = ("self 8x12",)

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        q, k = self.heads(self.q(t)), self.heads(self.k(t))
        pair = (q @ k.mT).softmax(-1)
        weights = pair[:, :1] - 0.4 * pair[:, 1:]
        self.note(weights)
        return self.read(t + self.gain * (weights @ self.v(t)[:, None])[:, 0])

    def truths(self) -> list[Truth | None]:
        return plain(self)


class TalkingHeads(Odd):
    """Scores and weights are mixed among the heads before and after the softmax."""

    expected = ("self 8x12",)

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(HEADS, HEADS), nn.Linear(HEADS, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        q, k, v = (self.heads(layer(t)) for layer in (self.q, self.k, self.v))
        scores: Tensor = self.before((q @ k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        weights: Tensor = self.after(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        self.note(weights)
        return self.read(t + self.gain * (weights @ v).transpose(1, 2).flatten(2))

    def truths(self) -> list[Truth | None]:
        return plain(self)


# Images and axes that are mixed


class SequenceFirst(Odd):
    """Tokens come first and images second, and heads and images share an axis, as in fairseq; there are as many heads as images."""

    expected = ("self 8x12",)

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x).transpose(0, 1).contiguous()  # (N, B, C)
        q, k, v = (layer(t).view(CELLS, -1, WIDTH // HEADS).transpose(0, 1) for layer in (self.q, self.k, self.v))
        weights = F.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1)
        self.note(weights.view(len(x), HEADS, CELLS, CELLS))
        out = torch.bmm(weights, v).transpose(0, 1).reshape(CELLS, len(x), WIDTH)
        return self.read((t + self.gain * out).transpose(0, 1))

    def truths(self) -> list[Truth | None]:
        return plain(self)


class OtherImage(Odd):
    """Each image attends to the next one of the batch."""

    expected = ("refused: the images of the batch are arranged differently",)

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        return self.read(t + self.over(t, t.roll(1, 0)))

    def truths(self) -> list[Truth | None]:
        return [None]


class WholeBatch(Odd):
    """All patches of all images attend to each other."""

    expected = ("refused: tokens of several images attend to each other",)

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x).flatten(0, 1)[None]
        return self.read(unflat(t + self.over(t), 1, (len(x), CELLS))[0])

    def truths(self) -> list[Truth | None]:
        return [None]


class MixedImages(Odd):
    """The right half of each image is that of the other image, as in CutMix."""

    expected = ("refused: its tokens could not be traced from the pixels beyond where",)

    def forward(self, x: Tensor) -> Tensor:
        right = torch.arange(SIZE[1]) >= SIZE[1] // 2
        t = self.tokens(torch.where(right, x.flip(0), x))
        return self.read(t + self.over(t))

    def truths(self) -> list[Truth | None]:
        return [None]


class BothViews(Odd):
    """The flipped images are more entries of the batch, as in test-time augmentation."""

    expected = ("refused: .+",)

    def rows(self, image: int, call: int) -> list[int]:
        return [image, image + BATCH]

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(torch.cat([x, x.flip(-1)]))
        t = t + self.over(t)
        one, two = self.read(t).chunk(2)
        return one + two

    def truths(self) -> list[Truth | None]:
        return [None]


class Frequencies(Odd):
    """Tokens are amplitudes of the Fourier transform of the patches."""

    expected = ("refused: its tokens could not be traced from the pixels beyond fft2",)

    def forward(self, x: Tensor) -> Tensor:
        t = torch.fft.fft2(self.embed(x)).real.flatten(2).mT
        return self.read(t + self.over(t))

    def truths(self) -> list[Truth | None]:
        return [None]


# A token that holds all patches is no repeated token, it is in no window, and its weights do come from queries and keys.
MIXED = "refused: (?!its weights come from one token)(?!a token occurs several times)(?!a token is a query in several windows).+"


class MixedTokens(Odd):
    """A Linear over the tokens makes as many new ones, as in Linformer; they are queries and keys, then keys, then queries."""

    expected = (MIXED,) * 3

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(CELLS, CELLS)

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        mixed: Tensor = self.mix(t.mT).mT
        return self.read(self.over(mixed) + self.over(t, mixed) + self.over(mixed, t))

    def truths(self) -> list[Truth | None]:
        return [None] * 3


class Scrambled(Odd):
    """Channels and tokens are confused by a reshape, so that each token holds single channels of many patches."""

    expected = (MIXED,)

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x).reshape(len(x), WIDTH, CELLS).mT
        return self.read(t + self.over(t))

    def truths(self) -> list[Truth | None]:
        return [None]


class RunningSum(Odd):
    """Each token is the sum of all up to it."""

    expected = ("refused: its tokens could not be traced from the pixels beyond cumsum",)

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x).cumsum(1)
        return self.read(t + self.over(t))

    def truths(self) -> list[Truth | None]:
        return [None]


class Mapped(Odd):
    """The forward pass of one image, mapped over the batch by `vmap`."""

    absent = ".*runs inside torch.func, which cannot be recorded."

    def forward(self, x: Tensor) -> Tensor:
        def single(image: Tensor) -> Tensor:
            t = self.tokens(image[None])[0]
            weights = (self.q(t) @ self.k(t).mT).softmax(-1)
            out: Tensor = self.head((t + self.gain * (weights @ self.v(t))).mean(0))
            return out

        mapped: Tensor = torch.func.vmap(single)(x)
        return mapped

    def truths(self) -> list[Truth | None]:
        return []


class Remembering(Odd):
    """Tokens attend to those of the previous forward pass, which the model keeps."""

    expected = ("cross|refused: its weights come from one token each: no key comes from the image|" + MIXED,)

    def __init__(self) -> None:
        super().__init__()
        self.bank: Tensor | None = None

    def prepare(self) -> None:
        self.bank = self.tokens(noise(5))

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        old, self.bank = t if self.bank is None else self.bank, t
        return self.read(t + self.over(t, old))

    def truths(self) -> list[Truth | None]:
        return [Truth(self.weights(), (), CELLS)]


class OneByOne(Odd):
    """Each image has a call of its own."""

    expected = ("self 8x12|refused: (?!the images of the batch, or its windows, are arranged differently).+",) * 2

    def rows(self, image: int, call: int) -> list[int]:
        return [0] if call == image else []

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        return self.read(t + torch.cat([self.over(one[None]) for one in t]))

    def truths(self) -> list[Truth | None]:
        return plain(self, 2)


class Ragged(Odd):
    """All images in one nested tensor, as in NaViT."""

    expected = ("refused: .+",)
    absent = ".*"

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        packed = torch.nested.as_nested_tensor([t[0], t[1]], layout=torch.jagged)
        q, k, v = (unflat(layer(packed), -1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.read(t + self.gain * torch.stack(list(out.unbind())).flatten(2))

    def truths(self) -> list[Truth | None]:
        return [None]


# The attack


def noise(seed: int = 0) -> Tensor:
    return torch.randn(BATCH, 3, *SIZE, generator=torch.Generator().manual_seed(seed))


def build(kind: type[Odd]) -> Odd:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind().eval()


def run(model: Odd, x: Tensor, captured: bool = True) -> tuple[Tensor, Recording | None, str]:
    """Return the output of a model, its recording, and what the capture says about attention that it lacks."""
    model.seen.clear()
    model.orders.clear()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model.prepare()
        if not captured:
            return model(x), None, ""
        try:
            with visattn.capture(model, values=True) as recording:
                out: Tensor = model(x)
        except NoAttentionCaptured as error:
            return out, None, str(error)
    return out, recording, "; ".join(one.reason for one in recording.unseen)


def seen(model: Odd, x: Tensor) -> Recording:
    _, recording, said = run(model, x)
    assert recording is not None, said
    return recording


def verdict(record: AttentionRecord) -> str:
    if record.reason is not None:
        return f"refused: {record.reason}"
    return f"{record.kind} {'x'.join(map(str, record.keys.grid))}".strip()


def lit(x: Tensor, layout: TokenLayout, cell: int, image: int) -> Tensor:
    """Replace the pixels of one cell of one image."""
    rows, columns = layout.grid
    height, width = layout.box.height / rows, layout.box.width / columns
    top, left = layout.box.top + cell // columns * height, layout.box.left + cell % columns * width
    y, x0 = slice(max(round(top), 0), max(round(top + height), 0)), slice(max(round(left), 0), max(round(left + width), 0))
    changed = x.clone()
    changed[image, :, y, x0] = 3 * noise(9)[image, :, y, x0]
    return changed


def probes(layout: TokenLayout) -> Iterable[int]:
    rows, columns = layout.grid
    chosen = [0, columns - 1, (rows - 1) * columns, columns + 2, rows // 2 * columns + columns // 2, rows * columns - 2]
    present = set(layout.present)
    return [cell if cell in present else layout.present[cell % len(present)] for cell in chosen]


def slots(one: AttentionRecord, other: AttentionRecord) -> tuple[Tensor, Tensor]:
    """Return how much each value vector changed, `(B, slots)`, and the token of each slot."""
    assert one.value is not None
    assert other.value is not None
    change = (other.value - one.value).abs().amax((1, -1)).flatten(1)
    index: Tensor | None = getattr(one.operator, "key_index", None)
    return change, torch.arange(change.shape[1]) if index is None or one.value.dim() == 4 else index.flatten()


def misplaced(model: Odd, x: Tensor) -> list[str]:
    """Return an error for each cell whose pixels do not change most what the recording says lies there."""
    model.gain = 0.0
    before = seen(model, x)
    errors: list[str] = []
    found: dict[int, int] = {i: 0 for i, one in enumerate(before) if one.reason is None and one.keys.grid}
    for layout in dict.fromkeys(before[i].keys for i in found):
        assert len(layout.grid) == 2, layout
        for number, cell in enumerate(probes(layout)):
            image = number % BATCH
            changed = lit(x, layout, cell, image)
            if torch.equal(changed, x):
                continue
            after = seen(model, changed)
            for i in found:
                one, other = before[i], after[i]
                if layout != one.keys or layout != other.keys:
                    continue
                change, labels = slots(one, other)
                own = model.rows(image, i)
                others = [row for row in range(len(change)) if row not in own]
                if bool((change[others] > 1e-6).any()):
                    errors.append(f"call {i}: cell {cell} of image {image} changes another image")
                token = one.keys.patch(*divmod(cell, layout.grid[1]))
                for row in own:
                    most = float(change[row].max())
                    if most < 1e-6:
                        continue
                    found[i] += 1
                    top = change[row] > 0.95 * most
                    right = torch.equal(top, labels == token)
                    if not right and not (model.shared and bool(top[labels == token].all()) and int(top.sum()) <= 4):
                        errors.append(
                            f"call {i}: cell {cell} of {layout} is token {token}, but {labels[top].tolist()} change most"
                        )
                    for label in set(labels[change[row] > 1e-6].tolist()):
                        name = one.keys.prefix[label] if 0 <= label < len(one.keys.prefix) else "mean"
                        if not name.startswith(("mean", "foreign")):
                            errors.append(f"call {i}: {name} depends on the image")
    errors += [f"call {i}: no cell changed any token" for i, times in found.items() if not times]
    return errors


def kinds(base: type[Odd] = Odd) -> list[type[Odd]]:
    """Return the models above."""
    found = base.__subclasses__()
    return [*found, *(further for one in found for further in kinds(one))]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", sampled(kinds(), 2), ids=lambda kind: kind.__name__)
def test_a_model_is_placed_where_its_tokens_are_or_refused_with_a_true_reason(kind: type[Odd]) -> None:
    model, x = build(kind), noise()
    expected, _, _ = run(model, x, captured=False)
    out, recording, said = run(model, x)
    assert torch.equal(out, expected)
    assert re.fullmatch(kind.absent, said), said
    if recording is None:
        return
    verdicts = [verdict(record) for record in recording]
    assert len(verdicts) == len(kind.expected), verdicts
    for found, pattern in zip(verdicts, kind.expected, strict=True):
        assert re.fullmatch(pattern, found), found
    for record, truth in zip(recording, model.truths(), strict=True):
        if record.reason is None:
            assert truth is not None, "a place is claimed that does not exist"
            layout, box = record.keys, record.keys.box
            assert (layout.grid, len(layout.prefix), layout.holes) == (truth.grid, truth.prefix, truth.holes)
            if layout.grid:
                assert (box.top, box.left, box.height, box.width) == truth.box
            torch.testing.assert_close(record.operator.dense(), truth.weights, atol=2e-6, rtol=0)
    assert misplaced(model, x) == []


class Alternating(Odd):
    """Every other forward pass goes through the patches down the columns, and content decides on a flip."""

    def forward(self, x: Tensor) -> Tensor:
        order = cells_of()
        if x.mean() > 0:
            x, order = x.flip(-1), order.flip(1)
        t = unflat(self.tokens(x), 1, (ROWS, COLUMNS))
        if len(self.orders) % 2:
            t, order = t.transpose(1, 2), order.mT
        self.orders.append(order.flatten())
        t = t.flatten(1, 2)
        return self.read(t + self.over(t))


def test_forward_passes_of_one_capture_are_placed_each_by_its_own_order() -> None:
    model = build(Alternating)
    images = [noise(seed) + (0.1 if seed % 3 else -0.1) for seed in range(6)]
    with torch.no_grad(), visattn.capture(model) as recording:
        for x in images:
            model(x)
    assert [record.forward for record in recording] == list(range(6))
    assert len({tuple(order.tolist()) for order in model.orders}) == 4
    for call, (record, order) in enumerate(zip(recording, model.orders, strict=True)):
        whole = spread(model.weights(call), order[None], order[None], (CELLS, CELLS))
        assert record.keys.grid == (ROWS, COLUMNS)
        torch.testing.assert_close(record.operator.dense(), whole, atol=2e-6, rtol=0)


def test_tokens_of_an_earlier_forward_pass_of_the_capture_are_not_placed_on_the_image() -> None:
    model = build(Remembering)
    with torch.no_grad(), visattn.capture(model) as recording:
        model(noise(0))
        model(noise(1))
    first, second = recording
    assert verdict(first) == "self 8x12"
    reason = verdict(second)
    assert re.fullmatch("cross|" + MIXED, reason), reason
    assert "its queries could not be traced" not in reason  # they are the patches of this image


def test_the_newest_word_of_a_cache_has_one_name() -> None:
    model, x = build(CachedDecoder), noise()[:1]
    before = seen(model, x)
    with torch.no_grad():
        model.get_parameter("words.weight")[1] += 5
    after = seen(model, x)
    change, labels = slots(before[4], after[4])
    name = before[4].keys.prefix[int(labels[change[0].argmax()])]
    assert before[4].queries.prefix == (name,)


@pytest.mark.parametrize("kind", [Zigzag, Shuffled, Axial, PooledKeys], ids=lambda kind: kind.__name__)
def test_values_come_in_the_order_of_the_layout(kind: type[Odd]) -> None:
    model, x = build(kind), noise()
    model.gain = 0.0
    recording = seen(model, x)
    layout = recording[0].keys
    values = recording.values(0)
    assert values.shape == (BATCH, HEADS, len(layout), WIDTH // HEADS)
    cell = layout.grid[1] + 2
    changed = seen(model, lit(x, layout, cell, 0))
    assert int((changed.values(0) - values).abs().amax((1, 3))[0].argmax()) == layout.patch(*divmod(cell, layout.grid[1]))


@pytest.mark.parametrize("written", ["q k", "(k q) turned", "turned einsum"])
def test_scores_that_are_turned_before_the_softmax_are_those_of_the_other_order(written: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.stem, self.ask, self.answer = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.stem(x).flatten(2).mT
            query, key = self.ask(tokens), self.answer(tokens)
            scores = {
                "q k": query @ key.mT,
                "(k q) turned": (key @ query.mT).mT,
                "turned einsum": torch.einsum("nkc,nqc->nkq", key, query).transpose(1, 2),
            }[written]
            mixed: Tensor = scores.softmax(-1) @ tokens
            return mixed.mean(1)

    model = Model().eval()
    pixels = torch.randn(2, 3, 12, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), visattn.capture(model) as recording:
        model(pixels)
    (record,) = recording
    with torch.no_grad():
        tokens = model.stem(pixels).flatten(2).mT
        expected = (model.ask(tokens) @ model.answer(tokens).mT).softmax(-1)
    assert record.keys.grid == (3, 4)
    torch.testing.assert_close(recording.attention()[:, 0], expected)
