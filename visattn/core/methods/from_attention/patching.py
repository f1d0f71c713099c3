"""Activation patching: how much of a difference between the scores of two photos each part of a layer brings with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visattn._support.language import option
from visattn._support.reprs import brief
from visattn.core.maps import AttentionMap, MapFacts
from visattn.core.methods.method import Method, needs
from visattn.core.methods.result import to_map
from visattn.core.methods.selection import NOTHING, named, one_forward
from visattn.core.records import AttentionRecord, Recording
from visattn.core.records.parts import Part
from visattn.errors import OptionError, ShapeError

__all__ = ["Patches", "patching", "recovered_by_heads"]

_MUCH = 3.0  # share of the difference that a layer changes, above which the difference is too small to be told from other changes
_SAME = 1e-5  # difference between two scores, over the larger, below which there is nothing to recover


@dataclass(frozen=True, eq=False)
class Patches:
    """Results of attention of another photo, and the scores when they are put in.

    Attributes:
        donor: Recording of the other photo, with the results of attention.
        score: Score of the photo.
        of_donor: Score of the other photo.
        replaced: Function from parts of results of attention to the score of the photo with each of them replaced.
    """

    donor: Recording
    score: float
    of_donor: float
    replaced: Callable[[Sequence[Part]], Tensor]

    __repr__ = brief

    def recovered(self, parts: Sequence[Part]) -> Tensor:
        """Return the share of the difference between the scores that each part brings with it.

        Raises:
            OptionError: If the scores do not differ.
        """
        rise = self.of_donor - self.score
        if abs(rise) <= _SAME * max(abs(self.score), abs(self.of_donor)):
            raise OptionError(
                f"both photos have the score {self.score:.4g}, so there is no difference to recover. Choose another target."
            )
        return (self.replaced(parts) - self.score) / rise

    def of_layer(self, record: AttentionRecord) -> Part:
        """Return the result of a layer, of all heads and tokens, with that of the donor.

        Raises:
            OptionError: If the donor did not run this layer.
            ShapeError: If the donor has other tokens.
        """
        other = next((each for each in self.donor if (each.layer, each.call) == (record.layer, record.call)), None)
        if other is None or other.output is None:
            raise OptionError(f"{named(record.layer)} did not run for the other photo.")
        if other.queries != record.queries:
            raise ShapeError(
                f"{named(record.layer)} has other tokens for the other photo. Choose one that the model sees at the same size."
            )
        return Part(record.layer, record.call, other.output)


def patching(recording: Recording, patches: Patches, *, donor: Any | str, layer: int | str = "all") -> AttentionMap:  # noqa: ANN401
    """Give a patch what attention gave it for another photo: how much of the score's difference follows?

    Each cell is `(s' - s) / (s_donor - s)`: `s` and `s_donor` are the scores of the two photos, `s'` that of the photo when the result of
    the layer's attention for this token, of all heads, is that of the donor. 1: this alone gives the donor's score. 0: nothing changes.
    Negative: the score moves away. Shares need not sum to 1, since layers act on each other.

    Args:
        recording: Recording of the photo.
        patches: Results of the donor, and the model as a function from replaced parts to scores; `visattn.explain` makes them.
        donor: Photo whose activations are put in: `explain` reads it as it reads the image.
        layer: Index of a layer, its dotted name, or `all`.

    Returns:
        Map with the axis `batch` and, for all layers, `layer`; signed, a share of the difference between the scores.

    Raises:
        OptionError: If both photos have the same score, or the layer does not exist.
        ShapeError: If the donor has other tokens.

    Reference:
        Vig et al., "Investigating Gender Bias in Language Models Using Causal Mediation Analysis", NeurIPS 2020; Meng et al., "Locating and
        Editing Factual Associations in GPT", NeurIPS 2022, arXiv:2202.05262, section 2.1; normalized as in Heimersheim & Nanda, "How to Use
        and Interpret Activation Patching", 2024, arXiv:2404.15255. Differs: what is patched is the result of attention before its output
        projection, not the residual stream.
    """
    records = _chosen(recording, layer)
    layout, rows, numbers = records[0].queries, list[Tensor](), list[tuple[str, float]]()
    for record in records:
        whole = patches.of_layer(record)
        shares = patches.recovered([whole._replace(token=token) for token in range(len(layout))])
        rows.append(shares)
        numbers += [(f"{record.name}: {name}", float(share)) for name, share in zip(layout.prefix, shares, strict=False)]
        numbers.append((f"{record.name}: all tokens", float(patches.recovered([whole]))))
    values = torch.stack(rows).float()
    every = layer == "all"
    return to_map(
        recording,
        "patching",
        "recovered share of the score's difference",
        (values if every else values[0])[None],
        layout,
        {"donor": donor, "layer": "all" if every else records[0].name},
        axes=["layer"] if every else [],
        labels={"layer": tuple(record.name for record in records)} if every else {},
        signed=True,
        facts=MapFacts(numbers=tuple(numbers)),
        notes=_notes(patches, records, numbers, str(donor)),
        warnings=_warnings(patches, numbers),
    )


def recovered_by_heads(recording: Recording, patches: Patches) -> dict[tuple[str, int], float]:
    """Return the recovered share of each head, with all its tokens, by layer and number.

    Raises:
        OptionError: See `patching`.
        ShapeError: See `patching`.
    """
    parts: dict[tuple[str, int], Part] = {}
    for record in recording:
        if _refusal_of(record) is None:
            whole = patches.of_layer(record)
            parts |= {(record.name, head): whole._replace(head=head) for head in range(record.operator.shape[1])}
    shares = patches.recovered(list(parts.values()))
    return {head: float(share) for head, share in zip(parts, shares, strict=True)}


def _notes(patches: Patches, records: list[AttentionRecord], numbers: list[tuple[str, float]], donor: str) -> tuple[str, ...]:
    by_name = dict(numbers)
    whole = max(records, key=lambda record: abs(by_name[f"{record.name}: all tokens"]))
    return (
        f"the score is {patches.score:.4g}, that of {donor} {patches.of_donor:.4g}; cells are shares of the difference",
        f"of whole layers, {whole.name} changes the score most: {by_name[f'{whole.name}: all tokens']:+.2f} of the difference",
    )


def _warnings(patches: Patches, numbers: list[tuple[str, float]]) -> tuple[str, ...]:
    largest = max(abs(share) for _, share in numbers)
    if largest <= _MUCH:
        return ()
    return (
        f"the scores differ by {patches.of_donor - patches.score:.2g} only, and single layers change them by up to {largest:.0f} times as "
        "much; choose a target in which the photos differ",
    )


def _chosen(recording: Recording, layer: int | str) -> list[AttentionRecord]:
    records = [record for record in one_forward(recording) if _refusal_of(record) is None]
    if not records:
        raise OptionError(refusal(recording) or NOTHING)
    names = [record.name for record in records]
    if layer == "all":
        if any(record.queries != records[0].queries for record in records):
            raise OptionError(f"layers have different tokens. Choose one: {option('layer', names[-1])}.")
        return records
    number = names.index(layer) if layer in names else layer
    if not isinstance(number, int):
        raise OptionError(f"layer must be one of {', '.join(names)} or all, got {layer}.")
    if not -len(names) <= number < len(names):
        raise OptionError(f"layer must lie in [{-len(names)}, {len(names) - 1}], got {layer}.")
    return [records[number]]


def _refusal_of(record: AttentionRecord) -> str | None:
    """Return why results of this attention have no place on the image, or None if they have."""
    if record.kind in ("unplaced", "sampled", "channel") or not record.queries.grid:
        return record.reason or "its queries are no patches"
    return None


def refusal(recording: Recording) -> str | None:
    """Return why the method does not apply to a recording, or None if it does."""
    reasons = [(record.layer, _refusal_of(record)) for record in recording]
    if not reasons:
        return NOTHING
    if all(reason is not None for _, reason in reasons):
        layer, reason = reasons[0]
        return f"{named(layer)}: {reason}, so nothing of it has a place."
    return None


METHODS = {
    "patching": Method(function=patching, needs=needs("attention", "patch"), accepts=refusal, targeted=True),
}
