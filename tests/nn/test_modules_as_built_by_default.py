"""Modules built with their defaults, and the helpers that they share, on sizes that all differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from visattn import nn as ours
from visattn.errors import OptionError, ShapeError
from visattn.nn import positions, shape_checks
from visattn.nn.means import mean_over
from visattn.nn.tokens import multihead
from visattn.nn.tokens.augmented import _between
from visattn.nn.tokens.window import _pair, _spread


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


DEFAULTS: dict[str, tuple[Callable[[], nn.Module], dict[str, tuple[int, ...]]]] = {
    "SE": (lambda: ours.SqueezeExcite(48), {"fc1.weight": (3, 48, 1, 1), "fc1.bias": (3,), "fc2.weight": (48, 3, 1, 1)}),
    "CBAM": (lambda: ours.CBAM(48), {"fc1.weight": (3, 48, 1, 1), "fc1.bias": (3,), "conv.weight": (1, 2, 7, 7)}),
    "BAM": (
        lambda: ours.BAM(48),
        {
            "fc1.weight": (3, 48, 1, 1),
            "convs.0.weight": (3, 48, 1, 1),
            "convs.2.weight": (3, 3, 3, 3),
            "plane.weight": (1, 3, 1, 1),
        },
    ),
    "scSE": (lambda: ours.SCSE(6), {"fc1.weight": (3, 6, 1, 1), "conv.weight": (1, 6, 1, 1)}),
    "ECA": (lambda: ours.ECA(64), {"conv.weight": (1, 1, 3)}),
    "triplet": (lambda: ours.TripletAttention(6), {"convs.0.weight": (1, 2, 7, 7), "convs.2.weight": (1, 2, 7, 7)}),
    "coordinate": (lambda: ours.CoordinateAttention(320), {"conv1.weight": (10, 320, 1, 1), "conv_h.weight": (320, 10, 1, 1)}),
    "coordinate, narrow": (lambda: ours.CoordinateAttention(64), {"conv1.weight": (8, 64, 1, 1)}),
    "GC": (
        lambda: ours.GlobalContext(48),
        {"score.weight": (1, 48, 1, 1), "fc1.weight": (3, 48, 1, 1), "norm.weight": (3, 1, 1)},
    ),
    "GE": (lambda: ours.GatherExcite(48, variant="theta-plus", extent=2), {"excite.0.weight": (3, 48, 1, 1)}),
    "SK": (
        lambda: ours.SelectiveKernel(64),
        {
            "convs.0.weight": (64, 2, 3, 3),
            "convs.1.weight": (64, 2, 3, 3),
            "squeeze.weight": (32, 64, 1, 1),
            "select.weight": (128, 32, 1, 1),
        },
    ),
    "SK, wide": (lambda: ours.SelectiveKernel(640), {"squeeze.weight": (40, 640, 1, 1)}),
    "NL": (lambda: ours.NonLocal(6), {"query.weight": (3, 6, 1, 1), "output.weight": (6, 3, 1, 1), "norm.weight": (6,)}),
    "SAGAN": (lambda: ours.SelfAttention2d(24), {"query.weight": (3, 24, 1, 1), "value.weight": (3, 24, 1, 1), "gamma": (1,)}),
    "SAGAN official": (lambda: ours.SelfAttention2d(24, variant="official"), {"value.weight": (12, 24, 1, 1)}),
    "external": (lambda: ours.ExternalAttention(6), {"key.weight": (64, 6), "value.weight": (6, 64)}),
    "SASA": (
        lambda: ours.StandAloneSelfAttention(32),
        {"rows": (8, 7, 2), "columns": (8, 7, 2), "query.weight": (32, 32, 1, 1), "value.weight": (32, 32, 1, 1)},
    ),
    "augmented": (
        lambda: ours.AttentionAugmentedConv2d(6, 90, size=(5, 7)),
        {
            "conv.weight": (66, 6, 3, 3),
            "key.weight": (24, 6, 1, 1),
            "value.weight": (24, 6, 1, 1),
            "rows": (9, 3),
            "columns": (13, 3),
        },
    ),
    "multi-head": (lambda: ours.MultiHeadAttention(24), {"qkv.weight": (72, 24), "qkv.bias": (72,), "proj.weight": (24, 24)}),
    "class": (lambda: ours.ClassAttention(24), {"q.weight": (24, 24), "proj.bias": (24,)}),
    "talking heads": (lambda: ours.TalkingHeadsAttention(24), {"proj_l.weight": (8, 8), "proj_w.weight": (8, 8)}),
    "cross-covariance": (lambda: ours.CrossCovarianceAttention(24), {"temperature": (8, 1, 1)}),
    "window": (lambda: ours.WindowAttention(24), {"relative_position_bias_table": (169, 8), "qkv.bias": (72,)}),
    "sliding": (lambda: ours.SlidingWindowAttention(24, radius=2), {"qkv.weight": (72, 24), "qkv.bias": (72,)}),
    "DRAW write": (lambda: ours.DrawWrite(2, 6), {"window.weight": (5, 6), "patch.weight": (50, 6), "patch.bias": (50,)}),
    "STN": (lambda: ours.SpatialTransformer(6), {"theta.bias": (6,), "localization.0.weight": (16, 6, 5, 5)}),
    "STN attention": (lambda: ours.SpatialTransformer(6, attention=True), {"theta.bias": (3,)}),
    "additive": (lambda: ours.AdditiveScore(6, 5), {"query.weight": (5, 6), "key.bias": (5,), "vector.weight": (1, 5)}),
    "local-p": (lambda: ours.LocalPredictive(6, 2), {"hidden.weight": (6, 6), "vector.weight": (2, 6)}),
    "soft": (lambda: ours.SoftAttention(6, 5), {}),
}


@pytest.mark.parametrize("name", list(DEFAULTS))
def test_parameters_have_the_documented_sizes(name: str) -> None:
    build, expected = DEFAULTS[name]
    found = shapes(build())
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: ours.ClassAttention(24), "q.bias"),
        (lambda: ours.TalkingHeadsAttention(24), "qkv.bias"),
        (lambda: ours.CrossCovarianceAttention(24), "qkv.bias"),
        (lambda: ours.ExternalAttention(6), "key.bias"),
        (lambda: ours.ExternalAttention(6), "value.bias"),
        (lambda: ours.ExternalAttention(6, variant="official"), "output.bias"),
        (lambda: ours.SelfAttention2d(24), "output.bias"),
        (lambda: ours.StandAloneSelfAttention(32), "query.bias"),
        (lambda: ours.StandAloneSelfAttention(32), "key.bias"),
        (lambda: ours.StandAloneSelfAttention(32), "value.bias"),
        (lambda: ours.ECA(64), "conv.bias"),
        (lambda: ours.CBAM(48, variant="paper"), "fc1.bias"),
        (lambda: ours.CBAM(48), "conv.bias"),
        (lambda: ours.SelectiveKernel(64), "select.bias"),
        (lambda: ours.LocalPredictive(6, 2), "hidden.bias"),
        (lambda: ours.LocationScore(6, 5), "place.bias"),
    ],
)
def test_layers_without_a_bias_have_none(build: Callable[[], nn.Module], key: str) -> None:
    assert key not in shapes(build())


POSITIONAL: list[tuple[type[nn.Module], tuple[Any, ...]]] = [
    (ours.SqueezeExcite, (8, 2, 3)),
    (ours.ECA, (8, 3)),
    (ours.GlobalContext, (8, 2, 3)),
    (ours.GatherExcite, (8, 2, 3)),
    (ours.SelectiveKernel, (8, 2, 3)),
    (ours.CBAM, (8, 2, 3)),
    (ours.BAM, (8, 2, 3)),
    (ours.SCSE, (8, 2, 3)),
    (ours.CoordinateAttention, (8, 2, 3)),
    (ours.TripletAttention, (8, 3)),
    (ours.SimAM, (8, 1e-4)),
    (ours.ExternalAttention, (8, 6)),
    (ours.SelfAttention2d, (8, 2, 3)),
    (ours.NonLocal, (8, 3)),
    (ours.StandAloneSelfAttention, (8, 16, 3)),
    (ours.AttentionAugmentedConv2d, (8, 8, 3)),
    (ours.MultiHeadAttention, (8, 2, True)),
    (ours.ClassAttention, (8, 2, True)),
    (ours.TalkingHeadsAttention, (8, 2, True)),
    (ours.CrossCovarianceAttention, (8, 2, True)),
    (ours.WindowAttention, (8, 2, 3)),
    (ours.SlidingWindowAttention, (8, 2, 1)),
    (ours.AdditiveScore, (8, 6, 5)),
    (ours.CosineScore, (2.0, True)),
    (ours.LocalPredictive, (8, 2, 1)),
    (ours.HardAttention, (8, 6, 5)),
]


@pytest.mark.parametrize(("kind", "given"), POSITIONAL, ids=[kind.__name__ for kind, _ in POSITIONAL])
def test_options_are_given_by_name(kind: type[nn.Module], given: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="positional argument"):
        kind(*given)
    kind(*given[:-1], **{"radius": 1} if kind is ours.SlidingWindowAttention else {})


def test_position_embeddings_start_with_the_spread_of_one_over_the_root_of_the_width() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stand_alone = ours.StandAloneSelfAttention(8, 512, kernel_size=9, num_heads=2)  # 256 channels in a head
        augmented = ours.AttentionAugmentedConv2d(8, 200, num_heads=2, key_dim=128, value_dim=2, size=(30, 40))
        window = ours.WindowAttention(24, window_size=15)
    for table, spread in (
        (stand_alone.rows, 1 / 16),
        (stand_alone.columns, 1 / 16),
        (augmented.rows, 1 / 8),
        (augmented.columns, 1 / 8),
        (window.relative_position_bias_table, 0.02),
    ):
        assert float(table.detach().std()) == pytest.approx(spread, rel=0.05)
        assert abs(float(table.detach().mean())) < spread / 5


def test_blocks_that_start_as_the_identity_return_their_input() -> None:
    x = noise(2, 6, 5, 7)
    for module in (ours.GlobalContext(6), ours.NonLocal(6), ours.NonLocal(6, norm=False), ours.SelfAttention2d(6)):
        assert torch.equal(module.eval()(x), x)
    for transformer in (ours.SpatialTransformer(6), ours.SpatialTransformer(6, attention=True)):
        torch.testing.assert_close(transformer(x), x, atol=1e-5, rtol=0)


def test_eca_chooses_the_odd_kernel_at_or_above_half_the_logarithm() -> None:
    for channels, side in ((1, 1), (2, 1), (4, 1), (8, 3), (32, 3), (128, 5), (512, 5), (2048, 7)):
        assert ours.ECA(channels).conv.kernel_size == (side,)
    assert ours.ECA(64, gamma=1, b=0).conv.kernel_size == (7,)
    assert ours.ECA(64, b=5).conv.kernel_size == (5,)
    assert ours.ECA(64, kernel_size=9).conv.padding == (4,)


# checks


@pytest.mark.parametrize(
    ("channels", "reduction", "width", "found"),
    [(48, 16, None, 3), (15, 16, None, 1), (31, 16, None, 1), (32, 16, None, 2), (48, 16, 5, 5)],
)
def test_a_bottleneck_has_a_share_of_the_channels_or_the_given_width(
    channels: int, reduction: int, width: Any, found: int
) -> None:
    assert shape_checks.bottleneck(channels, reduction, width) == found
    for wrong in ((0, 16, None), (8, 0, None), (8, 16, 0)):
        with pytest.raises(OptionError, match="at least 1"):
            shape_checks.bottleneck(*wrong)


@pytest.mark.parametrize("value", [1, 3, 7])
def test_odd_numbers_pass_and_others_do_not(value: int) -> None:
    assert shape_checks.odd("side", value) == value
    with pytest.raises(OptionError, match=f"side must be odd, got {value + 1}"):
        shape_checks.odd("side", value + 1)
    with pytest.raises(OptionError, match="at least 1"):
        shape_checks.odd("side", -1)


def test_maps_are_checked_for_axes_and_channels_with_a_hint_for_each() -> None:
    shape_checks.check_maps(nn.Identity(), noise(2, 6, 5, 7), 6)
    shape_checks.check_maps(nn.Identity(), noise(2, 6, 5, 7), None)
    for x, channels, hint in (
        (noise(2, 5, 7, 6), 6, r"\(B, 6, H, W\), got \(2, 5, 7, 6\). Channels come last"),
        (noise(2, 5, 7, 8), 6, "Build it for this number"),
        (noise(2, 5, 6), 6, "Pass a batch"),
        (noise(2, 6, 5), None, r"\(B, C, H, W\), got \(2, 6, 5\). Pass a batch"),
    ):
        with pytest.raises(ShapeError, match=hint):
            shape_checks.check_maps(nn.Identity(), x, channels)


def test_tokens_and_sizes_are_checked() -> None:
    shape_checks.check_tokens(nn.Identity(), noise(2, 5, 6), 6)
    shape_checks.check_size(nn.Identity(), noise(2, 6, 5, 7), (5, 7))
    for x, hint in (
        (noise(2, 5, 7, 6), r"x.flatten\(2\)"),
        (noise(2, 6, 5), "Build it for this width"),
        (noise(5, 6), "Build it"),
    ):
        with pytest.raises(ShapeError, match=hint):
            shape_checks.check_tokens(nn.Identity(), x, 6)
    for size in ((7, 5), (5, 8), (4, 7)):
        with pytest.raises(ShapeError, match=rf"\(B, C, {size[0]}, {size[1]}\), got \(2, 6, 5, 7\)"):
            shape_checks.check_size(nn.Identity(), noise(2, 6, 5, 7), size)


@pytest.mark.parametrize(
    ("shape", "fails"),
    [((1, 6, 1, 1), True), ((2, 6, 1, 1), False), ((1, 6, 2, 1), False), ((1, 1, 1, 1), True), ((1, 6, 1, 3), False)],
)
def test_a_norm_cannot_train_on_one_value_of_a_channel(shape: tuple[int, ...], fails: bool) -> None:
    norm = nn.BatchNorm2d(shape[1])
    if fails:
        with pytest.raises(ShapeError, match="cannot train on one value"):
            shape_checks.normed(norm, noise(*shape))
    assert shape_checks.normed(norm if not fails else norm.eval(), noise(*shape)).shape == shape


# heads, masks and positions


def test_heads_are_split_and_joined_in_order() -> None:
    x = noise(2, 5, 12)
    found = multihead.split(x, 3)
    assert found.shape == (2, 3, 5, 4)
    assert torch.equal(found[1, 2, 3], x[1, 3, 8:12])
    assert torch.equal(multihead.join(found), x)
    whole = noise(2, 5, 36)
    for part, vectors in enumerate(multihead.split_qkv(whole, 3)):
        assert vectors.shape == (2, 3, 5, 4)
        assert torch.equal(vectors[1, 2, 3], whole[1, 3, 12 * part + 8 : 12 * part + 12])


def test_maps_become_tokens_in_raster_order_and_back() -> None:
    x = noise(2, 12, 5, 7)
    found = positions.tokens(x, 3)
    assert found.shape == (2, 3, 35, 4)
    assert torch.equal(found[1, 2, 1 * 7 + 4], x[1, 8:12, 1, 4])
    assert torch.equal(positions.grid(found, x), x)
    assert positions.tokens(x).shape == (2, 1, 35, 12)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((2, 3, 5, 7), True),
        ((1, 1, 1, 1), True),
        ((5, 7), True),
        ((7,), True),
        ((5, 1), True),
        ((2, 3, 7, 5), False),
        ((3, 1, 1, 1), False),
        ((1, 2, 3, 5, 7), False),
        ((1, 1, 1, 1, 1), False),
        ((6,), False),
    ],
)
def test_a_mask_must_broadcast_to_the_scores(shape: tuple[int, ...], fits: bool) -> None:
    mask = torch.ones(shape, dtype=torch.bool)
    if fits:
        multihead.check_mask(mask, (2, 3, 5, 7))
        with pytest.raises(OptionError, match="must be boolean"):
            multihead.check_mask(mask.float(), (2, 3, 5, 7))
    else:
        with pytest.raises(ShapeError, match=r"broadcast to \(2, 3, 5, 7\)"):
            multihead.check_mask(mask, (2, 3, 5, 7))


@pytest.mark.parametrize(
    ("prefix", "tokens", "told"),
    [(0, 36, "given 5 x 7 tokens, got 36"), (2, 35, "given 2 global tokens and 5 x 7 tokens, got 35")],
)
def test_a_grid_must_have_as_many_cells_as_there_are_tokens(prefix: int, tokens: int, told: str) -> None:
    multihead.check_grid(nn.Identity(), noise(2, 35 + prefix, 4), (5, 7), prefix)
    with pytest.raises(ShapeError, match=told):
        multihead.check_grid(nn.Identity(), noise(2, tokens, 4), (5, 7), prefix)


def test_heads_must_divide_the_width() -> None:
    multihead.check_heads(12, 3)
    for width, heads, told in (
        (12, 5, "must divide"),
        (3, 12, "must divide"),
        (0, 3, "embed_dim must"),
        (12, 0, "num_heads must"),
    ):
        with pytest.raises(OptionError, match=told):
            multihead.check_heads(width, heads)


@pytest.mark.parametrize("kind", ["none", "boolean", "added"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_a_mix_is_the_softmax_of_scaled_and_masked_scores(kind: str, scale: float | None) -> None:
    query, key, value = noise(2, 3, 5, 4), noise(2, 3, 7, 4, seed=1), noise(2, 3, 7, 4, seed=2)
    allowed = noise(2, 1, 5, 7, seed=3) > -0.5
    allowed[..., 0] = True
    added = noise(1, 3, 5, 7, seed=4)
    mask = {"none": None, "boolean": allowed, "added": added}[kind]
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * (0.5 if scale is None else scale)
    scores = scores.masked_fill(~allowed, -math.inf) if kind == "boolean" else scores + (added if kind == "added" else 0)
    out, weights = multihead.mix(query, key, value, mask, scale=scale, need_weights=True)
    torch.testing.assert_close(weights, scores.softmax(-1))
    torch.testing.assert_close(out, scores.softmax(-1) @ value)
    fused, nothing = multihead.mix(query, key, value, mask, scale=scale, need_weights=False)
    torch.testing.assert_close(fused, out, atol=1e-5, rtol=0)
    assert nothing is None


def test_a_softmax_without_any_key_is_zero() -> None:
    mask = torch.tensor([[True, False, True], [False, False, False]])
    found = multihead.softmax(torch.tensor([[0.0, 9.0, math.log(3)], [1.0, 2.0, 3.0]]), mask)
    torch.testing.assert_close(found, torch.tensor([[0.25, 0.0, 0.75], [0.0, 0.0, 0.0]]))


@pytest.mark.parametrize("size", [(1, 2), (2, 1), (1, 1)])
def test_maps_of_one_row_or_column_cannot_be_halved(size: tuple[int, int]) -> None:
    with pytest.raises(ShapeError, match=f"got {size[0]} x {size[1]}"):
        positions.halved(nn.Identity(), noise(2, 3, *size))
    assert positions.halved(nn.Identity(), torch.tensor([[[[1.0, 4.0, 9.0], [3.0, 2.0, 8.0]]]])).tolist() == [[[[4.0]]]]
    assert positions.halved(nn.Identity(), noise(2, 3, 2, 2)).shape == (2, 3, 1, 1)


def test_means_over_axes_divide_by_their_lengths() -> None:
    x = noise(2, 3, 5, 7)
    torch.testing.assert_close(mean_over(x, 2, 3), x.mean((2, 3), keepdim=True))
    torch.testing.assert_close(mean_over(x, 1), x.mean(1, keepdim=True))
    large = torch.full((1, 1, 300, 300), 100.0, dtype=torch.float16)
    assert mean_over(large, 2, 3).item() == 100
    assert mean_over(large, 2, 3).dtype == torch.float16


def test_offsets_between_rows_start_in_the_middle_of_a_larger_table() -> None:
    table = torch.arange(9.0)[:, None]  # 5 rows at most; index 4 is no offset
    assert _between(table, 5, 3)[:, 0].tolist() == [[4.0, 5.0, 6.0], [3.0, 4.0, 5.0], [2.0, 3.0, 4.0]]
    assert _between(table, 5, 5)[0, 0].tolist() == [4.0, 5.0, 6.0, 7.0, 8.0]
    assert _between(table, 5, 1).tolist() == [[[4.0]]]


def test_weights_in_windows_are_spread_over_the_tokens() -> None:
    weights = noise(4, 3, 2, 2)  # 2 images, 2 windows of 2
    numbers = torch.tensor([[3, 1], [2, 0]])
    found = _spread(weights, numbers, 3)
    expected = torch.zeros(2, 3, 3, 3)
    for image in range(2):
        for window, row in enumerate(numbers.tolist()):
            for i, query in enumerate(row):
                for j, key in enumerate(row):
                    if query and key:
                        expected[image, :, query - 1, key - 1] = weights[2 * image + window, :, i, j]
    assert torch.equal(found, expected)
    assert _pair("side", 4, 1) == (4, 4)
    assert _pair("side", (3, 5), 1) == (3, 5)
    with pytest.raises(OptionError, match="at least 1"):
        _pair("side", (3, 0), 1)
