"""Construction of maps with their provenance, the last step of every method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata

from torch import Tensor

from visattn.core.maps import AttentionMap, MapFacts
from visattn.core.methods.selection import named
from visattn.core.records import Recording, TokenLayout


def to_map(
    recording: Recording,
    method: str,
    meaning: str,
    values: Tensor,
    layout: TokenLayout,
    parameters: Mapping[str, object],
    *,
    axes: Sequence[str] = (),
    labels: Mapping[str, tuple[str, ...]] | None = None,
    signed: bool = False,
    facts: MapFacts | None = None,
    queries: TokenLayout | None = None,
    notes: tuple[str, ...] = (),
    warnings: tuple[str, ...] = (),
    package: str = "",
) -> AttentionMap:
    """Build a map from a method's values; record the parameters and attention that was not recorded in the provenance.

    Args:
        recording: Recording that the method read.
        method: Name of the method.
        meaning: Quantity of the values.
        values: `(B, *axes, tokens)`, with or without prefix tokens, or `(B, *axes, rows, columns)`.
        layout: Layout of the tokens.
        parameters: Parameters of the method, with all automatic choices resolved.
        axes: Names of the axes after the batch.
        labels: Names of the entries of each axis.
        signed: Whether the map needs a diverging color scale centered on zero.
        facts: Further facts about the map; its layer and query are taken from the parameters.
        queries: Layout of the query tokens, if it is another one.
        notes: Choices made while computing the map.
        warnings: Reasons why the map may mislead.
        package: Library that computed the values, whose version is recorded.

    Returns:
        The map.
    """
    if tuple(values.shape[1 + len(axes) :]) != layout.grid:
        values = layout.on_grid(values[..., len(layout.prefix) :] if values.shape[-1] == len(layout) else values)
    warnings += tuple(f"{named(unseen.layer)} {unseen.reason}, which was not recorded" for unseen in recording.unseen)
    layer, query = (str(parameters.get(name, "")) for name in ("layer", "query"))
    at = tuple(_center(part.removeprefix("patch:"), queries or layout) for part in query.split("+") if part.startswith("patch:"))
    layer, size = "" if layer == "all" else layer, recording.input_size if any(recording.input_size) else None
    facts = replace(facts or MapFacts(), layer=layer, query=query, query_at=at, input_size=size)
    used = {**parameters, **facts.path()}
    provenance = recording.provenance.but(method=method, parameters=used, notes=notes, warnings=warnings)
    provenance = replace(provenance, sinks=facts.sinks)
    if package:
        provenance = replace(provenance, versions=provenance.versions | {package: metadata.version(package)})
    return AttentionMap(values.cpu(), ("batch", *axes), layout, labels or {}, meaning, provenance, signed, facts)


def _center(patch: str, layout: TokenLayout) -> tuple[float, float]:
    """Return the center `(y, x)` of the patch `ROW,COL`, in pixels of the model's input."""
    place = (int(number) for number in patch.split(","))
    (top, left), (rows, columns) = layout.box[:2], layout.grid
    row, column = place
    return top + (row + 0.5) * layout.box.height / rows, left + (column + 0.5) * layout.box.width / columns
