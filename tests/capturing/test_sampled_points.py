"""Deformable attention: weights of points that the queries choose, against slow loops."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import visattn
from visattn.core.records import AttentionRecord, Recording
from visattn.errors import LayoutError, OptionError

BATCH, HEADS, POINTS, WIDTH = 2, 2, 3, 16
SIZE = 32, 48


def photo(seed: int = 0) -> Tensor:
    return torch.randn(BATCH, 3, *SIZE, generator=torch.Generator().manual_seed(seed))


class Deformable(nn.Module):
    """Queries that sample maps with cells of `strides` pixels; they are learned, or the patches of the first map."""

    def __init__(self, strides: tuple[int, ...] = (4, 8), queries: int = 5, **sampling: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.strides, self.sampling = strides, sampling
        self.embeds = nn.ModuleList(nn.Conv2d(3, WIDTH, stride, stride) for stride in strides)
        self.queries = nn.Parameter(torch.randn(1, queries, WIDTH)) if queries else None
        self.value, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.points = nn.Linear(WIDTH, HEADS * len(strides) * POINTS * 2)
        self.weights = nn.Linear(WIDTH, HEADS * len(strides) * POINTS)
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Sample once, and average the queries."""
        maps = [embed(x) for embed in self.embeds]
        queries = maps[0].flatten(2).mT if self.queries is None else self.queries.expand(len(x), -1, -1)
        return self.head((queries + self.attend(queries, maps)).mean(1))  # type: ignore[no-any-return]

    def attend(self, queries: Tensor, maps: list[Tensor]) -> Tensor:
        """Compute multi-scale deformable attention."""
        count, number, levels = len(queries), queries.shape[1], len(maps)
        points = self.points(queries).view(count, number, HEADS, levels, POINTS, 2) * 1.2
        weights = self.weights(queries).view(count, number, HEADS, levels * POINTS).softmax(-1)
        samples = []
        for level, one in enumerate(maps):
            value = self.value(one.flatten(2).mT).mT.reshape(count * HEADS, -1, *one.shape[2:])
            grid = points[:, :, :, level].transpose(1, 2).flatten(0, 1)
            samples.append(F.grid_sample(value, grid, **{"align_corners": False, **self.sampling}))
        flat = weights.transpose(1, 2).reshape(count * HEADS, 1, number, levels * POINTS)
        out = (torch.stack(samples, -2).flatten(-2) * flat).sum(-1).view(count, -1, number)
        self.seen = {"points": points.detach(), "weights": weights.detach(), "out": out.detach(), "value": value.detach()}
        mixed: Tensor = out.mT
        return mixed


def entries(
    points: Tensor, grids: list[tuple[int, int]], corners: bool = False
) -> Iterator[tuple[tuple[int, ...], int, int, float]]:
    """Yield, for each point `(B, Q, heads, levels, P, 2)` in [-1, 1], row and column on the finest grid with their bilinear share."""
    rows, columns = max(grids)
    for index in torch.cartesian_prod(*(torch.arange(size) for size in points.shape[:-1])).tolist():
        x, y = points[tuple(index)].tolist()
        height, width = grids[index[3]]
        if corners:
            x, y = x * (width - 1) / width, y * (height - 1) / height
        column, row = (x + 1) / 2 * columns - 0.5, (y + 1) / 2 * rows - 0.5
        for j in (math.floor(row), math.floor(row) + 1):
            for i in (math.floor(column), math.floor(column) + 1):
                if 0 <= j < rows and 0 <= i < columns:
                    yield tuple(index), j, i, (1 - abs(row - j)) * (1 - abs(column - i))


def by_loops(points: Tensor, weights: Tensor, grids: list[tuple[int, int]], corners: bool = False) -> Tensor:
    """Return the weights `(B, heads, Q, cells)` on the finest grid; those given are `(B, Q, heads, levels, P)`."""
    rows, columns = max(grids)
    found = torch.zeros(points.shape[0], points.shape[2], points.shape[1], rows * columns, dtype=torch.float64)
    for (image, query, head, level, point), j, i, share in entries(points, grids, corners):
        found[image, head, query, j * columns + i] += share * float(weights[image, query, head, level, point])
    return found.float()


