"""Captions with their maps: what is shown is what the model computed of these pixels, for the words and places that were chosen."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import visattn
from tests.captioning.test_folder import LOCAL, WORDS, plan, tiny
from visattn.captioning import Caption, Captioner, load_captioner, search
from visattn.captioning.folders import save
from visattn.data.scenes import Scenes
from visattn.errors import ImageError, LayoutError, OptionError, ShapeError
from visattn.geometry import Box
from visattn.models.show_attend_tell import ATTENTIONS, END, UNKNOWN, Attention
from visattn.provenance import Provenance

COUNT = 3


def photos(count: int = COUNT) -> list[Image.Image]:
    scenes = Scenes(count, seed=5)
    return [scenes[index][0] for index in range(count)]


def pixels(photo: Image.Image) -> Tensor:
    """A photo of the input's own size as the model sees it."""
    return torch.from_numpy((np.asarray(photo, dtype=np.float32) / 255 - 0.5) / 0.25).permute(2, 0, 1)[None]


def numbers(caption: Caption) -> list[int]:
    return [WORDS.index(word) if word in WORDS else UNKNOWN for word in caption.words] + [END] * caption.finished


@torch.no_grad()
def looped(captioner: Captioner, photo: Image.Image, words: list[int], places: list[int] | None = None) -> dict[str, list[Any]]:
    """Each step by itself: log-probability of the word, alpha and beta."""
    model = captioner.model.eval()
    seen = model.encode(pixels(photo))
    state, before = model.begin(seen), model.start
    out: dict[str, list[Any]] = {"log": [], "alpha": [], "beta": []}
    for t, word in enumerate(words):
        given = torch.tensor([places[t]]) if places else None
        step, state = model.step(seen, state, torch.tensor([before]), places=given)
        logits = step.logits[0].double().tolist()
        out["log"].append(logits[word] - math.log(sum(math.exp(one) for one in logits)))
        out["alpha"].append(step.alpha[0])
        out["beta"].append(float(step.beta[0]))
        before = word
    return out


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("given", [False, True], ids=["told", "given"])
def test_maps_are_those_of_the_models_forward_on_the_same_pixels(attention: Attention, given: bool) -> None:
    captioner = tiny(attention)
    some = photos()
    captions = captioner.score(some, ["a red disc", "disc", "left a"]) if given else captioner.tell(some, beam=3)
    for photo, caption in zip(some, captions, strict=True):
        words, count = numbers(caption), len(caption.words)
        assert count
        with torch.no_grad():
            told = captioner.model.eval()(pixels(photo), torch.tensor([words]), torch.tensor([len(words)]))
        assert caption.map.values.shape == (count, 8, 8)
        torch.testing.assert_close(caption.map.values.flatten(1), told.alpha[0, :count], atol=1e-6, rtol=0)
        torch.testing.assert_close(caption.map.values.sum((1, 2)), torch.ones(count), atol=1e-6, rtol=0)
        assert caption.betas == pytest.approx(told.beta[0, :count].tolist(), abs=1e-6)
        for entropy, alpha in zip(caption.entropies, told.alpha[0].double().tolist(), strict=False):
            assert entropy == pytest.approx(-sum(one * math.log(one) for one in alpha if one > 0), abs=1e-5)
        assert caption.map.labels == {"word": caption.words}
        assert not caption.map.values.is_inference()


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("normalize", [False, True])
def test_a_score_is_the_sum_of_log_probabilities_with_that_of_the_end(attention: Attention, normalize: bool) -> None:
    captioner, some = tiny(attention), photos()
    for photo, caption in zip(some, captioner.tell(some, beam=3, normalize=normalize), strict=True):
        logs = looped(captioner, photo, numbers(caption))["log"]
        assert caption.finished
        assert caption.score == pytest.approx(sum(logs), abs=1e-4)
        assert caption.score < sum(logs[:-1]) - 1e-5  # the end costs something
        assert "<end>" not in caption.words


