"""Check that attaching CBAM to many CNNs of timm and torchvision changes nothing until it is trained.

`attach_sweep.py [NAME ...]`. Names are like `timm/resnet18` or `torchvision/vgg11_bn:stage`. The part after the colon
names the sites; the default is residual. Weights are random.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests run the same check on a few models

from tests.nn.sweep import BACKBONES, examine


def main() -> int:
    """Print one line per model; return 1 if any check failed."""
    parser = argparse.ArgumentParser(description="Check that attached CBAM modules leave many CNNs unchanged.")
    parser.add_argument("names", nargs="*", default=BACKBONES, metavar="NAME", help="names of models; by default all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # timm and torchvision warn about their own models
    failed = 0
    print(f"{'model':<56} {'sites':>5} {'parameters':>10} {'MACs':>12} {'change':>8}  plain loads  detached is identical")
    for name in options.names:
        try:
            seen = examine(name)
        except Exception as problem:  # continue with the next model
            print(f"{name:<56} failed: {type(problem).__name__}: {str(problem)[:160]}", flush=True)
            failed += 1
            continue
        failed += not seen.kept
        loads, identical = ("yes" if good else "NO" for good in (seen.plain_checkpoint_loads, seen.detached_is_identical))
        macs = "unknown" if seen.macs is None else f"{seen.macs:,}"
        print(
            f"{name:<56} {seen.sites:>5} {seen.parameters:>10,} {macs:>12} {seen.change:>8.1e}  {loads:<11}  {identical}",
            flush=True,
        )
    print(f"{len(options.names) - failed} of {len(options.names)} keep what is promised")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
