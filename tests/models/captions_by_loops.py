"""Show, attend and tell from the paper's formulas, for tests: loops over images, words and locations. Imports nothing of visattn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]  # by the names of a state dict
ZERO = torch.zeros((), dtype=torch.float64)


class Word(NamedTuple):
    """Output of one step."""

    logits: Tensor
    alpha: list[Tensor]
    beta: Tensor
    taken: list[Tensor]
    log_probability: Tensor
    entropy: Tensor
    cost: Tensor  # -log p of the ground-truth word


def told_by_loops(
    weights: Weights, picture: Tensor, caption: Sequence[int], attention: str, places: Sequence[int] = (), radius: int = 1
) -> list[Word]:
    """Decode a caption for features `(D, rows, columns)`; hard attention takes `places`, one location per word."""
    grid = picture.shape[1], picture.shape[2]
    cells = []
    for row in range(picture.shape[1]):
        for column in range(picture.shape[2]):
            cell = picture[:, row, column]
            if "row" in weights:
                cell = cell + weights["row"][:, row, 0] + weights["column"][:, 0, column]
            cells.append(cell)
    mean = sum(cells, ZERO) / len(cells)
    if "first_h" in weights:  # learned, the same for every image
        h, c = torch.tanh(weights["first_h"]), torch.tanh(weights["first_c"])
    else:
        h, c = torch.tanh(affine(weights, "first_h", mean)), torch.tanh(affine(weights, "first_c", mean))
    before, words = torch.zeros_like(weights["embed.weight"][0]), []
    for t, word in enumerate(caption):
        alpha = [ZERO + 1 / len(cells)] * len(cells) if attention == "uniform" else scored(weights, cells, h)
        if attention == "local":
            alpha = near(alpha, center_of(weights, h, grid), grid, radius)
        taken = alpha
        if attention == "hard":
            taken = [ZERO + (i == places[t]) for i in range(len(cells))]
        context = sum((weight * cell for weight, cell in zip(taken, cells, strict=True)), ZERO)
        beta = sigmoid(affine(weights, "gate", h)[0])
        context = beta * context
        h, c = lstm(weights, torch.cat((before, context)), h, c)
        hidden = before + affine(weights, "from_state", h) + weights["from_seen.weight"] @ context
        logits = affine(weights, "last", torch.tanh(hidden))
        words.append(
            Word(
                logits,
                alpha,
                beta,
                taken,
                torch.log(alpha[places[t]]) if attention == "hard" else ZERO,
                -sum((a * torch.log(a) for a in alpha if a > 0), ZERO),
                torch.log(sum((torch.exp(one) for one in logits), ZERO)) - logits[word],
            )
        )
        before = weights["embed.weight"][word]
    return words


def scored(weights: Weights, cells: Sequence[Tensor], h: Tensor) -> list[Tensor]:
    """Compute `alpha` over the cells."""
    powers = []
    for cell in cells:
        hidden = torch.tanh(affine(weights, "look.feature", cell) + weights["look.state.weight"] @ h)
        powers.append(torch.exp(affine(weights, "look.score", hidden)[0]))
    return [power / sum(powers, ZERO) for power in powers]


def center_of(weights: Weights, h: Tensor, grid: tuple[int, int]) -> list[Tensor]:
    """Predict row and column around which a word looks."""
    told = weights["look.near.vector.weight"] @ torch.tanh(weights["look.near.hidden.weight"] @ h)
    return [(side - 1) * sigmoid(one) for side, one in zip(grid, told, strict=True)]


def near(alpha: Sequence[Tensor], center: Sequence[Tensor], grid: tuple[int, int], radius: int) -> list[Tensor]:
    """Multiply weights by a Gaussian around a center, drop those outside the window, and let them sum to 1."""
    found = []
    for number, weight in enumerate(alpha):
        down, right = (at - middle for at, middle in zip(divmod(number, grid[1]), center, strict=True))
        inside = abs(down) <= radius and abs(right) <= radius
        found.append(weight * torch.exp(-(down**2 + right**2) / (2 * (radius / 2) ** 2)) if inside else ZERO)
    return [one / sum(found, ZERO) for one in found]


def lstm(weights: Weights, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Run one LSTM step gate by gate; PyTorch stacks input, forget, cell and output."""
    width = len(h)

    def gate(number: int) -> Tensor:
        of = slice(number * width, (number + 1) * width)
        given = weights["lstm.weight_ih"][of] @ x + weights["lstm.bias_ih"][of]
        return given + weights["lstm.weight_hh"][of] @ h + weights["lstm.bias_hh"][of]

    c = sigmoid(gate(1)) * c + sigmoid(gate(0)) * torch.tanh(gate(2))
    return sigmoid(gate(3)) * torch.tanh(c), c


def unevenness(words: Sequence[Word]) -> Tensor:
    """Compute the doubly stochastic term of one caption, as in the paper: `sum_i (1 - sum_t alpha_ti)^2`."""
    total = ZERO
    for i in range(len(words[0].alpha)):
        total = total + (1 - sum((word.alpha[i] for word in words), ZERO)) ** 2
    return total


def cost(words: Sequence[Word]) -> Tensor:
    """Compute the cost of one caption."""
    return sum((word.cost for word in words), ZERO)


def log_probability(words: Sequence[Word]) -> Tensor:
    """Compute the log-probability of the path of one caption."""
    return sum((word.log_probability for word in words), ZERO)


def affine(weights: Weights, name: str, x: Tensor) -> Tensor:
    return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))
