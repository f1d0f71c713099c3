"""How good captions are: how far they agree with references in words, and, of scenes, whether what they say is so.

Captions flow in as text, one candidate for each picture; numbers over all of them flow out. The scores in words are pycocoevalcap's, as on
COCO's server but for the words, which are those of a captioner's vocabulary. METEOR and SPICE need Java and are not offered.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from visattn._support.extras import need
from visattn.captioning.vocabulary import split
from visattn.data.scenes import COLORS, Thing
from visattn.data.scenes.shapes import DISTRACTORS, LABELS
from visattn.errors import OptionError

References = Sequence[str | Sequence[str]]  # of each picture: one caption, or several


class Fact(NamedTuple):
    """What a caption says of one thing; what it leaves out is empty."""

    color: str
    shape: str
    place: str


_NOTHING = Fact("", "", "")
_THIRDS = 1 / 6, 1 / 2, 5 / 6
_PLACES = {  # from the words of a place, in any order, to its name
    frozenset(place.split()): place for place in (Thing("", "", "", (y, x), 0, 0).place for y in _THIRDS for x in _THIRDS)
}
_SLOTS = {
    **dict.fromkeys(COLORS, "color"),
    **dict.fromkeys((*LABELS, *DISTRACTORS), "shape"),
    **dict.fromkeys(frozenset().union(*_PLACES), "place"),
}
_BEGINS = re.compile(r",|\ba\b", re.IGNORECASE)


def caption_scores(candidates: Sequence[str], references: References) -> dict[str, float]:
    """How far captions agree with what people, or the truth, said of the same pictures; in words of a `Vocabulary`.

    `BLEU-n = min(1, exp(1 - r / c)) (p_1 ... p_n)^(1/n)` of the whole corpus: `p_k` is the share of the candidates' runs of k words that
    a reference has too, each counted as often as one reference has it; `c` is the length of all candidates, `r` that of the references
    nearest in length, the shorter of two. Nothing is smoothed, but pycocoevalcap adds 1e-15 above and 1e-9 below each fraction: a BLEU
    that is 0 comes out as up to 0.0002, and up to 0.032 where no candidate has n words.

    `CIDEr-D` is 10 times the mean, over n from 1 to 4 and the references, of the clipped cosine of the numbers of runs of n words, each
    weighted by the log of how rare it is among the pictures' references, times `exp(-d^2 / 72)` for a difference of d words. It is what
    tables of COCO call CIDEr; it is 0 where there is one picture only, as nothing is rare then.

    `ROUGE-L = 2.44 P R / (R + 1.44 P)`, a mean over pictures: P and R are the longest common subsequence over the length of the candidate
    and of the reference, each the largest over the references.

    All three depend on what counts as a word, and are comparable under the same tokenization only: published numbers of COCO are of
    another, the Penn Treebank's.

    Args:
        candidates: One caption for each picture; one without words agrees with nothing.
        references: One or more for each picture, with words; a text stands for one. Their order, and that of pictures, is irrelevant to
            the last bit.

    Returns:
        `BLEU-1` to `BLEU-4` and `ROUGE-L`, from 0 to 1, and `CIDEr-D`, from 0 to 10.

    Raises:
        OptionError: If there are no candidates, not as many references, or a reference has no words.
        MissingExtra: If pycocoevalcap is not installed.

    Reference:
        Papineni et al., "BLEU: a Method for Automatic Evaluation of Machine Translation", ACL 2002. Lin, "ROUGE: A Package for Automatic
        Evaluation of Summaries", ACL workshop 2004. Vedantam et al., "CIDEr: Consensus-based Image Description Evaluation", CVPR 2015,
        arXiv:1411.5726. Differs from the last: runs are clipped by their numbers, where the paper divides these by the caption's length.
    """
    need("pycocoevalcap", "caption-metrics", "scoring captions")
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    plain = sorted((_plain(said), sorted(map(_plain, truths))) for said, truths in _paired(candidates, references))
    said = {number: [candidate] for number, (candidate, _) in enumerate(plain)}
    truths = {number: told for number, (_, told) in enumerate(plain)}
    bleu, _ = Bleu(4).compute_score(truths, said, verbose=0)
    scores = {f"BLEU-{n}": float(score) for n, score in enumerate(bleu, start=1)}
    return scores | {
        "CIDEr-D": float(Cider().compute_score(truths, said)[0]),
        "ROUGE-L": float(Rouge().compute_score(truths, said)[0]),
    }


def facts_of(caption: str) -> list[Fact]:
    """What a caption says of each thing, in its order: `a red star top left, a blue disk center` are two facts.

    A comma or the word `a` begins a thing, and so does a word of a color, shape or place that the thing has already. Words that scenes'
    captions do not have are passed over: `a green dog` is a fact with a color alone, and `a dog` an empty one.
    """
    facts = []
    for words in filter(None, map(split, _BEGINS.split(caption))):
        facts.append(_NOTHING)
        for word in words:
            if slot := _SLOTS.get(word):
                had = getattr(facts[-1], slot)
                now = _PLACES.get(frozenset((*had.split(), word))) if had else word
                if now is None:
                    facts.append(_NOTHING)
                facts[-1] = facts[-1]._replace(**{slot: now or word})
    return facts


def exact_set(candidates: Sequence[str], references: References) -> float:
    """Share of captions that say of a scene all that is so, in any order, and nothing else.

    Args:
        candidates: One caption for each scene.
        references: The caption of each scene.

    Returns:
        From 0 to 1.

    Raises:
        OptionError: If there are no candidates, not as many references, or a reference is no scene's caption.
    """
    pairs = _facts(candidates, references)
    return sum(Counter(told) == Counter(truth) for told, truth in pairs) / len(pairs)


def slot_accuracy(candidates: Sequence[str], references: References) -> dict[str, float]:
    """What captions get right of scenes: the colors, shapes and places of their things, and how many there are.

    Things of candidate and reference are matched one to one so that as many slots as can be agree; among such matchings as many colors,
    then shapes.

    Args:
        candidates: One caption for each scene.
        references: The caption of each scene; time and memory grow as `2^n` for its n things, of which a scene has up to 7.

    Returns:
        `color`, `shape` and `place`: share of the things of all scenes with that slot right; `count`: share of captions with the right
        number of things. From 0 to 1.

    Raises:
        OptionError: If there are no candidates, not as many references, or a reference is no scene's caption.
    """
    pairs = _facts(candidates, references)
    right = [_agreeing(told, truth) for told, truth in pairs]
    things = sum(len(truth) for _, truth in pairs)
    shares = {slot: sum(numbers) / things for slot, numbers in zip(Fact._fields, zip(*right, strict=True), strict=True)}
    return shares | {"count": sum(len(told) == len(truth) for told, truth in pairs) / len(pairs)}


def _agreeing(told: Sequence[Fact], truth: Sequence[Fact]) -> tuple[int, ...]:
    """How many colors, shapes and places agree in the best matching."""
    best = {0: (0, 0, 0, 0)}  # by which of the truth are taken, one bit each: slots that agree, then those of each kind
    for fact in told:
        gains = [tuple(a == b for a, b in zip(fact, thing, strict=True)) for thing in truth]
        for taken, (slots, *kinds) in list(best.items()):
            for number, gain in enumerate(gains):
                if not taken >> number & 1:
                    colors, shapes, places = (old + new for old, new in zip(kinds, gain, strict=True))
                    reached = slots + sum(gain), colors, shapes, places
                    best[taken | 1 << number] = max(best.get(taken | 1 << number, reached), reached)
    return max(best.values())[1:]


def _facts(candidates: Sequence[str], references: References) -> list[tuple[list[Fact], list[Fact]]]:
    """Facts of each candidate and its reference.

    Raises:
        OptionError: If they cannot be paired, or a reference is no scene's caption.
    """
    pairs = []
    for said, truths in _paired(candidates, references):
        truth = [fact for caption in truths for fact in facts_of(caption)]
        if len(truths) != 1 or not truth or not all(map(all, truth)):
            raise OptionError(
                f"the reference must be one scene's caption, as 'a red star top left, a blue disk center', got {list(truths)}. "
                "Use caption_scores for other captions."
            )
        pairs.append((facts_of(said), truth))
    return pairs


def _paired(candidates: Sequence[str], references: References) -> list[tuple[str, Sequence[str]]]:
    """Each candidate with its references.

    Raises:
        OptionError: If there are no candidates, not as many references, or a reference has no words.
    """
    if not candidates or len(candidates) != len(references):
        raise OptionError(
            f"there must be one or more candidates and references for each, got {len(candidates)} candidates and references for "
            f"{len(references)}. Give one candidate for each picture, in the order of the references."
        )
    several = [(told,) if isinstance(told, str) else told for told in references]
    for number, told in enumerate(several):
        if not told or not all(map(split, told)):
            raise OptionError(
                f"each picture must have references with words, got {list(told)} for picture {number}. Leave it out."
            )
    return list(zip(candidates, several, strict=True))


def _plain(caption: str) -> str:
    return " ".join(split(caption))
