"""Your own models: any module that attends over an image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import timm.data
from torch import nn

from visattn.capturing import ModelDescription, Placement
from visattn.errors import LayoutError, OptionError
from visattn.families.feature_maps import last_feature_map
from visattn.families.spec import InputSpec, per_channel, sources
from visattn.geometry import Box
from visattn.provenance import Provenance
from visattn.records import TokenLayout

SIZE = 224  # pixels; default if a model declares no size


def owns(_model: nn.Module) -> bool:
    """Accept any model; this family comes last."""
    return True


def describe(model: nn.Module, provenance: Provenance) -> ModelDescription:
    """Describe any module for `capture`; the positions of its tokens are traced from the pixels."""
    return ModelDescription({}, "", provenance)


def labels(_model: nn.Module) -> None:
    """Return None: the names of the classes are unknown."""


def head(_model: nn.Module) -> None:
    """Return None: the layers behind the blocks are unknown."""


def cam_layer(model: nn.Module) -> str | None:
    """Return the module of the last feature map before pooling, found by a dry run on the meta device; None if it cannot be found."""
    spec = input_spec(model)
    return last_feature_map(model, spec.channels, spec.size)


def told(model: nn.Module, grid: Sequence[int], prefix: int | Sequence[str], provenance: Provenance) -> ModelDescription:
    """Describe a module by the token layout that the caller gives: prefix tokens, then a grid over the whole input.

    Args:
        model: The module that receives the pixels.
        grid: `(rows, columns)` of patches.
        prefix: Names of the tokens before the patches, or their number; they are then named `cls`, `register0`, and so on.
        provenance: Provenance of the weights.

    Raises:
        OptionError: If the grid is not two positive numbers, or the prefix is negative or names a token twice.
    """
    if len(grid) != 2 or min(grid) < 1:
        raise OptionError(f"grid must be (rows, columns), both at least 1, got {tuple(grid)}.")
    if isinstance(prefix, int):
        if prefix < 0:
            raise OptionError(f"prefix must be a number of tokens or their names, got {prefix}.")
        prefix = ("cls", *(f"register{i}" for i in range(prefix - 1)))[:prefix]
    names = tuple(prefix)
    if len(set(names)) < len(names):
        raise OptionError(f"prefix must name each token once, got {', '.join(names)}.")
    rows, columns = grid

    def place(owner: nn.Module, queries: int, keys: int, input_size: tuple[int, int]) -> Placement:
        height, width = input_size
        if height * columns != width * rows and height * rows == width * columns:
            raise LayoutError(
                f"a grid of {rows} x {columns} over an input of {height} x {width} pixels: rows and columns seem swapped. "
                f"Pass grid=({columns}, {rows})."
            )
        tokens = TokenLayout("tokens", names, (rows, columns), Box(0, 0, height, width))
        pooled = [TokenLayout("patches", (), tokens.grid, tokens.box)] if queries != keys else []  # without the prefix
        found = next((known for known in (tokens, *pooled) if keys == len(known)), None)
        if found is None:
            raise LayoutError(
                f"{type(owner).__name__} attends to {keys} tokens, but prefix and grid give {len(names)} + {rows} x {columns}. "
                "Pass the grid= and prefix= of this layer, leave it out with layers=, or leave grid out to trace the tokens."
            )
        if queries == keys:
            return "self", found, found
        learned = names if queries == len(names) else tuple(f"query{i}" for i in range(queries))
        return "pool", TokenLayout("pool", learned, (), tokens.box), found

    return ModelDescription({}, "cls" if "cls" in names else "mean", provenance, place=place)


def input_spec(model: nn.Module, img_size: int | None = None) -> InputSpec:
    """Return the preprocessing that a model declares; the defaults are ImageNet's mean and standard deviation, and 224 pixels.

    A model declares its size by the attribute `img_size` or `image_size`, and the rest by `preprocess_cfg`, as in open_clip: a mapping with
    `mean`, `std` and `interpolation`.
    """
    stated = _stated(model)
    own: Any = next((value for name in ("img_size", "image_size") if (value := getattr(model, name, None)) is not None), None)
    given: Any = img_size or own or SIZE
    size = (given, given) if isinstance(given, int) else tuple(given)[-2:]
    config = timm.data.resolve_data_config({**stated, "input_size": (3, *size), "crop_pct": 1.0})
    transform: Callable[..., Any] = timm.data.create_transform(**config, is_training=False)
    channels = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), 3)
    return InputSpec(
        size=size,
        dynamic=False,
        stride=(1, 1),
        mean=per_channel(config["mean"], channels),
        std=per_channel(config["std"], channels),
        interpolation=config["interpolation"],
        classifier=True,
        channels=channels,
        transform=transform.transforms,  # type: ignore[attr-defined]
        sources=sources(stated, "given" if img_size else "model" if own else "assumed", channels),
    )


def _stated(model: nn.Module) -> dict[str, Any]:
    """Return the preprocessing that a model declares, under timm's names."""
    for part in (model, getattr(model, "visual", None)):
        if isinstance(found := getattr(part, "preprocess_cfg", None), Mapping):
            return {key: found[key] for key in ("mean", "std", "interpolation") if found.get(key) is not None}
    return {}
