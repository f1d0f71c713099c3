from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import visattn
from tests import tiny
from tests.conftest import Figures, Seen
from tests.oracles import maps as oracles
from visattn import data
from visattn.core import methods
from visattn.core.methods.sinks import THRESHOLD, attention_received, find_sinks, sinks_of_scores
from visattn.core.operators import MatrixOperator, SoftmaxOperator
from visattn.core.pipeline.passes import look
from visattn.core.provenance import sink_warning
from visattn.core.records import Recording
from visattn.errors import OptionError

GOLDEN: dict[str, list[dict[str, Any]]] = json.loads((Path(__file__).parents[1] / "golden" / "sinks.json").read_text())
GRID = (9, 13)
PREFIX = ("cls", "register0")
FIRST, TOKENS = len(PREFIX), len(PREFIX) + 9 * 13


@dataclass(frozen=True)
class Planted:
    """A recording, and the tokens that are sinks."""

    recording: Recording
    sinks: frozenset[int]


def planted(seed: int, count: int) -> Planted:
    """Record two layers with decoys and `count` sinks, each receiving 22 to 30 % of every query's attention in one layer.

    The decoys are a register that receives as much as a sink, a patch that receives 9 times its share from every query, and an object's
    patch that receives nearly all attention of one query in seven.
    """
    rng = np.random.default_rng(seed)
    patches = FIRST + rng.permutation(TOKENS - FIRST)
    sinks, mild, loved, lovers = patches[:count], patches[3], patches[4], patches[5:23]
    made = Recording()
    for layer in range(2):
        generator = torch.Generator().manual_seed(2 * seed + layer)
        query, key = (torch.randn(1, 2, TOKENS, 8, generator=generator) * 0.4 for _ in range(2))
        drawn = {int(sink): rng.uniform(0.22, 0.30) for i, sink in enumerate(sinks) if i % 2 == layer or count == 1}
        drawn |= {1: 0.2, int(mild): 9 / TOKENS}
        query[..., 0], key[..., 0] = 4, 0  # every query matches the first channel
        query[..., 1], key[..., 1] = 0, 0
        background = (query[0, 0, :, 2:] @ key[0, 0, :, 2:].mT * 8**-0.5).exp().sum(-1).mean()
        for token, share in drawn.items():
            weight = share / (1 - sum(drawn.values())) * float(background)
            key[..., token, :] = 0
            key[..., token, 0] = math.log(weight) * 8**0.5 / 4
        query[..., torch.from_numpy(lovers), 1] = 6  # a few queries match the second channel
        key[..., loved, 1] = 6
        place = tiny.layout(PREFIX, GRID)
        made.records.append(tiny.record(SoftmaxOperator(query, key), place, layer=f"blocks.{layer}.attn"))
    return Planted(made, frozenset(int(sink) for sink in sinks))


def found_in(recording: Recording, image: int = 0) -> frozenset[int]:
    return frozenset(FIRST + sink.row * GRID[1] + sink.column for sink in find_sinks(recording)[image])


def test_planted_sinks_are_found_and_decoys_are_not(figures: Figures) -> None:
    cases = [planted(seed, seed % 4) for seed in range(40)]
    hits = [(found_in(case.recording), case.sinks) for case in cases]
    right = sum(len(found & true) for found, true in hits)
    precision = right / sum(len(found) for found, _ in hits)
    recall = right / sum(len(true) for _, true in hits)
    figures("sinks planted in 40 recordings: precision", precision, ">= 0.95")
    figures("sinks planted in 40 recordings: recall", recall, ">= 0.95")
    assert sum(len(true) for _, true in hits) == 60
    assert precision >= 0.95
    assert recall >= 0.95


def test_decoys_score_just_below_the_threshold() -> None:
    made = planted(4, 0).recording  # no sinks
    scores = attention_received(made)[0].amax(0)
    assert scores[1] > THRESHOLD  # the register
    assert int((scores[FIRST:] > 7).sum()) == 2  # the mild decoy and the object
    assert 15 < float(scores[FIRST:].max()) < THRESHOLD
    assert found_in(made) == frozenset()


def test_one_sharp_peak_of_the_class_token_is_not_a_sink() -> None:
    query, key = tiny.operands(TOKENS, sharpness=0.3)
    bias = torch.zeros(1, 1, TOKENS, TOKENS)
    bias[..., 0, FIRST + 60] = 20
    made = Recording(records=[tiny.record(SoftmaxOperator(query, key, bias), tiny.layout(PREFIX, GRID))])
    assert methods.attention(made, head=0).values.max() > 0.99
    assert found_in(made) == frozenset()


