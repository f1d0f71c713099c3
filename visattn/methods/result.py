"""The end of every method: values become a map that knows how it was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata

from torch import Tensor

from visattn.maps import AttentionMap, MapFacts
from visattn.methods.selection import named
from visattn.records import Recording, TokenLayout


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
    notes: tuple[str, ...] = (),
    warnings: tuple[str, ...] = (),
    package: str = "",
) -> AttentionMap:
    """Make the map of a method's values, with its parameters and what was not recorded in the provenance.

    Args:
        recording: What the method read.
        method: Its name.
        meaning: What a value is.
        values: `(B, *axes, tokens)` with those of the prefix or without, or `(B, *axes, rows, columns)`.
        layout: Where the tokens lie.
        parameters: Of the method, after every automatic choice.
        axes: Names of the axes behind the batch.
        labels: Names of their entries.
        signed: Whether zero is a value of its own.
        facts: What else is known of it; layer and query are taken from the parameters.
        notes: Choices made on the way.
        warnings: Reasons why the map may mislead.
        package: A library that computed it, whose version is kept.

    Returns:
        The map.
    """
    if tuple(values.shape[1 + len(axes) :]) != layout.grid:
        values = layout.on_grid(values[..., len(layout.prefix) :] if values.shape[-1] == len(layout) else values)
    warnings += tuple(f"{named(unseen.layer)} {unseen.how}, which was not recorded" for unseen in recording.unseen)
    layer, query = (str(parameters.get(name, "")) for name in ("layer", "query"))
    facts = replace(facts or MapFacts(), layer="" if layer == "all" else layer, query=query)
    used = {**parameters, **facts.path()}
    provenance = recording.provenance.but(method=method, parameters=used, notes=notes, warnings=warnings)
    provenance = replace(provenance, sinks=facts.sinks)
    if package:
        provenance = replace(provenance, versions=provenance.versions | {package: metadata.version(package)})
    return AttentionMap(values, ("batch", *axes), layout, labels or {}, meaning, provenance, signed, facts)
