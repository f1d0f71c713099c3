"""A captioner as a folder: weights, the words it knows, and how it is built; nothing in it runs code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from visattn._support.checks import printable
from visattn.captioning.encoders import Shape, encoder
from visattn.captioning.vocabulary import SPECIAL
from visattn.errors import UnsupportedModel, VisattnError, WeightsError
from visattn.loading.blueprints import Blueprint, shared
from visattn.loading.folders import read_blueprint, read_facts, read_weights, write_folder
from visattn.loading.limits import no_larger_than
from visattn.loading.translation import fill
from visattn.loading.weights import FACTS
from visattn.models.show_attend_tell import ATTENTIONS, Attention, ShowAttendTell
from visattn.provenance import Provenance

KIND = "captioner"
_LEAST = {"embedding": 1, "state": 1, "width": 0}


@dataclass(frozen=True)
class CaptionerBlueprint:
    """What a captioner is built from.

    Attributes:
        encoder: The classifier whose feature map is looked at; it has no classes.
        words: Of the vocabulary, `<end>` and `<unknown>` first.
        layer: Of the map, see `FeatureMap`.
        attention: `soft`, `hard` or `uniform`.
        embedding: Width of a word.
        state: Width of the LSTM's state.
        width: Of the hidden layer of the scores; 0: that of the features.
        dropout: Before the last layer.
        word_dropout: Probability that the word before is hidden in training.
        coordinates: Whether learned coordinates are added to the features.
        temperature: Of Gumbel draws.
    """

    encoder: Blueprint
    words: tuple[str, ...]
    layer: str = ""
    attention: Attention = "soft"
    embedding: int = 512
    state: int = 512
    width: int = 0
    dropout: float = 0.5
    word_dropout: float = 0.0
    coordinates: bool = False
    temperature: float = 1.0

    @property
    def channels(self) -> int:
        """1 for gray pictures, 3 for color."""
        return self.encoder.channels

    @property
    def size(self) -> tuple[int, int]:
        """`(height, width)` of the input in pixels."""
        return self.encoder.size

    @property
    def mean(self) -> tuple[float, ...]:
        """Of each channel, of pixels in [0, 1]."""
        return self.encoder.mean

    @property
    def std(self) -> tuple[float, ...]:
        """Likewise the standard deviation."""
        return self.encoder.std

    def build(self) -> ShowAttendTell:
        """The captioner with random weights, as the random state is.

        Raises:
            OptionError: If there is no such layer.
            UnsupportedModel: If there is no such model, or it gives no map.
            VisattnError: As the body of `no_larger_than` does.
        """
        made, shape = encoder(self.encoder, self.layer)
        try:
            return self._around(made, shape)
        except VisattnError:
            raise
        except RuntimeError as error:
            cause = printable((str(error) or type(error).__name__).splitlines()[0])
            raise UnsupportedModel(f"the captioner cannot be built ({cause}); choose a smaller embedding and state.") from error

    def _around(self, made: torch.nn.Module, shape: Shape) -> ShowAttendTell:
        return ShowAttendTell(
            made,
            shape.channels,
            len(self.words),
            attention=self.attention,
            embedding=self.embedding,
            state=self.state,
            width=self.width or None,
            dropout=self.dropout,
            word_dropout=self.word_dropout,
            grid=shape.grid if self.coordinates else None,
            temperature=self.temperature,
        )


def save(model: ShowAttendTell, blueprint: CaptionerBlueprint, folder: Path, facts: Mapping[str, Any] | None = None) -> Path:
    """Write a folder that `load` reads; it is there as a whole or not at all.

    Args:
        model: Built from the blueprint; not wrapped.
        blueprint: What it was built from.
        folder: A new folder.
        facts: More that should stand in `model.json`, JSON values.

    Returns:
        `folder`.

    Raises:
        OutputError: If the folder exists or cannot be written.
        ResourceError: If the disk is full.
    """
    told = replace(blueprint, encoder=shared(blueprint.encoder))
    return write_folder(model, folder, {"kind": KIND, **asdict(told), **(facts or {})})


def load(folder: Path) -> tuple[ShowAttendTell, CaptionerBlueprint, Provenance]:
    """Build the captioner of a folder and give it its weights, in evaluation mode.

    Raises:
        WeightsError: If the folder holds no captioner, or one that is damaged, of a newer version or built by a Python file.
        UnsupportedModel: If there is no such model here.
    """
    name, shown = printable(str(folder)), printable(str(folder / FACTS))
    told = read_facts(folder)
    if told.get("kind") != KIND:
        raise WeightsError(f"{name}: holds a classifier, not a captioner; pass a folder that visattn train caption wrote.")
    blueprint = _read(told, shown)
    if blueprint.encoder.model.rpartition(":")[0].endswith(".py"):
        raise WeightsError(f"{name}: was built by {printable(blueprint.encoder.model)}, which loading would run.")
    tensors = read_weights(folder, told)
    with torch.random.fork_rng(devices=[]), no_larger_than(tensors, name):
        model = blueprint.build()
    fill(model, tensors, name)
    title = f"show, attend and tell ({blueprint.attention}) on {blueprint.encoder.model}"
    return model.eval(), blueprint, Provenance(model=title, weights=folder.resolve().name, weights_sha256=told["sha256"])


def _read(told: dict[str, Any], shown: str) -> CaptionerBlueprint:
    own: dict[str, Any] = {name: told.get(name) for name in CaptionerBlueprint.__dataclass_fields__ if name != "encoder"}
    words = own["words"]
    numbers = {name: type(own[name]) in (int, float) for name in ("dropout", "word_dropout", "temperature")}
    fits = {
        "words": isinstance(words, list) and {*map(type, words)} == {str} and len(set(words)) == len(words),
        "layer": isinstance(own["layer"], str),
        "attention": own["attention"] in ATTENTIONS,
        "coordinates": type(own["coordinates"]) is bool,
        **{name: type(own[name]) is int and low <= own[name] < 2**16 for name, low in _LEAST.items()},
        **{name: number and 0 <= own[name] <= 1 for name, number in numbers.items()},
        "temperature": numbers["temperature"] and 0 < own["temperature"] <= 1e9,
        "encoder": isinstance(told.get("encoder"), dict),
    }
    if wrong := next((name for name, fit in fits.items() if not fit), None):
        raise WeightsError(f"{shown}: is damaged, '{wrong}' is missing or wrong; copy the folder again.")
    own["words"] = tuple(words)
    if own["words"][:2] != SPECIAL:
        raise WeightsError(f"{shown}: its vocabulary does not begin with {' and '.join(SPECIAL)}; copy the folder again.")
    return CaptionerBlueprint(read_blueprint(told.get("encoder"), shown, classes=False), **own)
