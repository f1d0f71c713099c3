"""Tests of the judge of heads: its truth, the gradient of the score, and its verdicts.

`python -m tests.capturing.heads` prints a table of all heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import visattn
from tests.capturing.heads import cases, judge, timm_and_transformers
from tests.capturing.heads.composed import HEADS
from tests.capturing.heads.model import BEFORE, PATCHES, Head, Model, images, masks
from tests.capturing.heads.truth import Truth, truths
from tests.samples import sampled
from visattn.core.records import Recording
from visattn.errors import OptionError


def test_there_are_enough_heads() -> None:
    assert len(HEADS) >= 120
    assert len(timm_and_transformers.TIMM) >= 7
    assert len(timm_and_transformers.HF) >= 8


# the truth


@pytest.mark.parametrize("before", list(BEFORE))
def test_layers_before_a_head_act_on_each_token_alone(before: str) -> None:
    model = Model(Head(lambda k, t: t[:, 0], before=before))
    tokens = torch.randn(1, 1 + PATCHES, 16, dtype=torch.float64)
    changed = tokens.clone()
    changed[:, 5] += 1
    moved = (model.before(tokens) - model.before(changed)).abs().sum((0, 2)) > 0
    assert moved.nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        (lambda k, t: t[:, 0], [1.0, 0.0, 0.0]),
        (lambda k, t: t[:, 1:].mean(1), [0.0, 1 / PATCHES, 1 / PATCHES]),
        (lambda k, t: t[:, 0] - 3 * t[:, 1:].mean(1), [1 / 4, 3 / 4 / PATCHES, 3 / 4 / PATCHES]),
        (lambda k, t: 2 * t[:, 1] + 3 * t[:, 2], [0.0, 2 / 5, 3 / 5]),
        (lambda k, t: t[:, 0] + t[:, 1].detach(), [1.0, 0.0, 0.0]),
    ],
)
def test_shares_are_the_weights_of_a_linear_head(pool: Any, expected: list[float]) -> None:
    case = cases.case(Head(pool))
    for truth in truths(case, case.inputs[0]).values():
        for image in truth.tokens:
            assert image[:3].tolist() == pytest.approx(expected, abs=1e-12)
            assert float(image.sum()) == pytest.approx(1)


def test_shares_at_the_attention_equal_those_at_the_head_if_no_layer_lies_between() -> None:
    case = cases.case(HEADS["max"])
    truth = truths(case, case.inputs[0])[""]
    torch.testing.assert_close(truth.tokens, truth.stream)


def test_tokens_that_bypass_a_pooling_attention_are_noticed() -> None:
    for name, whole in [("attention of a latent", True), ("attention of a latent, and cls", False)]:
        case = cases.case(HEADS[name])
        assert all((truth.latents is not None) == whole for truth in truths(case, case.inputs[0]).values())


# what the library says about the heads


def check(found: judge.Verdict) -> None:
    assert found.verdict not in ("wrong", "failed"), found.wrong
    assert not found.read.startswith("wrong"), found.read


@pytest.mark.parametrize(
    "name",
    sampled(
        [pytest.param(name, marks=pytest.mark.full) if name.startswith("composed") else name for name in HEADS],
        4,
    ),
)
def test_query_of_a_head_is_the_one_that_it_reads(name: str) -> None:
    check(cases.judge(name))


@pytest.mark.parametrize("name", timm_and_transformers.MODELS)
def test_query_of_a_classifier_is_the_one_that_it_reads(name: str) -> None:
    found = timm_and_transformers.judge(name)
    check(found)
    assert found.verdict != "refused although provable"
    refused = [setting for setting, claim in found.claims.items() if "refused" in claim]
    assert not any(setting.startswith("relevance") for setting in refused)  # with the gradient of a score, none is refused


# the judge can fail


def shares_of(head: Head) -> Tensor:
    case = cases.case(head)
    return truths(case, case.inputs[0])[""].tokens


MEAN, CLS = shares_of(HEADS["mean"]), shares_of(HEADS["cls"])


@pytest.mark.parametrize(
    ("claim", "shares", "error"),
    [
        ("mean", MEAN, ""),
        ("cls", CLS, ""),
        ("cls+mean", (MEAN + CLS) / 2, ""),
        ("cls+mean", 0.3 * MEAN + 0.7 * CLS, ""),
        ("mean", 0.995 * MEAN + 0.005 * CLS, ""),
        ("cls", MEAN, "the others have a share of 100.0%"),
        ("mean", CLS, "the others have a share of 100.0%"),
        ("all", MEAN, "a token has 1.01 times, another 0.00 times the mean share"),
        ("cls", 0.02 * MEAN + 0.98 * CLS, "the others have a share of 2.0%"),
        ("cls+mean", 0.1 * MEAN + 0.9 * CLS, "the share of a part is 9 times that of another"),
        ("cls+mean", MEAN, "the share of a part is"),
        ("mean", shares_of(HEADS["max"]), "times the mean share"),
        ("mean", shares_of(HEADS["half, slice"]), "a token has 2.00 times"),
        ("register7", CLS, "no such token"),
        ("mean", 0 * MEAN, "the score depends on no token"),
    ],
)
def test_claims_are_right_within_the_stated_bounds(claim: str, shares: Tensor, error: str) -> None:
    found = judge.judged(claim, ("cls",), [shares])
    assert found == error or (error and error in found)


CHOICES = "refused: the query is not known. Choose the query: cls, mean, patch:ROW,COL."


@pytest.mark.parametrize(
    ("name", "claim", "expected"),
    [
        ("cls", "cls", "right"),
        ("cls", "mean", "wrong"),
        ("mean", "cls+mean", "wrong"),
        ("max", "mean", "wrong"),
        ("attention of a latent", "mean", "wrong"),
        ("attention of a latent, and cls", "pool", "wrong"),
        ("cls", CHOICES, "refused although provable"),
        ("max", CHOICES, "refused"),
        ("max", "refused: the query is not known.", "failed"),
        ("max", "refused: the query is not known.\nChoose cls.", "failed"),
        ("max", "refused: the query is not known. Choose the query: register:3.", "failed"),
    ],
)
def test_verdicts_follow_the_claims(name: str, claim: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def claimed(plain: Recording, graded: Recording, scores: Tensor) -> dict[str, tuple[str, str, Recording]]:
        return {"reads": ("", claim, plain)}

    monkeypatch.setattr(judge, "settings", claimed)
    assert cases.judge(name).verdict == expected


def test_a_map_of_another_query_than_the_stated_one_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = judge.attention_map
    monkeypatch.setattr(
        judge, "attention_map", lambda recording, query: attention(recording, "mean" if isinstance(query, str) else query)
    )
    found = cases.judge("cls")
    assert found.verdict == "wrong"
    assert found.wrong[0].endswith("it states cls, but its map is another one")


def test_an_error_that_is_no_refusal_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("broken")

    monkeypatch.setattr(visattn.methods, "rollout", broken)
    assert cases.judge("cls").verdict == "failed"


def scored(name: str, run: int = 0, images_of_run: Sequence[int] = (0, 1)) -> tuple[Recording, Truth]:
    """Return the recording of a head with the gradients of its first score, and the truth."""
    case = cases.case(HEADS[name])
    inputs = tuple(tensor[list(images_of_run)] for tensor in case.inputs[run])
    truth = truths(case, inputs)["0"]
    with visattn.capture(case.model, gradients=True) as recording:
        output = case.model(*inputs)
    return recording.gradients(output[:, 0].sum()), truth


@pytest.mark.parametrize(("name", "query", "right"), [("mean", "mean", True), ("max", "mean", False), ("cls", "mean", False)])
def test_map_of_a_query_is_compared_with_that_of_the_measured_shares(name: str, query: str, right: bool) -> None:
    assert (judge.read_error(*scored(name), query=query) == "") == right


# heads that read other tokens of each photo: no fixed query is right, `read` is


def photos(name: str) -> list[tuple[Recording, Truth]]:
    return [scored(name, images_of_run=[image]) for image in range(2)]


def inputs(name: str) -> list[tuple[Recording, Truth]]:
    return [scored(name, run) for run in range(2)]


DIFFERENT: dict[str, tuple[Callable[[str], list[tuple[Recording, Truth]]], str]] = {
    "two photos, max": (photos, "max"),
    "two photos, avgmax": (photos, "avgmax"),
    "two photos, mean of the largest values": (photos, "topk of channels, mean"),
    "two masks, product": (inputs, "mask of an input, product"),
    "two masks, nanmean": (inputs, "mask of an input, nanmean"),
    "cls or mean, by an input": (inputs, "branch on an input"),
}


@pytest.mark.parametrize("kind", list(DIFFERENT))
def test_photos_and_masks_with_different_right_queries(kind: str) -> None:
    make, name = DIFFERENT[kind]
    (_, first), (_, second) = make(name)
    assert float((first.tokens - second.tokens).abs().sum(1).min()) > 0.4
    for claim in judge.candidates(("cls",)):
        assert judge.judged(claim, ("cls",), [first.tokens, second.tokens]), claim


@pytest.mark.parametrize("kind", list(DIFFERENT))
def test_read_is_the_query_of_each_photo_and_mask(kind: str) -> None:
    """Judge `query="read"`: the measured shares as weights."""
    make, name = DIFFERENT[kind]
    (one, first), (other, second) = make(name)
    assert judge.read_error(one, first) == ""
    assert judge.read_error(other, second) == ""
    assert judge.read_error(one, second), "the maps of both queries are equal, so this test shows nothing"


def test_each_image_of_a_batch_has_a_read_query_of_its_own() -> None:
    recording, truth = scored("max")
    assert judge.read_error(recording, truth) == ""
    swapped = truth._replace(tokens=truth.tokens.flip(0), stream=truth.stream.flip(0))
    assert judge.read_error(recording, swapped)


def test_read_without_a_gradient_is_refused_or_right() -> None:
    model, x = Model(HEADS["max"]), images()
    with torch.no_grad(), visattn.capture(model) as recording:
        model(x)
    case = cases.case(HEADS["max"])
    try:
        assert judge.read_error(recording, truths(case, (x,))[""]) == ""
    except OptionError as error:
        assert "gradient" in str(error)  # noqa: PT017 - either is right


def test_masks_are_opposite() -> None:
    first, second = masks(2)
    assert bool((first + second == 1).all())
