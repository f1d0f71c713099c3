"""Coverage of tasks: maps of models of other libraries for boxes, masks, pixels, classes, numbers, texts and queries.

Each map is compared with one that is made by hand from the same number and the same layer. Prints a table; --write-docs also writes it to
docs/libraries.md and the file beside it. Exits 1 if a row ends in another error than a refusal, differs, or is refused unexpectedly.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext, suppress
from importlib import invalidate_caches
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import open_clip
import torch
import transformers
from libraries.task_checks import attention, commonest, cosine, gradcam, scalar
from libraries.task_models import PHOTO, ROWS, Row, built
from pages import folded, write_section

import visattn
from visattn._support.tables import to_markdown, to_text
from visattn.errors import VisattnError

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "libraries.md"
FOLDER = ROOT / ".bench" / "tasks"
PACKAGES = {"segmentation_models_pytorch": "segmentation-models-pytorch", "monai": "monai", "einops": "einops"}
SEEDS = 5  # weights that are tried until a map has a value above 0
CLOSE = 1e-4  # of the largest value of a map
REFUSED = {"YoloLike, as it is"}  # rows that must be refused


def main() -> int:
    """Run the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models; by default all")
    parser.add_argument("--write-docs", action="store_true", help=f"replace the table beside docs/{DOCS.name}")
    options = parser.parse_args()
    install()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    rows = [of_row(row) for row in ROWS if not options.names or row.model in options.names]
    sums = totals(rows)
    for table in (rows, sums):
        print(to_text(table), flush=True)
    if options.write_docs:
        write_section(DOCS, "totals of tasks", to_markdown(sums))
        write_section(DOCS, "tasks", folded("Models and targets, one row each", to_markdown(rows)), into_files=True)
    return int(any(is_wrong(row) for row in rows))


def install() -> None:
    """Install the libraries that are not there into a folder of their own, which Python then searches too."""
    sys.path.append(str(FOLDER))
    missing = [package for name, package in PACKAGES.items() if find_spec(name) is None]
    if missing:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(FOLDER), *missing]
        subprocess.run(command, check=True)
        invalidate_caches()


def of_row(row: Row) -> dict[str, Any]:
    """Explain a row, and compare its map with one by hand."""
    started = time.perf_counter()
    asked = row.target or str(row.options.get("query", "cls"))
    found = {"library": row.library, "model": row.model, "target": asked, "method": row.method, "layer": "", "map": ""}
    found |= {"result": "", "difference": ""}
    try:
        found |= _compared(row)
    except VisattnError as error:
        found["result"] = f"refused: {error}"
    except Exception as error:  # a fault of visattn, or of the row
        found["result"] = f"FAILED: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    print(f"{time.perf_counter() - started:6.1f} s  {row.library} {row.model}: {found['result']}", file=sys.stderr, flush=True)
    gc.collect()
    return found


def _compared(row: Row) -> dict[str, Any]:
    for seed in range(SEEDS):
        model = built(row, seed)
        last = seed + 1 == SEEDS or row.model in REFUSED
        with nullcontext() if last else suppress(VisattnError):  # no box above the threshold, or a score of 0
            explained, target, prepared = _explained(row, model)
            if last or float(explained.map.values.max()) > 0:
                break
    by_hand = _by_hand(row, model, explained, target, prepared)
    values = explained.panel.values.double()
    difference = float((values - by_hand).abs().max() / by_hand.max())
    result = "works" if difference <= CLOSE else "DIFFERENT"
    return {
        "target": target or str(row.options.get("query", "cls")),
        "layer": explained.map.facts.layer,
        "map": " x ".join(map(str, values.shape)),
        "result": result,
        "difference": f"{difference:.0e}",
    }


def _explained(row: Row, model: torch.nn.Module) -> tuple[visattn.Explanation, str, Any]:
    """Return the explanation, its target with the class written out, and the prepared photo."""
    how = {name: value for name, value in row.options.items() if name in ("img_size", "resize")}
    prepared, target = visattn.prepare(PHOTO, model, **how), row.target
    if target == "mask:*":
        with torch.no_grad():
            target = f"mask:{commonest(model(prepared.pixels))}"
    options: dict[str, Any] = {**row.options, "method": row.method} | ({"target": target} if target else {})
    return visattn.explain(model, PHOTO, **options), target, prepared


def _by_hand(row: Row, model: Any, explained: visattn.Explanation, target: str, prepared: Any) -> Any:  # noqa: ANN401
    grid = tuple(explained.panel.values.shape)
    if row.method == "attention":
        return attention(model, prepared.pixels, str(row.options.get("query", "cls")), grid)  # type: ignore[arg-type]
    pixels = prepared.pixels.clone().requires_grad_()
    inputs = [pixels]
    if target.startswith("text:"):
        inputs.append(open_clip.get_tokenizer("RN50")([target.removeprefix("text:")]))
    other = None
    if target.startswith("similar:"):
        with torch.no_grad():
            how = {name: value for name, value in row.options.items() if name in ("img_size", "resize")}
            other = model(visattn.prepare(target.removeprefix("similar:"), model, **how).pixels)
    photo = prepared.photo.height, prepared.photo.width
    return gradcam(
        model,
        lambda: model(*inputs),
        lambda output: scalar(model, target, output, photo) if other is None else cosine(output, other),
        explained.map.facts.layer,
        grid,  # type: ignore[arg-type]
        row.first,
    )


def is_wrong(row: dict[str, Any]) -> bool:
    """Check whether a row failed, differs, or is refused or not against the list."""
    return bool(row["result"] != "works") if row["model"] not in REFUSED else not row["result"].startswith("refused")


def totals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compute the totals of the table."""
    libraries = ("torchvision", "transformers", "timm", "segmentation-models-pytorch", "monai", "open_clip_torch")
    found = {
        "versions": ", ".join(f"{name} {version(name)}" for name in libraries),
        "rows": len(rows),
        "maps equal to those by hand": sum(row["result"] == "works" for row in rows),
        "largest difference, as a share of the largest value": max((row["difference"] or "0" for row in rows), key=float),
        "refused": sum(row["result"].startswith("refused") for row in rows),
        "different": sum(row["result"] == "DIFFERENT" for row in rows),
        "failed": sum(row["result"].startswith("FAILED") for row in rows),
    }
    return [{"what": what, "number": number} for what, number in found.items()]


if __name__ == "__main__":
    sys.exit(main())
