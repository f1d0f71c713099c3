"""The page of a space: all heads of a model as clouds of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence

from visattn._support.types import Criterion, Layout
from visattn.embedding.space_payload import Part, SpacePayload
from visattn.viewer import MAX_MB, written

_METHODS: dict[Layout, str] = {
    "pca": "Joint principal components, fitted to the patches that are no sinks",
    "tsne": "t-SNE of the drawn patches: neighbors are kept, distances between groups say little",
    "umap": "UMAP of the drawn patches: neighbors are kept, distances between groups say little",
}
_SCALES: dict[Criterion, str] = {
    "norms": "to equal median norms",
    "weighted": "by the criterion 'weighted' of AttentionViz",
    "shared": "by the criterion 'shared' of AttentionViz",
}


def space_html(parts: Sequence[Part], *, method: Layout = "pca", criterion: Criterion = "norms", max_mb: float = MAX_MB) -> str:
    """Return one space, or two of the same images, as an HTML page; see `visattn.embedding.save_html`.

    Args:
        parts: Spaces with their points and numbers.
        method: The method of the points.
        criterion: The choice of the scale of queries and keys.
        max_mb: Largest size of the page in MB.

    Returns:
        The page.

    Raises:
        OptionError: If the page exceeds `max_mb`.
    """
    about = f"{_METHODS[method]}. Queries and keys of each head are scaled {_SCALES[criterion]}. {_drawn(parts, method)}"
    payload = SpacePayload(parts, about, max_mb)
    return written(payload.facts["title"], payload.facts, payload.data, ("viewer.css", "space.css"), "space.js", max_mb)


def _drawn(parts: Sequence[Part], method: Layout) -> str:
    """Say which tokens are drawn."""
    every = [states for part in parts for states in part.space.layers]
    layers = [states for states in every if not states.tokens.words]
    texts = " Of each text all words are shown." if len(layers) < len(every) else ""
    if not layers:
        return texts.strip()
    named = list(dict.fromkeys(name for states in layers for name in states.tokens.names))
    counts = {len(states.some) // len(states.tokens.boxes) - len(states.tokens.names) for states in layers}
    count = " to ".join(map(str, sorted({min(counts), max(counts)})))
    differ = len({states.tokens.names for states in layers}) > 1
    where = " where there are any" if differ else ""
    also = f", and {', '.join(named)}{where}" if named and method == "pca" else ""
    return (
        f"Each head shows of each image {count} patch{'' if counts == {1} else 'es'} at random{also}, as query and as key.{texts}"
    )
