"""Script for `visattn train classify` in a clone: `torchrun --nproc-per-node 2 scripts/train_classifier.py --data photos -o runs/two`."""

from __future__ import annotations

import sys

from visattn.cli import main

if __name__ == "__main__":
    main(["train", "classify", *sys.argv[1:]])
