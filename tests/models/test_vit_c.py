"""Small vision transformer: receptive field of a token, pooling, and support as for timm's models."""

from __future__ import annotations

import pytest
import timm
import torch

import visattn
from visattn.core import methods
from visattn.models import vit_c


def test_receptive_field_of_a_patch_is_27_pixels_around_its_own_8() -> None:
    torch.manual_seed(0)
    stem = vit_c().eval().patch_embed
    image = torch.randn(1, 3, 64, 64, requires_grad=True)
    tokens = stem(image)
    assert tokens.shape == (1, 64, 96)
    chosen = torch.zeros_like(tokens)
    chosen[0, 3 * 8 + 4] = 1
    tokens.backward(chosen)
    assert image.grad is not None
    rows, columns = image.grad.abs().sum((0, 1)).nonzero().unbind(1)
    assert (int(rows.max() - rows.min()) + 1, int(columns.max() - columns.min()) + 1) == (27, 27)
    middle = (rows.min() + rows.max()) / 2, (columns.min() + columns.max()) / 2
    assert abs(middle[0] - (3 * 8 + 3.5)) <= 4
    assert abs(middle[1] - (4 * 8 + 3.5)) <= 4


def test_parameter_count_is_0_39_million() -> None:
    assert round(sum(parameter.numel() for parameter in vit_c().parameters()) / 1e6, 2) == 0.39


def test_the_classifier_reads_the_mean_of_all_patches() -> None:
    model = vit_c(num_classes=5).eval()
    tokens = model.forward_features(torch.randn(2, 3, 64, 64))
    assert tokens.shape == (2, 64, 96)
    assert torch.allclose(model.forward_head(tokens), model.head(model.fc_norm(tokens.mean(1))))


@pytest.mark.parametrize("size", [64, (48, 96)])
def test_timm_builds_it_for_any_size_and_all_layers_are_mapped(size: int | tuple[int, int]) -> None:
    model = timm.create_model("visattn_vit_c", img_size=size, num_classes=3, in_chans=1).eval()
    height, width = (size, size) if isinstance(size, int) else size
    with visattn.capture(model) as recording:
        model(torch.randn(1, 1, height, width))
    assert [record.queries.grid for record in recording] == [(height // 8, width // 8)] * 4
    assert methods.attention(recording).values.shape == (1, 4, height // 8, width // 8)
    assert methods.rollout(recording).values.sum() == pytest.approx(1, abs=1e-5)
