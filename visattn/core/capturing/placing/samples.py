"""Rule for values that a model reads at points that it computes, as deformable attention does (`grid_sample`)."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from visattn.core.capturing.placing.places import Places
from visattn.core.capturing.placing.work import Result, Unproven, Work
from visattn.core.capturing.tokens.codes import same_along
from visattn.core.capturing.tokens.planes import Planes, compact
from visattn.core.capturing.tokens.points import POINTS, UNKNOWN, Cells, Drift


def sampled(work: Work) -> Result:
    """Return the places of values read at points `(N, rows, columns, 2)` that the model computes (`grid_sample`).

    They count as those of the tokens that computed the points; a drift says how far the points lie from these tokens.

    Raises:
        Unproven: If the values or the points have no known places.
    """
    values, askers = work.places(work.get("input")), work.places(work.get(POINTS))
    askers_known = askers.placed or (askers.kind == "learned" and askers.located)
    if not askers_known or askers.columns is not None or not same_along(askers.codes, -1):
        raise Unproven(values.name or work.name)
    if values.kind in ("lost", "foreign"):
        raise Unproven(values.name or work.name)
    asker_codes, drift = askers.codes[..., 0], Drift()
    if not all(plane.grid for plane in work.planes.of(values.codes)):  # members of a set, of which a token may read another one
        raise Unproven(work.name)
    if values.placed:
        image = _image_of_maps(work.planes, values.codes)
        asker_codes = work.planes.given(asker_codes, image.view(-1, 1, 1))
        drift = _drift(work, values, asker_codes)
    codes = asker_codes[:, None].expand(work.shape)
    mixture = askers.mixture or values.mixture
    one_number = None if askers.copies is None or not same_along(askers.copies, -1) else askers.copies[..., 0]
    copies = None if one_number is None else one_number[:, None].expand(work.shape)
    return askers._replace(kind="placed", codes=codes, copies=copies, others=None, mixture=mixture, drift=drift)


def _drift(work: Work, values: Places, asker_codes: Tensor) -> Drift:
    """Return how far values lie from the tokens, with codes `(N, rows, columns)`, that read them at computed points."""
    points = work.step.points
    if points is None:
        return UNKNOWN
    cells = None
    with suppress(Unproven):
        cells = _asking_cells(work, values.codes, asker_codes)
    by_sets = not all(plane.grid for plane in work.planes.of(asker_codes))
    return values.drift.further(points.drift(cells), points, by_sets=by_sets)


def _asking_cells(work: Work, value_codes: Tensor, asker_codes: Tensor) -> Cells:
    """Return the cells of tokens `(N, rows, columns)` that read maps `(N, channels, rows, columns)`, from position codes.

    Raises:
        Unproven: If the maps are no images, or the tokens lie on no grid, or belong to other images than the maps.
    """
    planes, maps = work.planes, value_codes[:, 0]
    plane, lines_before = planes.raster(maps)
    if plane is None or lines_before != (0, 0) or plane.grid != tuple(maps.shape[1:]) or not same_along(value_codes, 1):
        raise Unproven(work.name)
    asker_codes = asker_codes.narrow(2, 0, 1) if same_along(asker_codes, 2) else asker_codes
    (low, high), image = planes.boxes(asker_codes), planes.images_of(asker_codes)
    if bool(low.isnan().any()) or bool((image != planes.images_of(maps[:, :1, :1])).any()):
        raise Unproven(work.name)
    center, size = ((low + high) / 2).flip(-1), (high - low).flip(-1)  # (x, y)
    if same_along(center, 0) and same_along(size, 0):
        center, size = center[:1], size[:1]
    box, columns, rows = plane.box, plane.columns, plane.grid[-2]
    aligned = bool(work.get("align_corners", False))  # then -1 and 1 are the centers of the first and the last cell
    shares = [(count - aligned) / count / 2 for count in (columns, rows)]
    sides = [[box.left + box.width / 2, box.top + box.height / 2], [box.width * shares[0], box.height * shares[1]]]
    middle, reach = torch.tensor(sides, dtype=torch.float64, device=asker_codes.device)
    return Cells(center, size, middle, reach, int(work.get("padding_mode", 0)))


def _image_of_maps(planes: Planes, codes: Tensor) -> Tensor:
    """Return the number of the image that each map belongs to, `(N,)`."""
    stored = compact(codes)
    return planes.images_of(stored).flatten(1).amax(1).expand(codes.shape[0])
