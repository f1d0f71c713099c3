"""Gates of CNNs against loops written from the papers, and against timm and torchvision with the same weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from timm.layers import EcaModule, SelectiveKernel as TimmSelectiveKernel, SEModule
from timm.layers.cbam import CbamModule
from timm.layers.coord_attn import CoordAttn
from torch import Tensor, fx, nn
from torchvision.ops import SqueezeExcitation

from tests.nn.cases import GATES
from visattn._support.publish import listening
from visattn.errors import OptionError, ShapeError
from visattn.nn import (
    BAM,
    CBAM,
    ECA,
    SCSE,
    AttentionGate,
    CoordinateAttention,
    GatherExcite,
    SelectiveKernel,
    SimAM,
    SqueezeExcite,
    TripletAttention,
)

Map = list[list[list[float]]]
"""One image, `[channel][row][column]`."""
Oracle = Callable[..., Map]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def relu(value: float) -> float:
    return max(value, 0.0)


def hardswish(value: float) -> float:
    return value * min(max(value + 3, 0.0), 6.0) / 6


def size(x: Map) -> tuple[int, int, int]:
    return len(x), len(x[0]), len(x[0][0])


def built(shape: tuple[int, int, int], value: Callable[[int, int, int], float]) -> Map:
    channels, rows, columns = shape
    return [[[value(c, i, j) for j in range(columns)] for i in range(rows)] for c in range(channels)]


def each(function: Callable[[float], float], x: Map) -> Map:
    return built(size(x), lambda c, i, j: function(x[c][i][j]))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def means(x: Map) -> Map:
    """Compute the means over each map, indexed `[channel][0][0]`."""
    return [[[mean([value for row in plane for value in row])]] for plane in x]


def peaks(x: Map) -> Map:
    return [[[max(value for row in plane for value in row)]] for plane in x]


def convolved(conv: Any, x: Map, stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1) -> Map:
    weight: list[Map] = conv.weight.tolist()
    bias: list[float] = [0.0] * len(weight) if conv.bias is None else conv.bias.tolist()
    _, height, width = size(x)
    tall, wide = len(weight[0][0]), len(weight[0][0][0])
    shared, made = len(weight[0]), len(weight) // groups

    def at(c: int, i: int, j: int) -> float:
        total = bias[c]
        for k, a, b in itertools.product(range(shared), range(tall), range(wide)):
            row, column = i * stride + a * dilation - padding, j * stride + b * dilation - padding
            if 0 <= row < height and 0 <= column < width:
                total += weight[c][k][a][b] * x[c // made * shared + k][row][column]
        return total

    rows = (height + 2 * padding - dilation * (tall - 1) - 1) // stride + 1
    columns = (width + 2 * padding - dilation * (wide - 1) - 1) // stride + 1
    return built((len(weight), rows, columns), at)


def normalized(norm: Any, x: Map) -> Map:
    weight, bias, center, spread = (t.tolist() for t in (norm.weight, norm.bias, norm.running_mean, norm.running_var))
    return built(size(x), lambda c, i, j: (x[c][i][j] - center[c]) / math.sqrt(spread[c] + 1e-5) * weight[c] + bias[c])


def perceived(first: Any, second: Any, x: Map) -> Map:
    return convolved(second, each(relu, convolved(first, x)))


def squeeze_excite(module: SqueezeExcite, x: Map) -> Map:
    logits = perceived(module.fc1, module.fc2, means(x))
    return built(size(x), lambda c, i, j: x[c][i][j] * sigmoid(logits[c][0][0]))


def cbam(module: CBAM, x: Map) -> Map:
    by_mean, by_max = perceived(module.fc1, module.fc2, means(x)), perceived(module.fc1, module.fc2, peaks(x))
    y = built(size(x), lambda c, i, j: x[c][i][j] * sigmoid(by_mean[c][0][0] + by_max[c][0][0]))
    _, rows, columns = size(x)
    average = [[mean([plane[i][j] for plane in y]) for j in range(columns)] for i in range(rows)]
    largest = [[max(plane[i][j] for plane in y) for j in range(columns)] for i in range(rows)]
    planes = [largest, average] if module.variant == "official" else [average, largest]
    logits = normalized(module.norm, convolved(module.conv, planes, padding=3))
    return built(size(x), lambda c, i, j: y[c][i][j] * sigmoid(logits[0][i][j]))


def scse(module: SCSE, x: Map) -> Map:
    channel = perceived(module.fc1, module.fc2, means(x))
    spatial = convolved(module.conv, x)

    def at(c: int, i: int, j: int) -> float:
        by_channel, by_place = sigmoid(channel[c][0][0]), sigmoid(spatial[0][i][j])
        if module.fusion == "max":
            return max(x[c][i][j] * by_channel, x[c][i][j] * by_place)
        if module.fusion == "add":
            return x[c][i][j] * by_channel + x[c][i][j] * by_place
        return x[c][i][j] * by_channel * by_place

    return built(size(x), at)


def eca(module: ECA, x: Map) -> Map:
    squeezed = [plane[0][0] for plane in means(x)]
    weight: list[float] = module.conv.weight.tolist()[0][0]

    def logit(c: int) -> float:
        seen = [(weight[k], c + k - len(weight) // 2) for k in range(len(weight))]
        return sum(factor * squeezed[at] for factor, at in seen if 0 <= at < len(squeezed))

    return built(size(x), lambda c, i, j: x[c][i][j] * sigmoid(logit(c)))


def bam(module: BAM, x: Map, dilation: int) -> Map:
    channel = convolved(module.fc2, each(relu, normalized(module.norm, convolved(module.fc1, means(x)))))
    features = each(relu, normalized(module.norms[0], convolved(module.convs[0], x)))
    features = each(relu, normalized(module.norms[1], convolved(module.convs[1], features, padding=dilation, dilation=dilation)))
    features = each(relu, normalized(module.norms[2], convolved(module.convs[2], features, padding=dilation, dilation=dilation)))
    spatial = convolved(module.plane, features)

    def at(c: int, i: int, j: int) -> float:
        left, right = channel[c][0][0], spatial[0][i][j]
        return x[c][i][j] * (1 + sigmoid(left * right if module.variant == "official" else left + right))

    return built(size(x), at)


def averages(x: Map, extent: int) -> Map:
    """Compute means over `2 extent - 1` rows and columns around every `extent`-th position, ignoring padding."""
    channels, rows, columns = size(x)

    def at(c: int, i: int, j: int) -> float:
        near = itertools.product(range(rows), range(columns))
        return mean([x[c][a][b] for a, b in near if abs(a - i * extent) < extent and abs(b - j * extent) < extent])

    return built((channels, math.ceil(rows / extent), math.ceil(columns / extent)), at)


def gather_excite(module: GatherExcite, x: Map, variant: str) -> Map:
    channels, rows, columns = size(x)
    if variant == "theta-minus":
        gathered = averages(x, module.extent) if module.extent else means(x)
    elif module.extent == 0:
        gathered = normalized(module.norms[0], convolved(module.convs[0], x, groups=channels))
    else:
        gathered = x
        for step in range(int(math.log2(module.extent))):
            gathered = each(relu, gathered) if step else gathered
            gathered = convolved(module.convs[step], gathered, stride=2, padding=1, groups=channels)
            gathered = normalized(module.norms[step], gathered)
    if variant == "theta-plus":
        first, _, second = module.excite.children()
        gathered = perceived(first, second, gathered)
    _, tall, wide = size(gathered)
    return built(size(x), lambda c, i, j: x[c][i][j] * sigmoid(gathered[c][i * tall // rows][j * wide // columns]))


def selective_kernel(module: SelectiveKernel, x: Map, stride: int, groups: int) -> Map:
    branches = [
        each(relu, normalized(norm, convolved(conv, x, stride, padding=reach, dilation=reach, groups=groups)))
        for reach, (conv, norm) in enumerate(zip(module.convs, module.norms, strict=True), start=1)
    ]
    shape = size(branches[0])
    fused = built(shape, lambda c, i, j: sum(branch[c][i][j] for branch in branches))
    scores = convolved(module.select, each(relu, normalized(module.norm, convolved(module.squeeze, means(fused)))))

    def at(c: int, i: int, j: int) -> float:
        powers = [math.exp(scores[k * shape[0] + c][0][0]) for k in range(len(branches))]
        return sum(power / sum(powers) * branch[c][i][j] for power, branch in zip(powers, branches, strict=True))

    return built(shape, at)


def coordinate(module: CoordinateAttention, x: Map) -> Map:
    channels, rows, columns = size(x)
    by_row = built((channels, rows, 1), lambda c, i, _: mean(x[c][i]))
    by_column = built((channels, columns, 1), lambda c, j, _: mean([row[j] for row in x[c]]))
    strips = [[each(hardswish, normalized(module.bn1, convolved(module.conv1, strip)))] for strip in (by_row, by_column)]
    a, b = convolved(module.conv_h, strips[0][0]), convolved(module.conv_w, strips[1][0])
    return built(size(x), lambda c, i, j: x[c][i][j] * sigmoid(a[c][i][0]) * sigmoid(b[c][j][0]))


def triplet(module: TripletAttention, x: Map, kernel: int) -> Map:
    """Apply the paper's three permutations: each is gated over its own channels and permuted back."""

    def gated(u: Map, branch: int) -> Map:
        _, rows, columns = size(u)
        largest = [[max(plane[i][j] for plane in u) for j in range(columns)] for i in range(rows)]
        average = [[mean([plane[i][j] for plane in u]) for j in range(columns)] for i in range(rows)]
        logits = normalized(module.norms[branch], convolved(module.convs[branch], [largest, average], padding=kernel // 2))
        return built(size(u), lambda c, i, j: u[c][i][j] * sigmoid(logits[0][i][j]))

    channels, rows, columns = size(x)
    straight = gated(x, 0)
    by_row = gated(built((rows, channels, columns), lambda i, c, j: x[c][i][j]), 1)
    by_column = gated(built((columns, rows, channels), lambda j, i, c: x[c][i][j]), 2)
    return built(size(x), lambda c, i, j: (straight[c][i][j] + by_row[i][c][j] + by_column[j][i][c]) / 3)


def simam(module: SimAM, x: Map) -> Map:
    center = means(x)
    _, rows, columns = size(x)

    def at(c: int, i: int, j: int) -> float:
        square = (x[c][i][j] - center[c][0][0]) ** 2
        variance = sum((value - center[c][0][0]) ** 2 for row in x[c] for value in row) / max(rows * columns - 1, 1)
        return x[c][i][j] * sigmoid(square / (4 * (variance + module.regularization)) + 0.5)

    return built(size(x), at)


def resampled(x: Map, rows: int, columns: int) -> Map:
    """Resize bilinearly with square pixels: the center of pixel `i` of `n` lies at `(i + 1/2) / n`."""
    channels, tall, wide = size(x)

    def near(position: int, fine: int, coarse: int) -> tuple[int, int, float]:
        at = max((position + 0.5) * coarse / fine - 0.5, 0)
        return int(at), min(int(at) + 1, coarse - 1), at - int(at)

    def at(c: int, i: int, j: int) -> float:
        (top, bottom, down), (left, right, across) = near(i, rows, tall), near(j, columns, wide)
        upper = x[c][top][left] * (1 - across) + x[c][top][right] * across
        lower = x[c][bottom][left] * (1 - across) + x[c][bottom][right] * across
        return upper * (1 - down) + lower * down

    return built((channels, rows, columns), at)


def attention_gate(module: AttentionGate, x: Map, gate: Map) -> Map:
    _, rows, columns = size(x)
    asked = normalized(module.norm_gate, convolved(module.from_gate, resampled(gate, rows, columns)))
    own = normalized(module.norm_x, convolved(module.from_x, x))
    matched = built(size(own), lambda c, i, j: relu(asked[c][i][j] + own[c][i][j]))
    logits = normalized(module.norm_psi, convolved(module.psi, matched))
    return built(size(x), lambda c, i, j: x[c][i][j] * sigmoid(logits[0][i][j]))


def shaken(module: nn.Module) -> Any:
    """Return the module in float64 and evaluation mode with distinct numbers everywhere, including running statistics."""
    module = module.double().eval()
    with torch.no_grad():
        for name, values in module.state_dict().items():
            if values.is_floating_point():
                values.copy_(torch.rand_like(values) + 0.5 if name.endswith("running_var") else torch.randn_like(values))
    return module


def random_maps(channels: int = 4, rows: int = 3, columns: int = 5, batch: int = 2) -> Tensor:
    return torch.randn(batch, channels, rows, columns, dtype=torch.float64)


Case = tuple[Callable[[], nn.Module], Oracle, dict[str, Any]]

ORACLES: dict[str, Case] = {
    "SE": (lambda: SqueezeExcite(4, 2), squeeze_excite, {}),
    "SE without biases": (lambda: SqueezeExcite(4, width=3, bias=False), squeeze_excite, {}),
    "CBAM official": (lambda: CBAM(4, 2), cbam, {}),
    "CBAM paper": (lambda: CBAM(4, 2, variant="paper"), cbam, {}),
    "scSE max": (lambda: SCSE(4), scse, {}),
    "scSE add": (lambda: SCSE(4, width=3, fusion="add"), scse, {}),
    "scSE multiply": (lambda: SCSE(4, fusion="multiply"), scse, {}),
    "ECA": (lambda: ECA(4, kernel_size=3), eca, {}),
    "ECA wider than the channels": (lambda: ECA(4, kernel_size=11), eca, {}),
    "BAM official": (lambda: BAM(4, 2, dilation=2), bam, {"dilation": 2}),
    "BAM paper": (lambda: BAM(4, width=3, variant="paper"), bam, {"dilation": 4}),
    **{
        f"GE {variant} of {extent or 'all'}": (
            partial(GatherExcite, 4, 2, extent=extent, variant=variant, size=(3, 5)),
            gather_excite,
            {"variant": variant},
        )
        for variant in ("theta-minus", "theta", "theta-plus")
        for extent in (0, 2, 4, 8)
    },
    "SK": (lambda: SelectiveKernel(4, width=3), selective_kernel, {"stride": 1, "groups": 4}),
    "SK of three": (
        lambda: SelectiveKernel(4, out_channels=6, branches=3, stride=2, groups=1),
        selective_kernel,
        {"stride": 2, "groups": 1},
    ),
    "coordinate": (lambda: CoordinateAttention(4), coordinate, {}),
    "triplet": (lambda: TripletAttention(4), triplet, {"kernel": 7}),
    "triplet of 3": (lambda: TripletAttention(4, kernel_size=3), triplet, {"kernel": 3}),
    "SimAM": (lambda: SimAM(4), simam, {}),
    "SimAM as on ImageNet": (lambda: SimAM(4, regularization=0.1), simam, {}),
}


@pytest.mark.parametrize("name", list(ORACLES))
def test_gate_equals_the_papers_loops(name: str) -> None:
    build, oracle, options = ORACLES[name]
    module, x = shaken(build()), random_maps()
    expected = torch.tensor([oracle(module, image, **options) for image in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("grid", [(2, 3), (1, 1), (3, 5), (5, 2)], ids=str)
def test_attention_gate_equals_the_papers_loops(grid: tuple[int, int]) -> None:
    module, x, gate = shaken(AttentionGate(4, gate_channels=3)), random_maps(), random_maps(3, *grid)
    pairs = zip(x.tolist(), gate.tolist(), strict=True)
    expected = torch.tensor([attention_gate(module, *pair) for pair in pairs], dtype=torch.float64)
    torch.testing.assert_close(module(x, gate), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "build", [lambda: SqueezeExcitation(32, 2), lambda: SEModule(32, rd_channels=2)], ids=["torchvision", "timm"]
)
def test_se_takes_the_weights_of_other_libraries(build: Callable[[], nn.Module]) -> None:
    other, x = shaken(build()), random_maps(32)
    module = SqueezeExcite(32).double().eval()
    module.load_state_dict(other.state_dict())
    assert torch.equal(module(x), other(x))


@pytest.mark.parametrize("variant", ["official", "paper"])
def test_cbam_equals_timm_with_pooled_planes_in_the_same_order(variant: Any) -> None:
    module, x = shaken(CBAM(32, variant=variant)), random_maps(32)
    swapped = variant == "official"
    other = CbamModule(32, mlp_bias=swapped).double().eval()
    weights = {"channel." + name: values for name, values in module.state_dict().items() if name.startswith("fc")}
    weights |= {
        name.replace("norm", "spatial.conv.bn"): values for name, values in module.state_dict().items() if name.startswith("norm")
    }
    weights["spatial.conv.conv.weight"] = module.conv.weight.flip(1) if swapped else module.conv.weight
    other.load_state_dict(weights)
    torch.testing.assert_close(module(x), other(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("channels", [16, 256])
def test_eca_takes_the_weights_of_timm(channels: int) -> None:
    other, x = shaken(EcaModule(channels)), random_maps(channels)
    module = ECA(channels).double()
    module.load_state_dict(other.state_dict())
    torch.testing.assert_close(module(x), other(x), rtol=1e-12, atol=1e-12)


def test_selective_kernel_equals_timm_without_split() -> None:
    other = shaken(TimmSelectiveKernel(32, split_input=False, rd_channels=8, groups=4))
    module, x = SelectiveKernel(32, width=8, groups=4).double().eval(), random_maps(32, 7, 9)
    renamed = {}
    for name, values in other.state_dict().items():
        parts = name.split(".")
        own = {"conv": f"convs.{parts[1]}", "bn": f"norms.{parts[1]}"} if parts[0] == "paths" else {}
        own |= {"fc_reduce": "squeeze", "fc_select": "select"} if parts[0] == "attn" else {}
        place = own.get(parts[-2], "norm")
        renamed[f"{place}.{parts[-1]}"] = values
    module.load_state_dict(renamed)
    torch.testing.assert_close(module(x), other(x), rtol=1e-12, atol=1e-12)


def test_coordinate_attention_takes_the_weights_of_timm_with_biases() -> None:
    other, x = shaken(CoordAttn(32, bias=True, rd_channels=8)), random_maps(32)
    module = CoordinateAttention(32).double().eval()
    module.load_state_dict(other.state_dict())
    torch.testing.assert_close(module(x), other(x), rtol=1e-12, atol=1e-12)


def test_eca_kernel_follows_the_papers_rule() -> None:
    kernels = {channels: ECA(channels).conv.kernel_size[0] for channels in (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)}
    assert kernels == {1: 1, 16: 3, 32: 3, 64: 3, 128: 5, 256: 5, 512: 5, 1024: 5, 2048: 7, 4096: 7}
    assert ECA(256, gamma=1, b=0).conv.kernel_size == (9,)


@pytest.mark.parametrize(
    ("module", "width"),
    [
        (SqueezeExcite(8).fc1, 1),
        (SCSE(8).fc1, 4),
        (BAM(64).fc1, 4),
        (BAM(64, width=5).plane, 1),
        (CoordinateAttention(64).conv1, 8),
        (CoordinateAttention(1024).conv1, 32),
        (CoordinateAttention(64, width=3).conv1, 3),
        (SelectiveKernel(64).squeeze, 32),
        (SelectiveKernel(1024).squeeze, 64),
        (SelectiveKernel(64, width=5).squeeze, 5),
        (AttentionGate(8).psi, 1),
        (AttentionGate(8).from_gate, 4),
    ],
)
def test_bottleneck_is_as_wide_as_documented(module: nn.Conv2d, width: int) -> None:
    assert module.out_channels == width


@pytest.mark.parametrize(("channels", "out", "groups"), [(64, None, 32), (48, None, 16), (64, 24, 8), (3, None, 1)])
def test_selective_kernel_finds_groups_that_divide_its_channels(channels: int, out: int | None, groups: int) -> None:
    assert [conv.groups for conv in SelectiveKernel(channels, out_channels=out).convs] == [groups, groups]


def published(module: nn.Module, *inputs: Tensor) -> tuple[Tensor, list[tuple[str, Tensor]]]:
    gates: list[tuple[str, Tensor]] = []

    def listen(who: nn.Module, role: str, gate: Tensor, *_: object) -> None:
        assert who is module
        gates.append((role, gate))

    with listening(listen):
        output = module(*inputs)
    return output, gates


OWN = [
    "SE",
    "scSE",
    "scSE add",
    "ECA",
    "BAM",
    "GE",
    "GE of 2",
    "GE theta-plus of 4",
    "GE theta of all",
    "coordinate",
    "triplet",
    "SimAM",
    "attention gate",
]
SHAPES = {"channel_gate": (2, 8, 1, 1), "spatial_gate": (2, 1, 5, 7), "gate": (2, 8, 5, 7)}


@pytest.mark.parametrize("name", OWN)
def test_input_is_multiplied_by_exactly_the_last_gate_that_is_published(name: str) -> None:
    build, inputs = GATES[name]
    module, x = build().eval(), inputs()
    output, gates = published(module, *x)
    role, gate = gates[-1]
    assert torch.equal(x[0] * gate, output)
    assert torch.equal(module(*x), output)
    assert all(value.shape == SHAPES[name] for name, value in gates)
    assert len({one for one, _ in gates}) == len(gates)
    assert role == "gate" or len(gates) == 1


def test_cbam_multiplies_by_one_gate_after_the_other() -> None:
    build, inputs = GATES["CBAM"]
    output, gates = published(build().eval(), *inputs())
    (first, channels), (second, places) = gates
    assert (first, second) == ("channel_gate", "spatial_gate")
    assert torch.equal(inputs()[0] * channels * places, output)


def test_scse_publishes_both_gates_and_the_gate_that_was_applied() -> None:
    build, inputs = GATES["scSE"]
    gates = dict(published(build().eval(), *inputs())[1])
    assert list(gates) == ["channel_gate", "spatial_gate", "gate"]
    both = torch.stack([gates[role].expand(2, 8, 5, 7) for role in ("channel_gate", "spatial_gate")])
    up = inputs()[0] > 0
    assert torch.equal(gates["gate"][up], both.amax(0)[up])
    assert torch.equal(gates["gate"][~up], both.amin(0)[~up])


def test_bam_publishes_one_plus_the_map_of_the_paper() -> None:
    build, inputs = GATES["BAM"]
    ((role, gate),) = published(build().eval(), *inputs())[1]
    assert role == "gate"
    assert 1 < gate.min() < gate.max() < 2


def test_selective_kernel_publishes_shares_of_its_branches() -> None:
    module, x = SelectiveKernel(8, branches=3).eval(), random_maps(8).float()
    output, ((role, shares),) = published(module, x)
    branches = [norm(conv(x)).relu() for conv, norm in zip(module.convs, module.norms, strict=True)]
    assert (role, shares.shape) == ("branch_gate", (2, 3, 8))
    torch.testing.assert_close(shares.sum(1), torch.ones(2, 8))
    mixed = sum(shares[:, k, :, None, None] * branch for k, branch in enumerate(branches))
    torch.testing.assert_close(mixed, output)


def test_a_gate_for_listeners_only_is_not_computed_without_a_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = SCSE(8), random_maps(8).float()

    def refuse(*_: object) -> None:
        raise AssertionError("a gate was made")

    monkeypatch.setattr(torch, "where", refuse)
    assert module(x).shape == x.shape
    with pytest.raises(AssertionError, match="a gate was made"):
        published(module, x)


def test_simam_of_a_single_position_has_a_finite_output_and_gradient() -> None:
    x = torch.randn(2, 3, 1, 1, requires_grad=True)
    y = SimAM(3)(x)
    torch.testing.assert_close(y, x * torch.tensor(0.5).sigmoid())
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_simam_of_two_positions_divides_the_squares_by_one() -> None:
    x = torch.tensor([[[[1.0, 3.0]]]])  # each is 1 from the mean, so the variance is 2 / 1
    torch.testing.assert_close(SimAM(1)(x), x * torch.tensor(1 / (4 * 2.0001) + 0.5).sigmoid())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_simam_in_half_precision_equals_float32(dtype: torch.dtype) -> None:
    x = (10 * torch.randn(2, 3, 56, 56)).to(dtype)
    y = SimAM(3)(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), SimAM(3)(x.float()), rtol=torch.finfo(dtype).eps, atol=0)


def test_traced_simam_counts_the_positions_of_each_input() -> None:
    traced = fx.symbolic_trace(SimAM(3))
    for x in (torch.randn(1, 3, 1, 1), torch.randn(2, 3, 4, 6), 100 * torch.randn(2, 3, 9, 5).half()):
        assert torch.equal(traced(x), SimAM(3)(x))


@pytest.mark.parametrize(
    "build",
    [
        lambda: BAM(1),
        lambda: TripletAttention(1),
        lambda: GatherExcite(1, variant="theta", size=(1, 1)),
        lambda: GatherExcite(1, extent=2, variant="theta"),
        lambda: SelectiveKernel(1),
        lambda: CBAM(1),
    ],
    ids=["BAM", "triplet", "GE of all", "GE of 2", "SK", "CBAM"],
)
def test_training_on_a_single_value_is_refused(build: Callable[[], nn.Module]) -> None:
    module, x = build(), torch.randn(1, 1, 1, 1)
    with pytest.raises(ShapeError, match=r"BatchNorm2d cannot train on one value per channel, got .*batch of 2 or more"):
        module(x)
    assert module.eval()(x).isfinite().all()


def test_attention_gate_refuses_to_train_on_a_single_value() -> None:
    module = AttentionGate(8)
    x = torch.randn(1, 8, 1, 1)
    with pytest.raises(ShapeError, match="cannot train on one value"):
        module(x, torch.randn(1, 8, 4, 4))
    assert module.eval()(x, x).isfinite().all()


def test_coordinate_attention_trains_on_one_position() -> None:
    assert CoordinateAttention(8)(torch.randn(1, 8, 1, 1)).isfinite().all()


@pytest.mark.parametrize("build", [BAM, SelectiveKernel], ids=["BAM", "SK"])
def test_training_on_the_spatial_mean_of_a_batch_of_one_is_refused(build: Callable[[int], nn.Module]) -> None:
    with pytest.raises(ShapeError, match="cannot train on one value"):
        build(8)(torch.randn(1, 8, 5, 7))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "SE": (lambda: SqueezeExcite(8, width=0), "the width of the bottleneck must be a whole number of at least 1, got 0"),
    "scSE": (lambda: SCSE(8, 0), "reduction must be a whole number of at least 1, got 0"),
    "scSE name": (lambda: SCSE(8, fusion="mul"), "unknown fusion of SCSE 'mul'"),  # type: ignore[arg-type]
    "ECA even": (lambda: ECA(8, kernel_size=4), "kernel_size must be odd, got 4"),
    "ECA gamma": (lambda: ECA(8, gamma=0), "gamma must be a whole number of at least 1, got 0"),
    "ECA b": (lambda: ECA(8, b=-1), "b must be a whole number of at least 0, got -1"),
    "ECA channels": (lambda: ECA(0), "channels must be a whole number of at least 1, got 0"),
    "BAM": (lambda: BAM(8, width=0), "the width of the bottleneck must be"),
    "BAM dilation": (lambda: BAM(8, dilation=0), "dilation must be a whole number of at least 1, got 0"),
    "BAM name": (lambda: BAM(8, variant="sum"), "unknown variant of BAM 'sum'"),  # type: ignore[arg-type]
    "GE extent": (lambda: GatherExcite(8, extent=3), "extent must be 2, 4 or 8, or 0 for the whole map, got 3"),
    "GE name": (lambda: GatherExcite(8, variant="theta+"), "unknown variant of GatherExcite 'theta\\+'"),  # type: ignore[arg-type]
    "GE size": (lambda: GatherExcite(8, variant="theta"), "size must be given .* Pass size=\\(H, W\\), or an extent"),
    "GE width": (lambda: GatherExcite(8, width=0, extent=2, variant="theta-plus"), "the width of the bottleneck must be"),
    "SK groups": (lambda: SelectiveKernel(8, groups=3), "groups must divide 8 and 8 channels, got 3"),
    "SK width": (lambda: SelectiveKernel(8, width=0), "the width of the bottleneck must be"),
    "SK stride": (lambda: SelectiveKernel(8, stride=0), "stride must be a whole number of at least 1, got 0"),
    "SK branches": (lambda: SelectiveKernel(8, branches=0), "branches must be a whole number of at least 1, got 0"),
    "SK channels": (lambda: SelectiveKernel(8, out_channels=0), "out_channels must be a whole number of at least 1, got 0"),
    "coordinate": (lambda: CoordinateAttention(8, width=0), "the width of the bottleneck must be"),
    "triplet": (lambda: TripletAttention(8, kernel_size=2), "kernel_size must be odd, got 2"),
    "SimAM": (lambda: SimAM(8, regularization=0), "regularization must be above 0, got 0"),
    "SimAM NaN": (lambda: SimAM(8, regularization=math.nan), "regularization must be above 0, got nan"),
    "attention gate": (lambda: AttentionGate(8, gate_channels=0), "gate_channels must be a whole number of at least 1, got 0"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_invalid_numbers_are_refused_with_the_expected_range(name: str) -> None:
    build, message = REFUSED[name]
    with pytest.raises(OptionError, match=message):
        build()


@pytest.mark.parametrize("name", [*OWN, "CBAM", "SK"])
def test_maps_of_another_number_of_channels_are_refused(name: str) -> None:
    build, inputs = GATES[name]
    module = build()
    with pytest.raises(ShapeError, match=rf"{type(module).__name__} must be given \(B, 8, H, W\), got \(2, 9, 5, 7\)"):
        module(torch.zeros(2, 9, 5, 7), *inputs()[1:])


def test_attention_gate_refuses_a_gate_of_another_number_of_channels() -> None:
    with pytest.raises(ShapeError, match=r"AttentionGate must be given \(B, 6, H, W\), got \(2, 8, 3, 4\)"):
        AttentionGate(8, gate_channels=6)(torch.zeros(2, 8, 5, 7), torch.zeros(2, 8, 3, 4))


def test_a_learned_global_gather_accepts_only_its_own_map_size() -> None:
    module = GatherExcite(8, variant="theta-plus", size=(5, 7))
    with pytest.raises(ShapeError, match=r"GatherExcite must be given \(B, C, 5, 7\), got \(2, 8, 7, 5\)"):
        module(torch.zeros(2, 8, 7, 5))


@pytest.mark.parametrize("norm", [CBAM(8).norm, *TripletAttention(8).norms])
def test_norms_of_one_plane_have_the_momentum_of_the_authors(norm: nn.BatchNorm2d) -> None:
    assert norm.momentum == 0.01
