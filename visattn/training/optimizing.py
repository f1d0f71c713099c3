"""Optimizer, learning rate schedule, and which parameters are trained at which rate: timm's functions, chosen by the settings."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from timm.optim import (
    create_optimizer_v2,
    get_optimizer_info,
    list_optimizers,
    param_groups_layer_decay,
    param_groups_weight_decay,
)
from timm.scheduler import CosineLRScheduler, PolyLRScheduler, StepLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import nn

from visattn._support.checks import printable, suggest
from visattn._support.language import option
from visattn.errors import OptionError
from visattn.nn import ATTENTION, WithAttention
from visattn.training.config import Config, Recipe

Groups = Callable[[nn.Module], list[dict[str, Any]]]

BACKBONE = "backbone"
_FIRST = 0.01  # learning rate of the first warmup step, relative to the peak
_NORMS = nn.modules.batchnorm._BatchNorm


def optimizer_of(model: nn.Module, config: Recipe, groups: Groups | None = None) -> torch.optim.Optimizer:
    """Build the optimizer of a model, for parameter groups if a function that makes them is given.

    Raises:
        OptionError: If the optimizer is unknown or unavailable, or momentum is given but the optimizer has none.
    """
    name = config.opt.lower().removeprefix("lookahead_")
    known = list_optimizers()
    if name not in known:
        near = suggest(name, known, 1)
        hint = f"; did you mean '{near[0]}'?" if near else "."
        raise OptionError(f"unknown opt '{printable(config.opt)}'{hint} Known: {', '.join(known)}.")
    facts = get_optimizer_info(name)
    if facts.second_order:
        raise OptionError(f"opt must be a first-order optimizer, got {name}, which needs second derivatives. Choose another.")
    if not facts.has_momentum and config.momentum != type(config)().momentum:
        raise OptionError(
            f"{option('momentum')} needs an optimizer that has one, got {config.momentum:g} for {name}. Leave it out."
        )
    try:
        made: torch.optim.Optimizer = create_optimizer_v2(
            model,
            opt=config.opt,
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            param_group_fn=groups,
        )
    except OptionError:
        raise
    except Exception as error:  # the optimizer's package may raise anything
        cause = printable((str(error) or type(error).__name__).splitlines()[0])
        raise OptionError(f"opt {name} cannot be built with these settings ({cause}). Choose another.") from error
    return made


def schedule_of(optimizer: torch.optim.Optimizer, config: Recipe, steps: int, steps_an_epoch: float) -> Scheduler:
    """Build the schedule that sets the learning rate of each of `steps` steps."""
    common = {
        "warmup_t": min(round(config.warmup_epochs * steps_an_epoch), steps - 1),
        "warmup_lr_init": config.lr * _FIRST,
        "warmup_prefix": False,
        "t_in_epochs": False,
    }
    length = max(steps, 2)
    if config.schedule == "cosine":
        return CosineLRScheduler(optimizer, t_initial=length, lr_min=config.min_lr, **common)
    if config.schedule == "linear":
        return PolyLRScheduler(optimizer, t_initial=length, power=1.0, lr_min=config.min_lr, **common)
    apart = max(1, round(config.decay_epochs * steps_an_epoch)) if config.schedule == "step" else length
    return StepLRScheduler(optimizer, decay_t=apart, decay_rate=config.decay_rate, **common)


def rate_of(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate of the parameters whose rate is not scaled."""
    scaled = [(float(group["lr"]), float(group.get("lr_scale", 1.0))) for group in optimizer.param_groups]
    return next((rate for rate, scale in scaled if scale == 1), None) or next(
        (rate / scale for rate, scale in scaled if scale), 0.0
    )


