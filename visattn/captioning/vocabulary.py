"""The words that a captioner knows, by number."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from visattn.errors import DataError
from visattn.models.show_attend_tell import END, UNKNOWN

SPECIAL = ("<end>", "<unknown>")
_WORD = re.compile(r"[^\s']+(?:'[^\s']+)*")


def split(text: str) -> list[str]:
    """The words of a text: lower case, letters and digits with apostrophes between them; punctuation is dropped.

    What looks alike is alike: accents are part of their letter, and all apostrophes straight.
    """
    plain = unicodedata.normalize("NFC", text.lower()).replace("\u2019", "'")
    kept = "".join(
        one if one == "'" or unicodedata.category(one)[0] in "LNM" else " " for one in plain
    )  # M: vowels of many scripts
    return _WORD.findall(kept)


@dataclass(frozen=True)
class Vocabulary:
    """Words by number.

    Attributes:
        words: `<end>`, `<unknown>`, then the others.
    """

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse words that are none.

        Raises:
            DataError: If the first two are others, or a word is there twice.
        """
        if self.words[:2] != SPECIAL or len(set(self.words)) != len(self.words):
            raise DataError(
                f"a vocabulary must begin with {' and '.join(SPECIAL)} and have no word twice. Read it from a checkpoint."
            )
        object.__setattr__(self, "_numbers", {word: number for number, word in enumerate(self.words)})

    @classmethod
    def of(cls, captions: Iterable[str], fewest: int = 1) -> Vocabulary:
        """The words that occur `fewest` times or more, the most frequent first.

        Raises:
            DataError: If there is none.
        """
        counts = Counter(word for caption in captions for word in split(caption))
        kept = sorted((word for word, count in counts.items() if count >= fewest), key=lambda word: (-counts[word], word))
        if not kept:
            raise DataError(
                f"no word occurs {fewest} times or more in the captions. Give more captions, or lower min_count (--min-count)."
            )
        return cls((*SPECIAL, *kept))

    def __len__(self) -> int:
        """How many, `<end>` and `<unknown>` among them."""
        return len(self.words)

    def encode(self, text: str) -> list[int]:
        """The numbers of a text's words, and `END`."""
        numbers: dict[str, int] = self._numbers  # type: ignore[attr-defined]
        return [*(numbers.get(word, UNKNOWN) for word in split(text)), END]

    def decode(self, numbers: Sequence[int]) -> list[str]:
        """The words of numbers, up to the first `END`."""
        words = []
        for number in numbers:
            if number == END:
                break
            words.append(self.words[number])
        return words
