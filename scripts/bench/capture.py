"""Time of captures relative to a plain forward pass, as JSON: `python -m bench.capture NAME THREADS BATCH ROUNDS`."""

from __future__ import annotations

import json
import sys

import torch

import visattn
from bench.measuring import medians
from visattn.core.capturing import forget
from visattn.core.capturing.following.conclusions import concluded
from visattn.core.capturing.following.tape_readouts import Readouts
from visattn.core.capturing.trace.tape import TAPES


def main(name: str, threads: int, batch: int, rounds: int) -> dict[str, float]:
    """Return ratios to a plain forward pass of the same series, and its seconds. Only the first capture traces the tokens."""
    torch.set_num_threads(threads)
    model = visattn.load_model(name, weights="none")
    image = torch.randn(batch, 3, 224, 224)

    def plain() -> None:
        with torch.inference_mode():
            model(image)

    def capture() -> None:
        with torch.inference_mode(), visattn.capture(model, features="none"):
            model(image)

    def first() -> None:
        forget()
        capture()

    def proven() -> None:
        tape = TAPES.of(model)[0]
        cut = concluded(tape).cut
        assert cut is not None  # noqa: S101 - the model reads its tokens
        Readouts(tape, cut, batch).shares()

    def measured() -> None:
        with visattn.capture(model, features="none", gradients=True) as recording:
            output = model(image)
        recording.read_by(output)

    early = medians({"plain": plain, "first": first}, max(rounds // 4, 3), warmup=1)
    later = medians({"plain": plain, "capture": capture}, rounds, warmup=3)  # the second capture stores what the third reuses
    read = medians({"plain": plain, "proven": proven, "measured": measured}, max(rounds // 4, 3), warmup=2)
    return {
        "seconds": later["plain"],
        "first": early["first"] / early["plain"],
        "capture": later["capture"] / later["plain"],
        "proven": read["proven"] / read["plain"],
        "measured": read["measured"] / read["plain"],
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *map(int, sys.argv[2:5]))))
