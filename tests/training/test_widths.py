"""Wide baselines have the stated number of parameters and the proportions of the plain network."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import nn

from tests.conftest import Figures
from visattn import models
from visattn.errors import OptionError
from visattn.training.tasks.widths import Widths, _counted, wide

Build = Callable[..., models.ResNet]


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def plain(build: Build) -> Callable[[Widths], nn.Module]:
    return lambda widths: build(widths=widths) if widths else build()


def by_hand(a: int, b: int, c: int) -> int:
    """Count the parameters of ResNet-20 with these widths."""
    total = 27 * a + 2 * a
    before = a
    for channels in (a, b, c):
        total += 9 * before * channels + 2 * channels
        total += 5 * (9 * channels * channels + 2 * channels)
        before = channels
    return total + 10 * c + 10


def searched(parameters: int) -> Widths:
    """Search all triples of widths by the documented rule."""
    factor = 1.0
    while by_hand(round(16 * factor), round(32 * factor), round(64 * factor)) < parameters:
        factor += 1e-5
    near = [range(round(width * factor) - 2, round(width * factor) + 3) for width in (16, 32, 64)]
    enough = [(a, b, c) for a, b, c in itertools.product(*near) if a <= b <= c and by_hand(a, b, c) >= parameters]
    close = [widths for widths in enough if by_hand(*widths) <= 1.004 * parameters]
    return min(
        close or enough,
        key=lambda w: (
            sum((width / (base * factor) - 1) ** 2 for width, base in zip(w, (16, 32, 64), strict=True)) if close else by_hand(*w)
        ),
    )


@pytest.mark.parametrize("attention", ["se", "cbam", "bam", "nl"])
def test_widths_of_resnet20_match_brute_force_search(attention: str, figures: Figures) -> None:
    asked = count(models.resnet20(attention=attention))
    found = wide(plain(models.resnet20), asked)
    assert found.widths == searched(asked)
    built = models.resnet20(widths=found.widths)
    assert count(built) == found.parameters == by_hand(*found.widths)
    assert found.excess == pytest.approx(100 * (found.parameters - asked) / asked, abs=1e-9)
    figures(f"percent more parameters than {attention} in resnet20", found.excess, "0 to 0.5")
    assert 0 <= found.excess < 0.5


@pytest.mark.parametrize(("build", "parameters"), [(models.resnet18, 11_779_392), (models.resnet50, 28_089_624)])
def test_widened_large_networks_match_the_size_of_cbam(build: Build, parameters: int) -> None:
    found = wide(plain(build), parameters)
    with torch.device("meta"):
        assert count(build(widths=found.widths)) == found.parameters
    assert parameters <= found.parameters <= 1.001 * parameters
    factors = [width / base for width, base in zip(found.widths, (64, 128, 256, 512), strict=True)]
    assert max(factors) - min(factors) < 0.01


@pytest.mark.parametrize("parameters", [269_722, 1_000_000, 3_000_000])
def test_plain_parameter_count_gives_plain_widths_and_other_counts_are_reached(parameters: int) -> None:
    found = wide(plain(models.resnet20), parameters)
    assert 0 <= found.excess < 0.5
    assert (found.widths == (16, 32, 64)) == (parameters == 269_722)


@pytest.mark.parametrize("build", [models.resnet18, models.resnet50, models.resnet56])
def test_counts_from_a_few_networks_predict_other_widths(build: Build) -> None:
    stages = 3 if build is models.resnet56 else 4
    with torch.device("meta"):
        counted = _counted(lambda widths: count(build(widths=widths)), stages)
        for widths in ((7, 7, 7, 7)[:stages], (3, 40, 41, 90)[:stages]):
            assert counted(widths) == count(build(widths=widths))


def test_random_state_is_unchanged() -> None:
    state = torch.get_rng_state()
    wide(plain(models.resnet20), 273_000)
    assert torch.equal(torch.get_rng_state(), state)


def test_other_networks_are_refused() -> None:
    with pytest.raises(
        OptionError, match=r"'wide_baseline' needs a network of visattn\.models\.resnet, got Linear\. Leave it out"
    ):
        wide(lambda widths: nn.Linear(2, 2), 100)


# networks built from widths


@pytest.mark.parametrize(
    ("build", "widths"),
    [
        (models.resnet20, (5, 9, 9)),
        (models.resnet56, (2, 3, 4)),
        (models.resnet18, (8, 6, 4, 9)),
        (models.resnet50, (2, 3, 4, 5)),
    ],
)
def test_stages_have_the_given_widths_and_run_forward(build: Build, widths: Widths) -> None:
    network = build(widths=widths, num_classes=3)
    for stage, width in enumerate(widths, start=1):
        blocks: Any = network.get_submodule(f"layer{stage}")
        assert [block.conv2.out_channels for block in blocks] == [width] * len(blocks)
    assert network(torch.randn(2, 3, 64, 64)).shape == (2, 3)


@pytest.mark.parametrize("build", [models.resnet18, models.resnet20, models.resnet50, models.resnet56])
def test_standard_widths_are_the_default(build: Build) -> None:
    widths = (16, 32, 64) if build in (models.resnet20, models.resnet56) else (64, 128, 256, 512)
    with torch.device("meta"):
        shapes = [{name: tensor.shape for name, tensor in net.state_dict().items()} for net in (build(), build(widths=widths))]
    assert shapes[0] == shapes[1]


def test_timm_create_model_accepts_widths() -> None:
    assert timm.create_model("visattn_resnet20", widths=(3, 4, 5)).num_features == 5


@pytest.mark.parametrize("widths", [(), (16, 32), (16, 32, 64, 128), (0, 32, 64), (16, 64, 32)])
def test_invalid_widths_are_refused(widths: Widths) -> None:
    with pytest.raises(OptionError, match="widths must be 3 numbers of 1 or more, none smaller than the one before, got"):
        models.resnet20(widths=widths)
