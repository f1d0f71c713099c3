"""Where attention may go in a model: names as they were before anything was attached, presets, and what a forward shows of them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from visattn._support.checks import printable, suggest
from visattn._support.modes import evaluating
from visattn.errors import OptionError, ShapeError, VisattnWarning
from visattn.nn.attaching.forwards import Flow
from visattn.nn.attaching.plugged import Plugged
from visattn.nn.attaching.trail import AnyLayout, Layout

Where = str | Callable[[str, nn.Module], bool] | Sequence[str]

PRESETS = ("residual", "stage", "depthwise")
_STAGES = (  # the first that two modules or more have, of those the least deep
    r"layer[1-9]\d*",  # ResNet and its kin
    r"stages?[._]?\d+",
    r"s[1-9]",  # timm's RegNet
    r"level[1-9]",  # DLA
    r"(dense)?block\d+",
)
_CHAINS = (
    r"(blocks|features|layers|body|backbone)\.\d+|Mixed_\d\w|inception\d\w"  # blocks in a row: the last of each size is the end
)
_CERTAIN = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.Linear)  # what they declare are channels
_DECLARED = ("num_features", "out_channels", "out_features", "out_chs", "num_channels")


@dataclass(frozen=True)
class Place:
    """One module of a model and where it hangs."""

    name: str
    parent: nn.Module
    key: str
    module: nn.Module


@dataclass(frozen=True)
class Maps:
    """The feature maps of a place.

    Attributes:
        channels: C.
        layout: On which axis the channels lie.
        shapes: `(B, C, H, W)` of each run in the forward that was followed.
    """

    channels: int
    layout: Layout
    shapes: tuple[tuple[int, int, int, int], ...] = ()

    @property
    def size(self) -> tuple[int, int] | None:
        """`(H, W)` of the first run, if there was one."""
        return self.shapes[0][2:] if self.shapes else None


def places(model: nn.Module, above: str = "") -> Iterator[Place]:
    """All modules below `model`, by their names before anything was attached; one that hangs in two places is given twice."""
    for key, module in model._modules.items():
        if module is None:
            continue
        name = f"{above}{key}"
        yield Place(name, model, key, module)
        yield from places(module.base if isinstance(module, Plugged) else module, f"{name}.")


def follow(model: nn.Module, example: object) -> Flow | Exception:
    """One forward of `example`, else of an input of the model's own size, or why there was none.

    Args:
        model: Put into evaluation mode for the while, without gradients.
        example: A tensor, a tuple of arguments, a dict of named ones, or None.

    Raises:
        OptionError: If the model refuses `example`.
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
                    f"the model refuses the example: {_line(problem)}. Pass example= as the model takes it: a tensor, a tuple of "
                    "arguments or a dict of named ones."
                ) from problem
            height, width = _size(model)
            failure = Exception(f"the model refused an input of {height} x {width}: {_line(problem)}")
        else:
            return flow
    return failure


def chosen(model: nn.Module, where: Where, flow: Flow | Exception) -> list[Place]:
    """The places that `where` names, in the order of the model.

    Raises:
        OptionError: If there are none, a name is unknown, or a place is the whole model or hangs twice.
    """
    known = list(places(model))
    if isinstance(where, str) and where in PRESETS:
        if isinstance(flow, Exception):
            raise OptionError(f"where='{where}' must see a forward, and {flow}. Pass example=, an input of the model.")
        names = {"residual": _residual, "stage": _stage, "depthwise": _depthwise}[where](known, flow)
        if not names:
            raise OptionError(
                f"{type(model).__name__} has no {_MEANING[where]}. Name modules or a pattern, such as {_examples(known)}."
            )
    elif isinstance(where, str):
        pattern = _compiled(where)
        names = {place.name for place in known if pattern.fullmatch(place.name)}
        if not names:
            raise OptionError(f"no module matches '{printable(where)}'. {_nearest(where, known)}")
    elif callable(where):
        names = {place.name for place in known if where(place.name, place.module)}
        if not names:
            raise OptionError(f"the function says no to all {len(known)} modules. It is given names such as {_examples(known)}.")
    elif not isinstance(where, (list, tuple, set)):
        raise OptionError(f"where must be a preset, a pattern, a list of names or a function, got {type(where).__name__}.")
    else:
        names = set(where)
        for name in (name for name in where if name not in {place.name for place in known}):
            raise OptionError(f"no module is called '{printable(str(name))}'. {_nearest(str(name), known)}")
        if not names:
            raise OptionError(f"where must name a module, got none. There are names such as {_examples(known)}.")
    found = [place for place in known if place.name in names]
    _check_single(found, known)
    return found


