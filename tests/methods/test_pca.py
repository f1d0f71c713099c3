from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests import tiny
from tests.conftest import Figures, Seen
from tests.oracles import maps as oracles
from visattn.core import methods
from visattn.core.records import Recording
from visattn.errors import OptionError

PREFIX = ("cls", "register0")
GRID = (5, 7)


def recorded(batch: int, seed: int = 0) -> Recording:
    """Record features whose directions differ in variance, after two outlying prefix tokens."""
    made = tiny.recording(batch=batch, prefix=PREFIX, grid=GRID, seed=seed)
    stretched = [replace(f, value=f.value * torch.linspace(3, 0.2, 16)) for f in made.features]
    for feature in stretched:
        feature.value[:, : len(PREFIX)] += 100
    return replace(made, features=stretched)


def patch_rows(made: Recording, layer: int = -1) -> oracles.Array:
    """Stack the patches of all images."""
    return np.concatenate([oracles.array(image[len(PREFIX) :]) for image in made.features[layer].value])


@pytest.mark.parametrize("batch", [1, 3], ids=["one image", "three images jointly"])
@pytest.mark.parametrize("layer", [0, -1], ids=["first layer", "last layer"])
def test_scores_equal_singular_vectors_up_to_sign(batch: int, layer: int) -> None:
    made = recorded(batch)
    values = methods.pca(made, layer=layer, components=4).values
    expected, _ = oracles.principal_scores(patch_rows(made, layer), 4)
    scores = oracles.array(values).transpose(0, 2, 3, 1).reshape(-1, 4)
    np.testing.assert_allclose(np.abs(scores), np.abs(expected), atol=1e-4)
    np.testing.assert_allclose(scores * np.sign((scores * expected).sum(0)), expected, atol=1e-4)


def test_joint_fit_is_not_a_fit_of_each_image() -> None:
    together, alone = methods.pca(recorded(3)).values[:1], methods.pca(recorded(1)).values
    assert float((together.abs() - alone.abs()).abs().max()) > 0.1


@pytest.mark.parametrize("seed", range(5))
def test_largest_loading_is_positive(seed: int) -> None:
    made = recorded(2, seed)
    scores = oracles.array(methods.pca(made).values).transpose(0, 2, 3, 1).reshape(-1, 3)
    rows = patch_rows(made)
    loadings = (rows - rows.mean(0)).T @ scores
    assert (loadings[np.abs(loadings).argmax(0), range(3)] > 0).all()


def test_shares_of_variance_are_stated() -> None:
    made = recorded(2)
    _, shares = oracles.principal_scores(patch_rows(made), 3)
    expected = "components explain " + ", ".join(f"{share:.0%}" for share in shares) + " of the variance of the patch features"
    assert methods.pca(made).provenance.notes == (expected,)


def test_map_is_labeled_and_centered() -> None:
    result = methods.pca(recorded(2), components=2)
    assert result.axes == ("batch", "component")
    assert result.labels == {"component": ("0", "1")}
    assert tuple(result.values.shape) == (2, 2, *GRID)
    np.testing.assert_allclose(result.values.mean((0, 2, 3)), 0, atol=1e-5)


def test_constant_features_give_zeros() -> None:
    made = recorded(1)
    flat = replace(made.features[-1], value=torch.ones_like(made.features[-1].value))
    assert methods.pca(replace(made, features=[flat])).values.abs().max() == 0


@pytest.mark.parametrize("components", [0, 17, -1])
def test_number_of_components_is_checked(components: int) -> None:
    with pytest.raises(OptionError, match=rf"components must lie in \[1, 16\], got {components}"):
        methods.pca(recorded(1), components=components)


def test_layer_without_features_is_refused() -> None:
    with pytest.raises(OptionError, match="no token features of layer 7"):
        methods.pca(recorded(1), layer=7)


@pytest.mark.real
def test_scores_of_dinov2_equal_singular_vectors_up_to_sign(seen: Seen, figures: Figures) -> None:
    made = seen("chelsea")[1]
    scores = oracles.array(methods.pca(made).values[0]).reshape(3, -1).T
    expected, _ = oracles.principal_scores(oracles.array(made.features[-1].value[0, 1:]), 3)
    worst = float(np.abs(np.abs(scores) - np.abs(expected)).max() / np.abs(expected).max())
    figures("pca of DINOv2 on chelsea against SVD, error over largest score", worst, "<= 1e-5")
    assert worst <= 1e-5
