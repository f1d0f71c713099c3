"""Model folders of networks trained with visattn: `model.safetensors`, and `model.json` with the settings to rebuild the network.

`save` writes a folder and `load` reads it; no code in it is executed. Classes and preprocessing are restored with the model.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import safetensors.torch
import torch
from msgspec import Meta
from torch import Tensor, nn

from visattn._support.checks import printable, shown as as_repr, told as brief
from visattn._support.files import is_file, regular
from visattn._support.json_files import Anything, converted, decoded
from visattn._support.language import worded
from visattn._support.own_code import is_function
from visattn._support.whole_files import building_folder
from visattn.core.families.trained import remember
from visattn.core.loading.blueprints import Blueprint, shared
from visattn.core.loading.limits import no_larger_than
from visattn.core.loading.translation import fill
from visattn.core.loading.weights import FACTS, WEIGHTS, check_finite, digest, read_checkpoint
from visattn.core.provenance import Provenance
from visattn.errors import WeightsError

__all__ = ["AGAIN", "LARGEST", "read_blueprint", "read_facts", "read_weights", "write_folder"]

FORMAT = 1
AGAIN = "copy the folder again"  # what to do about a damaged one
LARGEST = 2048  # side of an input in pixels

_Side = Annotated[int, Meta(ge=1, le=LARGEST)]


class _Encoder(TypedDict):
    """A `Blueprint` without classes."""

    model: str
    classes: Annotated[tuple[str, ...], Meta(max_length=0)]
    channels: Literal[1, 3]
    size: tuple[_Side, _Side]
    mean: tuple[Annotated[float, Meta(ge=-1e3, le=1e3)], ...]
    std: tuple[Annotated[float, Meta(ge=1e-6, le=1e3)], ...]
    attention: str
    options: dict[str, Any]
    attention_init: NotRequired[str]  # older folders do not state it


class _Classifier(_Encoder):
    classes: Annotated[tuple[str, ...], Meta(min_length=1)]


def save(model: nn.Module, blueprint: Blueprint, folder: Path, facts: dict[str, Any] | None = None) -> Path:
    """Save a model folder for `load`; the folder appears only when it is complete.

    Args:
        model: Model built from the blueprint, without wrappers such as `DistributedDataParallel`.
        blueprint: Settings that the model was built from.
        folder: Folder to create.
        facts: Further entries for `model.json`, JSON values.

    Returns:
        `folder`.

    Raises:
        OutputError: If the folder exists or cannot be written.
        ResourceError: If the disk is full.
    """
    return write_folder(model, folder, asdict(shared(blueprint)) | (facts or {}))


def write_folder(model: nn.Module, folder: Path, told: dict[str, Any]) -> Path:
    """Write the weights, and `told` as `model.json`, into a new folder; see `save`."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    content = safetensors.torch.save(tensors, metadata={"made_by": f"visattn {version('visattn')}"})
    made = {"format": FORMAT, "made_by": version("visattn"), "sha256": hashlib.sha256(content).hexdigest()}
    with building_folder(folder) as place:
        (place / WEIGHTS).write_bytes(content)
        (place / FACTS).write_text(json.dumps(made | told, indent=2) + "\n")
    return folder


def load(folder: Path) -> tuple[nn.Module, Provenance]:
    """Load the network of a folder in evaluation mode.

    Returns:
        The model, and the origin of its weights.

    Raises:
        WeightsError: If the folder does not hold a classifier, is damaged, was written by a newer version, or needs a Python file.
        UnsupportedModel: If the installed libraries have no such model.
    """
    name = printable(str(folder))
    told = read_facts(folder)
    blueprint = _classifier(told, folder)
    if is_function(blueprint.model):
        raise WeightsError(
            f"{name}: was built by {printable(blueprint.model)}; loading does not run Python files. Build it yourself, "
            f"{_steps(blueprint)}, and load safetensors.torch.load_file('{name}/{WEIGHTS}')."
        )
    tensors = read_weights(folder, told)
    with torch.random.fork_rng(devices=[]), no_larger_than(tensors, name, AGAIN):
        model = blueprint.build()
    fill(model, tensors, name, fix=AGAIN)
    remember(model.eval(), blueprint)
    title = f"{blueprint.model}" + (f" with {blueprint.attention}" if blueprint.attention != "none" else "")
    return model, Provenance(model=title, weights=folder.resolve().name, weights_sha256=told["sha256"])


