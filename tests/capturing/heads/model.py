"""Small vision transformer with an arbitrary head.

The last block only adds its attention to the tokens, without a projection or a second branch. So the gradient at the result of the last
attention equals the gradient at the tokens that the head receives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE, PATCH, GRID, WIDTH, CLASSES = (32, 48), 4, (8, 12), 16, 3
PATCHES = GRID[0] * GRID[1]
Way = Callable[..., Any]  # takes the head and its tokens (B, P + N, C), and the mask if there is one; returns features or scores


@dataclass(frozen=True)
class Head:
    """One head.

    Attributes:
        pool: Function from tokens to features.
        before: Layer that acts on each token alone, before `pool`: a name in `BEFORE`.
        after: Layers behind `pool`: a name in `AFTER`; `none` if it already returns scores.
        prefix: Number of learned tokens.
        joint: Whether one parameter holds all learned tokens, instead of one for the class token and one for the others.
        end: Whether the learned tokens lie behind the patches.
        masks: Number of masks that the model is given as a second input, one after the other; 0 for none.
    """

    pool: Way
    before: str = "none"
    after: str = "linear"
    prefix: int = 1
    joint: bool = False
    end: bool = False
    masks: int = 0


def _mlp(width: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, out))


class Unit(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


BEFORE: dict[str, Callable[[], nn.Module]] = {
    "none": nn.Identity,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "mlp": lambda: _mlp(WIDTH, WIDTH),
    "scores above 0": lambda: nn.Sequential(nn.Linear(WIDTH, CLASSES), nn.ReLU()),
    "norm and mlp": lambda: nn.Sequential(nn.LayerNorm(WIDTH), _mlp(WIDTH, WIDTH)),
    "unit length": Unit,
}
AFTER: dict[str, Callable[[int], nn.Module]] = {
    "none": lambda _: nn.Identity(),
    "linear": lambda width: nn.Linear(width, CLASSES),
    "norm": lambda width: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CLASSES)),
    "batch norm": lambda width: nn.Sequential(nn.BatchNorm1d(width), nn.Linear(width, CLASSES)),
    "dropout": lambda width: nn.Sequential(nn.Dropout(0.5), nn.Linear(width, CLASSES)),
    "tanh": lambda width: nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, CLASSES)),
    "mlp": lambda width: _mlp(width, CLASSES),
    "relu": lambda width: nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)),
    "softmax": lambda width: nn.Sequential(nn.Linear(width, CLASSES), nn.Softmax(-1)),
}


class Kit(nn.Module):
    """Parts that heads are written with. `latents` marks the tokens behind a pooling attention of the head."""

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix, count = prefix, prefix + PATCHES
        self.fc, self.fc2, self.scores = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.scores2, self.two, self.one = nn.Linear(WIDTH, CLASSES), nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.norm, self.norm2, self.bn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.BatchNorm2d(WIDTH)
        self.mha = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.over, self.conv1 = nn.Linear(PATCHES, 1), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.mixer = nn.Linear(PATCHES, PATCHES)
        self.conv, self.valid = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, WIDTH, 3)
        self.point, self.whole = nn.Conv2d(WIDTH, WIDTH, 1), nn.Conv2d(WIDTH, 8, GRID)
        self.depthwise = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.w, self.latent = nn.Parameter(torch.randn(PATCHES)), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.latents3 = nn.Parameter(torch.randn(1, 3, WIDTH))
        self.alpha, self.zero = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("part", (torch.arange(PATCHES) < PATCHES // 2).float())
        self.register_buffer("some", (torch.rand(PATCHES) < 0.6).float())
        self.register_buffer("ones", torch.ones(PATCHES))
        self.register_buffer("first", F.one_hot(torch.tensor(0), count).float())
        self.register_buffer("patch", F.one_hot(torch.tensor(17), PATCHES).float())
        self.register_buffer("channels", torch.arange(WIDTH) % 2 == 0)
        self.latents = nn.Identity()

    def map(self, tokens: Tensor) -> Tensor:
        """Return the patches as a map, `(B, C, rows, columns)`."""
        return tokens[:, self.prefix :].mT.reshape(len(tokens), -1, *GRID)


class Model(nn.Module):
    """Model whose taps `stream`, `read` and `kit.latents` mark tokens.

    `stream` are the tokens behind the last attention, `read` those that are pooled: only layers on each token alone lie between.
    """

    def __init__(self, head: Head, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
            apart = min(head.prefix, 1) if not head.joint else head.prefix
            self.cls_token = nn.Parameter(torch.randn(1, apart, WIDTH))
            self.more_tokens = nn.Parameter(torch.randn(1, head.prefix - apart, WIDTH))
            self.positions = nn.Parameter(torch.randn(1, PATCHES, WIDTH) / 2)
            self.blocks = nn.Sequential(Block(), Block())
            self.before, self.kit = BEFORE[head.before](), Kit(head.prefix)
            self.stream, self.read, self.head = nn.Identity(), nn.Identity(), [head]
            with torch.no_grad():
                example = torch.randn(1, head.prefix + PATCHES, WIDTH)
                mask = [torch.ones(1, PATCHES)] * bool(head.masks)
                self.after = AFTER[head.after](head.pool(self.kit.eval(), example, *mask).shape[-1])
        self.double().eval()

    @property
    def order(self) -> list[int]:
        """Index of each token in the sequence: first the learned ones, then the patches in raster order."""
        prefix = range(self.head[0].prefix)
        return [*(PATCHES + i for i in prefix), *range(PATCHES)] if self.head[0].end else [*range(len(prefix) + PATCHES)]

    def forward(self, x: Tensor, *masks: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).mT + self.positions
        learned = [one.expand(len(x), -1, -1) for one in (self.cls_token, self.more_tokens) if one.shape[1]]
        tokens = self.blocks(torch.cat([tokens, *learned] if self.head[0].end else [*learned, tokens], 1))
        tokens = self.read(self.before(self.stream(tokens)))
        return self.after(self.head[0].pool(self.kit, tokens, *masks))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        with torch.no_grad():
            self.qkv.weight[: 2 * WIDTH] *= 3

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x))[:, None].chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v)[:, 0]


def images(seed: int = 0, batch: int = 2) -> Tensor:
    """Return a batch of smooth random images in double precision."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(batch, 3, 8, 12, generator=generator, dtype=torch.float64)
    fine = torch.randn(batch, 3, *SIZE, generator=generator, dtype=torch.float64)
    return F.interpolate(coarse, SIZE, mode="bilinear") + 0.3 * fine


def masks(count: int, batch: int = 2) -> list[Tensor]:
    """Return masks of the patches, `(B, N)` with zeros and ones; each second one is the opposite of the one before."""
    generator = torch.Generator().manual_seed(7)
    first = (torch.rand(batch, PATCHES, generator=generator) < 0.5).double()
    return [first if i % 2 == 0 else 1 - first for i in range(count)]
