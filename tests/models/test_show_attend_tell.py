"""Captioner against loops over images, words and locations; padding after a caption's end; doubly stochastic term."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.models.captions_by_loops import ZERO, Word, cost, told_by_loops, unevenness
from visattn.errors import OptionError, ShapeError
from visattn.models.show_attend_tell import (
    ATTENTIONS,
    END,
    FIRSTS,
    Attention,
    DecoderOutput,
    First,
    Objective,
    ShowAttendTell,
    costs,
    loss,
)
from visattn.nn import doubly_stochastic

CHANNELS, WORDS, GRID = 5, 6, (2, 3)
CAPTIONS = [[3, 0], [2, 5, 4, 0], [4, 4, 0]]
LENGTHS = torch.tensor([len(caption) for caption in CAPTIONS])
PLACES = torch.tensor([[5, 0, 0, 0], [3, 3, 0, 1], [2, 5, 4, 0]])
ALONE = Objective(regularizer=0.0, reward=0.0, entropy=0.0)


def captioner(
    attention: Attention = "soft", grid: tuple[int, int] | None = None, dropout: float = 0.0, first: First = "mean"
) -> ShowAttendTell:
    """Build a captioner in float64 and training mode, with no parameter at its initial value."""
    random = torch.Generator().manual_seed(0)
    model = ShowAttendTell(
        nn.Identity(),
        CHANNELS,
        WORDS,
        attention=attention,
        embed_dim=4,
        hidden_dim=3,
        attention_dim=2,
        dropout=dropout,
        grid=grid,
        first=first,
        radius=1,
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=torch.float64))
        model.embed.weight[model.start_token] = 0
    return model.train()


def pictures(count: int = len(CAPTIONS)) -> Tensor:
    return torch.randn(count, CHANNELS, *GRID, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def padded(captions: Sequence[Sequence[int]] = CAPTIONS, behind: int = END, total: int = 4) -> Tensor:
    return torch.tensor([[*caption, *[behind] * (total - len(caption))] for caption in captions])


def tell(model: ShowAttendTell, images: Tensor | None = None, captions: Tensor | None = None) -> DecoderOutput:
    """Decode all captions; hard attention takes a given location for each word."""
    return model(  # type: ignore[no-any-return]
        pictures() if images is None else images, padded() if captions is None else captions, LENGTHS, locations=PLACES
    )


def by_loops(model: ShowAttendTell, images: Tensor) -> tuple[dict[str, Tensor], list[list[Word]]]:
    """Copy the model's parameters, and decode with loops."""
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    stories = zip(images, CAPTIONS, PLACES.tolist(), strict=True)
    return weights, [told_by_loops(weights, *story[:2], model.attention, story[2]) for story in stories]


def gradients(model: ShowAttendTell, value: Tensor, *others: Tensor) -> dict[str, Tensor]:
    """Return the gradient of every parameter, 0 where none flows, and of other tensors by index."""
    wanted = dict(model.named_parameters()) | {str(number): other for number, other in enumerate(others)}
    found = torch.autograd.grad(value, list(wanted.values()), retain_graph=True, allow_unused=True, materialize_grads=True)
    return dict(zip(wanted, found, strict=True))


def close(found: dict[str, Tensor], expected: dict[str, Tensor], within: float) -> None:
    assert set(found) == set(expected)
    assert {name: float((found[name] - expected[name]).abs().max()) for name in found} == pytest.approx(
        dict.fromkeys(found, 0.0), abs=within
    )


