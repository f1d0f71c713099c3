"""Image captioning with attention maps for each word: loading captioners, beam search, and caption metrics."""

from typing import TYPE_CHECKING

from visattn._support.faces import face

if TYPE_CHECKING:
    from visattn.captioning.beam_search import Hypothesis as Hypothesis, search as search, search_all as search_all
    from visattn.captioning.captioner import Caption as Caption, Captioner as Captioner, load_captioner as load_captioner
    from visattn.captioning.captioner_folders import CaptionerBlueprint as CaptionerBlueprint, save_captioner as save_captioner
    from visattn.captioning.generated import GeneratedText as GeneratedText, generate_text as generate_text
    from visattn.captioning.metrics import (
        caption_scores as caption_scores,
        exact_set as exact_set,
        facts_of as facts_of,
        slot_accuracy as slot_accuracy,
    )
    from visattn.captioning.vocabulary import Vocabulary as Vocabulary, split as split
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            ".beam_search": ["Hypothesis", "search", "search_all"],
            ".captioner": ["Caption", "Captioner", "load_captioner"],
            ".captioner_folders": ["CaptionerBlueprint", "save_captioner"],
            ".generated": ["GeneratedText", "generate_text"],
            ".metrics": ["caption_scores", "exact_set", "facts_of", "slot_accuracy"],
            ".vocabulary": ["Vocabulary", "split"],
        },
    )
