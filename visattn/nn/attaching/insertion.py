"""Insertion of attention modules into an existing model: `attach` returns a handle that can remove them again."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from itertools import chain
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from visattn._support.checks import at_least, one_of, suggest
from visattn._support.notes import warn
from visattn.errors import ModelError, OptionError, ShapeError
from visattn.nn.attaching.attached import Attachment, Site
from visattn.nn.attaching.sites import Maps, Place, Where, chosen, follow, maps_of
from visattn.nn.attaching.trail import AnyLayout
from visattn.nn.attaching.with_attention import Company, WithAttention, plug
from visattn.nn.module_table import ATTENTION

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
    **module_options: Any,  # noqa: ANN401 - options of the attention
) -> Attachment:
    """Insert attention modules into a CNN, in place. It may be a classifier, detector or segmenter from timm, torchvision or your own code.

    Each chosen module is replaced by one that runs it and then the attention. By default the outputs stay bit-identical, and a checkpoint
    of the original model still loads with `strict=True`. Attention helps only after training: plain attention (`init="paper"`) in a trained
    network destroys its accuracy.

    One forward pass is traced to find sizes and layouts, and for `residual` the additions that close a residual branch.

    Args:
        model: Model to change in place. Attach before you compile it, wrap it for several devices or build a scheduler.
        attention: A name in `visattn.nn.ATTENTION`, a class, or a function from the number of channels to a module.
        where: Sites of the attention; names are those of the original model. One of:

            - `residual`: after the module that ends each residual branch, before the addition.
            - `stage`: after each stage; in a U-Net after those of encoder and decoder. Stages that cannot have attention cause a warning.
            - `depthwise`: after each depthwise convolution, or after its norm if it has one.
            - a pattern such as `layer4.*.bn3`, in which `*` matches within one part of a name and `**` across several.
            - a list of names, or a function of name and module.
        init: Initialization of the attention `A`. One of:

            - `identity`: `x + g (A(x) - x)` with one learned scalar `g`, which starts at 0.
            - a number: as `identity`, but `g` starts at this number.
            - `paper`: plain `A(x)`.
            - `zero_last`: `A(x)` with its last layer zeroed, for attention that is then the identity (gc and nl).
            - `two_sigmoid`: `2 A(x)` with its last layer zeroed, for attention whose only gate is then 1/2 (se and eca). It adds no
              parameter to the paper's module, but computes another function.

            With `g = 0` only `g` gets a gradient in the first step; the attention gets one from the second step on. With 1e-3 both learn
            at once, and outputs change a little. Both happen a step later if the residual branch itself starts at zero, as in timm's
            ResNets from scratch (`zero_init_last`). The weight of its last norm, or a gain after it, must then become nonzero first.
            A nonzero `g` causes a warning for sites whose output is all zeros.
        layout: Channel axis of the feature maps. `auto` detects it in the forward pass. The output keeps the layout of the input.
        example: Input of the model: a tensor, a tuple of arguments or a dict of named ones. None uses one image of the model's input size.
        min_channels: Leave out sites with fewer channels.
        strict_attention: Also report a checkpoint without any attention as incomplete. Otherwise the attention keeps its values, and
            `supplied` of the handle lists their keys. A checkpoint that lacks only some of the sites is always incomplete.
        dry_run: Change nothing, and return a handle with sites and costs.
        module_options: Options of the attention module.

    Returns:
        The handle: `sites`, `summary()`, `parameters()`, `base_state_dict()`, `join(optimizer)`, `check(optimizer)`, `detach()`.

    Raises:
        OptionError: If an option or name is unknown, if nothing matches `where`, or if a site already has attention or is registered twice.
        ShapeError: If a site does not return feature maps, or if the attention does not keep their shape.
        ModelError: If the model is already wrapped, compiled or scripted.

    Examples:
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
        raise OptionError(
            f"min_channels must be at most {most}, the channels of the widest site, got {min_channels}. Choose a lower number."
        )
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
    handle = Attachment(model, sites, None if dry_run else plugged)
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
            f"the model must not be wrapped or compiled yet, got {kind}, which would miss the attention. Attach first."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            f"the model must be a Python module, got {kind}, whose code is fixed. Attach first, then use torch.jit.trace."
        )
    if isinstance(init, (int, float)):
        if not math.isfinite(init):
            raise OptionError(f"init must be a name or a finite number, got {init!r}. 0 changes nothing at first.")
    else:
        one_of(init, get_args(Init), "init")
    one_of(layout, get_args(AnyLayout), "layout")


