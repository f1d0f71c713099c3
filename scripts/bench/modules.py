"""Time of attention modules, of other implementations and of a bare gate, as JSON: `python -m bench.modules ROUNDS MORE_ROUNDS NAME,NAME`.

The named modules, whose time is bounded, run more rounds. Each peer computes the same function with the same number of parameters.
Modules that timm and torchvision lack have no peer.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from timm.layers import EcaModule, GatherExcite, GlobalContext, NonLocalAttn, SelectiveKernel, SEModule
from timm.layers.cbam import CbamModule
from timm.layers.coord_attn import CoordAttn
from torch import Tensor, nn
from torchvision.ops import SqueezeExcitation

from bench.measuring import ratio, series
from bench.shared import THREADS
from visattn.nn import ATTENTION

BATCH, CHANNELS, SIDE = 16, 256, 28
SMALLER = {"cbam": 8, "nl": 4, "sagan": 4}  # batch sizes; `nl` and `sagan` weigh all pairs of positions
PEERS: Mapping[str, Mapping[str, Callable[[], nn.Module]]] = {  # timm's peer comes first
    "cbam": {"timm CbamModule": lambda: CbamModule(CHANNELS, mlp_bias=True)},
    "coord": {"timm CoordAttn": lambda: CoordAttn(CHANNELS, rd_channels=8, bias=True)},
    "eca": {"timm EcaModule": lambda: EcaModule(CHANNELS)},
    "gc": {"timm GlobalContext": lambda: GlobalContext(CHANNELS, rd_channels=16, fuse_add=True, fuse_scale=False)},
    "ge": {"timm GatherExcite": lambda: GatherExcite(CHANNELS, use_mlp=False)},
    "nl": {"timm NonLocalAttn": lambda: NonLocalAttn(CHANNELS, rd_channels=128)},
    "se": {
        "timm SEModule": lambda: SEModule(CHANNELS, rd_channels=16),
        "torchvision SqueezeExcitation": lambda: SqueezeExcitation(CHANNELS, 16),
    },
    "sk": {"timm SelectiveKernel": lambda: SelectiveKernel(CHANNELS, split_input=False, rd_channels=32, groups=32)},
}


def main(rounds: int, more_rounds: int, named: Container[str]) -> dict[str, Any]:
    """Return for each module its batch size and its runs, ours first and the gate last: parameters, median seconds, time ratio."""
    torch.set_num_threads(THREADS)
    return {name: measured(name, more_rounds if name in named else rounds) for name in ATTENTION}


def measured(name: str, rounds: int) -> dict[str, Any]:
    """Measure one series of one module."""
    torch.manual_seed(0)
    batch = SMALLER.get(name, BATCH)
    x, slope = torch.randn(batch, CHANNELS, SIDE, SIDE, requires_grad=True), torch.randn(batch, CHANNELS, SIDE, SIDE)
    gate = torch.rand(batch, CHANNELS, 1, 1)
    modules = {"visattn": ATTENTION[name](CHANNELS), **{peer: build() for peer, build in PEERS.get(name, {}).items()}}
    runs = {run: training(module, x, slope, list(module.parameters())) for run, module in modules.items()}
    runs["gate"] = training(lambda maps: maps * gate, x, slope, [])
    seconds = series(runs, rounds, warmup=5, back=True)
    return {
        "batch": batch,
        "parameters": {run: sum(part.numel() for part in module.parameters()) for run, module in modules.items()},
        "seconds": {run: statistics.median(values) for run, values in seconds.items()},
        "ratios": {run: ratio(seconds["visattn"], values) for run, values in seconds.items()},
    }


def training(module: Callable[[Tensor], Any], x: Tensor, slope: Tensor, parameters: list[nn.Parameter]) -> Callable[[], object]:
    """Run a forward pass and a backward pass to the input and all parameters."""
    return lambda: torch.autograd.grad(module(x), [x, *parameters], slope)


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","))))
