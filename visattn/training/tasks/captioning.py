"""Captions as a task: pictures with captions in, a captioner out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast, get_args

import torch
from PIL import Image
from torch import Tensor, nn

from visattn._support.checks import printable
from visattn._support.extras import installed
from visattn._support.files import check_output, write_whole
from visattn._support.types import Split
from visattn.captioning import Captioner, Vocabulary, caption_scores, split
from visattn.captioning.folders import CaptionerBlueprint, save
from visattn.data.captions.pictures import SCENES
from visattn.data.captions.readers import Captioned, read_captions
from visattn.drawing.pictures import to_png
from visattn.errors import DataError, ImageError, OptionError, VisattnWarning, WeightsError
from visattn.loading import load_model
from visattn.loading.blueprints import Blueprint
from visattn.models.show_attend_tell import UNKNOWN, Attention, ShowAttendTell, loss
from visattn.provenance import Provenance
from visattn.training.report.card import Origin, Reached, code, page, percent
from visattn.training.tasks.caption_config import CaptionConfig
from visattn.training.tasks.task import Draw, Targeted, Task, input_size, moments_of, scenes_size

_SHOWN = 4  # test pictures whose filmstrips are drawn
_TOLD = 500  # test pictures whose captions are scored for the card
_AT_ONCE = 16  # decoded photos in memory
_BEAM = 5


class Words:
    """One caption of a picture, drawn anew in each epoch, as numbers of words."""

    def __init__(self, vocabulary: Vocabulary, longest: int) -> None:
        """Of captions of at most `longest` words."""
        self.vocabulary, self.longest = vocabulary, longest

    def fitting(self, captions: Sequence[str]) -> list[str]:
        """Those that are short enough."""
        return [caption for caption in captions if len(split(caption)) <= self.longest]

    def one(self, known: Sequence[str]) -> list[int]:
        """Numbers, `END` at the end."""
        captions = self.fitting(known)
        return self.vocabulary.encode(captions[int(torch.randint(len(captions), ()))])

    def batch(self, targets: list[list[int]]) -> Targeted:
        """Words `(B, T)`, and how many of each caption, `(B,)`."""
        lengths = torch.tensor([len(numbers) for numbers in targets], dtype=torch.long)
        words = torch.zeros(len(targets), int(lengths.max()) if targets else 0, dtype=torch.long)
        for row, numbers in zip(words, targets, strict=True):
            row[: len(numbers)] = torch.tensor(numbers)
        return words, lengths


class Captioning(Task):
    """What to say of a picture."""

    def __init__(self, config: CaptionConfig) -> None:
        """Read the data, and know its words.

        Raises:
            DataError: If it cannot be learned from.
            OptionError: If there is no such layer.
            UnsupportedModel: If the encoder gives no map.
        """
        self.config: CaptionConfig = config
        self.pictures: Captioned
        self.tests: Captioned
        self.pictures, self.tests = (self._read(part) for part in get_args(Split))
        known = (caption for index in range(len(self.pictures)) for caption in self.pictures.captions(index))
        vocabulary = Vocabulary.of(known, config.min_count)
        self.targets: Words = Words(vocabulary, config.longest)
        for pictures in (self.pictures, self.tests):
            self._check(pictures)
        channels = 3 if config.weights != "none" or config.model.startswith("tv:") else self.pictures.channels
        mean, std = moments_of(config, self.pictures, channels)
        size = input_size(config, self.pictures.size)
        self._blueprint = CaptionerBlueprint(
            Blueprint(config.model, (), channels, size, mean, std, options=config.model_kwargs),
            vocabulary.words,
            layer=config.layer,
            attention=cast(Attention, config.attention),
            embedding=config.embedding,
            state=config.state,
            width=config.width,
            dropout=config.dropout,
            word_dropout=config.word_dropout,
            coordinates=config.coordinates,
            temperature=config.temperature,
        )
        self.model: ShowAttendTell

    def _read(self, part: Split) -> Captioned:
        config = self.config
        count = config.train_count if part == "train" else config.test_count
        if config.root and config.data in SCENES:
            raise OptionError(f"root is for pictures in files, got {config.data}, which are drawn. Leave root (--root) out.")
        root = Path(config.root) if config.root else None
        return read_captions(config.data, part, root=root, count=count or None, size=scenes_size(config))

    def _check(self, pictures: Captioned) -> None:
        """Every picture has a caption that is short enough, and some word of them is known."""
        known = False
        for index in range(len(pictures)):
            captions = self.targets.fitting(pictures.captions(index))
            if not captions:
                raise DataError(
                    f"{pictures.name(index)}: must have a caption of at most {self.config.longest} words, got longer ones only; raise "
                    "longest (--longest), or leave the picture out."
                )
            known = known or any(set(self.targets.vocabulary.encode(caption)[:-1]) - {UNKNOWN} for caption in captions)
        if not known:
            raise DataError(
                f"{printable(self.config.data)}: no word of the test captions occurs in the training captions; are both of one language?"
            )

    @property
    def blueprint(self) -> CaptionerBlueprint:
        """What the captioner is built from."""
        return self._blueprint

    def build(self) -> ShowAttendTell:
        """The captioner, with a published encoder where it is asked for."""
        self.model = self.blueprint.build()
        if self.config.weights != "none":
            _begin_with(self.model.encoder.model, self.config)  # type: ignore[arg-type] # a module's attribute
        if self.config.freeze:
            self.model.encoder.requires_grad_(False)
            if self.config.weights == "none":
                warnings.warn(
                    "freeze (--freeze) leaves the encoder's random weights as they are; pass weights (--weights)",
                    VisattnWarning,
                    stacklevel=2,
                )
        return self.model

    def loss(self, forward: Any, pixels: Tensor, targets: Targeted) -> Tensor:  # noqa: ANN401
        """See `visattn.models.show_attend_tell.loss`."""
        words, lengths = targets
        if self.config.freeze:
            self.model.encoder.eval()  # its batch norms too
        if self.config.gray:
            chosen = (torch.rand(len(pixels), 1, 1, 1) < self.config.gray).to(pixels.device)
            pixels = torch.where(chosen, pixels.mean(1, keepdim=True), pixels)
        objective = self.config.objective
        told = forward(pixels, words, lengths, how=objective.how() if self.model.attention == "hard" else None)
        return loss(self.model, told, words, objective)

    def measure(self, model: nn.Module, pixels: Tensor, targets: Targeted) -> tuple[float, float, float]:
        """Words told right after the true ones before them, and their negative log-likelihood."""
        words, lengths = targets
        with torch.no_grad():
            told = model(pixels, words, lengths)
        right = float((told.logits.argmax(2) == words)[told.steps].sum())
        chances = told.logits.float().log_softmax(2).gather(2, words[..., None])[..., 0]
        return right, -float(chances[told.steps].sum()), int(lengths.sum())

    def maps(self, model: nn.Module, run: Path) -> Draw:
        """Filmstrips of the true captions of some test pictures, one below the other."""
        shown = [(picture.convert("RGB"), self.targets.fitting(captions)[0]) for picture, captions in self.shown(_SHOWN)]
        photos, captions = zip(*shown, strict=True)
        folder = run / "maps"
        check_output(folder / "step_00000000.png", overwrite=True)

        def draw(step: int) -> None:
            if step % self.config.maps_every:
                return
            captioner = Captioner(cast(ShowAttendTell, model), self.blueprint, Provenance(model=self.title))
            strips = []
            for caption in captioner.score(photos, captions):
                with suppress(OptionError):  # too narrow to be shown
                    strips.append(caption.filmstrip(panel=96))
            if not strips:
                return
            sheet = Image.new("RGB", (max(strip.width for strip in strips), sum(strip.height for strip in strips)), "white")
            top = 0
            for strip in strips:
                sheet.paste(strip, (0, top))
                top += strip.height
            write_whole(folder / f"step_{step:08d}.png", to_png(sheet, strips[0].provenance.but(notes=(f"step {step}",))))

        return draw

    def keep(self, model: nn.Module, folder: Path, facts: Mapping[str, Any]) -> None:
        """For `visattn caption`."""
        save(cast(ShowAttendTell, model), self.blueprint, folder, facts)

    @property
    def title(self) -> str:
        """As `soft attention captioner on scenes`."""
        return f"{self.config.attention} attention captioner on {self.config.shared().data}"

    def card(self, model: nn.Module, reached: Reached, origin: Origin) -> str:
        """What it tells of test pictures is scored where the scorers are installed."""
        config, data = self.config.shared(), self.data()
        captioner = Captioner(cast(ShowAttendTell, model), self.blueprint, Provenance())
        grid, field = captioner.grid, captioner.field
        height, width = self.blueprint.size
        told, references = self._told(captioner)
        exact = sum(
            split(one) in [split(reference) for reference in known] for one, known in zip(told, references, strict=True)
        ) / max(len(told), 1)
        results = [
            f"Words told right after the true words before them: {percent(reached.accuracy)}; {reached.loss:.4f} nats a word.",
            f"Of {len(told)} test pictures with beam {_BEAM}: {percent(exact)} of the captions are one of the references, word for word.",
        ]
        if installed("pycocoevalcap"):
            scores = caption_scores(told, references)
            results.append(
                ", ".join(f"{name} {value:.3f}" for name, value in scores.items()) + " (visattn.captioning.caption_scores)."
            )
        return page(
            f"{config.attention.capitalize()} attention captioner on {code(data.name)}",
            config,
            data,
            reached,
            origin,
            what=(
                f"Show, attend and tell with {config.attention} attention: from pictures of {height} x {width} pixels to a caption from a "
                f"vocabulary of {len(self.blueprint.words) - 2} words.",
                f"Encoder: {code(config.model)}, a map of {grid[0]} x {grid[1]} places; each knows {field[0]} x {field[1]} "
                f"pixels, {percent(field[0] / height)} of the height (measured by gradients).",
                f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters.",
            ),
            results=results,
            limits=(
                f"One run, of seed {config.seed}. Measured on the test pictures above only.",
                "It knows the words of its training captions and no others, and describes any picture with them.",
                "A map says where a word looked, not why it was chosen.",
            ),
        )

    def _told(self, captioner: Captioner) -> tuple[list[str], list[tuple[str, ...]]]:
        """Captions of the first test pictures that can be read, and the references."""
        references: list[tuple[str, ...]] = []
        told: list[str] = []
        for start in range(0, min(_TOLD, len(self.tests)), _AT_ONCE):
            photos = []
            for index in range(start, min(start + _AT_ONCE, _TOLD, len(self.tests))):
                with suppress(ImageError):
                    picture, captions = self.tests[index]
                    photos.append(picture.convert("RGB"))
                    references.append(captions)
            if photos:
                told += [one.text for one in captioner.tell(photos, beam=_BEAM, longest=self.config.longest + 1)]
        return told, references


def _begin_with(model: nn.Module, config: CaptionConfig) -> None:
    """Give an encoder the published weights of its model.

    Raises:
        WeightsError: If weights cannot be had, or are of another network.
    """
    published = load_model(config.model, weights=config.weights).state_dict()
    own = model.state_dict()
    other = [name for name, tensor in own.items() if name not in published or published[name].shape != tensor.shape]
    if other:
        raise WeightsError(
            f"{config.model}: {len(other)} tensors differ from the published ones ({printable(other[0])}, ...); leave model_kwargs and "
            "img_size (--img-size) as they were published, or pass weights='none' (--weights none)."
        )
    model.load_state_dict({name: published[name] for name in own})
