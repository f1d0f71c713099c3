"""Captions of photos, with an attention map for each word."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from visattn._support.checks import one_of
from visattn._support.files import exists, is_file
from visattn._support.language import option
from visattn._support.modes import evaluating, in_own_modes
from visattn._support.reprs import brief
from visattn._support.types import By
from visattn.captioning.beam_search import search
from visattn.captioning.captioner_folders import CaptionerBlueprint, load
from visattn.captioning.encoders import receptive_field
from visattn.captioning.vocabulary import SPECIAL, Vocabulary, split
from visattn.core.drawing.filmstrips import animation, filmstrip
from visattn.core.drawing.pictures import Picture
from visattn.core.families.trained import remember
from visattn.core.geometry import Box, Geometry
from visattn.core.images import image_facts
from visattn.core.loading.networks import captioner_folder
from visattn.core.loading.weights import FACTS
from visattn.core.maps import AttentionMap
from visattn.core.pipeline.captures import capture
from visattn.core.pipeline.inputs import Prepared, prepare_batch
from visattn.core.provenance import Provenance
from visattn.core.records import TokenLayout
from visattn.data.captions import SCENES
from visattn.errors import LayoutError, OptionError
from visattn.models.show_attend_tell import END, UNKNOWN, DecoderOutput, EncodedImage, LocalAttention, ShowAttendTell

METHODS: Mapping[By, str] = {"attention": "caption attention", "gradient": "caption gradient"}
MEANINGS: Mapping[By, str] = {"attention": "attention", "gradient": "norm of the gradient"}
_FLATTEST, _STRONGEST = 0.5, 1.6  # deviation of generated scenes from the mean of all, in standard deviations: 0.6 to 1.5


@dataclass(frozen=True, eq=False)
class Caption:
    """Caption of a photo, with an attention map for each word.

    Attributes:
        words: Words of the caption, without `<end>`.
        score: Log-likelihood of the words and of `<end>`, in nats.
        finished: Whether the caption ends with `<end>`. Otherwise it was cut off.
        map: Attention weights, or norms of gradients, with the axes `("word",)`.
        betas: Gate value beta of each word, from 0 to 1: the share of the visual context that the decoder uses.
        entropies: Entropy of the attention weights of each word, in nats.
        chosen_cells: Grid cell `(row, column)` that hard attention chose for each word; None for other attention.
        photo: Photo that was captioned.
        geometry: Position of the captioner's input on the photo.
        windows: For each word the window outside which local attention cannot look, in pixels of the captioner's input; none for other
            attention.
    """

    words: tuple[str, ...]
    score: float
    finished: bool
    map: AttentionMap
    betas: tuple[float, ...]
    entropies: tuple[float, ...]
    chosen_cells: tuple[tuple[int, int] | None, ...]
    photo: Image.Image
    geometry: Geometry
    windows: tuple[Box, ...] = ()

    __repr__ = brief

    @property
    def text(self) -> str:
        """Caption as text, with spaces between the words."""
        return " ".join(self.words)

    def filmstrip(self, **options: Any) -> Picture:  # noqa: ANN401 - those of `visattn.filmstrip`
        """Draw the photo and a panel for each word; see `visattn.filmstrip`."""
        return filmstrip(
            self.photo,
            self.map,
            self.geometry,
            **self._titled(options),
        )

    def animation(self, **options: Any) -> bytes:  # noqa: ANN401
        """Draw a WebP animation with a frame for each word; see `visattn.drawing.filmstrips.animation`."""
        return animation(
            self.photo,
            self.map,
            self.geometry,
            **self._titled(options),
        )

    @property
    def word_notes(self) -> tuple[str, ...]:
        """Note for each word: entropy relative to a uniform map, and beta."""
        most = math.log(self.map.layout.cells)
        return tuple(
            f"entropy {entropy / most:.2f}  beta {beta:.2f}" for entropy, beta in zip(self.entropies, self.betas, strict=True)
        )

    @property
    def cut_off(self) -> str:
        """Note on a caption that was cut off; empty for one that ends by itself."""
        return "" if self.finished else f"cut off at {len(self.words)} words"

    def _titled(self, options: dict[str, Any]) -> dict[str, Any]:
        facts = self.map.provenance
        notes = [*facts.notes, *(f"warning: {text}" for text in facts.warnings), *options.pop("notes", ())]
        own: dict[str, Any] = {}
        if self.map.meaning == MEANINGS["gradient"]:
            notes.append(
                "colors: how much the word's log-probability changes with the features of each cell, by any path through the"
            )
            notes.append("steps so far and the initial state; attention, gates and windows of the word are not drawn")
        else:
            if any(cell is not None for cell in self.chosen_cells):
                notes.append("colors: probability of each cell")
            notes.append("entropy: of the attention weights, 1 if uniform; beta: gate on what was looked at, 0 closed, 1 open")
            notes.append("a map is as faint as its beta is low")
            own = {"chosen_cells": self.chosen_cells, "windows": self.windows}
            own |= {"word_notes": self.word_notes, "strengths": self.betas}
        notes += [] if self.finished else [self.cut_off]
        return {"title": self.text, "notes": notes} | own | options


class Captioner:
    """Captioner: generates captions with an attention map for each word."""

    def __init__(
        self, model: ShowAttendTell, blueprint: CaptionerBlueprint, provenance: Provenance, trained_on: str = ""
    ) -> None:
        """Wrap a model that was built from the blueprint. To load one from a folder, use `load_captioner`.

        Args:
            model: The model.
            blueprint: Specification from which it was built.
            provenance: Where its weights come from.
            trained_on: Name of its training data, if it is known.
        """
        self.model, self.blueprint, self.provenance, self._trained_on = model, blueprint, provenance, trained_on
        self.vocabulary = Vocabulary(blueprint.words)
        remember(model, blueprint.encoder, in_training=True)  # so that `prepare` finds its preprocessing

    @property
    def field(self) -> tuple[int, int]:
        """Receptive field of the middle cell: height and width in input pixels."""
        return receptive_field(self.model.encoder, self.blueprint.channels, self.blueprint.size)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the feature map."""
        blank = torch.zeros(1, self.blueprint.channels, *self.blueprint.size, device=next(self.model.parameters()).device)
        return self._encode(blank)[0].grid

    @in_own_modes
    def generate(
        self,
        photos: Sequence[Image.Image],
        *,
        beam_size: int = 5,
        max_length: int = 50,
        sampling: str | None = None,
        length_normalization: bool = False,
        by: By = "attention",
    ) -> list[Caption]:
        """Generate a caption of each photo with beam search, and compute its attention maps.

        Args:
            photos: Upright photos, as returned by `visattn.load_image`.
            beam_size: Number of hypotheses; 1 is greedy decoding.
            max_length: Largest number of words, including `<end>`.
            sampling: Location that hard attention reads: `argmax`, `expected` or `sample`; by default the most likely one.
            length_normalization: Whether to compare hypotheses by their mean log-probability. Otherwise short ones are favored.
            by: What the map of a word shows: the `attention` of the decoder before it, or the norm of the `gradient` of its log-probability
                with respect to the features of each cell, through all steps so far and the initial state.

        Returns:
            One caption per photo.

        Raises:
            OptionError: If an option is out of range or unknown, or `sampling` is given but the attention is not hard.
            ImageError: If there is no photo, or a photo cannot be used.
            LayoutError: If the positions of the encoder's feature map on the image cannot be traced.
        """
        self._check(sampling, by)
        prepared = prepare_batch(photos, self.model)
        encoded, layout = self._encode(prepared.pixels)
        found = search(
            self.model,
            encoded,
            beam_size=beam_size,
            max_length=max_length,
            sampling=sampling,
            length_normalization=length_normalization,
        )
        words = [[*one.words, END] if one.finished else one.words for one in found]
        locations = _padded([one.locations for one in found]) if self._takes_one_location(sampling) else None
        parameters = {
            "beam_size": beam_size,
            "max_length": max_length,
            "length_normalization": length_normalization,
            "sampling": sampling or "default",
        }
        texts = [self.vocabulary.decode(one) for one in words]
        decoded = self._decode(encoded, words, sampling, locations)
        return self._captions(prepared, layout, encoded, decoded, texts, words, parameters, by)

    @in_own_modes
    def score(
        self, photos: Sequence[Image.Image], captions: Sequence[str], *, sampling: str | None = None, by: By = "attention"
    ) -> list[Caption]:
        """Score given captions with teacher forcing: compute their log-likelihood and attention maps.

        Args:
            photos: Upright photos.
            captions: One caption per photo.
            sampling: See `generate`.
            by: See `generate`.

        Returns:
            One scored caption per photo.

        Raises:
            OptionError: If the numbers of captions and photos differ, a caption has no word, `sampling` is given but the attention is
                not hard, or an option is unknown.
            ImageError: If there is no photo, or a photo cannot be used.
            LayoutError: If the positions of the encoder's feature map on the image cannot be traced.
        """
        self._check(sampling, by)
        if len(captions) != len(photos):
            raise OptionError(f"there must be one caption for each photo, got {len(captions)} for {len(photos)}.")
        texts = [split(caption) for caption in captions]
        if empty := [number for number, words in enumerate(texts) if not words]:
            raise OptionError(f"caption {empty[0]} has no word. Give one or more.")
        prepared = prepare_batch(photos, self.model)
        encoded, layout = self._encode(prepared.pixels)
        words = [self.vocabulary.encode(caption) for caption in captions]
        decoded = self._decode(encoded, words, sampling, None)
        return self._captions(prepared, layout, encoded, decoded, texts, words, {"sampling": sampling or "default"}, by)

    def _takes_one_location(self, sampling: str | None) -> bool:
        return self.model.attention == "hard" and sampling != "expected"

    def _check(self, sampling: str | None, by: By) -> None:
        one_of(by, get_args(By), "by")
        if sampling is not None and self.model.attention != "hard":
            raise OptionError(
                f"sampling needs hard attention, got '{sampling}' for {self.model.attention} attention. Leave it out."
            )

    def _decode(
        self, encoded: EncodedImage, words: list[list[int]], sampling: str | None, locations: Tensor | None
    ) -> DecoderOutput:
        """Decode the words; for hard attention at these locations `(B, T)`, or with None at those that it chooses itself."""
        device = encoded.features.device
        lengths = torch.tensor([max(len(one), 1) for one in words])
        given = locations.to(device) if locations is not None else None
        with evaluating(self.model), torch.inference_mode():
            return self.model.teacher_forcing(encoded, _padded(words).to(device), lengths, sampling=sampling, locations=given)

    def _slopes(self, encoded: EncodedImage, decoded: DecoderOutput, words: list[list[int]], sampling: str | None) -> Tensor:
        """Return the norm of the gradient of each word's log-probability at each cell, `(B, T, L)`, at the locations that were decoded."""
        lengths = decoded.steps.sum(1)
        padded = _padded(words).to(encoded.features.device)
        with evaluating(self.model, frozen=True), torch.inference_mode(False), torch.enable_grad():
            features = encoded.features.clone().requires_grad_()
            keys = features if self.model.look is None else self.model.look.keys(features)
            locations = decoded.taken.argmax(2) if self._takes_one_location(sampling) else None
            again = self.model.teacher_forcing(
                EncodedImage(features, keys, encoded.grid), padded, lengths, sampling=sampling, locations=locations
            )
            totals = _chances(again, padded).sum(0)
            slopes = [torch.autograd.grad(total, features, retain_graph=True)[0] for total in totals]
        return torch.stack([torch.linalg.vector_norm(slope, dim=2) for slope in slopes], 1)

    def _encode(self, pixels: Tensor) -> tuple[EncodedImage, TokenLayout]:
        """Encode pixels. Return the features and their positions on the input, which are traced through the encoder."""
        stage = nn.Sequential(OrderedDict(encoder=self.model.encoder))
        with evaluating(self.model), torch.inference_mode():
            with capture(stage, features=["encoder"], gates=False) as recording:
                maps = stage(pixels)
            encoded = self.model.encode_features(maps)
        layout = recording.features[0].layout
        if layout is None or layout.grid != encoded.grid:
            raise LayoutError(
                f"{self.blueprint.encoder.model}: the positions of its feature map could not be traced. Choose another {option('layer')}."
            )
        return encoded, layout

    def _unlike(self, photo: Image.Image, pixels: Tensor) -> tuple[str, ...]:
        """Return that a photo is unlike the generated scenes of a training on them, in size or contrast; nothing if it is like them."""
        height, width = self.blueprint.size
        spread = float(pixels.float().square().mean().sqrt())  # 1 over all of the training images
        if self._trained_on not in SCENES or (photo.size == (width, height) and _FLATTEST < spread < _STRONGEST):
            return ()
        what = "its contrast differs from theirs"
        if photo.size != (width, height):
            what = f"it has {photo.width} x {photo.height} pixels, and they have {width} x {height}"
        return (f"the captioner was trained on generated scenes, and this image is unlike them: {what}",)

    def _captions(
        self,
        prepared: Prepared,
        layout: TokenLayout,
        encoded: EncodedImage,
        decoded: DecoderOutput,
        texts: list[list[str]],
        words: list[list[int]],
        parameters: dict[str, Any],
        by: By,
    ) -> list[Caption]:
        """Build the `Caption` of each image from the decoder output, without the step of `<end>`."""
        sampling = None if parameters["sampling"] == "default" else parameters["sampling"]
        maps = self._slopes(encoded, decoded, words, sampling) if by == "gradient" else decoded.alpha
        rows, columns = decoded.grid
        scores = _chances(decoded, _padded(words).to(decoded.logits.device)).sum(1).tolist()
        hard = self._takes_one_location(sampling)
        captions = []
        for i, text in enumerate(texts):
            count = len(text)
            source = image_facts(prepared.photos[i])
            provenance = replace(self.provenance, method=METHODS[by], parameters=parameters | {"caption": " ".join(text)})
            provenance = prepared.noted(
                provenance.but(
                    image=source.name,
                    image_sha256=source.sha256,
                    geometry=prepared.geometries[i],
                    notes=source.notes + _unknown(text, words[i]),
                    warnings=self._unlike(prepared.photos[i], prepared.pixels[i]),
                )
            )
            values = maps[i, :count].float().cpu().clone().view(count, rows, columns)
            taken = decoded.taken[i, :count].argmax(1).tolist()
            captions.append(
                Caption(
                    words=tuple(text),
                    score=scores[i],
                    finished=words[i][-1:] == [END],
                    map=AttentionMap(values, ("word",), layout, {"word": tuple(text)}, MEANINGS[by], provenance),
                    betas=tuple(decoded.beta[i, :count].tolist()),
                    entropies=tuple(decoded.entropy[i, :count].tolist()),
                    chosen_cells=tuple(divmod(cell, columns) if hard else None for cell in taken),
                    photo=prepared.photos[i],
                    geometry=prepared.geometries[i],
                    windows=self._windows(decoded.center[i, :count], layout),
                )
            )
        return captions

    def _windows(self, centers: Tensor, layout: TokenLayout) -> tuple[Box, ...]:
        """Return the window of local attention for each word around its center `(words, 2)`, in pixels of the captioner's input."""
        if not isinstance(self.model.look, LocalAttention):
            return ()
        rows, columns = layout.grid
        cells = self.model.look.near.windows(centers[None], (rows, columns))[0, :, :4]
        return tuple(Box(*box) for box in layout.on_input(cells).tolist())


