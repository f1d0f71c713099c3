"""Holes, left by tokens that a model drops: NaN in maps, hatched in pictures, refused where every cell must have a value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

import visattn
from tests import tiny
from tests.oracles import maps as oracles
from tests.oracles.heatmaps import mix_nearest, slow_heat
from visattn import evaluation
from visattn.core import methods
from visattn.core.drawing.marks import spotlight
from visattn.core.drawing.overlays import overlay, rgb_components
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import AttentionMap, load_map, normalize, save_map, value_range
from visattn.core.records import Recording, TokenLayout
from visattn.errors import MapError, OptionError
from visattn.evaluation.heads import statistics

GRID = (4, 6)
HOLES = (0, 3, 7, 8, 22, 23)
PRESENT = tuple(cell for cell in range(24) if cell not in HOLES)
LAYOUT = TokenLayout("tokens", ("cls", "register0"), GRID, Box(0, 0, 64, 96), HOLES)
WINDOWS = {
    "whole": Geometry((45, 70), (64, 96), Box(0, 0, 45, 70)),
    "crop": Geometry((40, 64), (64, 96), Box(2.5, 14, 37.5, 49.25)),
    "padding": Geometry((50, 60), (64, 96), Box(-5.25, 8, 54.75, 40)),
}


def holed(seed: int = 0, *lead: int, axes: tuple[str, ...] = (), meaning: str = "attention") -> AttentionMap:
    values = torch.rand(*lead, len(PRESENT), generator=torch.Generator().manual_seed(seed))
    return AttentionMap(LAYOUT.on_grid(values), axes, LAYOUT, {}, meaning)


# ---- the layout


def test_tokens_are_numbered_without_the_holes() -> None:
    assert len(LAYOUT) == 2 + len(PRESENT)
    assert LAYOUT.cells == len(PRESENT)
    for number, cell in enumerate(PRESENT):
        row, column = cell // GRID[1], cell % GRID[1]
        assert LAYOUT.patch(row, column) == 2 + number
        assert LAYOUT.cell(2 + number) == (row, column)
        assert LAYOUT.token_at(16 * row + 3, 16 * column + 15) == 2 + number
    for cell in HOLES:
        with pytest.raises(OptionError, match=rf"patch {cell // 6},{cell % 6} is a hole: the model dropped its token"):
            LAYOUT.patch(cell // GRID[1], cell % GRID[1])


def test_values_lie_in_their_cells_and_holes_are_nan() -> None:
    values = torch.rand(2, 5, len(PRESENT))
    grid = LAYOUT.on_grid(values)
    assert grid.shape == (2, 5, *GRID)
    for number, cell in enumerate(PRESENT):
        assert torch.equal(grid[..., cell // 6, cell % 6], values[..., number])
    assert int(grid.isnan().sum()) == 10 * len(HOLES)


# ---- what is recorded


def test_dropped_patches_equal_those_of_timms_patch_dropout() -> None:
    for seed in range(4):
        model: Any = tiny.vit(img_size=(64, 96), patch_drop_rate=0.4).train()
        torch.manual_seed(seed)
        with torch.no_grad(), visattn.capture(model) as recording:
            model(tiny.pixels(size=(64, 96)))
        torch.manual_seed(seed)
        numbered = torch.arange(-1, 24)[None, :, None].expand(1, 25, 32).float()
        kept = model.patch_drop(numbered)[0, 1:, 0].int()
        assert [record.kind for record in recording] == ["self", "self"]
        for record in recording:
            assert record.keys.present == tuple(sorted(kept.tolist()))
            assert record.keys.grid == GRID


def mae(noise: Tensor) -> Recording:
    config = hf.ViTMAEConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=64, patch_size=16
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = hf.ViTMAEModel(config).eval()  # type: ignore[no-untyped-call]
    with torch.no_grad(), visattn.capture(model) as recording:
        model(torch.randn(len(noise), 3, 64, 64, generator=torch.Generator().manual_seed(1)), noise=noise)
    return recording


def test_a_masked_autoencoder_keeps_a_quarter_of_the_patches() -> None:
    for seed in range(3):
        noise = torch.rand(1, 16, generator=torch.Generator().manual_seed(seed))
        kept = sorted(range(16), key=noise[0].tolist().__getitem__)[:4]
        for record in mae(noise):
            assert record.reason is None
            assert record.keys.prefix == ("cls",)
            assert record.keys.present == tuple(sorted(kept))


def test_images_that_keep_other_tokens_are_not_put_on_one_grid() -> None:
    recording = mae(torch.rand(2, 16, generator=torch.Generator().manual_seed(0)))
    assert {record.reason for record in recording} == {"the images of the batch are arranged differently"}


def dropping() -> Recording:
    model = tiny.vit(img_size=(64, 96), patch_drop_rate=0.4).train()
    torch.manual_seed(3)
    with torch.no_grad(), visattn.capture(model) as recording:
        model(tiny.pixels(size=(64, 96)))
    return recording


def test_rollout_of_the_kept_patches_equals_the_product_of_their_matrices() -> None:
    recording = dropping()
    layout = recording[0].keys
    expected = oracles.rollout([list(record.operator.dense()[0].double()) for record in recording])[0, 1:]
    found = methods.rollout(recording).values[0]
    for number, cell in enumerate(layout.present):
        assert float(found[cell // 6, cell % 6]) == pytest.approx(float(expected[number]), rel=1e-4)
    assert int(found.isnan().sum()) == len(layout.holes) == 10


@pytest.mark.parametrize("name", ["attention", "rollout", "norm_attention", "similarity", "pca", "attention_flow"])
def test_maps_are_nan_in_the_holes(name: str) -> None:
    model: Any = tiny.vit(img_size=(64, 96), patch_drop_rate=0.4).train()
    model.patch_drop.ordered = True
    with torch.no_grad(), visattn.capture(model, values=True, features="all") as recording:
        model(tiny.pixels(size=(64, 96)))
    found = methods.METHODS[name].function(recording, **({"query": "cls"} if name == "similarity" else {}))
    holes = recording[0].keys.holes
    assert found.layout.holes == holes
    flat = found.values.flatten(-2)
    assert bool(flat[..., list(holes)].isnan().all())
    assert int(flat.isnan().sum()) == flat[..., 0].numel() * len(holes)


def test_maps_of_gradient_methods_are_nan_in_the_holes() -> None:
    model = tiny.vit(img_size=(64, 96), patch_drop_rate=0.4).train()
    with visattn.capture(model, gradients=True, features="all") as recording:
        logits = model(tiny.pixels(size=(64, 96)))
    recording = recording.gradients(logits[:, 1])
    for name in ("relevance", "gradient_rollout", "legrad", "gradcam", "hirescam", "attention_gradient"):
        found = methods.METHODS[name].function(recording)
        assert int(found.values.isnan().sum()) == len(recording[0].keys.holes) > 0, name


def test_head_statistics_measure_from_cell_to_cell() -> None:
    recording = dropping()
    record, cells = recording[0], recording[0].keys.present
    weights = record.operator.dense()[0].double().numpy()
    total = np.zeros(len(weights))
    for head, matrix in enumerate(weights):
        for query, one in enumerate(cells):
            row = matrix[1 + query, 1:]
            apart = [16 * np.hypot(one // 6 - other // 6, one % 6 - other % 6) for other in cells]
            total[head] += sum(weight * far for weight, far in zip(row, apart, strict=True)) / row.sum() / len(cells)
    found = statistics(recording)[0].distance
    assert found is not None
    assert np.allclose(found[0].numpy(), total, rtol=1e-4)


def test_tokens_dropped_between_blocks_are_not_multiplied() -> None:
    model = tiny.vit()
    model.get_submodule("blocks.0").register_forward_hook(lambda _, __, tokens: tokens[:, :-1])
    with torch.no_grad(), visattn.capture(model) as recording:
        model(tiny.pixels())
    assert [record.keys.holes for record in recording] == [(), (5,)]
    with pytest.raises(OptionError, match="2 x 3 without 1"):
        methods.rollout(recording)


# ---- in pixels


def neighbors(grid: NDArray[np.float64], y: float, x: float) -> float:
    """Interpolate bilinearly over the cells that are not holes; holes are NaN."""
    if np.isnan(grid[int(y), int(x)]):
        return float("nan")
    total = share = 0.0
    for r in range(-1, grid.shape[0] + 1):
        for c in range(-1, grid.shape[1] + 1):
            value = grid[min(max(r, 0), grid.shape[0] - 1), min(max(c, 0), grid.shape[1] - 1)]
            tent = max(0.0, 1 - abs(y - (r + 0.5))) * max(0.0, 1 - abs(x - (c + 0.5)))
            if not np.isnan(value):
                total, share = total + tent * value, share + tent
    return total / share


@pytest.mark.parametrize("geometry", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize(("interpolation", "mix"), [("nearest", mix_nearest), ("bilinear", neighbors)])
def test_pixels_in_a_hole_are_nan_and_others_interpolate_the_kept_cells(geometry: Geometry, interpolation: Any, mix: Any) -> None:
    attention_map = holed()
    expected = slow_heat(attention_map.values.double().numpy(), geometry, 16, mix)
    heat = attention_map.to_heatmap(geometry, interpolation).values
    assert np.array_equal(np.isnan(heat), np.isnan(expected))
    assert np.isnan(expected).any()
    assert np.allclose(heat, expected, atol=1e-5, equal_nan=True)


def test_bicubic_stays_in_the_range_and_panels_are_independent() -> None:
    attention_map = holed(1, 2, 3, axes=("layer", "head"))
    heat = attention_map.to_heatmap(WINDOWS["whole"], "bicubic")
    alone = attention_map.at(layer=1, head=2).to_heatmap(WINDOWS["whole"], "bicubic")
    assert np.array_equal(heat.values[1, 2], alone.values, equal_nan=True)
    assert np.nanmin(alone.values) >= np.nanmin(alone.grid) - 1e-6
    assert np.nanmax(alone.values) <= np.nanmax(alone.grid) + 1e-6


def test_scaling_ignores_holes_and_keeps_them() -> None:
    heat = holed().to_heatmap(WINDOWS["whole"])
    low, high = value_range(heat.grid, "minmax", holes=True)
    present = [float(heat.grid[cell // 6, cell % 6]) for cell in PRESENT]
    assert (low, high) == (min(present), max(present))
    scaled = normalize(heat)
    assert np.array_equal(np.isnan(scaled.values), np.isnan(heat.values))
    assert np.nanmax(scaled.grid) == 1
    with pytest.raises(MapError, match="NaN or infinite"):
        value_range(heat.grid, "minmax")


def test_nan_outside_the_holes_is_refused() -> None:
    values = torch.ones(GRID)
    assert int(AttentionMap(values, (), LAYOUT, {}, "attention").values.isnan().sum()) == len(HOLES)
    assert not bool(values.isnan().any())  # the caller's values are not changed
    values[3, 3] = torch.nan
    with pytest.raises(MapError, match="1 of 24 map values are NaN"):
        AttentionMap(values, (), LAYOUT, {}, "attention")


def test_mass_ignores_holes() -> None:
    mask = holed().mass(0.5).values
    expected = set[int]()
    values = holed().values.flatten()
    for cell in sorted(PRESENT, key=lambda cell: -float(values[cell])):
        if sum(float(values[one]) for one in expected) >= 0.5 * float(values[list(PRESENT)].sum()):
            break
        expected.add(cell)
    assert {cell for cell in PRESENT if float(mask.flatten()[cell]) == 1} == expected
    assert bool(mask.flatten()[list(HOLES)].isnan().all())


def test_saved_maps_keep_their_holes(tmp_path: Path) -> None:
    path = tmp_path / "map.npz"
    path.write_bytes(save_map(holed(), WINDOWS["whole"]))
    loaded = load_map(path)
    assert isinstance(loaded, tuple)
    assert loaded[0].layout == LAYOUT
    assert torch.equal(loaded[0].values.nan_to_num(-1), holed().values.nan_to_num(-1))


# ---- in pictures


def photo(height: int = 45, width: int = 70) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


@pytest.mark.parametrize("options", [{}, {"blend": "value"}, {"normalize": "percentile"}, {"opacity": 1}], ids=str)
def test_only_holes_are_hatched(options: dict[str, Any]) -> None:
    heat = holed().to_heatmap(WINDOWS["whole"])
    holes = np.isnan(heat.values)
    drawn = np.asarray(overlay(photo(), heat, **options))
    filled = holed().values.nan_to_num(float(holed().values.nan_to_num(1).min()))
    whole = AttentionMap(filled, (), TokenLayout("tokens", (), GRID, LAYOUT.box), {}, "attention").to_heatmap(WINDOWS["whole"])
    whole.values[~holes] = heat.values[~holes]
    if options.get("normalize") != "percentile":  # whose scale includes the filled cells
        assert np.array_equal(drawn[~holes], np.asarray(overlay(photo(), whole, **options))[~holes])
    base = np.asarray(photo() if options == {"opacity": 1} else photo().convert("L").convert("RGB"))
    line = (drawn == 190).all(-1) & holes
    assert 0.1 < line.sum() / holes.sum() < 0.5
    assert np.array_equal(drawn[holes & ~line], base[holes & ~line] // 3)


def test_an_opacity_of_zero_is_the_photo() -> None:
    assert np.array_equal(np.asarray(overlay(photo(), holed().to_heatmap(WINDOWS["whole"]), opacity=0)), np.asarray(photo()))


def test_contours_and_components_ignore_holes() -> None:
    heat = holed().to_heatmap(WINDOWS["whole"], "nearest")
    overlay(photo(), heat, contours=[0.5])
    spotlight(photo(), holed().mass(0.5).to_heatmap(WINDOWS["whole"], "nearest"))
    three = holed(2, 3, axes=("component",)).to_heatmap(WINDOWS["whole"], "nearest")
    drawn = np.asarray(rgb_components(photo(), three))
    holes = np.isnan(three.values[0])
    line = (drawn == 190).all(-1) & holes
    assert np.array_equal(drawn[holes & ~line], np.asarray(photo())[holes & ~line] // 3)


def test_explain_notes_the_number_of_hatched_patches() -> None:
    model = tiny.vit(img_size=(64, 96))
    model.get_submodule("pos_drop").register_forward_hook(lambda _, __, t: t[:, [0, *(1 + cell for cell in PRESENT)]])
    found = visattn.explain(model, photo(64, 96), method="rollout")
    assert found.map.layout.holes == HOLES
    assert "6 of 24 patches are hatched: the model dropped their tokens" in found.provenance.notes
    drawn, plain = (np.asarray(picture) for picture in (found.overlay(), found.photo))
    holes = np.isnan(found.heatmap().values)
    assert holes.any()
    assert ((drawn == 190).all(-1) & holes).sum() > 0.1 * holes.sum()
    assert not np.array_equal(drawn[~holes], plain[~holes])


# ---- where a hole would be counted


def test_measures_refuse_maps_with_holes() -> None:
    mask = np.zeros((45, 70), bool)
    mask[:20] = True
    geometry, attention_map = WINDOWS["whole"], holed()
    for measure in (
        evaluation.lift,
        evaluation.energy_inside,
        evaluation.auroc,
        evaluation.average_precision,
        evaluation.pointing_game,
    ):
        with pytest.raises(MapError, match="6 of the map's cells are holes, where the model dropped tokens"):
            measure(attention_map, mask, geometry)
    for baseline in (evaluation.center_prior, evaluation.smooth_random, evaluation.shifted_copies):
        with pytest.raises(MapError, match="6 of the map's cells are holes"):
            baseline(attention_map)
