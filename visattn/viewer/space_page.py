"""The page of a space: all heads of a model as clouds of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from visattn._support.types import Layout
from visattn.viewer.page import MAX_MB, written
from visattn.viewer.space_payload import Part, SpacePayload

if TYPE_CHECKING:
    from visattn.embedding import Space

_METHODS: dict[Layout, str] = {
    "pca": "joint principal components, fitted to the patches that are no sinks",
    "tsne": "t-SNE of the drawn patches: neighbors are kept, distances between groups say little",
    "umap": "UMAP of the drawn patches: neighbors are kept, distances between groups say little",
}


def space_html(parts: Sequence[Part], *, method: Layout = "pca", max_mb: float = MAX_MB) -> str:
    """Return one space, or two of the same images, as an HTML page; see `visattn.embedding.save_html`.

    Args:
        parts: Spaces with their points and numbers.
        method: The method of the points.
        max_mb: Largest size of the page in MB.

    Returns:
        The page.

    Raises:
        OptionError: If the page exceeds `max_mb`.
    """
    payload = SpacePayload(parts, f"{_METHODS[method]}. {_drawn(parts[0].space)}", max_mb)
    return written(payload.facts["title"], payload.facts, payload.data, ("viewer.css", "space.css"), "space.js", max_mb)


def _drawn(space: Space) -> str:
    """Say which tokens are drawn."""
    states = space.layers[0]
    some, tokens = len(states.some), len(states.of_queries.image)
    each = some // len(space.images)
    named = len(states.of_queries.names)
    also = f", and its {', '.join(states.of_queries.names)}" if named else ""
    return (
        f"Drawn are {some:,} of {tokens:,} tokens of each head, as query and as key: "
        f"of each image {each - named} patches at random{also}."
    )
