"""Your own models: any module that attends over an image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import timm.data
from torch import nn

from visattn._support.reprs import in_pixels
from visattn.core.capturing import ModelDescription, Placement
from visattn.core.families.feature_maps import last_feature_map
from visattn.core.families.sizes import first_size
from visattn.core.families.spec import InputSpec, declared_preprocessing, per_channel, sources
from visattn.core.families.weight_facts import facts_of
from visattn.core.geometry import Box
from visattn.core.provenance import Provenance
from visattn.core.records import TokenLayout
from visattn.errors import LayoutError, OptionError


def describe(model: nn.Module, provenance: Provenance) -> ModelDescription:
    """Describe any module for `capture`; the positions of its tokens are traced from the pixels."""
    tokens = repeated(model) if isinstance(model, nn.Module) else {}  # `capture` refuses an exported program
    ends = {name.rpartition(".")[0]: name for name in tokens}  # image and text towers, encoder and decoder
    return ModelDescription(tokens, "", provenance, ends=tuple(ends.values()))


def repeated(model: nn.Module, prefix: str = "", around: frozenset[nn.Module] = frozenset()) -> dict[str, nn.Module]:
    """Return the modules that have siblings of the same class, by name: the blocks or stages of a model. Parts of these are left out."""
    around |= {model}  # a module may contain itself
    children = [(f"{prefix}{name}", part) for name, part in model.named_children() if part not in around]
    counts = Counter(type(part) for _, part in children if any(True for _ in part.children()))
    blocks: dict[str, nn.Module] = {}
    for name, part in children:
        blocks |= {name: part} if counts[type(part)] > 1 else repeated(part, f"{name}.", around)
    return blocks


def labels(model: nn.Module) -> tuple[str, ...] | None:
    """Return the names of the classes if they were stated for these weights."""
    facts = facts_of(model)
    return None if facts is None or facts.changed else facts.classes


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
                f"a grid of {rows} rows and {columns} columns over an input of {in_pixels(input_size)} pixels gives patches that are "
                f"not square. Pass grid=({columns}, {rows}) if rows and columns are swapped, or leave grid out to trace the tokens."
            )
        tokens = TokenLayout("tokens", names, (rows, columns), Box(0, 0, height, width))
        pooled = [TokenLayout("patches", (), tokens.grid, tokens.box)] if queries != keys else []  # without the prefix
        layout = next((candidate for candidate in (tokens, *pooled) if keys == len(candidate)), None)
        if layout is None:
            raise LayoutError(
                f"{type(owner).__name__} attends to {keys} tokens, but prefix and grid give {len(names)} + {rows} x {columns}. "
                "Pass the grid= and prefix= of this layer, leave it out with layers=, or leave grid out to trace the tokens."
            )
        if queries == keys:
            return "self", layout, layout
        learned = names if queries == len(names) else tuple(f"query{i}" for i in range(queries))
        return "pool", TokenLayout("pool", learned, (), tokens.box), layout

    return ModelDescription({}, "cls" if "cls" in names else "mean", provenance, place=place)


def input_spec(model: nn.Module, asked: tuple[int, int] | None = None) -> InputSpec:
    """Return the preprocessing that a model declares; the defaults are ImageNet's mean and standard deviation, and 224 pixels.

    A model declares its size by an attribute (`img_size`, `image_size`, `input_size`), the rest by `preprocess_cfg`, as in open_clip: a
    mapping with `mean`, `std`, `interpolation` and `resize_mode`. If no size is declared and the model does not run at 224 pixels, the
    first of the usual sizes at which it runs is assumed.
    """
    stated, channels = declared_preprocessing(model), channels_of(model)
    own = declared_size(model)
    size = asked or own or first_size(model, channels)
    config = timm.data.resolve_data_config({**stated, "input_size": (3, *size), "crop_pct": 1.0})
    transform: Callable[..., Any] = timm.data.create_transform(**config, is_training=False)
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
        sources=sources(stated, "given" if asked else "model" if own else "assumed", channels),
    )


def channels_of(model: nn.Module) -> int:
    """Return the input channels of the first convolution; 3 if there is none."""
    return next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), 3)


def declared_size(model: nn.Module) -> tuple[int, int] | None:
    """Return the input size that a model or its image tower declares, `(height, width)`, or None."""
    config = getattr(model, "config", None)
    towers = [getattr(config, name, None) for name in ("vision_config", "encoder", "backbone_config")]
    for part in (model, getattr(model, "visual", None), config, *towers, getattr(model, "patch_embed", None)):
        for name in ("img_size", "image_size", "input_size", "input_resolution"):
            value: Any = getattr(part, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value, value
            if isinstance(value, (tuple, list)) and len(value) in (2, 3):
                return value[-2], value[-1]
            if isinstance(value, Mapping) and {"height", "width"} <= value.keys():
                return value["height"], value["width"]
    return None
