"""Coverage of timm: attention that visattn records in one small model of each file, with sharpened random weights.

Prints a table; --write-docs also writes it to the file beside docs/coverage.md, and its totals to the page. Exits 1 if a model's output
changes under a capture, if a dense softmax attention is missed, or if weights times values differ from the output of the model's own
kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import re
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import timm
import torch
from bench.zoo import MODELS, WITHOUT_MATRIX
from pages import folded, write_section
from timm.models._registry import _model_to_module
from timm.utils.attention_extract import AttentionExtract
from torch import Tensor, nn

import visattn
from visattn._support.tables import to_markdown, to_text
from visattn.core.methods import METHODS
from visattn.core.records import Recording
from visattn.errors import NoAttentionCaptured

DOCS = Path(__file__).parents[1] / "docs" / "coverage.md"
BOUND = 1e-5
SHOWN = "attention", "norm_attention", "rollout", "relevance"  # methods in the table; other methods apply if one of these does
ATTENTION = re.compile(r"attn|attention|mhsa|msa|mla", re.IGNORECASE)
PART = re.compile(
    r"drop|norm|pool|proj|bias|rel_pos|softmax|scale|block|stage|layer|module|gate|conv|eca|se_|squeeze", re.IGNORECASE
)


def main() -> int:
    """Run the sweep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models of the list; by default all")
    parser.add_argument(
        "--write-docs", action="store_true", help="replace the totals in docs/coverage.md and the table beside it"
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = []
    for name, (size, arguments) in MODELS.items():
        if not options.names or name in options.names:
            started = time.perf_counter()
            rows.append(examined(name, size, arguments))
            print(f"{time.perf_counter() - started:6.1f} s  {name}", file=sys.stderr, flush=True)
            gc.collect()
    print(to_text(rows))
    totals = summary(rows)
    print(to_text(totals))
    if options.write_docs:
        write_section(DOCS, "totals", to_markdown(totals))
        write_section(DOCS, "models", folded("All models, one row each", to_markdown(rows)), into_files=True)
    return int(any(row["output"] != "same" or row["missed"] or float(row["error"] or 0) > BOUND for row in rows))


def examined(name: str, size: int | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the row of one model."""
    model = sharpened(name, arguments)
    side = size or timm.get_pretrained_cfg(name).input_size[-1]
    pixels = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    calibrate(model, pixels)
    plain = model(pixels)  # gradients stay enabled: PyTorch selects another kernel if a bias requires one
    row: dict[str, Any] = {"file": _model_to_module[name], "model": name}
    try:
        with visattn.capture(model, gradients=True) as recording:
            out = model(pixels)
    except NoAttentionCaptured:
        return row | nothing(model)
    if not recording.records:  # only gates
        return row | nothing(model)
    error = max(map(error_of, recording))
    kinds = Counter(kind_of(record) for record in recording)
    reasons = dict.fromkeys(record.reason for record in recording if record.reason)
    if not any(record.keys.grid for record in recording) and not reasons:
        reasons = {"channels attend to channels": None}
    grids = dict.fromkeys(" x ".join(map(str, record.keys.grid)) for record in recording if record.keys.grid)
    prefixes = dict.fromkeys(short(record.keys.prefix) for record in recording if record.keys.grid)
    left = [kind for kind in without_call(model, recording) if kind not in WITHOUT_MATRIX]
    return row | {
        "calls": len(recording),
        "kinds": ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
        "grid": ", ".join(grids),
        "prefix": ", ".join(prefixes),
        "error": f"{error:.1e}",
        "output": "same" if same(plain, out) and unchanged_later(model, pixels, out, recording) else "DIFFERENT",
        "missed": ", ".join(left),
        "methods": ", ".join(key for key in SHOWN if METHODS[key].accepts(recording) is None),
        "not on the image": "; ".join(filter(None, reasons)),
        "AttentionExtract": f"{extracted(model, pixels)} of {len(recording)}",
    }


def error_of(record: visattn.AttentionRecord) -> float:
    """Return the error against the model's own kernel; above the bound, against float64, since the kernel's sums are rounded too."""
    found = record.error()
    if found <= BOUND or record.source is None:
        return found
    kept: Any = record.source.gradient(record.source.tensor.detach())
    exact, worst = record.operator.to(torch.float64), 0.0
    for block in range(kept.out.shape[2]):
        value = kept.value[:, :, block]
        made = record.operator.block(block).to(value.dtype) @ value
        worst = max(worst, float((made - exact.block(block) @ value.double()).abs().max()))
    return worst / float(kept.out.abs().max())


def nothing(model: nn.Module) -> dict[str, Any]:
    """Return the row of a model that multiplies no softmax with values."""
    missing = ", ".join(without_call(model, None)) or "none: no attention"
    return dict.fromkeys(("calls", "kinds", "grid", "prefix"), "") | {
        "error": "", "output": "same", "missed": "", "methods": "", "not on the image": missing, "AttentionExtract": "",
    }  # fmt: skip


def unchanged_later(model: nn.Module, pixels: Tensor, out: object, first: Recording) -> bool:
    """Check that the second capture, which stores where attention occurs, and the third, which reuses it, equal the first."""
    for _ in range(2):
        with visattn.capture(model) as recording:
            again = model(pixels)
        pairs = list(zip(first, recording, strict=False))
        if not same(out, again) or len(first) != len(recording) or not all(alike(*pair) for pair in pairs):
            return False
    return True


def alike(one: visattn.AttentionRecord, other: visattn.AttentionRecord) -> bool:
    """Check whether two records belong to the same call and have the same weights."""
    facts = [(r.layer, r.call, r.kind, r.queries, r.keys, r.follows, r.reason) for r in (one, other)]
    return facts[0] == facts[1] and torch.equal(one.operator.block(0), other.operator.block(0))


def sharpened(name: str, arguments: dict[str, Any]) -> nn.Module:
    """Build a model whose attention is far from uniform and whose output is not constant."""
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, **arguments)
    sharpen(model)
    return model.eval()


def sharpen(model: nn.Module) -> None:
    """Change the weights of a model so."""
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.numel() > 1 and float(parameter.std()) < 1e-3 and float(parameter.abs().max()) <= 1e-2:
                parameter.copy_(torch.randn(parameter.shape) * 0.02)
            elif key.endswith(("qkv.weight", "q.weight", "k.weight", "q_proj.weight", "k_proj.weight")):
                parameter.mul_(4)


def calibrate(model: nn.Module, pixels: Tensor) -> None:
    """Estimate batch-norm statistics from some pixels; without them, activations of random weights explode."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    with torch.no_grad():
        if norms:
            model(pixels)
    model.eval()


def kind_of(record: visattn.AttentionRecord) -> str:
    """Return the kind of a record, and whether it has windows."""
    index = record.operator.query_index
    return f"{record.kind} in windows" if index is not None and len(index) > 1 else record.kind


def short(prefix: tuple[str, ...]) -> str:
    """Abbreviate the names of prefix tokens."""
    registers = sum(name.startswith("register") for name in prefix)
    return (
        " + ".join(
            [*(name for name in prefix if not name.startswith("register")), *([f"{registers} registers"] if registers else [])]
        )
        or "none"
    )


def without_call(model: nn.Module, recording: Recording | None) -> list[str]:
    """Return the classes of modules named attention in which no attention was recorded."""
    seen = set(recording.layers if recording else [])
    found: dict[str, None] = {}
    for name, module in model.named_modules():
        title = type(module).__name__
        if not ATTENTION.search(title) or PART.search(title):
            continue
        if not any(layer == name or layer.startswith(f"{name}.") or name.startswith(f"{layer}.") for layer in seen):
            found[title] = None
    return list(found)


def same(a: Any, b: Any) -> bool:  # noqa: ANN401
    """Check whether two outputs are bit-identical."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(same(a[key], b[key]) for key in a)
    return all(same(x, y) for x, y in zip(a, b, strict=True))


def extracted(model: nn.Module, pixels: Tensor) -> int:
    """Return the number of maps from timm's own extractor, in the better of its two modes, without changes to the model."""
    best = 0
    for way in ("fx", "hook"):
        with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            best = max(best, sum(isinstance(x, Tensor) for x in AttentionExtract(model, method=way)(pixels).values()))
    return best


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compute the totals of the table."""
    attentive = [row for row in rows if row["calls"]]
    mapped = [row for row in attentive if row["grid"]]
    whole = [row for row in mapped if not row["not on the image"]]
    complete = [row for row in attentive if int(row["AttentionExtract"].split()[0]) >= row["calls"]]
    return [
        {"what": "models", "number": len(rows)},
        {"what": "with softmax attention over values", "number": len(attentive)},
        {"what": "files of timm that define them", "number": len({row["file"] for row in attentive})},
        {"what": "calls", "number": sum(row["calls"] for row in attentive)},
        {"what": "models mapped to the image", "number": len(mapped)},
        {"what": "of these, with every layer", "number": len(whole)},
        {"what": "models whose output changed", "number": sum(row["output"] != "same" for row in rows)},
        {"what": "models with a dense attention missed", "number": sum(bool(row["missed"]) for row in rows)},
        {"what": "largest error of A V", "number": max((float(row["error"]) for row in attentive), default=0)},
        {"what": "models for which timm's AttentionExtract returns as many maps", "number": len(complete)},
    ]


if __name__ == "__main__":
    sys.exit(main())
