"""Image captioning with attention maps for each word: loading captioners, beam search, and caption metrics."""

from visattn.captioning.beam_search import Hypothesis, search, search_all
from visattn.captioning.captioner import Caption, Captioner, load_captioner
from visattn.captioning.generated import GeneratedText, generate_text
from visattn.captioning.scores import caption_scores, exact_set, facts_of, slot_accuracy
from visattn.captioning.vocabulary import Vocabulary, split

__all__ = [
    "Caption",
    "Captioner",
    "GeneratedText",
    "Hypothesis",
    "Vocabulary",
    "caption_scores",
    "exact_set",
    "facts_of",
    "generate_text",
    "load_captioner",
    "search",
    "search_all",
    "slot_accuracy",
    "split",
]
