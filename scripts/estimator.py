"""Gradient estimators of hard attention compared with the exact gradient, for a captioner with 4 cells and 3 words (64 paths).

Prints a table with one row per estimator, from 50,000 draws:
    bias: norm of the difference between mean and exact gradient, relative to the norm of the exact one; the part due to noise is removed
    standard error of the bias: over batches
    bias of the attention parameters: bias of only the parameters that score the cells
    largest deviation: largest difference of a parameter, in standard errors
    variance: variance of the gradient of one draw, summed over parameters; none if a whole batch shares a draw
Exits 1 if REINFORCE deviates by more than 4 standard errors in any parameter, or if the running mean does not reduce its variance.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from pages import folded, write_section
from torch import Tensor, nn

from visattn._support.tables import to_markdown
from visattn.models.show_attend_tell import END, Objective, ShowAttendTell, costs, loss

DOCS = Path(__file__).parents[1] / "docs" / "captions.md"
GRID = (2, 2)
CAPTION = (2, 3, END)
UNBIASED = {"regularizer": 0.0, "semi_sampling": 0.0, "reward": 1.0, "entropy": 0.0, "cost": "sum"}
ESTIMATORS: dict[str, tuple[dict[str, Any], float]] = {  # constants of the objective, temperature
    "REINFORCE, no baseline": ({**UNBIASED, "decay": 1.0}, 1.0),
    "REINFORCE, running mean": (UNBIASED, 1.0),
    "the authors' constants": ({"regularizer": 0.0}, 1.0),
    "Gumbel straight-through, temperature 1": ({**UNBIASED, "estimator": "gumbel"}, 1.0),
    "Gumbel straight-through, temperature 0.5": ({**UNBIASED, "estimator": "gumbel"}, 0.5),
}


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Compare gradient estimators of hard attention with the exact gradient.")
    parser.add_argument("--batches", type=int, default=100, help="batches per estimator, after a warm-up of a quarter of them")
    parser.add_argument("--size", type=int, default=500, help="draws per batch")
    parser.add_argument(
        "--write-docs", action="store_true", help="write the table to docs/captions, and link it in docs/captions.md"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, (constants, temperature) in ESTIMATORS.items():
        model, objective = toy(temperature), Objective(**constants)
        torch.manual_seed(0)
        sampled(model, objective, options.batches // 4, options.size)  # warm-up: moves the running mean away from 0
        means = sampled(model, objective, options.batches, options.size)
        rows.append({"estimator": name, **compared(means, model, options.size, shared=objective.semi_sampling > 0)})
    plain, steadied = rows[0], rows[1]
    left = f"The running-mean baseline reduces the variance to {steadied['variance'] / plain['variance']:.3f} of its value."
    table = folded("Gradients: bias and variance of each estimator", to_markdown(rows))
    text = f"{table}\n{options.batches * options.size:,} draws. {left}"
    print(text)
    if options.write_docs:
        write_section(DOCS, "estimator", text, into_files=True)
    return int(max(row["largest deviation"] for row in rows[:2]) > 4 or steadied["variance"] >= plain["variance"])


def toy(temperature: float = 1.0) -> ShowAttendTell:
    """Build a small captioner in training mode, whose gradients differ from 0 wherever possible."""
    random = torch.Generator().manual_seed(4)
    model = ShowAttendTell(
        nn.Identity(), 3, 4, attention="hard", embed_dim=2, hidden_dim=3, attention_dim=2, dropout=0.0, temperature=temperature
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=torch.float64))
        model.embed.weight[model.start_token] = 0
    return model.train()


def examples(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the only image, its caption and the caption's length, repeated `count` times."""
    picture = torch.randn(1, 3, *GRID, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return picture.expand(count, -1, -1, -1), torch.tensor([CAPTION] * count), torch.full((count,), len(CAPTION))


def paths() -> Tensor:
    """Return all paths `(64, 3)`: the location of each word."""
    return torch.tensor(list(itertools.product(range(GRID[0] * GRID[1]), repeat=len(CAPTION))))


def expected(model: ShowAttendTell) -> Tensor:
    """Compute the expected cost: the sum over all paths of probability times cost."""
    images, captions, lengths = examples(len(paths()))
    told = model(images, captions, lengths, locations=paths())
    cost: Tensor = (told.log_probability.sum(1).exp() * costs(told, captions)).sum()
    return cost


def gradient(model: ShowAttendTell, value: Tensor) -> Tensor:
    """Compute the gradient of `value` with respect to all parameters, as one vector."""
    parts = torch.autograd.grad(value, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in parts])


def sampled(model: ShowAttendTell, objective: Objective, batches: int, size: int) -> Tensor:
    """Compute the mean gradient of each batch, `(batches, parameters)`."""
    images, captions, lengths = examples(size)
    means = []
    for _ in range(batches):
        told = model(images, captions, lengths, sampling=objective.sampling())
        means.append(gradient(model, loss(model, told, captions, objective)))
    return torch.stack(means)


def compared(means: Tensor, model: ShowAttendTell, size: int, *, shared: bool) -> dict[str, float | None]:
    """Compute the columns of the table; `shared`: examples of a batch share a draw, so that the variance per draw is unknown."""
    exact = gradient(model, expected(model))
    looks = torch.cat(
        [torch.full((parameter.numel(),), name.startswith("look.")) for name, parameter in model.named_parameters()]
    )
    difference, errors = means.mean(0) - exact, means.std(0) / len(means) ** 0.5
    along = means @ difference / difference.norm()
    return {
        "bias": relative(difference, errors, exact),
        "standard error of the bias": float(along.std() / len(means) ** 0.5 / exact.norm()),
        "bias of the attention parameters": relative(difference[looks], errors[looks], exact[looks]),
        "largest deviation": farthest(means, exact),
        "variance": None if shared else float(size * means.var(0).sum()),
    }


def relative(difference: Tensor, errors: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference, without the part due to noise, relative to the norm of the exact gradient."""
    return float((difference.square().sum() - errors.square().sum()).clamp(min=0).sqrt() / exact.norm())


def farthest(means: Tensor, exact: Tensor) -> float:
    """Return the largest deviation of the mean over batches from the exact gradient, in standard errors; some gradients are always 0."""
    errors = means.std(0) / len(means) ** 0.5
    return float(((means.mean(0) - exact).abs() / errors.clamp(min=1e-12)).max())


if __name__ == "__main__":
    sys.exit(main())
