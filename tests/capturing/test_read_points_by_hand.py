"""Values that are read at computed points: whose places they have, and how far the points lie from there."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capturing.steps import CPU, at_work, grid, learned, members, placed, two_images
from visattn.core.capturing.placing import samples
from visattn.core.capturing.placing.places import Places, whole
from visattn.core.capturing.placing.work import Unproven, Work
from visattn.core.capturing.tokens.planes import Planes
from visattn.core.capturing.tokens.points import UNKNOWN, Drift, Points
from visattn.core.geometry import Box


def askers(planes: Planes, **fields: Any) -> Places:
    """Return places of points, one for each token of a 3 x 4 grid, `(images, 3, 4, 2)`."""
    return placed(grid(planes, 3, 4)[..., None].expand(2, 3, 4, 2), **fields)


def maps(planes: Planes, box: Box | None = None, **fields: Any) -> Places:
    return placed(grid(planes, 6, 8, box)[:, None].expand(2, 5, 6, 8), **fields)


def reading(planes: Planes, values: Places, points: Places, measured: Tensor | None = None, **given: Any) -> Work:
    shape = (values.shape[0], values.shape[1], *points.shape[1:3])
    work = at_work(planes, "grid_sampler_2d", shape, input=values, grid=points, **given)
    work.step.points = None if measured is None else Points(measured)
    return work


def read(*args: Any, **given: Any) -> Places:
    result = samples.sampled(reading(*args, **given))
    assert isinstance(result, Places)
    return result


def centers(right: float = 0.0, down: float = 0.0) -> Tensor:
    """Return points at the centers of 3 x 4 cells, moved by pixels of an image of 24 x 40, `(2, 3, 4, 2)`."""
    x = (torch.arange(4) * 10 + 5 + right) / 20 - 1
    y = (torch.arange(3) * 8 + 4 + down) / 12 - 1
    return torch.stack([x[None].expand(3, 4), y[:, None].expand(3, 4)], -1).expand(2, 3, 4, 2)


def test_values_count_as_those_of_the_tokens_that_read_them() -> None:
    planes = two_images()
    values = maps(planes, mixture=True)
    copies = torch.tensor([3, 8])[:, None, None, None].expand(2, 3, 4, 2)
    source = askers(planes, copies=copies, others=grid(planes, 3, 4)[..., None].expand(2, 3, 4, 2), name="offsets")
    result = read(planes, values, source, centers())
    assert torch.equal(result.codes, grid(planes, 3, 4)[:, None].expand(2, 5, 3, 4))
    assert (result.kind, result.name, result.others, result.mixture, result.drift) == ("placed", "offsets", None, True, Drift())
    assert result.copies is not None
    assert torch.equal(result.copies, torch.tensor([3, 8])[:, None, None, None].expand(2, 5, 3, 4))
    assert read(planes, maps(planes), source._replace(mixture=True), centers()).mixture
    plain = read(planes, maps(planes), source._replace(copies=torch.arange(2).expand(2, 3, 4, 2)), centers())
    assert (plain.mixture, plain.copies) == (False, None)
    assert read(planes, maps(planes), askers(planes), centers()).copies is None


@pytest.mark.parametrize(
    ("right", "down", "cells"),
    [
        (0, 0, 0),
        (2.5, 0, 0.25),
        (-2.5, 0, 0.25),
        (0, 2, 0.25),
        (5, 0, 0.5),
        (0, -4, 0.5),
        (5, 5, math.inf),
        (5.5, 0, math.inf),
        (2.6, 0, 0.5),
    ],
)
def test_the_drift_is_the_largest_distance_of_a_point_in_cells_of_its_token(right: float, down: float, cells: float) -> None:
    planes = two_images()
    drift = read(planes, maps(planes), askers(planes), centers(right, down)).drift
    assert (drift.cells, drift.of_sets) == (cells, False)


def test_drifts_add_up_and_are_unknown_without_points() -> None:
    planes = two_images()
    values = maps(planes, drift=Drift(0.25))
    assert read(planes, values, askers(planes), centers(2.5)).drift.cells == 0.5
    assert read(planes, maps(planes), askers(planes)).drift is UNKNOWN
    disordered = placed(maps(planes).codes.flip(2))
    assert read(planes, disordered, askers(planes), centers()).drift.cells == math.inf


def test_values_that_do_not_come_from_the_image_drift_nowhere() -> None:
    planes = two_images()
    result = read(planes, learned(2, 5, 6, 8), askers(planes))
    assert result.drift == Drift()
    assert torch.equal(result.codes, grid(planes, 3, 4)[:, None].expand(2, 5, 3, 4))


def test_queries_that_read_an_image_belong_to_it() -> None:
    planes = two_images()
    queries = planes.set_of("token", 7)
    points = Places("learned", planes.members(queries)[:, None, None].expand(2, 7, 1, 2))
    result = read(planes, maps(planes), points, torch.zeros(2, 7, 1, 2))
    assert result.kind == "placed"
    assert torch.equal(result.codes, planes.codes(queries)[:, None, :, None].expand(2, 5, 7, 1))
    assert (result.drift.cells, result.drift.of_sets) == (math.inf, True)
    flipped = read(planes, placed(maps(planes).codes.flip(0)), points, torch.zeros(2, 7, 1, 2))
    assert torch.equal(flipped.codes, planes.codes(queries).flip(0)[:, None, :, None].expand(2, 5, 7, 1))


def test_points_and_values_without_known_places_are_refused() -> None:
    planes = two_images()
    source, values = askers(planes), maps(planes)
    words = placed(members(planes, "word", 8).expand(2, 5, 6, 8))
    cases: list[tuple[Places, Places, str]] = [
        (values, learned(2, 3, 4, 2), "grid_sampler_2d"),
        (values, whole("lost", (2, 3, 4, 2), CPU), "grid_sampler_2d"),
        (values._replace(name="map"), learned(2, 3, 4, 2), "map"),
        (values, source._replace(columns=source.codes), "grid_sampler_2d"),
        (values, source._replace(codes=torch.stack([source.codes[..., 0], source.codes[..., 0].flip(1)], -1)), "grid_sampler_2d"),
        (whole("lost", (2, 5, 6, 8), CPU, "roll"), source, "roll"),
        (whole("foreign", (2, 5, 6, 8), CPU), source, "grid_sampler_2d"),
        (words._replace(name="text"), source, "grid_sampler_2d"),
    ]
    for value, points, why in cases:
        with pytest.raises(Unproven, match=f"^{why}$"):
            read(planes, value, points, centers())


def test_the_cells_of_tokens_and_the_map_are_measured_in_pixels() -> None:
    planes = two_images()
    values, codes = maps(planes, Box(4, 5, 28, 45)), grid(planes, 3, 4)
    work = reading(planes, values, askers(planes), padding_mode=2)
    cells = samples._asking_cells(work, values.codes, codes)
    assert cells.center.shape == cells.size.shape == (1, 3, 4, 2)
    assert cells.center[0, :, :, 0].tolist() == [[5, 15, 25, 35]] * 3
    assert cells.center[0, :, 0, 1].tolist() == [4, 12, 20]
    assert torch.equal(cells.size, torch.tensor([10.0, 8.0], dtype=torch.float64).expand(1, 3, 4, 2))
    assert (cells.middle.tolist(), cells.reach.tolist(), cells.padding) == ([25, 16], [20, 12], 2)
    aligned = samples._asking_cells(reading(planes, values, askers(planes), align_corners=True), values.codes, codes)
    assert (aligned.middle.tolist(), aligned.reach.tolist(), aligned.padding) == ([25, 16], [17.5, 10], 0)


def test_maps_of_odd_sizes_have_their_middle_between_two_pixels() -> None:
    planes = two_images()
    values = maps(planes, Box(4, 5, 27, 44))
    cells = samples._asking_cells(reading(planes, values, askers(planes)), values.codes, grid(planes, 3, 4))
    assert (cells.middle.tolist(), cells.reach.tolist()) == ([24.5, 15.5], [19.5, 11.5])


def test_tokens_with_several_points_have_one_cell_and_tokens_of_each_image_their_own() -> None:
    planes = two_images()
    values, codes = maps(planes), grid(planes, 3, 4).flatten(1)[..., None].expand(2, 12, 9)
    work = reading(planes, values, placed(codes[..., None].expand(2, 12, 9, 2)))
    assert samples._asking_cells(work, values.codes, codes).center.shape == (1, 12, 1, 2)
    differing = torch.stack([codes[0], codes[1].flip(0)])
    cells = samples._asking_cells(work, values.codes, differing)
    assert cells.center.shape == (2, 12, 1, 2)
    assert cells.size.shape == (2, 12, 1, 2)
    assert torch.equal(cells.center[0], cells.center[1].flip(0))
    sizes = torch.stack([grid(planes, 3, 4)[0, 1:2, :1], grid(planes, 1, 4)[1, :, :1]])  # of one center
    assert samples._asking_cells(work, values.codes, sizes).size.tolist() == [[[[10, 8]]], [[[10, 24]]]]


def test_tokens_of_other_images_and_maps_in_disorder_have_no_distance() -> None:
    planes = two_images()
    values, codes = maps(planes), grid(planes, 3, 4)
    work = reading(planes, values, askers(planes))
    by_channel = torch.stack([values.codes[:, 0], values.codes[:, 0].flip(1)], 1)
    bordered = torch.nn.functional.pad(values.codes, (0, 0, 1, 0), value=-1)
    behind = torch.nn.functional.pad(values.codes, (0, 1, 0, 0), value=-1)
    cases = [
        (values.codes.flip(2), codes),
        (values.codes.flip(0), codes),
        (values.codes, codes.flip(0)),
        (values.codes, members(planes, "word", 4).expand(2, 3, 4)),
        (values.codes, torch.cat([codes[:, :2], torch.full((2, 1, 4), -1, dtype=torch.int32)], 1)),
        (by_channel, codes),
        (bordered, codes),
        (behind, codes),
    ]
    for value_codes, asker_codes in cases:
        with pytest.raises(Unproven, match=r"^grid_sampler_2d$"):
            samples._asking_cells(work, value_codes, asker_codes)