def _steps(blueprint: Blueprint) -> str:
    """Return in words how to build the network of a Python file."""
    given = {"num_classes": len(blueprint.classes), "in_channels": blueprint.channels, **blueprint.options}
    built = "with " + " and ".join(f"{printable(key)}={as_repr(value)}" for key, value in given.items())
    if blueprint.attention == "none":
        return built
    init = "" if blueprint.attention_init in ("auto", "identity") else f", init={as_repr(blueprint.attention_init)}"
    return f"{built}, call visattn.attach(model, {as_repr(blueprint.attention)}{init})"


def state_beside(model: nn.Module, file: Path) -> None:
    """State what the `model.json` beside a file of weights says about them, if it describes this file."""
    blueprint = blueprint_beside(file)
    if blueprint is not None:
        remember(model, blueprint)


def blueprint_beside(file: Path) -> Blueprint | None:
    """Return the settings in the `model.json` beside a file of weights; None if there is none that describes this file."""
    if not is_file(file.parent / FACTS):
        return None
    try:
        told = read_facts(file.parent)
        blueprint = read_blueprint(told, printable(str(file.parent / FACTS)))
    except WeightsError:
        return None
    return blueprint if digest(file) == told.get("sha256") else None


def read_run(folder: Path) -> Blueprint:
    """Return the settings in the folder of a run, or in `final` in it.

    Raises:
        WeightsError: If it holds no classifier, or a damaged one.
    """
    place = _network_of(folder)
    return _classifier(read_facts(place), place)


def run_weights(place: Path) -> dict[str, Tensor]:
    """Load the weights of a run: its folder, `final` in it, or the file in that.

    Raises:
        WeightsError: If they are not those that `model.json` describes, or not finite.
    """
    folder = _network_of(place) if place.is_dir() else place.parent
    return read_weights(folder, read_facts(folder))


def _network_of(folder: Path) -> Path:
    within = folder / "final"
    return within if is_file(within / FACTS) and not is_file(folder / FACTS) else folder


def _classifier(told: dict[str, Any], folder: Path) -> Blueprint:
    if kind := told.get("kind"):
        use = f"; use {worded('visattn.captioning.load_captioner', 'visattn caption')}" if kind == "captioner" else ""
        raise WeightsError(f"{printable(str(folder))}: holds a {brief(kind)}, not a classifier{use}.")
    return read_blueprint(told, printable(str(folder / FACTS)))


def read_weights(folder: Path, told: dict[str, Any]) -> dict[str, Tensor]:
    """Load the weights of a folder.

    Raises:
        WeightsError: If the file is not the one described in `told` (the sha256 differs), or its values are not finite.
    """
    name, file = printable(str(folder)), folder / WEIGHTS
    tensors: dict[str, Tensor] = read_checkpoint(file)
    if "sha256" not in told:
        raise WeightsError(f"{name}/{FACTS}: sha256 is missing; copy the folder again.")
    if digest(file) != told["sha256"]:
        raise WeightsError(
            f"{name}/{WEIGHTS}: is not the file that {FACTS} describes (its sha256 differs); copy the folder again."
        )
    check_finite(tensors, name)
    return tensors


def read_facts(folder: Path) -> dict[str, Any]:
    """Read `model.json` of a folder.

    Raises:
        WeightsError: If it cannot be read, or was written by a newer version.
    """
    shown = printable(str(folder / FACTS))
    try:
        told: Any = decoded(regular(folder / FACTS).read_bytes(), Anything, lax=True)
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"{shown}: cannot be read ({printable(str(error))}); pass a folder written by visattn train."
        ) from error
    if not isinstance(told, dict) or type(told.get("format")) is not int or told["format"] < 1:
        raise WeightsError(f"{shown}: does not describe a network of visattn; pass a folder written by visattn train.")
    if told["format"] > FORMAT:
        made = brief(told.get("made_by"))
        raise WeightsError(f"{shown}: made by visattn {made}, needs >= {made}; upgrade visattn.")
    return told


def read_blueprint(told: Any, shown: str, *, classes: bool = True) -> Blueprint:  # noqa: ANN401 - of JSON
    """Build a blueprint from the values of a file named `shown`; set `classes=False` for an encoder.

    Raises:
        WeightsError: If a value is missing or wrong.
    """
    try:
        found = Blueprint(**converted(told, _Classifier if classes else _Encoder))
    except ValueError as error:
        raise WeightsError(f"{shown}: is damaged ({printable(str(error))}); {AGAIN}.") from error
    for name, numbers in (("mean", found.mean), ("std", found.std)):
        if len(numbers) != found.channels:
            raise WeightsError(f"{shown}: is damaged ({name} must have {found.channels} numbers); {AGAIN}.")
    return found
