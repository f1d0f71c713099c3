"""Shares of the tokens that a head reads, measured with the gradient of the score.

The *read tokens* are the tokens behind the last attention. Layers that act on each token alone belong to them; so they are taken where
the head begins to mix tokens. The *share* of a token is the L2 norm, over channels, of the gradient of a score at this token, divided by
the sum of these norms. Without a score, the norm is that of the gradients of all outputs together (Frobenius).

A head with attention pooling has read tokens of its own: the results of its latent queries, marked by a tap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

OUTSIDE = 0.01  # largest share of tokens that count as not read
SAME = 0.02  # relative difference (L1) of two maps that count as equal
SCORES = 3  # outputs whose scores are explained


@dataclass
class Case:
    """A model to judge.

    Attributes:
        model: Model in double precision.
        inputs: Arguments of each forward pass.
        read: Module whose result are the read tokens, `(B, N, C)`.
        order: Index of each token in this result: first the prefix, then the patches in raster order.
        prefix: Number of prefix tokens.
        stream: Module whose result are the tokens right behind the last attention; None for `read`.
        latents: Module whose result are the latent tokens behind a pooling attention, `(B, L, C)`; None if there is none.
        scores: Function from the output to the scores, `(B, K)`.
        same: Relative difference (L1) up to which a map counts as that of the measured shares.
        pooled: Whether the output is computed from few features. Else claims without a score are not judged: documented is `cls`.
    """

    model: nn.Module
    inputs: Sequence[tuple[Tensor, ...]]
    read: nn.Module
    order: Sequence[int]
    prefix: int
    stream: nn.Module | None = None
    latents: nn.Module | None = None
    scores: Callable[[Any], Tensor] = lambda output: output
    same: float = SAME
    pooled: bool = True


class Truth(NamedTuple):
    """Shares of one score for each image, in the order of layouts; `latents` is None if the score reads none or more than them."""

    tokens: Tensor  # (B, P + N)
    stream: Tensor  # (B, P + N)
    latents: Tensor | None  # (B, L)
    pools: bool  # whether the head has attention of its own


def _norms(output: Tensor, tokens: Tensor) -> Tensor:
    """Return the norm of the gradient at each token; zeros if there is none."""
    none = tokens.new_zeros(tokens.shape[:2])
    if not output.requires_grad:
        return none
    (gradient,) = torch.autograd.grad(output, [tokens], retain_graph=True, allow_unused=True)
    found: Tensor = none if gradient is None else torch.linalg.vector_norm(gradient, dim=-1)
    return found


def _run(case: Case, inputs: tuple[Tensor, ...], *, cut: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """Run the model; return its output and the marked tokens. With `cut`, no gradient passes through the latents."""
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., Tensor | None]:
        def hook(_module: nn.Module, _args: Any, result: Any) -> Tensor | None:
            tensor = result if isinstance(result, Tensor) else result[0]
            kept[name] = tensor
            return tensor.detach() if cut and name == "latents" else None

        return hook

    taps = {"read": case.read, "stream": case.stream or case.read, "latents": case.latents}
    hooks = [module.register_forward_hook(keep(name)) for name, module in taps.items() if module is not None]
    try:
        return case.model(*inputs), kept
    finally:
        for hook in hooks:
            hook.remove()


def truths(case: Case, inputs: tuple[Tensor, ...]) -> dict[str, Truth]:
    """Return the truth without a score (key `""`), and that of each score (its number)."""
    order = torch.tensor([*case.order])
    (output, kept), (output_cut, kept_cut) = _run(case, inputs), _run(case, inputs, cut=True)
    every = [(tensor if isinstance(tensor, Tensor) else tensor.logits).flatten(1) for tensor in (output, output_cut)]
    chosen = [case.scores(output), case.scores(output_cut)]

    def truth(numbers: Sequence[int], of: Sequence[Tensor]) -> Truth:
        norms = {
            name: torch.stack([_norms(of[0][:, i].sum(), tokens) for i in numbers]).norm(dim=0) for name, tokens in kept.items()
        }
        bypass = torch.stack([_norms(of[1][:, i].sum(), kept_cut["read"]) for i in numbers]).norm(dim=0).sum(1)
        shares = {name: norm / norm.sum(1, keepdim=True).clamp_min(1e-300) for name, norm in norms.items()}
        whole = "latents" in norms and bool((bypass <= OUTSIDE * norms["read"].sum(1)).all())
        return Truth(
            shares["read"][:, order], shares["stream"][:, order], shares["latents"] if whole else None, "latents" in norms
        )

    found = {"": truth(range(every[0].shape[1]), every)}
    return found | {str(i): truth([i], chosen) for i in range(min(SCORES, chosen[0].shape[1]))}
