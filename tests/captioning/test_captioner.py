"""Captions and their maps match the model's output for the same pixels, words and chosen cells."""

from __future__ import annotations

import copy
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
from visattn._support.opencv import cv2
from visattn.captioning import Caption, Captioner, load_captioner, search
from visattn.captioning.captioner_folders import load, save_captioner
from visattn.core.geometry import Box
from visattn.core.provenance import Provenance
from visattn.data.scenes import Scenes
from visattn.errors import ImageError, LayoutError, OptionError, ShapeError
from visattn.models.show_attend_tell import ATTENTIONS, END, UNKNOWN, Attention, EncodedImage

COUNT = 3


def photos(count: int = COUNT) -> list[Image.Image]:
    scenes = Scenes(count, seed=5)
    return [scenes[index][0] for index in range(count)]


def pixels(photo: Image.Image) -> Tensor:
    """Preprocess a photo that already has the size of the input."""
    return torch.from_numpy((np.asarray(photo, dtype=np.float32) / 255 - 0.5) / 0.25).permute(2, 0, 1)[None]


def numbers(caption: Caption) -> list[int]:
    return [WORDS.index(word) if word in WORDS else UNKNOWN for word in caption.words] + [END] * caption.finished


@torch.no_grad()
def looped(captioner: Captioner, photo: Image.Image, words: list[int], places: list[int] | None = None) -> dict[str, list[Any]]:
    """Decode step by step: log-probability of each word, alpha and beta."""
    model = captioner.model.eval()
    seen = model.encode(pixels(photo))
    state, before = model.initial_state(seen), model.start_token
    out: dict[str, list[Any]] = {"log": [], "alpha": [], "beta": []}
    for t, word in enumerate(words):
        given = torch.tensor([places[t]]) if places else None
        step, state = model.step(seen, state, torch.tensor([before]), locations=given)
        logits = step.logits[0].double().tolist()
        out["log"].append(logits[word] - math.log(sum(math.exp(one) for one in logits)))
        out["alpha"].append(step.alpha[0])
        out["beta"].append(float(step.beta[0]))
        before = word
    return out


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("given", [False, True], ids=["generated", "given"])
def test_maps_match_the_forward_pass_on_the_same_pixels(attention: Attention, given: bool) -> None:
    captioner = tiny(attention)
    some = photos()
    captions = captioner.score(some, ["a red disc", "disc", "left a"]) if given else captioner.generate(some, beam_size=3)
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
def test_score_is_the_sum_of_log_probabilities_including_the_end_token(attention: Attention, normalize: bool) -> None:
    captioner, some = tiny(attention), photos()
    for photo, caption in zip(some, captioner.generate(some, beam_size=3, length_normalization=normalize), strict=True):
        logs = looped(captioner, photo, numbers(caption))["log"]
        assert caption.finished
        assert caption.score == pytest.approx(sum(logs), abs=1e-4)
        assert caption.score < sum(logs[:-1]) - 1e-5  # the log-probability of `END` counts
        assert "<end>" not in caption.words


