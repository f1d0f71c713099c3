"""Vocabulary: splitting of words, selection, encoding and decoding."""

from __future__ import annotations

import pytest

from visattn.captioning import Vocabulary, split
from visattn.errors import DataError

SPLIT = {
    "A red disc.": ["a", "red", "disc"],
    "  two\tlines\n": ["two", "lines"],
    "a man's dog, isn't it?": ["a", "man's", "dog", "isn't", "it"],
    "the dogs' 'quoted' tails": ["the", "dogs", "quoted", "tails"],
    "don\u2019t": ["don't"],
    "half-open snake_case": ["half", "open", "snake", "case"],
    "3 x 10.5": ["3", "x", "10", "5"],
    "Un caf\u00e9 \u00c0 Z\u00dcRICH": ["un", "caf\u00e9", "\u00e0", "z\u00fcrich"],
    "cafe\u0301 Ame\u0301lie": ["caf\u00e9", "am\u00e9lie"],
    "\u72ac \u0441\u043e\u0431\u0430\u043a\u0430": ["\u72ac", "\u0441\u043e\u0431\u0430\u043a\u0430"],
    "\u090f\u0915 \u0939\u093f\u0928\u094d\u0926\u0940": ["\u090f\u0915", "\u0939\u093f\u0928\u094d\u0926\u0940"],
    "<end> <unknown>": ["end", "unknown"],
    "... !?": [],
    "": [],
}


@pytest.mark.parametrize(("text", "words"), SPLIT.items())
def test_a_text_is_split_into_words(text: str, words: list[str]) -> None:
    assert split(text) == words
    assert split(" ".join(words)) == words


def test_words_are_ordered_by_frequency_then_alphabetically() -> None:
    made = Vocabulary.of(["b a. c!", "C b", "B, d"])
    assert made.words == ("<end>", "<unknown>", "b", "c", "a", "d")
    assert len(made) == 6
    assert Vocabulary.of(["b a. c!", "C b", "B, d"], fewest=2).words == ("<end>", "<unknown>", "b", "c")


def test_encode_and_decode_round_trip_with_unknown_words() -> None:
    made = Vocabulary.of(["a red disc", "a disc"])
    numbers = made.encode("A disc, a BLUE one.")
    assert numbers == [2, 3, 2, 1, 1, 0]
    assert made.decode(numbers) == ["a", "disc", "a", "<unknown>", "<unknown>"]
    assert made.decode([4, 0, 3]) == ["red"]
    assert made.decode([4, 3]) == ["red", "disc"]
    assert made.encode("") == [0]


def test_caption_text_cannot_produce_the_end_token() -> None:
    assert 0 not in Vocabulary.of(["end unknown"]).encode("<end> unknown")[:-1]


@pytest.mark.parametrize(
    "words",
    [(), ("<end>",), ("a", "b"), ("<unknown>", "<end>", "a"), ("<end>", "<unknown>", "a", "a"), ("<end>", "<unknown>", "<end>")],
    ids=str,
)
def test_invalid_vocabulary_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match="must begin with <end> and <unknown> and have no word twice"):
        Vocabulary(words)


@pytest.mark.parametrize("captions", [[], ["...", ""], ["once"]])
def test_captions_without_a_frequent_word_are_refused(captions: list[str]) -> None:
    with pytest.raises(DataError, match="no word occurs 2 times or more"):
        Vocabulary.of(captions, fewest=2)
