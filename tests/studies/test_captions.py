"""Captions as studies: a row for each word, equal to its map."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.captioning.test_captioner import photos
from tests.captioning.test_folder import tiny
from visattn.captioning import Caption
from visattn.errors import OptionError
from visattn.studies import caption_study, load_study


@pytest.fixture
def caption() -> Caption:
    """Provide a caption of three words."""
    found = tiny("soft").score(photos(1), ["a red disc"])[0]
    assert len(found.words) == 3
    return found


def test_each_word_has_the_row_of_its_map(caption: Caption, tmp_path: Path) -> None:
    view = load_study(caption_study(caption).save(tmp_path / "caption.attn"))[0]
    record = view.recording[0]
    assert record.kind == "cross"
    assert [view.texts[name] for name in record.queries.prefix] == list(caption.words)
    assert torch.equal(record.operator.dense()[0, 0], caption.map.values.flatten(1))
    shown = view.explain("attention", query="word:1")
    assert torch.equal(shown.map.values.squeeze(0), caption.map.values[1])
    assert view.provenance.image == caption.map.provenance.image


def test_a_caption_without_words_is_refused(caption: Caption) -> None:
    with pytest.raises(OptionError, match="no words"):
        caption_study(replace(caption, words=()))
