"""A plain network with as many parameters as one with attention: what the parameters alone would bring."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from visattn.errors import OptionError
from visattn.models.resnet import ResNet

Widths = tuple[int, ...]

_REACH = 2  # channels to either side of the common factor
_SLACK = 0.004  # of the parameters: closer counts are had by bending the network's shape only


@dataclass(frozen=True)
class Wide:
    """Widths of a plain network, its number of parameters, and by how many percent that exceeds what was asked for."""

    widths: Widths
    parameters: int
    excess: float


def wide(build: Callable[[Widths], nn.Module], parameters: int) -> Wide:
    """The plain reference network with a number of parameters, wider by nearly the same factor throughout.

    Looked at are all widths within 2 channels of the plain network's times the factor that gives the number, none smaller than the
    one before. Of those with up to 0.4 % more parameters than asked for, and never fewer, it is the one nearest to that factor.

    Args:
        build: From the widths of its stages to a `visattn.models.ResNet` without attention; from `()` to the one with its default widths.
        parameters: At least so many; those of the largest network that it is compared to.

    Returns:
        The widths; where none are within 0.4 %, those with the fewest parameters.

    Raises:
        OptionError: If it is another network.
    """
    with torch.random.fork_rng(devices=[]):  # what is built here is only counted
        plain = build(())
        if not isinstance(plain, ResNet):
            raise OptionError(
                f"'wide' must widen a network of visattn.models.resnet, got {type(plain).__name__}. Leave it out of the comparison."
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
    """Channels in the 3x3 convolutions of each stage."""
    return tuple(network.get_submodule(f"{name}.0.bn1").num_features for name in network.stages)  # type: ignore[misc]


def _ideal(count: Callable[[Widths], int], start: Widths, parameters: int) -> list[float]:
    """The widths times the one factor, 1 or more, at which rounded widths reach the number of parameters."""
    low, high = 1.0, 1 + parameters / count(start)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if count(tuple(round(middle * width) for width in start)) >= parameters else (middle, high)
    return [low * width for width in start]


def _near(ideal: list[float]) -> Iterator[Widths]:
    """All nondecreasing widths near the ideal ones."""
    choices = [range(max(1, round(aim) - _REACH), round(aim) + _REACH + 1) for aim in ideal]
    return (widths for widths in itertools.product(*choices) if list(widths) == sorted(widths))


def _counted(measure: Callable[[Widths], int], stages: int) -> Callable[[Widths], int]:
    """The number of parameters as a function of the widths: a polynomial of second degree, so a few networks tell it for all.

    Each weight joins two widths at most. The networks are narrow ones, a channel or two wider in one or two stages.
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
