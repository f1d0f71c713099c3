"""Captions, and where each of their words looked: captioners as folders, beam search, scores."""

from visattn.captioning.beam_search import Found, search, search_all
from visattn.captioning.captioner import Caption, Captioner, load_captioner
from visattn.captioning.scores import caption_scores, exact_set, facts_of, slot_accuracy
from visattn.captioning.vocabulary import Vocabulary, split

__all__ = [
    "Caption",
    "Captioner",
    "Found",
    "Vocabulary",
    "caption_scores",
    "exact_set",
    "facts_of",
    "load_captioner",
    "search",
    "search_all",
    "slot_accuracy",
    "split",
]
