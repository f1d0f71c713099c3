"""Ways of gradients through autograd's graph, against all paths, listed one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from visattn.core.pipeline.gradient_graph import GradientGraph, Node


def paths(graph: GradientGraph, start: Node) -> Iterator[list[Node]]:
    """Yield every path from an operation to the pixels."""
    for following in graph.edges[start]:
        for rest in paths(graph, following) if following in graph.edges else [[]]:
            yield [start, *rest]


def random_graph(seed: int) -> tuple[list[Tensor], Tensor]:
    """Return two scores that are computed from pixels in a random order of sums, products and operations without a gradient."""
    chosen = random.Random(seed)
    pixels = torch.rand(1, 1, 2, 2, requires_grad=True)
    values = [pixels.exp()]
    for _ in range(9):
        first, second = chosen.choice(values), chosen.choice(values[-2:])
        values.append(chosen.choice([first + second, first * second, second.sin(), second * 0 + first, second.relu()]))
    return [values[-1].sum(), values[-2].sum() * 2], pixels


@pytest.mark.parametrize("seed", range(12))
def test_what_all_ways_pass_is_in_every_path(seed: int) -> None:
    scores, pixels = random_graph(seed)
    graph = GradientGraph.of(scores, pixels)
    every = [path for root in graph.roots for path in paths(graph, root)]
    common = set(every[0]).intersection(*every)
    assert graph.on_all_ways() == common
    assert set(graph.edges) == set().union(*every)


def test_an_edge_without_gradient_is_no_way() -> None:
    pixels = torch.rand(1, 3, 2, 2, requires_grad=True)
    dead, alive = pixels.exp(), pixels.sin()
    graph = GradientGraph.of([(alive + (dead * -1).relu()).sum()], pixels)
    assert alive.grad_fn in graph.edges
    assert dead.grad_fn not in graph.edges


def test_a_corner_that_is_clipped_counts_as_if_it_were_not() -> None:
    pixels = torch.rand(1, 3, 2, 2, requires_grad=True)
    corner = pixels.mean((2, 3)) - 5
    graph = GradientGraph.of([corner.clamp(0, 8).sum()], pixels)
    assert corner.grad_fn in graph.edges


def test_what_is_computed_after_a_map_was_enlarged_is_not_before_it() -> None:
    pixels = torch.rand(1, 2, 8, 8, requires_grad=True)
    small = torch.nn.functional.avg_pool2d(pixels, 4)
    large = torch.nn.functional.interpolate(small, size=(4, 4))
    again = torch.nn.functional.avg_pool2d(large, 2)
    fixed = torch.nn.functional.adaptive_avg_pool2d(small, (1, 2))
    graph = GradientGraph.of([again.sum(), fixed.sum()], pixels)
    sizes = {small.grad_fn: 4, large.grad_fn: 16, again.grad_fn: 4, fixed.grad_fn: 2}
    before = graph.before_enlarging(sizes)
    assert {node for node in sizes if node in before} == {small.grad_fn}
