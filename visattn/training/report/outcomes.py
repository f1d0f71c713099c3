"""Outcomes of a classifier on its test images: top-k accuracy, a table of the classes, and the confusion matrix.

Outcomes are `(N, 3)` integers for each image: its class, the predicted class, and the number of classes with a higher logit than its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visattn._support.tables import Row


def top(outcomes: Tensor, k: int, classes: int) -> float | None:
    """Return the share of images whose class is among the first `k`; None if there are no more than `k` classes."""
    return None if classes <= k else float((outcomes[:, 2] < k).double().mean())


def confusion(outcomes: Tensor, classes: int) -> Tensor:
    """Count the images of each class by predicted class: `(classes, classes)`, integers, a row for each true class."""
    return torch.bincount(outcomes[:, 0] * classes + outcomes[:, 1], minlength=classes**2).view(classes, classes)


def by_class(counts: Tensor, names: Sequence[str]) -> list[Row]:
    """Return a row for each class.

    Args:
        counts: Confusion matrix `(classes, classes)`.
        names: Names of the classes.

    Returns:
        Rows with the number of images, recall (the share of them that was recognized), precision (the share that is right where the class
        was predicted), F1 (their harmonic mean), and the other class that its images were most often taken for. A value that would be 0 / 0
        is None.
    """
    rows: list[Row] = []
    for number, name in enumerate(names):
        right, images, predicted = (int(x) for x in (counts[number, number], counts[number].sum(), counts[:, number].sum()))
        others = counts[number].clone()
        others[number] = 0
        most = int(others.max())
        rows.append(
            {
                "class": name,
                "images": images,
                "recall": right / images if images else None,
                "precision": right / predicted if predicted else None,
                "f1": 2 * right / (images + predicted) if images + predicted else None,
                "most often taken for": names[int(others.argmax())] if most else "",
                "times": most,
            }
        )
    return rows


def as_rows(counts: Tensor, names: Sequence[str]) -> list[Row]:
    """Return the confusion matrix as rows with the true class and a column for each predicted class."""
    return [
        {"true class": name, **dict(zip(_columns(names), line, strict=True))}
        for name, line in zip(names, counts.tolist(), strict=True)
    ]


def _columns(names: Sequence[str]) -> list[str]:
    """Return names that differ from each other and from the heading of the first column."""
    seen = {"true class"}
    return [_new(name, number, seen) for number, name in enumerate(names)]


def _new(name: str, number: int, seen: set[str]) -> str:
    found = name
    while found in seen:
        found = f"{found} ({number})"
    seen.add(found)
    return found
