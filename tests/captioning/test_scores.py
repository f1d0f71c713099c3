"""Caption metrics equal simple implementations of the papers; facts of captions equal the facts of the scenes."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations, permutations
from math import exp, log, sqrt

import pytest
from hypothesis import given, settings, strategies as st

from visattn.captioning.metrics import caption_scores, exact_set, facts_of, slot_accuracy
from visattn.data.scenes import COLORS, Scenes
from visattn.errors import MissingExtra, OptionError

Corpus = tuple[list[str], list[list[str]]]
Things = list[tuple[str, str, str]]
GRAMMAR = ["a", "red", "blue", "star", "disk", "top", "bottom", "left", "right", "center", "dog", ","]
SCORES = ["BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "CIDEr-D", "ROUGE-L"]
ABOVE, BELOW = 1e-15, 1e-9  # pycocoevalcap adds these to n-gram counts to avoid division by 0


def corpus(seed: int, pairs: int = 200, longest: int = 8) -> Corpus:
    """Draw captions over six words with 1 to 5 references; one in ten is empty, one in five is a copy of a reference."""
    draw = random.Random(seed)
    words = ["the", "cat", "sat", "on", "a", "mat"]

    def caption() -> str:
        return " ".join(draw.choice(words) for _ in range(draw.randint(1, longest)))

    references = [[caption() for _ in range(draw.randint(1, 5))] for _ in range(pairs)]
    return [draw.choice(["", told[-1], told[0], *(caption() for _ in range(7))]) for told in references], references


def runs(caption: str, length: int) -> list[tuple[str, ...]]:
    words = caption.split()
    return [tuple(words[start : start + length]) for start in range(len(words) - length + 1)]


def bleu(candidates: list[str], references: list[list[str]], order: int) -> float:
    """Compute BLEU as in Papineni et al. 2002, section 2."""
    product = Fraction(1)
    for length in range(1, order + 1):
        right = total = 0
        for candidate, told in zip(candidates, references, strict=True):
            ours = runs(candidate, length)
            for run in set(ours):
                right += min(ours.count(run), max(runs(reference, length).count(run) for reference in told))
            total += len(ours)
        if right == 0:
            return 0.0
        product *= Fraction(right, total)
    ours_long = theirs_long = 0
    for candidate, told in zip(candidates, references, strict=True):
        long = len(candidate.split())
        ours_long += long
        lengths = sorted(len(reference.split()) for reference in told)
        theirs_long += min(lengths, key=lambda one: abs(one - long))
    penalty = 1.0 if ours_long > theirs_long else exp(1 - Fraction(theirs_long, ours_long))
    return penalty * exp(log(product) / order)


def rouge(candidates: list[str], references: list[list[str]]) -> float:
    """Compute ROUGE-L as in Lin 2004, section 3, with beta = 1.2."""

    def longest_common(first: list[str], second: list[str]) -> int:
        for length in range(len(first), 0, -1):
            for kept in combinations(first, length):
                left = iter(second)
                if all(word in left for word in kept):
                    return length
        return 0

    total = 0.0
    for candidate, told in zip(candidates, references, strict=True):
        words = candidate.split()
        common = [longest_common(words, reference.split()) for reference in told]
        precision = max(one / len(words) for one in common) if words else 0
        recall = max(one / len(reference.split()) for one, reference in zip(common, told, strict=True))
        if precision and recall:
            total += (1 + 1.2**2) * precision * recall / (recall + 1.2**2 * precision)
    return total / len(candidates)


def cider(candidates: list[str], references: list[list[str]], *, clipped: bool = True, gaussian: bool = True) -> float:
    """Compute CIDEr-D as in Vedantam et al. 2015, sections 3 and 6; equation 1 with n-gram counts instead of their shares."""

    def rarity(run: tuple[str, ...]) -> float:
        pictures = sum(any(run in runs(reference, len(run)) for reference in told) for told in references)
        return log(len(references) / max(1, pictures))

    known: dict[tuple[str, ...], float] = {}
    total = 0.0
    for candidate, told in zip(candidates, references, strict=True):
        for reference in told:
            for length in range(1, 5):
                ours, theirs = runs(candidate, length), runs(reference, length)
                product = our_norm = their_norm = 0.0
                for run in {*ours, *theirs}:
                    if run not in known:
                        known[run] = rarity(run)
                    our, their = ours.count(run) * known[run], theirs.count(run) * known[run]
                    product += (min(our, their) if clipped else our) * their
                    our_norm, their_norm = our_norm + our**2, their_norm + their**2
                if our_norm and their_norm:
                    apart = len(candidate.split()) - len(reference.split())
                    penalty = exp(-(apart**2) / (2 * 6**2)) if gaussian else 1.0
                    total += 10 * penalty * product / sqrt(our_norm * their_norm) / 4 / len(told)
    return total / len(candidates)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("longest", [4, 12], ids=["short", "long"])
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_bleu_matches_the_paper(order: int, longest: int, seed: int) -> None:
    candidates, references = corpus(seed, longest=longest)
    expected = bleu(candidates, references, order)
    assert expected > 0.05
    assert caption_scores(candidates, references)[f"BLEU-{order}"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_bleu_of_single_captions_matches_the_paper_up_to_package_constants(order: int) -> None:
    zeros = 0
    for candidate, told in zip(*corpus(2, pairs=200), strict=True):
        expected, found = bleu([candidate], [told], order), caption_scores([candidate], [told])[f"BLEU-{order}"]
        if expected:
            assert found == pytest.approx(expected, abs=1e-6)
        else:
            zeros += 1
            most = ABOVE if len(candidate.split()) >= order else ABOVE / BELOW
            assert 0 <= found <= most ** (1 / order)
    assert 10 < zeros < 190


@pytest.mark.parametrize("seed", [3, 4])
def test_rouge_matches_the_paper(seed: int) -> None:
    candidates, references = corpus(seed)
    expected = rouge(candidates, references)
    assert caption_scores(candidates, references)["ROUGE-L"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("longest", [8, 16])
def test_cider_matches_cider_d(longest: int) -> None:
    candidates, references = corpus(5, pairs=30, longest=longest)
    expected = cider(candidates, references)
    others = [
        cider(candidates, references, clipped=clipped, gaussian=gaussian)
        for clipped, gaussian in ((False, True), (True, False), (False, False))
    ]
    assert caption_scores(candidates, references)["CIDEr-D"] == pytest.approx(expected, abs=1e-6)
    assert min(abs(expected - other) for other in others) > 1e-3


def test_bleu_clips_word_counts_to_one_reference() -> None:
    found = caption_scores(["the the the the the the the"], [["The cat is on the mat.", "There is a cat on the mat."]])
    assert found["BLEU-1"] == pytest.approx(2 / 7, abs=1e-8)


@pytest.mark.parametrize(
    ("references", "penalty"),
    [(["b b", "a a a b"], 1), (["a a a b"], exp(1 - 4 / 3)), (["a", "a a a b"], exp(1 - 4 / 3)), (["a a a b b", "a a"], 1)],
    ids=["shorter of two equally near", "one", "nearest, not shortest", "nearest, not longest"],
)
def test_brevity_penalty_uses_the_reference_closest_in_length(references: list[str], penalty: float) -> None:
    found = caption_scores(["a a b"], [references])["BLEU-1"]
    assert found == pytest.approx(penalty * bleu(["a a b"], [[*references, "a a b"]], 1), abs=1e-8)


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [("police killed the gunman", 1), ("police kill the gunman", 3 / 4), ("the gunman kill police", 1 / 2)],
)
def test_rouge_of_the_example_in_the_paper(candidate: str, expected: float) -> None:
    assert caption_scores([candidate], [["Police killed the gunman!"]])["ROUGE-L"] == pytest.approx(expected)


def test_references_as_candidates_get_the_best_scores() -> None:
    captions = ["a red star top left", "one green ring on the right"]
    found = caption_scores(captions, captions)
    assert list(found) == SCORES
    assert [found[name] for name in SCORES] == pytest.approx([1, 1, 1, 1, 10, 1], abs=1e-6)
    assert all(type(score) is float for score in found.values())


def test_cider_counts_missing_n_grams_of_short_captions_as_wrong() -> None:
    assert caption_scores(["a red star", "the dog runs"], ["a red star", "the dog runs"])["CIDEr-D"] == pytest.approx(7.5)


def test_cider_of_one_image_is_zero() -> None:
    assert caption_scores(["a red star top left"], ["a red star top left"])["CIDEr-D"] == 0


def test_captions_without_words_score_zero() -> None:
    found = caption_scores(["", " ,.! "], [["a red star"], ["a blue disk", "a disk"]])
    assert found == dict.fromkeys(SCORES, 0.0)


def test_caption_without_words_counts_as_a_mismatch() -> None:
    references = ["a red star top left", "one green ring on the right"]
    found = caption_scores(["a red star top left", ""], references)
    assert found["ROUGE-L"] == pytest.approx(0.5)
    assert found["CIDEr-D"] == pytest.approx(5)
    assert found["BLEU-1"] == pytest.approx(exp(1 - 11 / 5), abs=1e-6)


def test_case_and_punctuation_are_ignored() -> None:
    candidates, references = corpus(6, pairs=20)
    assert caption_scores(candidates, references) == caption_scores(
        [f" {one.upper()}." for one in candidates], [[one.replace(" ", ", ") for one in told] for told in references]
    )


@pytest.mark.parametrize("seed", [8, 21, 25])
def test_scores_do_not_depend_on_order(seed: int) -> None:
    candidates, references = corpus(seed, pairs=100)
    draw = random.Random(seed)
    mixed = [(one, draw.sample(told, len(told))) for one, told in zip(candidates, references, strict=True)]
    draw.shuffle(mixed)
    assert caption_scores([one for one, _ in mixed], [told for _, told in mixed]) == caption_scores(candidates, references)


def test_string_counts_as_one_reference() -> None:
    candidates, references = corpus(10, pairs=20)
    first = [told[0] for told in references]
    assert caption_scores(candidates, first) == caption_scores(candidates, [(one,) for one in first])


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    caption_scores(*corpus(11, pairs=5))
    slot_accuracy(["a red star top"], ["a red star left"])
    assert capfd.readouterr() == ("", "")


def test_missing_package_gives_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visattn._support.extras.find_spec", lambda _: None)
    expected = (
        r"^scoring captions needs pycocoevalcap, which is not installed\. "
        r'In the source folder of visattn, run: pip install -e "\.\[caption-metrics\]"$'
    )
    with pytest.raises(MissingExtra, match=expected):
        caption_scores(["a red star"], ["a red star"])


def test_scores_of_scenes_need_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visattn._support.extras.find_spec", lambda _: None)
    assert (
        exact_set(["a red star top"], ["a red star top"]) == slot_accuracy(["a red star top"], ["a red star top"])["count"] == 1
    )


@pytest.mark.parametrize("score", [caption_scores, exact_set, slot_accuracy])
@pytest.mark.parametrize(
    ("candidates", "references", "message"),
    [
        ([], [], "one or more candidates, and references for each, got 0 candidates and references for 0"),
        ([], ["a red star top"], "got 0 candidates and references for 1"),
        (["a red star top"] * 2, ["a red star top"], "got 2 candidates and references for 1"),
        (["a red star top"] * 2, ["a red star top", []], r"got \[\] for image 1"),
        (["a red star top"], [["a red star top", " ."]], r"got \['a red star top', ' \.'\] for image 0"),
    ],
    ids=["none", "no candidates", "fewer references", "no reference", "no words"],
)
def test_candidates_without_matching_references_are_refused(
    score: Callable[..., object], candidates: list[str], references: list[str | list[str]], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        score(candidates, references)


@pytest.mark.parametrize("score", [exact_set, slot_accuracy])
@pytest.mark.parametrize(
    "reference",
    ["a man on a horse", "a red star", "a red star top, a dog", "a", ["a red star top", "a red star top"]],
    ids=["no scene", "no place", "unknown object", "nothing", "two"],
)
def test_references_that_do_not_describe_a_scene_are_refused(score: Callable[..., object], reference: str | list[str]) -> None:
    with pytest.raises(
        OptionError, match="must be the caption of a scene, such as 'a red star top left, a blue disk center', got"
    ):
        score(["a red star top"], [reference])


@pytest.mark.parametrize(
    ("caption", "facts"),
    [
        ("a red star top left, a blue disk center", [("red", "star", "top left"), ("blue", "disk", "center")]),
        ("a red star top left a blue disk center", [("red", "star", "top left"), ("blue", "disk", "center")]),
        ("red star top left, blue disk center", [("red", "star", "top left"), ("blue", "disk", "center")]),
        ("red star top blue disk bottom", [("red", "star", "top"), ("blue", "disk", "bottom")]),
        ("A Red STAR left top.", [("red", "star", "top left")]),
        ("top left star red", [("red", "star", "top left")]),
        ("a green dog", [("green", "", "")]),
        ("a ring", [("", "ring", "")]),
        ("an orange star an orange disk", [("orange", "star", ""), ("orange", "disk", "")]),
        ("a thing right", [("", "", "right")]),
        ("a dog, a cat", [("", "", "")] * 2),
        ("A dog A cat", [("", "", "")] * 2),
        ("dog, cat", [("", "", "")] * 2),
        ("a red, star top", [("red", "", ""), ("", "star", "top")]),
        ("a <unknown> star top", [("", "star", "top")]),
        ("a red star top a", [("red", "star", "top")]),
        ("a red red star top", [("red", "", ""), ("red", "star", "top")]),
        ("a red star top bottom", [("red", "star", "top"), ("", "", "bottom")]),
        ("a red star top top", [("red", "star", "top")]),
        ("", []),
        (" , a, ", []),
    ],
)
def test_facts_of_handwritten_captions(caption: str, facts: Things) -> None:
    assert [tuple(fact) for fact in facts_of(caption)] == facts


@pytest.mark.parametrize("separator", [", ", " "], ids=["commas", "no commas"])
def test_facts_of_scene_captions_match_the_scene(separator: str) -> None:
    scenes = Scenes(60, (64, 64), seed=5, distractors=(0, 6))
    for scene in map(scenes.scene, range(len(scenes))):
        parts = scene.caption.split(", ")
        random.Random(0).shuffle(parts)
        truth = sorted((thing.color, thing.shape, thing.place) for thing in scene.things)
        assert sorted(facts_of(separator.join(parts))) == truth


@settings(max_examples=150, deadline=None)
@given(st.text() | st.lists(st.sampled_from(GRAMMAR)).map(" ".join))
def test_any_text_can_be_scored(caption: str) -> None:
    for fact in facts_of(caption):
        assert fact.color in ("", *COLORS)
        assert slot_accuracy([caption], ["a red star top left"])["count"] == (len(facts_of(caption)) == 1)


def scenes_told(seed: int, pairs: int, most: int = 4) -> tuple[list[Things], list[Things]]:
    """Draw objects of candidates and of the truth, of few kinds so that many agree. Candidates may have blanks."""
    draw = random.Random(seed)
    kinds = ["red", "blue"], ["star", "disk"], ["top left", "center", "right"]

    def things(fewest: int, blank: float) -> Things:
        return [
            ("", "", "") if draw.random() < blank else (draw.choice(kinds[0]), draw.choice(kinds[1]), draw.choice(kinds[2]))
            for _ in range(draw.randint(fewest, most))
        ]

    truth = [things(1, 0) for _ in range(pairs)]
    told = [draw.sample(one, len(one)) if draw.random() < 0.3 else things(0, 0.2) for one in truth]
    return told, truth


def written(things: Things) -> str:
    return ", ".join(f"a {' '.join(filter(None, thing)) or 'dog'}" for thing in things)


def most_that_agree(told: Things, truth: Things) -> list[int]:
    """Count the agreeing colors, shapes and places, the best of all matchings."""
    found = []
    nobody = [("?", "?", "?")] * len(truth)
    for way in set(permutations(told + nobody, len(truth))):
        kinds = [sum(one[kind] == thing[kind] for one, thing in zip(way, truth, strict=True)) for kind in range(3)]
        found.append([sum(kinds), *kinds])
    return max(found)[1:]


@pytest.mark.parametrize("seed", range(4))
def test_scores_of_scenes_equal_brute_force(seed: int) -> None:
    told, truth = scenes_told(seed, pairs=40)
    things = sum(map(len, truth))
    agreeing = [most_that_agree(*pair) for pair in zip(told, truth, strict=True)]
    shares = [sum(one[kind] for one in agreeing) / things for kind in range(3)]
    right = sum(len(a) == len(b) for a, b in zip(told, truth, strict=True)) / 40
    exact = sum(any(list(way) == b for way in permutations(a)) for a, b in zip(told, truth, strict=True)) / 40
    said, captions = [written(one) for one in told], [[written(one)] for one in truth]
    assert slot_accuracy(said, captions) == pytest.approx(
        dict(zip(("color", "shape", "place", "count"), (*shares, right), strict=True))
    )
    assert exact_set(said, captions) == pytest.approx(exact)
    assert 0.1 < exact < min(shares) < 1


def test_matching_maximizes_the_number_of_correct_slots() -> None:
    found = slot_accuracy(["a red star left, a red disk top"], ["a red star top, a blue star left"])
    assert found == {"color": 0.5, "shape": 0.5, "place": 1, "count": 1}


def test_ties_between_matchings_prefer_more_correct_colors() -> None:
    found = slot_accuracy(["a blue star left, a red disk left"], ["a red star top"])
    assert found == {"color": 1, "shape": 0, "place": 0, "count": 0}


@pytest.mark.parametrize("things", [3, 7])
def test_order_of_things_is_irrelevant(things: int) -> None:
    draw = random.Random(things)
    truth, told = (
        [(draw.choice(["red", "blue"]), "star", draw.choice(["top", "left"])) for _ in range(things)] for _ in range(2)
    )
    expected = slot_accuracy([written(told)], [written(truth)])
    mixed = [slot_accuracy([written(draw.sample(told, things))], [written(draw.sample(truth, things))]) for _ in range(10)]
    assert mixed == [expected] * 10


@pytest.mark.parametrize("score", [exact_set, lambda a, b: min(slot_accuracy(a, b).values())], ids=["exact", "slots"])
def test_correct_captions_get_a_perfect_score(score: Callable[[list[str], list[str]], float]) -> None:
    scenes = Scenes(20, (64, 64), seed=6, distractors=(0, 6))
    captions = [scenes.scene(index).caption for index in range(20)]
    assert score([", ".join(caption.split(", ")[::-1]) for caption in captions], captions) == 1
    assert score(captions[1:] + captions[:1], captions) < 1


@pytest.mark.parametrize(
    ("candidate", "exact", "count"),
    [
        ("a red star top, a red star top", 1, 1),
        ("a red star top", 0, 0),
        ("a red star top, a red star top, a red star top", 0, 0),
        ("a red star top, a red star left", 0, 1),
        ("", 0, 0),
    ],
    ids=["all", "one of two identical", "one too many", "one wrong", "nothing"],
)
def test_identical_objects_are_counted(candidate: str, exact: int, count: int) -> None:
    truth = ["a red star top, a red star top"]
    assert exact_set([candidate], truth) == exact
    assert slot_accuracy([candidate], truth)["count"] == count


def test_empty_caption_scores_zero() -> None:
    assert slot_accuracy([""], ["a red star top"]) == {"color": 0, "shape": 0, "place": 0, "count": 0}


def test_very_long_caption_is_scored() -> None:
    found = slot_accuracy(["a red star top left " * 60], [", ".join(["a red star top left"] * 6 + ["a blue disk center"])])
    assert found == pytest.approx({"color": 6 / 7, "shape": 6 / 7, "place": 6 / 7, "count": 0})
