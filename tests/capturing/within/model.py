"""Model that runs a program on its tokens before attention, and programs.

A program is a function of the model, its tokens and the model's further inputs. Programs may use the model's learned tensors:
`cls` (1, 1, C), `pos` (1, N, C), `table` (1, N + 1, C), `order` (a permutation of the tokens) and `mix` (the matrix of another one).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capturing.moving import GRID, PATCH, SIZE, WIDTH

TOKENS = GRID[0] * GRID[1]
RESIDUAL = 1e-2
Change = Callable[..., Any]  # takes the model, its tokens (B, N, C) and further inputs; returns tokens


@dataclass(frozen=True)
class Program:
    """A way to move tokens.

    Attributes:
        family: Family of programs.
        name: Name within the family.
        change: The function.
        others: Sorts of the model's further inputs: `view` and `depth` are images; `vector` is `(B, C)`, `tokens` is `(B, N, C)`.
        prepare: Called with the model before its first forward pass.
        batch: Images in a batch.
        resamples: Whether the program changes the grid by a local kernel, so that the center of each cell is judged too.
        attention: Attention calls of a forward pass, with the model's own.
        residual: Whether the program is also run behind a vanishing residual.
        written: Whether it was written by hand and must run; generated calls may fail.
    """

    family: str
    name: str
    change: Change
    others: tuple[str, ...] = ()
    prepare: Callable[[Any], Any] | None = None
    batch: int = 1
    resamples: bool = False
    attention: int = 1
    residual: bool = True
    written: bool = True


class Mover(nn.Module):
    """Model with 4-pixel patches, a program on its tokens, and attention."""

    def __init__(self, program: Program, residual: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
            self.deep = nn.Conv2d(1, WIDTH, PATCH, PATCH)
            self.part, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
            self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
            self.pos = nn.Parameter(0.1 * torch.randn(1, TOKENS, WIDTH))
            self.register_buffer("table", torch.randn(1, TOKENS + 1, WIDTH))
            self.register_buffer("order", torch.randperm(TOKENS))
            self.register_buffer("mix", torch.eye(TOKENS)[torch.randperm(TOKENS)])
        self.program, self.residual = [program], residual
        self.eval()
        if program.prepare is not None:
            program.prepare(self)

    def maps(self, x: Tensor) -> Tensor:
        """Return the embedding of an image, `(B, C, N)`."""
        return self.embed(x).flatten(2)

    def moved(self, maps: Tensor, *others: Tensor) -> Tensor:
        """Return the tokens that attention gets. The program may write into the maps."""
        first = RESIDUAL * maps.mT if self.residual else None
        out = self.program[0].change(self, maps.mT, *others)
        return out if first is None else first + out

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        tokens = self.moved(self.maps(x), *others)
        heads = tokens[:, None]
        return tokens + F.scaled_dot_product_attention(heads, heads, heads)[:, 0]


def made(sort: str, seed: int, batch: int) -> Tensor:
    """Return an input of a model with random content."""
    shapes = {
        "image": (3, *SIZE),
        "view": (3, *SIZE),
        "depth": (1, *SIZE),
        "vector": (WIDTH,),
        "tokens": (TOKENS, WIDTH),
    }
    number = 1000 * seed + sum(map(ord, sort))
    return torch.randn(batch, *shapes[sort], generator=torch.Generator().manual_seed(number))


def inputs_of(program: Program, seed: int) -> list[Tensor]:
    return [made(sort, seed, program.batch) for sort in ("image", *program.others)]


def quietly(func: Callable[..., Any], *args: Any) -> Any:
    """Call a function from a fixed random state and without its warnings. The random state is changed."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(7)
        return func(*args)


def programs(family: str, changes: Mapping[str, Change] | Iterable[tuple[str, Change]], **how: Any) -> Iterator[Program]:
    """Yield a program of each function."""
    for name, change in dict(changes).items():
        yield Program(family, name, change, **how)


# parts of programs


def called(func: Callable[..., Any], arguments: Callable[[Tensor], tuple[Any, ...]], t: Tensor) -> Tensor | None:
    """Call a function on tokens and return its result as tokens; None if it is no tokens.

    It is `tests.capturing.operations.made` without its seed, which takes most of the time.
    """
    out = func(*arguments(t.clone()))
    if isinstance(out, (tuple, list)):
        out = next((x for x in out if isinstance(x, Tensor)), None)
    if not isinstance(out, Tensor) or out.layout != torch.strided or out.is_meta:
        return None
    out = (out.real if out.is_complex() else out).float()
    if out.ndim == 4 and out.shape[0] == 1 and out.shape[2:] == GRID:
        return out.flatten(2).mT
    if out.ndim != 3:
        out = out.squeeze()
    if out.ndim == 2 and len(out) == TOKENS:
        return out[None]
    if out.ndim == 1 and len(out) == TOKENS * WIDTH:
        return out.view(1, TOKENS, WIDTH)
    return out if out.ndim == 3 and len(out) == 1 and out.shape[1] > 1 and out.shape[2] > 0 else None


def grid(t: Tensor) -> Tensor:
    return t.unflatten(1, GRID)


def planes(t: Tensor) -> Tensor:
    return t.mT.unflatten(-1, GRID)


def raster(maps: Tensor) -> Tensor:
    """Convert channels-first maps to tokens."""
    return maps.flatten(2).mT


def wide(index: Tensor, t: Tensor) -> Tensor:
    """Return an index of tokens as an index of their elements."""
    return index[None, :, None].expand(t.shape[0], -1, t.shape[2])


def turned() -> Tensor:
    return torch.arange(TOKENS).flip(0)
