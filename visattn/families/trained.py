"""Networks that visattn trained: a folder with `model.safetensors`, and `model.json` that says how the network is built.

A `Blueprint` builds a network for a data set; `save` writes the folder, `load` reads it, and nothing in it runs code. A model that was
loaded so knows its classes and how its pixels are prepared; for the rest it is a model of the library that it came from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import safetensors.torch
import timm.data
import torch
from torch import Tensor, nn

from visattn import models
from visattn._support.checks import printable, told as brief
from visattn._support.files import base_name, building_folder, regular
from visattn.capturing import Anatomy
from visattn.errors import OptionError, UnsupportedModel, WeightsError
from visattn.families import custom, timm as of_timm, torchvision as of_torchvision
from visattn.families._building import no_larger_than
from visattn.families._checkpoint import fill
from visattn.families._feature_map import last_feature_map
from visattn.families._spec import InputSpec
from visattn.families._weights import check_finite, digest, read_checkpoint
from visattn.nn import ATTENTION, attach
from visattn.provenance import Provenance

FORMAT = 1
LARGEST = 2048  # side of an input in pixels
WEIGHTS, FACTS = "model.safetensors", "model.json"


def _ram(*, attention: str | None, **options: Any) -> nn.Module:  # noqa: ANN401
    """The recurrent attention model; it has no place for another attention."""
    if attention:
        raise OptionError(f"visattn_ram attends by its glimpses and takes no other attention, got {attention}. Leave it at none.")
    return models.RAM(**options)


REFERENCES: dict[str, Callable[..., nn.Module]] = {
    f"visattn_{make.__name__}": make
    for make in (models.resnet14, models.resnet18, models.resnet20, models.resnet50, models.resnet56)
} | {"visattn_ram": _ram}
_ELSEWHERE = {  # options of timm and torchvision that read files or the network
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "checkpoint_path",
    "cache_dir",
    "scriptable",
    "weights",
    "weights_backbone",
}


class Seen(Protocol):
    """How a network sees pictures; see `Blueprint`."""

    @property
    def channels(self) -> int:
        """1 or 3."""
        ...

    @property
    def size(self) -> tuple[int, int]:
        """In pixels."""
        ...

    @property
    def mean(self) -> tuple[float, ...]:
        """Of each channel."""
        ...

    @property
    def std(self) -> tuple[float, ...]:
        """Likewise."""
        ...


@dataclass(frozen=True)
class Blueprint:
    """What a network is built from, and how its pixels are prepared.

    Attributes:
        model: A name of timm, `tv:` and a name of torchvision, `file.py:factory` (called with `num_classes` and
            `in_channels`), or one of ours, `visattn_resnet20`.
        classes: Names of the classes.
        channels: 1 for grey pictures, 3 for colour.
        size: `(height, width)` of the input in pixels.
        mean: Of each channel, of pixels in [0, 1].
        std: Likewise the standard deviation.
        attention: `none` or a name of `visattn.nn.ATTENTION`. Our own networks have a place for it; it is attached to others at the end
            of their residual branches, where it starts as the identity.
        options: Keyword arguments for the function that builds the network.
    """

    model: str
    classes: tuple[str, ...]
    channels: int
    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    attention: str = "none"
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """The network with PyTorch's random weights, as the random state is.

        Raises:
            UnsupportedModel: If there is no such model, or it refuses its options.
            OptionError: If the attention is unknown or no place for it is found.
        """
        foreign = sorted(_ELSEWHERE & set(self.options))
        if foreign:
            raise OptionError(
                f"{printable(self.model)}: takes no option {', '.join(foreign)}: weights are given, never fetched. Leave it out."
            )
        classes, inside = len(self.classes), self.model in REFERENCES
        attention = None if self.attention == "none" else self.attention
        if self.model.rpartition(":")[0].endswith(".py"):
            model = custom.built(self.model, num_classes=classes, in_channels=self.channels, **self.options)
        else:
            try:
                if inside:
                    model = REFERENCES[self.model](
                        attention=attention, num_classes=classes, in_channels=self.channels, **self.options
                    )
                elif self.model.startswith(of_torchvision.PREFIX):
                    model = of_torchvision.built(self.model, self.size[0], num_classes=classes, **self.options)
                else:
                    model = of_timm.built(self.model, self.size, num_classes=classes, in_chans=self.channels, **self.options)
            except (OptionError, UnsupportedModel):
                raise
            except (TypeError, ValueError, AssertionError, RuntimeError) as error:
                cause = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise UnsupportedModel(
                    f"{printable(self.model)}: cannot be built ({cause}); check the model's options."
                ) from error
        if attention and not inside:
            attach(model, attention, example=torch.zeros(2, self.channels, *self.size))
        return model


_known: WeakKeyDictionary[nn.Module, Blueprint] = WeakKeyDictionary()


def owns(model: nn.Module) -> bool:
    """Whether the model was built from a blueprint that is remembered."""
    return model in _known


def remember(model: nn.Module, blueprint: Blueprint) -> nn.Module:
    """Let `prepare` and `labels` know what a model was built from."""
    _known[model] = blueprint
    return model


def save(model: nn.Module, blueprint: Blueprint, folder: Path, facts: dict[str, Any] | None = None) -> Path:
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
    return write_folder(model, folder, asdict(shared(blueprint)) | (facts or {}))


def shared(blueprint: Blueprint) -> Blueprint:
    """Return a blueprint as others may see it: of a model's file its name alone."""
    return replace(blueprint, model=shared_model(blueprint.model))


