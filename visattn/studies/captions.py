"""A caption as a study: its words are queries that attend to the image."""

from __future__ import annotations

from visattn._support.typed import typed
from visattn.captioning import Caption
from visattn.core.operators import MatrixOperator
from visattn.core.records import AttentionRecord, Recording, TokenLayout
from visattn.core.records.layouts import WORDS
from visattn.errors import OptionError
from visattn.studies.sequence import Study
from visattn.studies.views import View

_LAYER = "decoder"


@typed()
def caption_study(caption: Caption) -> Study:
    """Return the study of a caption: one attention call with a row for each word, and the words as texts of the queries.

    Args:
        caption: A caption of `Captioner.generate` or `Captioner.score`.

    Returns:
        A study of one view.

    Raises:
        OptionError: If the caption has no words.
    """
    if not caption.words:
        raise OptionError("the caption has no words, so there is nothing to show. Choose another photo or captioner.")
    shown = caption.map
    names = tuple(f"word{number}" for number in range(len(caption.words)))
    words = TokenLayout(WORDS, names, (), shown.layout.box)
    weights = shown.values.flatten(1)[None, None]
    record = AttentionRecord(_LAYER, 0, 0, "cross", MatrixOperator(weights), words, shown.layout)
    provenance = shown.provenance.but(geometry=caption.geometry)
    recording = Recording([record], input_size=caption.geometry.input, readout="", provenance=provenance)
    return Study((View(caption.photo, caption.geometry, recording, texts=dict(zip(names, caption.words, strict=True))),))
