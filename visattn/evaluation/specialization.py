"""Specialization of heads: does the attention of a patch follow its hue, its brightness, its row, an object, or its neighbors?

Every score has a null, computed in the same way: with the same attention and an image whose content lies elsewhere, or with the attention
of another patch. A head is called specialized only if its score exceeds what the null gives.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack, get_args

import numpy as np
import torch
from torch import Tensor, nn

from visattn._support.checks import as_list, one_each, one_of
from visattn._support.language import option
from visattn._support.modes import in_own_modes
from visattn._support.options import with_options
from visattn._support.progress import progress
from visattn._support.reprs import brief
from visattn._support.typed import typed
from visattn._support.types import Property
from visattn.core.images import image_facts
from visattn.core.pipeline.asking import model_of
from visattn.core.pipeline.inputs import prepare_with, read
from visattn.core.pipeline.passes import look
from visattn.core.pipeline.preprocessing import Preprocessing, PreprocessingOptions
from visattn.core.provenance import Provenance
from visattn.core.records import AttentionRecord, Recording
from visattn.errors import OptionError
from visattn.evaluation.given import MaskLike, as_mask
from visattn.evaluation.intervals import mean_interval
from visattn.evaluation.patches import CONTENTS, Patches, patches_by_layout

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from visattn._support.tables import Row

PROPERTIES: tuple[Property, ...] = get_args(Property)
NULL_DRAWS = 99  # of each null
_ROUNDED = 4e-6  # of the largest value: what a sum in single precision may be off

PropertyScores = dict[Property, tuple[Tensor, Tensor]]  # of every head of a layer: `(heads,)`, and `(draws, heads)` of the null


@dataclass(frozen=True, eq=False)
class HeadScores:
    """Scores of all heads of a model for one property.

    Attributes:
        name: The property.
        heads: Layer and number of each head.
        values: `(images, heads)`; NaN where an image has no such score, such as that of the hue of a gray image.
        nulls: `(draws, images, heads)` of the null.
        groups: Photo of each image: crops of one photo share a number. Intervals are over photos.
        provenance: Model, preprocessing and settings.
    """

    name: Property
    heads: tuple[tuple[str, int], ...]
    values: Tensor
    nulls: Tensor
    groups: tuple[int, ...]
    provenance: Provenance

    __repr__ = brief

    def rows(self) -> list[Row]:
        """Return a row for each head, those that exceed their null most first.

        `score` and `null` are means over photos; `low` and `high` bound the 95 % bootstrap interval of `score - null` over photos, or are
        None for one photo. `p` is the share of draws of the null, among all draws and the score itself, that reach the score.
        """
        of = torch.tensor(self.groups)
        photos = torch.unique(of).tolist()
        score = torch.stack([self.values[of == photo].nanmean(0) for photo in photos])  # (photos, heads)
        null = torch.stack([self.nulls[:, of == photo].nanmean(1) for photo in photos], 1)  # (draws, photos, heads)
        mean, means = score.nanmean(0), null.nanmean(1)
        reached = (1 + (means >= mean).sum(0)) / (1 + len(means))
        beyond = (score - null.mean(0))[score.isfinite().any(1)].numpy()
        low, high = mean_interval(beyond) if len(beyond) > 1 else (None, None)
        rows = [
            {
                "layer": layer,
                "head": head,
                "score": float(mean[i]),
                "null": float(means[:, i].mean()),
                "p": float(reached[i]) if bool(mean[i].isfinite()) else float("nan"),
                "low": None if low is None else float(low[i]),
                "high": None if high is None else float(high[i]),
            }
            for i, (layer, head) in enumerate(self.heads)
        ]
        return sorted(rows, key=lambda row: -(row["score"] - row["null"]) if np.isfinite(row["score"]) else np.inf)


@with_options(PreprocessingOptions)
@typed(but=("weights",))
@in_own_modes
def find_heads(
    model: nn.Module | str,
    images: Sequence[Any],
    name: Property,
    *,
    masks: Sequence[MaskLike] | None = None,
    groups: Sequence[int] | None = None,
    draws: int = NULL_DRAWS,
    weights: str | os.PathLike[str] = "auto",
    seed: int = 0,
    device: str | torch.device = "cpu",
    **options: Unpack[PreprocessingOptions],
) -> HeadScores:
    """Score every head of a model by one property of patches.

    With `A` the attention among patches, its rows divided by their sums, and `p` the property of each patch:

    - `hue`, `brightness`, `object`: the R^2 between `A p` and `p` over the queries of an image. Null: the same attention, with the image's
      content shifted by random numbers of rows and columns, around the edges. A head that attends nearby has a high R^2 with any smooth
      content, and so has its null.
    - `row`, `column`: the R^2 of the row less that of the column, or reversed: 1 for a head that attends along rows, 0 for one that attends
      nearby. Null: each query gets the attention of a random other one.
    - `neighbor`: the share of attention on the up to eight patches around the query. Null: as for `row`.

    Args:
        model: Name of a timm model, or a model.
        images: Images, see `visattn.explain`.
        name: The property.
        masks: For `object`: a mask of the photo's size for each image.
        groups: Photo of each image, if several are crops of one.
        draws: Number of draws of the null.
        weights: See `visattn.load_model`; only if `model` is a name.
        seed: Seed of random weights, and of the null.
        device: Device of a model that is given by name.
        options: See `visattn.Preprocessing`.

    Returns:
        The scores. `.rows()` ranks the heads.

    Raises:
        OptionError: If there are no images, masks are missing or do not fit, or the model has no self-attention over patches whose rows are
            distributions.
        VisattnError: Any error of `visattn.explain`.
    """
    one_of(name, PROPERTIES, "name")
    images = as_list(images)
    if not images:
        raise OptionError("no images were given. Pass a list of them.")
    if name == "object" and masks is None:
        raise OptionError("heads for objects need a mask for each image. Pass masks.")
    one_each(len(images), masks=masks, groups=groups)
    if draws < 1:
        raise OptionError(f"draws must be 1 or more, got {draws}.")
    how = Preprocessing(**options)
    model, notes = model_of(model, how, weights=weights, seed=seed, device=device)
    every: list[dict[tuple[str, int], tuple[Tensor, Tensor]]] = []
    names = []
    with progress("images", "image") as bar:
        for number, image in enumerate(images):
            prepared = prepare_with([read(image, how)], model, how).with_notes(*notes)
            recording = look(model, prepared, features="none")
            names.append(image_facts(prepared.photo).name)
            mask = None if masks is None else as_mask(masks[number])
            patches_on = patches_by_layout(prepared.photo, prepared.geometry, mask)
            found: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
            for record in over_patches(recording):
                scores = score_heads(record, patches_on(record.queries), (name,), draws=draws, seed=seed + number)[name]
                found |= {(record.name, head): (scores[0][head], scores[1][:, head]) for head in range(len(scores[0]))}
            if every and found.keys() != every[0].keys():
                raise OptionError(
                    f"{names[-1]}: has other layers or heads than {names[0]}. Pass {option('img_size')}, so that all are alike."
                )
            every.append(found)
            bar.update()
    heads = tuple(every[0])
    if not heads:
        raise OptionError("the model has no self-attention over patches whose rows are distributions.")
    values = torch.stack([torch.stack([found[head][0] for head in heads]) for found in every])
    nulls = torch.stack([torch.stack([found[head][1] for head in heads], 1) for found in every], 1)
    of = tuple(range(len(images)) if groups is None else map(int, groups))
    made = prepared.noted(recording.provenance).but(
        image=names[0] if len(names) == 1 else f"{len(names)} images",
        method="heads by a property of patches",
        parameters={"property": name, "draws": draws, "seed": seed},
        notes=(f"p of {len(heads)} heads, each on its own",),
        warnings=("one photo says little about these heads",) if len(set(of)) == 1 else (),
    )
    return HeadScores(name, heads, values, nulls, of, made)


def over_patches(recording: Recording) -> Iterator[AttentionRecord]:
    """Yield the calls of self-attention over patches whose rows are distributions."""
    for record in recording:
        on_grid = len(record.queries.grid) == 2 and record.queries == record.keys and not record.queries.holes
        if record.kind == "self" and on_grid and record.probability:
            yield record


def score_heads(
    record: AttentionRecord, patches: Patches, names: Sequence[Property] = PROPERTIES, *, draws: int = NULL_DRAWS, seed: int = 0
) -> PropertyScores:
    """Score the heads of one call for an image, see `find_heads`.

    Args:
        record: Self-attention over patches of one image.
        patches: Properties of the patches.
        names: Properties; `object` is left out without a mask.
        draws: Number of draws of each null.
        seed: Seed of the nulls.

    Returns:
        The scores of each property.
    """
    first = len(record.queries.prefix)
    weights = record.operator.dense()[0, :, first:, first:].cpu()
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    rows, columns = record.queries.grid
    random = np.random.default_rng(seed)
    shifts = [_shift(random, rows, columns) for _ in range(draws)]
    others = torch.from_numpy(np.stack([random.permutation(rows * columns) for _ in range(draws)]))
    content = patches.content()
    found: PropertyScores = {}
    for name in names:
        if name in CONTENTS:
            if name in content:
                found[name] = _of_content(weights, content[name], shifts)
        elif name == "neighbor":
            found[name] = _of_neighbors(weights, rows, columns, others)
        else:
            found[name] = _of_lines(weights, rows, columns, others, along=name)
    return found


def _of_content(weights: Tensor, values: Tensor, shifts: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    every = torch.stack([values, *(values.roll(shift, (0, 1)) for shift in shifts)]).flatten(1)  # (1 + draws, patches)
    parts = torch.cat([every.real, every.imag]) if every.is_complex() else every
    seen = (weights @ parts.T.to(weights.dtype)).double()  # (heads, patches, ...)
    seen = torch.complex(*seen.chunk(2, -1)) if every.is_complex() else seen
    found = _r2(seen.transpose(1, 2), every)  # (heads, 1 + draws)
    return found[:, 0], found[:, 1:].T


def _of_lines(weights: Tensor, rows: int, columns: int, others: Tensor, *, along: Property) -> tuple[Tensor, Tensor]:
    cell = torch.arange(rows * columns)
    lines = [(cell // columns).to(weights.dtype), (cell % columns).to(weights.dtype)]
    own, other = lines if along == "row" else lines[::-1]
    orders = torch.cat([cell[None], others])  # the attention of the query itself, then that of others
    first, second = (_r2((weights @ line).double()[:, orders], line.double()) for line in (own, other))
    found = first - second  # (heads, 1 + draws)
    return found[:, 0], found[:, 1:].T


def _of_neighbors(weights: Tensor, rows: int, columns: int, others: Tensor) -> tuple[Tensor, Tensor]:
    near = torch.from_numpy(_adjacent(rows, columns)).to(weights.dtype)
    given = weights @ near  # (heads, queries, patches): attention of a query on the neighbors of a patch
    at = torch.arange(rows * columns)
    return given[:, at, at].double().mean(1), torch.stack([given[:, order, at].double().mean(1) for order in others])


def _r2(seen: Tensor, own: Tensor) -> Tensor:
    """Return the squared correlation over the last axis; NaN where the property does not vary, 0 where what is seen does not."""
    (seen, seen_varies), (own, own_varies) = (_centered(each) for each in (seen, own))
    both = (seen * own.conj()).sum(-1).abs().square()
    product = seen.abs().square().sum(-1) * own.abs().square().sum(-1)
    found = torch.where(seen_varies & own_varies, both / product.clamp_min(torch.finfo(product.dtype).tiny), 0.0)
    return torch.where(own_varies, found, torch.nan)


def _centered(values: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract the mean over the last axis; return also whether the values vary there by more than single precision rounds."""
    apart = values - values.mean(-1, keepdim=True)
    most = values.abs().amax(-1)
    return apart, apart.abs().amax(-1) > _ROUNDED * most


def _adjacent(rows: int, columns: int) -> NDArray[np.bool_]:
    """Return which patches touch, at a side or a corner."""
    cell = np.arange(rows * columns)
    apart = [np.abs(np.subtract.outer(line, line)) for line in (cell // columns, cell % columns)]
    touching: NDArray[np.bool_] = np.maximum(*apart) == 1
    return touching


def _shift(random: np.random.Generator, rows: int, columns: int) -> tuple[int, int]:
    """Draw a shift that is not none."""
    number = int(random.integers(1, rows * columns)) if rows * columns > 1 else 0
    return number // columns, number % columns
