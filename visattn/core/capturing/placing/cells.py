"""Cells of two tensors that meet elementwise: which pairs there are, and whether one cell lies in the other."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from visattn.core.capturing.placing.places import UNWATCHED, Places
from visattn.core.capturing.placing.work import Unproven, Work
from visattn.core.capturing.tokens.codes import equal, same_along
from visattn.core.capturing.tokens.planes import Planes, compact


def most_cells(planes: Planes, codes: Tensor) -> int:
    """Return the number of cells of the finest grid that position codes name; tokens that lie nowhere count as one."""
    return max((plane.cells if plane.grid else 1 for plane in planes.of(compact(codes))), default=0)


def check_parameters(work: Work, tokens: Places, names: Iterable[str]) -> None:
    """Check that weights and biases of an operation are the same for all tokens and lie in no cell that others do not share.

    They may be parameters, come from another input, or from a cell that holds all these tokens, as in a convolution whose kernel is
    chosen for the image.

    Raises:
        Unproven: If one comes from another cell, or from an unknown place.
    """
    for name in names:
        node = work.get(name)
        if node is None:
            continue
        parameter = work.places(node)
        if parameter.leaning or (parameter.kind == "lost" and not is_from_before(work, parameter)):
            raise Unproven(parameter.name or work.name)
        if not parameter.placed:
            continue
        if not holds_all(work.planes, parameter, tokens):
            raise Unproven(work.name)


def is_from_before(work: Work, parameter: Places) -> bool:
    """Check whether a tensor that no call has made existed before the forward pass: no number of the image has left it so far."""
    return parameter.name == UNWATCHED and not work.shadows.told


def holds_all(planes: Planes, coarse: Places, fine: Places) -> bool:
    """Check whether each cell of `coarse` holds all cells of `fine`, as the whole image does."""
    coarse_cells, fine_cells = (torch.unique(compact(places.codes)) for places in (coarse, fine))
    return within(planes, fine_cells[:, None], coarse_cells[None])


def repeats_some(codes: Tensor) -> bool:
    """Check whether some cells occur more often than others, so that a mean over them leans to these."""
    stored = compact(codes)
    counts = torch.unique(stored[stored >= 0], return_counts=True)[1]
    return len(counts) > 0 and bool((counts != counts[0]).any())


def cells_vary(planes: Planes, codes: Tensor, dim: int) -> bool:
    """Check whether position codes name different cells along an axis, rather than one cell in each image of the batch."""
    if same_along(codes, dim):
        return False
    if planes.images == 1:
        return True
    stored = compact(codes)
    codes_in_first_image = stored.clone()
    for plane in planes.of(stored):
        belongs = (stored >= plane.base) & (stored < plane.base + plane.cells * planes.images)
        codes_in_first_image = torch.where(belongs, plane.base + (stored - plane.base) % plane.cells, codes_in_first_image)
    return not same_along(codes_in_first_image, dim)


def evener(planes: Planes, a: Places, b: Places) -> Places | None:
    """Choose the grid that ends with the image, of two grids with equally many cells; None if their cells do not match.

    Such grids come from a padded convolution and a pooling that overhangs. The centers of cells that meet may be at most half a cell
    apart.
    """
    a_planes, b_planes = planes.of(compact(a.codes)), planes.of(compact(b.codes))
    if len(a_planes) != 1 or len(b_planes) != 1:
        return None
    (a_plane,), (b_plane,) = a_planes, b_planes
    if not a_plane.grid or a_plane == b_plane or a_plane.grid != b_plane.grid:
        return None
    met_codes = pairs(a.codes, b.codes)
    a_codes, b_codes = met_codes[:, 0], met_codes[:, 1]
    (a_start, a_stop), (b_start, b_stop) = planes.boxes(a_codes), planes.boxes(b_codes)
    between_centers = ((a_start + a_stop) - (b_start + b_stop)).abs() / 2
    half_cell = torch.minimum(a_stop - a_start, b_stop - b_start) / 2 + 1e-6
    if bool((between_centers > half_cell).any()) or bool((planes.images_of(a_codes) != planes.images_of(b_codes)).any()):
        return None
    box, image = a_plane.box, planes.input
    ends_with_image = box.bottom <= image.bottom + 1e-6 and box.right <= image.right + 1e-6
    return a if ends_with_image else b


def pairs(a: Tensor, b: Tensor) -> Tensor:
    """Return the distinct pairs of position codes that meet elementwise in two tensors, `(pairs, 2)`, without padding."""
    a_wide, b_wide = torch.broadcast_tensors(compact(a), compact(b))  # type: ignore[no-untyped-call]
    a_codes, b_codes = a_wide.flatten().long(), b_wide.flatten().long()
    is_pair = (a_codes >= 0) & (b_codes >= 0)
    a_codes, b_codes = a_codes[is_pair], b_codes[is_pair]
    span = int(b_codes.max()) + 1 if len(b_codes) else 1
    pair_numbers = torch.unique(a_codes * span + b_codes)  # one number for each pair: rows would be sorted far more slowly
    return torch.stack((pair_numbers // span, pair_numbers % span), 1)


def within(planes: Planes, fine: Tensor, coarse: Tensor) -> bool:
    """Check whether the center of each cell lies in the coarser cell of the same image that it meets, to within half a cell.

    `fine` and `coarse` are position codes. Constants, and tokens that lie nowhere, may meet any cell.
    """
    if equal(fine, coarse):
        return True
    met_codes = pairs(fine, coarse)
    fine_codes, coarse_codes = met_codes[:, 0], met_codes[:, 1]
    (fine_start, fine_stop), (coarse_start, coarse_stop) = planes.boxes(fine_codes), planes.boxes(coarse_codes)
    center = (fine_start + fine_stop) / 2
    slack = (fine_stop - fine_start) / 2 + 1e-6
    is_inside = (center >= coarse_start - slack) & (center <= coarse_stop + slack)
    if planes.frames:
        (fine_begin, fine_end), (coarse_begin, coarse_end) = planes.times(fine_codes), planes.times(coarse_codes)
        middle = (fine_begin + fine_end) / 2
        is_inside &= ((middle >= coarse_begin) & (middle <= coarse_end)).unsqueeze(-1)
    is_same_image = planes.images_of(fine_codes) == planes.images_of(coarse_codes)
    have_cells = ~center.isnan().any(1) & ~coarse_start.isnan().any(1)
    return bool(is_inside[have_cells].all()) and bool(is_same_image[have_cells].all())
