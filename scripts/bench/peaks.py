"""Peak memory in bytes of a forward and a backward pass of an attention module: `python -m bench.peaks MODULE RUN`.

`RUN` is `visattn` or one of the peers of the module. The figure is the growth of the process, after a first pass of one image.
The allocator must give freed memory back.
"""

from __future__ import annotations

import json
import resource
import sys

import torch

from bench.modules import BATCH, CHANNELS, PEERS, SIDE, SMALLER, training
from bench.shared import THREADS
from visattn.nn import ATTENTION


def main(name: str, run: str) -> int:
    """Return the bytes that the passes needed beside input, output's gradient and module."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    module = ATTENTION[name](CHANNELS) if run == "visattn" else PEERS[name][run]()
    parameters = list(module.parameters())
    for batch in (1, SMALLER.get(name, BATCH)):
        x, slope = torch.randn(batch, CHANNELS, SIDE, SIDE, requires_grad=True), torch.randn(batch, CHANNELS, SIDE, SIDE)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        training(module, x, slope, parameters)()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