def maps_of(place: Place, flow: Flow | Exception, layout: AnyLayout) -> Maps:
    """Channels, shapes and layout of what a place gives.

    Raises:
        ShapeError: If it gives no maps, or none with the channels it declares.
        OptionError: If it cannot be told which axis is that of the channels.
    """
    declared = next((value for name in _DECLARED if isinstance(value := getattr(place.module, name, None), int)), None)
    shapes = [] if isinstance(flow, Exception) else flow.outputs.get(place.name, [])
    if isinstance(flow, Exception) or not shapes:
        return _unseen(place, declared, flow, layout)
    for shape in shapes:
        if shape is None or len(shape) != 4:
            gives = "no single tensor" if shape is None else f"{shape}"
            hint = " Those are tokens; attention of tokens belongs inside their blocks." if shape and len(shape) == 3 else ""
            raise ShapeError(
                f"'{place.name}' must give maps, (B, C, H, W) or (B, H, W, C), got {gives}.{hint} Choose another module."
            )
    known = flow.layout_of(place.name, declared) if layout == "auto" else layout
    if known is None:
        raise OptionError(
            f"layout must be given for '{place.name}', got 'auto' and {shapes[0]}, whose channels may come first or last. "
            "Pass layout='NCHW' or layout='NHWC'."
        )
    order = (0, 1, 2, 3) if known == "NCHW" else (0, 3, 1, 2)
    found = tuple((shape[order[0]], shape[order[1]], shape[order[2]], shape[order[3]]) for shape in shapes if shape is not None)
    channels = found[0][1]
    if isinstance(place.module, _CERTAIN) and declared is not None and declared != channels:
        raise ShapeError(
            f"'{place.name}' must give {declared} channels, got {channels} in {shapes[0]} as {known}. Pass layout='auto'."
        )
    return Maps(channels, known, found)


def plain_name(model: nn.Module, key: str) -> str | None:
    """What a key of the state dict of a model was called before anything was attached; None for what was not there."""
    module: Any = model
    parts: list[str] = []
    for part in key.split("."):
        if isinstance(module, Plugged):
            if part != "base":
                return None
        else:
            parts.append(part)
        module = getattr(module, "_modules", {}).get(part)
    return ".".join(parts)


_MEANING = {
    "residual": "residual branch that ends in a module",
    "stage": "stages that this library can tell",
    "depthwise": "depthwise convolution",
}


def _residual(known: list[Place], flow: Flow) -> set[str]:
    return set(flow.ends)


def _stage(known: list[Place], flow: Flow) -> set[str]:
    """Stages by their names, and those at both ends of skip connections, which names seldom tell.

    Of what cannot be attached to a warning tells.
    """
    named, odd = _named_stages(known, flow)
    ends = flow.skips.ends(lambda name: len(flow.outputs[name]) == 1)
    skips = [name for name in ends if name is not None and not any(flow.skips.same(name, other) for other in named)]
    left = [name for name in odd if not any(other.startswith(f"{name}.") for other in (*named, *skips))]
    if (named or skips) and (left or None in ends):
        which = [*map(repr, left), *(["a skip connection that no module alone gives"] if None in ends else [])]
        warnings.warn(
            f"{', '.join(which)} {'is' if len(which) == 1 else 'are'} left out: no single map comes from there. Name modules "
            "inside in where=, or leave it so.",
            VisattnWarning,
            stacklevel=4,
        )
    return {*named, *skips}


