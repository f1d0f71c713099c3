"""Gates of attention modules in timm and torchvision, which do not publish their gates themselves.

A module is recognized by its class and its submodules. Each entry lists the submodules whose outputs are read and the function that
computes the gate from them. Gates of all other modules are found by what they compute (`gating`), if they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, nn

from visattn._support.parts import Parts
from visattn._support.publish import Listener
from visattn._support.types import Role
from visattn.core.capturing.hooks import ModuleCalls

Heard = Mapping[str, Sequence[Tensor]]  # outputs of each submodule in one call of the module


class Gate(NamedTuple):
    """Recipe for reading a module's gate.

    Attributes:
        role: Meaning of the gate's axes.
        parts: Names of the submodules whose outputs are read; `""` is the module itself.
        make: Function from these outputs to the gate.
    """

    role: Role
    parts: tuple[str, ...]
    make: Callable[[Heard], Tensor]


def _whole(part: str, role: Role = "channel_gate") -> Gate:
    """Return the recipe of a gate that is the last output of one submodule."""
    return Gate(role, (part,), lambda heard: heard[part][-1])


def _product(heard: Heard) -> Tensor:
    """Multiply row and column gates. timm calls one activation for the rows, then for the columns."""
    rows, columns = heard["gate"][-2:]
    return rows * columns


_CHANNELS, _PLACES, _BOTH = _whole("gate"), _whole("gate", "spatial_gate"), _whole("gate", "gate")
_STRIPS = Gate("gate", ("gate",), _product)

# by module and name of the class
GATES: dict[str, Gate] = {
    "timm.layers.squeeze_excite.SEModule": _CHANNELS,
    "timm.layers.squeeze_excite.EffectiveSEModule": _CHANNELS,
    "timm.layers.squeeze_excite.SqueezeExciteCl": _CHANNELS,
    "timm.models._efficientnet_blocks.SqueezeExcite": _CHANNELS,
    "timm.models.senet.SEModule": _whole("sigmoid"),
    "timm.layers.eca.EcaModule": _CHANNELS,
    "timm.layers.eca.CecaModule": _CHANNELS,
    "timm.layers.cbam.ChannelAttn": _CHANNELS,
    "timm.layers.cbam.SpatialAttn": _PLACES,
    "timm.layers.cbam.LightSpatialAttn": _PLACES,
    "timm.layers.gather_excite.GatherExcite": _BOTH,
    "timm.layers.coord_attn.CoordAttn": _STRIPS,
    "timm.layers.coord_attn.SimpleCoordAttn": _BOTH,
    "timm.layers.coord_attn.EfficientLocalAttn": _STRIPS,
    "timm.layers.coord_attn.StripAttn": _BOTH,
    "timm.layers.global_context.GlobalContext": _CHANNELS,
    "timm.layers.selective_kernel.SelectiveKernelAttn": Gate("branch_gate", ("",), lambda heard: heard[""][-1]),
    "torchvision.ops.misc.SqueezeExcitation": _whole("scale_activation"),
}


def telling(parts: Parts, modules: ModuleCalls, listener: Listener) -> None:
    """Register callbacks that pass the gates of modules with an entry in `GATES` to `listener`."""
    for number, gate in parts.fact(telling, _gates_of).items():
        _hang(modules, parts.modules[number], gate, listener)


def _gates_of(parts: Parts) -> dict[int, Gate]:
    """Return the `GATES` entries of modules, by number."""
    return {number: gate for number, module in enumerate(parts.modules) if (gate := _gate_of(module)) is not None}


def _gate_of(module: nn.Module) -> Gate | None:
    """Return the `GATES` entry of a module, or None. A class of the same name that lacks the expected submodules has no entry."""
    kind: Any = type(module)
    gate = _gate_of_class(kind)
    if gate is None:
        return None
    names = {"", *dict(module.named_children())}
    return gate if names >= set(gate.parts) else None


@cache
def _gate_of_class(kind: type[nn.Module]) -> Gate | None:
    """Return the `GATES` entry of a class, by its full name."""
    return GATES.get(f"{kind.__module__}.{kind.__name__}")


def _hang(modules: ModuleCalls, module: nn.Module, gate: Gate, listener: Listener) -> None:
    """Register callbacks that compute the module's gate from the outputs of its submodules, and pass it to `listener`."""
    outputs_of_parts: dict[str, list[Tensor]] = {name: [] for name in gate.parts}

    def begin(_module: nn.Module, _args: Any) -> None:  # noqa: ANN401
        for outputs in outputs_of_parts.values():
            outputs.clear()

    def hear(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda _module, _args, output: outputs_of_parts[name].append(output)

    def end(_module: nn.Module, args: Any, output: Any) -> None:  # noqa: ANN401
        """Compute the gate when the module returns."""
        if all(outputs_of_parts.values()):  # parts may have been replaced by plain functions, which trigger no hooks
            listener(module, gate.role, gate.make(outputs_of_parts), output)
        begin(_module, args)

    modules.before.setdefault(module, []).append(begin)
    for name in gate.parts:
        modules.after.setdefault(module.get_submodule(name), []).append(hear(name))
    modules.after.setdefault(module, []).append(end)
