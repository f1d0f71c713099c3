"""Gates of the user's own modules, recognized by what they compute: the output is the input times one factor per channel or position.

Class and names do not matter. Library modules are left to `gates`, which knows them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from visattn._support.publish import Listener
from visattn._support.types import Role
from visattn.core.capturing.hooks import ModuleCalls

_FEW = 16  # channels and positions on which other modules are ruled out
_NEAR, _SAME = 64, 2  # units of rounding error within which outputs are proportional to inputs, and equal to inputs times gate
_ENDS: tuple[Callable[[Tensor], Tensor], ...] = (lambda x: x, torch.sigmoid, nn.functional.hardsigmoid, torch.tanh)


def hang(modules: ModuleCalls, module: nn.Module, listener: Listener, told: Sequence[nn.Module]) -> None:
    """Register callbacks that pass the module's gate to `listener` if its output is the input times a gate.

    Args:
        modules: Callbacks of the capture.
        module: The module.
        listener: Function that receives the gate.
        told: Modules whose gates the listener has received. If one is added while the module runs, the module only wraps that one.
    """
    call = _Call()

    def begin(_module: nn.Module, args: Any) -> None:  # noqa: ANN401
        """Note how large a gate of the input would be."""
        x = args[0] if args else None
        sizes = set[int]()
        if _is_map(x):
            batch, channels, height, width = x.shape
            sizes = {batch * channels, batch * height * width}  # of a gate for channels, and of one for positions
        call.sizes, call.heard, call.before = sizes, {}, len(told)

    def hear(part: nn.Module, _args: Any, output: Any) -> None:  # noqa: ANN401
        if isinstance(output, Tensor) and output.numel() in call.sizes and output.is_floating_point():
            call.heard.setdefault(part, []).append(output)

    def end(_module: nn.Module, args: Any, output: Any) -> None:  # noqa: ANN401
        """Look for a gate when the module returns, among the outputs of its submodules that have the size of one."""
        if call.heard and len(told) == call.before:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                gate = _gate(args[0], output, list(call.heard.values()))
            if gate is not None:
                listener(module, *gate, output)
        call.sizes, call.heard = set(), {}

    modules.before.setdefault(module, []).append(begin)
    for part in module.modules():
        if part is not module:
            modules.after.setdefault(part, []).append(hear)
    modules.after.setdefault(module, []).append(end)


class _Call:
    """Facts about the call that runs: sizes of a gate, outputs of these sizes by submodule, and the number of gates told before."""

    def __init__(self) -> None:
        self.sizes: set[int] = set()
        self.heard: dict[nn.Module, list[Tensor]] = {}
        self.before = 0


def _is_map(x: object) -> TypeGuard[Tensor]:
    """Check whether a value is a feature map `(B, C, H, W)`."""
    return isinstance(x, Tensor) and x.ndim == 4 and x.is_floating_point()


def _gate(x: object, output: object, heard: Sequence[list[Tensor]]) -> tuple[Role, Tensor] | None:
    """Return role and gate if the output of a module is its input `x` times the gate.

    `heard` has the outputs of each submodule in all of its calls. The gate is one of them, or the sum of those of a submodule, with
    or without a sigmoid or the like. The factor could also be divided out, but not where the input is zero.
    """
    if not (_is_map(x) and _is_map(output) and x.shape == output.shape and x.dtype == output.dtype):
        return None
    batch, channels, height, width = x.shape
    positions = height * width
    pixels, output_pixels = x.flatten(2), output.flatten(2)
    roles: list[tuple[Role, int, tuple[int, ...], tuple[int, ...]]] = []  # role, size, shape, shape that multiplies the input
    if positions > 1 and _proportional(pixels[:, :_FEW], output_pixels[:, :_FEW]):
        roles.append(("channel_gate", batch * channels, (batch, channels), (batch, channels, 1, 1)))
    if channels > 1 and _proportional(pixels[..., :_FEW].mT, output_pixels[..., :_FEW].mT):
        one_channel = batch, 1, height, width
        roles.append(("spatial_gate", batch * positions, one_channel, one_channel))
    for role, size, shape, factor_shape in roles:
        calls = [[part.reshape(factor_shape) for part in outputs if part.numel() == size] for outputs in heard]
        last_outputs = [outputs[-1] for outputs in calls if outputs]
        sums = [torch.stack(outputs).sum(0) for outputs in calls if len(outputs) > 1]
        gates = [finish(raw) for raw in (*reversed(last_outputs), *sums) for finish in _ENDS]
        gates = [gate for gate in gates if not bool((gate == gate.flatten()[0]).all())]  # a constant gates nothing
        best = min(gates, key=lambda gate: _difference(x * gate, output), default=None)
        if best is not None and _difference(x * best, output) <= _SAME:
            return role, best.reshape(shape)
    return None


def _proportional(x: Tensor, output: Tensor) -> bool:
    """Check whether each row `(B, rows, values)` of the output is a multiple of the same row of the input."""
    squared_norm = (x * x).sum(-1, keepdim=True)
    factor = (x * output).sum(-1, keepdim=True) / squared_norm.clamp_min(torch.finfo(x.dtype).tiny)
    return _difference(x * factor, output) <= _NEAR


def _difference(computed: Tensor, output: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest value, in units of rounding error of their dtype."""
    largest = float(output.abs().max())
    if not largest > 0:
        return math.inf
    return float((computed - output).abs().max()) / largest / torch.finfo(output.dtype).eps