@pytest.mark.parametrize("how", [None, "argmax", "sample"])
def test_cells_are_the_places_that_beam_search_took(how: str | None) -> None:
    captioner, some = tiny("hard"), photos()
    torch.manual_seed(7)
    captions = captioner.tell(some, beam=2, how=how)
    torch.manual_seed(7)
    with torch.inference_mode():
        seen = captioner.model.encode(torch.cat([pixels(photo) for photo in some]))
    found = search(captioner.model, seen, beam=2, how=how)
    apart = 0
    for photo, caption, one in zip(some, captions, found, strict=True):
        assert numbers(caption)[:-1] == one.words
        assert caption.cells == tuple((place // 8, place % 8) for place in one.places[:-1])
        again = looped(captioner, photo, numbers(caption), one.places)
        assert caption.score == pytest.approx(sum(again["log"]), abs=1e-4)
        assert caption.score == pytest.approx(one.score, abs=1e-4)
        for cell, values, alpha in zip(caption.cells, caption.map.values, again["alpha"], strict=False):
            assert cell is not None
            torch.testing.assert_close(values.flatten(), alpha, atol=1e-6, rtol=0)
            apart += float(values[cell]) < float(values.max())
    assert (apart > 0) == (how == "sample")


@pytest.mark.parametrize(("attention", "how"), [("soft", None), ("uniform", None), ("hard", "expected")])
def test_where_no_place_is_taken_there_are_no_cells(attention: Attention, how: str | None) -> None:
    captioner = tiny(attention)
    for caption in (captioner.tell(photos(1), how=how)[0], captioner.score(photos(1), ["a disc"], how=how)[0]):
        assert set(caption.cells) == {None}
        assert caption.map.provenance.parameters["how"] == (how or "default")


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_batch_of_photos_is_what_one_by_one_gives(attention: Attention) -> None:
    captioner = tiny(attention)
    some = [*photos(2), Image.effect_noise((90, 70), 90).convert("RGB"), photos(1)[0].resize((64, 130))]
    together = captioner.tell(some, beam=3)
    given = captioner.score(some, ["a", "red left disc a", "disc", "a zebra"])
    for i, photo in enumerate(some):
        for whole, alone in (
            (together[i], captioner.tell([photo], beam=3)[0]),
            (given[i], captioner.score([photo], [given[i].text])[0]),
        ):
            assert (alone.words, alone.cells, alone.geometry) == (whole.words, whole.cells, whole.geometry)
            assert alone.score == pytest.approx(whole.score, abs=1e-4)
            torch.testing.assert_close(alone.map.values, whole.map.values, atol=1e-5, rtol=0)
    assert len({caption.map.values.numpy().tobytes() for caption in together}) == (1 if attention == "uniform" else len(some))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_captioning_leaves_the_model_as_it_was(attention: Attention) -> None:
    captioner = tiny(attention)
    model = captioner.model.train()
    norms = [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]
    norms[1].eval()
    modes = [part.training for part in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    captioner.tell(photos(1))
    captioner.score(photos(1), ["a"])
    assert captioner.grid == (8, 8)
    assert max(captioner.field) <= 20
    with pytest.raises(OptionError, match="beam"):
        captioner.tell(photos(1), beam=0)
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_caption_that_is_cut_off_says_so(attention: Attention) -> None:
    captioner, some = tiny(attention, end=-1e3), photos(2)
    for photo, caption in zip(some, captioner.tell(some, beam=2, longest=3), strict=True):
        assert not caption.finished
        assert len(caption.words) == len(caption.map.values) == len(caption.cells) == len(caption.facts) == 3
        assert caption.score == pytest.approx(sum(looped(captioner, photo, numbers(caption))["log"]), abs=1e-4)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_caption_may_have_no_word(attention: Attention) -> None:
    (caption,) = tiny(attention, end=1e3).tell(photos(1))
    assert (caption.words, caption.text, caption.cells, caption.facts) == ((), "", (), ())
    assert caption.finished
    assert caption.score == pytest.approx(0, abs=1e-4)
    assert caption.map.values.shape == (0, 8, 8)
    with pytest.raises(OptionError, match="shows 1 to 200 words, got 0"):
        caption.filmstrip()


def test_words_that_are_not_known_keep_their_name_and_it_is_said() -> None:
    captioner, (photo,) = tiny(), photos(1)
    (caption,) = captioner.score([photo], ["A zebra's RED zebra's; okapi"])
    assert caption.words == ("a", "zebra's", "red", "zebra's", "okapi")
    steps = looped(captioner, photo, [2, UNKNOWN, 3, UNKNOWN, UNKNOWN, END])
    assert caption.score == pytest.approx(sum(steps["log"]), abs=1e-4)
    torch.testing.assert_close(caption.map.values.flatten(1), torch.stack(steps["alpha"][:-1]), atol=1e-6, rtol=0)
    assert caption.map.provenance.notes == ("words that the captioner does not know, read as <unknown>: zebra's, okapi",)
    known, unknown = captioner.score([photo] * 2, ["a red disc", "a blue disc"])
    assert known.map.provenance.notes == ()
    assert unknown.map.provenance.notes[0].endswith(": blue")


@pytest.mark.parametrize(("size", "corner"), [((64, 96), (16, 0)), ((104, 64), (0, 20))], ids=["tall", "wide"])
def test_of_a_long_photo_only_the_middle_is_seen_and_colored(size: tuple[int, int], corner: tuple[int, int]) -> None:
    captioner = tiny()
    photo = Image.effect_noise(size, 90).convert("RGB")
    top, left = corner
    (whole,), (middle,) = captioner.tell([photo]), captioner.tell([photo.crop((left, top, left + 64, top + 64))])
    assert whole.geometry.window == Box(top, left, top + 64, left + 64)
    assert whole.words == middle.words
    torch.testing.assert_close(whole.map.values, middle.map.values, atol=1e-6, rtol=0)
    heat = whole.map.to_heatmap(whole.geometry, "nearest").at(word=0)
    drawn = np.asarray(visattn.overlay(photo, heat, opacity=1.0))
    outside = np.ones(drawn.shape[:2], bool)
    outside[top : top + 64, left : left + 64] = False
    assert outside.any()
    assert (drawn[outside] == np.asarray(photo)[outside]).all()
    assert (drawn[~outside] != np.asarray(photo)[~outside]).any(1).mean() > 0.9
    assert whole.filmstrip().height > middle.filmstrip().height or size[0] > size[1]


def test_a_place_is_drawn_on_the_pixels_of_its_cell() -> None:
    (caption,) = tiny("hard").tell(photos(1))
    heat = caption.map.to_heatmap(caption.geometry, "nearest")
    for number, cell in enumerate(caption.cells):
        assert cell is not None
        values = heat.at(word=number).values
        top, left = 8 * cell[0], 8 * cell[1]
        assert (values[top : top + 8, left : left + 8] == values.max()).all()
        assert (values == values.max()).sum() == 64


def test_provenance_says_what_was_told_and_how() -> None:
    (told,), (given,) = tiny().tell(photos(1), beam=2, longest=9), tiny().score(photos(1), ["A disc!"])
    facts = told.map.provenance
    assert (facts.model, facts.method, facts.geometry) == ("tiny", "caption attention", told.geometry)
    assert facts.parameters == {"beam": 2, "longest": 9, "normalize": False, "how": "default", "caption": told.text}
    assert given.map.provenance.parameters == {"how": "default", "caption": "a disc"}
    assert facts.image_sha256


REFUSED: dict[str, tuple[Attention, str, dict[str, Any], str]] = {
    "how-of-soft": ("soft", "tell", {"how": "sample"}, "'sample' says what hard attention takes; this captioner's is soft"),
    "how-of-uniform": ("uniform", "score", {"captions": ["a"], "how": "argmax"}, "this captioner's is uniform"),
    "unknown-how": ("hard", "tell", {"how": "sampel"}, "unknown way to take a place 'sampel'; did you mean 'sample'"),
    "no-beam": ("soft", "tell", {"beam": 0}, "the beam"),
    "no-length": ("soft", "tell", {"longest": 0}, "the longest length"),
    "too-few-captions": ("soft", "score", {"captions": []}, "one caption for each photo, got 0 for 1"),
    "no-word": ("soft", "score", {"captions": [" ... "]}, "caption 0 has no word"),
}


@pytest.mark.parametrize(("attention", "name", "options", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_meant_is_refused(attention: Attention, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        getattr(tiny(attention), name)(photos(1), **options)


@pytest.mark.parametrize("name", ["tell", "score"])
def test_no_photo_is_refused(name: str) -> None:
    with pytest.raises(ImageError, match="no photos were given"):
        getattr(tiny(), name)([], *([[]] if name == "score" else []))


def test_places_lie_where_the_encoder_read_them_at_a_size_that_its_stride_does_not_divide() -> None:
    blueprint = plan(encoder=replace(LOCAL, size=(70, 70)))
    captioner = Captioner(blueprint.build().eval(), blueprint, Provenance())
    (caption,) = captioner.score([Image.new("RGB", (70, 70), "red")], ["a red disc"])
    assert caption.map.layout.grid == (8, 8)
    assert caption.map.layout.box == Box(0, 0, 64, 64)  # the last 6 rows and columns belong to no place


def test_coordinates_keep_the_size_they_were_made_for() -> None:
    blueprint = plan(coordinates=True)
    with pytest.raises(ShapeError, match="coordinates are of 8 x 8 places, the encoder gave"):
        blueprint.build().encode(torch.zeros(1, 3, 96, 96))


def test_the_folder_of_a_run_leads_to_its_captioner(tmp_path: Path) -> None:
    blueprint = plan()
    save(blueprint.build(), blueprint, tmp_path / "run" / "final")
    assert load_captioner(tmp_path / "run").vocabulary.words == blueprint.words


def test_places_that_cannot_be_followed_are_refused() -> None:
    captioner = tiny()
    inner = captioner.model.encoder

    class Mixed(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            maps: Tensor = inner(images)
            return maps.flatten(2)[:, :, torch.randperm(maps.shape[2] * maps.shape[3])].view_as(maps)

    captioner.model.encoder = Mixed()
    with pytest.raises(
        LayoutError,
        match=r"visattn_local_features: where its places lie could not be followed\. Choose another layer \(--layer\)",
    ):
        captioner.tell(photos(1))
