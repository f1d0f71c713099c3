"""One row of a coverage table: what is recorded of a model, whether it lies where the recording says, and what is refused and why."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

import visattn
from libraries.lit import lit_cells
from visattn.errors import NoAttentionCaptured, VisattnError
from visattn.records import Recording

COLUMNS = "calls", "placed", "kinds", "grids", "lit cells", "wrong", "output", "refused"
PIXELS = "pixel_values", "pixel_values_videos", "x", "image", "sample"


def examined(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a model: numbers of attention calls, of those placed and refused, and the checks of their locations."""
    with torch.no_grad():
        torch.manual_seed(0)  # some models draw random numbers
        plain = model(**inputs)
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    try:
        torch.manual_seed(0)
        with torch.no_grad(), visattn.capture(model, values=True) as recording:
            out = model(**inputs)
    except NoAttentionCaptured as error:
        return row | {
            "output": "same",
            "calls": 0,
            "placed": 0,
            "refused": str(error).removeprefix("no attention captured: ").split(". ")[0],
        }
    except VisattnError as error:
        return row | {"output": "same", "calls": 0, "placed": 0, "refused": f"{type(error).__name__}: {error}"}
    key = next(key for key in PIXELS if isinstance(inputs.get(key), Tensor))
    wrong, right, undecided = lit_cells(model, inputs, key)
    return row | {
        "calls": len(recording),
        "placed": sum(record.reason is None for record in recording),
        "kinds": ", ".join(f"{count} {kind}" for kind, count in Counter(map(_kind, recording)).items()),
        "grids": ", ".join(dict.fromkeys(" x ".join(map(str, record.keys.grid)) for record in recording if record.keys.grid)),
        "lit cells": f"{right} of {right + len(wrong) + undecided}",
        "wrong": "; ".join(wrong),
        "output": "same" if same(plain, out) else "DIFFERENT",
        "refused": _refused(recording),
    }


def _kind(record: visattn.AttentionRecord) -> str:
    return (
        record.kind if record.keys.grid or record.kind in ("unplaced", "channel") else f"{record.kind} among {record.keys.space}"
    )


def _refused(recording: Recording) -> str:
    reasons = Counter(record.reason for record in recording if record.reason)
    unseen = Counter(unseen.reason for unseen in recording.unseen)
    return ". ".join(f"{count} x {reason}" for reason, count in (*reasons.items(), *unseen.items()))


def same(a: Any, b: Any) -> bool:  # noqa: ANN401
    """Check whether two outputs are bit-identical."""
    if isinstance(a, Tensor):
        return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, dict):
        return all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return True
