"""How near gradients of hard attention come to the exact one: a captioner of 4 places and 3 words, whose 64 paths can all be counted.

Prints a table, a row for each estimator, from 50,000 draws:
    bias: length of the mean gradient's difference from the exact one, over the length of the exact one; what noise adds to it is taken off
    its error: standard error of that
    bias where it looks: that of the parameters that score the places alone
    farthest parameter: largest difference of a parameter, in its standard errors
    variance: of the gradient of one draw, summed over parameters; none where a whole batch shares a draw
Exits 1 if REINFORCE is farther than 4 standard errors in any parameter, or if the running mean does not lower its variance.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from pages import write_section
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
    parser = argparse.ArgumentParser(description="Hold the gradients of hard attention against the exact one.")
    parser.add_argument("--batches", type=int, default=100, help="of each estimator; a quarter more go before")
    parser.add_argument("--size", type=int, default=500, help="draws in a batch")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/captions.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, (constants, temperature) in ESTIMATORS.items():
        model, objective = toy(temperature), Objective(**constants)
        torch.manual_seed(0)
        sampled(model, objective, options.batches // 4, options.size)  # the running mean is no longer 0
        means = sampled(model, objective, options.batches, options.size)
        rows.append({"estimator": name, **compared(means, model, options.size, shared=objective.semi_sampling > 0)})
    plain, steadied = rows[0], rows[1]
    left = f"The running mean leaves {steadied['variance'] / plain['variance']:.3f} of the variance."
    text = f"{to_markdown(rows)}\n\n{options.batches * options.size:,} draws. {left}"
    print(text)
    if options.write_docs:
        write_section(DOCS, "estimator", text)
    return int(max(row["farthest parameter"] for row in rows[:2]) > 4 or steadied["variance"] >= plain["variance"])


def toy(temperature: float = 1.0) -> ShowAttendTell:
    """A captioner in training, whose gradients all differ from 0 where they can."""
    random = torch.Generator().manual_seed(4)
    model = ShowAttendTell(
        nn.Identity(), 3, 4, attention="hard", embedding=2, state=3, width=2, dropout=0.0, temperature=temperature
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=torch.float64))
        model.embed.weight[model.start] = 0
    return model.train()


def examples(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The one picture, its caption and the caption's length, `count` times."""
    picture = torch.randn(1, 3, *GRID, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return picture.expand(count, -1, -1, -1), torch.tensor([CAPTION] * count), torch.full((count,), len(CAPTION))


def paths() -> Tensor:
    """All of them, `(64, 3)`: the place of each word."""
    return torch.tensor(list(itertools.product(range(GRID[0] * GRID[1]), repeat=len(CAPTION))))


def expected(model: ShowAttendTell) -> Tensor:
    """The expected cost: of each path its probability times the cost that it leads to."""
    images, captions, lengths = examples(len(paths()))
    told = model(images, captions, lengths, places=paths())
    cost: Tensor = (told.log_probability.sum(1).exp() * costs(told, captions)).sum()
    return cost


def gradient(model: ShowAttendTell, value: Tensor) -> Tensor:
    """Of `value`, with respect to all parameters, as one vector."""
    parts = torch.autograd.grad(value, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in parts])


def sampled(model: ShowAttendTell, objective: Objective, batches: int, size: int) -> Tensor:
    """The mean gradient of each batch, `(batches, parameters)`."""
    images, captions, lengths = examples(size)
    means = []
    for _ in range(batches):
        told = model(images, captions, lengths, how=objective.how())
        means.append(gradient(model, loss(model, told, captions, objective)))
    return torch.stack(means)


def compared(means: Tensor, model: ShowAttendTell, size: int, *, shared: bool) -> dict[str, float | None]:
    """The columns of the table; `shared`: a batch is one draw in part, so that its variance is not that of its members."""
    exact = gradient(model, expected(model))
    looks = torch.cat(
        [torch.full((parameter.numel(),), name.startswith("look.")) for name, parameter in model.named_parameters()]
    )
    difference, errors = means.mean(0) - exact, means.std(0) / len(means) ** 0.5
    along = means @ difference / difference.norm()
    return {
        "bias": relative(difference, errors, exact),
        "its error": float(along.std() / len(means) ** 0.5 / exact.norm()),
        "bias where it looks": relative(difference[looks], errors[looks], exact[looks]),
        "farthest parameter": farthest(means, exact),
        "variance": None if shared else float(size * means.var(0).sum()),
    }


def relative(difference: Tensor, errors: Tensor, exact: Tensor) -> float:
    """Length of the difference without what its errors add, over that of the exact gradient."""
    return float((difference.square().sum() - errors.square().sum()).clamp(min=0).sqrt() / exact.norm())


def farthest(means: Tensor, exact: Tensor) -> float:
    """Largest difference of the mean of batches from the exact gradient, in standard errors; some gradients are always 0."""
    errors = means.std(0) / len(means) ** 0.5
    return float(((means.mean(0) - exact).abs() / errors.clamp(min=1e-12)).max())


if __name__ == "__main__":
    sys.exit(main())