def _named_stages(known: list[Place], flow: Flow) -> tuple[list[str], list[str]]:
    """Whole stages by their names, else of blocks in a row the last before the size changes; and stages that give no single map."""
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
    """Depthwise convolutions, or their norms, so that the two can still be fused."""
    found = (place for place in known if isinstance(place.module, nn.Conv2d) and place.name in flow.outputs)
    deep = (place.name for place in found if getattr(place.module, "groups", 1) == getattr(place.module, "in_channels", 0) > 1)
    return {flow.normed.get(name, name) for name in deep}


def _unseen(place: Place, declared: int | None, flow: Flow | Exception, layout: AnyLayout) -> Maps:
    """What a place is known to give though it did not run."""
    types = (nn.Conv2d, nn.BatchNorm2d, nn.GroupNorm, nn.InstanceNorm2d)
    channels = place.module.num_channels if isinstance(place.module, nn.GroupNorm) else declared
    if channels is None or (layout == "auto" and not isinstance(place.module, types)):
        why = str(flow) if isinstance(flow, Exception) else "it did not run in the forward"
        raise OptionError(
            f"the maps of '{place.name}' must be seen to tell their channels, and {why}. Pass example=, an input that reaches it."
        )
    return Maps(channels, "NCHW" if layout == "auto" else layout)


def _check_single(found: list[Place], known: list[Place]) -> None:
    by_object: dict[int, list[str]] = {}
    for place in known:
        by_object.setdefault(id(place.module), []).append(place.name)
    for place in found:
        if isinstance(place.module, Plugged):
            kind = type(place.module.attention).__name__
            raise OptionError(f"'{place.name}' has attention already ({kind}). Detach that first, or name other modules.")
        if len(names := by_object[id(place.module)]) > 1:
            raise OptionError(
                f"'{names[0]}' and '{names[1]}' are one module, which would have attention in both places. Give each place its own."
            )


def _defaults(model: nn.Module) -> Iterator[object]:
    """Inputs of the model's own size: as many channels as its first convolution takes, else three."""
    first = next((part for part in model.modules() if isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Conv3d))), None)
    for channels in dict.fromkeys(([] if first is None else [first.in_channels]) + [3]):
        pixels = torch.sin(torch.arange(channels * (size := _size(model))[0] * size[1]).float()).reshape(1, channels, *size)
        detector = type(getattr(model, "transform", None)).__name__ == "GeneralizedRCNNTransform"  # torchvision's want a list
        yield [pixels[0]] if detector else pixels


def _size(model: nn.Module) -> tuple[int, int]:
    """Height and width that a model was made for, as timm says it, else 224."""
    config = getattr(model, "pretrained_cfg", None)
    fixed = getattr(getattr(model, "patch_embed", None), "img_size", None)
    size = fixed or (config["input_size"][1:] if isinstance(config, Mapping) and "input_size" in config else (224, 224))
    return int(size[0]), int(size[1])


def _moved(value: Any, model: nn.Module) -> Any:  # noqa: ANN401 - as nested as the user's example
    """Tensors on the model's device, those with a point in its dtype; copies, as a model may write into what it is given."""
    weight = next((one for one in (*model.parameters(), *model.buffers()) if one.is_floating_point()), None)

    def moved(tensor: Tensor) -> Tensor:
        if weight is None:
            return tensor.detach().clone()
        dtype = weight.dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(weight.device, dtype, copy=True)

    return tree_map_only(Tensor, moved, value)


def _compiled(pattern: str) -> re.Pattern[str]:
    """A pattern in which `*` and `?` stay within one part of a name, and `**` goes over any number of parts.

    Raises:
        OptionError: If a range in it is none.
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


def _examples(known: list[Place]) -> str:
    names = [place.name for place in known if place.module._parameters] or [place.name for place in known]
    return ", ".join(f"'{name}'" for name in dict.fromkeys((*names[:2], *names[-1:])))


def _line(problem: Exception) -> str:
    return printable(str(problem).strip().split("\n")[0].rstrip("."))[:160] or type(problem).__name__
