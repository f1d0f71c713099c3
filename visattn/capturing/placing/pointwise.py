"""Rule for elementwise operations: where operands that meet come from different places, the result is placed only if that is proven."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visattn.capturing.placing.moves import numbered
from visattn.capturing.placing.nodes import Node
from visattn.capturing.placing.places import LOST, Places, later
from visattn.capturing.placing.work import Result, Unproven, Work
from visattn.capturing.tokens.codes import equal, same_along
from visattn.capturing.tokens.planes import Planes, compact

_ADDING = frozenset({"add", "sub", "rsub", "subtract"})
_CHOOSING = {"where": "condition", "masked_fill": "mask"}  # arguments that only choose between others


def combined(work: Work) -> Result:
    """Return the places of an elementwise result, each operand broadcast.

    Operands from parameters, and numbers, keep places. Two placed operands must agree, or one must be a coarser cell with one value for
    all finer cells in it, such as a gate, or a token that lies nowhere, such as a class token. One cell that all others meet is a second
    place for each of them. Operands that are lost or foreign must be the same at all positions.

    Raises:
        Unproven: If they come from different places.
    """
    operands = _operands(work)
    counted = [(node, places) for node, places in operands if work.counts(places)]
    if not counted:  # only a condition comes from the image
        raise Unproven(work.name)
    meeting, (first, best) = _Meeting(work), counted[0]
    wide = _wide(best, work.shape)
    for node, places in counted[1:]:
        met = meeting.of(wide, first, _wide(places, work.shape), node)
        first, wide = first if met.codes is wide.codes else node, met
    wide = _as_scores(meeting, operands, counted, wide)
    for node, places in operands if wide.columns is None else ():  # a score belongs to its pair, whatever its value is
        strange = places.kind == "lost" or (places.kind == "foreign" and not places.positions) or places.summed
        own = places.kind == "foreign" and places.located and equal(places.codes.expand(work.shape), wide.codes)
        common = places.kind != "lost" and meeting.uniform(node, wide)  # what is lost may be one token
        if strange and not own and not work.counts(places) and not common:
            raise Unproven(places.name or work.name)
    if work.sets:
        return [wide if out.shape == wide.shape else work.unknown(out.shape) for out in work.outs]
    if len(operands) > 2 and _weighs_common(meeting, operands, wide):
        raise Unproven(work.name)
    weighted = wide.weighted or _weights_cells(work, meeting, wide)
    wide = wide._replace(copies=_copies(work, wide, counted), others=_others(counted, work.shape), weighted=weighted)
    if wide.parts is not None and any(_tells_apart(work, node, wide) for node, _ in operands):
        wide = wide._replace(parts=None)
    return [wide if out.shape == wide.shape else work.unknown(out.shape) for out in work.outs]


def _as_scores(
    meeting: _Meeting, operands: Sequence[tuple[Node, Places]], counted: Sequence[tuple[Node, Places]], wide: Places
) -> Places:
    """Return products with members of a set as scores, and as no tokens, if they meet a number of unknown origin, the same for all."""
    others = _others(counted, wide.shape)
    lost = [node for node, places in operands if places.kind == "lost"]
    if others is None or wide.columns is not None or not lost:
        return wide
    scores = wide._replace(columns=others)
    return scores if all(meeting.uniform(node, scores) for node in lost) else wide


def _operands(work: Work) -> list[tuple[Node, Places]]:
    skipped = work.get(_CHOOSING.get(work.name, ""))
    every = [(node, work.places(node)) for node in work.nodes()]
    others = [one for one in every if one[0] is not skipped]
    return (
        others if work.sets or any(work.counts(places) for _, places in others) else every
    )  # constants lie where their condition does


def _weighs_common(meeting: _Meeting, operands: Sequence[tuple[Node, Places]], wide: Places) -> bool:
    """Check whether an operand that differs between positions may weight another one that several positions have in common."""
    common = any(
        places.kind in ("lost", "foreign") or (places.placed and not _meets_itself(places, wide)) for _, places in operands
    )
    return common and any(places.kind == "learned" and not meeting.uniform(node, wide) for node, places in operands)


def _weights_cells(work: Work, meeting: _Meeting, wide: Places) -> bool:
    """Check whether cells are multiplied by, or chosen by, numbers of their own that do not come from the image."""
    if work.name in _ADDING or wide.columns is not None:
        return False
    return any(not work.places(node).placed and not meeting.uniform(node, wide) for node in work.nodes())


def _meets_itself(places: Places, wide: Places) -> bool:
    return equal(places.codes.expand(wide.shape), wide.codes)


def _tells_apart(work: Work, node: Node, merged: Places) -> bool:
    """Check whether an operand differs between cells that were merged into one."""
    parts, ndim = merged.parts, merged.codes.ndim
    if parts is None or parts.shape != merged.shape:
        return parts is not None
    return any(
        work.varies(node, dim, ndim) and cells_vary(work.planes, parts, dim) and not cells_vary(work.planes, merged.codes, dim)
        for dim in range(ndim)
    )


def _wide(places: Places, shape: torch.Size) -> Places:
    wide = places._replace(others=None).each(lambda codes: codes.expand(shape))
    assert wide is not None  # noqa: S101 - operands broadcast
    return wide._replace(parts=places.parts)


def _others(counted: Sequence[tuple[Node, Places]], shape: torch.Size) -> Tensor | None:
    return next((places.others for _, places in counted if places.others is not None and places.others.shape == shape), None)


def _copies(work: Work, wide: Places, counted: Sequence[tuple[Node, Places]]) -> Tensor | None:
    """Number the copies along axes that broadcasting has added to all operands from the image."""
    if wide.columns is not None:
        return None
    same = [places for _, places in counted if places.copies is None]
    copies = None if same and wide.copies is not None and len(counted) > 1 else wide.copies
    grown = [
        axis
        for axis, size in enumerate(work.shape)
        if size > 1 and all(_grew(work.facts(node).shape, axis, len(work.shape)) for node, _ in counted)
    ]
    return numbered(copies, work.shape, grown, work.device) if grown else copies


def _grew(shape: Sequence[int], axis: int, ndim: int) -> bool:
    own = axis - (ndim - len(shape))
    return own < 0 or shape[own] == 1


class _Meeting:
    """Operands that meet elementwise."""

    def __init__(self, work: Work) -> None:
        self._work, self._planes = work, work.planes

    def of(self, a: Places, first: Node, b: Places, second: Node) -> Places:
        """Return the places of two operands that meet.

        Raises:
            Unproven: If they come from different places.
        """
        best = self._finer(a, first, b, second)
        if a.same(b):
            mixture, leaning = a.mixture or b.mixture, a.leaning or b.leaning
            best = best._replace(mixture=mixture, leaning=leaning, crossed=a.crossed and b.crossed)
        return best._replace(behind=later(a.behind, b.behind))

    def uniform(self, node: Node, best: Places, own: Places | None = None) -> bool:
        """Check whether an operand is the same at all positions of an image, those of another operand and its own."""
        ndim = best.codes.ndim
        parts = [part for part in (best.codes, best.columns, None if own is None else own.codes) if part is not None]
        return all(
            not self._work.varies(node, dim, ndim) or not any(cells_vary(self._planes, part, dim) for part in parts)
            for dim in range(ndim)
        )

    def _finer(self, a: Places, first: Node, b: Places, second: Node) -> Places:
        if (a.columns is None) != (b.columns is None):
            pair, single, node = (b, a, first) if a.columns is None else (a, b, second)
            fits = any(part is not None and within(self._planes, part, single.codes) for part in (pair.codes, pair.columns))
            if fits or self.uniform(node, pair):
                return pair
            raise Unproven(self._work.name)
        if a.same(b):
            return a
        if a.columns is not None:
            raise Unproven(self._work.name)
        if self._work.sets:
            return self._of_sets(a, b)
        if self._planes.images > 1:
            a, b = (x._replace(codes=self._planes.met(x.codes, y.codes)) for x, y in ((a, b), (b, a)))
            if a.same(b):
                return a
        even = [self.uniform(second, a, b), self.uniform(first, b, a)]
        if all(even):  # one token each: neither is what all positions have in common, unless it holds the other's cell
            fine, coarse = (a, b) if _cells(self._planes, a.codes) > _cells(self._planes, b.codes) else (b, a)
            if coarse.leaning or not within(self._planes, fine.codes, coarse.codes):
                raise Unproven(self._work.name)
            return fine
        if any(even):  # what all positions have in common, unless it is one place among them
            keeping, common = (a, b) if even[0] else (b, a)
            if common.leaning or not within(self._planes, keeping.codes, common.codes):
                raise Unproven(self._work.name)
            return keeping
        a, b = self._specials(a, b)
        if a.same(b):
            return a
        crossing = None if a.leaning or b.leaning else self._crossing(a, b)
        if crossing is not None:
            return crossing
        cells = [_cells(self._planes, x.codes) for x in (a, b)]
        if cells[0] == cells[1]:
            chosen = evener(self._planes, a, b)
            if chosen is None:
                raise Unproven(self._work.name)
            return chosen
        fine, coarse, node = (a, b, second) if cells[0] > cells[1] else (b, a, first)
        back = coarse.parts is not None and coarse.parts.shape == fine.codes.shape and equal(coarse.parts, fine.codes)
        if coarse.leaning or not (
            back or (within(self._planes, fine.codes, coarse.codes) and self._distinct(fine, coarse, node))
        ):
            raise Unproven(self._work.name)
        return coarse if self._one_each(fine, coarse) else fine

    def _one_each(self, fine: Places, coarse: Places) -> bool:
        """Check whether each coarser cell meets one finer cell of several in it, and no two meet the same: it is still a coarser cell."""
        both = pairs(fine.codes, coarse.codes)
        fewer = len(both) < _cells(self._planes, fine.codes) * len(torch.unique(self._planes.images_of(both[:, 0])))
        return 1 < len(both) == len(torch.unique(both[:, 0])) == len(torch.unique(both[:, 1])) and fewer

    def _crossing(self, a: Places, b: Places) -> Places | None:
        """Return the cells in which rows and columns of one box cross; None if the operands are not rows and columns."""
        met = [self._planes.of(compact(x.codes)) for x in (a, b)]
        if any(len(planes) != 1 or len(planes[0].grid) != 2 for planes in met):
            return None
        (first,), (second,) = met
        if first.box != second.box or min(first.cells, second.cells) < 2:
            return None
        if first.grid[0] == second.grid[1] == 1:
            return self._crossing(b, a)
        if first.grid[1] != 1 or second.grid[0] != 1:
            return None
        rows, columns = torch.broadcast_tensors(compact(a.codes), compact(b.codes))  # type: ignore[no-untyped-call]
        (image, row), (other, column) = self._planes.split(rows, first), self._planes.split(columns, second)
        if bool((image != other).any()) or bool((rows < 0).any()) or bool((columns < 0).any()):
            return None
        plane = self._planes.grid(first.grid[0], second.grid[1], first.box)
        codes = (plane.base + image * plane.cells + row * plane.columns + column).to(torch.int32)
        return a._replace(codes=codes.expand(a.shape), crossed=True, copies=None)

    def _distinct(self, fine: Places, coarse: Places, node: Node) -> bool:
        """Check that each coarser cell has one value for all finer cells in it: it is one element, or copies of one."""
        ndim = fine.codes.ndim
        axes = [dim for dim in range(ndim) if cells_vary(self._planes, fine.codes, dim) and self._work.varies(node, dim, ndim)]
        if any(same_along(coarse.codes, dim) for dim in axes):
            return False
        if coarse.copies is not None:
            return True
        stored = coarse.codes
        for dim in range(ndim):
            stored = stored if dim in axes or cells_vary(self._planes, stored, dim) else stored.narrow(dim, 0, 1)
        real = stored[stored >= 0]
        return len(torch.unique(real)) == len(real)

    def _specials(self, a: Places, b: Places) -> tuple[Places, Places]:
        """Return both with each other's codes where one is a constant; elements that are lost or foreign in one are lost in both."""
        first, second = a.codes, b.codes
        if not bool((first < 0).any()) and not bool((second < 0).any()):
            return a, b
        one = torch.where((first < 0) & (first > -3), second, first)
        two = torch.where((second < 0) & (second > -3), first, second)
        gone = (one < -2) | (two < -2)
        one, two = (codes.masked_fill(gone, LOST) for codes in (one, two))
        return a._replace(codes=one), b._replace(codes=two)

    def _of_sets(self, a: Places, b: Places) -> Places:
        """Choose between two sets whose members meet: words before learned tokens, tokens of an image before others."""
        first, second = (b, a) if self._rank(b) > self._rank(a) else (a, b)
        axes = range(first.codes.ndim - 1)
        if any(same_along(first.codes, dim) and not same_along(second.codes, dim) for dim in axes):
            raise Unproven(self._work.name)
        one_set = self._planes.of(first.codes) == self._planes.of(second.codes)
        if one_set and not any(same_along(second.codes, dim) and not same_along(first.codes, dim) for dim in axes):
            raise Unproven(self._work.name)  # other members of the same set
        return first

    def _rank(self, places: Places) -> tuple[bool, bool, bool]:
        met = self._planes.of(places.codes)
        given = any(plane.name.startswith(("word", "foreign")) for plane in met)
        return bool((self._planes.images_of(places.codes) >= 0).any()), given, bool(met)


