"""Gates of attention modules in timm, torchvision and the code of papers, which do not publish their gates themselves.

A module is recognized by its class and its submodules. Each entry lists the submodules whose outputs are read and the function that
computes the gate from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from visattn._support.faces import Later
from visattn._support.parts import Parts
from visattn._support.publish import Listener
from visattn._support.types import Role
from visattn.core.capturing.hooks import ModuleCalls

if TYPE_CHECKING:
    from visattn.core.capturing import measured_gates
else:
    measured_gates = Later("visattn.core.capturing.measured_gates")

_LIBRARIES = ("torch", "timm", "torchvision", "transformers", "open_clip", "visattn")

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

# library classes by module and class name; code that users copy from a paper's repository by class name alone
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
    "ChannelGate": Gate("channel_gate", ("mlp",), lambda heard: torch.stack([*heard["mlp"]]).sum(0).sigmoid()),
    "SpatialGate": Gate("spatial_gate", ("spatial",), lambda heard: heard["spatial"][-1].sigmoid()),
    "BAM": Gate(
        "gate",
        ("channel_att", "spatial_att"),
        lambda heard: 1 + (heard["channel_att"][-1] * heard["spatial_att"][-1]).sigmoid(),
    ),
    "SELayer": _whole("fc"),
    "eca_layer": _whole("sigmoid"),
    "simam_module": _whole("activaton", "gate"),  # as its authors spell it
    "CoordAtt": Gate("gate", ("conv_h", "conv_w"), lambda heard: heard["conv_h"][-1].sigmoid() * heard["conv_w"][-1].sigmoid()),
}


def telling(parts: Parts, modules: ModuleCalls, listener: Listener) -> None:
    """Register callbacks that pass gates to `listener`: of modules with an entry in `GATES`, and of the user's own modules."""
    gates = parts.fact(telling, _gates_of)
    heard_from: list[nn.Module] = []

    def listen(module: nn.Module, role: Role, gate: Tensor, features: Tensor | None = None) -> None:
        heard_from.append(module)
        listener(module, role, gate, features)

    for number, gate in gates.items():
        if gate is not None:
            _hang(modules, parts.modules[number], gate, listen)
        else:
            measured_gates.hang(modules, parts.modules[number], listen, heard_from)


def _gates_of(parts: Parts) -> dict[int, Gate | None]:
    """Return the modules that may gate, by number, with their `GATES` entries; None for those that are recognized by their results."""
    return {
        number: gate for number, module in enumerate(parts.modules) if (gate := _gate_of(module)) is not None or _may_gate(module)
    }


def _may_gate(module: nn.Module) -> bool:
    """Check whether a module is of a class of the user, has submodules, which a mere scaling has not, and none of visattn.nn."""
    library = type(module).__module__.partition(".")[0]
    has_submodules = next(module.children(), None) is not None
    if library in _LIBRARIES or not has_submodules:
        return False
    return not any(type(part).__module__.startswith("visattn.nn.") for part in module.modules())


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
    """Return the `GATES` entry of a class, by its full name or by its own name alone."""
    return GATES.get(f"{kind.__module__}.{kind.__name__}", GATES.get(kind.__name__))


def _multiplies(gate: Tensor, x: Tensor, output: Tensor) -> bool:
    """Check that the output is the input times the gate: a class name alone does not guarantee it."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        factor = gate[..., None, None] if gate.ndim == 2 else gate
        try:
            return bool(torch.allclose(x * factor, output, rtol=1e-2, atol=1e-4 * float(output.abs().max())))
        except (RuntimeError, TypeError, AttributeError):  # incompatible shapes, or not tensors
            return False


def _hang(modules: ModuleCalls, module: nn.Module, gate: Gate, listener: Listener) -> None:
    """Register callbacks that compute the module's gate from the outputs of its submodules, and pass it to `listener`."""
    is_library_class = type(module).__name__ not in GATES  # the key includes the library module
    outputs_of_parts: dict[str, list[Tensor]] = {name: [] for name in gate.parts}

    def begin(_module: nn.Module, _args: Any) -> None:  # noqa: ANN401
        for outputs in outputs_of_parts.values():
            outputs.clear()

    def hear(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda _module, _args, output: outputs_of_parts[name].append(output)

    def end(_module: nn.Module, args: Any, output: Any) -> None:  # noqa: ANN401
        """Compute the gate when the module returns. A class that only has a known name must multiply its input by the gate."""
        if all(outputs_of_parts.values()):  # parts may have been replaced by plain functions, which trigger no hooks
            value = gate.make(outputs_of_parts)
            if is_library_class or _multiplies(value, args[0], output):
                listener(module, gate.role, value, output)
        begin(_module, args)

    modules.before.setdefault(module, []).append(begin)
    for name in gate.parts:
        modules.after.setdefault(module.get_submodule(name), []).append(hear(name))
    modules.after.setdefault(module, []).append(end)
