from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import tiny
from tests.oracles import maps as oracles
from visattn.core import methods
from visattn.core.operators import MatrixOperator, SoftmaxOperator
from visattn.core.records import Recording
from visattn.errors import OptionError

PREFIX = ("cls", "register0")
BATCH, HEADS, GRID = 3, 2, (5, 7)


@pytest.fixture(scope="module")
def recorded() -> Recording:
    """Record two layers with tokens, queries, keys and values of three images."""
    return tiny.recording(batch=BATCH, heads=HEADS, prefix=PREFIX, grid=GRID)


def vector(recorded: Recording, of: str, layer: int, image: int, token: int) -> oracles.Array:
    """Return one token's vector, with heads concatenated."""
    if of == "tokens":
        return oracles.array(recorded.features[layer].value[image, token])
    record = recorded[layer]
    assert isinstance(record.operator, SoftmaxOperator)
    value = record.value
    assert value is not None
    joined: dict[str, Tensor] = {"queries": record.operator.query[:, :, 0], "keys": record.operator.key[:, :, 0], "values": value}
    return np.concatenate([oracles.array(joined[of][image, head, token]) for head in range(HEADS)])


def similarities(recorded: Recording, of: str, layer: int, image: int, token: int) -> oracles.Array:
    """Compute the cosine of one token with each patch of each image."""
    chosen = vector(recorded, of, layer, image, token)
    out = np.zeros((BATCH, *GRID))
    for b, row, column in np.ndindex(*out.shape):
        out[b, row, column] = oracles.cosine(chosen, vector(recorded, of, layer, b, len(PREFIX) + row * GRID[1] + column))
    return out


@pytest.mark.parametrize("of", ["tokens", "keys", "queries", "values"])
@pytest.mark.parametrize("image", [0, 2], ids=["first image", "last image"])
@pytest.mark.parametrize(("query", "token"), [("patch:1,3", 12), ("cls", 0), ("register:0", 1), ("auto", 0)], ids=str)
def test_map_is_the_cosine_within_and_across_images(of: Any, image: int, query: str, token: int, recorded: Recording) -> None:
    result = methods.similarity(recorded, query=query, of=of, image=image)
    assert result.axes == ("batch",)
    np.testing.assert_allclose(result.values, similarities(recorded, of, -1, image, token), atol=1e-6)


@pytest.mark.parametrize("of", ["tokens", "keys", "queries", "values"])
def test_patch_has_similarity_one_only_with_itself(of: Any, recorded: Recording) -> None:
    values = methods.similarity(recorded, query="patch:2,4", of=of, image=1).values
    assert float(values[1, 2, 4]) == pytest.approx(1, abs=1e-6)
    assert float(values.flatten().sort().values[-2]) < 0.99


@pytest.mark.parametrize(
    ("of", "layer", "number"),
    [("keys", 0, 0), ("keys", "blocks.0.attn", 0), ("tokens", 0, 0), ("tokens", "blocks.1", 1)],
    ids=str,
)
def test_layer_is_chosen(of: Any, layer: int | str, number: int, recorded: Recording) -> None:
    result = methods.similarity(recorded, query="patch:0,2", of=of, layer=layer)
    np.testing.assert_allclose(result.values, similarities(recorded, of, number, 0, 4), atol=1e-6)


def test_similarity_does_not_depend_on_vector_length(recorded: Recording) -> None:
    feature = recorded.features[-1]
    longer = replace(feature, value=feature.value * torch.rand(BATCH, feature.value.shape[1], 1).add(0.5))
    scaled = replace(recorded, features=[longer])
    before, after = (methods.similarity(made, query="patch:0,0").values for made in (recorded, scaled))
    torch.testing.assert_close(after, before)


def test_of_and_image_are_recorded_as_parameters(recorded: Recording) -> None:
    parameters = methods.similarity(recorded, query="patch:0,0", of="keys", image=2).provenance.parameters
    assert parameters == {"query": "patch:0,0", "of": "keys", "layer": "blocks.1.attn", "image": 2}


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"of": "heads"}, "unknown kind of vector 'heads'"),
        ({"image": 3}, r"image must lie in \[0, 2\], got 3"),
        ({"image": -1}, r"image must lie in \[0, 2\], got -1"),
        ({"query": "patch:9,9"}, "patch 9,9 lies outside the grid"),
        ({"query": "distillation"}, "no token 'distillation'"),
        ({"layer": 5}, r"no token features of layer 5 were recorded \(recorded: blocks.0, blocks.1\).*features='all'"),
        ({"layer": "blocks.7"}, "no token features of layer blocks.7"),
        ({"layer": 5, "of": "keys"}, r"layer must lie in \[-2, 1\], got 5"),
    ],
    ids=["unknown vectors", "image", "negative image", "patch", "token", "layer", "name", "attention layer"],
)
def test_similarity_refuses(choice: dict[str, Any], message: str, recorded: Recording) -> None:
    with pytest.raises(OptionError, match=message):
        methods.similarity(recorded, **{"query": "patch:0,0"} | choice)


def test_values_that_were_not_recorded_are_refused(recorded: Recording) -> None:
    without = replace(recorded, records=[replace(record, value=None) for record in recorded])
    with pytest.raises(OptionError, match=r"values were not recorded. Use capture\(model, values=True\)"):
        methods.similarity(without, query="patch:0,0", of="values")


def test_keys_of_explicit_weights_are_refused() -> None:
    made = Recording(records=[tiny.record(MatrixOperator(torch.rand(1, 2, 7, 7)), tiny.layout())])
    with pytest.raises(OptionError, match=r"blocks.0.attn has no keys in token order. Use of='tokens'"):
        methods.similarity(made, query="patch:0,0", of="keys")


def test_recording_without_features_is_refused(recorded: Recording) -> None:
    with pytest.raises(OptionError, match=r"recorded: none"):
        methods.similarity(replace(recorded, features=[]), query="patch:0,0")


def test_automatic_query_without_class_token_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown query 'auto'"):
        methods.similarity(tiny.recording(prefix=()), query="auto")
