"""Attention that is not recorded, found among the operations of a call: products of tokens with tokens that are summed over tokens.

Linear attention multiplies keys by values, sums over tokens, and multiplies queries by the sum. Scores are multiplied by values
in a way that is not recognized. Both must be told. Gates are not meant: they scale each channel, or each position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from visattn.core.capturing.placing.nodes import Facts, Node, tensors_in_nodes
from visattn.core.capturing.placing.operation_table import SOFTMAXES, row_of
from visattn.core.capturing.placing.places import Places
from visattn.core.capturing.placing.pointwise import combined
from visattn.core.capturing.placing.products import FACTORS
from visattn.core.capturing.placing.reductions import reduced
from visattn.core.capturing.placing.shadows import Shadows
from visattn.core.capturing.placing.steps import Step
from visattn.core.capturing.tokens.codes import equal, same_along

SCORES = "multiplies scores by values"
LINEAR = "multiplies tokens by sums of products of tokens (linear attention)"
UNTRACED = "sums tokens with weights that could not be traced"
_SUMS = frozenset({"sum", "mean", "cumsum"})


class Sums:
    """Sums of products of tokens, as far as a forward pass was followed."""

    def __init__(self, shadows: Shadows) -> None:
        """Start without sums; `shadows` has the places of all tensors."""
        self._of, self._facts = shadows.of, shadows.facts
        self._pairs: set[int] = set()  # products of tokens with the same tokens, for all pairs of channels
        self._sums: dict[int, str] = {}  # such products that were summed over tokens, with the layer that did so
        self._of_scores: set[int] = set()  # made from scores, values for pairs of tokens
        self._weighted: set[int] = set()  # scores that were multiplied elementwise by the values of their keys

    def see(self, step: Step, layer: str, call: str) -> tuple[str, str] | None:
        """Look for attention without a softmax, such as linear attention, which cannot be recorded.

        Return the layer, and what it does, if a step (one aten operation, about to be traced) computes such attention; otherwise
        None. `call` is the name of the function that the step belongs to.
        """
        if step.op is None:
            return None
        name, nodes = row_of(step.op)[0], list(_read(step))
        unrecorded = self._see_scores(step, nodes, layer)
        if unrecorded is not None:
            return unrecorded
        if name in FACTORS:
            left, right = (step.given[factor] for factor in FACTORS[name])
            is_one_scores = self.is_scores(left) != self.is_scores(right)
            if is_one_scores and "learned" not in (self._of(left).kind, self._of(right).kind):
                return layer, f"{SCORES} with {call}"
            return self._see_product(step, left, right, layer, channels=name == "convolution")
        if name == "mul" and len(nodes) == 2:
            return self._see_elementwise(step, *nodes)
        if name in _SUMS and nodes and nodes[0] in self._pairs and self._is_over_tokens(step, nodes[0]):
            self._sums.update(dict.fromkeys(_results(step), layer))
        elif name not in SOFTMAXES:
            self._pass_on(step, nodes)
        return None

    def is_scores(self, node: Node) -> bool:
        """Check whether a tensor holds a value for each pair of tokens, as far as this is known."""
        places = self._of(node)
        return places.columns is not None or (places.kind == "lost" and node in self._of_scores)

    def _see_scores(self, step: Step, nodes: Sequence[Node], layer: str) -> tuple[str, str] | None:
        """Look for attention without a matrix product: scores that are multiplied by values elementwise, then summed over tokens.

        Return layer and description of such a sum; None for any other step.
        """
        scores = [node for node in nodes if self.is_scores(node)]
        if not scores:
            return None
        assert step.op is not None  # noqa: S101 - the caller has checked it
        name, row = row_of(step.op)
        are_weighted, results = bool(self._weighted.intersection(scores)), _results(step)
        self._of_scores.update(results)
        if are_weighted and row is not None and row.rule is reduced and self._is_over_tokens(step, scores[0]):
            return layer, f"{SCORES} elementwise"
        may_weight = row is not None and row.rule is combined and name != "div"
        if may_weight:
            others = [node for node in nodes if node not in scores]
            are_weighted |= any(_are_values(self._of(other), self._of(score)) for other in others for score in scores)
        if are_weighted:
            self._weighted.update(results)
        return None

    def _see_product(self, step: Step, left: Node, right: Node, layer: str, *, channels: bool) -> tuple[str, str] | None:
        """Look at a product of matrices, or at a convolution, which sums over `channels`.

        Return a layer, and what it does, if tokens are multiplied by a sum of products of tokens (linear attention).
        """
        for factor, other in ((left, right), (right, left)):
            if factor not in self._sums:
                continue
            if other in self._sums or self._of(other).kind == "learned":
                self._sums.update(dict.fromkeys(_results(step), self._sums[factor]))
                return None
            return self._sums[factor] or layer, LINEAR
        if channels:
            return None
        first, second = self._of(left), self._of(right)
        is_outer_product = self._facts[left].shape[-1] == 1
        if is_outer_product and self._share_tokens(first, second):  # all pairs of channels
            self._pairs.update(_results(step))
            return None
        # the axes that are summed: the last of the left factor, the last but one of the right
        first_varies, second_varies = self._varies(first, -1), self._varies(second, -2 if second.codes.ndim > 1 else -1)
        if first_varies and second_varies and first.columns is None and second.columns is None:
            self._sums.update(dict.fromkeys(_results(step), layer))
        elif (first_varies and second.kind == "lost") or (second_varies and first.kind == "lost"):
            return layer, UNTRACED
        return None

    def _varies(self, places: Places, dim: int) -> bool:
        """Check whether elements along an axis come from different places."""
        return places.placed and not (
            same_along(places.codes, dim) and (places.columns is None or same_along(places.columns, dim))
        )

    def _see_elementwise(self, step: Step, left: Node, right: Node) -> tuple[str, str] | None:
        """Look at an elementwise product; each operand may be repeated along axes of the other (all pairs of channels).

        Return a layer, and what it does, if tokens are multiplied by a sum of products of tokens (linear attention).
        """
        for factor, other in ((left, right), (right, left)):
            is_sum_by_tokens = factor in self._sums and other not in self._sums and self._of(other).kind != "learned"
            if is_sum_by_tokens and self._is_repeated(other, factor):
                return self._sums[factor], LINEAR
        is_outer_product = self._is_repeated(left, right) and self._is_repeated(right, left)
        if is_outer_product and self._share_tokens(self._of(left), self._of(right)):
            self._pairs.update(_results(step))
        else:
            self._pass_on(step, (left, right))
        return None

    def _is_repeated(self, operand: Node, other: Node) -> bool:
        """Check whether an operand is the same along an axis of the product where the other differs."""
        facts, other_facts = self._facts[operand], self._facts[other]
        ndim = max(len(facts.shape), len(other_facts.shape))
        return any(not _differs(facts, axis - ndim) and _differs(other_facts, axis - ndim) for axis in range(ndim))

    def _share_tokens(self, first: Places, second: Places) -> bool:
        """Check whether both operands of a product hold tokens along one common axis."""
        if first.columns is not None or second.columns is not None:
            return False
        ndim = min(first.codes.ndim, second.codes.ndim)
        return any(self._varies(first, -axis) and self._varies(second, -axis) for axis in range(1, ndim + 1))

    def _is_over_tokens(self, step: Step, node: Node) -> bool:
        """Check whether a reduction, such as a sum or a mean, runs over an axis along which tokens differ."""
        places, dims = self._of(node), step.given.get("dim")
        every = range(places.codes.ndim) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
        return any(self._varies(places, dim) for dim in every)

    def _pass_on(self, step: Step, nodes: Sequence[Node]) -> None:
        """Note that results are still products of tokens, or sums of them, as in linear attention, behind an operation such as a scale.

        That is so if one argument is, and the others come from parameters alone.
        """
        sources = [node for node in nodes if node in self._sums or node in self._pairs]
        if not sources or any(node not in sources and self._of(node).kind != "learned" for node in nodes):
            return
        source = sources[0]
        if source in self._sums:
            self._sums.update(dict.fromkeys(_results(step), self._sums[source]))
        else:
            self._pairs.update(_results(step))


def _are_values(places: Places, scores: Places) -> bool:
    """Check whether a tensor has the places of the keys of scores, and not those of their queries."""
    if not places.placed or places.columns is not None or scores.columns is None:
        return False
    try:
        codes, columns, rows = torch.broadcast_tensors(places.codes, scores.columns, scores.codes)  # type: ignore[no-untyped-call]
    except RuntimeError:  # they do not meet
        return False
    return equal(codes, columns) and not equal(codes, rows)


def _differs(facts: Facts, axis: int) -> bool:
    """Check whether a tensor may differ along an axis, counted from the last: it has the axis, and is not expanded along it."""
    return -axis <= len(facts.shape) and facts.shape[axis] > 1 and (not facts.stride or facts.stride[axis] != 0)


def _read(step: Step) -> Iterator[Node]:
    """Yield the tensors that a step reads."""
    for name, value in step.given.items():
        if not name.startswith("out"):
            yield from tensors_in_nodes(value)


def _results(step: Step) -> Sequence[int]:
    """Return the tensors that a step makes or overwrites."""
    return [node for node in step.outs if node is not None] + [after for _, after in step.written]
