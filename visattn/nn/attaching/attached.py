"""Handle of attached attention: its sites, cost and new parameters, and how to remove it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from visattn._support.tables import Row, to_text
from visattn.errors import ModelError, OptionError
from visattn.nn.attaching.sites import Place, places, plain_name
from visattn.nn.attaching.trail import Layout
from visattn.nn.attaching.with_attention import WithAttention


@dataclass(frozen=True)
class Site:
    """One site in a model with attention.

    Attributes:
        name: Name of the module at this site in the original model.
        channels: Number of channels of its feature maps.
        size: Size `(H, W)` of its feature maps in the traced forward pass; None if it did not run.
        layout: Axis order of its feature maps, `NCHW` or `NHWC`.
        module: Attention module.
        parameters: Number of learned parameters, including the identity gate.
        macs: Multiply-adds of its convolutions and matrix products in the traced forward pass; None if unknown.
    """

    name: str
    channels: int
    size: tuple[int, int] | None
    layout: Layout
    module: nn.Module
    parameters: int
    macs: int | None


class Attachment:
    """Handle returned by `attach`: it separates the attached attention from the original model, and can detach it.

    Use the model's own `state_dict`, `load_state_dict`, `train` and `to` as usual.

    Attributes:
        model: The model.
        sites: Sites with attention, in the order of the model.
    """

    def __init__(self, model: nn.Module, sites: list[Site], plugged: list[tuple[Place, WithAttention]] | None) -> None:
        """Build the handle; only `attach` does."""
        self.model = model
        self.sites = tuple(sites)
        self._plugged = plugged
        self._group: tuple[torch.optim.Optimizer, dict[str, Any]] | None = None

    def __repr__(self) -> str:
        return f"Attachment({len(self.sites)} sites in {type(self.model).__name__})"

    @property
    def supplied(self) -> tuple[str, ...]:
        """State dict keys that the last loaded checkpoint did not contain, so the attention kept its values.

        For a checkpoint of the original model these are all keys of the attention. For a checkpoint of the attached model there are none. A
        checkpoint with only some of the sites is incomplete: `load_state_dict` reports these keys as missing.
        """
        actual = {id(module): name for name, module in self.model.named_modules()}
        return tuple(f"{actual[id(plugged)]}.{key}" for _, plugged in self._active() for key in plugged.supplied)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the added parameters with their names in the model."""
        actual = {id(module): name for name, module in self.model.named_modules()}
        for _, plugged in self._active():
            for key, parameter in plugged.added():
                yield f"{actual[id(plugged)]}.{key}", parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the added parameters."""
        for _, plugged in self._active():
            for _, parameter in plugged.added():
                yield parameter

    def state_dict(self) -> dict[str, Tensor]:
        """Return the part of the model's state dict that attaching added. Load it with `model.load_state_dict(..., strict=False)`."""
        return {key: value for key, value in self.model.state_dict().items() if plain_name(self.model, key) is None}

    def base_state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the model without attention, under its original keys."""
        state = self.model.state_dict()
        plain = OrderedDict((name, value) for key, value in state.items() if (name := plain_name(self.model, key)) is not None)
        versions = getattr(state, "_metadata", {})  # some models read versions when they load
        named = {name: value for key, value in versions.items() if (name := plain_name(self.model, key)) is not None}
        plain._metadata = named  # type: ignore[attr-defined]
        return plain

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that an optimizer has all added parameters.

        Raises:
            OptionError: If it lacks some, for example because it was built before `attach`.
        """
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        lacking = [name for name, parameter in self.named_parameters() if parameter.requires_grad and id(parameter) not in known]
        if lacking:
            raise OptionError(
                f"{type(optimizer).__name__} lacks {len(lacking)} parameters of the attention, such as "
                f"'{lacking[0]}'. Build it after attach, or call handle.join(optimizer)."
            )

    def join(self, optimizer: torch.optim.Optimizer) -> None:
        """Add the parameters of the attention that an optimizer lacks as a new parameter group; `detach` removes it.

        Raises:
            OptionError: If it is not an optimizer, or already has a scheduler, which would not update the new group.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise OptionError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}. Build it first.")
        if any("initial_lr" in group for group in optimizer.param_groups):
            raise OptionError(
                "optimizer must not have a scheduler yet: it would not update the new group. Join first, then build the scheduler."
            )
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        new = [parameter for parameter in self.parameters() if id(parameter) not in known]
        if new:
            optimizer.add_param_group({"params": new})
            self._group = (optimizer, optimizer.param_groups[-1])

    def rows(self) -> list[dict[str, Any]]:
        """Return the cost of each site as rows of a table; the last row is the total."""
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
        """Return the cost of each site as a text table; `rows` returns the data."""
        rows: list[Row] = list(self.rows())
        return to_text(rows)

    def detach(self) -> nn.Module:
        """Restore the original modules (the same objects) and remove the added parameters from the optimizer.

        Returns:
            The model.

        Raises:
            ModelError: If nothing is attached any more, or if the model has been changed at one of the sites since.
        """
        plugged = self._active()
        current = {place.name: place for place in places(self.model)}
        for place, module in plugged:
            if place.name not in current or current[place.name].module is not module:
                raise ModelError(
                    f"'{place.name}' has been replaced since attach, so nothing was detached. Undo that change first."
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

    def _active(self) -> list[tuple[Place, WithAttention]]:
        if self._plugged is None:
            raise ModelError("nothing is attached: it was already detached, or attach ran with dry_run=True. Call attach again.")
        return self._plugged
