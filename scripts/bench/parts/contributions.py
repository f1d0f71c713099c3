"""Contributions against the plain forward pass, their memory as the number of tokens grows, and patching against a script of hooks."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from typing import Any

from bench.measuring import ratio
from bench.parts.part import Options, Part, megabytes, row, spread, unbounded
from bench.parts.processes import progress, run_json
from visattn._support.tables import Row

MODELS = "vit_small_patch16_224", "vit_base_patch16_siglip_224", "swin_tiny_patch4_window7_224", "cait_xxs24_224"
SIDES = 224, 448, 896  # 256, 1,024 and 4,096 tokens
GROWTH = 5  # bound of the growth of memory for four times the tokens
PATCHING = 1.05  # bound of the time of patching, relative to a script of hooks
ROUNDS, PATCHED = 7, 9


def rows(options: Options) -> Iterator[Row]:
    """Measure the method, its memory, and patching."""
    rounds = 3 if options.quick else ROUNDS
    for name in MODELS:
        progress(f"contributions, {name}")
        seconds = _measured("cost", name, str(rounds))
        times = f"{spread(ratio(seconds['contributions'], seconds['plain']))} x plain"
        yield unbounded({"run": "contributions", "of": name, "s": _median(seconds["contributions"]), "MB": None}, times)
    fewer: float | None = None
    for side in SIDES:
        progress(f"contributions, {side} px")
        growth = float(_measured("memory", str(side), allocator="apart"))
        head: Row = {"run": "contributions", "of": f"DINOv2 ViT-S/14, {side} px", "s": None, "MB": megabytes(growth)}
        if fewer is None:
            yield unbounded(head)
        else:
            text = f"{growth / fewer:.2f} x that of a quarter of the tokens"
            yield row(head, text, growth / fewer, GROWTH, f"<= {GROWTH} x", "promise: memory linear in the tokens")
        fewer = growth
    progress("patching")
    seconds = _measured("patching", str(5 if options.quick else PATCHED))
    found = ratio(seconds["ours"], seconds["hooks"])
    head = {"run": "patching, all heads", "of": "vit_small_patch16_224", "s": _median(seconds["ours"]), "MB": None}
    yield row(head, f"{spread(found)} x a script of hooks", found[0], PATCHING, f"<= {PATCHING} x", "peer: plain hooks")


def _measured(*arguments: str, **options: Any) -> Any:  # noqa: ANN401 - of JSON
    return run_json(sys.executable, "bench.contributions", *arguments, **options)


def _median(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3g}"


PART = Part(
    "Contributions",
    rows,
    protocol=(
        f"`explain(method='contributions')` against the plain forward pass, one photo, random weights, {ROUNDS} rounds that alternate "
        "after one. It runs the model with a linear graph and goes backward once, in double precision for the heads. Memory: growth of a "
        "process in one call, after one of a small image; the allocator gives freed memory back. Patching: all heads of all layers of one "
        f"photo put into another, against a script of hooks with the same batches, {PATCHED} rounds that alternate after one.",
    ),
    headlines=(("Patching, all heads", r"patching, all heads"),),
)
