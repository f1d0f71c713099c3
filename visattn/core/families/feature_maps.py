"""Facts about a model from dry runs: the modules that output a CNN's last feature map of each size.

A copy of the model runs once on the `meta` device, where nothing is computed. Names would be less reliable: libraries name the module
differently, some pool with a function, and some register modules in another order than they run.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Set
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple
from warnings import catch_warnings

import torch
from torch import Tensor, nn

from visattn._support.attempts import Attempt
from visattn._support.checkpointing import without_checkpoints
from visattn._support.memory import OfStructure
from visattn._support.modes import same_randomness
from visattn._support.module_hooks import module_hooks
from visattn._support.nested import leaves, mapped
from visattn.core.families.forward_calls import called, is_image

__all__ = ["is_map", "last_feature_map"]

_NO_MAP = ""  # no module outputs one, or tokens follow
_seen: OfStructure[str | None] = OfStructure()

_POOLS = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.AvgPool2d, nn.MaxPool2d)  # VGG pools to 7 x 7 at any input size


def last_feature_map(
    model: nn.Module,
    channels: int,
    size: tuple[int, int],
    inputs: Mapping[str, Any] = MappingProxyType({}),
    keyword: str = "",
) -> str | None:
    """Return the name of the module that outputs the last feature map with more than one position, unless tokens follow it.

    Args:
        model: Image model; it is not modified.
        channels: Channels of its input.
        size: Height and width of its input.
        inputs: Its other inputs by name, such as a row of a table; only their shapes matter.
        keyword: Name of the pixels among its inputs; empty: they come first.

    Returns:
        Name of the outermost such module; None if tokens follow, or the model cannot run on the meta device.
    """
    others = mapped(dict(inputs), lambda _, leaf: _bare(leaf))
    question = channels, size, keyword, tuple((path, _form(leaf)) for path, leaf in leaves(others))
    return _seen.of(model, question, lambda: _observed(model, channels, size, others, keyword)) or None


class _Step(NamedTuple):
    """Call of a module that made a feature map, of another if it was given one."""

    name: str
    call: int
    given: Tensor | None
    made: Tensor


def stages(
    model: nn.Module,
    channels: int,
    size: tuple[int, int],
    inputs: Mapping[str, Any] = MappingProxyType({}),
    keyword: str = "",
) -> list[str]:
    """Return the names of the modules that output the last feature map of each size, from the first stage of a CNN to the last.

    A stage ends where a module makes the feature map smaller, unless it is a part of another that makes it so, as in a residual branch.

    Args:
        model: Image model; it is not modified.
        channels: Channels of its input.
        size: Height and width of its input.
        inputs: See `last_feature_map`.
        keyword: See `last_feature_map`.

    Returns:
        The names; none if tokens follow the feature maps, their channels come last, or the model cannot run on the meta device.
    """
    last = last_feature_map(model, channels, size, inputs, keyword)
    steps: list[_Step] = []
    others = mapped(dict(inputs), lambda _, leaf: _bare(leaf))
    of_others = _computed_from_others(model, channels, size, others, keyword)

    def watch(name: str, call: int, _module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if isinstance(output, Tensor) and is_map(output, size) and (name, call) not in of_others:
            given = args[0] if args and isinstance(args[0], Tensor) and is_map(args[0], size) else None
            steps.append(_Step(name, call, given, output))

    counts = None if last is None else _dry_run(model, channels, size, watch, others, keyword)
    if last is None or counts is None:
        return []
    final = next((_size(step.made) for step in reversed(steps) if _called(step, counts) == last), None)
    if final is None:  # channels last
        return []
    reducing = [step for step in steps if step.given is not None and _smaller(step.made, step.given)]
    whole = [step for step in reducing if not any(_within(step, other) for other in reducing)]
    ends: dict[tuple[int, ...], tuple[int, str]] = {}  # by size: when the feature map was last made, and by which module
    for step in whole:
        makers = [(order, maker) for order, maker in enumerate(steps) if maker.made is step.given]
        if makers:
            order, maker = min(makers, key=lambda found: (found[1].name.count("."), -found[0]))
            ends[_size(maker.made)] = max(ends.get(_size(maker.made), (-1, "")), (order, _called(maker, counts)))
    return [name for size_of, (_, name) in sorted(ends.items(), reverse=True) if size_of > final] + [last]


def _called(step: _Step, counts: Mapping[str, int]) -> str:
    """Return the name of the module of a step, with the index of its call if it was called several times."""
    return step.name + (f" #{step.call}" if counts[step.name] > 1 else "")


def _size(feature: Tensor) -> tuple[int, ...]:
    return tuple(feature.shape[2:])


def is_map(tensor: Tensor, size: tuple[int, ...]) -> bool:
    """Check whether a tensor is a feature map with channels first: its sides are in the ratio of those of the image."""
    if tensor.ndim != 4 or min(tensor.shape) < 1 or _size(tensor) == (1, 1):
        return False
    down, across = (side / mine for side, mine in zip(size, _size(tensor), strict=True))
    return down >= 1 and across >= 1 and abs(down - across) <= 0.2 * max(down, across)  # sizes are rounded


def _smaller(made: Tensor, given: Tensor) -> bool:
    return _size(made) != _size(given) and all(mine <= before for mine, before in zip(_size(made), _size(given), strict=True))


def _within(step: _Step, other: _Step) -> bool:
    """Check whether a step is a part of another between the same sizes."""
    if step.given is None or other.given is None:
        return False
    same = (_size(step.given), _size(step.made)) == (_size(other.given), _size(other.made))
    return same and step.name.startswith(f"{other.name}.")


def _bare(value: Any) -> Any:  # noqa: ANN401 - an input of a model
    """Return a tensor as one without values; anything else as it is."""
    return torch.empty_like(value, device="meta", requires_grad=False) if isinstance(value, Tensor) else value


def _form(value: object) -> Hashable:
    """Return what of an input may decide which modules run."""
    return (value.shape, value.dtype) if isinstance(value, Tensor) else repr(value)


def _observed(model: nn.Module, channels: int, size: tuple[int, int], others: Mapping[str, Any], keyword: str) -> str | None:
    """Return the name, or `_NO_MAP`; None if the model cannot run on the meta device.

    Beside other inputs, a map that is computed from the pixels goes before one that is not, as of a second image; one that is computed
    from another image too is no map of this one.
    """
    of_others = _computed_from_others(model, channels, size, others, keyword)
    last: _Step | None = None
    version = -1  # version of its output, which in-place operations increase
    is_from_pixels = False

    def watch(name: str, call: int, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        nonlocal last, version, is_from_pixels
        if not isinstance(output, Tensor) or (args and output is args[0] and output._version == version):
            return  # the module was a no-op
        if is_from_pixels and not output.requires_grad:
            return
        is_from_pixels = bool(others) and output.requires_grad
        if output.ndim == 3 and output.shape[1] > 1:
            last = None
        elif (name, call) not in of_others and output.ndim == 4 and _spatial(output) and not isinstance(module, _POOLS):
            last, version = _Step(name, call, None, output), output._version

    counts = _dry_run(model, channels, size, watch, others, keyword)
    if counts is None:
        return None
    return _NO_MAP if last is None else _called(last, counts)


def _computed_from_others(
    model: nn.Module, channels: int, size: tuple[int, int], others: Mapping[str, Any], keyword: str
) -> Set[tuple[str, int]]:
    """Return the name and the call of each module whose output is computed from another image."""
    calls: set[tuple[str, int]] = set()

    def watch(name: str, call: int, _module: nn.Module, _args: tuple[Any, ...], output: object) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            calls.add((name, call))

    if any(is_image(leaf) for _, leaf in leaves(others)):
        traced = mapped(others, lambda _, leaf: leaf.detach().requires_grad_().clone() if is_image(leaf) else leaf)
        _dry_run(model, channels, size, watch, traced, keyword, of_pixels=False)
    return calls


Watch = Callable[[str, int, nn.Module, tuple[Any, ...], Any], None]  # name of a module, index of its call, and what `After` gets


def _dry_run(
    model: nn.Module,
    channels: int,
    size: tuple[int, int],
    watch: Watch,
    others: Mapping[str, Any] = MappingProxyType({}),
    keyword: str = "",
    *,
    of_pixels: bool = True,
) -> Mapping[str, int] | None:
    """Run a copy on the `meta` device, and call `watch` after each of its modules; `others` and `keyword`: see `last_feature_map`.

    Beside other inputs the graph begins at the pixels, unless `of_pixels` is false.

    Returns:
        How often each module returned a tensor; None if the model cannot run there.
    """
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        return None  # on the meta device every step of an RNN is unrolled, which takes minutes
    counts: Counter[str] = Counter()

    def after(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(first, Tensor):
            watch(name, counts[name], module, args, output)
            counts[name] += 1

    with Attempt() as attempt, dry(model) as bare, torch.set_grad_enabled(bool(others)), module_hooks(bare, after=after):
        kind = next((one.dtype for one in bare.parameters() if one.is_floating_point()), None)
        pixels = torch.empty(1, channels, *size, dtype=kind, device="meta", requires_grad=bool(others) and of_pixels).clone()
        called(bare, pixels, others, keyword)
    return None if attempt.failed else counts


def _spatial(output: Tensor) -> bool:
    """Check whether a feature map, channels first or last, has more than one position."""
    return tuple(output.shape[2:]) != (1, 1) and tuple(output.shape[1:3]) != (1, 1)


@contextmanager
def dry(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model `without_values`, to be run without a trace; warnings are ignored, as of a call that the user did not make."""
    bare = without_values(model)
    with same_randomness(), without_checkpoints(bare.modules()), catch_warnings(action="ignore"):
        yield bare


def without_values(model: nn.Module) -> nn.Module:
    """Copy a model to the `meta` device in evaluation mode, without its hooks and without ever copying its values."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        bare = torch.empty_like(tensor, device="meta", requires_grad=False)
        memo[id(tensor)] = nn.Parameter(bare, requires_grad=False) if isinstance(tensor, nn.Parameter) else bare
    made = copy.deepcopy(model, memo).eval()
    for module in made.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return made
