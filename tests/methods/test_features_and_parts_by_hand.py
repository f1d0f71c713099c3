"""Features, gates, glimpses, parts of images and scores, with values worked out by hand."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny
from visattn.core.geometry import Box
from visattn.core.methods import gates, glimpses, gradcam, gradcam_plus_plus, xgradcam
from visattn.core.methods.gate_maps import layer_of, mixed
from visattn.core.methods.scored import CountingScore, ScoredImages, _balance
from visattn.core.methods.segments import Segments, _cells, about, grid
from visattn.core.methods.selection import tokens_of
from visattn.core.methods.taps import feature_of, over_positions, placed, tap
from visattn.core.records import FeatureRecord, Recording, TokenLayout
from visattn.errors import ModelError, OptionError, ShapeError

BATCH, CHANNELS = 2, 4
PLACE = tiny.layout(("cls",), (5, 7))
TOKENS = len(PLACE)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# features


def featured(*layers: tuple[str, Any, int]) -> Recording:
    made = Recording(input_size=(80, 112))
    for number, (name, role, call) in enumerate(layers):
        shape = (BATCH, TOKENS, CHANNELS) if role == "tokens" else (BATCH, CHANNELS, 5, 7)
        place = PLACE if role == "tokens" else tiny.layout((), (5, 7))
        value, slope = noise(*shape, seed=number), noise(*shape, seed=50 + number)
        calls = sum(one == name for one, _, _ in layers)
        made.features.append(FeatureRecord(name, 0, role, value, slope, place, call=call, calls=calls))
    return made


def test_features_are_chosen_by_index_name_or_call() -> None:
    made = featured(("a", "activation", 0), ("b", "tokens", 0), ("b", "tokens", 1), ("c", "activation", 0))
    for layer, place in ((0, 0), (3, 3), (-1, 3), (-4, 0), ("a", 0), ("b", 2), ("b #0", 1), ("b #1", 2)):
        assert feature_of(made, layer) is made.features[place]
    for layer in (4, -5, "d", "b #2"):
        with pytest.raises(OptionError, match=r"recorded: a, b #0, b #1, c\)"):
            feature_of(made, layer)
    for layer, place in ((0, 1), (1, 2), (-1, 2), (-2, 1), ("b", 2), ("b #0", 1)):
        assert tokens_of(made, layer) is made.features[place]
    for layer in (2, -3, "a"):
        with pytest.raises(OptionError, match="no token features of layer"):
            tokens_of(made, layer)


def test_the_last_call_with_a_known_place_is_taken() -> None:
    made = featured(("b", "activation", 0), ("b", "activation", 1))
    made.features[1] = replace(made.features[1], layout=None)
    assert feature_of(made, "b") is made.features[0]
    made.features[0] = replace(made.features[0], layout=None)
    assert feature_of(made, "b") is made.features[1]


def test_a_map_has_two_positions_or_more() -> None:
    value = noise(BATCH, CHANNELS, 1, 2)
    assert placed(FeatureRecord("a", 0, "activation", value, layout=tiny.layout((), (1, 2)))).cells == 2
    with pytest.raises(OptionError, match="only one position"):
        placed(FeatureRecord("a", 0, "activation", value[..., :1], layout=tiny.layout((), (1, 1))))
    with pytest.raises(OptionError, match=r"positions of its values \(2, 4, 1, 2\)"):
        placed(FeatureRecord("a", 0, "activation", value))


def test_tokens_and_maps_become_channels_of_positions() -> None:
    tokens, maps = noise(BATCH, TOKENS, CHANNELS), noise(BATCH, CHANNELS, 5, 7)
    assert torch.equal(over_positions(tokens, PLACE)[1, 3], tokens[1, 1:, 3])
    assert torch.equal(over_positions(maps, PLACE)[1, 3], maps[1, 3].flatten())


@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_activation_maps_of_the_last_layer_follow_their_formulas(epsilon: float) -> None:
    made = featured(("a", "activation", 0), ("b", "tokens", 0))
    values, slopes = made.features[1].value[:, 1:].double(), made.features[1].gradient[:, 1:].double()  # type: ignore[index]
    plain, plus, area = torch.zeros(3, BATCH, 35, dtype=torch.float64)
    for image in range(BATCH):
        for channel in range(CHANNELS):
            feature, slope = values[image, :, channel], slopes[image, :, channel]
            total = float(feature.sum())
            weight = sum(g * g / (2 * g * g + g**3 * total + epsilon) * g for g in slope.tolist() if g > 0)
            plain[image] += slope.mean() * feature
            plus[image] += weight * feature
            area[image] += (slope * feature).sum() / (total + 1e-7) * feature
    for found, expected in (
        (gradcam(made, dtype=torch.float64), plain),
        (gradcam_plus_plus(made, epsilon=epsilon, dtype=torch.float64), plus),
        (xgradcam(made, dtype=torch.float64), area),
    ):
        torch.testing.assert_close(found.values, expected.clamp(min=0).view(BATCH, 5, 7))
        assert found.facts.layer == "b"
    made.features[1] = replace(made.features[1], gradient=None)
    with pytest.raises(OptionError, match="a score's gradient is needed"):
        tap(made, "b", torch.float64)


# gates and glimpses


def test_a_gate_is_chosen_by_name_before_index() -> None:
    names = ["a", "1", "a", "b"]
    for layer, found in ((0, "a"), (1, "1"), (2, "b"), (-1, "b"), (-3, "a"), ("b", "b"), ("1", "1")):
        assert layer_of(layer, names) == found
    for wrong in (3, -4, "c"):
        with pytest.raises(OptionError, match=f"one of the modules with such gates, a, 1, b, got {wrong}"):
            layer_of(wrong, names)


def test_a_gate_of_an_attached_module_is_told_with_its_weight() -> None:
    place, made = tiny.layout((), (5, 7)), Recording(input_size=(80, 112))
    value = noise(BATCH, CHANNELS, 5, 7)
    made.features += [
        FeatureRecord("a", 0, "mix", torch.tensor([[0.25]])),
        FeatureRecord("a.attention", 0, "gate", value, layout=place),
        FeatureRecord("ab", 0, "channel_gate", value[:, :, 0, 0]),
    ]
    assert mixed(made, "a.attention") == 0.25
    assert mixed(made, "ab") is None
    found = gates(made)
    torch.testing.assert_close(found.values, value.mean(1))
    assert found.provenance.notes == ("a.attention acts with the weight 0.25: y = x + 0.25 (A(x) - x)",)


def test_glimpses_cover_pixels_whose_centers_lie_inside() -> None:
    made = Recording(input_size=(6, 8))
    place = TokenLayout("maps", (), (3, 2), Box(0, 2, 6, 8))  # a cell is 2 x 3 pixels
    for boxes in ([[0.0, 0.0, 1.25, 1.0], [0.0, 0.0, 3.0, 2.0]], [[1.0, 0.5, 2.0, 2.0], [0.0, 0.0, 3.0, 2.0]]):
        made.features.append(FeatureRecord("eye", 0, "glimpse", torch.tensor([boxes]), layout=place, call=0))
    found = glimpses(made)
    expected = torch.zeros(1, 6, 8)
    expected[0, 0:2, 2:5] += 0.5  # rows 0 to 2.5 exclude the center 2.5
    expected[0, 2:4, 3:8] += 0.5  # columns 3.5 to 8 include the center 3.5
    assert torch.equal(found.values, expected)
    assert found.facts.glimpses == ((((0.0, 2.0, 2.5, 5.0), (0.0, 2.0, 6.0, 8.0)), ((2.0, 3.5, 4.0, 8.0), (0.0, 2.0, 6.0, 8.0))),)
    assert found.layout.box == Box(0, 0, 6, 8)
    assert found.layout.grid == (6, 8)


# parts and scores


def test_pixels_are_divided_into_cells_as_even_as_whole_pixels_allow() -> None:
    found = grid((5, 7), 2, 3)
    rows, columns = [0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 2, 2]
    assert found.labels.tolist() == [[3 * row + column for column in columns] for row in rows]
    assert (len(found), found.grid, found.text) == (6, (2, 3), "grid 2 x 3")
    assert grid((5, 7), 5, 7).text == "pixels"
    for size in ((1, 2), (2, 1), (5, 7)):
        assert len(grid((5, 7), *size)) == size[0] * size[1]
    for size in ((1, 1), (0, 3), (3, 0), (6, 7), (5, 8)):
        with pytest.raises(OptionError, match=f"at most 5 x 7 .* got {size[0]} x {size[1]}"):
            grid((5, 7), *size)


def test_values_of_parts_are_summed_picked_and_spread() -> None:
    labels = torch.tensor([[0, 0, 1], [2, 2, 1]])
    parts = Segments(labels, (2, 3), "")
    assert parts.summed(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).tolist() == [3.0, 9.0, 9.0]
    assert parts.picked(torch.tensor([[1.0, 1.0, 8.0], [4.0, 4.0, 8.0]])).tolist() == [1.0, 8.0, 4.0]
    assert parts.spread(torch.tensor([5.0, 6.0, 7.0])).tolist() == [[5.0, 5.0, 6.0], [7.0, 7.0, 6.0]]
    assert Segments(labels, (1, 3), "").spread(torch.tensor([5.0, 6.0, 7.0])).tolist() == [[5.0, 6.0, 7.0]]


@pytest.mark.parametrize(
    ("side", "patch", "wanted", "cells"),
    [
        (224, 16, 14.0, 14),
        (224, 16, 7.9, 7),
        (224, 16, 3.0, 2),
        (224, 16, 3.2, 3),
        (224, 16, 100.0, 14),
        (224, 16, 0.2, 1),
        (10, 16, 3.0, 1),
        (12, 1, 4.6, 5),
        (12, 1, 40.0, 12),
        (144, 16, 3.0, 3),
        (144, 16, 4.5, 3),
        (176, 16, 7.4, 11),
    ],
)
def test_cells_are_whole_patches_if_a_divisor_is_near(side: int, patch: int, wanted: float, cells: int) -> None:
    assert _cells(side, patch, wanted) == cells
    assert about((224, 448), (16, 32), 98) == (7, 14)


@pytest.mark.parametrize(("total", "warns"), [(1.06, True), (1.04, False), (0.94, True), (0.96, False)])
def test_a_sum_that_misses_the_rise_by_more_than_a_twentieth_warns(total: float, warns: bool) -> None:
    values = torch.tensor([total, 0.0, 0.0])
    notes, warnings = _balance(values, 3.0, 2.0, additive=True)
    assert notes[0] == "the score is 3, 2 on the baseline"
    assert notes[1].startswith(f"values sum to {total:.4g}, the score rises by 1 from the baseline: residual 0.0")
    assert warnings == ([f"{notes[1]}; increase steps or samples"] if warns else [])
    assert _balance(values, 3.0, 2.0, additive=False)[1] == []
    assert _balance(torch.tensor([5.0, -5.0005]), 1.0, 1.0, additive=True)[1] == [], "rounding of large values"
    assert len(_balance(torch.tensor([5.0, -5.0015]), 1.0, 1.0, additive=True)[1]) == 1


def test_a_score_counts_images_and_refuses_what_is_no_score() -> None:
    score = CountingScore(lambda x: x.sum((1, 2, 3)))
    assert score(torch.ones(2, 3, 5, 7)).tolist() == [105.0, 105.0]
    score(torch.ones(3, 3, 5, 7))
    assert score.count == 5
    with pytest.raises(ShapeError, match=r"each of 2 images, got \(2, 3\)"):
        CountingScore(lambda x: x.sum((2, 3)))(torch.ones(2, 3, 5, 7))
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ModelError, match="NaN or infinite"):
            CountingScore(partial(torch.full_like, fill_value=bad))(torch.ones(1))


def test_baselines_are_the_mean_or_black_after_normalization() -> None:
    scored = ScoredImages(noise(2, 3, 5, 7), lambda x: x.sum((1, 2, 3)), (0.5, 0.25, 1.0), (0.5, 0.5, 4.0), (2, 3))
    assert not scored.baseline("mean").any()
    assert scored.baseline("black").shape == (2, 3, 5, 7)
    assert scored.baseline("black")[1, :, 4, 6].tolist() == [-1.0, -0.5, -0.25]
    assert [len(part) for part in scored.parts("pixels")] == [35, 35]
    assert scored.parts("grid", (2, 3))[1].grid == (2, 3)
    assert len(scored.parts("grid", num_segments=2)) == 2
    with pytest.raises(OptionError, match="num_segments must be at least 2, got 1"):
        scored.parts("grid", num_segments=1)
    with pytest.raises(OptionError, match="applies only to"):
        scored.parts("pixels", (2, 3))


def test_records_of_features_and_parts_are_fixed_and_compared_by_identity() -> None:
    made = featured(("a", "activation", 0))
    scored = ScoredImages(noise(1, 3, 5, 7), torch.sum)
    for build, name in (
        (lambda: tap(made, 0, torch.float32), "layer"),
        (lambda: grid((5, 7), 2, 3), "text"),
        (lambda: replace(scored), "alone"),
    ):
        one, other = build(), build()
        assert one == one
        assert one != other
        assert len({one, other}) == 2
        with pytest.raises(FrozenInstanceError):
            setattr(one, name, "")
