"""Attention for a model that exists: `attach` puts it into the model, and gives a handle that knows where and can take it out."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from visattn._support.checks import one_of, suggest
from visattn.errors import ModelError, OptionError, ShapeError, VisattnWarning
from visattn.nn.attaching.attached import Attached, Site
from visattn.nn.attaching.plugged import Company, Plugged, plug
from visattn.nn.attaching.sites import Maps, Place, Where, chosen, follow, maps_of
from visattn.nn.attaching.trail import AnyLayout
from visattn.nn.shapes import at_least
from visattn.nn.table import ATTENTION

Attention = str | type[nn.Module] | Callable[..., nn.Module]
Init = Literal["identity", "paper", "zero_last", "two_sigmoid"]

_WRAPPERS = ("FullyShardedDataParallel", "OptimizedModule")
_NORMS = nn.modules.batchnorm._BatchNorm


def attach(
    model: nn.Module,
    attention: Attention,
    where: Where = "residual",
    *,
    init: Init | float = "identity",
    layout: AnyLayout = "auto",
    example: object = None,
    min_channels: int = 1,
    strict_attention: bool = False,
    dry_run: bool = False,
    **module_options: Any,  # noqa: ANN401 - those of the attention
) -> Attached:
    """Put attention into a CNN, in place: of timm, of torchvision or your own, whether it classifies, detects or segments.

    Each chosen module is replaced by one that runs it and then the attention. By default that changes no output by a single bit, and
    a checkpoint of the model as it was still loads with `strict=True`. Attention must be trained to help: plain attention put into a
    trained network destroys what it knows.

    One forward is followed to see sizes and layouts, and for `residual` which additions close a residual branch.

    Args:
        model: Changed in place. Attach before it is compiled or wrapped for several devices, and before a scheduler is built.
        attention: A name of `visattn.nn.ATTENTION`, a class, or a function of the number of channels that gives a module.
        where: `residual`: the end of each residual branch that a module ends, before the addition. `stage`: after each stage, of a
            U-Net those of encoder and decoder; what is left out warns. `depthwise`: after each depthwise convolution, or its norm
            where one follows. Else a pattern such as `layer4.*.bn3`, in which `*` stays within one part of a name and `**` goes over
            several, a list of names, or a function of name and module. Names are those of the model before anything was attached.
        init: `identity`: `x + g (A(x) - x)` with one learned number `g`, which begins at 0; a number: the same, and `g` begins with it.
            `paper`: plain `A(x)`. `zero_last`: plain `A(x)` with its last layer zero, for attention that is then the identity, as gc
            and nl. `two_sigmoid`: `2 A(x)` with its last layer zero, for attention whose one gate is then a half, as se and eca; no
            number more than the paper's, but another function. At `g = 0` only `g` gets a gradient in the first step, and the
            attention from the second on; 1e-3 lets both learn at once and changes outputs a little. Where a branch begins at zero, all
            of this comes a step later, whatever `g` is: its last norm's weight, or a gain behind it, must first leave zero, as in
            timm's ResNets from scratch (`zero_init_last`). Of sites that give nothing but zeros a number other than 0 warns.
        layout: Where the channels lie. `auto` sees it in the forward; both are kept inside the module.
        example: What the model takes: a tensor, a tuple of arguments or a dict of named ones. None is one image of the model's size.
        min_channels: Places with fewer channels are left out.
        strict_attention: Report a checkpoint without any attention as incomplete too. Else the attention keeps what it has, and
            `supplied` of the handle tells so; one that lacks some of the sites only is always incomplete.
        dry_run: Change nothing; the handle has sites and costs.
        module_options: Passed to the attention.

    Returns:
        The handle: `sites`, `summary()`, `parameters()`, `base_state_dict()`, `join(optimizer)`, `check(optimizer)`, `detach()`.

    Raises:
        OptionError: If an option, name or pattern is unknown, fits nothing, or a place has attention or hangs twice.
        ShapeError: If a place gives no maps, or the attention does not keep their shape.
        ModelError: If the model is wrapped, compiled or scripted already.

    Example:
        >>> import timm, visattn
        >>> handle = visattn.attach(timm.create_model("resnet18"), "se", where="layer4.*.bn2")
        >>> [(site.name, site.channels, site.size) for site in handle.sites]
        [('layer4.0.bn2', 512, (7, 7)), ('layer4.1.bn2', 512, (7, 7))]
    """
    _check_options(model, init, layout)
    kind, gate = ("identity", float(init)) if isinstance(init, (int, float)) else (init, 0.0)
    at_least("min_channels", min_channels)
    flow = follow(model, example)
    seen = [(place, maps_of(place, flow, layout)) for place in chosen(model, where, flow)]
    wide = [(place, maps) for place, maps in seen if maps.channels >= min_channels]
    if not wide:
        most = max(maps.channels for _, maps in seen)
        raise OptionError(f"min_channels must leave a place, got {min_channels} where the widest has {most}. Choose a lower one.")
    sites, plugged, company = [], [], Company()
    with torch.random.fork_rng(devices=[], enabled=dry_run):
        for place, maps in wide:
            module = _build(attention, maps, module_options, place.name)
            macs = _macs(module, maps, place.name)
            scale = _prepare(module, kind, maps)
            wrapper = plug(
                place.module,
                module,
                gate if kind == "identity" else None,
                _like(place.module, model),
                scale=scale,
                layout=maps.layout,
                strict_attention=strict_attention,
                company=company,
            )
            numbers = sum(parameter.numel() for _, parameter in wrapper.added())
            sites.append(Site(place.name, maps.channels, maps.size, maps.layout, module, numbers, macs))
            plugged.append((place, wrapper))
    handle = Attached(model, sites, None if dry_run else plugged)
    if dry_run:
        return handle
    _warn(model, plugged, idle=[] if isinstance(flow, Exception) else [place.name for place, maps in wide if not maps.shapes])
    for place, wrapper in plugged:
        place.parent._modules[place.key] = wrapper
    _warn_of_sites(model, example, plugged, [] if isinstance(flow, Exception) else [maps for _, maps in wide], gate)
    return handle


def _check_options(model: nn.Module, init: str | float, layout: str) -> None:
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"model must be a torch.nn.Module, got {type(model).__name__}. Load it first, as with visattn.load_model."
        )
    kind = type(model).__name__
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)) or kind in _WRAPPERS:
        raise ModelError(
            f"the model must not be wrapped or compiled yet, got {kind}, which would not know the attention. Attach first."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(f"the model must be a Python module, got {kind}, whose code is fixed. Attach first.")
    if isinstance(init, (int, float)):
        if not math.isfinite(init):
            raise OptionError(f"init must be a name or a finite number, got {init!r}. 0 changes nothing at first.")
    else:
        one_of(init, get_args(Init), "init")
    one_of(layout, get_args(AnyLayout), "layout")


def _build(attention: Attention, maps: Maps, options: dict[str, Any], name: str) -> nn.Module:
    """The attention for one place."""
    if isinstance(attention, nn.Module) or not (isinstance(attention, str) or callable(attention)):
        raise OptionError(
            f"attention must be a name, a class or a function of the channels, got {type(attention).__name__}. "
            "One module for all places would share its weights."
        )
    make = ATTENTION[one_of(attention, sorted(ATTENTION), "attention")] if isinstance(attention, str) else attention
    label = attention if isinstance(attention, str) else getattr(attention, "__name__", "the function")
    try:
        inspect.signature(make).bind(maps.channels, **options)
    except TypeError as problem:
        known = list(inspect.signature(make).parameters)[1:]
        wrong = next((option for option in options if option not in known), None)
        near = suggest(wrong, known, 1) if wrong is not None else []
        hint = f"; did you mean '{near[0]}'?" if near else "."
        what = (
            f"{label} has no option '{wrong}'{hint}"
            if wrong is not None
            else f"{label} cannot be built from channels: {problem}."
        )
        raise OptionError(f"{what} Known: {', '.join(known) or 'none'}.") from problem
    module = make(maps.channels, **options)
    if not isinstance(module, nn.Module):
        raise OptionError(f"{label} must give a torch.nn.Module for '{name}', got {type(module).__name__}.")
    return module


def _macs(module: nn.Module, maps: Maps, name: str) -> int | None:
    """Multiply-adds in the forward that was followed, counted without numbers where the module can do without.

    Raises:
        ShapeError: If the module does not keep the shape.
    """
    shapes = maps.shapes or ((1, maps.channels, 16, 16),)
    try:
        bare = copy.deepcopy(module).to("meta").eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            outputs = [bare(torch.empty(shape, device="meta")) for shape in shapes]
        macs = counter.get_total_flops() // 2 if maps.shapes else None
    except ShapeError:
        raise
    except Exception:  # it must see numbers, or refuses these with them as well
        macs = None
        try:
            outputs = [_still(module, torch.zeros(shapes[0]))]
        except Exception as problem:
            why = str(problem).strip().split("\n")[0].rstrip(".")
            raise ShapeError(
                f"the attention must take {shapes[0]} at '{name}', got: {why}. Build it for what it is given."
            ) from problem
    for output, shape in zip(outputs, shapes, strict=False):
        found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        if found != shape:
            raise ShapeError(
                f"the attention must keep {shape} at '{name}', got {found}. Build it for the channels that it is given."
            )
    return macs


def _prepare(module: nn.Module, init: str, maps: Maps) -> float:
    """Set the last layer to zero if `init` says so, make sure of what that is for, and give the factor that it needs.

    Raises:
        OptionError: If the attention is then not the identity.
    """
    if init not in ("zero_last", "two_sigmoid"):
        return 1.0
    factor = 1.0 if init == "zero_last" else 2.0
    if _factor(module, maps) == 1 / factor:
        return factor
    layers = [part for part in module.modules() if part._parameters]
    with torch.no_grad():
        for parameter in layers[-1].parameters(recurse=False) if layers else ():
            parameter.zero_()
    if _factor(module, maps) != 1 / factor:
        wanted = "what it is given" if factor == 1 else "half of it"
        raise OptionError(
            f"init='{init}' must make {type(module).__name__} give {wanted} when its last layer is zero, and it does not. "
            "Use init='identity'."
        )
    return factor


def _factor(module: nn.Module, maps: Maps) -> float | None:
    """The power of two that a module multiplies all numbers with, if it does nothing else."""
    size = maps.size if maps.size is not None and math.prod(maps.size) <= 1024 else (14, 15)
    x = torch.sin(torch.arange(2 * maps.channels * math.prod(size))).reshape(2, maps.channels, *size)
    y = _still(module, x)
    return next((factor for factor in (1.0, 0.5) if torch.equal(y, (x * factor).to(y))), None)


def _still(module: nn.Module, x: Tensor) -> Tensor:
    """What a module gives in evaluation mode; its flags are put back."""
    flags = [(part, part.training) for part in module.modules()]
    with torch.no_grad():
        weight = _like(module, module)
        y: Tensor = module.eval()(x if weight is None else x.to(weight))
    for part, training in flags:
        part.training = training
    return y


def _like(module: nn.Module, model: nn.Module) -> Tensor | None:
    """A tensor whose device and dtype a module's attention should have."""
    tensors = chain(module.parameters(), module.buffers(), model.parameters(), model.buffers())
    return next((tensor for tensor in tensors if tensor.is_floating_point()), None)


