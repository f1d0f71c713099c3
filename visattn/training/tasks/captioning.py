"""Captioning task: trains a captioner on images with captions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import torch
from PIL import Image
from torch import Tensor, nn

from visattn._support.checks import printable
from visattn._support.extras import installed
from visattn._support.language import option
from visattn._support.notes import warn
from visattn._support.reprs import in_pixels
from visattn._support.types import Split
from visattn._support.whole_files import check_output, write_whole
from visattn.captioning import Captioner, CaptionerBlueprint, Vocabulary, caption_scores, save_captioner, split
from visattn.core.drawing.pictures import to_png
from visattn.core.loading.blueprints import Blueprint
from visattn.core.provenance import Provenance
from visattn.data.captions import SCENES, CaptionDataset, load_captions
from visattn.errors import DataError, ImageError, OptionError, WeightsError
from visattn.models.show_attend_tell import UNKNOWN, Attention, First, ShowAttendTell, loss
from visattn.training.report.card import Achieved, Origin, code, page, percent
from visattn.training.tasks.beginning import Beginning, beginning_of, going_on, run_of
from visattn.training.tasks.caption_config import CaptionConfig
from visattn.training.tasks.task import Draw, Measured, Targeted, Task, input_size, moments_of, scenes_size

_SHOWN = 4  # number of test images whose filmstrips are drawn
_TOLD = 500  # number of test images whose captions are scored for the card
_AT_ONCE = 16  # images captioned at the same time
_BEAM = 5


class Words:
    """Targets for captioning: word indices of one caption per image, drawn at random in each epoch."""

    def __init__(self, vocabulary: Vocabulary, max_length: int) -> None:
        """Set the vocabulary, and the number of words above which captions are left out."""
        self.vocabulary, self.max_length = vocabulary, max_length

    def fitting(self, captions: Sequence[str]) -> list[str]:
        """Return the captions of at most `max_length` words."""
        return [caption for caption in captions if len(split(caption)) <= self.max_length]

    def one(self, known: Sequence[str]) -> list[int]:
        """Draw one caption and encode it as word indices that end with `END`."""
        captions = self.fitting(known)
        return self.vocabulary.encode(captions[int(torch.randint(len(captions), ()))])

    def batch(self, targets: list[list[int]]) -> Targeted:
        """Pad captions to word indices `(B, T)`. Return these and the lengths `(B,)`."""
        lengths = torch.tensor([len(numbers) for numbers in targets], dtype=torch.long)
        words = torch.zeros(len(targets), int(lengths.max()) if targets else 0, dtype=torch.long)
        for row, numbers in zip(words, targets, strict=True):
            row[: len(numbers)] = torch.tensor(numbers)
        return words, lengths


class Captioning(Task):
    """Image captioning task."""

    def __init__(self, config: CaptionConfig) -> None:
        """Load the data and build the vocabulary.

        Raises:
            DataError: If the data cannot be used for training.
            OptionError: If the layer does not exist.
            UnsupportedModel: If the encoder has no feature map.
        """
        self.run = run_of(config)
        config = going_on(config, self.run)
        self.config: CaptionConfig = config
        self.pictures: CaptionDataset
        self.tests: CaptionDataset
        self.pictures, self.tests = (self._read(part) for part in get_args(Split))
        known = (caption for index in range(len(self.pictures)) for caption in self.pictures.captions(index))
        vocabulary = Vocabulary.of(known, config.min_count)
        self.targets: Words = Words(vocabulary, config.max_length)
        for pictures, part in zip((self.pictures, self.tests), get_args(Split), strict=True):
            self._check(pictures, part)
        channels = 3 if config.weights != "none" or config.model.startswith("tv:") else self.pictures.channels
        channels = channels if self.run is None else self.run.channels
        mean, std = moments_of(config, self.pictures, channels, self.run)
        size = input_size(config, self.pictures, self.run)
        encoder = Blueprint(config.model, (), channels, size, mean, std, options=config.model_kwargs)
        if self.run is not None:
            encoder = replace(encoder, attention=self.run.attention, attention_init=self.run.attention_init)
        self._blueprint = CaptionerBlueprint(
            encoder,
            vocabulary.words,
            layer=config.layer,
            attention=cast(Attention, config.attention),
            embed_dim=config.embed_dim,
            hidden_dim=config.hidden_dim,
            attention_dim=config.attention_dim,
            dropout=config.dropout,
            word_dropout=config.word_dropout,
            coordinates=config.coordinates,
            temperature=config.temperature,
            first=cast(First, config.first),
            radius=config.radius,
        )
        self.model: ShowAttendTell

    def _read(self, part: Split) -> CaptionDataset:
        config = self.config
        count = config.train_count if part == "train" else config.test_count
        if config.root and config.data in SCENES:
            raise OptionError(
                f"root needs a dataset of image files, got {config.data}, which is generated. Leave {option('root')} out."
            )
        root = Path(config.root) if config.root else None
        return load_captions(config.data, part, root=root, count=count or None, size=scenes_size(config))

    def _check(self, pictures: CaptionDataset, part: Split) -> None:
        """Check that every image has a caption of at most `max_length` words, and that at least one of the words is known."""
        known = False
        for index in range(len(pictures)):
            captions = self.targets.fitting(pictures.captions(index))
            if not captions:
                raise DataError(
                    f"{pictures.name(index)}: must have a caption of at most {self.config.max_length} words, got only longer ones. Raise "
                    f"{option('max_length')}, or leave the image out."
                )
            known = known or any(set(self.targets.vocabulary.encode(caption)[:-1]) - {UNKNOWN} for caption in captions)
        if not known:
            fewest = self.config.min_count
            often, fix = (f"{fewest} times or more ", f"Lower {option('min_count')}, or check") if fewest > 1 else ("", "Check")
            raise DataError(
                f"{printable(self.config.data)}: no word of the {part} captions occurs {often}in the training captions. "
                f"{fix} that both have the same language."
            )

    @property
    def blueprint(self) -> CaptionerBlueprint:
        """Specification from which the captioner is built."""
        return self._blueprint

    def build(self) -> ShowAttendTell:
        """Build the captioner, and load published weights into its encoder if requested."""
        self.model = self.blueprint.build()
        if self.config.weights != "none":
            _fill(cast(nn.Module, self.model.encoder.model), beginning_of(self.config, self.run), self.config)
        if self.config.freeze:
            self.model.encoder.requires_grad_(False)
            if self.config.weights == "none":
                warn(f"{option('freeze')} keeps the random weights of the encoder. Pass {option('weights')}")
        return self.model

    def loss(self, forward: Any, pixels: Tensor, targets: Targeted) -> Tensor:  # noqa: ANN401
        """Compute the loss; see `visattn.models.show_attend_tell.loss`."""
        words, lengths = targets
        if self.config.freeze:
            self.model.encoder.eval()  # also freezes batch norm statistics
        if self.config.grayscale:
            chosen = (torch.rand(len(pixels), 1, 1, 1) < self.config.grayscale).to(pixels.device)
            pixels = torch.where(chosen, pixels.mean(1, keepdim=True), pixels)
        objective = self.config.objective
        decoded = forward(pixels, words, lengths, sampling=objective.sampling() if self.model.attention == "hard" else None)
        return loss(self.model, decoded, words, objective)

    def measure(self, model: nn.Module, pixels: Tensor, targets: Targeted) -> Measured:
        """Compute the number of correct words with teacher forcing, their negative log-likelihood, and the number of words."""
        words, lengths = targets
        with torch.no_grad():
            decoded = model(pixels, words, lengths)
        right = float((decoded.logits.argmax(2) == words)[decoded.steps].sum())
        chances = decoded.logits.float().log_softmax(2).gather(2, words[..., None])[..., 0]
        return Measured(right, -float(chances[decoded.steps].sum()), int(lengths.sum()))

    def maps(self, model: nn.Module, run: Path) -> Draw:
        """Return a function that draws filmstrips of some test images with their reference captions."""
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
                with suppress(OptionError):  # an image too narrow for a filmstrip
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
        """Save the captioner for `visattn caption`."""
        save_captioner(cast(ShowAttendTell, model), self.blueprint, folder, facts)

    @property
    def title(self) -> str:
        """Title, such as `soft attention captioner on scenes`."""
        return f"{self.config.attention} attention captioner on {self.config.shared().data}"

    def card(self, model: nn.Module, reached: Achieved, origin: Origin) -> str:
        """Return the model card. Generated captions are scored if `pycocoevalcap` is installed."""
        config, data = self.config.shared(), self.data()
        captioner = Captioner(cast(ShowAttendTell, model), self.blueprint, Provenance())
        grid, field = captioner.grid, captioner.field
        height, width = self.blueprint.size
        decoded, references = self._told(captioner)
        exact = sum(
            split(one) in [split(reference) for reference in known] for one, known in zip(decoded, references, strict=True)
        ) / max(len(decoded), 1)
        results = [
            f"Next-word accuracy with teacher forcing: {percent(reached.accuracy)}; {reached.loss:.4f} nats per word.",
            f"Captions of {len(decoded)} test images with beam size {_BEAM}: {percent(exact)} match a reference word for word.",
        ]
        if installed("pycocoevalcap"):
            scores = caption_scores(decoded, references)
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
                f"Show, Attend and Tell with {config.attention} attention: images of {in_pixels((height, width))} pixels, captions from a "
                f"vocabulary of {len(self.blueprint.words) - 2} words.",
                f"Encoder: {code(config.model)}, with a feature map of {grid[0]} x {grid[1]} cells. The receptive field of a cell is "
                f"{in_pixels(field)} pixels, {percent(field[0] / height)} of the image height (measured with gradients).",
                "The initial state of the decoder is "
                + ("computed from the mean of the features." if config.first == "mean" else "learned, the same for every image."),
                f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters.",
            ),
            results=results,
            limits=(
                f"One run, with seed {config.seed}. Measured on the test images above only.",
                "The model can only use words from its training captions, whatever an image shows.",
                "An attention map shows where the model attended while it generated a word, not why it chose the word.",
            ),
        )

    def _told(self, captioner: Captioner) -> tuple[list[str], list[tuple[str, ...]]]:
        """Generate captions of the first readable test images. Return them with the references."""
        references: list[tuple[str, ...]] = []
        decoded: list[str] = []
        for start in range(0, min(_TOLD, len(self.tests)), _AT_ONCE):
            photos = []
            for index in range(start, min(start + _AT_ONCE, _TOLD, len(self.tests))):
                with suppress(ImageError):
                    picture, captions = self.tests[index]
                    photos.append(picture.convert("RGB"))
                    references.append(captions)
            if photos:
                decoded += [
                    one.text for one in captioner.generate(photos, beam_size=_BEAM, max_length=self.config.max_length + 1)
                ]
        return decoded, references


def _fill(model: nn.Module, begun: Beginning, config: CaptionConfig) -> None:
    """Load weights into an encoder.

    Raises:
        WeightsError: If they belong to another network.
    """
    own = model.state_dict()
    other = [name for name, tensor in own.items() if name not in begun.tensors or begun.tensors[name].shape != tensor.shape]
    if other:
        raise WeightsError(
            f"{config.model}: {len(other)} tensors differ from those of {begun.source} ({printable(other[0])}, ...). Use their "
            f"model_kwargs and {option('img_size')}, or pass {option('weights', 'none')}."
        )
    model.load_state_dict({name: begun.tensors[name] for name in own})
