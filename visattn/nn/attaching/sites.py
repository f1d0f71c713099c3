"""Selection of the sites for attention in a model: by original names, patterns or presets, with shapes from a traced forward pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from visattn._support.checks import printable, suggest
from visattn._support.modes import evaluating
from visattn._support.notes import warn
from visattn._support.reprs import in_pixels
from visattn.errors import OptionError, ShapeError
from visattn.nn.attaching.forwards import Flow
from visattn.nn.attaching.trail import AnyLayout, Layout
from visattn.nn.attaching.with_attention import WithAttention

Where = str | Callable[[str, nn.Module], bool] | Sequence[str]

PRESETS = ("residual", "stage", "depthwise")
_STAGES = (  # the first that two or more modules match; of those the least deep
    r"layer[1-9]\d*",  # the ResNet family
    r"stages?[._]?\d+",
    r"s[1-9]",  # timm's RegNet
    r"level[1-9]",  # DLA
    r"(dense)?block\d+",
)
_CHAINS = (
    r"(blocks|features|layers|body|backbone)\.\d+|Mixed_\d\w|inception\d\w"  # chains of blocks: the last of each size is the end
)
_CERTAIN = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.Linear)  # what they declare are channels
_DECLARED = ("num_features", "out_channels", "out_features", "out_chs", "num_channels")


@dataclass(frozen=True)
class Place:
    """One module of a model and its position in the module tree."""

    name: str
    parent: nn.Module
    key: str
    module: nn.Module


@dataclass(frozen=True)
class Maps:
    """Feature maps returned by a module.

    Attributes:
        channels: Number of channels, C.
        layout: Axis order, `NCHW` or `NHWC`.
        shapes: Shape `(B, C, H, W)` of each run in the traced forward pass.
    """

    channels: int
    layout: Layout
    shapes: tuple[tuple[int, int, int, int], ...] = ()

    @property
    def size(self) -> tuple[int, int] | None:
        """Size `(H, W)` of the first run, or None."""
        return self.shapes[0][2:] if self.shapes else None


def places(model: nn.Module, above: str = "") -> Iterator[Place]:
    """Yield all modules below `model` with their original names; a module that is registered twice is yielded twice."""
    for key, module in model._modules.items():
        if module is None:
            continue
        name = f"{above}{key}"
        yield Place(name, model, key, module)
        yield from places(module.base if isinstance(module, WithAttention) else module, f"{name}.")


def follow(model: nn.Module, example: object) -> Flow | Exception:
    """Trace one forward pass with `example`, or with a default input of the model's size. If that fails, return the reason.

    Args:
        model: Model to run, temporarily in evaluation mode and without gradients.
        example: A tensor, a tuple of arguments, a dict of named ones, or None.

    Raises:
        OptionError: If the model fails on `example`.
    """
    failure = Exception()
    for given in [example] if example is not None else _defaults(model):
        flow = Flow({place.name: place.module for place in places(model)})
        args = given if isinstance(given, tuple) else () if isinstance(given, dict) else (given,)
        kwargs = given if isinstance(given, dict) else {}
        try:
            with evaluating(model), torch.no_grad():
                flow.follow(model, *_moved((args, kwargs), model))
        except Exception as problem:  # whatever a user's model raises
            if example is not None:
                raise OptionError(
                    f"the model failed on the example: {_line(problem)}. Pass example= as the model takes it: a tensor, a tuple of "
                    "arguments or a dict of named ones."
                ) from problem
            failure = Exception(f"the model failed on an input of {in_pixels(_size(model))}: {_line(problem)}")
        else:
            return flow
    return failure


def chosen(model: nn.Module, where: Where, flow: Flow | Exception) -> list[Place]:
    """Return the sites that `where` selects, in the order of the model.

    Raises:
        OptionError: If there are none, if a name is unknown, or if a module already has attention or is registered twice.
    """
    known = list(places(model))
    if isinstance(where, str) and where in PRESETS:
        if isinstance(flow, Exception):
            raise OptionError(f"where='{where}' requires a forward pass, but {flow}. Pass example=, an input of the model.")
        names = {"residual": _residual, "stage": _stage, "depthwise": _depthwise}[where](known, flow)
        if not names:
            raise OptionError(
                f"{type(model).__name__} has no {_MEANING[where]}. Pass names of modules or a pattern, such as {_examples(known, flow)}."
            )
    elif isinstance(where, str):
        pattern = _compiled(where)
        names = {place.name for place in known if pattern.fullmatch(place.name)}
        if not names:
            raise OptionError(f"no module matches '{printable(where)}'. {_nearest(where, known)}")
    elif callable(where):
        names = {place.name for place in known if where(place.name, place.module)}
        if not names:
            raise OptionError(
                f"where= is a function that returned False for all {len(known)} modules. It gets names such as {_examples(known)}."
            )
    elif not isinstance(where, (list, tuple, set)):
        raise OptionError(f"where must be a preset, a pattern, a list of names or a function, got {type(where).__name__}.")
    else:
        names = set(where)
        for name in (name for name in where if name not in {place.name for place in known}):
            raise OptionError(f"no module is called '{printable(str(name))}'. {_nearest(str(name), known)}")
        if not names:
            raise OptionError(f"where must name at least one module, got none. Examples: {_examples(known)}.")
    found = [place for place in known if place.name in names]
    _check_single(found, known)
    return found


def maps_of(place: Place, flow: Flow | Exception, layout: AnyLayout) -> Maps:
    """Determine channels, shapes and layout of a module's output.

    Raises:
        ShapeError: If the output is not feature maps, or has other channels than the module declares.
        OptionError: If the channel axis is ambiguous.
    """
    declared = next((value for name in _DECLARED if isinstance(value := getattr(place.module, name, None), int)), None)
    shapes = [] if isinstance(flow, Exception) else flow.outputs.get(place.name, [])
    if isinstance(flow, Exception) or not shapes:
        return _unseen(place, declared, flow, layout)
    for shape in shapes:
        if shape is None or len(shape) != 4:
            gives = "no single tensor" if shape is None else f"{shape}"
            hint = " Those are tokens; attention over tokens belongs inside their blocks." if shape and len(shape) == 3 else ""
            raise ShapeError(
                f"'{place.name}' must return maps, (B, C, H, W) or (B, H, W, C), got {gives}.{hint} Choose another module."
            )
    known = flow.layout_of(place.name, declared) if layout == "auto" else layout
    if known is None:
        raise OptionError(
            f"layout='auto' is ambiguous for '{place.name}': in {shapes[0]} channels may come first or last. "
            "Pass layout='NCHW' or layout='NHWC'."
        )
    order = (0, 1, 2, 3) if known == "NCHW" else (0, 3, 1, 2)
    found = tuple((shape[order[0]], shape[order[1]], shape[order[2]], shape[order[3]]) for shape in shapes if shape is not None)
    channels = found[0][1]
    if isinstance(place.module, _CERTAIN) and declared is not None and declared != channels:
        raise ShapeError(
            f"'{place.name}' must return {declared} channels, got {channels} in {shapes[0]} as {known}. Pass layout='auto'."
        )
    return Maps(channels, known, found)


def plain_name(model: nn.Module, key: str) -> str | None:
    """Return the original name of a key of the state dict, or None for a key that attaching added."""
    module: Any = model
    parts: list[str] = []
    for part in key.split("."):
        if isinstance(module, WithAttention):
            if part != "base":
                return None
        else:
            parts.append(part)
        module = getattr(module, "_modules", {}).get(part)
    return ".".join(parts)


_MEANING = {
    "residual": "residual branch that ends in a module",
    "stage": "stages that visattn recognizes",
    "depthwise": "depthwise convolution",
}


def _residual(known: list[Place], flow: Flow) -> set[str]:
    return set(flow.ends)


def _stage(known: list[Place], flow: Flow) -> set[str]:
    """Return stages found by name, and modules at both ends of skip connections, which names rarely identify.

    Warn about stages that cannot have attention.
    """
    named, odd = _named_stages(known, flow)
    ends = flow.skips.ends(lambda name: len(flow.outputs[name]) == 1)
    skips = [name for name in ends if name is not None and not any(flow.skips.same(name, other) for other in named)]
    left = [name for name in odd if not any(other.startswith(f"{name}.") for other in (*named, *skips))]
    if (named or skips) and (left or None in ends):
        which = [*map(repr, left), *(["a skip connection that is not the output of one module"] if None in ends else [])]
        warn(
            f"{', '.join(which)} {'is' if len(which) == 1 else 'are'} left out: the output is not a single map. To include it, name "
            "modules inside with where=."
        )
    return {*named, *skips}


def _named_stages(known: list[Place], flow: Flow) -> tuple[list[str], list[str]]:
    """Return stages found by name, else the last block before each size change in a chain; also stages without a single map."""
    for pattern in _STAGES:
        found = [place.name for place in known if place.name in flow.outputs and re.fullmatch(rf"(.+\.)?{pattern}", place.name)]
        depth = min((name.count(".") for name in found if name in flow.skips.sizes), default=0)
        found = [name for name in found if name.count(".") == depth]
        mapped = [name for name in found if name in flow.skips.sizes]
        if len(mapped) > 1:
            return mapped, [name for name in found if name not in flow.skips.sizes]
    chain = [place for place in known if re.fullmatch(rf"([^.]+\.)?({_CHAINS})", place.name) and place.name in flow.outputs]
    maps = [place for place in chain if place.name in flow.skips.sizes]
    blocks = [place for place in maps if sum(isinstance(part, nn.Conv2d) for part in place.module.modules()) > 1]
    rest = [place for place in maps if "Pool" not in type(place.module).__name__ and not isinstance(place.module, nn.Conv2d)]
    row = [place.name for place in blocks or rest]
    last = [name for name, then in zip(row, [*row[1:], ""], strict=False) if flow.skips.sizes[name] != flow.skips.sizes.get(then)]
    return last, [place.name for place in chain if place not in maps and place.module._modules]


def _depthwise(known: list[Place], flow: Flow) -> set[str]:
    """Return depthwise convolutions, or their norms, so that the two can still be fused."""
    found = (place for place in known if isinstance(place.module, nn.Conv2d) and place.name in flow.outputs)
    deep = (place.name for place in found if getattr(place.module, "groups", 1) == getattr(place.module, "in_channels", 0) > 1)
    return {flow.normed.get(name, name) for name in deep}


def _unseen(place: Place, declared: int | None, flow: Flow | Exception, layout: AnyLayout) -> Maps:
    """Determine the output of a module that did not run, from its attributes."""
    types = (nn.Conv2d, nn.BatchNorm2d, nn.GroupNorm, nn.InstanceNorm2d)
    channels = place.module.num_channels if isinstance(place.module, nn.GroupNorm) else declared
    if channels is None or (layout == "auto" and not isinstance(place.module, types)):
        why = str(flow) if isinstance(flow, Exception) else "it did not run in the forward pass"
        raise OptionError(f"the channels of '{place.name}' are unknown: {why}. Pass example=, an input that reaches it.")
    return Maps(channels, "NCHW" if layout == "auto" else layout)


def _check_single(found: list[Place], known: list[Place]) -> None:
    by_object: dict[int, list[str]] = {}
    for place in known:
        by_object.setdefault(id(place.module), []).append(place.name)
    for place in found:
        if isinstance(place.module, WithAttention):
            kind = type(place.module.attention).__name__
            raise OptionError(f"'{place.name}' already has attention ({kind}). Detach that first, or name other modules.")
        if len(names := by_object[id(place.module)]) > 1:
            raise OptionError(
                f"'{names[0]}' and '{names[1]}' are the same module, so both would get attention. Use separate modules."
            )


def _defaults(model: nn.Module) -> Iterator[object]:
    """Yield default inputs of the model's size: with the channels of its first convolution, then with three."""
    first = next((part for part in model.modules() if isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Conv3d))), None)
    for channels in dict.fromkeys(([] if first is None else [first.in_channels]) + [3]):
        pixels = torch.sin(torch.arange(channels * (size := _size(model))[0] * size[1]).float()).reshape(1, channels, *size)
        detector = type(getattr(model, "transform", None)).__name__ == "GeneralizedRCNNTransform"  # torchvision's take a list
        yield [pixels[0]] if detector else pixels


