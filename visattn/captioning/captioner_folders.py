"""Saving and loading of captioners as folders with weights, vocabulary and architecture. Loading runs no code from the folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import torch
from msgspec import Meta

from visattn._support.checks import printable, told
from visattn._support.json_files import Share, converted
from visattn._support.language import option
from visattn._support.own_code import is_function
from visattn._support.reprs import brief
from visattn.captioning.encoders import Shape, encoder
from visattn.captioning.vocabulary import SPECIAL
from visattn.core.loading.blueprints import Blueprint, shared
from visattn.core.loading.limits import no_larger_than
from visattn.core.loading.model_folders import AGAIN, read_blueprint, read_facts, read_weights, write_folder
from visattn.core.loading.translation import fill
from visattn.core.loading.weights import FACTS
from visattn.core.provenance import Provenance
from visattn.errors import UnsupportedModel, VisattnError, WeightsError
from visattn.models.show_attend_tell import Attention, First, ShowAttendTell

KIND = "captioner"
_Width = Annotated[int, Meta(ge=1, lt=2**16)]


class _Captioner(TypedDict):
    """A `CaptionerBlueprint`."""

    encoder: dict[str, Any]
    words: Annotated[tuple[str, ...], Meta(min_length=len(SPECIAL))]
    layer: str
    attention: Attention
    embed_dim: _Width
    hidden_dim: _Width
    attention_dim: Annotated[int, Meta(ge=0, lt=2**16)]
    dropout: Share
    word_dropout: Share
    coordinates: bool
    temperature: Annotated[float, Meta(gt=0, le=1e9)]
    first: NotRequired[First]  # older captioners do not state it
    radius: NotRequired[_Width]


@dataclass(frozen=True)
class CaptionerBlueprint:
    """Specification from which a captioner is built.

    Attributes:
        encoder: Blueprint of the classifier whose feature map is used; it has no classes.
        words: Vocabulary, starting with `<end>` and `<unknown>`.
        layer: Layer of the feature map, see `FeatureMap`.
        attention: `soft`, `hard`, `local` or `uniform`.
        embed_dim: Dimension of the word embeddings.
        hidden_dim: Dimension of the LSTM's hidden state.
        attention_dim: Dimension of the hidden layer that computes attention scores; 0: the same as the features.
        dropout: Dropout before the output layer.
        word_dropout: Probability of hiding the previous word in training.
        coordinates: Whether learned row and column embeddings are added to the features.
        temperature: Temperature of Gumbel samples.
        first: Initial state of the LSTM: from the `mean` of the features, or `learned`, which has seen nothing of the image.
        radius: Cells on each side of the center of a window of `local` attention.
    """

    encoder: Blueprint
    words: tuple[str, ...]
    layer: str = ""
    attention: Attention = "soft"
    embed_dim: int = 512
    hidden_dim: int = 512
    attention_dim: int = 0
    dropout: float = 0.5
    word_dropout: float = 0.0
    coordinates: bool = False
    temperature: float = 1.0
    first: First = "mean"
    radius: int = 2

    __repr__ = brief

    @property
    def channels(self) -> int:
        """Number of input channels: 1 for gray images, 3 for color."""
        return self.encoder.channels

    @property
    def size(self) -> tuple[int, int]:
        """Input size `(height, width)` in pixels."""
        return self.encoder.size

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of each channel, for pixels in [0, 1]."""
        return self.encoder.mean

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of each channel, for pixels in [0, 1]."""
        return self.encoder.std

    def build(self) -> ShowAttendTell:
        """Build the captioner with random weights, from the current random state.

        Raises:
            OptionError: If the layer does not exist.
            UnsupportedModel: If the model is unknown or gives no feature map.
            VisattnError: If the model exceeds the limit of an enclosing `no_larger_than`.
        """
        made, shape = encoder(self.encoder, self.layer)
        try:
            return self._around(made, shape)
        except VisattnError:
            raise
        except RuntimeError as error:
            cause = printable((str(error) or type(error).__name__).splitlines()[0])
            raise UnsupportedModel(
                f"the captioner cannot be built ({cause}). Choose a smaller {option('embed_dim')}, {option('hidden_dim')} and "
                f"{option('attention_dim')}."
            ) from error

    def _around(self, made: torch.nn.Module, shape: Shape) -> ShowAttendTell:
        return ShowAttendTell(
            made,
            shape.channels,
            len(self.words),
            attention=self.attention,
            embed_dim=self.embed_dim,
            hidden_dim=self.hidden_dim,
            attention_dim=self.attention_dim or None,
            dropout=self.dropout,
            word_dropout=self.word_dropout,
            grid=shape.grid if self.coordinates else None,
            temperature=self.temperature,
            first=self.first,
            radius=self.radius,
        )


def save_captioner(
    model: ShowAttendTell, blueprint: CaptionerBlueprint, folder: Path, facts: Mapping[str, Any] | None = None
) -> Path:
    """Save a captioner to a new folder for `load_captioner`. The folder is written completely or not at all.

    Args:
        model: Captioner built from the blueprint, without wrappers.
        blueprint: Specification from which it was built.
        folder: New folder.
        facts: Further JSON values to store in `model.json`.

    Returns:
        `folder`.

    Raises:
        OutputError: If the folder exists or cannot be written.
        ResourceError: If the disk is full.
    """
    described = replace(blueprint, encoder=shared(blueprint.encoder))
    return write_folder(model, folder, {"kind": KIND, **asdict(described), **(facts or {})})


def load(folder: Path) -> tuple[ShowAttendTell, CaptionerBlueprint, Provenance, str]:
    """Load a captioner from a folder, in evaluation mode. Return it with its blueprint, provenance, and the name of its training data.

    Raises:
        WeightsError: If the folder holds no captioner, or one that is damaged, from a newer version, or built by a Python file.
        UnsupportedModel: If the encoder's model is unknown.
    """
    name, shown = printable(str(folder)), printable(str(folder / FACTS))
    described = read_facts(folder)
    kind = described.get("kind", "classifier")
    if kind != KIND:
        raise WeightsError(f"{name}: holds a {told(kind)}, not a captioner. Pass the folder of a trained captioner, RUN/final.")
    blueprint = _read(described, shown)
    if is_function(blueprint.encoder.model):
        raise WeightsError(f"{name}: was built by {printable(blueprint.encoder.model)}; loading does not run Python files.")
    tensors = read_weights(folder, described)
    with torch.random.fork_rng(devices=[]), no_larger_than(tensors, name, AGAIN):
        model = blueprint.build()
    fill(model, tensors, name, fix=AGAIN)
    title = f"show, attend and tell ({blueprint.attention}) on {blueprint.encoder.model}"
    made = Provenance(model=title, weights=folder.resolve().name, weights_sha256=described["sha256"])
    return model.eval(), blueprint, made, str(described.get("data", ""))


def _read(described: dict[str, Any], shown: str) -> CaptionerBlueprint:
    try:
        found = converted(described, _Captioner)
        if len(set(found["words"])) < len(found["words"]):
            raise ValueError("words must differ")
        if found["words"][: len(SPECIAL)] != SPECIAL:
            raise ValueError(f"its vocabulary does not begin with {' and '.join(SPECIAL)}")
    except ValueError as error:
        raise WeightsError(f"{shown}: is damaged ({printable(str(error))}); {AGAIN}.") from error
    own: dict[str, Any] = {**found, "encoder": read_blueprint(found["encoder"], shown, classes=False)}
    return CaptionerBlueprint(**own)
