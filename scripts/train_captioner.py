"""Script for `visattn train caption` in a clone: `torchrun --nproc-per-node 2 scripts/train_captioner.py --data coco -o runs/two`."""

from __future__ import annotations

import sys

from visattn.cli import main

if __name__ == "__main__":
    main(["train", "caption", *sys.argv[1:]])