def _build(attention: Attention, maps: Maps, options: dict[str, Any], name: str) -> nn.Module:
    """Build the attention for one site."""
    if isinstance(attention, nn.Module) or not (isinstance(attention, str) or callable(attention)):
        raise OptionError(
            f"attention must be a name, a class or a function of the channels, got {type(attention).__name__}. "
            "One module for all sites would share its weights."
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
        raise OptionError(f"{label} must return a torch.nn.Module for '{name}', got {type(module).__name__}.")
    return module


def _macs(module: nn.Module, maps: Maps, name: str) -> int | None:
    """Count the multiply-adds in the traced forward pass, on the meta device if the module supports it.

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
    except Exception:  # it needs real values, or rejects this shape anyway
        macs = None
        try:
            outputs = [_still(module, torch.zeros(shapes[0]))]
        except Exception as problem:
            why = str(problem).strip().split("\n")[0].rstrip(".")
            raise ShapeError(
                f"the attention must accept {shapes[0]} at '{name}', got: {why}. Build it for this input."
            ) from problem
    for output, shape in zip(outputs, shapes, strict=False):
        found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        if found != shape:
            raise ShapeError(f"the attention must keep {shape} at '{name}', got {found}. Build it for these channels.")
    return macs


def _prepare(module: nn.Module, init: str, maps: Maps) -> float:
    """Zero the last layer if `init` requires it, check that this gives the identity up to a factor, and return that factor.

    Raises:
        OptionError: If the attention is not the identity then.
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
        wanted = "its input" if factor == 1 else "half its input"
        raise OptionError(
            f"init='{init}' requires that {type(module).__name__} returns {wanted} when its last layer is zero, and it does not. "
            "Use init='identity'."
        )
    return factor


def _factor(module: nn.Module, maps: Maps) -> float | None:
    """Return 1 or 0.5 if the module only multiplies its input by this number, else None."""
    size = maps.size if maps.size is not None and math.prod(maps.size) <= 1024 else (14, 15)
    x = torch.sin(torch.arange(2 * maps.channels * math.prod(size))).reshape(2, maps.channels, *size)
    y = _still(module, x)
    return next((factor for factor in (1.0, 0.5) if torch.equal(y, (x * factor).to(y))), None)


def _still(module: nn.Module, x: Tensor) -> Tensor:
    """Run a module in evaluation mode, then restore its training flags."""
    flags = [(part, part.training) for part in module.modules()]
    with torch.no_grad():
        weight = _like(module, module)
        y: Tensor = module.eval()(x if weight is None else x.to(weight))
    for part, training in flags:
        part.training = training
    return y


def _like(module: nn.Module, model: nn.Module) -> Tensor | None:
    """Return a tensor with the device and dtype that the attention of a module should have."""
    tensors = chain(module.parameters(), module.buffers(), model.parameters(), model.buffers())
    return next((tensor for tensor in tensors if tensor.is_floating_point()), None)


def _warn(model: nn.Module, plugged: list[tuple[Place, WithAttention]], idle: list[str]) -> None:
    """Warn about sites that are allowed but probably unintended."""
    if idle:
        warn(
            f"{_some(idle)} did not run in the forward pass, so attention there may never run. Examples are modules of which only the "
            "weights are used, and heads that run only in training."
        )
    still = [
        place.name
        for place, one in plugged
        if not one.training and any(isinstance(part, _NORMS) for part in one.attention.modules())
    ]
    if still and model.training:
        warn(
            f"{_some(still)} stay in evaluation mode while the model trains, and so do the norms of their attention, whose running mean "
            "and variance are still 0 and 1. Call train() on the modules of handle.sites."
        )


def _warn_of_sites(
    model: nn.Module, example: object, plugged: list[tuple[Place, WithAttention]], seen: list[Maps], gate: float
) -> None:
    """Warn about modules that the model calls without their attention, for example through its own list, and about all-zero outputs."""
    met: set[nn.Module] = set()
    alive: set[nn.Module] = set()

    def told(wrapper: WithAttention) -> Callable[[nn.Module, object, Tensor], None]:
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
        warn(
            f"{_some(bypassed)} ran before but does not run with attention, because the model also stores the module elsewhere, such as "
            "in a list. Attach to a module that the model calls by name."
        )
    zero = [place.name for place, wrapper in ran if gate and wrapper in met - alive]
    if zero:
        warn(
            f"{_some(zero)} return only zeros at first, so with init={gate:g} nothing there learns in the first step. Build the model with "
            "zero_init_last=False (timm) or zero_init_residual=False (torchvision), or load its weights first."
        )


def _some(names: list[str]) -> str:
    return f"'{names[0]}'" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
