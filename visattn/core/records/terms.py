"""Terms of a score: the summands that it is made of, if the statistics of normalizations and the like are frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from visattn._support.reprs import brief

TermKind = Literal["embedding", "attention", "branch", "bias"]


@dataclass(frozen=True, eq=False)
class Part:
    """Part of a term: a tensor of the linear graph, and the value that its gradient multiplies."""

    at: Tensor
    value: Tensor

    __repr__ = brief

    def amount(self, gradient: Tensor | None) -> float:
        """Return the share of the score: the sum of the value times the gradient."""
        return 0.0 if gradient is None else float((gradient.double() * self.value.double()).sum())


@dataclass(frozen=True, eq=False)
class Term:
    """Term of the output of one forward pass of one image.

    Attributes:
        layer: Dotted name of the module that computed it; empty for biases that are added behind the residual stream's first sum.
        call: Index of the call, of attention.
        forward: Index of the forward pass in the recording.
        kind: `embedding`: the pixels, through layers without attention, with the class token and the positions; `attention`: an
            attention call; `branch`: any other residual branch, such as an MLP; `bias`: what is added to the sum of terms.
        amount: Its share of a score, without `constant`; None without a score.
        constant: Share of the biases on the way of this term alone, such as that of the output projection.
        hides: Layers whose attention is behind this term, and has no way around it.
        parts: Where it begins in the graph.
        constants: Where its biases are added.
        operation: Function that computed it.
    """

    layer: str
    forward: int
    kind: TermKind
    call: int = 0
    amount: float | None = None
    constant: float | None = None
    hides: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    constants: tuple[Part, ...] = ()
    operation: str = ""

    __repr__ = brief

    @property
    def total(self) -> float:
        """Share of the score with its biases; 0 without a score."""
        return (self.amount or 0.0) + (self.constant or 0.0)


@dataclass(frozen=True, eq=False)
class ScoreTerms:
    """Terms that the output of a forward pass of one image is the sum of.

    Attributes:
        terms: The terms, in the order in which they begin; biases that belong to none of them come last.
        frozen: What is taken as numbers for this, such as `statistics of norm`.
        score: The score that the amounts are shares of; None without one.
        dtype: Coarsest type in which some of it was computed; None without a score.
    """

    terms: tuple[Term, ...]
    frozen: tuple[str, ...] = ()
    score: float | None = None
    dtype: torch.dtype | None = None

    __repr__ = brief

    def of(self, score: Tensor) -> ScoreTerms:
        """Return the terms with their shares of a score, a single number, without the graph."""
        parts = [part for term in self.terms for part in (*term.parts, *term.constants)]
        slopes = torch.autograd.grad(score.sum(), [part.at for part in parts], retain_graph=True, allow_unused=True)
        amounts = {part: part.amount(slope) for part, slope in zip(parts, slopes, strict=True)}
        graded = tuple(
            replace(
                term,
                amount=sum(amounts[part] for part in term.parts),
                constant=sum(amounts[part] for part in term.constants),
                parts=(),
                constants=(),
            )
            for term in self.terms
        )
        dtype = min((part.at.dtype for part in parts), key=lambda kind: kind.itemsize)
        return replace(self, terms=graded, score=float(score.detach().double().sum()), dtype=dtype)

    @property
    def absolute(self) -> float:
        """Sum of the magnitudes of all terms, which the difference between their sum and the score is measured by."""
        return sum(abs(term.amount or 0.0) + abs(term.constant or 0.0) for term in self.terms)

    @property
    def sum(self) -> float:
        """Sum of all terms; 0 without a score."""
        return math.fsum(term.total for term in self.terms)

    @property
    def difference(self) -> float:
        """Score less the sum of all terms: what rounding leaves. Infinite without a score."""
        return math.inf if self.score is None else self.score - self.sum
