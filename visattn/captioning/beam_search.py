"""The likeliest captions of pictures, by beam search.

In: a captioner and what its encoder made of B pictures. Out: words by number, their log-likelihood, and where hard attention looked.
All hypotheses of all pictures take their next word in one step. What words mean is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from visattn._support.modes import evaluating
from visattn.errors import ModelError
from visattn.models.show_attend_tell import END, UNKNOWN, Seen, ShowAttendTell
from visattn.nn import HardAttention
from visattn.nn.shapes import at_least


class Found(NamedTuple):
    """A caption.

    Attributes:
        words: Numbers, without `END`.
        score: The sum of log-probabilities, that of `END` included, in nats; a mean over steps where it was normalized.
        finished: Whether `END` was taken; else the caption was cut off.
        places: The place that hard attention took at each step, that of `END` included; empty where none was taken.
    """

    words: list[int]
    score: float
    finished: bool
    places: list[int]


class _Live(NamedTuple):
    """Hypotheses that are not over, one a row; those of a picture stand together, the best first."""

    picture: Tensor  # (R,)
    score: Tensor  # (R,)
    words: Tensor  # (R, t)
    places: Tensor  # (R, t) or (R, 0)

    def at(self, rows: Tensor) -> _Live:
        return _Live(*(field[rows] for field in self))

    def found(self, *, normalize: bool) -> Iterator[tuple[int, Found]]:
        """Each with its picture."""
        steps = max(self.words.shape[1], 1) if normalize else 1
        for picture, score, words, places in zip(*(field.tolist() for field in self), strict=True):
            finished = words[-1:] == [END]
            yield picture, Found(words[:-1] if finished else words, score / steps, finished, places)


def search(
    model: ShowAttendTell,
    seen: Seen,
    *,
    beam: int = 5,
    longest: int = 50,
    how: str | None = None,
    normalize: bool = False,
    unknown: bool = False,
) -> list[Found]:
    """The best caption of each picture; see `search_all`."""
    found = search_all(model, seen, beam=beam, longest=longest, how=how, normalize=normalize, unknown=unknown, best_only=True)
    return [one for one, *_ in found]


@torch.inference_mode()
def search_all(
    model: ShowAttendTell,
    seen: Seen,
    *,
    beam: int = 5,
    longest: int = 50,
    how: str | None = None,
    normalize: bool = False,
    unknown: bool = False,
    best_only: bool = False,
) -> list[list[Found]]:
    """Beam search: the captions of each picture that were likeliest at every step, the best first.

    A picture has `beam` slots. At each step all its hypotheses are continued by all words, and the likeliest of these, as many as there
    are slots, are the next hypotheses. One that took `END` is over and keeps its slot, so the others become fewer; the search ends when
    there is none. Among equals the lowest word wins, then the better parent.

    Args:
        model: What tells; in evaluation mode for the while.
        seen: What `model.encode` gave of B pictures.
        beam: Slots of a picture, 1 or more; 1 takes the likeliest word at each step. There may be more than words.
        longest: Most steps, that of `END` among them, 1 or more. What is not over then is cut off, and given only where nothing of the
            picture was over.
        how: What hard attention takes, see `visattn.nn.HardAttention`; by default the likeliest place. Each hypothesis draws its own,
            and what it draws depends on what else is in the batch.
        normalize: Divide scores by their steps, once all are found: the words stay, the order may change. Without, short captions win.
        unknown: Whether `UNKNOWN` may be told. Where it may not, the probabilities of other words stay as they are.
        best_only: Give the best of each picture alone. It is found sooner: scores only fall, so a picture is done as soon as one that is
            over has a score that no other has any more; not where scores are normalized.

    Returns:
        For each picture 1 to `beam` captions.

    Raises:
        OptionError: If the beam or the longest length is below 1.
        ModelError: If the model gives no numbers.

    Reference:
        Xu et al., "Show, Attend and Tell", ICML 2015, arXiv:1502.03044, and the authors' code, which takes unknown words too and gives
        what was cut off beside what was over.
    """
    at_least("the beam", beam)
    at_least("the longest length", longest)
    count, device = len(seen.features), seen.features.device
    found: list[list[Found]] = [[] for _ in range(count)]
    slots = torch.full((count,), beam, device=device)
    score = torch.zeros(count, device=device, dtype=torch.promote_types(seen.features.dtype, torch.float32))
    none = torch.empty(count, 0, dtype=torch.long, device=device)
    live, lead = _Live(torch.arange(count, device=device), score, none, none), torch.full_like(score, -torch.inf)
    places_taken = isinstance(model.look, HardAttention) and (how or model.look.evaluation) != "expected"
    with evaluating(model):
        state, before, here = model.begin(seen), torch.full_like(live.picture, model.start), seen
        for _ in range(longest):
            if not len(before):
                break
            step, state = model.step(here, state, before, how=how)
            total = live.score[:, None] + step.logits.log_softmax(1, score.dtype)
            if not unknown:
                total[:, UNKNOWN] = -torch.inf
            parent, word = _best(total, live.picture, slots)
            places = torch.cat((live.places, step.taken.argmax(1, keepdim=True)), 1) if places_taken else live.places
            words = torch.cat((live.words[parent], word[:, None]), 1)
            then, over = _Live(live.picture[parent], total[parent, word], words, places[parent]), word == END
            for picture, hypothesis in then.at(over).found(normalize=normalize):
                found[picture].append(hypothesis)
            slots -= then.picture[over].bincount(minlength=count)
            stay = _ahead(then, over, lead) if best_only and not normalize else ~over
            then, parent = then.at(stay), parent[stay]
            state, before = (state[0][parent], state[1][parent]), then.words[:, -1]
            if not torch.equal(then.picture, live.picture):  # else the features stand where they should
                here = Seen(seen.features[then.picture], seen.keys[then.picture], seen.grid)
            live = then
    nothing = [not hypotheses for hypotheses in found]
    for picture, hypothesis in live.found(normalize=normalize):
        if nothing[picture]:
            found[picture].append(hypothesis)
    if not all(found):
        raise ModelError(
            "the captioner must give log-probabilities, got NaN for every word. Its weights or the pictures are damaged."
        )
    ranked = [sorted(hypotheses, key=lambda one: -one.score) for hypotheses in found]
    return [hypotheses[:1] for hypotheses in ranked] if best_only else ranked


def _best(total: Tensor, picture: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Parent and word of each picture's likeliest continuations, as many as it has slots.

    Sorted by picture, score, word and parent. No picture needs more of one parent than it has slots, so few are sorted at all.

    Args:
        total: `(R, words)`.
        picture: `(R,)`.
        slots: Of each picture.
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
    """Those that are not over, of pictures where one of them may still win; brings `lead`, the best score that is over, up to date."""
    lead.scatter_reduce_(0, live.picture[over], live.score[over], "amax")
    best = torch.full_like(lead, -torch.inf).scatter_reduce(0, live.picture[~over], live.score[~over], "amax")
    return ~over & (best > lead)[live.picture]
