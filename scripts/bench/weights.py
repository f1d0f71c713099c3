"""Time and memory of all attention weights of a ViT, by visattn and by other libraries, as JSON.

`python -m bench.weights LIBRARY SIDE ROUNDS` times each run of ViT-S/16 in `LIBRARY`, timm or transformers, on one thread, and
`python -m bench.weights LIBRARY SIDE peak RUN` returns the bytes by which a run makes the process grow.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import timm
import torch
import transformers
from timm.utils.attention_extract import AttentionExtract
from torch import Tensor, nn

import visattn
from bench.measuring import ratio, series
from bench.memory import forget_peak, status

Run = Callable[[], Any]
_THREADS = 1


def timm_runs(pixels: Tensor) -> dict[str, Run]:
    """Return our runs on timm's model, and timm's own extraction, which needs its attention unfused."""
    side = pixels.shape[-1]
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch16_224", img_size=side).eval()
    unfused = timm.create_model("vit_small_patch16_224", img_size=side).eval()
    unfused.load_state_dict(model.state_dict())
    for block in unfused.blocks:
        block.attn.fused_attn = False
    extract = AttentionExtract(unfused, method="fx")
    return ours(model, pixels) | {"timm's AttentionExtract": lambda: list(extract(pixels).values())}


def transformers_runs(pixels: Tensor) -> dict[str, Run]:
    """Return our runs on a model of transformers, and its own weights, which need its eager attention."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    kind: Any = transformers.ViTModel
    config: Any = transformers.ViTConfig
    width = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "image_size": pixels.shape[-1]}
    torch.manual_seed(0)
    model, eager = (kind(config(**width, attn_implementation=name)).eval() for name in ("sdpa", "eager"))
    eager.load_state_dict(model.state_dict())
    return ours(model, pixels) | {"eager with output_attentions": lambda: list(eager(pixels, output_attentions=True).attentions)}


def ours(model: nn.Module, pixels: Tensor) -> dict[str, Run]:
    """Return a plain forward pass, and the weights of all layers by a capture: one row, and whole matrices."""
    first = torch.tensor([0])

    def rows() -> list[Tensor]:
        with visattn.capture(model, features="none") as recording:
            model(pixels)
        return [record.operator.rows(first) for record in recording.records]

    def matrices() -> list[Tensor]:
        with visattn.capture(model, features="none") as recording:
            model(pixels)
        return [record.operator.dense() for record in recording.records]

    return {"plain forward": lambda: model(pixels), "visattn, the class token's rows": rows, "visattn, whole matrices": matrices}


LIBRARIES = {"timm": timm_runs, "transformers": transformers_runs}


def main(library: str, side: int, rounds: int) -> dict[str, Any]:
    """Return median seconds, ratios to the plain forward pass and to the peer, and the largest difference of our matrices from its."""
    runs = prepared(library, side)
    peer = list(runs)[-1]
    with torch.no_grad():
        seconds = series(runs, rounds, warmup=2, back=True)
        found = zip(runs["visattn, whole matrices"](), runs[peer](), strict=True)
        differs = max(float((mine - theirs).abs().max() / theirs.abs().max()) for mine, theirs in found)
    return {
        "peer": peer,
        "seconds": {run: statistics.median(values) for run, values in seconds.items()},
        "plain": {run: ratio(values, seconds["plain forward"]) for run, values in seconds.items()},
        "ratios": {run: ratio(values, seconds[peer]) for run, values in seconds.items()},
        "differs": differs,
    }


def peak(library: str, side: int, run: str) -> int:
    """Return the bytes that the first call of a run needs beside the loaded models."""
    runs = prepared(library, side)
    forget_peak()
    loaded = status("VmRSS")
    with torch.no_grad():
        _ = runs[run]()
    return status("VmHWM") - loaded


def prepared(library: str, side: int) -> dict[str, Run]:
    """Return the runs by name; the last is the peer's."""
    torch.set_num_threads(_THREADS)
    return LIBRARIES[library](torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(1)))


if __name__ == "__main__":
    library, side, *rest = sys.argv[1:]
    print(json.dumps(main(library, int(side), int(rest[0])) if len(rest) == 1 else peak(library, int(side), rest[1])))
