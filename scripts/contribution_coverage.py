"""Direct contributions in models of timm and of three other libraries: do the terms add up to the score, and is each the model's own?

`contribution_coverage.py [NAME ...] [--library NAME] [--write-docs]`. For each model with random weights that answers: the difference
between the score and the sum of its terms, in float32 and float64, over the sum of their magnitudes and over the score; and the largest
difference between a term of an attention layer or MLP and what plain hooks on the model's modules give. Prints a table with the reason for
each model that is refused. Exits 1 if a difference is above its bound.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from bench.zoo import MODELS
from libraries import open_clip_models, torchvision_models, transformers_models
from model_coverage import calibrate, sharpen, sharpened
from pages import folded, write_section
from timm.layers import LayerNorm2d
from torch import Tensor, nn

from visattn._support.checks import first_line
from visattn._support.tables import Row, to_markdown, to_text
from visattn.core.methods.from_attention.contributions import Contribution, parts_of
from visattn.core.pipeline.summing import with_terms
from visattn.core.records.terms import ScoreTerms
from visattn.errors import OptionError, VisattnError

DOCS = Path(__file__).parents[1] / "docs" / "contributions.md"
BOUNDS = {torch.float32: 2e-6, torch.float64: 1e-12}  # of the difference over the sum of the magnitudes of all terms
MIXED = "MultiScaleAttention", "MultiScaleAttentionPoolFirst"  # they add their own queries to their output
COLUMNS = (
    *(f"{str(dtype).removeprefix('torch.')}, over {what}" for dtype in BOUNDS for what in ("magnitudes", "score")),
    "attention",
    "branches",
    "terms beside hooks",
    "worst of them",
    "refused",
)


def main() -> int:
    """Run the sweep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models; by default all")
    parser.add_argument("--library", action="append", choices=list(CASES), help="only the models of this library")
    parser.add_argument(
        "--write-docs", action="store_true", help="write the tables to docs/contributions.md and the files beside it"
    )
    options = parser.parse_args()
    if options.write_docs and (options.names or options.library):
        parser.error("--write-docs needs all models")
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)  # which a capture switches off, and whose bits differ
    rows, wrong = list[Row](), list[str]()
    for library in options.library or CASES:
        names, build = CASES[library]
        for name in names:
            if options.names and name not in options.names:
                continue
            began = time.perf_counter()
            try:
                made = build(name)
            except Exception as error:  # of the library, such as a package that is missing
                rows.append(
                    {
                        "library": library,
                        "model": name,
                        **dict.fromkeys(COLUMNS, ""),
                        "refused": f"not built: {first_line(error)}",
                    }
                )
                continue
            row, faults = examined(*made)
            rows.append({"library": library, "model": name, **row})
            wrong += [f"{name}: {fault}" for fault in faults]
            print(f"{time.perf_counter() - began:6.1f} s  {name}  {row} {'; '.join(faults)}", file=sys.stderr, flush=True)
            gc.collect()
    totals = summary(rows)
    print(to_text(rows))
    print(to_text(totals))
    print("\n".join(wrong) or "none is above its bound")
    if options.write_docs:
        write_section(DOCS, "totals", to_markdown(totals))
        write_section(DOCS, "models", folded("All models of the sweep", to_markdown(rows)), into_files=True)
    return int(bool(wrong))


Run = Callable[[torch.dtype], Tensor]  # runs a model in a type, and returns a score


def of_timm(name: str) -> tuple[nn.Module, Run]:
    """Return a model with random weights that attends far from uniformly, and a function from a type to its first output."""
    size, arguments = MODELS[name]
    model = sharpened(name, arguments)
    side = size or timm.get_pretrained_cfg(name).input_size[-1]
    pixels = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    calibrate(model, pixels)
    return model, lambda dtype: model(pixels[:1].to(dtype))[0, 0]


def of_torchvision(name: str) -> tuple[nn.Module, Run]:
    """Return a shallow model, and its first output."""
    model, inputs = torchvision_models.build(name)
    sharpen(model)
    return model, lambda dtype: model(**_first(inputs, dtype))[0, 0]


