"""Vocabulary of a captioner."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from visattn._support.language import option
from visattn._support.reprs import brief
from visattn.errors import DataError
from visattn.models.show_attend_tell import END, UNKNOWN

SPECIAL = ("<end>", "<unknown>")
_WORD = re.compile(r"[^\s']+(?:'[^\s']+)*")


def split(text: str) -> list[str]:
    """Split a text into lower-case words of letters and digits, with apostrophes between them. Punctuation is dropped.

    Accents are composed with their letters and apostrophes are made straight, so that words that look the same are equal.
    """
    plain = unicodedata.normalize("NFC", text.lower()).replace("\u2019", "'")
    kept = "".join(
        one if one == "'" or unicodedata.category(one)[0] in "LNM" else " " for one in plain
    )  # M: combining marks, such as the vowels of many scripts
    return _WORD.findall(kept)


@dataclass(frozen=True)
class Vocabulary:
    """Mapping between words and word indices.

    Attributes:
        words: `<end>`, `<unknown>`, then all other words. The position of a word is its index.
    """

    words: tuple[str, ...]

    __repr__ = brief

    def __post_init__(self) -> None:
        """Validate the words.

        Raises:
            DataError: If the first two words are not `<end>` and `<unknown>`, or a word occurs twice.
        """
        if self.words[:2] != SPECIAL or len(set(self.words)) != len(self.words):
            raise DataError(
                f"a vocabulary must begin with {' and '.join(SPECIAL)} and have no word twice. Read it from a checkpoint."
            )
        object.__setattr__(self, "_numbers", {word: number for number, word in enumerate(self.words)})

    @classmethod
    def of(cls, captions: Iterable[str], fewest: int = 1) -> Vocabulary:
        """Build the vocabulary of the words that occur at least `fewest` times, sorted by frequency.

        Raises:
            DataError: If there is no such word.
        """
        counts = Counter(word for caption in captions for word in split(caption))
        kept = sorted((word for word, count in counts.items() if count >= fewest), key=lambda word: (-counts[word], word))
        if not kept:
            raise DataError(
                f"no word occurs {fewest} times or more in the captions. Give more captions, or lower {option('min_count')}."
            )
        return cls((*SPECIAL, *kept))

    def __len__(self) -> int:
        """Return the number of words, including `<end>` and `<unknown>`."""
        return len(self.words)

    def encode(self, text: str) -> list[int]:
        """Return the word indices of a text, followed by `END`."""
        numbers: dict[str, int] = self._numbers  # type: ignore[attr-defined]
        return [*(numbers.get(word, UNKNOWN) for word in split(text)), END]

    def decode(self, numbers: Sequence[int]) -> list[str]:
        """Return the words of indices, up to the first `END`."""
        words = []
        for number in numbers:
            if number == END:
                break
            words.append(self.words[number])
        return words