@in_own_modes
def load_captioner(folder: str | Path) -> Captioner:
    """Load a captioner from a folder written by `visattn train caption`.

    Args:
        folder: Folder of the run, or `final` in it; or a name in `visattn.data.CAPTIONERS`, if no folder of this name lies here.

    Raises:
        MissingExtra: If the package with the networks is not installed.
        WeightsError: If the folder holds no captioner, or a damaged one.
        UnsupportedModel: If the encoder's model is unknown.
    """
    place = captioner_folder(folder)
    within = place / "final"
    return Captioner(*load(within if is_file(within / FACTS) and not exists(place / FACTS) else place))


def _unknown(text: list[str], words: list[int]) -> tuple[str, ...]:
    """Return a note about words that are not in the vocabulary."""
    unknown = dict.fromkeys(word for word, number in zip(text, words, strict=False) if number == UNKNOWN)
    return (f"words outside the vocabulary, read as {SPECIAL[UNKNOWN]}: {', '.join(unknown)}",) if unknown else ()


def _chances(decoded: DecoderOutput, words: Tensor) -> Tensor:
    """Return the log-probability of each word `(B, T)`, 0 after the end."""
    chances = decoded.logits.float().log_softmax(2).gather(2, words[..., None])[..., 0]
    return chances.masked_fill(~decoded.steps, 0)


def _padded(sequences: list[list[int]]) -> Tensor:
    return pad_sequence([torch.tensor(one or [END]) for one in sequences], batch_first=True)
