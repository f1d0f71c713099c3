"""Attention over positions against loops written from the papers, timm with the same weights, and torch's own kernel."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import timm.layers
import torch
import torch.nn.functional as F
from torch import nn

from tests.oracles.arithmetic import (
    Grid,
    Vector,
    dense,
    dot,
    everywhere,
    example,
    flat,
    listed,
    mean,
    normalized,
    plus,
    pooled,
    ready,
    softmax,
    tensor,
)
from visattn.errors import OptionError
from visattn.nn import (
    AttentionAugmentedConv2d,
    ExternalAttention,
    GlobalContext,
    NonLocal,
    SelfAttention2d,
    StandAloneSelfAttention,
)

# the papers' formulas


def global_context(module: GlobalContext, image: Grid) -> Grid:
    places = flat(image)
    context = mean(softmax([dense(module.score, place)[0] for place in places]), places)
    hidden = dense(module.fc1, context)
    center = sum(hidden) / len(hidden)
    deviation = math.sqrt(sum((h - center) ** 2 for h in hidden) / len(hidden) + 1e-5)
    weight, bias = module.norm.weight.flatten().tolist(), module.norm.bias.flatten().tolist()
    hidden = [max(0, (h - center) / deviation * w + b) for h, w, b in zip(hidden, weight, bias, strict=True)]
    change = dense(module.fc2, hidden)
    if module.fusion == "add":
        return [[plus(place, change) for place in row] for row in image]
    return [[[x / (1 + math.exp(-c)) for x, c in zip(place, change, strict=True)] for place in row] for row in image]


def non_local(module: NonLocal, image: Grid) -> Grid:
    keys, values = everywhere(module.key, image), everywhere(module.value, image)
    keys, values = (pooled(keys), pooled(values)) if module.pool else (keys, values)

    def mixed(place: Vector) -> Vector:
        query, count = dense(module.query, place), len(flat(keys))
        if module.variant == "dot":
            weights = [dot(query, key) / count for key in flat(keys)]
        elif module.variant == "concat":
            pair = [*module.from_query.weight[0].tolist(), *module.from_key.weight[0].tolist()]
            weights = [max(0, dot(pair, [*query, *key])) / count for key in flat(keys)]
        else:
            weights = softmax([dot(query, key) for key in flat(keys)])
        change = dense(module.output, mean(weights, flat(values)))
        return plus(place, change if module.norm is None else normalized(module.norm, change))

    return [[mixed(place) for place in row] for row in image]


def sagan(module: SelfAttention2d, image: Grid) -> Grid:
    keys, values = everywhere(module.key, image), everywhere(module.value, image)
    if module.variant == "official":
        keys, values = pooled(keys), pooled(values)

    def mixed(place: Vector) -> Vector:
        query = dense(module.query, place)
        weights = softmax([dot(key, query) for key in flat(keys)])
        return plus(place, dense(module.output, mean(weights, flat(values))), module.gamma.item())

    return [[mixed(place) for place in row] for row in image]


def heads_of(vector: Vector, heads: int) -> list[Vector]:
    width = len(vector) // heads
    return [vector[h * width : (h + 1) * width] for h in range(heads)]


def stand_alone(module: StandAloneSelfAttention, image: Grid) -> Grid:
    rows, columns, reach = len(image), len(image[0]), module.kernel_size // 2
    by_row, by_column = module.rows.tolist(), module.columns.tolist()

    def at(i: int, j: int) -> Vector:
        around = [(a, b) for a in range(i - reach, i + reach + 1) for b in range(j - reach, j + reach + 1)]
        around = [(a, b) for a, b in around if 0 <= a < rows and 0 <= b < columns]
        out = []
        for h in range(module.num_heads):
            query = heads_of(dense(module.query, image[i][j]), module.num_heads)[h]
            keys = [heads_of(dense(module.key, image[a][b]), module.num_heads)[h] for a, b in around]
            values = [heads_of(dense(module.value, image[a][b]), module.num_heads)[h] for a, b in around]
            offsets = [[*by_row[h][a - i + reach], *by_column[h][b - j + reach]] for a, b in around]
            scores = [dot(query, key) + dot(query, offset) for key, offset in zip(keys, offsets, strict=True)]
            out += mean(softmax(scores), values)
        return out

    return [[at(i, j) for j in range(columns)] for i in range(rows)]


def augmented(module: AttentionAugmentedConv2d, image: Grid) -> Grid:
    places = list(itertools.product(range(len(image)), range(len(image[0]))))

    def at(i: int, j: int) -> Vector:
        out: Vector = []
        for h in range(module.num_heads):
            query = heads_of(dense(module.query, image[i][j]), module.num_heads)[h]
            scores = []
            for a, b in places:
                score = dot(query, heads_of(dense(module.key, image[a][b]), module.num_heads)[h])
                if module.size is not None:
                    score += dot(query, module.rows[a - i + module.size[0] - 1].tolist())
                    score += dot(query, module.columns[b - j + module.size[1] - 1].tolist())
                scores.append(score / math.sqrt(len(query)))
            values = [heads_of(dense(module.value, image[a][b]), module.num_heads)[h] for a, b in places]
            out += mean(softmax(scores), values)
        return convolved(module.conv, image, i, j) + dense(module.output, out)

    return [[at(i, j) for j in range(len(image[0]))] for i in range(len(image))]


def convolved(conv: nn.Conv2d | None, image: Grid, i: int, j: int) -> Vector:
    if conv is None:
        return []
    assert conv.bias is not None
    out: Vector = conv.bias.tolist()
    reach = conv.kernel_size[0] // 2
    for a, b in itertools.product(range(-reach, reach + 1), repeat=2):
        if 0 <= i + a < len(image) and 0 <= j + b < len(image[0]):
            kernel = conv.weight[:, :, a + reach, b + reach].tolist()
            out = plus(out, [dot(row, image[i + a][j + b]) for row in kernel])
    return out


def external(module: ExternalAttention, image: Grid) -> Grid:
    framed = module.variant == "official"
    features = everywhere(module.input, image) if framed else image
    scores = [dense(module.key, place) for place in flat(features)]
    by_slot = [softmax([score[s] for score in scores]) for s in range(len(scores[0]))]
    out = []
    for n, place in enumerate(flat(image)):
        row = [slot[n] for slot in by_slot]
        y = dense(module.value, [r / (1e-9 + sum(row)) for r in row])
        if framed:
            y = [max(0, v) for v in plus(place, normalized(module.norm, dense(module.output, y)))]
        out.append(y)
    columns = len(image[0])
    return [out[i : i + columns] for i in range(0, len(out), columns)]


ORACLES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Grid]]] = {
    "GC": (lambda: GlobalContext(6), global_context),
    "GC scale": (lambda: GlobalContext(6, width=3, fusion="scale"), global_context),
    "NL": (lambda: NonLocal(6), non_local),
    "NL pooled": (lambda: NonLocal(6, width=2, pool=True, norm=False), non_local),
    "NL gaussian": (lambda: NonLocal(6, variant="gaussian", pool=True), non_local),
    "NL dot": (lambda: NonLocal(6, variant="dot", pool=True), non_local),
    "NL concat": (lambda: NonLocal(6, variant="concat"), non_local),
    "SAGAN": (lambda: SelfAttention2d(6, 2), sagan),
    "SAGAN official": (lambda: SelfAttention2d(6, 3, variant="official"), sagan),
    "SASA": (lambda: StandAloneSelfAttention(6, 8, kernel_size=5, num_heads=2), stand_alone),
    "SASA of 3": (lambda: StandAloneSelfAttention(6, kernel_size=3, num_heads=3), stand_alone),
    "augmented": (lambda: AttentionAugmentedConv2d(6, 7, num_heads=2, key_dim=6, value_dim=4), augmented),
    "augmented with offsets": (lambda: AttentionAugmentedConv2d(6, 7, num_heads=2, key_dim=4, size=(3, 5)), augmented),
    "augmented, smaller than its offsets": (lambda: AttentionAugmentedConv2d(6, 7, num_heads=1, size=(5, 5)), augmented),
    "augmented, attention only": (lambda: AttentionAugmentedConv2d(6, 4, num_heads=2, value_dim=4), augmented),
    "external": (lambda: ExternalAttention(6, slots=5), external),
    "external official": (lambda: ExternalAttention(6, slots=5, variant="official"), external),
}


@pytest.mark.parametrize("size", [(3, 4), (2, 5)], ids=["3 x 4", "2 x 5"])
@pytest.mark.parametrize("name", list(ORACLES))
def test_module_equals_loops_written_from_the_paper(name: str, size: tuple[int, int]) -> None:
    build, oracle = ORACLES[name]
    module, x = ready(build()), example(6, *size)
    torch.testing.assert_close(module(x), tensor([oracle(module, listed(image)) for image in x]), rtol=0, atol=1e-12)


# other implementations


def test_global_context_equals_timm() -> None:
    ours = ready(GlobalContext(12, width=3))
    theirs = timm.layers.GlobalContext(12, fuse_add=True, fuse_scale=False, rd_channels=3).double().eval()
    theirs.mlp_add.norm.eps = 1e-5  # 1e-6 in timm, 1e-5 in the authors' code
    pairs = {"conv_attn": ours.score, "mlp_add.fc1": ours.fc1, "mlp_add.norm": ours.norm, "mlp_add.fc2": ours.fc2}
    for name, layer in pairs.items():
        for part in ("weight", "bias"):
            given = layer.get_parameter(part).data
            theirs.get_submodule(name).get_parameter(part).data = given.flatten() if layer is ours.norm else given
    torch.testing.assert_close(ours(example(12)), theirs(example(12)), rtol=0, atol=1e-12)


def test_non_local_equals_timm() -> None:
    ours = ready(NonLocal(12, width=8, scale="channels"))
    theirs = timm.layers.NonLocalAttn(12, rd_channels=8).double().eval()
    names = {"query": "t", "key": "p", "value": "g", "output": "z", "norm": "norm"}
    state = {names[name.split(".")[0]] + "." + name.split(".")[1]: value for name, value in ours.state_dict().items()}
    theirs.load_state_dict(state)
    torch.testing.assert_close(ours(example(12)), theirs(example(12)), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("scale", "factor"), [(None, 1.0), ("width", 5**-0.5), ("channels", 12**-0.5)], ids=["none", "width", "channels"]
)
def test_non_local_equals_the_kernel_of_torch(scale: str | None, factor: float) -> None:
    module, x = ready(NonLocal(12, width=5, scale=scale, norm=False)), example(12)  # type: ignore[arg-type]
    query, key, value = (layer(x).flatten(2).mT for layer in (module.query, module.key, module.value))
    mixed = F.scaled_dot_product_attention(query, key, value, scale=factor)
    expected = x + module.output(mixed.mT.reshape(2, 5, 3, 4))
    torch.testing.assert_close(module(x), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(module(x, need_weights=True)[0], expected, rtol=0, atol=1e-12)


def test_stand_alone_attention_equals_the_kernel_of_torch_with_a_band() -> None:
    module, x = ready(StandAloneSelfAttention(6, 8, kernel_size=3, num_heads=2)), example(6, 4, 5)
    query, key, value = (layer(x).unflatten(1, (2, 4)).flatten(3).mT for layer in (module.query, module.key, module.value))
    bias = torch.full((2, 2, 20, 20), -torch.inf, dtype=torch.float64)
    for n, m in itertools.product(range(20), repeat=2):
        down, right = m // 5 - n // 5, m % 5 - n % 5
        if abs(down) <= 1 and abs(right) <= 1:
            offset = torch.cat((module.rows[:, down + 1], module.columns[:, right + 1]), 1)  # (heads, d)
            bias[:, :, n, m] = (query[:, :, n] * offset).sum(-1)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1)
    torch.testing.assert_close(module(x), expected.mT.reshape(2, 8, 4, 5), rtol=0, atol=1e-12)


def test_pooled_keys_leave_out_an_odd_last_column() -> None:
    module, x = ready(NonLocal(6, pool=True)), example(6, 4, 5)
    changed = x.clone()
    changed[..., 4] += 1
    torch.testing.assert_close(module(changed)[..., :4], module(x)[..., :4], rtol=0, atol=0)


@pytest.mark.parametrize(("channels", "reduction", "hidden"), [(8, 16, 2), (16, 16, 2), (64, 16, 4), (6, 2, 3)])
def test_the_bottleneck_of_global_context_has_two_channels_or_more(channels: int, reduction: int, hidden: int) -> None:
    module = GlobalContext(channels, reduction)
    assert (module.fc1.out_channels, module.fc2.in_channels, module.norm.normalized_shape) == (hidden, hidden, (hidden, 1, 1))
    with pytest.raises(OptionError, match="bottleneck"):
        GlobalContext(channels, width=1)
