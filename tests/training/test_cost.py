"""Parameters and multiply-accumulates equal those counted by hand."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn

from visattn import models
from visattn.errors import UnsupportedModel
from visattn.nn import ATTENTION
from visattn.training.report.costs import Cost, cost


def test_cost_of_resnet20_matches_a_sum_over_layers() -> None:
    weights, products = 3 * 16 * 9 + 2 * 16, 32 * 32 * 16 * 3 * 9  # the stem and its norm
    side, before = 32, 16
    for channels in (16, 32, 64):
        for block in (1, 2, 3):
            if channels > before and block == 1:
                side //= 2
                products += side * side * channels * before  # the shortcut's convolution with fixed weights
            for inputs in (before, channels):
                weights += inputs * channels * 9 + 2 * channels
                products += side * side * channels * inputs * 9
            before = channels
    weights += 64 * 10 + 10
    products += 64 * 10
    assert cost(models.resnet20(), (3, 32, 32)) == Cost(weights, products)
    assert (round(weights / 1e6, 2), round(products / 1e6, 1)) == (0.27, 40.8)  # as published


def test_cost_of_a_vision_transformer_includes_attention() -> None:
    dim, depth, heads, classes, tokens = 24, 3, 4, 5, 4 * 3 + 1
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=(32, 24), patch_size=8, embed_dim=dim, depth=depth, num_heads=heads, num_classes=classes
    )
    products = (tokens - 1) * 3 * 8 * 8 * dim
    for _ in range(depth):
        products += tokens * dim * 3 * dim  # queries, keys, values
        products += 2 * heads * tokens * tokens * (dim // heads)  # scores, and weights times values
        products += tokens * dim * dim
        products += 2 * tokens * dim * 4 * dim
    products += dim * classes
    found = cost(model, (3, 32, 24))
    assert found == Cost(sum(parameter.numel() for parameter in model.parameters()), products)


def test_fused_attention_is_counted() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, image: Tensor) -> Tensor:
            out: Tensor = self.layer(image.flatten(2).transpose(1, 2))
            return out

    assert cost(Encoder(), (16, 2, 3)).macs == 6 * 16 * 48 + 2 * 6 * 6 * 16 + 6 * 16 * 16 + 2 * 6 * 16 * 32


def test_shared_layer_counts_parameters_once_and_macs_twice() -> None:
    conv = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    assert cost(nn.Sequential(conv, nn.ReLU(), conv), (8, 5, 7)) == Cost(8 * 9 + 8, 2 * 5 * 7 * 8 * 9)


@pytest.mark.full
@pytest.mark.parametrize("name", ATTENTION)
def test_cost_works_for_every_attention_module(name: str) -> None:
    plain, found = cost(models.resnet20(), (3, 32, 32)), cost(models.resnet20(attention=name), (3, 32, 32))
    assert found.parameters >= plain.parameters
    assert found.macs >= plain.macs


def test_squeeze_and_excitation_adds_its_two_layers() -> None:
    gates = [(channels, channels // 16) for channels in (16, 32, 64) for _ in range(3)]
    added = cost(models.resnet20(attention="se"), (3, 32, 32)).macs - cost(models.resnet20(), (3, 32, 32)).macs
    assert added == sum(2 * channels * hidden for channels, hidden in gates)


def test_network_and_random_state_are_unchanged() -> None:
    model = models.resnet20().half().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    assert cost(model, (3, 32, 32)).macs == 40_813_184
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Branches(nn.Linear):
    def forward(self, image: Tensor) -> Tensor:
        return image if image.sum() > 0 else -image


@pytest.mark.parametrize(
    ("model", "shape"), [(models.resnet20(), (1, 32, 32)), (Branches(2, 2), (3, 4, 4))], ids=["channels", "values"]
)
def test_model_that_cannot_run_is_refused_with_the_reason(model: nn.Module, shape: tuple[int, int, int]) -> None:
    with pytest.raises(
        UnsupportedModel, match=rf"counting needs a network that takes images of .*, got {type(model).__name__}: .+Give"
    ):
        cost(model, shape)
