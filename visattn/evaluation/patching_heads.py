"""Activation patching of heads: how much of a difference between the scores of two photos each attention head brings with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from visattn._support.modes import in_own_modes
from visattn._support.options import with_options
from visattn._support.reprs import brief
from visattn._support.typed import typed
from visattn.core.images import image_facts
from visattn.core.methods.from_attention.patching import recovered_by_heads
from visattn.core.pipeline.answering import with_target
from visattn.core.pipeline.asking import asked_of, model_of
from visattn.core.pipeline.inputs import prepare_with, read
from visattn.core.pipeline.preprocessing import PreprocessingOptions
from visattn.core.pipeline.replacing import patching_from
from visattn.core.pipeline.targets import Of, TargetOptions
from visattn.core.provenance import Provenance

if TYPE_CHECKING:
    from visattn._support.tables import Row


@dataclass(frozen=True, eq=False)
class PatchedHeads:
    """What the score of a photo becomes when the output of one attention head is that of another photo.

    Attributes:
        shares: Recovered share of the difference between the scores, by layer and number of the head: 1 if the head alone gives the score
            of the other photo, 0 if it changes nothing.
        score: Score of the photo.
        of_donor: Score of the other photo.
        donor: Name of the other photo.
        provenance: Model, preprocessing and target.
    """

    shares: Mapping[tuple[str, int], float]
    score: float
    of_donor: float
    donor: str
    provenance: Provenance

    __repr__ = brief

    def rows(self) -> list[Row]:
        """Return a row for each head, in the order of the layers; `change` is in the units of the score."""
        rise = self.of_donor - self.score
        return [
            {"layer": layer, "head": head, "recovered": share, "change": share * rise}
            for (layer, head), share in self.shares.items()
        ]


@with_options(PreprocessingOptions, TargetOptions)
@typed(but=("weights",))
@in_own_modes
def patched_heads(
    model: nn.Module | str,
    image: Any,  # noqa: ANN401 - a source of `load_image`, a picture or an array
    donor: Any,  # noqa: ANN401
    *,
    target: Of = None,
    weights: str | os.PathLike[str] = "auto",
    seed: int = 0,
    device: str | torch.device = "cpu",
    **options: Any,  # noqa: ANN401 - of the target and the preprocessing
) -> PatchedHeads:
    """Replace the output of each attention head by its output for another photo, one head after the other.

    `visattn.methods.patching` does the same for each patch.

    Args:
        model: Name of a timm model, or a model.
        image: The photo, see `visattn.explain`.
        donor: The other photo.
        target: See `visattn.explain`.
        weights: See `visattn.load_model`; only if `model` is a name.
        seed: Seed of random weights.
        device: Device of a model that is given by name.
        options: Options of the target and of the preprocessing, see `visattn.explain`.

    Returns:
        The shares.

    Raises:
        OptionError: If both photos have the same score.
        ShapeError: If the donor has other tokens.
        VisattnError: Any error of `visattn.explain`.

    Reference:
        See `visattn.methods.patching`.
    """
    asked = asked_of("patching", target, {**options, "donor": donor}, seed)
    bare, notes = model_of(model, asked.how, weights=weights, seed=seed, device=device)
    photo = replace(prepare_with([read(image, asked.how)], bare, asked.how).with_notes(*notes), seed=seed)
    photo, completed = with_target(bare, photo, asked.question.target)
    with patching_from(bare, photo, donor, completed) as (patches, passed, name):
        shares = recovered_by_heads(passed.recording, patches)
    facts = image_facts(photo.photo)
    provenance = passed.recording.provenance.but(
        method="patched heads", parameters={"donor": name}, image=facts.name, image_sha256=facts.sha256
    )
    return PatchedHeads(shares, patches.score, patches.of_donor, name, photo.noted(provenance))