def of_transformers(name: str) -> tuple[nn.Module, Run]:
    """Return a tiny model, and its first output, or the similarity of the image to the text."""
    model, inputs = transformers_models.build(name)
    sharpen(model)

    def run(dtype: torch.dtype) -> Tensor:
        out = model(**_first(inputs, dtype))
        scores: Tensor | None = getattr(out, "logits", getattr(out, "logits_per_image", None))
        if scores is None:
            raise OptionError("its output has no scores.")
        return scores[0, 0]

    return model, run


def of_open_clip(name: str) -> tuple[nn.Module, Run]:
    """Return a shallow model, and the similarity of the image to the text."""
    model, inputs = open_clip_models.build(name)
    sharpen(model)

    def run(dtype: torch.dtype) -> Tensor:
        out = model(**_first(inputs, dtype))
        image, text = (out["image_features"], out["text_features"]) if isinstance(out, dict) else out[:2]
        product: Tensor = image[0] * text[0]
        return product.sum()

    return model, run


def _first(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the first image of a batch and what belongs to it."""
    images = {name: value[:1] if isinstance(value, Tensor) else value for name, value in inputs.items()}
    return {
        name: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value for name, value in images.items()
    }


CASES: dict[str, tuple[Sequence[str], Callable[[str], tuple[nn.Module, Run]]]] = {
    "timm": (list(MODELS), of_timm),
    "torchvision": (["vit_b_16", "swin_t", "swin_v2_t", "maxvit_t"], of_torchvision),
    "transformers": (
        [*(name for name in transformers_models.names() if name.endswith("ForImageClassification")), "CLIPModel", "SiglipModel"],
        of_transformers,
    ),
    "open_clip": (
        [
            "ViT-B-32",
            "ViT-B-16-quickgelu",
            "ViT-B-16-SigLIP",
            "EVA02-B-16",
            "PE-Core-T-16-384",
            "ViTamin-S",
            "MobileCLIP-B",
            "coca_ViT-B-32",
        ],
        of_open_clip,
    ),
}


def examined(model: nn.Module, run: Run) -> tuple[Row, list[str]]:
    """Return the row of a model, and what is wrong with it."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    faults = list[str]()
    for dtype in BOUNDS:
        model.to(dtype).requires_grad_(requires_grad=False)
        title = str(dtype).removeprefix("torch.")
        try:
            terms, parts = answered(model, lambda: run(dtype))  # noqa: B023 - called at once
        except VisattnError as error:
            return row | {"refused": str(error)}, faults
        scale, worst = terms.absolute, max((abs(part.difference) for part in parts), default=0.0)
        bound = BOUNDS[terms.dtype or dtype]  # some models compute norms in float32, whatever their type
        row |= {
            f"{title}, over magnitudes": f"{abs(terms.difference) / scale:.1e}",
            f"{title}, over score": f"{abs(terms.difference / terms.score):.1e}",  # type: ignore[operator]
        }
        faults += [f"terms, {title}"] * (abs(terms.difference) > bound * scale) + [f"heads, {title}"] * (worst > bound * scale)
    row |= {"attention": len(parts), "branches": sum(term.kind == "branch" and bool(term.total) for term in terms.terms)}
    compared, worst = beside_hooks(model, lambda: run(torch.float64))
    faults += ["hooks"] * (worst > bound)
    row |= {"terms beside hooks": compared, "worst of them": f"{worst:.1e}" if compared else ""}
    return row, faults


def answered(model: nn.Module, score: Callable[[], Tensor]) -> tuple[ScoreTerms, list[Contribution]]:
    """Return the terms of a score, and the contributions of its attention calls."""
    with torch.no_grad():
        plain = score()
    recording, found = with_terms(model, score)
    if not torch.equal(plain, found):
        raise AssertionError("the output differs")
    return parts_of(recording.gradients(found))


def beside_hooks(model: nn.Module, score: Callable[[], Tensor]) -> tuple[int, float]:
    """Compare terms with those of plain hooks; return how many were compared, and the largest difference over all magnitudes.

    The output of each attention layer and MLP becomes a leaf of the graph, and the norms behind them get frozen statistics. A term is the
    product of such an output with its gradient. Biases of norms are set to zero first, since they may be added behind an output. Models
    with norms that are no `nn.LayerNorm` are left out, and those with a branch that is no module of its own.
    """
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm) and module.bias is not None:
                module.bias.zero_()
    terms, _ = answered(model, score)
    modules = dict(model.named_modules())
    named = [term for term in terms.terms if term.kind in ("attention", "branch")]
    branches = {term.layer: term for term in named if _is_branch(modules.get(term.layer))}
    frozen = [text.removeprefix("statistics of ") for text in terms.frozen]
    is_mixed = any(type(module).__name__ in MIXED for module in modules.values())
    if len(branches) < len(named) or is_mixed or any(not _is_layer_norm(modules.get(name)) for name in frozen):
        return 0, 0.0
    leaves: dict[str, Tensor] = {}

    def leaf(name: str) -> Callable[[nn.Module, Any, Any], Any]:
        def hook(_module: nn.Module, _args: Any, out: Any) -> Any:  # noqa: ANN401
            kept = (out[0] if isinstance(out, tuple) else out).detach().requires_grad_()
            leaves[name] = kept
            return (kept, *out[1:]) if isinstance(out, tuple) else kept

        return hook

    def settle(module: nn.LayerNorm, args: tuple[Tensor, ...], _out: Tensor) -> Tensor:
        channels_first = isinstance(module, LayerNorm2d)
        x = args[0].permute(0, 2, 3, 1) if channels_first else args[0]
        deviation = (x.var(-1, correction=0, keepdim=True) + module.eps).sqrt().detach()
        normal = (x - x.mean(-1, keepdim=True)) / deviation
        normal = normal * module.weight if module.weight is not None else normal
        normal = normal + module.bias if module.bias is not None else normal
        return normal.permute(0, 3, 1, 2) if channels_first else normal

    with ExitStack() as stack:
        for name in branches:
            stack.callback(modules[name].register_forward_hook(leaf(name)).remove)
        for name in frozen:
            stack.callback(modules[name].register_forward_hook(settle).remove)
        found = score()
    if not found.requires_grad:
        return 0, 0.0
    names = list(leaves)
    slopes = torch.autograd.grad(found, [leaves[name] for name in names], allow_unused=True)
    shares = {
        name: 0.0 if slope is None else float((slope * leaves[name]).sum()) for name, slope in zip(names, slopes, strict=True)
    }
    # the biases of an output projection may be added by another module, behind this one
    known = {name: (branches[name].total, branches[name].amount or 0.0) for name in names}
    worst = max((min(abs(shares[name] - share) for share in known[name]) for name in names), default=0.0)
    return len(shares), worst / terms.absolute


def _is_branch(module: nn.Module | None) -> bool:
    """Check whether the output of a module is that of one branch, by its class: those of blocks hold the stream too."""
    name = type(module).__name__
    return any(part in name.lower() for part in ("attention", "attn", "mlp", "swiglu", "feedforward", "gpsa", "mhsa"))


def _is_layer_norm(module: nn.Module | None) -> bool:
    return isinstance(module, nn.LayerNorm)


def summary(rows: list[Row]) -> list[Row]:
    """Return the totals of the table."""
    totals = list[Row]()
    for library in dict.fromkeys(row["library"] for row in rows):
        own = [row for row in rows if row["library"] == library]
        exact = [row for row in own if not row["refused"]]
        compared = [row for row in exact if row["terms beside hooks"]]
        totals.append(
            {
                "library": library,
                "models": len(own),
                "terms add up": len(exact),
                "refused with a reason": len(own) - len(exact),
                "models compared with hooks": len(compared),
                "terms compared": sum(row["terms beside hooks"] for row in compared),
            }
        )
    return totals


if __name__ == "__main__":
    sys.exit(main())
