"""Statistics of heads, compared with loops over matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import visattn
from tests import tiny
from tests.oracles import maps as oracles
from tests.zoo import FAMILIES
from visattn.core.methods.sinks import find_sinks, sink_mass
from visattn.core.operators import MatrixOperator, SoftmaxOperator
from visattn.core.records import AttentionRecord, Recording
from visattn.errors import OptionError
from visattn.evaluation.heads import HeadStatistics, head_divergence, statistics

PREFIXES = [(), ("cls",), ("cls", "distillation"), ("cls", "register0", "register1", "register2", "register3")]
GRIDS = [(3, 5), (4, 4)]
NUMBERS = ("entropy", "effective", "max_weight", "collapsed", "uniform", "distance")


def places(record: AttentionRecord, side: str) -> list[tuple[float, float] | None]:
    """Return the center of each token in input pixels, or None for prefix tokens."""
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
    """Compute all statistics of one record, query by query and key by key."""
    batch, heads, queries, keys = weights.shape
    out = {name: np.zeros((batch, heads)) for name in (*NUMBERS, "self", "patches", "padding")}
    out |= {name: np.zeros((batch, heads)) for name in record.keys.prefix}
    from_, to = places(record, "queries"), places(record, "keys")
    patches = sum(place is not None for place in from_)
    for b, h, i in np.ndindex(batch, heads, queries):
        row = weights[b, h, i]
        entropy = -math.fsum(a * math.log(a) for a in row if a > 0)
        out["entropy"][b, h] += entropy / queries
        out["effective"][b, h] += math.exp(entropy) / queries
        out["max_weight"][b, h] += max(row) / queries
        out["collapsed"][b, h] += (max(row) > 0.99) / queries
        in_sight = sum(weights[:, :, i, j].max() > 1e-30 for j in range(keys))
        out["uniform"][b, h] += (entropy > 0.98 * math.log(in_sight)) / queries
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
    """Return the largest relative difference."""
    assert mine.distance is not None
    pairs: list[tuple[Tensor, oracles.Array]] = [
        (mine.entropy, theirs["entropy"]),
        (mine.effective_keys, theirs["effective"]),
        (mine.max_weight, theirs["max_weight"]),
        (mine.collapsed, theirs["collapsed"]),
        (mine.uniform, theirs["uniform"]),
        (mine.distance, theirs["distance"]),
        *((mine.mass[name], theirs[name]) for name in mine.mass),
    ]
    assert set(mine.mass) == set(theirs) - set(NUMBERS)
    return max(float(np.abs(oracles.array(a) - b).max() / max(1.0, np.abs(b).max())) for a, b in pairs)


def of_matrix(weights: Tensor, place: visattn.TokenLayout) -> HeadStatistics:
    return statistics(Recording(records=[tiny.record(MatrixOperator(weights, dtype=torch.float64), place)]), dtype=torch.float64)[
        0
    ]


@pytest.mark.parametrize("prefix", PREFIXES, ids=len)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_statistics_equal_loops(prefix: Sequence[str], grid: tuple[int, int]) -> None:
    made = tiny.recording(batch=3, layers=2, prefix=prefix, grid=grid)
    for record, found in zip(made, statistics(made, dtype=torch.float64), strict=True):
        theirs = by_loops(record, oracles.array(tiny.matrices(record)))
        assert found.layer == record.layer
        assert differs(found, theirs) < 1e-10
    single = statistics(made)
    for record, found in zip(made, single, strict=True):
        assert differs(found, by_loops(record, oracles.array(tiny.matrices(record)))) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("name", ["swin", "swin padded", "pvt v2", "hiera", "maxvit"])
def test_statistics_with_windows_pooled_keys_and_padding_equal_loops(name: str) -> None:
    family = FAMILIES[name]
    size = family.sizes[-1]
    torch.manual_seed(0)
    model = family.build(size).eval().double()  # explicit single-precision weights sum to 1 only approximately
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


def test_distance_of_uniform_attention_equals_its_baseline() -> None:
    """Compare with 116.5 pixels for 14 x 14 patches of 16 pixels and 270 for 37 x 37 of 14, which were computed independently."""
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


def test_statistics_of_a_batch_equal_those_of_single_images() -> None:
    made = tiny.recording(batch=3)
    whole = statistics(made, dtype=torch.float64)
    for record, found in zip(made, whole, strict=True):
        for image in range(3):
            weights = tiny.matrices(record)[image : image + 1]
            one = of_matrix(weights, record.keys)
            torch.testing.assert_close(one.entropy[0], found.entropy[image], rtol=1e-10, atol=1e-10)


def test_order_of_patches_changes_only_the_distance() -> None:
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


def one_record(weights: Tensor, place: visattn.TokenLayout) -> Recording:
    return Recording(records=[tiny.record(MatrixOperator(weights, dtype=torch.float64), place)])


def test_collapsed_and_uniform_rows_are_counted() -> None:
    """Use four queries: one gives all attention to one key, one gives 99 % (not counted), one is uniform, and one nearly so."""
    place = tiny.layout((), (2, 2))
    nearly = [0.28, 0.24, 0.24, 0.24]
    rows = torch.tensor([[1, 0, 0, 0], [0.99, 0.01, 0, 0], [0.25] * 4, nearly], dtype=torch.float64)
    even = torch.full_like(rows, 0.25)
    (found,) = statistics(one_record(torch.stack([rows, even])[None], place), dtype=torch.float64)
    assert -sum(a * math.log(a) for a in nearly) > 0.98 * math.log(4)
    assert found.collapsed.tolist() == [[0.25, 0]]
    assert found.uniform.tolist() == [[0.5, 1]]
    assert found.keys == 4


def test_numbers_equal_the_tables_with_registers_summed() -> None:
    made = tiny.recording(prefix=("cls", "register0", "register1"))
    found = statistics(made)[0]
    numbers = found.numbers()
    assert list(numbers) == [
        *("entropy", "effective_keys", "max_weight", "collapsed", "uniform", "distance_px"),
        *("cls", "self", "patches", "padding", "registers"),
    ]
    torch.testing.assert_close(numbers["registers"], found.mass["register0"] + found.mass["register1"])
    whole = sum(numbers[name] for name in ("cls", "registers", "self", "patches", "padding"))
    torch.testing.assert_close(whole, torch.ones_like(found.entropy))


# ---- baselines of the distance ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", PREFIXES, ids=len)
def test_baselines_of_a_full_grid_equal_loops(prefix: Sequence[str]) -> None:
    record = tiny.recording(prefix=prefix, grid=(3, 5))[0]
    points = [place for place in places(record, "keys") if place is not None]
    apart = [[math.dist(a, b) for b in points] for a in points]
    (found, _) = statistics(tiny.recording(prefix=prefix, grid=(3, 5)), dtype=torch.float64)
    assert found.uniform_distance == pytest.approx(np.mean(apart), rel=1e-12)
    assert found.nearest_distance == pytest.approx(np.mean([sorted(row)[1] for row in apart]), rel=1e-12)
    assert found.nearest_distance == pytest.approx(tiny.PATCH)
    assert found.keys == len(prefix) + 15


@pytest.mark.parametrize("mask", [-math.inf, -100.0])
def test_masked_keys_are_excluded_from_baselines(mask: float) -> None:
    """Let each of six patches in a row attend only to its own half, evenly, so that every distance equals its baseline."""
    place = tiny.layout((), (1, 6))
    halves = torch.arange(6) // 3
    bias = torch.where(halves[:, None] == halves, 0.0, mask).expand(1, 2, 6, 6)
    flat = SoftmaxOperator(torch.zeros(1, 2, 6, 4), torch.zeros(1, 2, 6, 4), bias)
    (found,) = statistics(Recording(records=[tiny.record(flat, place)]), dtype=torch.float64)
    expected = np.mean([abs(i - j) * tiny.PATCH for half in (range(3), range(3, 6)) for i in half for j in half])
    assert found.distance is not None
    assert found.uniform_distance == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(found.distance, torch.full_like(found.distance, float(expected)))
    assert found.nearest_distance == tiny.PATCH
    assert found.keys == 3
    assert bool((found.uniform == 1).all())


def test_a_patch_that_attends_only_to_itself_has_no_nearest_distance() -> None:
    place = tiny.layout(("cls",), (1, 2))
    bias = torch.full((3, 3), -math.inf).fill_diagonal_(0)
    alone = SoftmaxOperator(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4), bias)
    (found,) = statistics(Recording(records=[tiny.record(alone, place)]))
    assert (found.keys, found.uniform_distance, found.nearest_distance) == (1, 0, None)
    assert float(found.collapsed) == 1
    assert float(found.uniform) == 0


def swin_sight(size: int, window: int, shift: int) -> list[list[bool]]:
    """Return which tokens attend to which in a shifted window, from the paper: the same window of the rolled grid, with no seam."""

    def region(place: int) -> tuple[int, int]:
        rolled = (place - shift) % size
        return rolled // window, 0 if rolled < size - window else 1 if rolled < size - shift else 2

    cells = [(region(i), region(j)) for i in range(size) for j in range(size)]
    return [[a == b for b in cells] for a in cells]


def test_baselines_of_shifted_windows_equal_the_paper() -> None:
    torch.manual_seed(0)
    model = FAMILIES["swin"].build((64, 64)).eval().double()
    with torch.no_grad(), visattn.capture(model) as recording:
        model(tiny.pixels(1, (64, 64)).double())
    checked = 0
    for record, found in zip(recording, statistics(recording, dtype=torch.float64), strict=True):
        side = record.queries.grid[0]
        if (
            not record.layer.endswith("blocks.1.attn") or side <= 4
        ):  # the second block of each stage is shifted, unless one window covers everything
            continue
        sight = swin_sight(side, 4, 2)
        points = [place for place in places(record, "keys") if place is not None]
        rows = [
            [math.dist(a, b) for b, seen in zip(points, row, strict=True) if seen] for a, row in zip(points, sight, strict=True)
        ]
        assert found.uniform_distance == pytest.approx(np.mean([np.mean(row) for row in rows]), rel=1e-10)
        assert found.keys == pytest.approx(np.mean([len(row) for row in rows]), rel=1e-12)
        assert found.nearest_distance == pytest.approx(record.queries.box.height / side)
        checked += 1
    assert checked == 2


# ---- divergence of heads ----------------------------------------------------------------------------------------------------------


def divergences(weights: oracles.Array) -> oracles.Array:
    """Compute the mean over queries of `KL(p || m) / 2 + KL(q || m) / 2` with their mean `m`; padding is one more key."""
    batch, heads, queries, _ = weights.shape
    out = np.zeros((batch, heads, heads))
    for b, g, h, i in np.ndindex(batch, heads, heads, queries):
        pairs = list(zip(*([*row, max(0.0, 1 - math.fsum(row))] for row in weights[b, [g, h], i]), strict=True))
        terms = [x * math.log(2 * x / (p + q)) / 2 for p, q in pairs for x in (p, q) if x > 0]
        out[b, g, h] += math.fsum(terms) / queries
    return out


@pytest.mark.parametrize("prefix", PREFIXES, ids=len)
def test_head_divergence_equals_loops(prefix: Sequence[str]) -> None:
    made = tiny.recording(batch=2, heads=4, prefix=prefix, grid=(3, 5))
    for number, record in enumerate(made):
        theirs = divergences(oracles.array(tiny.matrices(record)))
        mine = head_divergence(made, layer=number, dtype=torch.float64)
        assert float(np.abs(oracles.array(mine) - theirs).max()) < 1e-10
        assert float(np.abs(oracles.array(head_divergence(made, layer=record.layer)) - theirs).max()) < 1e-6
        assert theirs.max() > 0.1


@pytest.mark.parametrize("name", ["swin padded", "pvt v2", "hiera"])
def test_head_divergence_in_windows_with_pooled_keys_and_padding(name: str) -> None:
    family = FAMILIES[name]
    size = family.sizes[-1]
    torch.manual_seed(0)
    model = family.build(size).eval().double()
    with torch.no_grad(), visattn.capture(model) as recording:
        model(tiny.pixels(1, size).double())
    checked = 0
    for record in recording:
        batch, heads, queries, keys = record.operator.shape
        if heads < 2 or queries * keys > 30_000:
            continue
        theirs = divergences(oracles.array(record.operator.to(torch.float64).dense()))
        mine = head_divergence(recording, layer=record.layer, call=record.call, dtype=torch.float64)
        assert mine.shape == (batch, heads, heads)
        assert float(np.abs(oracles.array(mine) - theirs).max()) < 1e-10
        checked += 1
    assert checked


def test_divergence_is_zero_for_equal_heads_and_ln_2_for_disjoint_heads() -> None:
    place = tiny.layout((), (2, 2))
    left, right = torch.zeros(2, 4, 4, dtype=torch.float64)
    left[:, 0], right[:, 1] = 1, 1
    made = one_record(torch.stack([left, left, right])[None], place)
    expected = torch.tensor([[0, 0, 1], [0, 0, 1], [1, 1, 0]], dtype=torch.float64) * math.log(2)
    torch.testing.assert_close(head_divergence(made, dtype=torch.float64)[0], expected, rtol=0, atol=1e-12)


def test_head_divergence_allocates_no_matrix_of_all_pairs() -> None:
    """Check that the largest tensor for 1500 tokens and 8 heads is a tile, 200 times smaller than one matrix for each pair of heads."""
    sizes = [0]

    class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.append(out.numel() if isinstance(out, Tensor) else 0)
            return out

    place = tiny.layout((), (30, 50))
    made = Recording(records=[tiny.record(SoftmaxOperator(*tiny.operands(1500, heads=8)), place)])
    with Watching():  # type: ignore[no-untyped-call]
        head_divergence(made)
    assert max(sizes) <= 8 * 128 * 1501


def test_head_divergence_refuses_invalid_calls_layers_and_rows() -> None:
    place = tiny.layout()
    made = tiny.recording()
    with pytest.raises(OptionError, match=r"call must be one of 0 for layer -1, got 1\."):
        head_divergence(made, call=1)
    with pytest.raises(OptionError, match=r"layer must lie in \[-2, 1\], got 2"):
        head_divergence(made, layer=2)
    with pytest.raises(OptionError, match=r"rows do not sum to 1 in this layer"):
        head_divergence(one_record(torch.randn(1, 2, len(place), len(place)), place))


# ---- attention to sinks -----------------------------------------------------------------------------------------------------------


def test_sink_mass_equals_loops() -> None:
    """Use two layers. All queries of the second image attend to patches 7 and 20 in the first layer, and to no sink in the second."""
    place = tiny.layout(("cls",), (6, 8))
    made = Recording()
    for layer in range(2):
        query, key = tiny.operands(len(place), batch=2, sharpness=0.5, seed=layer)
        query[..., 0] += 6
        if layer == 0:
            key[1, :, [8, 21]] = 4.0
        made.records.append(tiny.record(SoftmaxOperator(query, key), place, layer=f"blocks.{layer}.attn"))
    found = find_sinks(made)
    assert [len(sinks) for sinks in found] == [0, 2]
    mine = sink_mass(made, found)
    assert mine.shape == (2, 2)
    assert mine[0].tolist() == [0, 0]
    for layer, record in enumerate(made):
        weights = tiny.matrices(record)[1].numpy()
        given = [weights[h, i, j] for h in range(2) for i in range(49) for j in (8, 21) if i != j]
        assert float(mine[1, layer]) == pytest.approx(math.fsum(given) / 2 / 49, abs=1e-6)
    assert float(mine[1, 0]) > 0.8
    assert float(mine[1, 1]) < 0.1