def _warn(model: nn.Module, plugged: list[tuple[Place, Plugged]], idle: list[str]) -> None:
    """Say what attaching allows, but is seldom meant."""
    if idle:
        warnings.warn(
            f"{_some(idle)} did not run in the forward, so attention there may never run. Modules whose weights alone are used are such, "
            "and heads that run only in training.",
            VisattnWarning,
            stacklevel=3,
        )
    still = [
        place.name
        for place, one in plugged
        if not one.training and any(isinstance(part, _NORMS) for part in one.attention.modules())
    ]
    if still and model.training:
        warnings.warn(
            f"{_some(still)} stay in evaluation mode in a model that trains, and so do the norms of their attention, whose mean and "
            "variance are still 0 and 1. Call train() on the modules of handle.sites.",
            VisattnWarning,
            stacklevel=3,
        )


def _warn_of_sites(
    model: nn.Module, example: object, plugged: list[tuple[Place, Plugged]], seen: list[Maps], gate: float
) -> None:
    """Say which modules the model still reaches past their attention, as through a list of its own, and which give only zeros."""
    met: set[nn.Module] = set()
    alive: set[nn.Module] = set()

    def told(wrapper: Plugged) -> Callable[[nn.Module, object, Tensor], None]:
        return lambda _module, _args, output: alive.add(wrapper) if output.is_meta or output.any() else None

    handles = [wrapper.register_forward_pre_hook(lambda module, _: met.add(module)) for _, wrapper in plugged]
    handles += [wrapper.base.register_forward_hook(told(wrapper)) for _, wrapper in plugged if gate]
    try:
        again = follow(model, example) if seen else Exception()
    finally:
        for handle in handles:
            handle.remove()
    ran = [] if isinstance(again, Exception) else [place for place, maps in zip(plugged, seen, strict=True) if maps.shapes]
    bypassed = [place.name for place, wrapper in ran if wrapper not in met]
    if bypassed:
        warnings.warn(
            f"{_some(bypassed)} ran before and does not run with attention: the model holds the module somewhere else too, as in a list. "
            "Attach to a module that it reaches by name.",
            VisattnWarning,
            stacklevel=3,
        )
    zero = [place.name for place, wrapper in ran if gate and wrapper in met - alive]
    if zero:
        warnings.warn(
            f"{_some(zero)} give only zeros at first, so init={gate:g} lets nothing learn there in the first step. Build the model with "
            "zero_init_last=False (timm) or zero_init_residual=False (torchvision), or load its weights first.",
            VisattnWarning,
            stacklevel=3,
        )


def _some(names: list[str]) -> str:
    return f"'{names[0]}'" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
