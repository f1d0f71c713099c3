"""Statistics of heads against loops over the matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

import visattn
from tests import oracles, tiny
from tests.zoo import FAMILIES
from visattn.errors import OptionError
from visattn.methods._statistics import HeadStatistics, statistics
from visattn.operators import MatrixOperator
from visattn.records import AttentionRecord, Recording

PREFIXES = [(), ("cls",), ("cls", "distillation"), ("cls", "register0", "register1", "register2", "register3")]
GRIDS = [(3, 5), (4, 4)]


def places(record: AttentionRecord, side: str) -> list[tuple[float, float] | None]:
    """Centre of each token in input pixels; None for prefix tokens."""
    layout = record.queries if side == "queries" else record.keys
    rows, columns = layout.grid
    found: list[tuple[float, float] | None] = [None] * len(layout.prefix)
    for i in range(rows):
        for j in range(columns):
            found.append(
                (
                    layout.box.top + (2 * i + 1) * layout.box.height / rows / 2,
                    layout.box.left + (2 * j + 1) * layout.box.width / columns / 2,
                )
            )
    return found


def by_loops(record: AttentionRecord, weights: oracles.Array) -> dict[str, oracles.Array]:
    """Everything of one record, query by query and key by key."""
    batch, heads, queries, keys = weights.shape
    out = {
        name: np.zeros((batch, heads)) for name in ("entropy", "effective", "largest", "distance", "self", "patches", "padding")
    }
    out |= {name: np.zeros((batch, heads)) for name in record.keys.prefix}
    from_, to = places(record, "queries"), places(record, "keys")
    patches = sum(place is not None for place in from_)
    for b, h, i in np.ndindex(batch, heads, queries):
        row = weights[b, h, i]
        entropy = -math.fsum(a * math.log(a) for a in row if a > 0)
        out["entropy"][b, h] += entropy / queries
        out["effective"][b, h] += math.exp(entropy) / queries
        out["largest"][b, h] += max(row) / queries
        for j in range(keys):
            own = record.kind == "self" and i == j
            name = "self" if own else record.keys.prefix[j] if j < len(record.keys.prefix) else "patches"
            out[name][b, h] += row[j] / queries
        out["padding"][b, h] += (1 - math.fsum(row)) / queries
        here = from_[i]
        if here is not None:
            seen = [(a, math.dist(here, place)) for a, place in zip(row, to, strict=True) if place is not None]
            out["distance"][b, h] += math.fsum(a * d for a, d in seen) / math.fsum(a for a, _ in seen) / patches
    return out


def differs(mine: HeadStatistics, theirs: dict[str, oracles.Array]) -> float:
    """The largest relative difference."""
    assert mine.distance is not None
    pairs: list[tuple[Tensor, oracles.Array]] = [
        (mine.entropy, theirs["entropy"]),
        (mine.effective_keys, theirs["effective"]),
        (mine.saturation, theirs["largest"]),
        (mine.distance, theirs["distance"]),
        *((mine.mass[name], theirs[name]) for name in mine.mass),
    ]
    assert set(mine.mass) == set(theirs) - {"entropy", "effective", "largest", "distance"}
    return max(float(np.abs(oracles.array(a) - b).max() / max(1.0, np.abs(b).max())) for a, b in pairs)


def of_matrix(weights: Tensor, place: visattn.TokenLayout) -> HeadStatistics:
    return statistics(Recording(records=[tiny.record(MatrixOperator(weights, dtype=torch.float64), place)]), dtype=torch.float64)[
        0
    ]


@pytest.mark.parametrize("prefix", PREFIXES, ids=len)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_statistics_are_those_of_loops(prefix: Sequence[str], grid: tuple[int, int]) -> None:
    made = tiny.recording(batch=3, layers=2, prefix=prefix, grid=grid)
    for record, found in zip(made, statistics(made, dtype=torch.float64), strict=True):
        theirs = by_loops(record, oracles.array(tiny.matrices(record)))
        assert found.layer == record.layer
        assert differs(found, theirs) < 1e-10
    single = statistics(made)
    for record, found in zip(made, single, strict=True):
        assert differs(found, by_loops(record, oracles.array(tiny.matrices(record)))) < 1e-5


@pytest.mark.parametrize("name", ["swin", "swin padded", "pvt v2", "hiera", "maxvit"])
def test_windows_pooled_keys_and_padding(name: str) -> None:
    family = FAMILIES[name]
    size = family.sizes[-1]
    torch.manual_seed(0)
    model = family.build(size).eval().double()  # single precision weights that are written out sum to 1 only nearly
    with torch.no_grad(), visattn.capture(model) as recording:
        model(tiny.pixels(2, size).double())
    checked = 0
    for record, found in zip(recording, statistics(recording, dtype=torch.float64), strict=True):
        if record.operator.shape[2] * record.operator.shape[3] > 300_000:
            continue
        dense = oracles.array(record.operator.to(torch.float64).dense())
        assert differs(found, by_loops(record, dense)) < 1e-10
        torch.testing.assert_close(sum(found.mass.values()), torch.ones_like(found.entropy))
        checked += 1
    assert checked


def test_uniform_attention_looks_as_far_as_its_baseline() -> None:
    """The figures are of a 14 x 14 grid of 16-pixel patches and of 37 x 37 of 14 pixels, worked out elsewhere: 116.5 and 270 pixels."""
    for side, patch, expected in ((14, 16, 7.281 * 16), (37, 14, 19.285 * 14), (7, 32, 3.609 * 32)):
        place = tiny.layout((), (side, side))
        box = place.box._replace(bottom=side * patch, right=side * patch)
        place = visattn.TokenLayout("tokens", (), (side, side), box)
        uniform = MatrixOperator(torch.full((1, 1, side**2, side**2), 1 / side**2))
        found = statistics(Recording(records=[tiny.record(uniform, place)]))[0]
        assert found.distance is not None
        assert found.uniform_distance == pytest.approx(expected, rel=1e-3)
        assert float(found.distance) == pytest.approx(found.uniform_distance, rel=1e-5)
        assert float(found.entropy) == pytest.approx(2 * math.log(side), rel=1e-5)
        assert float(found.effective_keys) == pytest.approx(side**2, rel=1e-4)


def test_batch_is_as_image_by_image() -> None:
    made = tiny.recording(batch=3)
    whole = statistics(made, dtype=torch.float64)
    for record, found in zip(made, whole, strict=True):
        for image in range(3):
            weights = tiny.matrices(record)[image : image + 1]
            one = of_matrix(weights, record.keys)
            torch.testing.assert_close(one.entropy[0], found.entropy[image], rtol=1e-10, atol=1e-10)


def test_order_of_patches_does_not_matter_but_for_distance() -> None:
    made = tiny.recording(prefix=("cls",))
    record = made[0]
    weights = tiny.matrices(record)
    order = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(len(record.keys) - 1)])
    shuffled = weights[:, :, order][..., order]
    one, other = (of_matrix(x, record.keys) for x in (weights, shuffled))
    torch.testing.assert_close(one.entropy, other.entropy)
    torch.testing.assert_close(one.mass["patches"], other.mass["patches"])
    assert one.distance is not None
    assert other.distance is not None
    assert float((one.distance - other.distance).abs().max()) > 1e-3


def test_talking_heads_are_refused_by_name() -> None:
    place = tiny.layout()
    signed = torch.randn(1, 2, len(place), len(place))
    with pytest.raises(OptionError, match=r"blocks\.0\.attn: attention rows do not sum to 1"):
        statistics(Recording(records=[tiny.record(MatrixOperator(signed), place)]))


def test_several_forwards_are_refused() -> None:
    model, x = tiny.vit(), tiny.pixels()
    with torch.no_grad(), visattn.capture(model) as recording:
        model(x)
        model(x)
    with pytest.raises(OptionError, match="2 forward passes"):
        statistics(recording)
