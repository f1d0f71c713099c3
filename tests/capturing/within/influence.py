"""Dense oracle: how much each key vector depends on each patch of each input.

It only runs the program, outside of any capture, on inputs of which some patches have other content. It shares no code with the
library.

First the patches are lit by their binary digits: all patches whose digit is 1, then all whose digit is 0. If each key changes in
exactly one of both for each digit, each key depends on exactly one patch, because all patches on which it depends have the same
digits. Otherwise each patch is lit alone, all by the same pattern, so that equal weights give equal influences. It is lit weakly, once with
the pattern and once with its negative, and the smaller change counts, so that orders that are computed from the tokens count as they
are; only if nothing changes then, or if the number of keys changes, it is lit strongly. Kernels that take maxima are shown by very
strong light: then each patch under the kernel has a share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tests.capturing.moving import GRID, PATCH
from tests.capturing.within.model import TOKENS, Mover, Program, made, quietly

FAINT = 1e-4  # changes below this part of the largest change are rounding errors
WEAK, MIDDLE, STRONG, GLARING = 1e-3, 0.1, 1.0, 30.0  # strengths of the light; pixels have a standard deviation of 1


class Place(NamedTuple):
    """One source: a patch (or a vector) of one input of one image of the batch."""

    input: int
    image: int
    patch: int  # -1 for a vector


class Influence(NamedTuple):
    """Influence of each source on each key.

    Attributes:
        keys: Key vectors without a change, `(B, N, C)`.
        places: The sources.
        amount: `(B * N, sources)`, not negative; rounding errors are 0.
        own: Influences of the patches of the images alone, as 0 and 1, if each key depends on one of them or on none, however
            strongly they change; otherwise None.
    """

    keys: Tensor
    places: list[Place]
    amount: Tensor
    own: Tensor | None
    images: tuple[bool, ...] = (True,)


def places_of(sorts: Sequence[str], batch: int) -> list[Place]:
    return [
        Place(number, image, patch)
        for number, sort in enumerate(sorts)
        for image in range(batch)
        for patch in ([-1] if sort == "vector" else range(TOKENS))
    ]


def _lit(inputs: list[Tensor], others: list[Tensor], places: Sequence[Place], strength: float) -> list[Tensor]:
    """Return inputs that have the content of others at some places."""
    masks = [torch.zeros(len(x), *(GRID if x.ndim == 4 else x.shape[1:2] if x.ndim == 3 else ())) for x in inputs]
    for number, image, patch in places:
        masks[number].view(len(inputs[number]), -1)[image, max(patch, 0)] = strength
    out = []
    for x, y, mask in zip(inputs, others, masks, strict=True):
        pixels = mask.repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)[:, None] if x.ndim == 4 else mask[..., None]
        out.append(torch.where(pixels != 0, x + pixels * (y - x), x))
    return out


def _digits(count: int) -> list[list[int]]:
    """Return pairs of complementary sets of numbers below `count`: for each binary digit, those that have it and the rest."""
    digits = range(max(1, math.ceil(math.log2(count))))
    return [[i for i in range(count) if (i >> digit & 1) == one] for digit in digits for one in (1, 0)]


def _pattern(x: Tensor) -> Tensor:
    """Return the same random pattern for each place of an input."""
    draw = torch.Generator().manual_seed(77)
    if x.ndim == 4:
        return torch.randn(1, x.shape[1], PATCH, PATCH, generator=draw).repeat(1, 1, *GRID)
    return torch.randn(x.shape[-1], generator=draw)


@cache
def _inputs(sorts: tuple[str, ...], batch: int, seed: int, strength: float) -> list[list[Tensor]]:
    """Return the inputs without light, then with light on each place, or on the places of each binary digit for a strength of 0.

    The image is given as its embedding, because all programs begin with it: a patch of the image changes one token of it.
    """
    inputs = [made(sort, seed, batch) for sort in sorts]
    places = places_of(sorts, batch)
    if strength:
        others, sets = [x + _pattern(x) for x in inputs], [[place] for place in places]
    else:
        images = [place for place in places if place.input == 0]
        others = [1.5 * made(sort, 77 + seed, batch) for sort in sorts]
        sets = [[images[i] for i in chosen] for chosen in _digits(len(images))]
    lit = [inputs, *(_lit(inputs, others, chosen, strength or 1.0) for chosen in sets)]
    embed = Mover(Program("", "", lambda _, t: t)).maps
    with torch.no_grad():
        maps = embed(torch.cat([x for x, *_ in lit])).unflatten(0, (-1, batch)).contiguous()
    return [[first, *rest] for first, (_, *rest) in zip(maps, lit, strict=True)]


def _changes(model: Mover, sets: list[list[Tensor]]) -> tuple[Tensor, Tensor | None]:
    """Return the keys for the first inputs, and how much each key changes for each of the others, `(B * N, sets)`.

    None if the number of keys changes, or if they are infinite.
    """

    def keys(inputs: list[Tensor]) -> Tensor:
        return quietly(model.moved, *(x.clone() for x in inputs)).double()

    before, after = keys(sets[0]), []
    for inputs in sets[1:]:
        after.append(keys(inputs))
        if after[-1].shape != before.shape:
            return before, None
    changes = (torch.stack(after) - before).flatten(1, 2).norm(dim=2).T
    return before, changes if bool(changes.isfinite().all()) else None


def influence(model: Mover, seed: int, strength: float = WEAK) -> Influence | None:
    """Measure all influences; None if lighting changes the number of keys, or makes them infinite, or changes nothing."""
    program = model.program[0]
    sorts = ("image", *program.others)
    places, images = places_of(sorts, program.batch), tuple(sort in ("image", "view", "depth") for sort in sorts)
    before, changes = _changes(model, _inputs(sorts, program.batch, seed, 0.0))
    own = None if changes is None else _by_digits(changes, program.batch * TOKENS)
    if own is not None and len(sorts) == 1:
        return Influence(before, places, own, own)
    for light in (GLARING,) if program.resamples else (strength, STRONG):
        changes = _changes(model, _inputs(sorts, program.batch, seed, light))[1]
        negative = _changes(model, _inputs(sorts, program.batch, seed, -light))[1]
        if changes is not None and negative is not None:
            amount = changes + negative if program.resamples else torch.minimum(changes, negative)
            if bool((amount > 0).any()):
                return Influence(before, places, amount.where(amount > FAINT * amount.max(), 0), own, images)
    return None


def _by_digits(changes: Tensor, count: int) -> Tensor | None:
    """Return the influences if each key depends on at most one source; None if it depends on several, or on one only sometimes."""
    met = changes > FAINT * changes.max()
    ones, zeros = met[:, ::2], met[:, 1::2]
    if bool((ones & zeros).any()) or not bool((changes > 0).any()):
        return None
    alive = (ones | zeros).all(1)
    codes = (ones * 2 ** torch.arange(ones.shape[1])).sum(1)
    if bool((alive != (ones | zeros).any(1)).any()) or bool((codes[alive] >= count).any()):
        return None
    amount = torch.zeros(len(codes), count, dtype=torch.float64)
    amount[alive, codes[alive]] = 1
    return amount


def bijective(one: Influence, other: Influence) -> bool:
    """Check whether each key depends on one patch of its own image or on none, on different ones, equally for both seeds.

    Further inputs must have the same influence on all keys, see `alike`.
    """
    if one.own is None or other.own is None or one.own.shape != other.own.shape or not bool((one.own == other.own).all()):
        return False
    rows, columns = one.own.nonzero(as_tuple=True)
    if bool((one.own.sum(0) > 1).any()) or len(rows) < 2:
        return False
    count = one.keys.shape[1]
    inputs = {place.input for place in one.places} - {0}
    return all(
        one.places[column].image == row // count for row, column in zip(rows.tolist(), columns.tolist(), strict=True)
    ) and all(alike(found, number) for found in (one, other) for number in inputs)


def alike(found: Influence, number: int) -> bool:
    """Check whether an input has the same influence on all keys, up to their size: shares of its patches overlap by a third."""
    columns = [i for i, place in enumerate(found.places) if place.input == number]
    amount = found.amount[:, columns]
    met = amount[amount.sum(1) > 0]
    shares = met / met.sum(1, keepdim=True)
    return len(met) == 0 or bool((torch.minimum(shares, shares.mean(0)).sum(1) > 1 / 3).all())
