"""The part of autograd's graph through which scores have a gradient at the pixels, seen in one backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from visattn._support import norm_gradients

Node = Any  # torch.autograd.graph.Node
Edges = Mapping[Node, Sequence[Node]]

_PRODUCTS = "conv", "addmm", "bmm", "mm", "linear"  # in names of nodes: operations that apply weights
_MIXES = "Bmm", "ScaledDotProduct"  # attention, whose keys may be fewer than its queries
_CLIPS = "ClampBackward1", "ClampMinBackward0", "ClampMaxBackward0"
_BOXES = 3  # axes that tensors of boxes have at most


@dataclass(frozen=True)
class GradientGraph:
    """Operations that pass a gradient other than zero on, from scores to pixels.

    Attributes:
        roots: The operations that compute the scores.
        edges: For each operation those that it passes a gradient on to, toward the pixels, in the order of the backward pass.
    """

    roots: Sequence[Node]
    edges: Edges

    @classmethod
    def of(cls, scores: Sequence[Tensor], pixels: Tensor) -> GradientGraph:
        """Run one backward pass from all scores to the pixels.

        Corners of boxes that are clipped at the edge of the image count as if they were not.

        Args:
            scores: Numbers that the model computed; those without a graph count as constants.
            pixels: `(B, C, H, W)`, a leaf of the graph.
        """
        roots = [score.grad_fn for score in scores if score.grad_fn is not None]
        edges: dict[Node, tuple[Node, ...]] = {}
        handles = [node.register_hook(_noting(node, edges)) for node in _nodes(roots)]
        try:
            if roots:
                graded = [score for score in scores if score.grad_fn is not None]
                norm_gradients.set_right(*graded)
                torch.autograd.grad(graded, [pixels], [torch.ones_like(score) for score in graded], allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        return cls(*_leading_to(get_gradient_edge(pixels).node, roots, edges))

    def on_all_ways(self) -> set[Node]:
        """Return the operations that every way from a score to the pixels passes."""
        passed, opened, entering = set(), len(self.roots), Counter(self.roots)
        for node, following in self.edges.items():
            opened -= entering[node]
            if not opened:
                passed.add(node)
            opened += len(following)
            entering.update(following)
        return passed

    def before_weights(self) -> set[Node]:
        """Return the operations that a score is computed from without weights: by selecting, resizing, or elementwise."""
        reached = set(self.roots)
        for node, following in self.edges.items():
            if node in reached and not any(part in node.name().lower() for part in _PRODUCTS):
                reached.update(following)
        return reached

    def before_enlarging(self, sizes: Mapping[Node, int]) -> set[Node]:
        """Return the operations whose result is computed from the pixels before any map is enlarged or pooled to a fixed size.

        Args:
            sizes: Number of positions of the maps that some operations make.
        """
        least: dict[Node, int] = {}
        before = set()
        for node, following in reversed(list(self.edges.items())):
            smallest = min((least[other] for other in following if other in least), default=sizes.get(node))
            if smallest is not None and not any(part in node.name() for part in _MIXES):
                least[node] = min(smallest, sizes.get(node, smallest))
            enlarges = (node in least and node in sizes and least[node] < sizes[node]) or (
                smallest is not None and _resizes(node)
            )
            if not enlarges and all(other in before or other not in self.edges for other in following):
                before.add(node)
        return before


def _nodes(roots: Sequence[Node]) -> Iterator[Node]:
    """Yield all operations behind some, each once."""
    waiting, seen = list(roots), set(roots)
    while waiting:
        node = waiting.pop()
        yield node
        following = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= following
        waiting.extend(following)


def _resizes(node: Node) -> bool:
    """Check whether an operation interpolates to a larger map, or pools to a fixed size; to one position that is a mean, as in gates."""
    if "Upsample" in node.name():
        return bool(node._saved_output_size[-1] > node._saved_self_sym_sizes[-1])
    return "Adaptive" in node.name() or (bool(getattr(node, "_saved_transposed", False)) and max(node._saved_stride) > 1)


def _noting(node: Node, edges: dict[Node, tuple[Node, ...]]) -> Any:  # noqa: ANN401
    """Return a hook of an operation that notes where its gradient goes on."""
    clips = node.name() in _CLIPS

    def note(inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        (given, *_), through = outputs, None
        if clips and given is not None and given.ndim <= _BOXES and inputs[0] is not None:
            inputs = through = (given,)
        ends = zip(node.next_functions, inputs, strict=False)
        edges[node] = tuple(other for (other, _), slope in ends if other is not None and slope is not None and bool(slope.any()))
        return through

    return note


def _leading_to(leaf: Node, roots: Sequence[Node], edges: Edges) -> tuple[Sequence[Node], Edges]:
    """Return roots and edges without those that do not lead to the pixels."""
    leading, kept = {leaf}, []
    for node, following in reversed(list(edges.items())):
        going = [other for other in following if other in leading]
        if going:
            leading.add(node)
            kept.append((node, going))
    return [root for root in roots if root in leading], dict(reversed(kept))
