"""Effects of attention heads on a score: what each adds directly, and what the score loses without it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from visattn._support.checks import as_list
from visattn._support.modes import in_own_modes
from visattn._support.options import with_options
from visattn._support.reprs import brief
from visattn._support.typed import typed
from visattn.core.images import image_facts
from visattn.core.methods.from_attention.contributions import Contribution, listed, parts_of
from visattn.core.pipeline.answering import with_target
from visattn.core.pipeline.asking import asked_of, model_of
from visattn.core.pipeline.inputs import Prepared, prepare_with, read
from visattn.core.pipeline.passes import Pass, one_pass
from visattn.core.pipeline.preprocessing import PreprocessingOptions
from visattn.core.pipeline.replacing import replacing, results_of
from visattn.core.pipeline.targets import Of, Target, TargetOptions
from visattn.core.provenance import Provenance
from visattn.core.records.parts import Part
from visattn.errors import OptionError
from visattn.evaluation.intervals import mean_interval

if TYPE_CHECKING:
    from visattn._support.tables import Row

_SMALL = 0.01  # of the largest effect: smaller ones have no sign


@dataclass(frozen=True, eq=False)
class HeadEffects:
    """Effects of all attention heads that a score depends on directly.

    Attributes:
        heads: Layer and number of each head.
        direct: `(photos, heads)` direct contribution of each head, through all tokens, without biases.
        patches: `(photos, heads)` the part of it through patches.
        zeroed: `(photos, heads)` score less the score when the head's output is zero.
        averaged: `(photos, heads)` score less the score when the head's output is its mean over the photos, token by token; None for
            one photo.
        others: Name and `(photos,)` of each term that is no head: MLPs, embedding and biases.
        scores: `(photos,)` the scores.
        provenance: Model, preprocessing and target.
    """

    heads: tuple[tuple[str, int], ...]
    direct: Tensor
    patches: Tensor
    zeroed: Tensor
    averaged: Tensor | None
    others: tuple[tuple[str, Tensor], ...]
    scores: Tensor
    provenance: Provenance

    __repr__ = brief

    def rows(self) -> list[Row]:
        """Return a row for each head and other term, in the order of the layers.

        Numbers are means over photos, in the units of the score; `low` and `high` bound the 95 % bootstrap interval of the direct
        contribution over photos, and `varies` is its standard deviation over photos, all that is left of it when the mean over photos is
        the baseline. They are None for one photo. `opposite` is true for heads whose direct contribution and whose loss without them have
        different signs (for several photos: both intervals lie apart from zero): later layers make up for them.
        """
        rows = [self._row(number) for number in range(len(self.heads))]
        more = [
            dict.fromkeys(rows[0]) | {"layer": name, "direct": float(share.mean()), **self._spread(share[:, None], 0)}
            for name, share in self.others
        ]
        return [*rows, *more]

    def _row(self, number: int) -> Row:
        layer, head = self.heads[number]
        return {
            "layer": layer,
            "head": head,
            "direct": float(self.direct[:, number].mean()),
            **self._spread(self.direct, number),
            "through_patches": float(self.patches[:, number].mean()),
            "loss_if_zero": float(self.zeroed[:, number].mean()),
            "loss_if_mean": None if self.averaged is None else float(self.averaged[:, number].mean()),
            "opposite": self._is_opposite(number),
        }

    def _spread(self, values: Tensor, number: int) -> Row:
        if len(values) < 2:
            return {"low": None, "high": None, "varies": None}
        low, high = mean_interval(values[:, number].numpy())
        return {"low": float(low), "high": float(high), "varies": float(values[:, number].std())}

    def _is_opposite(self, number: int) -> bool:
        direct, loss = self.direct[:, number], self.zeroed[:, number]
        if float(direct.mean()) * float(loss.mean()) >= 0:
            return False
        if len(direct) < 2:
            return bool(direct.abs() > _SMALL * self.direct.abs().max()) and bool(loss.abs() > _SMALL * self.zeroed.abs().max())
        ends = [float(end) for values in (direct, loss) for end in mean_interval(values.numpy())]
        return ends[0] * ends[1] > 0 and ends[2] * ends[3] > 0


@with_options(PreprocessingOptions, TargetOptions)
@typed(but=("weights",))
@in_own_modes
def head_effects(
    model: nn.Module | str,
    images: Sequence[Any],
    *,
    target: Of = None,
    weights: str | os.PathLike[str] = "auto",
    seed: int = 0,
    device: str | torch.device = "cpu",
    **options: Any,  # noqa: ANN401 - of the target and the preprocessing
) -> HeadEffects:
    """Measure the effect of every attention head on a score, over one or more photos.

    A direct contribution is what the head itself adds to the score, see `visattn.methods.contributions`. The loss without a head also
    counts what later layers make of its output. For each layer and photo the model sees copies of the photo, with one head left out in
    each, and once more with mean outputs if there are several photos.

    Args:
        model: Name of a timm model, or a model.
        images: Images, see `visattn.explain`.
        target: See `visattn.explain`; for several photos a class that is the same for all, if the means are to mean something.
        weights: See `visattn.load_model`; only if `model` is a name.
        seed: Seed of random weights.
        device: Device of a model that is given by name.
        options: Options of the target and of the preprocessing, see `visattn.explain`.

    Returns:
        The effects.

    Raises:
        OptionError: If the score is not a sum of direct contributions, or photos differ in their layers or tokens.
        VisattnError: Any error of `visattn.explain`.

    Reference:
        Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021; for heads that others make up for, McGrath et al., "The
        Hydra Effect", 2023, arXiv:2307.15771.
    """
    asked = asked_of("contributions", target, options, seed)
    bare, notes = model_of(model, asked.how, weights=weights, seed=seed, device=device)
    photos = [prepare_with([read(image, asked.how)], bare, asked.how).with_notes(*notes) for image in as_list(images)]
    photos = [replace(photo, seed=seed) for photo in photos]
    found = [_of_photo(bare, photo, asked.question.target) for photo in photos]
    first = found[0]
    if any(one.heads != first.heads for one in found):
        raise OptionError(
            "the photos differ in the layers that the score depends on. Pass photos that the model sees at one size."
        )
    means = _means(bare, photos, first.layers) if len(found) > 1 else {}
    zeroed = [_losses(bare, one, {}) for one in found]
    averaged = [_losses(bare, one, means) for one in found] if means else None
    names = [name for name, _ in first.others]
    return HeadEffects(
        first.heads,
        torch.stack([one.direct for one in found]),
        torch.stack([one.patches for one in found]),
        torch.stack(zeroed),
        None if averaged is None else torch.stack(averaged),
        tuple((name, torch.tensor([dict(one.others).get(name, 0.0) for one in found])) for name in names),
        torch.tensor([one.score for one in found]),
        first.provenance.but(method="head effects", parameters={"photos": len(found)}),
    )


@dataclass(frozen=True, eq=False)
class _OfPhoto:
    """Direct contributions of the heads to the score of one photo, and what is needed to run the model again."""

    prepared: Prepared
    passed: Pass
    parts: list[Contribution]
    others: list[tuple[str, float]]
    score: float
    provenance: Provenance

    @property
    def layers(self) -> list[tuple[str, int]]:
        return [(part.layer, len(part.patches)) for part in self.parts]

    @property
    def heads(self) -> tuple[tuple[str, int], ...]:
        return tuple((layer, head) for layer, heads in self.layers for head in range(heads))

    @property
    def direct(self) -> Tensor:
        return torch.cat([part.heads for part in self.parts])

    @property
    def patches(self) -> Tensor:
        return torch.cat([part.patches.sum(1) for part in self.parts])


def _of_photo(model: nn.Module, photo: Prepared, target: Target) -> _OfPhoto:
    prepared, completed = with_target(model, photo, target)
    passed = one_pass(model, prepared, target=completed, terms=True)
    terms, parts = parts_of(passed.recording)
    through_heads = {f"{part.layer}: {name}" for part in parts for name in ("patches", "padding", *part.names)}
    others = [(name, share) for name, share in listed(terms, parts) if name not in through_heads]
    facts = image_facts(prepared.photo)
    provenance = passed.recording.provenance.but(image=facts.name, image_sha256=facts.sha256)
    assert terms.score is not None  # noqa: S101 - `parts_of` has checked it
    return _OfPhoto(prepared, passed, parts, others, terms.score, prepared.noted(provenance))


def _means(model: nn.Module, photos: Sequence[Prepared], layers: Sequence[tuple[str, int]]) -> dict[str, Tensor]:
    """Return the mean output of each head over photos, by layer, `(1, heads, [blocks,] q, d)`."""
    totals: dict[str, Tensor] = {}
    for photo in photos:
        recording, _ = results_of(model, photo)
        for record in recording:
            if record.name in dict(layers) and record.output is not None:
                totals[record.name] = totals.get(record.name, torch.zeros(())) + record.output / len(photos)
    return totals


def _losses(model: nn.Module, one: _OfPhoto, means: dict[str, Tensor]) -> Tensor:
    """Return the score less that without each head, or with its mean output, `(heads,)`."""
    resolved = one.passed.resolved
    assert resolved is not None  # noqa: S101 - there is a target
    parts = list[Part]()
    for layer, heads in one.layers:
        name, _, call = layer.partition(" #")
        parts += [Part(name, int(call or 0), means.get(layer), head=head) for head in range(heads)]
    with replacing(model, one.prepared, resolved.score, one.passed.output) as replaced:
        return one.score - replaced(parts)
