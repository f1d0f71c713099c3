"""The picture among the inputs of a model: where it is, and what else the model is given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from visattn._support.checks import printable
from visattn._support.files import exists
from visattn._support.language import worded
from visattn._support.nested import leaves, mapped
from visattn.core.families.forward_calls import by_name, is_image, optional_place, parameters_of, path_of, required_place
from visattn.core.images import image_facts
from visattn.core.pipeline.inputs import Prepared, prepare_with
from visattn.core.pipeline.passes import as_the_model
from visattn.core.pipeline.preprocessing import Preprocessing
from visattn.errors import OptionError

_PIXELS = "pixel_values"  # what every model of transformers calls its picture
_SHOWN = 100  # characters of a text in a message
_SAME = 1e-3  # largest difference between pixels that one processor made twice, with and without its fast path


@dataclass(frozen=True, eq=False)
class GivenInputs:
    """Inputs of a model by the names of its parameters.

    Attributes:
        model: The model.
        values: The inputs, with photos preprocessed.
        photos: The photos among them by path.
    """

    model: nn.Module
    values: Mapping[str, Any]
    photos: Mapping[str, Prepared]

    @cached_property
    def leaves(self) -> Mapping[str, Any]:
        """Everything in the inputs that is no container, by path."""
        return dict(leaves(self.values))

    @cached_property
    def images(self) -> Mapping[str, Tensor]:
        """Those that may be a picture, by path."""
        return {path: leaf for path, leaf in self.leaves.items() if is_image(leaf)}

    def without(self, place: str) -> dict[str, Any]:
        """Return the inputs without the picture, images in the model's dtype; inside of another value None stands for the picture."""

        def other(path: str, leaf: Any) -> Any:  # noqa: ANN401
            return None if path == place else as_the_model(self.model, leaf) if is_image(leaf) else leaf

        return {name: value for name, value in mapped(dict(self.values), other).items() if name != place}

    def notes(self, place: str) -> tuple[str, ...]:
        """Say which input is the picture, if there are several, and what was done to the others."""
        others = [f"{path} {shape_of(leaf)}" for path, leaf in self.images.items() if path != place]
        picture = place or next(iter(parameters_of(self.model)), "the first")
        chosen = (
            [f"the picture is the input {printable(picture)}; other images: {', '.join(map(printable, others))}"]
            if others
            else []
        )
        return (*chosen, *(self._note(path, made) for path, made in self.photos.items() if path != place))

    def _note(self, path: str, made: Prepared) -> str:
        facts = image_facts(made.photo)
        how = "; ".join((made.geometry.rule, *facts.notes))
        return f"input {printable(path)}: {printable(facts.name) or 'a photo'}, preprocessed as the picture is ({how})"

    def listed(self) -> str:
        """Return path and shape of the inputs to choose from."""
        return ", ".join(f"{printable(path)} {shape_of(leaf)}" for path, leaf in (self.images or self.leaves).items()) or "none"


def given_inputs(inputs: Mapping[Any, Any], model: nn.Module, how: Preprocessing) -> GivenInputs:
    """Return inputs by the names of the model's parameters, on its device, with their photos preprocessed.

    Raises:
        OptionError: If the model has no such input.
    """
    device = next((parameter.device for parameter in model.parameters()), None)
    photos: dict[str, Prepared] = {}

    def ready(path: str, leaf: Any) -> Any:  # noqa: ANN401
        if not isinstance(leaf, Image.Image):
            return leaf.to(device) if isinstance(leaf, Tensor) else leaf
        photos[path] = prepare_with([leaf], model, how)
        return photos[path].pixels

    return GivenInputs(model, mapped(by_name(model, inputs), ready), photos)


def named_by(image: object, given: GivenInputs) -> str | None:
    """Return the path of the input that an image names; None if it is a photo, or the source of one.

    Raises:
        OptionError: If it is text that names neither.
    """
    if not isinstance(image, str):
        return None
    first = image.partition(".")[0]
    if first.isdecimal() or first in given.values:
        return path_of(image, parameters_of(given.model))
    if ":" in image or Path(image).suffix or exists(Path(image)):
        return None
    raise OptionError(f"image '{printable(image)}' is no input and no file. Inputs: {given.listed()}.")


def place_of(given: GivenInputs, own: Prepared | None, picture: str | None) -> str:
    """Return the path of the picture among the inputs; empty: the first argument of the model.

    Args:
        given: The inputs.
        own: The photo, if it is given apart.
        picture: Path of the picture, if it was named.

    Raises:
        OptionError: If there is no picture, or several may be it.
    """
    if picture is not None:
        leaf = given.leaves.get(picture)
        if isinstance(leaf, Tensor):
            return picture
        if isinstance(leaf, (str, os.PathLike)):
            raise OptionError(f"the input {printable(picture)} is text, not a picture. {_opening(leaf)}")
        raise OptionError(f"no input '{printable(picture)}' is a picture. Choose one of: {given.listed()}.")
    choices = _places_of_photo(given, own) if own is not None else [_PIXELS][: _PIXELS in given.leaves] or list(given.images)
    if len(choices) == 1:
        return choices[0]
    if choices:
        first = printable(choices[0])
        how = worded(f"image='{first}'", f"--image-input {first}")
        raise OptionError(f"each of the inputs {given.listed()} may be the picture. Name it: {how}.")
    texts = [_opening(leaf) for leaf in given.leaves.values() if isinstance(leaf, (str, os.PathLike))]
    raise OptionError(
        " ".join([f"inputs have no picture ({given.listed()}). Pass the photo too, or among the inputs.", *texts[:1]])
    )


def _opening(text: str | os.PathLike[str]) -> str:
    """Say how a picture that is named by text is given among inputs."""
    return f"Open the picture first: visattn.load_image({os.fspath(text)[:_SHOWN]!r}), or PIL.Image.open for a file."


def _places_of_photo(given: GivenInputs, own: Prepared) -> list[str]:
    """Return the paths where a photo that is given apart may belong: where an input is missing, or is the photo itself."""
    keyword = own.spec_of(given.model).keyword
    required = required_place(given.model, given.values, keyword)
    if required is not None:
        return [required]
    same = [path for path, leaf in given.images.items() if is_same(leaf, own.pixels)] or [_PIXELS][: _PIXELS in given.leaves]
    optional = optional_place(given.model, given.values, keyword)
    return same or list(given.images if optional is None else [optional])


def is_same(pixels: Tensor, own: Tensor) -> bool:
    """Check whether pixels are those of a photo, made by the model's own preprocessing."""
    return pixels.shape == own.shape and torch.allclose(own, pixels.to(own), atol=_SAME)


def shape_of(value: object) -> str:
    """Return the shape of an input, or what it is."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
