"""Beam search for the most likely captions of images.

The inputs are a captioner and the encoded features of B images. The outputs are word indices, log-likelihoods, and the locations that
hard attention chose. Each decoder step extends all hypotheses of all images at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from visattn._support.checks import at_least
from visattn._support.modes import evaluating
from visattn.errors import ModelError
from visattn.models.show_attend_tell import END, UNKNOWN, EncodedImage, ShowAttendTell
from visattn.nn import HardAttention


class Hypothesis(NamedTuple):
    """Caption found by beam search.

    Attributes:
        words: Word indices, without `END`.
        score: Sum of log-probabilities in nats, including that of `END`. With length normalization, the mean over steps.
        finished: Whether the caption ends with `END`. Otherwise it was cut off.
        locations: Index of the location that hard attention chose at each step, including that of `END`. Empty if none was chosen.
    """

    words: list[int]
    score: float
    finished: bool
    locations: list[int]


class _Live(NamedTuple):
    """Unfinished hypotheses, one per row, grouped by image, the best of each image first."""

    picture: Tensor  # (R,)
    score: Tensor  # (R,)
    words: Tensor  # (R, t)
    locations: Tensor  # (R, t) or (R, 0)

    def at(self, rows: Tensor) -> _Live:
        return _Live(*(field[rows] for field in self))

    def found(self, *, length_normalization: bool) -> Iterator[tuple[int, Hypothesis]]:
        """Yield each hypothesis with the index of its image."""
        steps = max(self.words.shape[1], 1) if length_normalization else 1
        for picture, score, words, locations in zip(*(field.tolist() for field in self), strict=True):
            finished = words[-1:] == [END]
            yield picture, Hypothesis(words[:-1] if finished else words, score / steps, finished, locations)


def search(
    model: ShowAttendTell,
    encoded: EncodedImage,
    *,
    beam_size: int = 5,
    max_length: int = 50,
    sampling: str | None = None,
    length_normalization: bool = False,
    allow_unknown: bool = False,
) -> list[Hypothesis]:
    """Return the best caption of each image; see `search_all`."""
    found = search_all(
        model,
        encoded,
        beam_size=beam_size,
        max_length=max_length,
        sampling=sampling,
        length_normalization=length_normalization,
        allow_unknown=allow_unknown,
        best_only=True,
    )
    return [one for one, *_ in found]


@torch.inference_mode()
def search_all(
    model: ShowAttendTell,
    encoded: EncodedImage,
    *,
    beam_size: int = 5,
    max_length: int = 50,
    sampling: str | None = None,
    length_normalization: bool = False,
    allow_unknown: bool = False,
    best_only: bool = False,
) -> list[list[Hypothesis]]:
    """Run beam search and return the captions of each image, the best first.

    Each image has `beam_size` slots. In each step, all its hypotheses are extended by every word, and the most likely extensions fill
    the slots. A hypothesis that ends with `END` is finished and keeps its slot, so fewer slots remain for the others. The search ends
    when no slot is left. On ties, the lower word index wins, then the better parent.

    Args:
        model: Captioner. It is set to evaluation mode temporarily.
        encoded: Output of `model.encode` for B images.
        beam_size: Number of slots per image, 1 or more. 1 is greedy decoding. It may exceed the size of the vocabulary.
        max_length: Largest number of steps, including that of `END`, 1 or more. Hypotheses unfinished by then are cut off, and returned
            only for images without a finished one.
        sampling: Location that hard attention reads, see `visattn.nn.HardAttention`; by default the most likely one. Each hypothesis
            samples separately, and its samples depend on the rest of the batch.
        length_normalization: Whether to divide scores by the number of steps after the search. This changes the order of the captions,
            not their words. Without it, short captions are favored.
        allow_unknown: Whether `UNKNOWN` may be generated. If not, the probabilities of the other words are not renormalized.
        best_only: Whether to return only the best caption of each image. This is faster: scores only decrease, so the search for an image
            stops when no unfinished hypothesis exceeds its best finished one. It does not stop early with length normalization.

    Returns:
        For each image, 1 to `beam_size` captions.

    Raises:
        OptionError: If `beam_size` or `max_length` is below 1.
        ModelError: If the model returns NaN or -inf for every word.

    Reference:
        Xu et al., "Show, Attend and Tell", ICML 2015, arXiv:1502.03044, and the authors' code. Differs: that code also generates unknown
        words, and returns cut off hypotheses together with finished ones.
    """
    at_least("beam_size", beam_size)
    at_least("max_length", max_length)
    count, device = len(encoded.features), encoded.features.device
    found: list[list[Hypothesis]] = [[] for _ in range(count)]
    slots = torch.full((count,), beam_size, device=device)
    score = torch.zeros(count, device=device, dtype=torch.promote_types(encoded.features.dtype, torch.float32))
    none = torch.empty(count, 0, dtype=torch.long, device=device)
    live, lead = _Live(torch.arange(count, device=device), score, none, none), torch.full_like(score, -torch.inf)
    places_taken = isinstance(model.look, HardAttention) and (sampling or model.look.eval_mode) != "expected"
    with evaluating(model):
        state, previous, here = model.initial_state(encoded), torch.full_like(live.picture, model.start_token), encoded
        for _ in range(max_length):
            if not len(previous):
                break
            step, state = model.step(here, state, previous, sampling=sampling)
            total = live.score[:, None] + step.logits.log_softmax(1, score.dtype)
            if not allow_unknown:
                total[:, UNKNOWN] = -torch.inf
            parent, word = _best(total, live.picture, slots)
            locations = torch.cat((live.locations, step.taken.argmax(1, keepdim=True)), 1) if places_taken else live.locations
            words = torch.cat((live.words[parent], word[:, None]), 1)
            then, over = _Live(live.picture[parent], total[parent, word], words, locations[parent]), word == END
            for picture, hypothesis in then.at(over).found(length_normalization=length_normalization):
                found[picture].append(hypothesis)
            slots -= then.picture[over].bincount(minlength=count)
            stay = _ahead(then, over, lead) if best_only and not length_normalization else ~over
            then, parent = then.at(stay), parent[stay]
            state, previous = (state[0][parent], state[1][parent]), then.words[:, -1]
            if not torch.equal(then.picture, live.picture):  # otherwise the rows already match
                here = EncodedImage(encoded.features[then.picture], encoded.keys[then.picture], encoded.grid)
            live = then
    nothing = [not hypotheses for hypotheses in found]
    for picture, hypothesis in live.found(length_normalization=length_normalization):
        if nothing[picture]:
            found[picture].append(hypothesis)
    if not all(found):
        raise ModelError(
            "the captioner must give log-probabilities, got NaN or -inf for every word. Check its weights and the images."
        )
    ranked = [sorted(hypotheses, key=lambda one: -one.score) for hypotheses in found]
    return [hypotheses[:1] for hypotheses in ranked] if best_only else ranked


def _best(total: Tensor, picture: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Select each image's most likely extensions, as many as it has slots. Return their parents and words.

    They are sorted by image, score, word and parent. An image needs no more extensions of one parent than it has slots, so only these
    are sorted.

    Args:
        total: Scores of all extensions, `(R, words)`.
        picture: Image of each hypothesis, `(R,)`.
        slots: Free slots of each image, `(B,)`.
    """
    least = total.topk(min(int(slots.max()), total.shape[1])).values[:, -1:]
    word, parent = ((total >= least) & (total > -torch.inf)).T.nonzero(as_tuple=True)
    order = total[parent, word].sort(descending=True, stable=True).indices
    order = order[picture[parent[order]].sort(stable=True).indices]
    word, parent = word[order], parent[order]
    of = picture[parent]
    each = of.bincount(minlength=len(slots))
    rank = torch.arange(len(of), device=of.device) - (each.cumsum(0) - each)[of]
    kept = rank < slots[of]
    return parent[kept], word[kept]


def _ahead(live: _Live, over: Tensor, lead: Tensor) -> Tensor:
    """Return a mask of the unfinished hypotheses of images where one may still win.

    Update `lead`, the best finished score of each image, in place.
    """
    lead.scatter_reduce_(0, live.picture[over], live.score[over], "amax")
    best = torch.full_like(lead, -torch.inf).scatter_reduce(0, live.picture[~over], live.score[~over], "amax")
    return ~over & (best > lead)[live.picture]
