"""Metrics of maps beside those of Quantus, where both are defined alike: largest differences over random networks, inputs and maps.

Prints a table; exits 1 if a difference is above 1e-6. Quantus is installed beside the environment first.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from quantus_apart import quantus
from torch import Tensor, nn

from visattn._support.tables import Row, to_text
from visattn.evaluation import deletion, max_sensitivity
from visattn.evaluation.imputation import imputed

BOUND = 1e-6
SIDE, CASES, CLASSES = 28, 20, 4
Array = NDArray[np.float64]


def main() -> int:
    """Compare, and print the table."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    package = quantus()
    rows: list[Row] = []
    worst = 0.0
    for name, differences in COMPARED.items():
        largest = max(differences(package))
        worst = max(worst, largest)
        rows.append({"metric": name, "cases": CASES, "largest difference": f"{largest:.1e}"})
    print(to_text(rows))
    return int(worst > BOUND)


def cases() -> Iterator[tuple[nn.Module, Tensor, Array, int]]:
    """Yield networks of one channel, since Quantus ranks the numbers of all channels; inputs; maps of every pixel; and classes."""
    for seed in range(CASES):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(1, 4, 5, 2), nn.GELU(), nn.Flatten(), nn.Linear(4 * 12 * 12, CLASSES)).eval()
        model.requires_grad_(requires_grad=False)
        values = np.random.default_rng(seed).standard_normal((SIDE, SIDE))
        yield model, torch.randn(1, 1, SIDE, SIDE), values, seed % CLASSES


def probability(model: nn.Module, label: int) -> Callable[[Tensor], Tensor]:
    """Return a function from inputs to the probability of a class."""

    def score(inputs: Tensor) -> Tensor:
        scores: Tensor = model(inputs).softmax(-1)[:, label]
        return scores

    return score


def of_deletion(package: Any) -> Iterator[float]:  # noqa: ANN401 - Quantus
    """Compare deletion with pixel flipping, at every step."""
    for steps in (4, 28):
        metric = package.PixelFlipping(
            features_in_step=SIDE * SIDE // steps, perturb_baseline=0.3, normalise=False, disable_warnings=True
        )
        for model, pixels, values, label in cases():
            theirs = metric(
                model=model, x_batch=pixels.numpy(), y_batch=np.array([label]), a_batch=values[None, None], device="cpu"
            )[0]
            ours = deletion(probability(model, label), pixels, values, steps=steps, baseline=0.3)
            yield float(np.abs(ours.scores[1:] - theirs).max())


def of_imputation(package: Any) -> Iterator[float]:  # noqa: ANN401 - Quantus
    """Compare images whose pixels are filled from their neighbors, without noise."""
    for number, (_, pixels, values, _) in enumerate(cases()):
        order = np.argsort(-values, axis=None)[: 50 + 30 * number]
        removed = np.zeros(SIDE * SIDE, bool)
        removed[order] = True
        theirs = package.noisy_linear_imputation(arr=pixels[0].numpy(), indices=order, noise=0.0)
        image = pixels[0].double().numpy()
        ours = imputed(image, removed.reshape(SIDE, SIDE), 0.0, np.random.default_rng(0))
        yield float(np.abs(ours - np.asarray(theirs).reshape(ours.shape)).max())


def of_sensitivity(package: Any) -> Iterator[float]:  # noqa: ANN401 - Quantus
    """Compare the largest change of a map under the same noise."""
    for model, pixels, _, label in cases():

        def explained(inputs: Tensor, model: nn.Module = model, label: int = label) -> Tensor:
            inputs = inputs.clone().requires_grad_()
            return torch.autograd.grad(model(inputs)[:, label].sum(), inputs)[0][0, 0] * inputs.detach()[0, 0]

        generator = torch.Generator().manual_seed(0)

        def noisy(arr: Array, generator: torch.Generator = generator, **_: Any) -> Array:  # noqa: ANN401
            noise = torch.rand(arr.shape, generator=generator, dtype=torch.float64) * 2 - 1
            perturbed: Array = arr + (0.05 * noise).float().numpy()
            return perturbed

        metric = package.MaxSensitivity(
            nr_samples=5,
            perturb_func=noisy,
            normalise=False,
            abs=False,
            disable_warnings=True,
            return_nan_when_prediction_changes=False,
        )
        theirs = metric(
            model=model,
            x_batch=pixels.numpy(),
            y_batch=np.array([label]),
            a_batch=explained(pixels)[None, None].numpy(),
            device="cpu",
            explain_func=lambda model, inputs, targets, explained=explained, **_: np.stack(
                [explained(torch.as_tensor(one)[None])[None].numpy() for one in inputs]
            ),
        )[0]
        yield abs(max_sensitivity(explained, pixels, radius=0.05, samples=5) - float(theirs))


COMPARED = {"deletion": of_deletion, "imputation of ROAD": of_imputation, "largest sensitivity": of_sensitivity}


if __name__ == "__main__":
    sys.exit(main())
