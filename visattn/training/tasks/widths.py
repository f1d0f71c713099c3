"""Wide baseline: a plain network with as many parameters as one with attention, to separate the effect of the parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from visattn.errors import OptionError
from visattn.models.resnet import ResNet

Widths = tuple[int, ...]

_REACH = 2  # channels by which a width may differ from its ideal
_SLACK = 0.004  # relative excess of parameters; a smaller one would distort the shape of the network


@dataclass(frozen=True)
class Wide:
    """Widths of a plain network, its number of parameters, and the percentage by which it exceeds the target."""

    widths: Widths
    parameters: int
    excess: float


def wide(build: Callable[[Widths], nn.Module], parameters: int) -> Wide:
    """Find the widths of a plain ResNet with a given number of parameters, scaling all stages by nearly the same factor.

    The ideal widths are the plain network's times the one factor that gives the number of parameters. Candidates are all nondecreasing
    widths within 2 channels of the ideal ones. Of those with 0 to 0.4 % more parameters than required, the one nearest to the ideal is
    chosen.

    Args:
        build: Function from the widths of the stages to a `visattn.models.ResNet` without attention. `()` stands for the default widths.
        parameters: Required number of parameters: that of the largest network in the comparison.

    Returns:
        The widths. If no candidate is within 0.4 %, the one with the fewest parameters that is not below the required number.

    Raises:
        OptionError: If `build` returns another network.
    """
    with torch.random.fork_rng(devices=[]):  # the networks built here are only counted
        plain = build(())
        if not isinstance(plain, ResNet):
            raise OptionError(
                f"'wide_baseline' needs a network of visattn.models.resnet, got {type(plain).__name__}. Leave it out."
            )
        start = _widths(plain)
        count = _counted(lambda widths: _parameters(build(widths)), len(start))
    ideal = _ideal(count, start, parameters)

    def rank(widths: Widths) -> tuple[float, float, Widths]:
        bent = sum((width / aim - 1) ** 2 for width, aim in zip(widths, ideal, strict=True))
        return max(count(widths), (1 + _SLACK) * parameters), bent, widths

    found = min((widths for widths in _near(ideal) if count(widths) >= parameters), key=rank)
    return Wide(found, count(found), 100 * (count(found) / parameters - 1))


def _widths(network: ResNet) -> Widths:
    """Return the channels of the 3x3 convolutions of each stage."""
    return tuple(network.get_submodule(f"{name}.0.bn1").num_features for name in network.stages)  # type: ignore[misc]


def _ideal(count: Callable[[Widths], int], start: Widths, parameters: int) -> list[float]:
    """Scale the widths by the smallest factor, 1 or more, at which the rounded widths reach the number of parameters."""
    low, high = 1.0, 1 + parameters / count(start)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if count(tuple(round(middle * width) for width in start)) >= parameters else (middle, high)
    return [low * width for width in start]


def _near(ideal: list[float]) -> Iterator[Widths]:
    """Iterate over all nondecreasing widths near the ideal ones."""
    choices = [range(max(1, round(aim) - _REACH), round(aim) + _REACH + 1) for aim in ideal]
    return (widths for widths in itertools.product(*choices) if list(widths) == sorted(widths))


def _counted(measure: Callable[[Widths], int], stages: int) -> Callable[[Widths], int]:
    """Return the number of parameters as a function of the widths, computed from a few small networks.

    Each weight depends on at most two widths, so the number is a polynomial of degree 2. Its coefficients follow from narrow networks
    that are a channel or two wider in one or two stages.
    """

    def probe(*wider: int) -> int:
        return measure(tuple(2 * stage + 1 + wider.count(stage) for stage in range(stages)))  # nondecreasing

    base = probe()
    first = [probe(i) - base for i in range(stages)]
    second = {(i, j): probe(i, j) - base - first[i] - first[j] for j in range(stages) for i in range(j + 1)}

    def count(widths: Widths) -> int:
        steps = [width - (2 * stage + 1) for stage, width in enumerate(widths)]
        pairs = {(i, j): steps[i] * steps[j] if i < j else steps[i] * (steps[i] - 1) // 2 for i, j in second}
        straight = sum(slope * step for slope, step in zip(first, steps, strict=True))
        return base + straight + sum(value * pairs[key] for key, value in second.items())

    return count


def _parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())
