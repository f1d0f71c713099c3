"""Time and memory of one method at one size, as JSON: `python -m bench.methods RUN SIDE ROUNDS`. The first of several rounds is a warm-up.

Growth is the peak of the first round minus the loaded model. All methods with a target explain feature 0 of the class token.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import visattn
from bench.measuring import load, pixels, plain
from bench.memory import forget_peak, status
from visattn.core import methods
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.passes import look
from visattn.core.pipeline.targets import Target
from visattn.evaluation import heads

Run = Callable[[nn.Module, Tensor], Tensor | None]


def first_feature(output: Tensor) -> Tensor:
    """Return feature 0 of the class token, the target of all methods."""
    return output[:, 0]


def forward(model: nn.Module, image: Tensor) -> None:
    """Run only the forward pass."""
    plain(model, image)


def forward_backward(model: nn.Module, image: Tensor) -> None:
    """Compute the gradient of the score at the pixels. Parameters are frozen, so that only the tensors it needs are stored."""
    image = image.detach().requires_grad_()
    torch.autograd.grad(first_feature(model.requires_grad_(False)(image)).sum(), image)


def seen(model: nn.Module, image: Tensor, *, values: bool = False) -> visattn.Recording:
    """Record a pass without gradients."""
    return look(model, Prepared(image, (), ()), values=values)


def explained(model: nn.Module, image: Tensor, *, each_layer: bool = False) -> visattn.Recording:
    """Record a pass with the gradient of the target."""
    features = "all" if each_layer else "last"
    return look(model, Prepared(image, (), ()), target=Target(first_feature), each_layer=each_layer, features=features)


def head_statistics(model: nn.Module, image: Tensor) -> None:
    """Compute entropy, distance and the other statistics of every head."""
    heads.statistics(seen(model, image))


def legrad(model: nn.Module, image: Tensor) -> Tensor:
    """Compute LeGrad, with one score per layer."""
    return methods.legrad(explained(model, image, each_layer=True)).values


def unfused(model: nn.Module) -> Any:  # noqa: ANN401 - timm's blocks
    """Disable fused attention in all blocks, so that they compute explicit weights; return the blocks."""
    blocks: Any = model.get_submodule("blocks")
    for block in blocks:
        block.attn.fused_attn = False
    return blocks


def collected(model: nn.Module, keep: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return a list that collects `keep(weights)` of each layer in later forward passes of timm's explicit attention."""
    kept: list[Tensor] = []
    for block in unfused(model):
        block.attn.attn_drop.register_forward_hook(lambda _module, _args, weights: kept.append(keep(weights)))
    return kept


def dense_rollout(model: nn.Module, image: Tensor) -> Tensor:
    """Compute rollout from whole matrices."""
    kept = collected(model, lambda weights: weights.mean(1))
    with torch.inference_mode():
        model(image)
        result = torch.eye(kept[0].shape[-1])
        for weights in kept:
            result = (0.5 * weights[0] + 0.5 * torch.eye(len(weights[0]))) @ result
    return result[0, 1:]


def dense_relevance(model: nn.Module, image: Tensor) -> Tensor:
    """Compute relevance from whole matrices and their gradients."""
    kept = collected(model, lambda weights: weights)
    image = image.detach().requires_grad_()
    slopes = torch.autograd.grad(first_feature(model.requires_grad_(False)(image)).sum(), kept)
    result = torch.eye(kept[0].shape[-1])
    for weights, slope in zip(kept, slopes, strict=True):
        result = result + (weights.detach() * slope).clamp(min=0).mean(1)[0] @ result
    return result[0, 1:]


def torchxai_rollout(model: nn.Module, image: Tensor) -> Tensor:
    """Run torchxai-explain's rollout, with heads averaged and nothing discarded."""
    from torchxai.methods.attention_rollout import AttentionRollout

    return torch.from_numpy(AttentionRollout(model, head_fusion="mean", discard_ratio=0.0)._compute_cam(image, None)).flatten()


def torchxai_attribution(model: nn.Module, image: Tensor) -> Tensor:
    """Run torchxai-explain's gradient-weighted rollout, its method closest to relevance."""
    from torchxai.methods.transformer_attribution import TransformerAttribution

    return torch.from_numpy(TransformerAttribution(model)._compute_cam(image, 0)).flatten()


def fast_vit_rollout(model: nn.Module, image: Tensor) -> Tensor:
    """Run fast-vit-rollout, with heads averaged and nothing discarded; it works only with timm's fused attention turned off."""
    from fast_vit_rollout.vit_rollout import ViTAttentionRollout

    unfused(model)
    result: Tensor = ViTAttentionRollout(model, head_fusion="mean", discard_ratio=0.0)(image)
    return result[0, 0, 1:]


RUNS: dict[str, Run] = {
    "forward": forward,
    "forward + backward": forward_backward,
    "rollout": lambda model, image: methods.rollout(seen(model, image)).values,
    "rollout of norms": lambda model, image: methods.rollout(seen(model, image, values=True), weights_by="norm").values,
    "entropy and distance": head_statistics,
    "relevance": lambda model, image: methods.relevance(explained(model, image)).values,
    "legrad": legrad,
    "dense rollout": dense_rollout,
    "dense relevance": dense_relevance,
    "torchxai-explain rollout": torchxai_rollout,
    "torchxai-explain attribution": torchxai_attribution,
    "fast-vit-rollout": fast_vit_rollout,
}


def main(name: str, side: int, rounds: int) -> dict[str, Any]:
    """Return median seconds, growth in bytes, and, for small inputs, the map."""
    model = load()
    image = pixels(model, side)
    forget_peak()
    loaded = status("VmRSS")
    seconds = []
    for _ in range(rounds + (rounds > 1)):
        start = time.perf_counter()
        result = RUNS[name](model, image)
        seconds.append(time.perf_counter() - start)
        if len(seconds) == 1:
            growth = status("VmHWM") - loaded
    shown = result.flatten().tolist() if isinstance(result, Tensor) and side <= 224 else None
    return {"seconds": statistics.median(seconds[rounds > 1 :]), "growth": growth, "map": shown}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *map(int, sys.argv[2:]))))
