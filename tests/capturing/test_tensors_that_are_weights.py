"""Which tensors of a forward pass count as attention weights: results of a softmax, also when they were changed since."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capturing.watched import Model, Seen, image, tokens
from visattn.core.capturing.trace.operations import edited_weights


def noted(run: Callable[[Tensor], Tensor]) -> tuple[list[str] | None, list[str] | None]:
    """Return the names of the operations that the result's weights come from, and those of its logarithms; None for neither."""
    model = Model(run)
    seen = Seen(model)
    with seen.watch.watching():
        model(image())
    tape = seen.tape()
    (slot,) = tape.output

    def names(numbers: frozenset[int] | None) -> list[str] | None:
        return None if numbers is None else [tape.entries[number].operation.name for number in sorted(numbers)]

    return names(tape.weights.get(slot)), names(tape.logarithms.get(slot))


def scores(x: Tensor) -> Tensor:
    """Return the scores of two heads, `(2, 2, 6, 6)`."""
    q = torch.cat([tokens(x), tokens(x).cos()], 1)
    return q @ q.mT


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (lambda x: scores(x).softmax(-1), "softmax"),
        (lambda x: F.softmin(scores(x), -1), "softmin"),
        (lambda x: F.gumbel_softmax(scores(x), dim=-1), "gumbel_softmax"),
        (lambda x: scores(x).flatten(0, 2).softmax(-1), "softmax"),
    ],
)
def test_result_of_a_softmax_is_weights(run: Callable[[Tensor], Tensor], name: str) -> None:
    assert noted(run) == ([name], None)


def test_softmax_of_a_vector_is_no_weights() -> None:
    assert noted(lambda x: scores(x).flatten().softmax(-1)) == (None, None)
    assert noted(lambda x: scores(x).flatten().log_softmax(-1)) == (None, None)


def test_exponential_of_a_log_softmax_is_weights() -> None:
    assert noted(lambda x: scores(x).log_softmax(-1)) == (None, ["log_softmax"])
    assert noted(lambda x: scores(x).log_softmax(-1).transpose(0, 1)) == (None, ["log_softmax"])
    assert noted(lambda x: scores(x).log_softmax(-1).exp()) == (["log_softmax"], None)
    assert noted(lambda x: (scores(x).log_softmax(-1) + 1).exp()[:, :1]) == (["log_softmax"], None)
    assert noted(lambda x: scores(x).log_softmax(-1).sin()) == (None, None)
    assert noted(lambda x: scores(x).exp()) == (None, None)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: F.dropout(w, 0.0),
        lambda w: w.to(torch.float64),
        lambda w: w.masked_fill(w < 0, 0),
        lambda w: w[:, :1, 2:],
        lambda w: w.flatten(0, 1).unsqueeze(1),
        lambda w: w * 2.0,
        lambda w: 1 / 3 * w.clone(),
        lambda w: w * w,  # both are weights
        lambda w: w - 0.1,
    ],
)
def test_weights_that_were_changed_are_weights(change: Callable[[Tensor], Tensor]) -> None:
    assert noted(lambda x: change(scores(x).softmax(-1))) == (["softmax"], None)


@pytest.mark.parametrize("change", [torch.sin, torch.exp, lambda w: w.sum(-1, keepdim=True), lambda w: w @ w])
def test_other_results_of_weights_are_none(change: Callable[[Tensor], Tensor]) -> None:
    assert noted(lambda x: change(scores(x).softmax(-1)))[0] is None


def test_weights_of_several_softmaxes_come_from_all_of_them() -> None:
    assert noted(lambda x: scores(x).softmax(-1) - F.softmin(scores(x), -1)) == (["softmax", "softmin"], None)
    both = lambda x: (scores(x).log_softmax(-1) + scores(x).sin().log_softmax(-1)).exp()  # noqa: E731
    assert noted(both) == (["log_softmax", "log_softmax"], None)


def test_weights_times_data_of_the_image_are_a_gate() -> None:
    assert noted(lambda x: scores(x).softmax(-1) * scores(x)) == (None, None)
    assert noted(lambda x: scores(x).softmax(-1) * scores(x).amax(-1, keepdim=True)) == (["softmax"], None)
    assert noted(lambda x: scores(x).softmax(-1) + scores(x)) == (["softmax"], None)  # not scaled


@pytest.mark.parametrize(("equation", "mixes"), [("bhqk,hg->bgqk", True), ("bhqk,hg->bqgk", False), ("bhqk,hg->bqk", True)])
def test_heads_may_be_mixed_by_parameters_of_the_model(equation: str, mixes: bool) -> None:
    model = Model(lambda x: torch.einsum(equation, scores(x).softmax(-1), model.get_parameter("attn.mix")))
    model.attn.mix = nn.Parameter(torch.ones(2, 2))
    seen = Seen(model)
    with seen.watch.watching():
        model(image())
    assert (seen.tape().output[0] in seen.tape().weights) == mixes


def test_heads_of_windows_may_be_mixed_too() -> None:
    model = Model(lambda x: torch.einsum("wbhqk,hg->wbgqk", scores(x).softmax(-1)[None], model.get_parameter("attn.mix")))
    model.attn.mix = nn.Parameter(torch.ones(2, 2))
    seen = Seen(model)
    with seen.watch.watching():
        model(image())
    assert seen.tape().output[0] in seen.tape().weights


def test_factors_from_the_image_or_of_unknown_origin_mix_no_heads() -> None:
    unknown = torch.ones(2, 2)
    for factors in (lambda _: unknown, lambda x: scores(x)[0, :, 0, :2]):
        run = lambda x, factors=factors: torch.einsum("bhqk,hg->bgqk", scores(x).softmax(-1), factors(x))  # noqa: E731
        assert noted(run) == (None, None)


def test_edited_weights_come_from_the_edit_and_the_softmax() -> None:
    def run(x: Tensor) -> Tensor:
        weights = scores(x).softmax(-1)
        return edited_weights(weights * 2, weights)

    assert noted(run) == (["softmax", "edited_weights"], None)
    assert noted(lambda x: edited_weights(scores(x), x)) == (["edited_weights"], None)