def _size(model: nn.Module) -> tuple[int, int]:
    """Return the input height and width of a model from its timm attributes, else 224 x 224."""
    config = getattr(model, "pretrained_cfg", None)
    fixed = getattr(getattr(model, "patch_embed", None), "img_size", None)
    size = fixed or (config["input_size"][1:] if isinstance(config, Mapping) and "input_size" in config else (224, 224))
    return int(size[0]), int(size[1])


def _moved(value: Any, model: nn.Module) -> Any:  # noqa: ANN401 - as nested as the user's example
    """Copy tensors to the model's device, and floating-point ones to its dtype. Copies, because a model may modify its input."""
    weight = next((one for one in (*model.parameters(), *model.buffers()) if one.is_floating_point()), None)

    def moved(tensor: Tensor) -> Tensor:
        if weight is None:
            return tensor.detach().clone()
        dtype = weight.dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(weight.device, dtype, copy=True)

    return tree_map_only(Tensor, moved, value)


def _compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern in which `*` and `?` match within one part of a name and `**` matches across parts.

    Raises:
        OptionError: If a character range is invalid.
    """
    wild = {"**.": r"(.+\.)?", "**": ".*", "*": "[^.]*", "?": "[^.]"}
    parts = re.findall(r"\*\*\.?|\*|\?|\[[^\]]+\]|.", pattern, flags=re.DOTALL)
    plain = (part.replace("[!", "[^") if len(part) > 1 else re.escape(part) for part in parts)
    try:
        return re.compile("".join(wild.get(part, other) for part, other in zip(parts, plain, strict=True)))
    except re.error as problem:
        raise OptionError(
            f"where must be a pattern of names, got '{printable(pattern)}': {problem}. Check its brackets."
        ) from problem


def _nearest(name: str, known: list[Place]) -> str:
    plain = re.sub(r"[*?\[\]]", "", name)
    near = suggest(plain, (place.name for place in known)) or suggest(plain, PRESETS)
    return f"Nearest: {', '.join(near)}." if near else f"There are {_examples(known)}; presets: {', '.join(PRESETS)}."


def _examples(known: list[Place], flow: Flow | None = None) -> str:
    """Return names of modules; if a forward pass was traced, those that return feature maps."""
    with_maps = (
        [place for place in known if any(shape and len(shape) == 4 for shape in flow.outputs.get(place.name, []))]
        if flow
        else known
    )
    names = [place.name for place in with_maps if place.module._parameters] or [place.name for place in known]
    return ", ".join(f"'{name}'" for name in dict.fromkeys((*names[:2], *names[-1:])))


def _line(problem: Exception) -> str:
    return printable(str(problem).strip().split("\n")[0].rstrip("."))[:160] or type(problem).__name__