def with_added(work: Work, made: Places, node: Node) -> Places:
    """Return the places of a result to which another tensor was added."""
    term = work.places(node)
    if term.kind == "learned" or term.positions or made.columns is not None or not made.placed:
        return made
    meeting, out = _Meeting(work), work.step.outs[0]
    assert out is not None  # noqa: S101 - it is a tensor
    if term.placed:
        return meeting.of(made, out, _wide(term, made.shape), node)
    if not meeting.uniform(node, made):
        raise Unproven(term.name or work.name)
    return made


def _cells(planes: Planes, codes: Tensor) -> int:
    return max((plane.cells if plane.grid else 1 for plane in planes.of(compact(codes))), default=0)


def cells_vary(planes: Planes, codes: Tensor, dim: int) -> bool:
    """Check whether codes differ along an axis by more than their image."""
    if same_along(codes, dim):
        return False
    if planes.images == 1:
        return True
    stored = compact(codes)
    local = stored.clone()
    for plane in planes.of(stored):
        here = (stored >= plane.base) & (stored < plane.base + plane.cells * planes.images)
        local = torch.where(here, plane.base + (stored - plane.base) % plane.cells, local)
    return not same_along(local, dim)


def evener(planes: Planes, a: Places, b: Places) -> Places | None:
    """Choose the grid that ends with the image, of two grids with equally many cells; None if their cells do not match.

    Such grids come from a padded convolution and a pooling that overhangs. The centers of cells that meet may be at most half a cell
    apart.
    """
    of = [planes.of(compact(x.codes)) for x in (a, b)]
    if any(len(met) != 1 or not met[0].grid for met in of) or of[0] == of[1] or of[0][0].grid != of[1][0].grid:
        return None
    both = pairs(a.codes, b.codes)
    (low, high), (start, stop) = (planes.boxes(both[:, i]) for i in (0, 1))
    images = [planes.images_of(both[:, i]) for i in (0, 1)]
    apart = ((low + high) - (start + stop)).abs() / 2
    if bool((apart > torch.minimum(high - low, stop - start) / 2 + 1e-6).any()) or bool((images[0] != images[1]).any()):
        return None
    box, image = of[0][0].box, planes.input
    return a if box.bottom <= image.bottom + 1e-6 and box.right <= image.right + 1e-6 else b


