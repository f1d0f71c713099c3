"""The handle of attention that was attached: where it is, what it costs, what is new, and how to take it out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from visattn._support.tables import Row, to_text
from visattn.errors import ModelError, OptionError
from visattn.nn.attaching.plugged import Plugged
from visattn.nn.attaching.sites import Place, places, plain_name
from visattn.nn.attaching.trail import Layout


@dataclass(frozen=True)
class Site:
    """One place with attention.

    Attributes:
        name: What the module there is called in the model as it was.
        channels: C of its maps.
        size: `(H, W)` of its maps in the forward that was followed; None if it did not run there.
        layout: On which axis the channels lie.
        module: The attention.
        parameters: How many numbers it learns, the gate of the identity included.
        macs: Multiply-adds of its convolutions and matrix products in that forward; None if unknown.
    """

    name: str
    channels: int
    size: tuple[int, int] | None
    layout: Layout
    module: nn.Module
    parameters: int
    macs: int | None


class Attached:
    """What `attach` did to a model, and how to undo it.

    The model's own `state_dict`, `load_state_dict`, `train` and `to` are what to use; this only tells the new from the old.

    Attributes:
        model: The model.
        sites: Where attention is, in the order of the model.
    """

    def __init__(self, model: nn.Module, sites: list[Site], plugged: list[tuple[Place, Plugged]] | None) -> None:
        """Built by `attach`."""
        self.model = model
        self.sites = tuple(sites)
        self._plugged = plugged
        self._group: tuple[torch.optim.Optimizer, dict[str, Any]] | None = None

    def __repr__(self) -> str:
        return f"Attached({len(self.sites)} sites in {type(self.model).__name__})"

    @property
    def supplied(self) -> tuple[str, ...]:
        """Keys that the last checkpoint did not have, so that the attention kept what it had.

        After a plain checkpoint these are all keys of the attention; after one that was saved from the attached model, none. One that
        has some of the sites and lacks others is incomplete: `load_state_dict` reports these keys as missing.
        """
        actual = {id(module): name for name, module in self.model.named_modules()}
        return tuple(f"{actual[id(plugged)]}.{key}" for _, plugged in self._active() for key in plugged.supplied)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What was added for learning, by its names in the model."""
        actual = {id(module): name for name, module in self.model.named_modules()}
        for _, plugged in self._active():
            for key, parameter in plugged.added():
                yield f"{actual[id(plugged)]}.{key}", parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """What was added for learning."""
        for _, plugged in self._active():
            for _, parameter in plugged.added():
                yield parameter

    def state_dict(self) -> dict[str, Tensor]:
        """What attaching added to the model's state dict; `model.load_state_dict(..., strict=False)` takes it back."""
        return {key: value for key, value in self.model.state_dict().items() if plain_name(self.model, key) is None}

    def base_state_dict(self) -> dict[str, Tensor]:
        """The state dict that the model would have without attention, under the keys it had then."""
        state = self.model.state_dict()
        plain = OrderedDict((name, value) for key, value in state.items() if (name := plain_name(self.model, key)) is not None)
        versions = getattr(state, "_metadata", {})  # which some models want to see when they load
        named = {name: value for key, value in versions.items() if (name := plain_name(self.model, key)) is not None}
        plain._metadata = named  # type: ignore[attr-defined]
        return plain

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Make sure that an optimizer has all that was added.

        Raises:
            OptionError: If it lacks some of it, as one that was built before.
        """
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        lacking = [name for name, parameter in self.named_parameters() if parameter.requires_grad and id(parameter) not in known]
        if lacking:
            raise OptionError(
                f"{type(optimizer).__name__} must be given all parameters of the attention, got all but {len(lacking)}, such as "
                f"'{lacking[0]}'. Build it after attach, or call handle.join(optimizer)."
            )

    def join(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer what it lacks of the attention, as one more group; `detach` takes it out again.

        Raises:
            OptionError: If it is no optimizer, or has a scheduler, which would not know the new group.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise OptionError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}. Build it first.")
        if any("initial_lr" in group for group in optimizer.param_groups):
            raise OptionError(
                "optimizer must have no scheduler yet, which would not know the new group. Join it first, then build the scheduler."
            )
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        new = [parameter for parameter in self.parameters() if id(parameter) not in known]
        if new:
            optimizer.add_param_group({"params": new})
            self._group = (optimizer, optimizer.param_groups[-1])

    def rows(self) -> list[dict[str, Any]]:
        """What each site costs, as data; the last row is the total."""
        rows: list[dict[str, Any]] = [
            {
                "site": site.name,
                "attention": type(site.module).__name__,
                "channels": site.channels,
                "size": None if site.size is None else f"{site.size[0]} x {site.size[1]}",
                "parameters": site.parameters,
                "macs": site.macs,
            }
            for site in self.sites
        ]
        macs = [site.macs for site in self.sites]
        total = None if None in macs else sum(number for number in macs if number is not None)
        parameters = sum(site.parameters for site in self.sites)
        return [
            *rows,
            {"site": "total", "attention": None, "channels": None, "size": None, "parameters": parameters, "macs": total},
        ]

    def summary(self) -> str:
        """What each site costs, as a table; `rows` has it as data."""
        rows: list[Row] = list(self.rows())
        return to_text(rows)

    def detach(self) -> nn.Module:
        """Put the modules back that were there, the very same objects, and take what was added out of the optimizer.

        Returns:
            The model.

        Raises:
            ModelError: If nothing is attached any more, or the model was changed at one of the places since.
        """
        plugged = self._active()
        current = {place.name: place for place in places(self.model)}
        for place, module in plugged:
            if place.name not in current or current[place.name].module is not module:
                raise ModelError(
                    f"'{place.name}' is no longer what attach put there, so nothing was detached. Undo that change first."
                )
        for place, module in plugged:
            current[place.name].parent._modules[place.key] = module.base
        if self._group is not None:
            optimizer, group = self._group
            optimizer.param_groups[:] = [one for one in optimizer.param_groups if one is not group]
            for parameter in group["params"]:
                optimizer.state.pop(parameter, None)
        self._plugged = None
        return self.model

    def _active(self) -> list[tuple[Place, Plugged]]:
        if self._plugged is None:
            raise ModelError("nothing is attached: it was detached before, or attach was told dry_run=True. Call attach again.")
        return self._plugged
