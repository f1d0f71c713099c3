"""Rule for elementwise operations: where operands that meet come from different places, the result is placed only if that is proven."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from visattn._support.faces import Later
from visattn.core.capturing.placing.cells import cells_vary, evener, most_cells, pairs, within
from visattn.core.capturing.placing.copies import numbered
from visattn.core.capturing.placing.nodes import Node
from visattn.core.capturing.placing.places import FOREIGN, LEARNED, LOST, Places, later
from visattn.core.capturing.placing.work import Result, Unproven, Work
from visattn.core.capturing.tokens.codes import equal, same_along
from visattn.core.capturing.tokens.planes import compact

if TYPE_CHECKING:
    from visattn.core.capturing.placing import meeting
else:
    meeting = Later("visattn.core.capturing.placing.meeting")

_ADDING = frozenset({"add", "sub", "rsub", "subtract"})
_CHOOSING = {"where": "condition", "masked_fill": "mask"}  # arguments that only choose between others


def combined(work: Work) -> Result:
    """Return the places (origin in the image of each element) of an elementwise result, such as a sum of two tensors.

    Operands from parameters, and numbers, keep the places of what they meet. Two operands from the image must agree, or one must be
    a coarser cell with one value for all finer cells in it, such as a gate, or a token that lies nowhere, such as a class token.
    One cell that all others meet is a second place for each of them. Operands that are lost or foreign must be the same at all
    positions.

    Raises:
        Unproven: If they come from different places.
    """
    operands = _operands(work)
    followed = [(node, places) for node, places in operands if work.counts(places)]  # those with places, mostly from the image
    if not followed:  # only a condition comes from the image
        raise Unproven(work.name)
    meeting = _Meeting(work)
    (result_node, first_places), *further = followed
    result = _broadcast(first_places, work.shape)
    for node, places in further:
        met = meeting.places_of(result, result_node, _broadcast(places, work.shape), node)
        result_node = result_node if met.codes is result.codes else node  # the operand that the result has its places from
        result = met
    result = _as_scores(meeting, operands, followed, result)
    if result.columns is None:  # a score belongs to its pair of tokens, whatever its value is
        _check_unplaced_operands(work, meeting, operands, result)
    if not work.sets:
        if len(operands) > 2 and _weighs_common(meeting, operands, result):
            raise Unproven(work.name)
        weighted = result.weighted or _weights_cells(work, meeting, result)
        result = result._replace(copies=_copies(work, result, followed), others=_others(followed, work.shape), weighted=weighted)
        if result.parts is not None and any(_tells_apart(work, node, result) for node, _ in operands):
            result = result._replace(parts=None)
    return [result if out.shape == result.shape else work.unknown(out.shape) for out in work.outs]


def _check_unplaced_operands(work: Work, meeting: _Meeting, operands: Sequence[tuple[Node, Places]], result: Places) -> None:
    """Raise `Unproven` if an operand of another input, or of unknown origin, may add another token to each token of the result."""
    for node, places in operands:
        is_lost, is_foreign = places.kind == "lost", places.kind == "foreign"
        is_suspect = is_lost or (is_foreign and not places.positions) or places.summed
        if work.counts(places) or not is_suspect:
            continue
        has_same_tokens = is_foreign and places.located and _has_codes_of(places, result)
        # a value that is the same at all positions, such as a time embedding, is harmless; a lost one may be a single token
        if not has_same_tokens and (is_lost or not meeting.uniform(node, result)):
            raise Unproven(places.name or work.name)


def _as_scores(
    meeting: _Meeting, operands: Sequence[tuple[Node, Places]], followed: Sequence[tuple[Node, Places]], result: Places
) -> Places:
    """Return products of tokens with members of a set, such as words, as attention scores if a number of unknown origin meets them.

    The number must be the same for all of them, such as a maximum that is subtracted before a softmax. Otherwise nothing changes.
    """
    key_codes = _others(followed, result.shape)
    lost_nodes = [node for node, places in operands if places.kind == "lost"]
    if key_codes is None or result.columns is not None or not lost_nodes:
        return result
    scores = result._replace(columns=key_codes)
    return scores if all(meeting.uniform(node, scores) for node in lost_nodes) else result


def _operands(work: Work) -> list[tuple[Node, Places]]:
    """Return the tensor operands of an elementwise operation, each with its places.

    The condition of `torch.where`, or a mask, is left out, unless it alone comes from the image: constants lie where it does.
    """
    condition = work.get(_CHOOSING.get(work.name, ""))
    with_condition = [(node, work.places(node)) for node in work.nodes()]
    values = [(node, places) for node, places in with_condition if node is not condition]
    has_places = work.sets or any(work.counts(places) for _, places in values)
    return values if has_places else with_condition


def _weighs_common(meeting: _Meeting, operands: Sequence[tuple[Node, Places]], result: Places) -> bool:
    """Check whether a learned operand that differs between positions may weight another one that several positions have in common.

    For example, `torch.addcmul` may add a mean over the image with a weight of its own for each token.
    """
    has_common = any(
        places.kind in ("lost", "foreign") or (places.placed and not _has_codes_of(places, result)) for _, places in operands
    )
    return has_common and any(places.kind == "learned" and not meeting.uniform(node, result) for node, places in operands)


def _weights_cells(work: Work, meeting: _Meeting, result: Places) -> bool:
    """Check whether each cell is multiplied by, or chosen by, a number of its own that is not from the image, as by a mask."""
    if work.name in _ADDING or result.columns is not None:
        return False
    return any(not work.places(node).placed and not meeting.uniform(node, result) for node in work.nodes())


def _has_codes_of(places: Places, result: Places) -> bool:
    return equal(places.codes.expand(result.shape), result.codes)


def _tells_apart(work: Work, node: Node, merged: Places) -> bool:
    """Check whether an operand has different values for cells that were merged into one, so that it is no plain mean of them."""
    unmerged_codes, ndim = merged.parts, merged.codes.ndim
    if unmerged_codes is None:
        return False
    if unmerged_codes.shape != merged.shape:
        return True
    for dim in range(ndim):
        if not work.varies(node, dim, ndim):
            continue
        is_merged_axis = cells_vary(work.planes, unmerged_codes, dim) and not cells_vary(work.planes, merged.codes, dim)
        if is_merged_axis:
            return True
    return False


def _broadcast(places: Places, shape: torch.Size) -> Places:
    """Return the places of an operand broadcast to the shape of the result, without those of its other axis (`others`)."""
    expanded = places._replace(others=None).each(lambda codes: codes.expand(shape))
    assert expanded is not None  # noqa: S101 - operands broadcast
    return expanded._replace(parts=places.parts)


def _others(followed: Sequence[tuple[Node, Places]], shape: torch.Size) -> Tensor | None:
    """Return the codes of keys, or queries, of the first operand of this shape that is a product of tokens and members of a set."""
    return next((places.others for _, places in followed if places.others is not None and places.others.shape == shape), None)


def _copies(work: Work, result: Places, followed: Sequence[tuple[Node, Places]]) -> Tensor | None:
    """Return for each element the number of its copy of the image; None if there is one copy.

    Copies are numbered along axes that broadcasting has added to all operands from the image.
    """
    if result.columns is not None:
        return result.copies
    ndim, copies = len(work.shape), result.copies
    shapes = [work.facts(node).shape for node, _ in followed]
    copied_axes = [axis for axis in range(ndim) if copies is not None and not same_along(copies, axis)]
    for (_, places), shape in zip(followed, shapes, strict=True):
        is_alike_in_all = all(_is_added(shape, axis, ndim) for axis in copied_axes)
        if places.copies is None and not is_alike_in_all:  # it tells the copies apart, as heads do
            copies = None
    added_axes = [
        axis for axis, size in enumerate(work.shape) if size > 1 and all(_is_added(shape, axis, ndim) for shape in shapes)
    ]
    return numbered(copies, work.shape, added_axes, work.device) if added_axes else copies


def _is_added(shape: Sequence[int], axis: int, ndim: int) -> bool:
    """Check whether an operand of this shape is copied along an axis of the result, which has `ndim` axes, by broadcasting."""
    own_axis = axis - (ndim - len(shape))
    return own_axis < 0 or shape[own_axis] == 1


class _Meeting:
    """Rules for two operands of one elementwise operation: where does the result lie if they come from different places?"""

    def __init__(self, work: Work) -> None:
        self._work, self._planes = work, work.planes

    def places_of(self, left: Places, left_node: Node, right: Places, right_node: Node) -> Places:
        """Return the places of the elementwise result of two operands from the image, of one shape, or raise `Unproven`."""
        result = self._chosen(left, left_node, right, right_node)
        if left.same(right):
            mixture, leaning = left.mixture or right.mixture, left.leaning or right.leaning
            result = result._replace(mixture=mixture, leaning=leaning, crossed=left.crossed and right.crossed)
        return result._replace(behind=later(left.behind, right.behind))

    def uniform(self, node: Node, result: Places, own: Places | None = None) -> bool:
        """Check whether an operand has one value for all cells of an image: those of the result, and its `own` if given."""
        ndim = result.codes.ndim
        own_codes = None if own is None else own.codes
        compared = [codes for codes in (result.codes, result.columns, own_codes) if codes is not None]
        return all(
            not self._work.varies(node, dim, ndim) or not any(cells_vary(self._planes, codes, dim) for codes in compared)
            for dim in range(ndim)
        )

    def _chosen(self, left: Places, left_node: Node, right: Places, right_node: Node) -> Places:
        """Return the places of the operand that says where the result lies, such as that with finer cells, or raise."""
        if left.columns is None and right.columns is not None:
            return self._scores_with_tokens(right, left, left_node)
        if left.columns is not None and right.columns is None:
            return self._scores_with_tokens(left, right, right_node)
        if left.same(right):
            return left
        if left.columns is not None:  # scores of other pairs of tokens
            raise Unproven(self._work.name)
        if self._work.sets:
            return self._of_sets(left, right)
        if self._planes.images > 1:  # members of a set get the image of those that they meet
            left_codes, right_codes = self._planes.met(left.codes, right.codes), self._planes.met(right.codes, left.codes)
            left, right = left._replace(codes=left_codes), right._replace(codes=right_codes)
            if left.same(right):
                return left
        is_right_uniform, is_left_uniform = self.uniform(right_node, left, right), self.uniform(left_node, right, left)
        if not is_left_uniform and not is_right_uniform:
            return self._of_grids(left, left_node, right, right_node)
        if is_left_uniform and is_right_uniform:  # one token each
            is_left_fine = most_cells(self._planes, left.codes) > most_cells(self._planes, right.codes)
        else:
            is_left_fine = is_right_uniform
        # a value that all positions have in common, such as a mean over the image, must not be one place among them
        fine, common = (left, right) if is_left_fine else (right, left)
        if common.leaning or not within(self._planes, fine.codes, common.codes):
            raise Unproven(self._work.name)
        return fine

    def _scores_with_tokens(self, scores: Places, tokens: Places, token_node: Node) -> Places:
        """Return the places of scores (one for each query and key) that meet tokens of the same queries or keys."""
        for score_codes in (scores.codes, scores.columns):
            if score_codes is not None and within(self._planes, score_codes, tokens.codes):
                return scores
        if self.uniform(token_node, scores):
            return scores
        raise Unproven(self._work.name)

    def _of_grids(self, left: Places, left_node: Node, right: Places, right_node: Node) -> Places:
        """Return the places of the result of two operands that both differ between cells, such as a map and a coarser gate."""
        left, right = self._without_constants(left, right)
        if left.same(right):
            return left
        crossing = None if left.leaning or right.leaning else self._crossing(left, right)
        if crossing is not None:
            return crossing
        pairs_of_tokens = None if left.leaning or right.leaning else meeting.pairs_of_tokens(self._planes, left, right)
        if pairs_of_tokens is not None:
            return pairs_of_tokens
        left_count, right_count = most_cells(self._planes, left.codes), most_cells(self._planes, right.codes)
        if left_count == right_count:
            chosen = evener(self._planes, left, right)
            if chosen is None:
                raise Unproven(self._work.name)
            return chosen
        fine, coarse, coarse_node = (left, right, right_node) if left_count > right_count else (right, left, left_node)
        unmerged = coarse.parts  # codes of the cells that a gate was computed from
        returns_to_its_cells = unmerged is not None and unmerged.shape == fine.shape and equal(unmerged, fine.codes)
        is_gate = returns_to_its_cells or (
            within(self._planes, fine.codes, coarse.codes) and self._has_one_value_per_cell(fine, coarse, coarse_node)
        )
        if coarse.leaning or not is_gate:
            raise Unproven(self._work.name)
        return coarse if self._is_one_to_one(fine, coarse) else fine  # one to one: the result has the coarser grid

    def _is_one_to_one(self, fine: Places, coarse: Places) -> bool:
        """Check whether each coarser cell meets a single one of the finer cells in it, as in a map thinned to every second line."""
        met_codes = pairs(fine.codes, coarse.codes)
        fine_codes, coarse_codes = met_codes[:, 0], met_codes[:, 1]
        images = len(torch.unique(self._planes.images_of(fine_codes)))
        leaves_cells_out = len(met_codes) < most_cells(self._planes, fine.codes) * images
        is_single = len(met_codes) == len(torch.unique(fine_codes)) == len(torch.unique(coarse_codes))
        return len(met_codes) > 1 and is_single and leaves_cells_out

    def _crossing(self, left: Places, right: Places) -> Places | None:
        """Return the cells in which the rows of one operand cross the columns of the other, as in strip pooling.

        Return None if they are not one value for each row and one for each column of the same part of the image.
        """
        left_planes, right_planes = self._planes.of(compact(left.codes)), self._planes.of(compact(right.codes))
        if any(len(planes) != 1 or len(planes[0].grid) != 2 for planes in (left_planes, right_planes)):
            return None
        (left_plane,), (right_plane,) = left_planes, right_planes
        if left_plane.box != right_plane.box or min(left_plane.cells, right_plane.cells) < 2:
            return None
        if left_plane.grid[0] == right_plane.grid[1] == 1:  # the columns come first
            return self._crossing(right, left)
        if left_plane.grid[1] != 1 or right_plane.grid[0] != 1:
            return None
        row_codes, column_codes = torch.broadcast_tensors(compact(left.codes), compact(right.codes))  # type: ignore[no-untyped-call]
        row_image, row = self._planes.split(row_codes, left_plane)
        column_image, column = self._planes.split(column_codes, right_plane)
        if bool((row_image != column_image).any()) or bool((row_codes < 0).any()) or bool((column_codes < 0).any()):
            return None
        plane = self._planes.grid(left_plane.grid[0], right_plane.grid[1], left_plane.box)
        codes = (plane.base + row_image * plane.cells + row * plane.columns + column).to(torch.int32)
        return left._replace(codes=codes.expand(left.shape), crossed=True)

    def _has_one_value_per_cell(self, fine: Places, coarse: Places, coarse_node: Node) -> bool:
        """Check whether all finer cells in a coarser one meet the same value, as a gate that was computed for the whole cell.

        The coarser operand then has one element for each of its cells, or copies of that element.
        """
        ndim, planes = fine.codes.ndim, self._planes
        varying = [
            dim for dim in range(ndim) if cells_vary(planes, fine.codes, dim) and self._work.varies(coarse_node, dim, ndim)
        ]
        if any(same_along(coarse.codes, dim) for dim in varying):
            return False
        if coarse.copies is not None:
            return True
        codes = coarse.codes
        for dim in range(ndim):
            is_repeated = dim not in varying and not cells_vary(planes, codes, dim)
            codes = codes.narrow(dim, 0, 1) if is_repeated else codes
        cell_codes = codes[codes >= 0]
        return len(torch.unique(cell_codes)) == len(cell_codes)

    def _without_constants(self, left: Places, right: Places) -> tuple[Places, Places]:
        """Give padding and learned elements of each operand the place of the element that they meet in the other.

        Elements that are lost or foreign in one operand become lost in both.
        """
        left_codes, right_codes = left.codes, right.codes
        if not bool((left_codes < 0).any()) and not bool((right_codes < 0).any()):
            return left, right
        new_left = torch.where((left_codes < 0) & (left_codes > FOREIGN), right_codes, left_codes)
        new_right = torch.where((right_codes < 0) & (right_codes > FOREIGN), left_codes, right_codes)
        is_lost = (new_left < LEARNED) | (new_right < LEARNED)
        new_left, new_right = new_left.masked_fill(is_lost, LOST), new_right.masked_fill(is_lost, LOST)
        return left._replace(codes=new_left), right._replace(codes=new_right)

    def _of_sets(self, left: Places, right: Places) -> Places:
        """Choose between two sets of tokens that lie nowhere, such as words before their learned positions, or raise `Unproven`."""
        chosen, other = (right, left) if self._rank(right) > self._rank(left) else (left, right)
        token_axes = range(chosen.codes.ndim - 1)
        if any(same_along(chosen.codes, dim) and not same_along(other.codes, dim) for dim in token_axes):
            raise Unproven(self._work.name)
        is_one_set = self._planes.of(chosen.codes) == self._planes.of(other.codes)
        other_is_one_token = any(same_along(other.codes, dim) and not same_along(chosen.codes, dim) for dim in token_axes)
        if is_one_set and not other_is_one_token and not equal(*map(self._planes.without_images, (chosen.codes, other.codes))):
            raise Unproven(self._work.name)  # other members of the same set
        return chosen

    def _rank(self, places: Places) -> tuple[bool, bool, bool]:
        """Return the rank of a set of tokens, the larger the more it says: is it of an image, from an input, and has it tokens?"""
        sets = self._planes.of(places.codes)
        is_from_input = any(plane.name.startswith(("word", "foreign")) for plane in sets)
        is_of_image = bool((self._planes.images_of(places.codes) >= 0).any())
        return is_of_image, is_from_input, bool(sets)


def with_added(work: Work, made: Places, node: Node) -> Places:
    """Return the places of a product of matrices, `made`, after the tensor `node` was added to it, such as a bias.

    Raises:
        Unproven: If the added tensor comes from other places, or from unknown ones and differs between positions.
    """
    term = work.places(node)
    if term.kind == "learned" or term.positions or made.columns is not None or not made.placed:
        return made
    meeting, result_node = _Meeting(work), work.step.outs[0]
    assert result_node is not None  # noqa: S101 - it is a tensor
    if term.placed:
        return meeting.places_of(made, result_node, _broadcast(term, made.shape), node)
    if not meeting.uniform(node, made):
        raise Unproven(term.name or work.name)
    return made
