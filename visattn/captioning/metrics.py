"""Caption metrics: agreement with reference captions, and, for generated scenes, whether the statements are true.

The inputs are captions as text, one candidate per image. The metrics are computed over all images. BLEU, CIDEr-D and ROUGE-L come from
pycocoevalcap, as on COCO's server, but words are split as in a captioner's vocabulary. METEOR and SPICE need Java and are not offered.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from visattn._support.extras import need
from visattn.captioning.vocabulary import split
from visattn.data.scenes import COLORS, DISTRACTORS, LABELS, SceneObject
from visattn.errors import OptionError

References = Sequence[str | Sequence[str]]  # for each image: one caption, or several


class Fact(NamedTuple):
    """Statement of a caption about one object. Missing parts are empty."""

    color: str
    shape: str
    place: str


_NOTHING = Fact("", "", "")
_THIRDS = 1 / 6, 1 / 2, 5 / 6
_PLACES = {  # from the words for a place, in any order, to its name
    frozenset(place.split()): place for place in (SceneObject("", "", "", (y, x), 0, 0).place for y in _THIRDS for x in _THIRDS)
}
_SLOTS = {
    **dict.fromkeys(COLORS, "color"),
    **dict.fromkeys((*LABELS, *DISTRACTORS), "shape"),
    **dict.fromkeys(frozenset().union(*_PLACES), "place"),
}
_BEGINS = re.compile(r",|\ban?\b", re.IGNORECASE)


def caption_scores(candidates: Sequence[str], references: References) -> dict[str, float]:
    """Compute BLEU, CIDEr-D and ROUGE-L of captions against references, with words as in a `Vocabulary`.

    `BLEU-n = min(1, exp(1 - r / c)) (p_1 ... p_n)^(1/n)`, over the whole corpus. `p_k` is the clipped k-gram precision: the share of the
    candidates' k-grams that occur in a reference, each counted at most as often as in one reference. `c` is the total length of the
    candidates. `r` is the total length of the references nearest in length, the shorter one on ties. There is no smoothing, but
    pycocoevalcap adds 1e-15 to each numerator and 1e-9 to each denominator. So a BLEU of 0 is reported as up to 0.0002, and as up to
    0.032 if no candidate has n words.

    `CIDEr-D` is 10 times a mean over the references and over n from 1 to 4. Averaged is the clipped cosine similarity of weighted n-gram
    counts, times `exp(-d^2 / 72)` if the lengths differ by d words. The weight of an n-gram is its inverse document frequency in the
    references, where an image is a document. Tables for COCO call it CIDEr. For a single image it is 0, because all weights are 0.

    `ROUGE-L = 2.44 P R / (R + 1.44 P)`, averaged over images. P and R are the length of the longest common subsequence divided by the
    length of the candidate and of the reference; each is the maximum over the references.

    All three depend on the tokenization, so compare only numbers with the same one. Published numbers for COCO use another: Penn Treebank.

    Args:
        candidates: One caption per image. A caption without words matches nothing.
        references: One or more captions with words per image; a string is a single caption. The results are bit-identical for any order
            of images and references.

    Returns:
        `BLEU-1` to `BLEU-4` and `ROUGE-L`, from 0 to 1, and `CIDEr-D`, from 0 to 10.

    Raises:
        OptionError: If there are no candidates, the numbers of candidates and references differ, or a reference has no words.
        MissingExtra: If pycocoevalcap is not installed.

    Reference:
        Papineni et al., "BLEU: a Method for Automatic Evaluation of Machine Translation", ACL 2002. Lin, "ROUGE: A Package for Automatic
        Evaluation of Summaries", ACL workshop 2004. Vedantam et al., "CIDEr: Consensus-based Image Description Evaluation", CVPR 2015,
        arXiv:1411.5726. Differs from the last: n-gram counts are clipped, while the paper clips counts divided by the caption's length.
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
    """Extract the facts that a caption states about each object, in order.

    For example, `a red star top left, an orange disk center` states two facts. A comma, `a` or `an` starts a new object. So does a color,
    shape or place if the object already has one. Words that do not occur in captions of scenes are ignored: `a green dog` is a fact with
    only a color, and `a dog` is an empty fact.
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
    """Compute the share of captions that state exactly the facts of their scene, in any order.

    Args:
        candidates: One caption per scene.
        references: True caption of each scene.

    Returns:
        Share from 0 to 1.

    Raises:
        OptionError: If there are no candidates, the numbers of candidates and references differ, or a reference is not the caption of a
            scene.
    """
    pairs = _facts(candidates, references)
    return sum(Counter(told) == Counter(truth) for told, truth in pairs) / len(pairs)


def slot_accuracy(candidates: Sequence[str], references: References) -> dict[str, float]:
    """Compute how many colors, shapes, places and object counts of scenes the captions get right.

    The objects of candidate and reference are matched one to one, to maximize the number of slots (color, shape, place) that agree. On
    ties, the matching with the most correct colors is used, then the most correct shapes.

    Args:
        candidates: One caption per scene.
        references: True caption of each scene. Time and memory grow as `2^n` with its n objects; a scene has up to 7.

    Returns:
        `color`, `shape` and `place`: share of the objects of all scenes for which this slot is correct. `count`: share of captions with
        the correct number of objects. All are from 0 to 1.

    Raises:
        OptionError: If there are no candidates, the numbers of candidates and references differ, or a reference is not the caption of a
            scene.
    """
    pairs = _facts(candidates, references)
    right = [_agreeing(told, truth) for told, truth in pairs]
    things = sum(len(truth) for _, truth in pairs)
    shares = {slot: sum(numbers) / things for slot, numbers in zip(Fact._fields, zip(*right, strict=True), strict=True)}
    return shares | {"count": sum(len(told) == len(truth) for told, truth in pairs) / len(pairs)}


def _agreeing(told: Sequence[Fact], truth: Sequence[Fact]) -> tuple[int, ...]:
    """Count the colors, shapes and places that agree in the best matching."""
    best = {0: (0, 0, 0, 0)}  # key: matched true objects as a bit mask; value: number of agreeing slots, then of each kind
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
    """Extract the facts of each candidate and its reference.

    Raises:
        OptionError: If they cannot be paired, or a reference is not the caption of a scene.
    """
    pairs = []
    for said, truths in _paired(candidates, references):
        truth = [fact for caption in truths for fact in facts_of(caption)]
        if len(truths) != 1 or not truth or not all(map(all, truth)):
            raise OptionError(
                f"a reference must be the caption of a scene, such as 'a red star top left, a blue disk center', got {list(truths)}. "
                "Use caption_scores for other captions."
            )
        pairs.append((facts_of(said), truth))
    return pairs


def _paired(candidates: Sequence[str], references: References) -> list[tuple[str, Sequence[str]]]:
    """Pair each candidate with its references.

    Raises:
        OptionError: If there are no candidates, the numbers of candidates and references differ, or a reference has no words.
    """
    if not candidates or len(candidates) != len(references):
        raise OptionError(
            f"expected one or more candidates, and references for each, got {len(candidates)} candidates and references for "
            f"{len(references)}. Give one candidate per image, in the order of the references."
        )
    several = [(told,) if isinstance(told, str) else told for told in references]
    for number, told in enumerate(several):
        if not told or not all(map(split, told)):
            raise OptionError(f"each image must have references with words, got {list(told)} for image {number}. Leave it out.")
    return list(zip(candidates, several, strict=True))


def _plain(caption: str) -> str:
    return " ".join(split(caption))