@pytest.mark.parametrize("uniform", [0.0, 3.0], ids=["uniform", "random"])
def test_attention_without_sinks_has_none(uniform: float) -> None:
    made = Recording(records=[tiny.record(SoftmaxOperator(*tiny.operands(TOKENS, sharpness=uniform)), tiny.layout(PREFIX, GRID))])
    assert found_in(made) == frozenset()


def test_attention_received_equals_nested_loops() -> None:
    made = tiny.recording(batch=2, layers=3, heads=3, grid=(5, 7))
    expected = [[oracles.attention_received(list(tiny.matrices(record)[i])) for record in made] for i in range(2)]
    np.testing.assert_allclose(attention_received(made), expected, rtol=2e-5)


def test_attention_received_is_one_for_uniform_attention() -> None:
    made = Recording(records=[tiny.record(MatrixOperator(torch.full((1, 2, 7, 7), 1 / 7)), tiny.layout())])
    torch.testing.assert_close(attention_received(made), torch.ones(1, 1, 7))


def test_attention_received_averages_to_one() -> None:
    scores = attention_received(planted(3, 3).recording)
    torch.testing.assert_close(scores.mean(-1), torch.ones(1, 2), atol=1e-5, rtol=0)


def test_sinks_are_sorted_and_name_their_layer() -> None:
    case = planted(7, 3)
    scores = attention_received(case.recording)[0]
    found = find_sinks(case.recording)[0]
    assert [sink.score for sink in found] == sorted((sink.score for sink in found), reverse=True)
    tokens = [FIRST + sink.row * GRID[1] + sink.column for sink in found]
    assert [sink.layer for sink in found] == [f"blocks.{int(scores[:, token].argmax())}.attn" for token in tokens]
    assert [sink.score for sink in found] == pytest.approx(scores[:, tokens].amax(0).tolist(), abs=0.006)
    assert {sink.layer for sink in found} == {"blocks.0.attn", "blocks.1.attn"}


def test_of_one_layer_are_the_sinks_of_that_layer_alone() -> None:
    case = planted(7, 3)
    scores = attention_received(case.recording)[0]
    for number in (0, 1):
        layer = f"blocks.{number}.attn"
        found = find_sinks(case.recording, layer=layer)[0]
        expected = {token for token in range(FIRST, scores.shape[1]) if float(scores[number, token]) > THRESHOLD}
        assert {FIRST + sink.row * GRID[1] + sink.column for sink in found} == expected
        assert {sink.layer for sink in found} <= {layer}
    assert find_sinks(case.recording, layer="head") == ((),)


def test_threshold_can_be_chosen() -> None:
    case = planted(4, 0)
    assert len(find_sinks(case.recording, threshold=7)[0]) == 2
    assert find_sinks(case.recording, threshold=math.inf)[0] == ()


def test_sinks_of_each_image_of_a_batch_are_found_separately() -> None:
    cases = [planted(seed, count) for seed, count in ((1, 1), (2, 0))]
    first, second = (case.recording[0].operator for case in cases)
    assert isinstance(first, SoftmaxOperator)
    assert isinstance(second, SoftmaxOperator)
    query, key = torch.cat([first.query, second.query]), torch.cat([first.key, second.key])
    joint = SoftmaxOperator(query[:, :, 0], key[:, :, 0])
    made = Recording(records=[tiny.record(joint, tiny.layout(PREFIX, GRID))])
    assert [found_in(made, image) for image in (0, 1)] == [cases[0].sinks, frozenset()]


def test_warning_names_every_sink() -> None:
    found = find_sinks(planted(3, 3).recording)[0]
    (text,) = sink_warning(found)
    assert text.startswith("3 sinks receive many times the uniform share of attention, averaged over queries: patch ")
    assert all(f"patch {sink.row},{sink.column} ({sink.score:.0f} x in {sink.layer})" in text for sink in found)


def test_warning_of_one_sink_is_in_the_singular() -> None:
    (text,) = sink_warning(find_sinks(planted(1, 1).recording)[0])
    assert text.startswith("1 sink receives many times ")


def test_no_warning_without_sinks() -> None:
    assert sink_warning(()) == ()


def test_recording_without_self_attention_is_refused() -> None:
    with pytest.raises(OptionError, match="there is no self-attention"):
        find_sinks(Recording())