def groups_of(config: Config, head: Collection[str]) -> Groups | None:
    """Return a function that makes parameter groups with learning rates of their own, or None if all have the same.

    The function raises OptionError if timm knows no groups of layers of the model.

    Args:
        config: Settings, of which `layer_decay`, `head_lr` and `weight_decay` are read.
        head: Names of the parameters of the head.
    """
    if config.layer_decay == 1 and not config.head_lr:
        return None

    def grouped(model: nn.Module) -> list[dict[str, Any]]:
        spared: Any = getattr(model, "no_weight_decay", set)()  # timm's models name more than the norms
        if config.layer_decay < 1:
            made = param_groups_layer_decay(model, config.weight_decay, spared, layer_decay=config.layer_decay)
            if len({group["lr_scale"] for group in made}) == 1:
                raise OptionError(
                    f"{option('layer_decay')} needs a model whose layers timm groups, got {type(model).__name__} or one whose other "
                    "layers are frozen. Leave it out."
                )
        else:
            made = param_groups_weight_decay(model, config.weight_decay, no_weight_decay_list=spared)
        if not config.head_lr:
            return list(made)
        own = {id(parameter) for name, parameter in model.named_parameters() if name in head}
        parts: list[dict[str, Any]] = []
        for group in made:
            for inside in (False, True):
                chosen = [parameter for parameter in group["params"] if (id(parameter) in own) is inside]
                scale = config.head_lr / config.lr if inside else group.get("lr_scale", 1.0)
                parts += [{**group, "params": chosen, "lr_scale": scale}] if chosen else []
        return parts

    return grouped


def head_of(model: nn.Module, classes: int) -> list[str]:
    """Return the names of the parameters of the layers that output the classes: those that timm names, else the last one of that width.

    Raises:
        OptionError: If there is no such layer.
    """
    stated: Any = getattr(model, "get_classifier", None)
    found = () if stated is None else stated()
    wide = [
        part for part in (found if isinstance(found, tuple) else (found,)) if isinstance(part, nn.Module) and [*part.parameters()]
    ]
    wide = wide or [part for part in model.modules() if _outputs(part) == classes][-1:]
    own = {id(parameter) for part in wide for parameter in part.parameters()}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in own]
    if not names:
        raise OptionError(
            f"{option('head_lr')} and {option('freeze', 'backbone')} need a last layer with {classes} outputs, got none in "
            f"{type(model).__name__}. Leave them out."
        )
    return names


def _outputs(part: nn.Module) -> int:
    return part.weight.shape[0] if isinstance(part, (nn.Linear, nn.Conv2d)) else 0


def freeze(model: nn.Module, modules: Collection[str], head: Collection[str]) -> list[str]:
    """Fix the parameters of modules. Return the names of their batch norms, which must be kept in evaluation mode.

    Args:
        model: Network, changed in place.
        modules: Names of modules. `backbone` is everything but the head, the modules of `visattn.nn` and what `attach` added.
        head: Names of the parameters of the head.

    Raises:
        OptionError: If there is no such module, or no parameter is left to train.
    """
    known = dict(model.named_modules())
    for name in modules:
        if name != BACKBONE and (not name or name not in known):
            near = ", ".join(suggest(name, [*known][1:], 3)) or ", ".join(item for item, _ in model.named_children())
            raise OptionError(
                f"{option('freeze')}: {type(model).__name__} has no module '{printable(name)}'. Near or known: {near}."
            )
    kinds = tuple(ATTENTION.values())
    attention = {id(p) for part in known.values() if isinstance(part, kinds) for p in part.parameters()}
    attention |= {id(p) for part in known.values() if isinstance(part, WithAttention) for _, p in part.added()}

    def fixed(name: str, parameter: nn.Parameter | None) -> bool:
        if any(name.startswith(f"{chosen}.") for chosen in modules):
            return True
        return BACKBONE in modules and name not in head and id(parameter) not in attention

    for name, parameter in model.named_parameters():
        if fixed(name, parameter):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise OptionError(
            f"{option('freeze')} leaves no parameter to train, got {', '.join(map(printable, modules))}. Name fewer modules."
        )
    return [name for name, part in known.items() if isinstance(part, _NORMS) and fixed(f"{name}.weight", part.weight)]
