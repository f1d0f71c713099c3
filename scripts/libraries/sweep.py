"""One row of a coverage table: what is recorded of a model, whether it lies where the recording says, and what is refused and why."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

import visattn
from libraries.lit import captured, lit_cells
from libraries.members import lit_members
from visattn.core.records import Recording
from visattn.errors import NoAttentionCaptured, VisattnError

COLUMNS = "image", "calls", "placed", "kinds", "grids", "lit cells", "lit tokens", "wrong", "output", "refused"
PIXELS = (
    "pixel_values",
    "pixel_values_videos",
    "flattened_patches",
    "x",
    "input",
    "image",
    "images",
    "image1",
    "sample",
    "hidden_states",
)


def output(model: nn.Module, inputs: dict[str, Any]) -> Any:  # noqa: ANN401
    """Run a model from seed 0, since some draw random numbers."""
    torch.manual_seed(0)
    with torch.no_grad():
        return model(**inputs)


def examined(model: nn.Module, inputs: dict[str, Any], plain: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the row of a model: numbers of attention calls, of those placed and refused, and the checks of their locations.

    `plain` is its `output` without a capture.
    """
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "") | {"image": _shape(inputs)}
    try:
        with torch.no_grad(), visattn.capture(model, values=True) as recording:
            out = output(model, inputs)
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
    before = captured(model, inputs)
    wrong, right, undecided = lit_cells(model, inputs, key, before)
    others, found, unmoved = lit_members(model, inputs, before)
    return row | {
        "calls": len(recording),
        "placed": sum(record.reason is None for record in recording),
        "kinds": ", ".join(f"{count} {kind}" for kind, count in Counter(map(_kind, recording)).items()),
        "grids": ", ".join(dict.fromkeys(" x ".join(map(str, record.keys.grid)) for record in recording if record.keys.grid)),
        "lit cells": f"{right} of {right + len(wrong) + undecided}",
        "lit tokens": f"{found} of {found + len(others) + unmoved}" if found or others or unmoved else "",
        "wrong": "; ".join([*wrong, *others]),
        "output": "same" if same(plain, out) else _without_fast_path(model, inputs, out),
        "refused": _refused(recording),
    }


def _without_fast_path(model: nn.Module, inputs: dict[str, Any], out: Any) -> str:  # noqa: ANN401
    """Compare an output with that of a run without the fast path of `nn.MultiheadAttention`, which a capture switches off."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return "same without fast path" if same(output(model, inputs), out) else "DIFFERENT"
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _shape(inputs: dict[str, Any]) -> str:
    pixels = next((inputs[key] for key in PIXELS if isinstance(inputs.get(key), Tensor)), None)
    return "" if pixels is None or pixels.ndim < 4 else " x ".join(map(str, pixels.shape[-2:]))


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


def finite(out: Any) -> bool:  # noqa: ANN401
    """Check that no number of an output is NaN. Logits of padded words may be infinite."""
    if isinstance(out, Tensor):
        return not bool(out.isnan().any())
    if isinstance(out, dict):
        return all(map(finite, out.values()))
    return not isinstance(out, (list, tuple)) or all(map(finite, out))
