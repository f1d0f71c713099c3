"""Relevance through several token sets, compared with the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests import tiny
from tests.methods.truths import BATCH, EXACT, PRECISE, on_grid, query_weights
from tests.oracles import methods as oracles
from tests.oracles.maps import Array, array
from tests.oracles.methods import AttentionCall
from visattn.core import methods
from visattn.core.geometry import Box
from visattn.core.methods.from_attention import relevance_of_sets
from visattn.core.operators import MatrixGradient, SoftmaxOperator
from visattn.core.records import AttentionRecord, Recording, TokenLayout


def tokens_of(space: str, count: int) -> TokenLayout:
    """Build a set of tokens without positions on the image."""
    name = "query" if space == "objects" else "word"
    return TokenLayout(space, tuple(f"{name}{i}" for i in range(count)), (), Box(0, 0, 1, 1))


SETS = {"image": tiny.layout(space="image"), "objects": tokens_of("objects", 3), "text": tokens_of("text", 4)}


class Composed(NamedTuple):
    """A recording, and the gradient of each of its records."""

    made: Recording
    gradients: list[Array]


def composed(calls: list[str], *, silent: bool = False) -> Composed:
    """Build random attention and gradients for calls such as `objects > image`.

    With `silent`, the first row of every layer has no evidence for the target.
    """
    made, gradients = Recording(input_size=tiny.INPUT), []
    for i, call in enumerate(calls):
        queries, keys = (SETS[name] for name in call.split(" > "))
        q, k = (torch.randn(BATCH, tiny.HEADS, len(place), 8) for place in (queries, keys))
        gradient = torch.randn(BATCH, tiny.HEADS, len(queries), len(keys), dtype=torch.float64)
        if silent:
            gradient[:, :, 0] = -gradient[:, :, 0].abs()
        operator = SoftmaxOperator(q, k).with_gradient(MatrixGradient(gradient))
        kind: Any = "self" if queries is keys else "cross"
        made.records.append(AttentionRecord(f"layers.{i}", 0, 0, kind, operator, queries, keys))
        gradients.append(array(gradient))
    return Composed(made, gradients)


def relevances(given: Composed, steps: list[list[int]], image: int) -> dict[tuple[str, str], Array]:
    """Compute the matrices of one image; a step names the records that read the same state."""
    made, gradients = given
    attended = [
        [
            AttentionCall(made[i].queries.space, made[i].keys.space, array(tiny.matrices(made[i]))[image], gradients[i][image])
            for i in step
        ]
        for step in steps
    ]
    return oracles.relevances(attended, {layout.space: len(layout) for r in made for layout in (r.queries, r.keys)})


IMAGE, OBJECTS, TEXT = "image > image", "objects > objects", "text > text"


LOOK, READ, ANSWER = "objects > image", "text > image", "image > text"


Steps = list[list[int]]


def one_by_one(count: int, start: int = 0) -> Steps:
    return [[i] for i in range(start, count)]


def assert_relevance(given: Composed, steps: Steps, **options: Any) -> None:
    """Compare relevance of single tokens, of weighted tokens, and of one vector per image of the batch."""
    made = given.made
    last = next(record.queries for record in reversed(made.records) if record.keys.grid and not record.queries.grid)
    tokens = len(last)
    whole = [relevances(given, steps, b)[last.space, "image"] for b in range(BATCH)]
    for query in (F.one_hot(torch.tensor(1), tokens).float(), torch.rand(tokens), torch.rand(BATCH, tokens)):
        weights = query_weights(query, last, "")
        expected = [oracles.product(weights[b : b + 1], whole[b])[0] for b in range(BATCH)]
        found = methods.relevance(made, query=query, **options, **PRECISE).values
        assert float(found.abs().max()) > 1e-2
        np.testing.assert_allclose(found, on_grid(expected, SETS["image"]), **EXACT)


@pytest.mark.parametrize("silent", [False, True], ids=["", "with rows of zero"])
@pytest.mark.parametrize(
    "calls",
    [
        [IMAGE, IMAGE, OBJECTS, LOOK, OBJECTS, LOOK],
        [IMAGE, LOOK, LOOK, OBJECTS, LOOK],
        [LOOK, OBJECTS],
        [OBJECTS, LOOK, IMAGE, OBJECTS, LOOK],
    ],
    ids=["encoder, then decoder", "decoder with cross-attention first", "no encoder", "image attends between"],
)
def test_relevance_of_objects_equals_its_oracle(calls: list[str], silent: bool) -> None:
    assert_relevance(composed(calls, silent=silent), one_by_one(len(calls)))


@pytest.mark.parametrize("start", [1, 2, 3, 5])
def test_relevance_of_objects_from_a_layer(start: int) -> None:
    calls = [IMAGE, IMAGE, OBJECTS, LOOK, OBJECTS, LOOK]
    assert_relevance(composed(calls), one_by_one(6, start), start_layer=start)


def test_rows_are_normalized_by_their_own_sum_and_rows_without_relevance_stay() -> None:
    rest = torch.tensor([[0.0, 0.0, 0.0], [0.25, 0.0, 0.75], [2.0, 1.0, 1.0]])
    expected = torch.eye(3) + torch.tensor([[0.0, 0.0, 0.0], [0.25, 0.0, 0.75], [0.5, 0.25, 0.25]])
    torch.testing.assert_close(relevance_of_sets._normalized(torch.eye(3) + rest), expected)


def test_object_is_chosen_by_its_number() -> None:
    made = composed([IMAGE, OBJECTS, LOOK]).made
    named = methods.relevance(made, query="query:1", **PRECISE).values
    assert torch.equal(named, methods.relevance(made, query=torch.tensor([0.0, 1.0, 0.0]), **PRECISE).values)


@pytest.mark.parametrize("silent", [False, True], ids=["", "with rows of zero"])
@pytest.mark.parametrize(
    ("calls", "steps"),
    [
        ([TEXT, IMAGE, READ, ANSWER, TEXT, IMAGE, READ, ANSWER, READ], [[0], [1], [2, 3], [4], [5], [6, 7], [8]]),
        ([TEXT, IMAGE, ANSWER, READ, TEXT, IMAGE, READ], [[0], [1], [2, 3], [4], [5], [6]]),
        ([READ, ANSWER, READ, ANSWER, READ], [[0, 1], [2, 3], [4]]),
        ([READ, TEXT, ANSWER, IMAGE, READ], [[0], [1], [2], [3], [4]]),
    ],
    ids=["text first", "image first", "nothing between", "not side by side"],
)
def test_relevance_of_text_equals_its_oracle(calls: list[str], steps: Steps, silent: bool) -> None:
    assert_relevance(composed(calls, silent=silent), steps)


@pytest.mark.parametrize(
    ("follows", "steps"),
    [(0, [[0], [1, 2], [3], [4]]), (1, [[0], [1], [2], [3], [4]])],
    ids=["reads the old text", "reads the updated text"],
)
def test_steps_follow_the_recorded_order_of_self_and_cross_attention(follows: int, steps: Steps) -> None:
    made, gradients = composed([TEXT, READ, ANSWER, TEXT, READ])
    before = ["", "layers.0", f"layers.{follows}", "layers.2", "layers.3"]
    records = [replace(record, follows=(layer, 0)) for record, layer in zip(made, before, strict=True)]
    assert_relevance(Composed(replace(made, records=records), gradients), steps)


def test_more_images_than_heads_are_each_explained_as_alone() -> None:
    images, heads = 3, 2
    place = SETS["image"]
    q, k = (torch.randn(images, heads, len(place), 8) for _ in range(2))
    gradient = torch.randn(images, heads, len(place), len(place), dtype=torch.float64)

    def shown(chosen: slice) -> torch.Tensor:
        operator = SoftmaxOperator(q[chosen], k[chosen]).with_gradient(MatrixGradient(gradient[chosen]))
        made = Recording(input_size=tiny.INPUT)
        made.records.append(AttentionRecord("layers.0", 0, 0, "self", operator, place, place))
        return methods.relevance(made, query="mean", dtype=torch.float64).values

    together = shown(slice(None))
    assert together.shape[0] == images
    for number in range(images):
        torch.testing.assert_close(together[number : number + 1], shown(slice(number, number + 1)))