@pytest.mark.parametrize("first", FIRSTS)
@pytest.mark.parametrize("grid", [None, GRID], ids=["no coordinates", "coordinates"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_step_equals_loops(attention: Attention, grid: tuple[int, int] | None, first: First) -> None:
    model = captioner(attention, grid, first=first)
    told = tell(model)
    assert told.grid == GRID
    assert told.steps.tolist() == [[True, True, False, False], [True] * 4, [True, True, True, False]]
    for b, words in enumerate(by_loops(model, pictures())[1]):
        for t, word in enumerate(words):
            for name in ("logits", "alpha", "beta", "taken", "log_probability", "entropy"):
                found, expected = getattr(told, name)[b, t].tolist(), getattr(word, name)
                expected = [one.item() for one in expected] if name in ("alpha", "taken") else expected.tolist()
                assert found == pytest.approx(expected, abs=1e-10), (b, t, name)
        for part in told[:-2]:
            assert not torch.as_tensor(part)[b, len(words) :].any()
    assert costs(told, padded()).tolist() == pytest.approx(
        [cost(words).item() for words in by_loops(model, pictures())[1]], abs=1e-10
    )


def test_local_attention_looks_around_a_center_that_is_trained() -> None:
    model = captioner("local")
    told = tell(model)
    for b, caption in enumerate(CAPTIONS):
        for t in range(len(caption)):
            down, right = (torch.arange(side) - center for side, center in zip(GRID, told.center[b, t], strict=True))
            inside = (down.abs()[:, None] <= 1) & (right.abs() <= 1)
            assert torch.equal(told.alpha[b, t].view(GRID) > 0, inside)
    found = gradients(model, loss(model, told, padded(), ALONE))
    assert found["look.near.hidden.weight"].abs().max() > 0
    assert found["look.near.vector.weight"].abs().max() > 0
    assert tell(captioner("soft")).center[0, 0].isnan().all()
    with pytest.raises(OptionError, match="radius must be a whole number of at least 1"):
        ShowAttendTell(nn.Identity(), CHANNELS, WORDS, attention="local", radius=0)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_learned_first_state_has_seen_nothing_of_the_image(attention: Attention) -> None:
    model = captioner(attention, first="learned")
    with torch.no_grad():
        model.gate.weight.zero_()
        model.gate.bias.fill_(-1e4)  # beta is 0: nothing of what is looked at comes in
    one, other = tell(model), tell(model, pictures().flip(0) * 3)
    assert torch.equal(one.logits, other.logits)
    assert not torch.equal(one.alpha, other.alpha) or attention == "uniform"
    model = captioner(attention)
    with torch.no_grad():
        model.gate.weight.zero_()
        model.gate.bias.fill_(-1e4)
    assert not torch.equal(tell(model).logits, tell(model, pictures().flip(0) * 3).logits)


def test_a_learned_first_state_begins_at_zero_and_is_trained() -> None:
    model = ShowAttendTell(nn.Identity(), CHANNELS, WORDS, embed_dim=4, hidden_dim=3, first="learned").double()
    state = model.initial_state(model.encode(pictures()))
    assert [part.tolist() for part in state] == [[[0.0] * 3] * len(CAPTIONS)] * 2
    found = gradients(model, loss(model, tell(model), padded(), ALONE))
    assert found["first_h"].abs().min() > 0
    assert found["first_c"].abs().min() > 0
    with pytest.raises(OptionError, match="unknown first 'zero'"):
        ShowAttendTell(nn.Identity(), CHANNELS, WORDS, first="zero")  # type: ignore[arg-type]


@pytest.mark.parametrize("attention", ["soft", "uniform"])
def test_gradients_of_the_loss_equal_those_of_the_loops(attention: Attention) -> None:
    model, objective, images = captioner(attention, GRID), Objective(regularizer=0.7), pictures().requires_grad_()
    found = gradients(model, loss(model, tell(model, images), padded(), objective), images)
    copies = pictures().requires_grad_()
    weights, stories = by_loops(model, copies)
    total = sum((cost(words) + 0.7 * unevenness(words) for words in stories), ZERO) / len(stories)
    expected = torch.autograd.grad(total, [*weights.values(), copies], allow_unused=True, materialize_grads=True)
    close(found, dict(zip(found, expected, strict=True)), 1e-8)
    assert all(bool(gradient.any()) for name, gradient in found.items() if name != "look.score.bias")


@pytest.mark.parametrize("each", ["mean", "sum"])
def test_gradients_of_hard_attentions_loss_equal_those_of_the_loops(each: str) -> None:
    model = captioner("hard", GRID)
    model.baseline.fill_(1.3)
    objective = Objective(regularizer=0.7, reward=0.4, entropy=0.05, cost=each)  # type: ignore[arg-type]
    found = gradients(model, loss(model, tell(model), padded(), objective))
    weights, stories = by_loops(model, pictures())
    total = ZERO
    for words in stories:
        share = cost(words).item() / (4 if each == "mean" else 1)  # 4: length of the longest caption
        total = total + cost(words) + 0.7 * unevenness(words)
        for word in words:
            total = total + 0.4 * (share - 1.3) * word.log_probability - 0.05 * word.entropy
    expected = torch.autograd.grad(total / len(stories), list(weights.values()), allow_unused=True, materialize_grads=True)
    close(found, dict(zip(weights, expected, strict=True)), 1e-8)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("behind", [1, WORDS, -1, 10**6])
def test_words_after_the_end_token_have_no_effect(behind: int, attention: Attention) -> None:
    model, losses = captioner(attention), []
    for number in (END, behind):
        model.baseline.zero_()
        captions = padded(behind=number)
        value = loss(model, tell(model, captions=captions), captions, Objective())
        losses.append({"loss": value.detach(), **gradients(model, value)})
    close(losses[1], losses[0], 0)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("each", ["mean", "sum"])
def test_steps_after_the_longest_caption_have_no_effect(each: str, attention: Attention) -> None:
    model, objective, losses = captioner(attention), Objective(cost=each), []  # type: ignore[arg-type]
    for total in (4, 7):
        model.baseline.zero_()
        captions = padded(total=total)
        places = torch.nn.functional.pad(PLACES, (0, total - 4))
        told = model(pictures(), captions, LENGTHS, locations=places)
        assert told.logits.shape == (3, total, WORDS)
        value = loss(model, told, captions, objective)
        losses.append({"loss": value.detach(), "baseline": model.baseline.clone(), **gradients(model, value)})
    close(losses[1], losses[0], 1e-12)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_outputs_of_a_caption_do_not_depend_on_its_batch_or_order(attention: Attention) -> None:
    model, order = captioner(attention), torch.tensor([2, 0, 1])
    together = tell(model)
    moved = model(pictures()[order], padded()[order], LENGTHS[order], locations=PLACES[order])
    for found, whole in zip(moved[:-1], together[:-1], strict=True):
        assert torch.allclose(
            torch.as_tensor(found).double(), torch.as_tensor(whole)[order].double(), rtol=0, atol=1e-12, equal_nan=True
        )
    for b, caption in enumerate(CAPTIONS):
        length = len(caption)
        alone = model(pictures()[b : b + 1], torch.tensor([caption]), LENGTHS[b : b + 1], locations=PLACES[b : b + 1, :length])
        for found, whole in zip(alone[:-1], together[:-1], strict=True):
            same = torch.as_tensor(whole)[b, :length].double()
            assert torch.allclose(torch.as_tensor(found)[0].double(), same, rtol=0, atol=1e-12, equal_nan=True)


def test_loss_of_a_batch_is_the_mean_of_the_losses_of_its_captions() -> None:
    model, objective = captioner("hard"), Objective(cost="sum", decay=1.0)
    whole = loss(model, tell(model), padded(), objective)
    parts = []
    for b, caption in enumerate(CAPTIONS):
        words, length = torch.tensor([caption]), LENGTHS[b : b + 1]
        told = model(pictures()[b : b + 1], words, length, locations=PLACES[b : b + 1, : len(caption)])
        parts.append(loss(model, told, words, objective))
    assert whole.item() == pytest.approx(sum(parts, ZERO).item() / 3, abs=1e-12)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_single_steps_equal_the_forward_pass(attention: Attention) -> None:
    model = captioner(attention).eval()
    captions, lengths = torch.tensor([[2, 5, END]] * 3), torch.tensor([3] * 3)
    with torch.no_grad():
        told = model(pictures(), captions, lengths)
        seen = model.encode(pictures())
        state = model.initial_state(seen)
        for t in range(3):
            before = torch.full((3,), model.start_token) if t == 0 else captions[:, t - 1]
            step, state = model.step(seen, state, before)
            for found, whole in zip(step, told[:-2], strict=True):
                assert torch.allclose(found, torch.as_tensor(whole)[:, t], rtol=0, atol=1e-12, equal_nan=True)


def test_parameter_count_equals_the_formulas() -> None:
    d, n, m, a, k = 5, 3, 4, 2, 6  # features, state, embedding, scores, words
    first, scores, gate = 2 * (d * n + n), d * a + a + n * a + a + 1, n + 1
    lstm, last = 4 * n * (m + d + n + 2), n * m + m + d * m + m * k + k
    assert sum(parameter.numel() for parameter in captioner().parameters()) == first + scores + gate + (k + 1) * m + lstm + last
    coordinates = dict(captioner(grid=GRID).named_parameters())
    assert (coordinates["row"].shape, coordinates["column"].shape) == ((d, 2, 1), (d, 1, 3))


def test_the_start_token_embedding_gets_no_gradient() -> None:
    model = captioner()
    found = gradients(model, loss(model, tell(model), padded(), Objective()))["embed.weight"]
    assert not found[model.start_token].any()
    assert found[2:WORDS].any(1).all()


def test_dropout_is_before_the_last_layer_and_only_in_training() -> None:
    model, whole = captioner(dropout=1.0), tell(captioner())
    told = tell(model)
    assert torch.equal(told.logits[1], model.last.bias.expand(4, WORDS))
    assert torch.equal(told.alpha, whole.alpha)
    assert torch.equal(tell(model.eval()).logits, whole.logits)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_word_dropout_hides_previous_words_in_training_only(attention: Attention) -> None:
    model, other = captioner(attention), torch.tensor([[5, 0, 0, 0], [3, 3, 3, 0], [2, 5, 0, 0]])
    first = tell(model).logits
    model.word_dropout = 1.0
    hidden = tell(model)
    assert torch.equal(hidden.logits, tell(model, captions=other).logits)
    assert torch.equal(hidden.logits[:, 0], first[:, 0])
    assert not torch.equal(hidden.logits, first)
    assert torch.equal(tell(model.eval()).logits, first)


def test_doubly_stochastic_reductions_differ_only_by_a_factor() -> None:
    """Check by hand: 12 words of uniform attention leave 184 / 196 missing at 196 locations, 196 (184 / 196)^2 = 172.7 per image."""
    alphas = torch.full((4, 12, 196), 1 / 196, dtype=torch.float64)
    paper, arctic, mean = (float(doubly_stochastic(alphas, reduction=how)) for how in ("paper", "arctic", "mean"))
    assert (round(paper, 1), round(arctic, 2), round(mean, 3)) == (172.7, 3.53, 0.881)
    lively = torch.randn(4, 12, 196).double().softmax(-1)
    paper, arctic, mean = (float(doubly_stochastic(lively, reduction=how)) for how in ("paper", "arctic", "mean"))
    assert paper == pytest.approx(196 * mean, rel=1e-12)
    assert arctic == pytest.approx(4 * mean, rel=1e-12)


def test_doubly_stochastic_equals_a_calculation_by_hand() -> None:
    """Check two captions with three locations by hand; the second caption ends after one word."""
    alphas = torch.tensor([[[0.5, 0.5, 0.0], [0.25, 0.25, 0.5]], [[1.0, 0.0, 0.0], [0.1, 0.2, 0.7]]])
    steps = torch.tensor([[True, True], [True, False]])
    first, second = 0.25**2 + 0.25**2 + 0.5**2, 0.0 + 1.0 + 1.0  # 1 - 0.75, 1 - 0.75, 1 - 0.5; 1 - 1, 1, 1
    assert float(doubly_stochastic(alphas, steps)) == pytest.approx((first + second) / 2)
    assert float(doubly_stochastic(alphas, steps, reduction="arctic")) == pytest.approx((first + second) / 3)
    assert float(doubly_stochastic(alphas, steps, reduction="mean")) == pytest.approx((first + second) / 6)
    counted = 0.1**2 + 0.8**2 + 0.3**2  # 1 - 1.1, 1 - 0.2, 1 - 0.7: with its padding
    assert float(doubly_stochastic(alphas)) == pytest.approx((first + counted) / 2)


@pytest.mark.parametrize("reduction", ["paper", "arctic", "mean"])
def test_the_regularizer_is_weighted_and_reduced_as_given(reduction: str) -> None:
    model, captions = captioner(), padded()
    told = tell(model)
    plain = loss(model, told, captions, ALONE)
    found = loss(model, told, captions, Objective(regularizer=0.3, reduction=reduction))  # type: ignore[arg-type]
    uneven = sum(unevenness(words).item() for words in by_loops(model, pictures())[1]) / 3
    factor = {"paper": 1.0, "arctic": 3 / 6, "mean": 1 / 6}[reduction]
    assert (found - plain).item() == pytest.approx(0.3 * factor * uneven, abs=1e-10)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_bfloat16_gives_finite_gradients(attention: Attention) -> None:
    model, objective = captioner(attention, GRID, 0.5).float(), Objective()
    for how in ("sample", "expected", "gumbel"):
        with torch.autocast("cpu", torch.bfloat16):
            told = model(pictures().float(), padded(), LENGTHS, sampling=how)
            value = loss(model, told, padded(), objective)
        assert value.dtype == torch.float32
        assert bool(value.isfinite())
        assert all(bool(gradient.isfinite().all()) for gradient in gradients(model, value).values())


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_gradients_are_finite_for_one_hot_alpha(attention: Attention) -> None:
    model = captioner(attention).float()
    if model.look is not None:
        with torch.no_grad():
            model.look.score.weight.mul_(1e4)
    told = model(pictures().float(), padded(), LENGTHS, sampling="sample")
    if attention != "uniform":
        assert told.alpha[told.steps].min() == 0
    value = loss(model, told, padded(), Objective())
    assert bool(value.isfinite())
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(model, value).values())
    assert bool(told.entropy.isfinite().all())


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_copies_give_the_same_output(attention: Attention) -> None:
    model = captioner(attention, GRID).eval()
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    loaded = captioner(attention, GRID).eval()
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    loaded.load_state_dict(torch.load(io.BytesIO(stream.getvalue()), weights_only=True))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert torch.equal(tell(other).logits, tell(model).logits)


def test_features_of_another_width_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"the encoder must return \(B, 5, rows, columns\), got \(3, 2, 2, 3\)"):
        captioner().encode(pictures()[:, :2])


def test_an_unknown_attention_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown attention 'sfot'; did you mean 'soft'"):
        captioner("sfot")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        ({"reduction": "sum"}, "unknown reduction 'sum'"),
        ({"estimator": "gumble"}, "unknown estimator 'gumble'; did you mean 'gumbel'"),
        ({"cost": "average"}, "unknown cost 'average'"),
        ({"semi_sampling": 1.5}, r"semi_sampling and decay must lie in \[0, 1\], got 1.5 and 0.9"),
        ({"decay": -0.1}, r"got 0.5 and -0.1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_constants_are_refused(constants: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Objective(**constants)  # type: ignore[arg-type]
