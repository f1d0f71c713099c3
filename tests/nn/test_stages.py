"""Stages of networks with skip connections: attention in encoder and decoder, and a warning for what is left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.nn import unets
from visattn.errors import VisattnWarning
from visattn.nn import attach

UNETS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "in one row, transposed convolutions": (unets.Numbered, [f"blocks.{i}" for i in range(5)]),
    "joined inside, upsampled": (unets.Named, ["inc", "down1", "down2", "up1", "up2"]),
    "stages that return pairs": (unets.Pairs, ["layer1.conv", "layer2.conv", "layer3", "layer4", "layer5"]),
    "U-Net++": (unets.Nested, ["conv0_0", "conv1_0", "conv2_0", "conv0_1", "conv1_1", "conv0_2"]),
    "one around another": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), unets.Level(4, 8, unets.Level(8, 16, None)), unets.double(8, 4)),
        ["0", "1.down", "1.inside", "1.inside.down", "2"],
    ),
    "added": (unets.Added, [f"encoder.layer{i}" for i in (1, 2, 3)] + ["merge.level2", "merge.level1"]),
    "Attention U-Net": (unets.Gated, ["inc", "down1", "down2", "up1", "up2"]),
    "without blocks": (unets.Flat, ["enc1", "enc2", "mid", "dec2", "dec1", "dec0"]),
    "inside another network": (
        lambda: nn.Sequential(unets.Named(), nn.AdaptiveAvgPool2d(1)),
        ["0.inc", "0.down1", "0.down2", "0.up1", "0.up2"],
    ),
}


def example() -> Tensor:
    return torch.randn(1, 3, 24, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", list(UNETS))
def test_stages_of_both_sides_of_a_u_net_are_found(name: str) -> None:
    make, expected = UNETS[name]
    model = make().eval()
    before = model(example())
    handle = attach(model, "se", where="stage", example=example())
    assert [site.name for site in handle.sites] == expected
    assert torch.equal(model(example()), before)
    heard: list[nn.Module] = []
    for site in handle.sites:
        site.module.register_forward_hook(lambda module, *_: heard.append(module))
    model(example())
    assert {*heard} == {site.module for site in handle.sites}
    assert len(heard) == len(handle.sites)


LEFT: dict[str, tuple[Callable[[], nn.Module], list[str], str]] = {
    "a skip connection of functions": (
        unets.Scaled,
        ["down1", "down2", "up1", "up2"],
        r"^a skip connection that is not the output of one module is left out: .* name modules inside with where=",
    ),
    "stages that return what no module returns": (
        unets.HiddenPairs,
        ["layer3", "layer4", "layer5"],
        r"^'layer1', 'layer2', a skip connection that is not the output of one module are left out: ",
    ),
}


@pytest.mark.parametrize("name", list(LEFT))
def test_warns_about_stages_that_are_left_out(name: str) -> None:
    make, expected, told = LEFT[name]
    model = make().eval()
    with pytest.warns(VisattnWarning, match=told) as caught:
        handle = attach(model, "se", where="stage", example=example())
    assert [site.name for site in handle.sites] == expected
    assert [warning.filename for warning in caught] == [__file__]
    assert "\n" not in str(caught[0].message)
