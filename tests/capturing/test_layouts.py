"""Token locations of every family: if the pixels of one cell change, its token must change, and no other."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import timm
import torch
from torch import Tensor

from tests import places, zoo
from tests.places import Probe, Size
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import AttentionMap
from visattn.core.records import AttentionRecord, Recording, TokenLayout

SIZES = {f"{name} {size[0]} x {size[1]}": (name, size) for name, family in zoo.FAMILIES.items() for size in family.sizes}


class Seen(NamedTuple):
    """Recordings of a family: one image alone, and a batch of it with images that differ in one cell each."""

    family: zoo.Family
    size: Size
    alone: Recording
    together: Recording
    probes: list[Probe]


KINDS = [name for name, _ in SIZES.values()]
SLOW = {"botnet", "pvt v2 linear", "sam2 hiera", "mobilenet v4", "swin v2 cr"}  # families with a faster relative in the list
# `make test` runs the first size of each family, `make test-full` also the others and those of SLOW
PARAMS = [
    pytest.param(key, marks=[pytest.mark.full] if name in SLOW or name in KINDS[:i] else [])
    for i, (key, (name, _)) in enumerate(SIZES.items())
]


@pytest.fixture(scope="module", params=PARAMS)
def seen(request: pytest.FixtureRequest) -> Seen:
    name, size = SIZES[request.param]
    family = zoo.FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = family.build(size).eval().double()
        pixels = torch.randn(1, 3, *size).double()
        alone = places.look(model, pixels, family.halving)
        probes = places.probes(places.grids_of(alone))
        pixels = pixels.repeat(1 + len(probes), 1, 1, 1)
        for probe in probes:
            shared = not family.doubling and (size[0] % probe.grid[0] or size[1] % probe.grid[1])  # a pixel lies in two cells
            core = family.core or bool(shared)
            rows, columns = places.rectangle(size, probe.grid, probe.cell, doubling=family.doubling, core=core)
            pixels[probe.image, :, rows, columns] += 3 * torch.randn(pixels[0, :, rows, columns].shape)
        return Seen(family, size, alone, places.look(model, pixels, family.halving), probes)


def on_grid(seen: Seen, side: str) -> list[tuple[AttentionRecord, TokenLayout]]:
    """Return the records of a family whose keys or queries lie on a grid, with that layout."""
    found = [(record, record.keys if side == "keys" else record.queries) for record in seen.together]
    return [(record, layout) for record, layout in found if len(layout.grid) == 2 and layout.cells > 1]


def check_only_its_token_changes(seen: Seen, side: str) -> None:
    family, _, _, _, probes = seen
    for record, layout in on_grid(seen, side):
        if side == "queries" and record.layer.endswith(family.asks_elsewhere):
            continue
        own = [probe for probe in probes if probe.grid == layout.grid]
        assert own
        for probe in own:
            change = places.changed_values if side == "keys" else places.changed_queries
            changes = change(record, probe.image)
            for i, name in enumerate(layout.prefix):
                changes[i] = 0 if name == "mean" else changes[i]  # the mean of all tokens may change
            token = places.token_of(layout, probe.cell)
            where = f"{record.layer} call {record.call}, {side} {layout.grid}, cell {probe.cell}"
            assert changes[token] > 0, f"{where}: its token does not change; {divmod(int(changes.argmax()), layout.grid[1])} does"
            changes /= changes[token].clone()
            changes[token] = 0
            assert changes.max() <= family.leak, f"{where}: token {int(changes.argmax())} changes too, {float(changes.max()):.1e}"


def test_every_expected_kind_of_attention_is_recorded(seen: Seen) -> None:
    family, _, alone, together, _ = seen
    assert {record.kind for record in together} == family.kinds
    assert [(r.layer, r.kind, r.queries, r.keys) for r in alone] == [(r.layer, r.kind, r.queries, r.keys) for r in together]


def test_pixels_of_a_cell_change_the_value_of_its_token_only(seen: Seen) -> None:
    assert on_grid(seen, "keys")
    check_only_its_token_changes(seen, "keys")


def test_pixels_of_a_cell_change_the_query_of_its_token_only(seen: Seen) -> None:
    check_only_its_token_changes(seen, "queries")


def test_recording_of_an_image_does_not_depend_on_its_batch(seen: Seen) -> None:
    for one, many in zip(seen.alone, seen.together, strict=True):
        assert one.value is not None
        assert many.value is not None
        if one.kind != "unplaced":  # unplaced records are not sorted by image
            torch.testing.assert_close(many.value[:1], one.value)


def test_one_hot_row_lights_the_pixels_of_its_patch(seen: Seen) -> None:
    family, size, _, together, _ = seen
    whole = Geometry(size, size, Box(0, 0, *size))
    for layout in dict.fromkeys(record.keys for record in together if len(record.keys.grid) == 2):
        grid = layout.grid[0], layout.grid[1]
        for cell in places.cells(grid):
            row = torch.zeros(len(layout))
            row[places.token_of(layout, cell)] = 1
            values = row[len(layout.prefix) :].view(grid)
            lit = AttentionMap(values, (), layout, {}, "attention").to_heatmap(whole, "nearest").values
            rows, columns = places.rectangle(size, grid, cell, doubling=family.doubling)
            expected = torch.zeros(size)
            expected[rows, columns] = 1
            assert_same_pixels(torch.from_numpy(lit), expected, f"{layout.grid} cell {cell}")


def test_model_that_mixes_the_images_of_a_batch_is_placed_for_one_image_alone() -> None:
    """Check csatv2, whose spatial blocks multiply `(B, N)` by `(N, B)`: an image of a batch attends to the others."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small = {"dims": (16, 32, 32, 64), "depths": (1, 1, 2, 2), "transformer_depths": (0, 0, 1, 1)}
        model = timm.create_model("csatv2", num_classes=4, **small).eval().double()
        pixels = torch.randn(1, 3, 256, 256).double()
    alone = places.look(model, pixels)
    assert [(record.kind, record.keys.grid) for record in alone] == [("self", (8, 8)), ("self", (4, 4))]
    grids = dict(zip(places.grids_of(alone), alone, strict=True))
    for probe in places.probes(list(grids)):
        record = grids[probe.grid]
        changed = pixels.clone()
        rows, columns = places.rectangle((256, 256), probe.grid, probe.cell)
        changed[..., rows, columns] += 3
        after = next(one for one in places.look(model, changed) if one.layer == record.layer)
        assert record.value is not None
        assert after.value is not None
        changes = (after.value - record.value).abs().amax((0, 1, 3))
        assert int(changes.argmax()) == places.token_of(record.keys, probe.cell)
    together = places.look(model, pixels.repeat(2, 1, 1, 1))
    assert {(record.kind, record.reason) for record in together} == {
        ("unplaced", "its tokens could not be traced from the pixels beyond matmul")
    }


def assert_same_pixels(lit: Tensor, expected: Tensor, what: str) -> None:
    assert lit.shape == expected.shape
    assert torch.equal(lit, expected), f"{what} lights {lit.nonzero().aminmax(dim=0)}, not {expected.nonzero().aminmax(dim=0)}"
