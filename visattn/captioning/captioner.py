"""Captions of photos, with where each word looked."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from visattn._support.files import exists, is_file
from visattn._support.modes import evaluating
from visattn.captioning.beam_search import search
from visattn.captioning.encoders import receptive_field
from visattn.captioning.folders import CaptionerBlueprint, load
from visattn.captioning.vocabulary import SPECIAL, Vocabulary, split
from visattn.drawing.filmstrips import animation, filmstrip
from visattn.drawing.pictures import Picture
from visattn.errors import LayoutError, OptionError
from visattn.families.trained import remember
from visattn.geometry import Geometry
from visattn.images import facts
from visattn.loading.weights import FACTS
from visattn.maps import AttentionMap
from visattn.models.show_attend_tell import END, UNKNOWN, Seen, ShowAttendTell, Told
from visattn.pipeline.captures import capture
from visattn.pipeline.inputs import Prepared, prepare_batch
from visattn.provenance import Provenance
from visattn.records import TokenLayout

METHOD = "caption attention"


@dataclass(frozen=True, eq=False)
class Caption:
    """A caption of a photo, and where each of its words looked.

    Attributes:
        words: Of the caption; `<end>` is not among them.
        score: Log-likelihood of the words and of the end, in nats.
        finished: Whether the captioner ended it; else it was cut off.
        map: Attention, axes `("word",)`.
        betas: How much of what was seen went into each word, 0 to 1.
        entropies: Of the attention of each word, in nats.
        cells: The place, `(row, column)`, that hard attention took for each word, else None.
        photo: That was captioned.
        geometry: Where the captioner's input lies on it.
    """

    words: tuple[str, ...]
    score: float
    finished: bool
    map: AttentionMap
    betas: tuple[float, ...]
    entropies: tuple[float, ...]
    cells: tuple[tuple[int, int] | None, ...]
    photo: Image.Image
    geometry: Geometry

    @property
    def text(self) -> str:
        """The words with spaces between them."""
        return " ".join(self.words)

    def filmstrip(self, **options: Any) -> Picture:  # noqa: ANN401 - those of `visattn.filmstrip`
        """The photo, and a panel for each word; see `visattn.filmstrip`."""
        return filmstrip(self.photo, self.map, self.geometry, cells=self.cells, facts=self.facts, **self._titled(options))

    def animation(self, **options: Any) -> bytes:  # noqa: ANN401
        """The same as a WebP, a frame for each word; see `visattn.drawing.filmstrips.animation`."""
        return animation(self.photo, self.map, self.geometry, cells=self.cells, facts=self.facts, **self._titled(options))

    @property
    def facts(self) -> tuple[str, ...]:
        """A line for each word: entropy in that of a uniform map, and beta."""
        most = math.log(self.map.layout.cells)
        return tuple(
            f"entropy {entropy / most:.2f}  beta {beta:.2f}" for entropy, beta in zip(self.entropies, self.betas, strict=True)
        )

    def _titled(self, options: dict[str, Any]) -> dict[str, Any]:
        notes = [*self.map.provenance.notes, *options.pop("notes", ())]
        if any(cell is not None for cell in self.cells):
            notes.append("colors: the probabilities of places")
        notes.append("entropy: of the map, 1 where it is uniform; beta: how much of what was seen was let through")
        return {"title": self.text, "notes": notes} | options


class Captioner:
    """Tells what photos show, and where it looked."""

    def __init__(self, model: ShowAttendTell, blueprint: CaptionerBlueprint, provenance: Provenance) -> None:
        """Of a model that was built from the blueprint; `load_captioner` reads one from a folder."""
        self.model, self.blueprint, self.provenance = model, blueprint, provenance
        self.vocabulary = Vocabulary(blueprint.words)
        remember(model, blueprint.encoder)  # so that `prepare` knows its pixels

    @property
    def field(self) -> tuple[int, int]:
        """Height and width, in pixels of the input, of what the middle place can know: the receptive field."""
        return receptive_field(self.model.encoder, self.blueprint.channels, self.blueprint.size)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the places."""
        blank = torch.zeros(1, self.blueprint.channels, *self.blueprint.size, device=next(self.model.parameters()).device)
        return self._seen(blank)[0].grid

    def tell(
        self, photos: Sequence[Image.Image], *, beam: int = 5, longest: int = 50, how: str | None = None, normalize: bool = False
    ) -> list[Caption]:
        """A caption of each photo: beam search, then the maps of the caption that was chosen.

        Args:
            photos: Upright pictures, as `visattn.load_image` gives them.
            beam: Hypotheses that are followed; 1 is greedy.
            longest: Most words, `<end>` among them.
            how: What hard attention takes: `argmax`, `expected` or `sample`; by default the likeliest place.
            normalize: Whether hypotheses are compared by their mean log-probability; else short ones win.

        Raises:
            OptionError: If an option is out of range, or `how` is given for another attention.
            ImageError: If there is no photo, or it cannot be used.
            LayoutError: If where the encoder's places lie cannot be followed.
        """
        self._check(how)
        prepared = prepare_batch(photos, self.model)
        seen, layout = self._seen(prepared.pixels)
        found = search(self.model, seen, beam=beam, longest=longest, how=how, normalize=normalize)
        words = [[*one.words, END] if one.finished else one.words for one in found]
        places = [one.places for one in found] if self.model.attention == "hard" and how != "expected" else None
        parameters = {"beam": beam, "longest": longest, "normalize": normalize, "how": how or "default"}
        told = self._scored(seen, words, how, places)
        return self._captions(prepared, layout, told, [self.vocabulary.decode(one) for one in words], words, parameters)

    def score(self, photos: Sequence[Image.Image], captions: Sequence[str], *, how: str | None = None) -> list[Caption]:
        """The captions that are given, with their likelihood and where their words look.

        Args:
            photos: Upright pictures.
            captions: One for each.
            how: See `tell`.

        Raises:
            OptionError: If there are not as many captions as photos, or one has no word.
            ImageError: If there is no photo, or it cannot be used.
            LayoutError: If where the encoder's places lie cannot be followed.
        """
        self._check(how)
        if len(captions) != len(photos):
            raise OptionError(f"there must be one caption for each photo, got {len(captions)} for {len(photos)}.")
        texts = [split(caption) for caption in captions]
        if empty := [number for number, words in enumerate(texts) if not words]:
            raise OptionError(f"caption {empty[0]} has no word. Give one or more.")
        prepared = prepare_batch(photos, self.model)
        seen, layout = self._seen(prepared.pixels)
        words = [self.vocabulary.encode(caption) for caption in captions]
        told = self._scored(seen, words, how, None)
        return self._captions(prepared, layout, told, texts, words, {"how": how or "default"})

    def _check(self, how: str | None) -> None:
        if how is not None and self.model.attention != "hard":
            raise OptionError(
                f"'{how}' says what hard attention takes; this captioner's is {self.model.attention}. Leave it out."
            )

    def _scored(self, seen: Seen, words: list[list[int]], how: str | None, places: list[list[int]] | None) -> Told:
        device = seen.features.device
        lengths = torch.tensor([max(len(one), 1) for one in words])
        taken = _padded(places).to(device) if places is not None else None
        with evaluating(self.model), torch.inference_mode():
            return self.model.tell(seen, _padded(words).to(device), lengths, how=how, places=taken)

    def _seen(self, pixels: Tensor) -> tuple[Seen, TokenLayout]:
        """What is seen of pixels, and where its places lie on them: followed through the encoder, not guessed from their number."""
        stage = nn.Sequential(OrderedDict(encoder=self.model.encoder))
        with evaluating(self.model), torch.inference_mode():
            with capture(stage, features=["encoder"]) as recording:
                maps = stage(pixels)
            seen = self.model.look_at(maps)
        layout = recording.features[0].layout
        if layout is None or layout.grid != seen.grid:
            raise LayoutError(
                f"{self.blueprint.encoder.model}: where its places lie could not be followed. Choose another layer (--layer)."
            )
        return seen, layout

    def _captions(
        self,
        prepared: Prepared,
        layout: TokenLayout,
        told: Told,
        texts: list[list[str]],
        words: list[list[int]],
        parameters: dict[str, Any],
    ) -> list[Caption]:
        """Each picture's own part of what was told, without the step of the end."""
        rows, columns = told.grid
        chosen = told.logits.float().log_softmax(2).gather(2, _padded(words).to(told.logits.device)[..., None])[..., 0]
        scores = chosen.masked_fill(~told.steps, 0).sum(1).tolist()
        hard = self.model.attention == "hard" and parameters["how"] != "expected"
        captions = []
        for i, text in enumerate(texts):
            count = len(text)
            source = facts(prepared.photos[i])
            provenance = replace(self.provenance, method=METHOD, parameters=parameters | {"caption": " ".join(text)})
            provenance = prepared.noted(
                provenance.but(
                    image=source.name,
                    image_sha256=source.sha256,
                    geometry=prepared.geometries[i],
                    notes=source.notes + _unknown(text, words[i]),
                )
            )
            values = told.alpha[i, :count].float().cpu().clone().view(count, rows, columns)
            taken = told.taken[i, :count].argmax(1).tolist()
            captions.append(
                Caption(
                    words=tuple(text),
                    score=scores[i],
                    finished=words[i][-1:] == [END],
                    map=AttentionMap(values, ("word",), layout, {"word": tuple(text)}, "attention", provenance),
                    betas=tuple(told.beta[i, :count].tolist()),
                    entropies=tuple(told.entropy[i, :count].tolist()),
                    cells=tuple(divmod(cell, columns) if hard else None for cell in taken),
                    photo=prepared.photos[i],
                    geometry=prepared.geometries[i],
                )
            )
        return captions


def load_captioner(folder: str | Path) -> Captioner:
    """The captioner of a folder that `visattn train caption` wrote: `RUN`, or `RUN/final`.

    Raises:
        WeightsError: If the folder holds no captioner, or a damaged one.
        UnsupportedModel: If its encoder is not known here.
    """
    place = Path(folder)
    within = place / "final"
    return Captioner(*load(within if is_file(within / FACTS) and not exists(place / FACTS) else place))


def _unknown(text: list[str], words: list[int]) -> tuple[str, ...]:
    """What must be said of words that are not in the vocabulary."""
    unknown = dict.fromkeys(word for word, number in zip(text, words, strict=False) if number == UNKNOWN)
    return (f"words that the captioner does not know, read as {SPECIAL[UNKNOWN]}: {', '.join(unknown)}",) if unknown else ()


def _padded(sequences: list[list[int]]) -> Tensor:
    return pad_sequence([torch.tensor(one or [END]) for one in sequences], batch_first=True)
