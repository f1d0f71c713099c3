"""Beam search against loops over single hypotheses, against exhaustive search, and against the model's forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from visattn.captioning.beam_search import Hypothesis, search, search_all
from visattn.errors import ModelError, OptionError
from visattn.models.show_attend_tell import Attention, EncodedImage, ShowAttendTell, State, costs

WORDS, END, UNKNOWN = 6, 0, 1
KINDS: tuple[Attention, ...] = ("soft", "hard", "uniform")


def tiny(attention: Attention = "soft", *, seed: int = 4, sharp: float = 4.0, end: float = 0.0) -> ShowAttendTell:
    """Build a model in double precision with clearly separated word probabilities. A large `end` makes captions short."""
    torch.manual_seed(seed)
    encoder = nn.Conv2d(3, 5, 2, stride=2)
    model = (
        ShowAttendTell(encoder, 5, WORDS, attention=attention, embed_dim=7, hidden_dim=8, attention_dim=6, grid=(2, 3))
        .double()
        .eval()
    )
    with torch.no_grad():
        model.embed.weight[:-1] *= 3
        model.last.weight *= sharp
        model.last.bias[END] += end
    return model


def pictures(count: int = 4) -> Tensor:
    return 3 * torch.randn(count, 3, 4, 6, dtype=torch.double)


def one_of(seen: EncodedImage, index: int) -> EncodedImage:
    return EncodedImage(seen.features[index : index + 1], seen.keys[index : index + 1], seen.grid)


@torch.no_grad()
def next_word(model: ShowAttendTell, seen: EncodedImage, state: State, word: int) -> tuple[list[float], State]:
    """Compute the log-probabilities of the next word of one hypothesis from the logits."""
    step, state = model.step(seen, state, torch.tensor([word]))
    logits = step.logits[0].tolist()
    total = math.log(sum(math.exp(one) for one in logits))
    return [one - total for one in logits], state


def greedy(model: ShowAttendTell, seen: EncodedImage, longest: int) -> tuple[list[int], float, bool]:
    """Decode greedily."""
    words, score, state, before = list[int](), 0.0, model.initial_state(seen), model.start_token
    for _ in range(longest):
        chances, state = next_word(model, seen, state, before)
        before = max((word for word in range(WORDS) if word != UNKNOWN), key=lambda word: chances[word])
        score += chances[before]
        if before == END:
            return words, score, True
        words.append(before)
    return words, score, False


def every_caption(
    model: ShowAttendTell,
    seen: EncodedImage,
    longest: int,
    words: tuple[int, ...] = (),
    score: float = 0.0,
    state: State | None = None,
) -> Iterator[tuple[float, list[int]]]:
    """Score all captions of at most `longest` steps, including that of `END`."""
    before = words[-1] if words else model.start_token
    chances, state = next_word(model, seen, state or model.initial_state(seen), before)
    yield score + chances[END], list(words)
    if longest > 1:
        for word in range(2, WORDS):
            yield from every_caption(model, seen, longest - 1, (*words, word), score + chances[word], state)


def beam_of_one(model: ShowAttendTell, seen: EncodedImage, beam: int, longest: int) -> list[tuple[float, list[int], bool]]:
    """Run beam search for one image, one hypothesis at a time."""
    over: list[tuple[float, list[int], bool]] = []
    live: list[tuple[float, list[int], State]] = [(0.0, [], model.initial_state(seen))]
    for _ in range(longest):
        candidates = []
        for place, (score, words, state) in enumerate(live):
            chances, then = next_word(model, seen, state, words[-1] if words else model.start_token)
            candidates += [(score + chances[word], word, place, then) for word in range(WORDS) if word != UNKNOWN]
        candidates.sort(key=lambda one: (-one[0], one[1], one[2]))
        kept = candidates[: beam - len(over)]
        over += [(score, live[place][1], True) for score, word, place, _ in kept if word == END]
        live = [(score, [*live[place][1], word], then) for score, word, place, then in kept if word != END]
    over = over or [(score, words, False) for score, words, _ in live]
    return sorted(over, key=lambda one: -one[0])


def assert_same(found: list[Hypothesis], expected: list[tuple[float, list[int], bool]]) -> None:
    assert [one.words for one in found] == [words for _, words, _ in expected]
    assert [one.finished for one in found] == [finished for _, _, finished in expected]
    assert [one.score for one in found] == pytest.approx([score for score, _, _ in expected], abs=1e-9)


@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("end", [-1.0, 1.0])
def test_beam_of_one_matches_greedy_search(attention: Attention, end: float) -> None:
    model = tiny(attention, end=end)
    seen = model.encode(pictures())
    for index, found in enumerate(search(model, seen, beam_size=1, max_length=7)):
        words, score, finished = greedy(model, one_of(seen, index), 7)
        assert (found.words, found.finished) == (words, finished)
        assert found.score == pytest.approx(score, abs=1e-9)


def test_exhaustive_beam_finds_all_captions_in_order() -> None:
    model = tiny()
    seen = model.encode(pictures(2))
    for index, found in enumerate(search_all(model, seen, beam_size=WORDS**4, max_length=4)):
        expected = sorted(every_caption(model, one_of(seen, index), 4), key=lambda one: -one[0])
        assert len(expected) == 1 + 4 + 16 + 64
        assert_same(found, [(score, words, True) for score, words in expected])


@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize(("beam", "end"), [(3, 0.0), (4, -0.5), (8, 0.0), (3, -1e3)])
def test_batched_beam_search_matches_a_loop_over_hypotheses(attention: Attention, beam: int, end: float) -> None:
    model = tiny(attention, end=end)
    seen = model.encode(pictures(5))
    together = search_all(model, seen, beam_size=beam, max_length=6)
    lengths = {len(one.words) for found in together for one in found}
    assert len(lengths) > 1 or end == -1e3  # hypotheses end at different steps
    for index, found in enumerate(together):
        assert_same(found, beam_of_one(model, one_of(seen, index), beam, 6))
        (alone,) = search_all(model, one_of(seen, index), beam_size=beam, max_length=6)
        assert_same(alone, [(one.score, one.words, one.finished) for one in found])
        assert [one.locations for one in alone] == [one.locations for one in found]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("normalize", [False, True])
def test_search_returns_the_first_caption_of_search_all(seed: int, normalize: bool) -> None:
    model = tiny(seed=seed)
    seen = model.encode(pictures(40))
    options: dict[str, Any] = {"beam_size": 4, "max_length": 8, "length_normalization": normalize}
    best = search(model, seen, **options)
    assert [one.words for one in best] == [found[0].words for found in search_all(model, seen, **options)]
    assert [[one] for one in best] == search_all(model, seen, **options, best_only=True)


def test_search_takes_fewer_steps_than_search_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(end=2.0)
    seen, rows = model.encode(pictures(8)), list[int]()
    step = model.step

    def counted(seen: EncodedImage, *arguments: Any, **options: Any) -> Any:
        rows.append(len(seen.features))
        return step(seen, *arguments, **options)

    monkeypatch.setattr(model, "step", counted)
    search_all(model, seen)
    every = sum(rows)
    rows.clear()
    search(model, seen)
    assert sum(rows) < every


@pytest.mark.parametrize(
    ("attention", "how"),
    [("soft", None), ("uniform", None), ("hard", None), ("hard", "sample"), ("hard", "gumbel"), ("hard", "expected")],
)
def test_scores_match_the_forward_pass(attention: Attention, how: str | None) -> None:
    model, images = tiny(attention), pictures(5)
    found = search_all(model, model.encode(images), beam_size=4, max_length=12, sampling=how)
    rows = [(index, one) for index, hypotheses in enumerate(found) for one in hypotheses if one.finished]
    assert len({len(one.words) for _, one in rows}) > 2
    lengths = torch.tensor([len(one.words) + 1 for _, one in rows])
    captions, places = torch.zeros(2, len(rows), int(lengths.max()), dtype=torch.long)
    for row, (_, one) in enumerate(rows):
        captions[row, : len(one.words)] = torch.tensor(one.words)
        places[row, : len(one.locations)] = torch.tensor(one.locations)
    looked = attention == "hard" and how != "expected"
    assert [len(one.locations) for _, one in rows] == (lengths.tolist() if looked else [0] * len(rows))
    again = images[[index for index, _ in rows]]
    told = model(again, captions, lengths, sampling=how, locations=places if looked else None)
    assert told.logits.dtype == torch.double
    chances = told.logits.log_softmax(-1).gather(2, captions[..., None])[..., 0].masked_fill(~told.steps, 0).sum(1)
    torch.testing.assert_close(chances.detach(), torch.tensor([one.score for _, one in rows], dtype=torch.double))
    torch.testing.assert_close(-costs(told, captions).double(), chances, atol=1e-4, rtol=1e-4)


def test_sampled_locations_differ_from_argmax() -> None:
    model = tiny("hard", end=-1e3)
    seen = model.encode(pictures(8))
    (drawn, likeliest) = (search(model, seen, beam_size=3, max_length=6, sampling=how) for how in ("sample", None))
    assert [one.locations for one in drawn] != [one.locations for one in likeliest]
    assert all(len(one.locations) == len(one.words) == 6 for one in drawn)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (0.0, [([], True), ([2], True), ([3], True)]),
        (-1e9, [([2, 2], False), ([3, 2], False), ([4, 2], False)]),
    ],
)
def test_ties_prefer_the_lowest_word_then_the_first_parent(end: float, expected: list[tuple[list[int], bool]]) -> None:
    model = tiny()
    with torch.no_grad():
        model.last.weight.zero_()
        model.last.bias.zero_()
        model.last.bias[END] = end
    for found in search_all(model, model.encode(pictures(2)), beam_size=3, max_length=2):
        assert [(one.words, one.finished) for one in found] == expected


def test_unfinished_captions_are_returned_only_if_none_finished() -> None:
    model = tiny(end=-1e3)
    seen = model.encode(pictures())
    for found in search_all(model, seen, beam_size=3, max_length=4):
        assert [(len(one.words), one.finished) for one in found] == [(4, False)] * 3
    model = tiny(end=1.0)
    ended = search_all(model, seen, beam_size=3, max_length=1)
    assert [[(one.words, one.finished) for one in found] for found in ended] == [[([], True)]] * 4


def test_length_normalized_scores_are_means_and_only_change_the_order() -> None:
    model = tiny()
    seen = model.encode(pictures(8))
    plain, mean = (
        search_all(model, seen, beam_size=5, max_length=9, length_normalization=normalize) for normalize in (False, True)
    )
    moved = 0
    for sums, means in zip(plain, mean, strict=True):
        expected = sorted(((one.score / (len(one.words) + one.finished), one.words) for one in sums), reverse=True)
        assert [one.words for one in means] == [words for _, words in expected]
        assert [one.score for one in means] == pytest.approx([score for score, _ in expected])
        moved += sums[0].words != means[0].words
    assert moved


def test_unknown_words_are_excluded_by_default_without_renormalization() -> None:
    model = tiny()
    with torch.no_grad():
        model.last.bias[UNKNOWN] += 6
    seen = model.encode(pictures())
    assert all(UNKNOWN in one.words for one in search(model, seen, max_length=5, allow_unknown=True))
    for index, one in enumerate(search(model, seen, beam_size=1, max_length=5)):
        assert UNKNOWN not in one.words
        assert one.score == pytest.approx(greedy(model, one_of(seen, index), 5)[1])
        assert one.score < -2  # the probability of the unknown word is not redistributed


def test_dropout_is_off_and_training_modes_are_restored() -> None:
    model = tiny()
    seen = model.encode(pictures())
    expected = search(model, seen)
    model.train()
    model.encoder.eval()
    before = [part.training for part in model.modules()]
    assert search(model, seen) == expected
    assert [part.training for part in model.modules()] == before
    model = tiny("hard").train()
    with pytest.raises(OptionError, match="unknown sampling 'sampel'; did you mean 'sample'"):
        search(model, seen, sampling="sampel")
    assert all(part.training for part in model.modules())


def test_empty_batch_gives_no_captions() -> None:
    model = tiny()
    seen = model.encode(pictures(1))
    assert search(model, EncodedImage(seen.features[:0], seen.keys[:0], seen.grid)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_size": 0}, "beam_size must be a whole number of at least 1, got 0"),
        ({"beam_size": 2.5}, "beam_size must be a whole number"),
        ({"max_length": 0}, "max_length must be a whole number of at least 1, got 0"),
    ],
)
def test_beam_size_and_length_below_one_are_refused(options: dict[str, Any], message: str) -> None:
    model = tiny()
    with pytest.raises(OptionError, match=message):
        search(model, model.encode(pictures(1)), **options)


def test_nan_log_probabilities_are_refused() -> None:
    model = tiny()
    with torch.no_grad():
        model.last.bias.fill_(math.nan)
    with pytest.raises(ModelError, match="must give log-probabilities, got NaN"):
        search(model, model.encode(pictures(1)))