def shared_model(model: str) -> str:
    """Return the name of a model, without where its file lies."""
    file, colon, factory = model.rpartition(":")
    return f"{base_name(file)}{colon}{factory}" if file.endswith(".py") else model


def write_folder(model: nn.Module, folder: Path, told: dict[str, Any]) -> Path:
    """Write weights, and `told` of them, as a whole; see `save`."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    content = safetensors.torch.save(tensors, metadata={"made_by": f"visattn {version('visattn')}"})
    made = {"format": FORMAT, "made_by": version("visattn"), "sha256": hashlib.sha256(content).hexdigest()}
    with building_folder(folder) as place:
        (place / WEIGHTS).write_bytes(content)
        (place / FACTS).write_text(json.dumps(made | told, indent=2) + "\n")
    return folder


def load(folder: Path) -> tuple[nn.Module, Provenance]:
    """Build the network of a folder and give it its weights, in evaluation mode.

    Returns:
        The model, and where its weights came from.

    Raises:
        WeightsError: If the folder holds no such network, or one that is damaged, of a newer version or built by a Python file.
        UnsupportedModel: If there is no such model here.
    """
    name = printable(str(folder))
    told = read_facts(folder)
    if kind := told.get("kind"):
        raise WeightsError(f"{name}: holds a {brief(kind)}, which has no classes; use visattn caption.")
    blueprint = read_blueprint(told, printable(str(folder / FACTS)))
    if blueprint.model.rpartition(":")[0].endswith(".py"):
        raise WeightsError(
            f"{name}: was built by {printable(blueprint.model)}, which loading would run. Build it yourself, with num_classes="
            f"{len(blueprint.classes)} and in_channels={blueprint.channels}, and give it safetensors.torch.load_file('{name}/{WEIGHTS}')."
        )
    tensors = read_weights(folder, told)
    with torch.random.fork_rng(devices=[]), no_larger_than(tensors, name):
        model = blueprint.build()
    fill(model, tensors, name)
    remember(model.eval(), blueprint)
    title = f"{blueprint.model}" + (f" with {blueprint.attention}" if blueprint.attention != "none" else "")
    return model, Provenance(model=title, weights=folder.resolve().name, weights_sha256=told["sha256"])


def read_weights(folder: Path, told: dict[str, Any]) -> dict[str, Tensor]:
    """Load the weights of a folder.

    Raises:
        WeightsError: If they are not those that `told` tells of, or not finite.
    """
    name, file = printable(str(folder)), folder / WEIGHTS
    tensors: dict[str, Tensor] = read_checkpoint(file)
    if digest(file) != told.get("sha256"):
        raise WeightsError(
            f"{name}/{WEIGHTS}: is not the file that {FACTS} tells of (its sha256 differs); copy the folder again."
        )
    check_finite(tensors, name)
    return tensors


def read_facts(folder: Path) -> dict[str, Any]:
    """What a folder tells of its weights.

    Raises:
        WeightsError: If it cannot be read, or was made by a newer version.
    """
    shown = printable(str(folder / FACTS))
    try:
        told = json.loads(regular(folder / FACTS).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(
            f"{shown}: cannot be read ({printable(str(error))}); pass a folder that visattn train wrote."
        ) from error
    if not isinstance(told, dict) or type(told.get("format")) is not int or told["format"] < 1:
        raise WeightsError(f"{shown}: tells of no network of visattn; pass a folder that visattn train wrote.")
    if told["format"] > FORMAT:
        made = brief(told.get("made_by"))
        raise WeightsError(f"{shown}: made by visattn {made}, needs >= {made}; upgrade visattn.")
    return told


def read_blueprint(told: Any, shown: str, *, classes: bool = True) -> Blueprint:  # noqa: ANN401 - of JSON
    """A blueprint from the values of a file called `shown`; an encoder has no `classes`.

    Raises:
        WeightsError: If a value is missing or wrong.
    """
    try:
        values: dict[str, Any] = {name: _frozen(told[name]) for name in Blueprint.__dataclass_fields__}
        found = Blueprint(**values)
    except (KeyError, TypeError) as error:
        raise WeightsError(f"{shown}: is damaged, {error} is missing or wrong; copy the folder again.") from error
    if wrong := _wrong(found, classes):
        raise WeightsError(f"{shown}: is damaged, '{wrong}' is missing or wrong; copy the folder again.")
    return found


def _wrong(made: Blueprint, classes: bool) -> str | None:
    """The first value that no blueprint has: those of a file may be anything."""

    def numbers(values: Any, low: float, high: float) -> bool:  # noqa: ANN401
        return isinstance(values, tuple) and all(type(value) in (int, float) and low <= value <= high for value in values)

    fits = {
        "model": isinstance(made.model, str),
        "classes": isinstance(made.classes, tuple) and {*map(type, made.classes)} == ({str} if classes else set()),
        "channels": type(made.channels) is int and made.channels in (1, 3),
        "size": numbers(made.size, 1, LARGEST) and [*map(type, made.size)] == [int, int],
        "mean": numbers(made.mean, -1e3, 1e3) and len(made.mean) == made.channels,
        "std": numbers(made.std, 1e-6, 1e3) and len(made.std) == made.channels,
        "attention": isinstance(made.attention, str),
        "options": isinstance(made.options, dict),
    }
    return next((name for name, fit in fits.items() if not fit), None)


def _frozen(value: Any) -> Any:  # noqa: ANN401 - of JSON
    return tuple(value) if isinstance(value, list) else value


def check_attention(name: str) -> str:
    """`name` if it is `none` or that of an attention.

    Raises:
        OptionError: If it is neither; the message lists all.
    """
    if name not in ("none", *ATTENTION):
        raise OptionError(f"unknown attention '{printable(name)}'. Known: none, {', '.join(ATTENTION)}.")
    return name


def input_spec(model: nn.Module, img_size: int | None = None) -> InputSpec:
    """How pixels are prepared: as in training, without augmentation.

    Raises:
        OptionError: If another size is asked for.
    """
    blueprint = _known[model]
    if img_size is not None and blueprint.size != (img_size, img_size):
        raise OptionError(f"the model was trained at {blueprint.size[0]} x {blueprint.size[1]} pixels, got {img_size}.")
    return InputSpec(
        size=blueprint.size,
        dynamic=False,
        stride=(1, 1),
        mean=blueprint.mean,
        std=blueprint.std,
        interpolation="bilinear",
        classifier=True,
        channels=blueprint.channels,
        transform=evaluation_transform(blueprint).transforms,
    )


def evaluation_transform(blueprint: Seen) -> Any:  # noqa: ANN401 - torchvision's Compose
    """From a picture to pixels: the shorter side scaled to the input's, the middle cut out."""
    return timm.data.create_transform(
        (blueprint.channels, *blueprint.size),
        is_training=False,
        crop_pct=1.0,
        interpolation="bilinear",
        mean=blueprint.mean,
        std=blueprint.std,
    )


def labels(model: nn.Module) -> tuple[str, ...] | None:
    """Names of the classes."""
    return _known[model].classes


def anatomy(model: nn.Module, provenance: Provenance) -> Anatomy:
    """As the model's own library says."""
    found: Anatomy = _library(model).anatomy(model, provenance)
    return found


def head(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """As the model's own library says."""
    known: Callable[[Tensor], Tensor] | None = _library(model).head(model)
    return known


def cam_layer(model: nn.Module) -> str | None:
    """As the model's own library says, else the last feature map before it is pooled."""
    blueprint = _known[model]
    known: str | None = _library(model).cam_layer(model)
    return known or last_feature_map(model, blueprint.channels, blueprint.size)


def _library(model: nn.Module) -> ModuleType:
    return next(family for family in (of_timm, of_torchvision, custom) if family.owns(model))