def recorded(model: nn.Module, *, times: int = 1, **options: Any) -> Recording:
    for _ in range(times):
        with visattn.capture(model.eval(), **options) as recording, torch.set_grad_enabled("gradients" in options):
            model(photo())
    return recording


def only(recording: Recording) -> AttentionRecord:
    assert recording.unseen == []
    (record,) = recording
    return record


@pytest.mark.parametrize("strides", [(4,), (4, 8), (16, 4, 8)])
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_weights_lie_where_the_points_are(strides: tuple[int, ...], corners: bool, times: int) -> None:
    model = Deformable(strides, align_corners=corners)
    record = only(recorded(model, times=times))
    grids = [(SIZE[0] // stride, SIZE[1] // stride) for stride in strides]
    assert (record.kind, record.keys.grid, record.queries.prefix) == ("sampled", max(grids), tuple(f"query{i}" for i in range(5)))
    weights = model.seen["weights"].unflatten(-1, (len(strides), POINTS))  # type: ignore[no-untyped-call]
    expected = by_loops(model.seen["points"], weights, grids, corners)
    torch.testing.assert_close(record.operator.dense(), expected, rtol=0, atol=1e-6)
    assert 0.05 < float(expected.sum(-1).min()) < 0.999  # some points lie outside
    assert not record.probability


def test_weights_times_values_are_the_models_own_result_on_one_map() -> None:
    model = Deformable((4,))
    record = only(recorded(model))
    values = model.seen["value"].flatten(2).mT.unflatten(0, (BATCH, HEADS))  # type: ignore[no-untyped-call]
    made = (record.operator @ values).transpose(2, 3).flatten(1, 2)
    torch.testing.assert_close(made, model.seen["out"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{"values": True}, {"gradients": True}], ids=str)
def test_samples_are_not_kept_and_have_no_gradient(options: dict[str, bool]) -> None:
    model = Deformable()
    recording = recorded(model, **options)
    record = only(recording)
    assert record.value is None
    assert record.source is None
    torch.testing.assert_close(record.operator.dense(), only(recorded(model)).operator.dense(), rtol=0, atol=0)


def test_patches_that_sample_their_own_grid_are_queries_of_that_grid() -> None:
    model = Deformable((4,), queries=0)
    record = only(recorded(model))
    assert record.queries == record.keys
    expected = by_loops(model.seen["points"], model.seen["weights"].unflatten(-1, (1, POINTS)), [(8, 12)])  # type: ignore[no-untyped-call]
    torch.testing.assert_close(record.operator.dense(), expected, rtol=0, atol=1e-6)
    with pytest.raises(OptionError, match="weights points that it computes"):
        visattn.methods.rollout(recorded(model), query="mean")


def test_the_map_of_a_query_says_what_it_shows() -> None:
    model = Deformable()
    found = visattn.methods.attention(recorded(model), query="object:3", fusion="mean")
    assert found.values.shape == (BATCH, 8, 12)
    assert found.facts.pixelwise  # scaled by percentiles
    assert any("points that each query samples" in note for note in found.provenance.notes)
    expected = only(recorded(model)).operator.dense()[:, :, 3].mean(1).view(BATCH, 8, 12)
    torch.testing.assert_close(torch.as_tensor(found.values), expected, rtol=0, atol=1e-6)


def test_methods_that_need_gradients_or_values_of_tokens_say_why() -> None:
    model = Deformable()
    with visattn.capture(model.eval(), gradients=True) as recording:
        out = model(photo())
    with pytest.raises(OptionError, match="no gradients were kept"):
        visattn.evaluation.head_importance(recording.gradients(out[:, 0].sum()))
    with pytest.raises(OptionError, match="norms are defined for attention over tokens"):
        visattn.methods.norm_attention(recorded(model, values=True), query="object:1")


class WithTokens(Deformable):
    """Model that samples after attention among the patches."""

    def attend(self, queries: Tensor, maps: list[Tensor]) -> Tensor:
        """Attend, then sample."""
        tokens = maps[0].flatten(2).mT[:, None]
        mixed = F.scaled_dot_product_attention(tokens, tokens, tokens)[:, 0].mT.view(maps[0].shape)
        return super().attend(queries, [mixed, *maps[1:]])


def test_importance_of_heads_is_refused_beside_sampled_points() -> None:
    model = WithTokens()
    with visattn.capture(model.eval(), gradients=True) as recording:
        out = model(photo())
    assert [record.kind for record in recording] == ["self", "sampled"]
    with pytest.raises(OptionError, match="such weights have no gradient"):
        visattn.evaluation.head_importance(recording.gradients(out[:, 0].sum()))


@pytest.mark.parametrize("sampling", [{"mode": "nearest"}, {"padding_mode": "border"}], ids=str)
def test_other_sampling_is_reported_as_unseen(sampling: dict[str, Any]) -> None:
    with pytest.raises(visattn.errors.NoAttentionCaptured, match="reads values at points that it computes"):
        recorded(Deformable(**sampling))


def test_sampled_attention_cannot_be_edited() -> None:
    model = Deformable()
    with pytest.raises(LayoutError, match="it weights points that it computes, not tokens"), visattn.intervene(model, scale=0.0):
        model(photo())


def detector(kind: str) -> nn.Module:
    """Build a small detector of transformers, with random points; those of its encoder are at its own cells."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "num_queries": 6, "encoder_attention_heads": 2}
    more = {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    small: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "layer_type": "basic"}
    small["out_features"] = ["stage2", "stage3", "stage4"]
    given: dict[str, Any] = sizes | more
    if kind == "DeformableDetr":
        given |= {"backbone": None, "use_timm_backbone": False, "use_pretrained_backbone": False, "num_feature_levels": 3}
        given["backbone_config"] = transformers.ResNetConfig(**small)
    else:
        given |= {
            "encoder_in_channels": [8, 16, 16],
            "encoder_hidden_dim": 32,
            "decoder_in_channels": [32] * 3,
            "num_denoising": 0,
        }
        given["backbone_config"] = transformers.RTDetrResNetConfig(**small)
    config = getattr(transformers, f"{kind}Config")(**given)
    model: nn.Module = getattr(transformers, f"{kind}ForObjectDetection")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sampling_offsets" in name or "attention_weights" in name:
                own = "encoder." in name and "sampling_offsets" in name
                parameter.copy_(torch.zeros(parameter.shape) if own else torch.randn(parameter.shape))
    return model.eval()


@pytest.mark.parametrize("kind", ["DeformableDetr", "RTDetr"])
def test_decoders_of_transformers(kind: str) -> None:
    """Read the points and weights from the arguments of the model's own function."""
    model, given = detector(kind), dict[str, Any]()
    for name, module in model.named_modules():
        if type(module).__name__.endswith("MultiScaleDeformableAttention") and not list(module.parameters()):
            module.register_forward_pre_hook(lambda _, args, name=name: given.__setitem__(name, args))
    pixels = torch.randn(BATCH, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), visattn.capture(model) as recording:
        model(pixel_values=pixels)
    records = [record for record in recording if record.kind == "sampled"]
    assert len(records) == 2
    for record in records:
        _, _, shapes, _, locations, weights, *_ = given[record.layer]
        grids = [(int(height), int(width)) for height, width in shapes]
        assert record.keys.grid == max(grids)
        expected = by_loops(2 * locations - 1, weights, grids)
        torch.testing.assert_close(record.operator.dense(), expected, rtol=0, atol=1e-5)


def test_decoders_behind_an_encoder_that_reads_elsewhere_are_not_recorded() -> None:
    """Refuse what is read from its maps: the values there come from other cells."""
    model = detector("DeformableDetr")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "encoder." in name and "sampling_offsets" in name:
                parameter.copy_(torch.randn(parameter.shape))
        with visattn.capture(model) as recording:
            model(pixel_values=torch.randn(BATCH, 3, 64, 96, generator=torch.Generator().manual_seed(1)))
    assert [record.kind for record in recording] == ["self", "unplaced"]
    assert sum("reads values at points" in unseen.reason for unseen in recording.unseen) == 3
