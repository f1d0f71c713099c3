"""Arguments as people write them: a pixel as a pair, a layer as a module, an image in a dictionary."""

from __future__ import annotations

import re
from collections.abc import Mapping
from numbers import Real
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from visattn._support.checks import printable, shown, suggest, whole_number
from visattn._support.notes import note
from visattn._support.parts import parts_of
from visattn._support.types import Fusion
from visattn.core.records import split_call
from visattn.errors import ImageError, OptionError

__all__ = ["target_of"]

_IMAGES = ("image", "img", "photo", "path", "file", "pixel_values", "pixels")  # keys under which libraries keep an image


def query_of(query: Any) -> Any:  # noqa: ANN401
    """Return a query as text or as a tensor of weights.

    Args:
        query: Text; a pair `(x, y)`, a pixel of the upright photo; or a tensor or array with one weight per token.

    Raises:
        OptionError: If it is another list or a single number.
    """
    if isinstance(query, np.ndarray) and query.dtype.kind in "fiub" and query.shape != (2,):
        return torch.from_numpy(query.astype(np.float64))
    if (
        isinstance(query, (tuple, list, np.ndarray))
        and len(query) == 2
        and all(isinstance(coordinate, Real) for coordinate in query)
    ):
        return f"pixel:{query[0]:g},{query[1]:g}"
    if isinstance(query, (tuple, list, Real)) or query is None:
        spelled = "a pixel (x, y), patch:ROW,COL, cls, mean, or a tensor with one weight per token"
        raise OptionError(f"query must be {spelled}, got {shown(query)}.")
    if isinstance(query, str) and (pair := re.fullmatch(r"\s*\(?\s*(\d+)\s*,\s*(\d+)\s*\)?\s*", query)):
        note(f"query {query} is understood as pixel:{pair[1]},{pair[2]}")
        return f"pixel:{pair[1]},{pair[2]}"
    return query


def head_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters with `head="mean"` as `fusion="mean"`; so with `max` and `min`."""
    head = given.get("head")
    if not isinstance(head, str) or head not in get_args(Fusion) or "fusion" in given:
        return dict(given)
    note(f"head '{head}' is understood as fusion '{head}'")
    return {name: value for name, value in given.items() if name != "head"} | {"fusion": head}


def target_of(target: Any) -> Any:  # noqa: ANN401
    """Return a target with classes as Python numbers, if they are in a tensor or an array; anything else is returned as it is."""
    return target.tolist() if isinstance(target, (Tensor, np.ndarray, np.generic)) else target


def layer_of(layer: Any, model: nn.Module) -> Any:  # noqa: ANN401
    """Return a layer as an index, `all` or a dotted name.

    Args:
        layer: Index; dotted name, also as Python code (`layer4[-1]`, `model.layer4`); a module of the model; or a list of one of these.
        model: The model.

    Raises:
        OptionError: If the model has no such module.
    """
    if isinstance(layer, (list, tuple)) and len(layer) == 1:
        return layer_of(layer[0], model)
    if isinstance(layer, nn.Module):
        name = next((name for name, module in model.named_modules() if module is layer), None)
        if not name:
            raise OptionError(
                f"layer must be a module inside the model, got {type(layer).__name__}, which {type(model).__name__} lacks."
            )
        return name
    if not isinstance(layer, str):
        return layer
    module, call = split_call(layer)
    if call is not None:
        return f"{layer_of(module, model)} #{call}"
    built = parts_of(model)
    number, parts = whole_number(layer), dict(zip(built.names, built.modules, strict=True))
    if number is None and (layer == "all" or layer in parts):
        return layer
    number = {"last": -1, "first": 0}.get(layer.lower(), number)
    if number is not None:
        note(f"layer '{layer}' is understood as {number}")
        return number
    dotted = _dotted(layer, model) or _of_wrapper(layer, parts, model)
    if dotted is None and re.fullmatch(r"\s*-?\d+(\s*,\s*-?\d+)+\s*", layer):
        raise OptionError(f"layer must be one layer, got {printable(layer)}. Explain one at a time.")
    if dotted is None:
        names = [name for name in parts if name]
        near = ", ".join(suggest(layer, names)) or f"none; its parts are {', '.join(name for name, _ in model.named_children())}"
        raise OptionError(f"{type(model).__name__} has no layer {printable(layer)}. Close matches: {near}.")
    note(f"layer {layer} is understood as {dotted}")
    return dotted


def _dotted(text: str, model: nn.Module) -> str | None:
    """Return the dotted name for Python code such as `model.layer4[-1].conv2`, or None if the model has no such module."""
    path: list[str] = []
    module: Any = model
    for part in re.findall(r"\w+|\[-?\d+\]", text.removeprefix("model.").removeprefix("self.")):
        index = whole_number(part.strip("[]"))
        if index is not None and index < 0 and hasattr(module, "__len__"):
            index += len(module)
        name = part if index is None else str(index)
        module = dict(module.named_children()).get(name)
        if module is None:
            return None
        path.append(name)
    return ".".join(path)


def _of_wrapper(layer: str, parts: Mapping[str, nn.Module], model: nn.Module) -> str | None:
    """Return the name without the names of wrappers before it, such as `_orig_mod.layer3` of a compiled model; None if there is none."""
    first, _, rest = layer.partition(".")
    if first in dict(model.named_children()) or not rest:
        return None
    return rest if rest in parts else _of_wrapper(rest, parts, model)


def image_of(image: Any) -> Any:  # noqa: ANN401
    """Return the only image of a dictionary, a list or a batch of one; anything else is returned as it is.

    Raises:
        ImageError: If a dictionary has no image.
    """
    if isinstance(image, Mapping):
        key = next((key for key in _IMAGES if key in image), None)
        if key is None:
            raise ImageError(
                f"a dictionary needs one of the keys {', '.join(_IMAGES)}, got {', '.join(map(str, image)) or 'none'}"
            )
        note(f"the image is taken from the key '{key}'")
        return image_of(image[key])
    if isinstance(image, (list, tuple)) and len(image) == 1:
        return image_of(image[0])
    if isinstance(image, (Tensor, np.ndarray)) and image.ndim == 4 and len(image) == 1:
        return image[0]
    return image