@pytest.mark.parametrize("how", [None, "argmax", "sample"])
def test_chosen_cells_are_those_of_beam_search(how: str | None) -> None:
    captioner, some = tiny("hard"), photos()
    torch.manual_seed(7)
    captions = captioner.generate(some, beam_size=2, sampling=how)
    torch.manual_seed(7)
    with torch.inference_mode():
        seen = captioner.model.encode(torch.cat([pixels(photo) for photo in some]))
    found = search(captioner.model, seen, beam_size=2, sampling=how)
    apart = 0
    for photo, caption, one in zip(some, captions, found, strict=True):
        assert numbers(caption)[:-1] == one.words
        assert caption.chosen_cells == tuple((place // 8, place % 8) for place in one.locations[:-1])
        again = looped(captioner, photo, numbers(caption), one.locations)
        assert caption.score == pytest.approx(sum(again["log"]), abs=1e-4)
        assert caption.score == pytest.approx(one.score, abs=1e-4)
        for cell, values, alpha in zip(caption.chosen_cells, caption.map.values, again["alpha"], strict=False):
            assert cell is not None
            torch.testing.assert_close(values.flatten(), alpha, atol=1e-6, rtol=0)
            apart += float(values[cell]) < float(values.max())
    assert (apart > 0) == (how == "sample")


@pytest.mark.parametrize(("attention", "how"), [("soft", None), ("uniform", None), ("local", None), ("hard", "expected")])
def test_soft_attention_has_no_chosen_cells(attention: Attention, how: str | None) -> None:
    captioner = tiny(attention)
    for caption in (captioner.generate(photos(1), sampling=how)[0], captioner.score(photos(1), ["a disc"], sampling=how)[0]):
        assert set(caption.chosen_cells) == {None}
        assert caption.map.provenance.parameters["sampling"] == (how or "default")


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_batch_of_photos_matches_one_by_one(attention: Attention) -> None:
    captioner = tiny(attention)
    some = [*photos(2), Image.effect_noise((90, 70), 90).convert("RGB"), photos(1)[0].resize((64, 130))]
    together = captioner.generate(some, beam_size=3)
    given = captioner.score(some, ["a", "red left disc a", "disc", "a zebra"])
    for i, photo in enumerate(some):
        for whole, alone in (
            (together[i], captioner.generate([photo], beam_size=3)[0]),
            (given[i], captioner.score([photo], [given[i].text])[0]),
        ):
            assert (alone.words, alone.chosen_cells, alone.geometry) == (whole.words, whole.chosen_cells, whole.geometry)
            assert alone.score == pytest.approx(whole.score, abs=1e-4)
            torch.testing.assert_close(alone.map.values, whole.map.values, atol=1e-5, rtol=0)
    assert len({caption.map.values.numpy().tobytes() for caption in together}) == (1 if attention == "uniform" else len(some))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_captioning_does_not_change_the_model(attention: Attention) -> None:
    captioner = tiny(attention)
    model = captioner.model.train()
    norms = [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]
    norms[1].eval()
    modes = [part.training for part in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    captioner.generate(photos(1))
    captioner.score(photos(1), ["a"])
    assert captioner.grid == (8, 8)
    assert max(captioner.field) <= 20
    with pytest.raises(OptionError, match="beam_size"):
        captioner.generate(photos(1), beam_size=0)
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_truncated_caption_is_not_finished(attention: Attention) -> None:
    captioner, some = tiny(attention, end=-1e3), photos(2)
    for photo, caption in zip(some, captioner.generate(some, beam_size=2, max_length=3), strict=True):
        assert not caption.finished
        assert caption.cut_off == f"cut off at {len(caption.words)} words"
        assert len(caption.words) == len(caption.map.values) == len(caption.chosen_cells) == len(caption.word_notes) == 3
        assert caption.score == pytest.approx(sum(looped(captioner, photo, numbers(caption))["log"]), abs=1e-4)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_caption_may_be_empty(attention: Attention) -> None:
    (caption,) = tiny(attention, end=1e3).generate(photos(1))
    assert (caption.words, caption.text, caption.chosen_cells, caption.word_notes) == ((), "", (), ())
    assert caption.finished
    assert caption.score == pytest.approx(0, abs=1e-4)
    assert caption.map.values.shape == (0, 8, 8)
    with pytest.raises(OptionError, match="shows 1 to 200 words, got 0"):
        caption.filmstrip()


def test_unknown_words_keep_their_text_and_are_noted() -> None:
    captioner, (photo,) = tiny(), photos(1)
    (caption,) = captioner.score([photo], ["A zebra's RED zebra's; okapi"])
    assert caption.words == ("a", "zebra's", "red", "zebra's", "okapi")
    steps = looped(captioner, photo, [2, UNKNOWN, 3, UNKNOWN, UNKNOWN, END])
    assert caption.score == pytest.approx(sum(steps["log"]), abs=1e-4)
    torch.testing.assert_close(caption.map.values.flatten(1), torch.stack(steps["alpha"][:-1]), atol=1e-6, rtol=0)
    assert caption.map.provenance.notes == ("words outside the vocabulary, read as <unknown>: zebra's, okapi",)
    known, unknown = captioner.score([photo] * 2, ["a red disc", "a blue disc"])
    assert known.map.provenance.notes == ()
    assert unknown.map.provenance.notes[0].endswith(": blue")


@pytest.mark.parametrize(("size", "corner"), [((64, 96), (16, 0)), ((104, 64), (0, 20))], ids=["tall", "wide"])
def test_only_the_center_of_a_long_photo_is_used_and_colored(size: tuple[int, int], corner: tuple[int, int]) -> None:
    captioner = tiny()
    photo = Image.effect_noise(size, 90).convert("RGB")
    top, left = corner
    (whole,), (middle,) = captioner.generate([photo]), captioner.generate([photo.crop((left, top, left + 64, top + 64))])
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


def test_chosen_cell_is_drawn_on_its_pixels() -> None:
    (caption,) = tiny("hard").generate(photos(1))
    heat = caption.map.to_heatmap(caption.geometry, "nearest")
    for number, cell in enumerate(caption.chosen_cells):
        assert cell is not None
        values = heat.at(word=number).values
        top, left = 8 * cell[0], 8 * cell[1]
        assert (values[top : top + 8, left : left + 8] == values.max()).all()
        assert (values == values.max()).sum() == 64


@pytest.mark.parametrize(
    ("attention", "sampling"), [*((attention, None) for attention in ATTENTIONS), ("hard", "sample"), ("hard", "expected")]
)
def test_gradients_of_words_are_those_of_finite_differences(attention: Attention, sampling: str | None) -> None:
    captioner, (photo,) = tiny(attention), photos(1)
    torch.manual_seed(3)
    (caption,) = captioner.score([photo], ["a red disc"], by="gradient", sampling=sampling)
    model = copy.deepcopy(captioner.model).double()
    words = captioner.vocabulary.encode("a red disc")
    with torch.no_grad():
        encoded = model.encode(pixels(photo).double())
    taken = (
        torch.tensor([[row * 8 + column for row, column in filter(None, caption.chosen_cells)] + [0]])
        if attention == "hard" and sampling != "expected"
        else None
    )
    if sampling == "sample":
        assert caption.chosen_cells != captioner.score([photo], ["a red disc"])[0].chosen_cells

    def chances(features: Tensor) -> Tensor:
        keys = features if model.look is None else model.look.keys(features)
        seen = EncodedImage(features, keys, encoded.grid)
        with torch.no_grad():
            told = model.teacher_forcing(
                seen, torch.tensor([words]), torch.tensor([len(words)]), sampling=sampling, locations=taken
            )
        return told.logits.log_softmax(2)[0, torch.arange(len(words)), torch.tensor(words)]

    for cell in (0, 27, 63):
        slopes = torch.zeros(len(words), encoded.features.shape[2], dtype=torch.float64)
        for channel in range(encoded.features.shape[2]):
            for side in (1, -1):
                moved = encoded.features.clone()
                moved[0, cell, channel] += side * 1e-5
                slopes[:, channel] += side * chances(moved) / 2e-5
        for number in range(3):
            found = float(caption.map.values[number].flatten()[cell])
            assert found == pytest.approx(float(slopes[number].norm()), rel=1e-3, abs=1e-6)
    assert caption.map.meaning == "norm of the gradient"
    assert caption.map.provenance.method == "caption gradient"
    assert not any(parameter.grad is not None for parameter in captioner.model.parameters())
    assert captioner.generate([photo], by="gradient")[0].words == captioner.generate([photo])[0].words
    drawn, faded = (np.asarray(caption.filmstrip(**options)) for options in ({}, {"strengths": (0.0,) * 3}))
    assert (drawn != faded).any() == (attention != "uniform")  # a constant map has no colors
    for changes in ({"betas": (0.0,) * 3}, {"windows": (Box(0, 0, 8, 8),) * 3}, {"chosen_cells": ((0, 0),) * 3}):
        assert (np.asarray(replace(caption, **changes).filmstrip()) == drawn).all()  # these belong to the attention
    with pytest.raises(OptionError, match="unknown by 'saliency'"):
        captioner.generate([photo], by="saliency")  # type: ignore[arg-type]


def test_windows_of_local_attention_hold_all_of_a_word_and_are_drawn() -> None:
    captioner = tiny("local")
    (caption,) = captioner.generate(photos(1))
    assert len(caption.windows) == len(caption.words)
    for values, box in zip(caption.map.values, caption.windows, strict=True):
        top, left, bottom, right = (int(side) // 8 for side in box)
        assert (values[top:bottom, left:right] > 0).all()
        assert float(values[top:bottom, left:right].sum()) == pytest.approx(float(values.sum()))
        assert (bottom - top, right - left) != (8, 8)
    moved = replace(caption, windows=(Box(8, 16, 40, 56), Box(16, 8, 56, 24), Box(0, 0, 24, 24)))
    drawn, without = (np.asarray(moved.filmstrip(panel=128, **changes)).astype(int) for changes in ({}, {"windows": ()}))
    assert drawn.shape[0] > without.shape[0]  # the note
    boxes = (drawn[: without.shape[0] // 2] != without[: without.shape[0] // 2]).any(-1).astype(np.uint8)
    _, _, blobs, _ = cv2.connectedComponentsWithStats(boxes)
    corners = [(x, y, x + width, y + height) for x, y, width, height, _ in sorted(blobs[1:].tolist())]
    steps = set()
    for number, (box, (left, top, right, bottom)) in enumerate(zip(moved.windows, corners, strict=True)):
        assert (right - left, bottom - top) == pytest.approx((2 * (box.right - box.left), 2 * (box.bottom - box.top)), abs=4)
        steps.add((left - 2 * box.left - number * (128 + 8), top - 2 * box.top))
    assert (
        max(abs(one - other) for step in steps for one, other in zip(step, min(steps), strict=True)) <= 2
    )  # by one width of a line
    with pytest.raises(OptionError, match=f"windows must have one entry for each of the {len(caption.words)} words"):
        caption.filmstrip(windows=[*caption.windows, caption.windows[0]])
    assert not tiny("soft").generate(photos(1))[0].windows


def test_provenance_records_the_caption_and_its_parameters() -> None:
    (told,), (given,) = tiny().generate(photos(1), beam_size=2, max_length=9), tiny().score(photos(1), ["A disc!"])
    facts = told.map.provenance
    assert (facts.model, facts.method, facts.geometry) == ("tiny", "caption attention", told.geometry)
    assert facts.parameters == {
        "beam_size": 2,
        "max_length": 9,
        "length_normalization": False,
        "sampling": "default",
        "caption": told.text,
    }
    assert given.map.provenance.parameters == {"sampling": "default", "caption": "a disc"}
    assert facts.image_sha256


REFUSED: dict[str, tuple[Attention, str, dict[str, Any], str]] = {
    "sampling-of-soft": (
        "soft",
        "generate",
        {"sampling": "sample"},
        "sampling needs hard attention, got 'sample' for soft attention",
    ),
    "sampling-of-uniform": ("uniform", "score", {"captions": ["a"], "sampling": "argmax"}, "got 'argmax' for uniform attention"),
    "unknown-sampling": ("hard", "generate", {"sampling": "sampel"}, "unknown sampling 'sampel'; did you mean 'sample'"),
    "beam-size-0": ("soft", "generate", {"beam_size": 0}, "beam_size"),
    "max-length-0": ("soft", "generate", {"max_length": 0}, "max_length"),
    "too-few-captions": ("soft", "score", {"captions": []}, "one caption for each photo, got 0 for 1"),
    "no-word": ("soft", "score", {"captions": [" ... "]}, "caption 0 has no word"),
}


@pytest.mark.parametrize(("attention", "name", "options", "message"), REFUSED.values(), ids=list(REFUSED))
def test_invalid_options_are_refused(attention: Attention, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        getattr(tiny(attention), name)(photos(1), **options)


@pytest.mark.parametrize("name", ["generate", "score"])
def test_empty_list_of_photos_is_refused(name: str) -> None:
    with pytest.raises(ImageError, match="no photos were given"):
        getattr(tiny(), name)([], *([[]] if name == "score" else []))


def test_cells_are_located_correctly_if_the_stride_does_not_divide_the_size() -> None:
    blueprint = plan(encoder=replace(LOCAL, size=(70, 70)))
    captioner = Captioner(blueprint.build().eval(), blueprint, Provenance())
    (caption,) = captioner.score([Image.new("RGB", (70, 70), "red")], ["a red disc"])
    assert caption.map.layout.grid == (8, 8)
    assert caption.map.layout.box == Box(0, 0, 64, 64)  # the last 6 rows and columns belong to no cell


def test_coordinates_refuse_another_grid_size() -> None:
    blueprint = plan(coordinates=True)
    with pytest.raises(ShapeError, match="coordinates are for a grid of 8 x 8, but the encoder returned"):
        blueprint.build().encode(torch.zeros(1, 3, 96, 96))


def test_captioner_loads_from_the_run_folder(tmp_path: Path) -> None:
    blueprint = plan()
    save_captioner(blueprint.build(), blueprint, tmp_path / "run" / "final")
    assert load_captioner(tmp_path / "run").vocabulary.words == blueprint.words


def test_untraceable_locations_are_refused() -> None:
    captioner = tiny()
    inner = captioner.model.encoder

    class Mixed(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            maps: Tensor = inner(images)
            return maps.flatten(2)[:, :, torch.randperm(maps.shape[2] * maps.shape[3])].view_as(maps)

    captioner.model.encoder = Mixed()
    with pytest.raises(
        LayoutError,
        match=r"visattn_local_features: the positions of its feature map could not be traced\. Choose another layer\.$",
    ):
        captioner.generate(photos(1))


SHIPPED = Path(__file__).parents[2] / "models" / "captions_soft"


@pytest.mark.parametrize(
    ("photo", "reason"),
    [
        *((scene, "") for scene in photos(8)),
        ("photo:chelsea", "it has 451 x 300 pixels, and they have 64 x 64"),
        ("photo:coffee, 64 x 64", "its contrast differs from theirs"),
        (Image.new("RGB", (64, 64), (119, 118, 117)), "its contrast differs from theirs"),
        (photos(1)[0].resize((128, 128)), "it has 128 x 128 pixels, and they have 64 x 64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "picture",
)
def test_a_captioner_of_scenes_says_so_of_what_is_unlike_them(photo: Image.Image | str, reason: str) -> None:
    if isinstance(photo, str):
        name, _, small = photo.partition(", ")
        photo = visattn.load_image(name).resize((64, 64)) if small else visattn.load_image(name)
    (caption,) = load_captioner(SHIPPED).generate([photo], beam_size=1)
    said = f"the captioner was trained on generated scenes, and this image is unlike them: {reason}"
    assert caption.map.provenance.warnings == ((said,) if reason else ())


@pytest.mark.parametrize(("data", "compared"), [("scenes-new", True), ("scenes-any", True), ("coco:photos", False)])
def test_only_captioners_of_scenes_compare_their_images(data: str, compared: bool, tmp_path: Path) -> None:
    model, blueprint, _, shipped = load(SHIPPED)
    assert shipped == "scenes"
    folder = save_captioner(model, blueprint, tmp_path / "own", {"data": data})
    (caption,) = load_captioner(folder).generate([visattn.load_image("photo:chelsea")], beam_size=1)
    assert bool(caption.map.provenance.warnings) is compared
