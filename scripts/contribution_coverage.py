"""Direct contributions in one small model of each file of timm: do the terms add up to the score, and is each the model's own?

`contribution_coverage.py [NAME ...] [--write-docs]`. For each model with random weights that answers: the difference between the score and the
sum of its terms, in float32 and float64, over the sum of their magnitudes and over the score; and the largest difference between a term of
an attention layer or MLP and what plain hooks on the model's modules give. Prints a table with the reason for each model that is refused.
Exits 1 if a difference is above its bound.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import timm
import torch
from bench.zoo import MODELS
from model_coverage import calibrate, sharpened
from pages import folded, write_section
from torch import Tensor, nn

from visattn._support.tables import Row, to_markdown, to_text
from visattn.core.methods.from_attention.contributions import parts_of
from visattn.core.pipeline.summing import with_terms
from visattn.core.records.terms import ScoreTerms
from visattn.errors import VisattnError

DOCS = Path(__file__).parents[1] / "docs" / "contributions.md"
BOUNDS = {torch.float32: 2e-6, torch.float64: 1e-12}  # of the difference over the sum of the magnitudes of all terms
COLUMNS = (
    *(f"{str(dtype).removeprefix('torch.')}, over {what}" for dtype in BOUNDS for what in ("magnitudes", "score")),
    "attention",
    "branches",
    "terms beside hooks",
    "worst of them",
)
OWN = 1e-6  # of a term from hooks, over the sum of the magnitudes, in float64


def main() -> int:
    """Run the sweep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models of the list; by default all")
    parser.add_argument("--write-docs", action="store_true", help="write the tables to docs/contributions.md and the file beside it")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = list[Row]()
    for name, (size, arguments) in MODELS.items():
        if not options.names or name in options.names:
            began = time.perf_counter()
            rows.append(examined(name, size, arguments))
            print(f"{time.perf_counter() - began:6.1f} s  {name}  {rows[-1]}", file=sys.stderr, flush=True)
            gc.collect()
    totals = summary(rows)
    shown = [{name: row[name] for name in ("model", *COLUMNS, "refused")} for row in rows]
    print(to_text(shown))
    print(to_text(totals))
    if options.write_docs:
        write_section(DOCS, "totals", to_markdown(totals))
        write_section(DOCS, "models", folded("All models of the sweep", to_markdown(shown)), into_files=True)
    return int(any("above" in row for row in rows))


def examined(name: str, size: int | None, arguments: dict[str, Any]) -> Row:
    """Return the row of one model."""
    model = sharpened(name, arguments)
    side = size or timm.get_pretrained_cfg(name).input_size[-1]
    pixels = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(1))
    calibrate(model, pixels)
    row: Row = {"model": name}
    for dtype, bound in BOUNDS.items():
        model.to(dtype)
        try:
            terms, layers = answered(model, pixels.to(dtype))
        except VisattnError as error:
            return row | dict.fromkeys(COLUMNS, "") | {"refused": str(error)}
        scale, title = terms.absolute, str(dtype).removeprefix("torch.")
        assert terms.score is not None
        row |= {
            f"{title}, over magnitudes": f"{abs(terms.difference) / scale:.1e}",
            f"{title}, over score": f"{abs(terms.difference / terms.score):.1e}",
        }
        if abs(terms.difference) > bound * scale:
            row["above"] = title
    compared, worst = beside_hooks(model, pixels.double(), terms)
    return row | {
        "attention": layers,
        "branches": sum(term.kind == "branch" and bool(term.total) for term in terms.terms),
        "terms beside hooks": compared,
        "worst of them": f"{worst / scale:.1e}" if compared else "",
        "refused": "",
    } | ({"above": "hooks"} if worst > OWN * scale else {})


def answered(model: nn.Module, pixels: Tensor) -> tuple[ScoreTerms, int]:
    """Return the terms of the first output, and the number of attention calls with contributions."""
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=False)
    with torch.no_grad():
        plain = model(pixels)
    recording, out = with_terms(model, lambda: model(pixels))
    if not torch.equal(plain, out):
        raise AssertionError("the output differs")
    terms, parts = parts_of(recording.gradients(out[0, 0]))
    worst = max(abs(part.difference) for part in parts)
    if worst > 2e-6 * terms.absolute:
        raise AssertionError(f"heads differ by {worst}")
    return terms, len(parts)


def beside_hooks(model: nn.Module, pixels: Tensor, terms: ScoreTerms) -> tuple[int, float]:
    """Compare terms with those of plain hooks; return how many were compared, and the largest difference.

    The output of each attention layer and MLP becomes a leaf of the graph, and the norms behind them get frozen statistics. A term is the
    product of such an output with its gradient. Models with norms that are no `nn.LayerNorm` or other layers behind are left out.
    """
    modules = dict(model.named_modules())
    branches = {term.layer: term for term in terms.terms if term.kind in ("attention", "branch") and term.layer in modules}
    frozen = [text.removeprefix("statistics of ") for text in terms.frozen]
    if any(not _is_layer_norm(modules.get(name)) for name in frozen):
        return 0, 0.0
    leaves: dict[str, Tensor] = {}

    def leaf(name: str) -> Callable[[nn.Module, Any, Any], Any]:
        def hook(_module: nn.Module, _args: Any, out: Any) -> Any:  # noqa: ANN401
            kept = (out[0] if isinstance(out, tuple) else out).detach().requires_grad_()
            leaves[name] = kept
            return (kept, *out[1:]) if isinstance(out, tuple) else kept

        return hook

    def settle(module: nn.LayerNorm, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        (x,) = args
        deviation = (x.var(-1, correction=0, keepdim=True) + module.eps).sqrt().detach()
        normal = (x - x.mean(-1, keepdim=True)) / deviation
        normal = normal * module.weight if module.weight is not None else normal
        return normal + module.bias if module.bias is not None else normal

    with ExitStack() as stack:
        for name in branches:
            stack.callback(modules[name].register_forward_hook(leaf(name)).remove)
        for name in frozen:
            stack.callback(modules[name].register_forward_hook(settle).remove)  # type: ignore[arg-type]
        score = model(pixels)[0, 0]
    if not score.requires_grad:
        return 0, 0.0
    names = list(leaves)
    slopes = torch.autograd.grad(score, [leaves[name] for name in names], allow_unused=True)
    shares = {name: 0.0 if slope is None else float((slope * leaves[name]).sum()) for name, slope in zip(names, slopes, strict=True)}
    return len(shares), max((abs(shares[name] - branches[name].total) for name in names), default=0.0)


def _is_layer_norm(module: nn.Module | None) -> bool:
    return isinstance(module, nn.LayerNorm) and "2d" not in type(module).__name__


def summary(rows: list[Row]) -> list[Row]:
    """Return the totals of the table."""
    exact = [row for row in rows if not row["refused"]]
    compared = [row for row in exact if row["terms beside hooks"]]
    return [
        {"what": "models", "number": len(rows)},
        {"what": "models whose terms add up", "number": sum("above" not in row for row in exact)},
        {"what": "models that are refused with a reason", "number": len(rows) - len(exact)},
        {"what": "models with terms beside hooks", "number": len(compared)},
        {"what": "terms beside hooks", "number": sum(row["terms beside hooks"] for row in compared)},
    ]


if __name__ == "__main__":
    sys.exit(main())