def pairs(a: Tensor, b: Tensor) -> Tensor:
    """Return each pair of codes that meet elementwise, `(pairs, 2)`, without padding."""
    wide = torch.broadcast_tensors(compact(a), compact(b))  # type: ignore[no-untyped-call]
    first, second = (x.flatten().long() for x in wide)
    both = (first >= 0) & (second >= 0)
    first, second = first[both], second[both]
    span = int(second.max()) + 1 if len(second) else 1
    met = torch.unique(first * span + second)  # one number for each pair: rows would be sorted far more slowly
    return torch.stack((met // span, met % span), 1)


def within(planes: Planes, fine: Tensor, coarse: Tensor) -> bool:
    """Check whether the center of each cell lies in the coarser cell that it meets; constants may meet any cell."""
    if equal(fine, coarse):
        return True
    both = pairs(fine, coarse)
    (low, high), (start, stop) = (planes.boxes(both[:, i]) for i in (0, 1))
    middle = (low + high) / 2
    slack = (high - low) / 2 + 1e-6
    inside = (middle >= start - slack) & (middle <= stop + slack)
    if planes.frames:
        (begin, end), (first, last) = (planes.times(both[:, i]) for i in (0, 1))
        now = (begin + end) / 2
        inside &= ((now >= first) & (now <= last)).unsqueeze(-1)
    images = [planes.images_of(both[:, i]) for i in (0, 1)]
    grid = ~middle.isnan().any(1) & ~start.isnan().any(1)
    return bool(inside[grid].all()) and bool((images[0] == images[1])[grid].all())