@pytest.mark.parametrize("known", [True, False], ids=["known log-sum-exp", "unknown"])
@pytest.mark.parametrize("seed", range(8))
def test_sinks_among_many_tokens_have_the_scores_of_all_queries(seed: int, known: bool) -> None:
    generator, side = torch.Generator().manual_seed(seed), 24
    query, key = (torch.randn(2, 3, side * side, 8, generator=generator) for _ in range(2))
    query[..., 0] = 4  # every query matches the first channel
    key[..., 0] = 0
    sinks = torch.randperm(side * side, generator=generator)[: seed % 4]
    key[:, :, sinks, 0] = 4 + torch.rand(len(sinks), generator=generator)
    lse = (query @ key.mT * 8**-0.5).logsumexp(-1) if known else None
    made = Recording(records=[tiny.record(SoftmaxOperator(query, key, lse=lse), tiny.layout((), (side, side)))])
    received = attention_received(made)
    assert float(received.amax((0, 1))[sinks].min() if len(sinks) else THRESHOLD + 1) > THRESHOLD
    for found, every in zip(find_sinks(made), sinks_of_scores(received, list(made)), strict=True):
        assert [(sink.row, sink.column) for sink in found] == [(sink.row, sink.column) for sink in every]
        assert {sink.row * side + sink.column for sink in found} == set(sinks.tolist())
        assert [sink.score for sink in found] == pytest.approx([sink.score for sink in every], abs=0.011)


# DINOv2


@pytest.mark.full
@pytest.mark.real
@pytest.mark.parametrize("photo", list(data.PHOTOS))
def test_sinks_of_dinov2_are_those_of_a_float64_forward(photo: str, seen: Seen) -> None:
    found = find_sinks(seen(photo)[1])[0]
    expected = GOLDEN[photo]
    assert [(sink.row, sink.column, sink.layer) for sink in found] == [(s["row"], s["column"], s["layer"]) for s in expected]
    assert [sink.score for sink in found] == pytest.approx([sink["score"] for sink in expected], rel=0.01)


def largest_share(values: torch.Tensor, count: int = 3) -> float:
    """Compute the share of the sum that the largest patches hold."""
    return float(values.flatten().topk(count).values.sum() / values.sum())


def sharp() -> nn.Module:
    """Load a network with random weights whose attention is sharp enough for sinks."""
    model = visattn.load_model("vit_tiny_patch16_224", weights="none", img_size=(320, 320))
    with torch.no_grad():
        for block in cast(Any, model).blocks:
            block.attn.qkv.weight[:384] *= 12
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dinov2": lambda: visattn.load_model(data.OFFLINE_MODEL, weights=data.offline_weights()),
    "scenes_vit": lambda: visattn.load_model("scenes_vit"),
    "scenes_vit_shortcut": lambda: visattn.load_model("scenes_vit_shortcut"),
    "sharp": sharp,
}


@pytest.mark.full
@pytest.mark.real
@pytest.mark.parametrize("name", list(MODELS))
def test_sinks_of_shipped_photos_equal_a_search_over_all_queries(name: str, figures: Figures) -> None:
    model, count = MODELS[name](), 0
    for photo in data.PHOTOS:
        recording = look(model, visattn.prepare(visattn.load_image(f"photo:{photo}"), model, resize="fit"))
        (found,), (every,) = find_sinks(recording), sinks_of_scores(attention_received(recording), list(recording))
        assert [(sink.row, sink.column, sink.layer) for sink in found] == [(sink.row, sink.column, sink.layer) for sink in every]
        assert [sink.score for sink in found] == pytest.approx([sink.score for sink in every], rel=1e-4, abs=0.01)
        count += len(every)
    figures(f"sinks of {name} on the shipped photos, found by both searches", count, "")


@pytest.mark.full
@pytest.mark.real
@pytest.mark.parametrize("photo", [name for name in data.PHOTOS if GOLDEN[name]])
def test_dropping_sinks_cuts_the_brightest_patches(photo: str, seen: Seen, figures: Figures) -> None:
    recording = seen(photo)[1]
    kept, dropped = (largest_share(methods.rollout(recording, sinks=how).values) for how in ("keep", "drop"))
    figures(f"rollout of {photo}: share of the 3 brightest patches, sinks kept", kept, "")
    figures(f"rollout of {photo}: share of the 3 brightest patches, sinks dropped", dropped, "")
    figures(f"rollout of {photo}: dropping {len(GOLDEN[photo])} sinks cuts that share by", kept / dropped, ">= 3")
    assert kept / dropped >= 3
