"""Attention over tokens: against slow loops, timm, torchvision and PyTorch; fused against explicit; and as captured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.models import cait, swin_transformer, vision_transformer, xcit
from torch import Tensor, nn
from torchvision.models.swin_transformer import ShiftedWindowAttention

import visattn
from tests.conftest import Figures
from visattn import nn as ours
from visattn.core.operators import MatrixOperator, SoftmaxOperator
from visattn.errors import OptionError, ShapeError

GRID = (5, 7)
Grid = tuple[int, int]
Allowed = Callable[[int, int, int], bool]  # head, query, key
Bias = Callable[[int, int, int], float]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lively(module: nn.Module, seed: int = 0) -> Any:
    """Return the module in float64 with weights far from their initialization, so that attention is far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.6)
    return module.double().eval()


# slow loops


def loops(
    query: Tensor, key: Tensor, value: Tensor, *, allowed: Allowed = lambda *_: True, bias: Bias = lambda *_: 0.0
) -> tuple[Tensor, Tensor]:
    """Compute output `(B, Q, C)` and weights `(B, heads, Q, K)` from `(B, tokens, heads, d)`, number by number."""
    batch, queries, heads, width = query.shape
    keys = key.shape[1]
    out, weights = torch.zeros_like(query), query.new_zeros(batch, heads, queries, keys)
    for b, h, i in itertools.product(range(batch), range(heads), range(queries)):
        exps = {}
        for j in range(keys):
            if allowed(h, i, j):
                exps[j] = math.exp(float(sum(query[b, i, h] * key[b, j, h])) / math.sqrt(width) + bias(h, i, j))
        for j, one in exps.items():
            weights[b, h, i, j] = one / sum(exps.values())
            out[b, i, h] += weights[b, h, i, j] * value[b, j, h]
    return out.reshape(batch, queries, heads * width), weights


def heads_of(x: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """Project tokens to heads, `(B, tokens, heads, d)`."""
    made: Tensor = torch.einsum("bnc,dc->bnd", x, weight)
    made = made if bias is None else made + bias
    return made.reshape(*x.shape[:2], heads, -1)


def thirds(x: Tensor, linear: nn.Linear, heads: int) -> list[Tensor]:
    """Compute query, key and value with a layer that stores their rows one after the other."""
    width = linear.in_features
    weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    rows = [slice(i * width, (i + 1) * width) for i in range(3)]
    return [heads_of(x, weight[part], None if bias is None else bias[part], heads) for part in rows]


def finish(module: Any, out: Tensor) -> Tensor:
    """Apply the output projection."""
    projected: Tensor = torch.einsum("bnc,dc->bnd", out, module.proj.weight.detach()) + module.proj.bias.detach()
    return projected


def agree(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_multi_head_attention_equals_loops(qkv_bias: bool) -> None:
    module, x = lively(ours.MultiHeadAttention(8, 2, qkv_bias=qkv_bias)), noise(2, 5, 8)
    out, weights = loops(*thirds(x, module.qkv, 2))
    agree(module(x, need_weights=True), (finish(module, out), weights))


def test_cross_attention_equals_loops_under_a_mask() -> None:
    module, x = lively(ours.MultiHeadAttention(8, 2)), noise(2, 3, 8)
    key, value, mask = noise(2, 5, 8, seed=1), noise(2, 5, 8, seed=2), noise(3, 5, seed=3) > 0
    mask[:, 0] = True
    made = [thirds(part, module.qkv, 2)[i] for i, part in enumerate((x, key, value))]
    out, weights = loops(*made, allowed=lambda _, i, j: bool(mask[i, j]))
    agree(module(x, key, value, mask, need_weights=True), (finish(module, out), weights))


def test_class_attention_equals_loops() -> None:
    module, x = lively(ours.ClassAttention(8, 2, qkv_bias=True)), noise(2, 6, 8)
    layers = ((module.q, x[:, :1]), (module.k, x), (module.v, x))
    out, weights = loops(*(heads_of(part, layer.weight.detach(), layer.bias.detach(), 2) for layer, part in layers))
    agree(module(x, need_weights=True), (finish(module, out), weights))


def test_talking_heads_equal_loops() -> None:
    module, x = lively(ours.TalkingHeadsAttention(8, 2)), noise(2, 4, 8)
    query, key, value = thirds(x, module.qkv, 2)
    before, after = ((part.weight.tolist(), part.bias.tolist()) for part in (module.proj_l, module.proj_w))
    weights, out = torch.zeros(2, 2, 4, 4, dtype=torch.float64), torch.zeros(2, 4, 2, 4, dtype=torch.float64)
    for b, i in itertools.product(range(2), range(4)):
        scores = [[float(query[b, i, g] @ key[b, j, g]) / 2 for j in range(4)] for g in range(2)]
        talked = [[before[1][h] + sum(before[0][h][g] * scores[g][j] for g in range(2)) for j in range(4)] for h in range(2)]
        shares = [[math.exp(one) / sum(math.exp(other) for other in row) for one in row] for row in talked]
        for h, j in itertools.product(range(2), range(4)):
            weights[b, h, i, j] = after[1][h] + sum(after[0][h][g] * shares[g][j] for g in range(2))
            out[b, i, h] += weights[b, h, i, j] * value[b, j, h]
    agree(module(x, need_weights=True), (finish(module, out.flatten(2)), weights))
    assert (weights.sum(-1) - 1).abs().min() > 0.05


def test_cross_covariance_equals_loops() -> None:
    module, x = lively(ours.CrossCovarianceAttention(8, 2)), noise(2, 5, 8)
    query, key, value = thirds(x, module.qkv, 2)
    weights, out = torch.zeros(2, 2, 4, 4, dtype=torch.float64), torch.zeros(2, 5, 2, 4, dtype=torch.float64)
    for b, h, i in itertools.product(range(2), range(2), range(4)):
        exps = []
        for j in range(4):
            one, other = query[b, :, h, i], key[b, :, h, j]
            cosine = float(one @ other) / math.sqrt(float(one @ one) * float(other @ other))
            exps.append(math.exp(cosine * module.temperature.flatten().tolist()[h]))
        for j in range(4):
            weights[b, h, i, j] = exps[j] / sum(exps)
            out[b, :, h, i] += weights[b, h, i, j] * value[b, :, h, j]
    agree(module(x, need_weights=True), (finish(module, out.flatten(2)), weights))


WINDOWS: dict[str, tuple[Grid, Grid, Grid]] = {  # grid, window, shift
    "a multiple": ((4, 6), (2, 3), (0, 0)),
    "a multiple, shifted": ((4, 6), (2, 3), (1, 1)),
    "padded": (GRID, (3, 4), (0, 0)),
    "padded and shifted": (GRID, (3, 4), (1, 2)),
    "shifted by more padding than a window holds": ((4, 4), (3, 3), (2, 2)),
    "as high as the grid": (GRID, (5, 3), (2, 1)),
    "larger than the grid": (GRID, (9, 9), (4, 4)),
    "of one token": (GRID, (1, 1), (0, 0)),
}


@pytest.mark.parametrize("name", list(WINDOWS))
def test_windows_equal_loops(name: str) -> None:
    grid, window, shift = WINDOWS[name]
    module, x = lively(ours.WindowAttention(4, 2, window_size=window, shift_size=shift)), noise(2, grid[0] * grid[1], 4)
    table = module.relative_position_bias_table.detach()
    shift = tuple(0 if size <= side else by for size, side, by in zip(grid, window, shift, strict=True))  # type: ignore[assignment]

    def cell(token: int) -> list[int]:  # windows begin at the shift; the border crops those before it
        return [(place - by) // side for place, by, side in zip(divmod(token, grid[1]), shift, window, strict=True)]

    def bias(head: int, i: int, j: int) -> float:
        down, right = (a - b for a, b in zip(divmod(i, grid[1]), divmod(j, grid[1]), strict=True))
        return float(table[(down + window[0] - 1) * (2 * window[1] - 1) + right + window[1] - 1, head])

    out, weights = loops(*thirds(x, module.qkv, 2), allowed=lambda _, i, j: cell(i) == cell(j), bias=bias)
    agree(module(x, grid, need_weights=True), (finish(module, out), weights))


SLIDING: dict[str, dict[str, Any]] = {
    "radius 1": {"radius": 1},
    "radius 0": {"radius": 0},
    "dilated": {"radius": 1, "dilation": 2},
    "dilated by heads": {"radius": 2, "dilation": (1, 3)},
    "global": {"radius": 1, "global_tokens": 2},
    "dilated by heads and global": {"radius": 1, "dilation": (2, 1), "global_tokens": 1},
}


@pytest.mark.parametrize("name", list(SLIDING))
def test_sliding_windows_equal_loops(name: str) -> None:
    options = SLIDING[name]
    first, grid = options.get("global_tokens", 0), (4, 5)
    dilation = options.get("dilation", 1)
    steps = dilation if isinstance(dilation, tuple) else (dilation, dilation)
    module, x = lively(ours.SlidingWindowAttention(4, 2, **options)), noise(2, first + 20, 4)

    def allowed(head: int, i: int, j: int) -> bool:
        if i < first or j < first:
            return True
        offsets = [abs(a - b) for a, b in zip(divmod(i - first, 5), divmod(j - first, 5), strict=True)]
        return all(one in [steps[head] * k for k in range(options["radius"] + 1)] for one in offsets)

    out, weights = loops(*thirds(x, module.qkv, 2), allowed=allowed)
    if first:
        others = loops(*thirds(x, module.qkv_global, 2))
        out[:, :first], weights[:, :, :first] = others[0][:, :first], others[1][:, :, :first]
    agree(module(x, grid, need_weights=True), (finish(module, out), weights))
    torch.testing.assert_close(module(x, grid), finish(module, out), rtol=0, atol=1e-12)


@pytest.mark.parametrize("grid", [(19, 26), (8, 24), (1, 40), (33, 3)], ids=str)
@pytest.mark.parametrize("name", [*SLIDING, "wider than a tile"])
def test_sliding_windows_in_tiles_equal_the_dense_mask_forward_and_backward(
    name: str, grid: tuple[int, int], figures: Figures
) -> None:
    options = {**SLIDING, "wider than a tile": {"radius": 5, "dilation": (1, 2)}}[name]
    rows, columns = grid
    first, steps = options.get("global_tokens", 0), options.get("dilation", 1)
    steps = steps if isinstance(steps, tuple) else (steps, steps)
    torch.manual_seed(0)
    module = ours.SlidingWindowAttention(8, 2, **options)
    x = torch.randn(2, first + rows * columns, 8, requires_grad=True)
    slope = torch.randn_like(x)

    allowed = torch.ones(2, rows * columns, first + rows * columns, dtype=torch.bool)
    place = torch.tensor([(row, column) for row in range(rows) for column in range(columns)])
    for head, step in enumerate(steps):
        reached = torch.tensor([step * k for k in range(-options["radius"], options["radius"] + 1)])
        allowed[head, :, first:] = torch.isin(place[:, None] - place, reached).all(-1)

    def dense() -> Tensor:
        def heads(t: Tensor) -> list[Tensor]:
            return [part.view(2, -1, 2, 4).transpose(1, 2) for part in t.chunk(3, 2)]

        query, key, value = heads(module.qkv(x))
        scores = (query[:, :, first:] @ key.mT / 2).masked_fill(~allowed, -torch.inf)
        out = scores.softmax(-1) @ value
        if module.qkv_global is not None:
            query, key, value = heads(module.qkv_global(x))
            out = torch.cat([(query[:, :, :first] @ key.mT / 2).softmax(-1) @ value, out], 2)
        return module.proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    wanted = [x, *module.parameters()]
    of_tiles, of_mask = ((out, torch.autograd.grad(out, wanted, slope)) for out in (module(x, grid), dense()))
    figures("sliding window: output against the dense mask", float((of_tiles[0] - of_mask[0]).detach().abs().max()), "<= 1e-6")
    worst = max(float((a - b).abs().max() / b.abs().max().clamp_min(1)) for a, b in zip(of_tiles[1], of_mask[1], strict=True))
    figures("sliding window: gradients against the dense mask, of the largest", worst, "<= 1e-6")


# other implementations


def test_multi_head_attention_equals_pytorchs(figures: Figures) -> None:
    theirs = lively(nn.MultiheadAttention(8, 2, batch_first=True))
    module = ours.MultiHeadAttention(8, 2).double()
    module.qkv.load_state_dict({"weight": theirs.in_proj_weight, "bias": theirs.in_proj_bias})
    module.proj.load_state_dict(theirs.out_proj.state_dict())
    query, key, value = noise(2, 4, 8), noise(2, 6, 8, seed=1), noise(2, 6, 8, seed=2)
    drop, padded = noise(4, 6, seed=3) > 0.5, torch.zeros(2, 6, dtype=torch.bool)
    drop[:, 0], padded[1, 4:] = False, True
    expected = theirs(query, key, value, attn_mask=drop, key_padding_mask=padded, average_attn_weights=False)
    found = module(query, key, value, ~drop & ~padded[:, None], need_weights=True)
    worst = max(float((a - b).detach().abs().max()) for a, b in zip(found, expected, strict=True))
    figures("multi-head attention: against nn.MultiheadAttention, float64", worst, "<= 1e-12")
    assert worst <= 1e-12


TIMM: dict[str, tuple[nn.Module, nn.Module]] = {
    "multi-head": (ours.MultiHeadAttention(16, 4), vision_transformer.Attention(16, 4, qkv_bias=True)),
    "class attention": (ours.ClassAttention(16, 4), cait.ClassAttn(16, 4)),
    "talking heads": (ours.TalkingHeadsAttention(16, 4), cait.TalkingHeadAttn(16, 4)),
    "cross-covariance": (ours.CrossCovarianceAttention(16, 4), xcit.XCA(16, 4)),
}


@pytest.mark.parametrize("name", list(TIMM))
def test_attention_equals_timms_with_its_state(name: str) -> None:
    module, theirs = TIMM[name]
    lively(module.double()).load_state_dict(lively(theirs, seed=1).state_dict())
    torch.testing.assert_close(module(noise(2, 9, 16)), theirs(noise(2, 9, 16)), rtol=0, atol=1e-12)


shifts = pytest.mark.parametrize("shift", [0, 2])


@shifts
def test_windows_equal_torchvisions_with_its_state(shift: int) -> None:
    theirs = lively(ShiftedWindowAttention(8, [4, 4], [shift, shift], 2))
    module = ours.WindowAttention(8, 2, window_size=4, shift_size=shift).double()
    module.load_state_dict({name: value for name, value in theirs.state_dict().items() if name != "relative_position_index"})
    x = noise(2, 8 * 12, 8)
    torch.testing.assert_close(module(x, (8, 12)), theirs(x.view(2, 8, 12, 8)).flatten(1, 2), rtol=0, atol=1e-12)


@shifts
def test_windows_equal_timms_with_its_state(shift: int) -> None:
    theirs = lively(swin_transformer.SwinTransformerBlock(8, (8, 12), num_heads=2, window_size=4, shift_size=shift))
    module = ours.WindowAttention(8, 2, window_size=4, shift_size=shift).double()
    module.load_state_dict(theirs.attn.state_dict())
    x = noise(2, 8 * 12, 8)
    torch.testing.assert_close(module(x, (8, 12)), theirs._attn(x.view(2, 8, 12, 8)).flatten(1, 2), rtol=0, atol=1e-12)


# equivalent computations

EVERY: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "multi-head": (lambda: ours.MultiHeadAttention(16, 2), ()),
    "class attention": (lambda: ours.ClassAttention(16, 2), ()),
    "talking heads": (lambda: ours.TalkingHeadsAttention(16, 2), ()),
    "cross-covariance": (lambda: ours.CrossCovarianceAttention(16, 2), ()),
    "window": (lambda: ours.WindowAttention(16, 2, window_size=3), (GRID,)),
    "window shifted": (lambda: ours.WindowAttention(16, 2, window_size=3, shift_size=1), (GRID,)),
    "sliding window": (lambda: ours.SlidingWindowAttention(16, 2, radius=1, dilation=(1, 2)), (GRID,)),
    "sliding window with global tokens": (lambda: ours.SlidingWindowAttention(16, 2, radius=1, global_tokens=3), ((4, 8),)),
}
every_module = pytest.mark.parametrize("name", list(EVERY))


@every_module
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=["float32", "float64"])
def test_explicit_weights_give_the_output_of_the_fused_kernel(
    name: str, dtype: torch.dtype, bound: float, figures: Figures
) -> None:
    build, arguments = EVERY[name]
    torch.manual_seed(0)
    module, x = build().to(dtype), noise(2, 35, 16).to(dtype)
    with torch.no_grad():
        worst = float((module(x, *arguments) - module(x, *arguments, need_weights=True)[0]).abs().max())
    figures(f"{name}: fused against written out, {dtype}", worst, f"<= {bound:g}")
    assert worst <= bound


@every_module
def test_gradients_do_not_depend_on_need_weights(name: str) -> None:
    build, arguments = EVERY[name]
    module = lively(build())
    sums = [
        module(noise(2, 35, 16), *arguments).sin().sum(),
        module(noise(2, 35, 16), *arguments, need_weights=True)[0].sin().sum(),
    ]
    fused, written = (torch.autograd.grad(one, list(module.parameters())) for one in sums)
    torch.testing.assert_close(fused, written, rtol=1e-9, atol=1e-9)


@every_module
def test_weights_of_a_row_sum_to_one(name: str) -> None:
    build, arguments = EVERY[name]
    _, weights = lively(build())(noise(2, 35, 16), *arguments, need_weights=True)
    if name == "talking heads":
        return  # mixed after the softmax, see the loops
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=0, atol=1e-12)


@every_module
def test_images_of_a_batch_are_independent(name: str) -> None:
    build, arguments = EVERY[name]
    module, x = lively(build()), noise(3, 35, 16)
    singles = torch.cat([module(x[i : i + 1], *arguments) for i in range(3)])
    torch.testing.assert_close(module(x, *arguments), singles, rtol=0, atol=1e-12)


@every_module
def test_one_token_attends_to_itself(name: str) -> None:
    build, arguments = EVERY[name]
    globals_only = name == "sliding window with global tokens"
    module, x = lively(build()), noise(2, 4 if globals_only else 1, 16)
    out, weights = module(x, *(((1, 1),) if arguments else ()), need_weights=True)
    assert out.isfinite().all()
    if name not in {"talking heads", "cross-covariance"} and not globals_only:
        assert torch.equal(weights, torch.ones(2, 2, 1, 1, dtype=torch.float64))


def with_state(module: Any, other: Any) -> Any:
    module.load_state_dict(other.state_dict(), strict=False)
    return module.double()


def test_a_window_that_covers_the_grid_is_full_attention_with_a_bias() -> None:
    whole = lively(ours.MultiHeadAttention(8, 2))
    x = noise(2, 35, 8)
    window = with_state(ours.WindowAttention(8, 2, window_size=7, shift_size=3), whole)
    nn.init.zeros_(window.relative_position_bias_table)
    torch.testing.assert_close(window(x, GRID), whole(x), rtol=0, atol=1e-12)


def test_a_sliding_window_that_covers_the_grid_is_full_attention() -> None:
    whole = lively(ours.MultiHeadAttention(8, 2))
    sliding = with_state(ours.SlidingWindowAttention(8, 2, radius=6), whole)
    torch.testing.assert_close(sliding(noise(2, 35, 8), GRID), whole(noise(2, 35, 8)), rtol=0, atol=1e-12)


def test_global_projections_start_as_copies_of_the_local_ones() -> None:
    sliding = ours.SlidingWindowAttention(8, 2, radius=6, global_tokens=2).double()
    whole = with_state(ours.MultiHeadAttention(8, 2), ours.MultiHeadAttention(8, 2))
    whole.qkv, whole.proj = sliding.qkv, sliding.proj
    torch.testing.assert_close(sliding(noise(2, 37, 8), GRID), whole(noise(2, 37, 8)), rtol=0, atol=1e-12)
    assert sliding.qkv_global is not None
    assert sliding.qkv_global.weight.data_ptr() != sliding.qkv.weight.data_ptr()


def test_padding_of_windows_gets_no_attention() -> None:
    module = lively(ours.WindowAttention(4, 1, window_size=4, shift_size=2))
    nn.init.constant_(module.qkv.bias, 1e3)  # keys and values of padding would be as large
    out, weights = module(noise(1, 35, 4), GRID, need_weights=True)
    assert weights.shape == (1, 1, 35, 35)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1, 35, dtype=torch.float64), rtol=0, atol=1e-12)
    assert out.isfinite().all()


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_fully_masked_query_gets_only_the_bias_of_the_projection(need_weights: bool) -> None:
    module, x = lively(ours.MultiHeadAttention(8, 2)), noise(2, 5, 8).requires_grad_()
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[3] = False
    out = module(x, mask=mask, need_weights=need_weights)
    if need_weights:
        out, weights = out
        assert weights[:, :, 3].abs().max() == 0
    torch.testing.assert_close(out[:, 3], module.proj.bias.expand(2, -1), rtol=0, atol=0)
    out.square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


MASKS: dict[str, tuple[int, ...]] = {
    "of all": (4, 6),
    "of each image": (2, 4, 6),
    "of keys": (2, 1, 6),
    "of each head": (2, 2, 4, 6),
}


@pytest.mark.parametrize("name", list(MASKS))
def test_a_mask_is_shared_along_axes_of_length_one(name: str) -> None:
    mask = noise(*MASKS[name]) > 0
    mask[..., 0] = True
    query, key = noise(2, 4, 8, seed=1), noise(2, 6, 8, seed=2)
    _, weights = lively(ours.MultiHeadAttention(8, 2))(query, key, mask=mask, need_weights=True)
    wide = (mask[:, None] if mask.ndim == 3 else mask).expand(2, 2, 4, 6)
    assert torch.equal(weights > 0, wide)


# errors

BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "heads": (
        lambda: ours.MultiHeadAttention(10, 4),
        OptionError,
        "num_heads must divide embed_dim, got 4 heads for 10 channels",
    ),
    "heads of windows": (lambda: ours.WindowAttention(10, 4), OptionError, "num_heads must divide"),
    "heads of sliding windows": (lambda: ours.SlidingWindowAttention(10, 4, radius=1), OptionError, "num_heads must divide"),
    "heads of class attention": (lambda: ours.ClassAttention(10, 4), OptionError, "num_heads must divide"),
    "number of talking heads": (lambda: ours.TalkingHeadsAttention(10, 4), OptionError, "num_heads must divide"),
    "heads of channels": (lambda: ours.CrossCovarianceAttention(10, 4), OptionError, "num_heads must divide"),
    "no heads": (lambda: ours.MultiHeadAttention(8, 0), OptionError, "num_heads must be a whole number of at least 1"),
    "shift": (
        lambda: ours.WindowAttention(8, 2, window_size=4, shift_size=4),
        OptionError,
        r"shift_size must be smaller than window_size \(4, 4\)",
    ),
    "window": (
        lambda: ours.WindowAttention(8, 2, window_size=(0, 4)),
        OptionError,
        "window_size must be a whole number of at least 1",
    ),
    "radius": (lambda: ours.SlidingWindowAttention(8, 2, radius=-1), OptionError, "radius must be a whole number of at least 0"),
    "dilation": (lambda: ours.SlidingWindowAttention(8, 2, radius=1, dilation=0), OptionError, "dilation must be a whole number"),
    "dilations": (
        lambda: ours.SlidingWindowAttention(8, 4, radius=1, dilation=(1, 2)),
        OptionError,
        r"one per head \(4\), got 2 numbers",
    ),
    "width": (lambda: ours.MultiHeadAttention(8, 2)(torch.zeros(1, 3, 6)), ShapeError, r"must be given \(B, N, 8\)"),
    "maps": (lambda: ours.ClassAttention(8, 2)(torch.zeros(1, 8, 3, 3)), ShapeError, r"flatten\(2\)"),
    "grid": (lambda: ours.WindowAttention(8, 2)(torch.zeros(1, 36, 8), GRID), ShapeError, "must be given 5 x 7 tokens, got 36"),
    "grid after global tokens": (
        lambda: ours.SlidingWindowAttention(8, 2, radius=1, global_tokens=2)(torch.zeros(1, 35, 8), GRID),
        ShapeError,
        "must be given 2 global tokens and 5 x 7 tokens, got 35",
    ),
    "mask of numbers": (
        lambda: ours.MultiHeadAttention(8, 2)(torch.zeros(1, 3, 8), mask=torch.zeros(3, 3)),
        OptionError,
        r"mask must be boolean, True where a query may attend, got torch.float32\. Invert masks",
    ),
    "mask of another shape": (
        lambda: ours.MultiHeadAttention(8, 2)(torch.zeros(2, 3, 8), mask=torch.ones(2, 4, dtype=torch.bool)),
        ShapeError,
        r"mask must broadcast to \(2, 2, 3, 3\), got \(2, 4\)",
    ),
    "values for other keys": (
        lambda: ours.MultiHeadAttention(8, 2)(torch.zeros(2, 3, 8), torch.zeros(2, 4, 8), torch.zeros(2, 5, 8)),
        ShapeError,
        "with a value for each key",
    ),
}


@pytest.mark.parametrize("name", list(BAD))
def test_invalid_arguments_are_refused_with_the_reason(name: str) -> None:
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


# capture


class Net(nn.Module):
    """Network of 16-pixel patches, one attention, a mean and a linear head."""

    def __init__(self, attention: nn.Module, prefix: int, gridded: bool) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 16, 16, 16), nn.LayerNorm(16)
        self.prefix = nn.Parameter(torch.randn(1, prefix, 16))
        self.attention, self.gridded = attention, gridded
        self.head = nn.Linear(16, 4)

    def given(self, x: Tensor) -> tuple[Any, ...]:
        maps = self.patches(x)
        tokens = torch.cat([self.prefix.expand(x.shape[0], -1, -1), maps.flatten(2).transpose(1, 2)], 1)
        return (self.norm(tokens), tuple(maps.shape[2:])) if self.gridded else (self.norm(tokens),)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.attention(*self.given(x)).mean(1))
        return out


CAPTURED: dict[str, tuple[Callable[[], nn.Module], int, list[tuple[str, slice]]]] = {  # prefix; kind and rows of each record
    "multi-head": (lambda: ours.MultiHeadAttention(16, 2), 0, [("self", slice(None))]),
    "multi-head with a class token": (lambda: ours.MultiHeadAttention(16, 2), 1, [("self", slice(None))]),
    "talking heads": (lambda: ours.TalkingHeadsAttention(16, 2), 0, [("self", slice(None))]),
    "class attention": (lambda: ours.ClassAttention(16, 2), 1, [("pool", slice(None))]),
    "cross-covariance": (lambda: ours.CrossCovarianceAttention(16, 2), 0, [("channel", slice(None))]),
    "window": (lambda: ours.WindowAttention(16, 2, window_size=(5, 7)), 0, [("self", slice(None))]),
    "window padded and shifted": (lambda: ours.WindowAttention(16, 2, window_size=4, shift_size=2), 0, [("self", slice(None))]),
    "sliding window": (lambda: ours.SlidingWindowAttention(16, 2, radius=1), 0, [("self", slice(None))]),
    "sliding window with global tokens": (
        lambda: ours.SlidingWindowAttention(16, 2, radius=1, dilation=(1, 2), global_tokens=2),
        2,
        [("cross", slice(2, None)), ("pool", slice(2))],
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", list(CAPTURED))
def test_captured_weights_equal_those_of_the_module(name: str, figures: Figures) -> None:
    build, prefix, parts = CAPTURED[name]
    torch.manual_seed(0)
    attention = build()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.6)
    net = Net(attention, prefix, hasattr(attention, "window_size") or hasattr(attention, "radius")).eval()
    x = torch.randn(2, 3, 16 * GRID[0], 16 * GRID[1])
    _, weights = attention(*net.given(x), need_weights=True)
    with visattn.capture(net) as recording:
        net(x)
    assert [(record.layer, record.kind) for record in recording] == [("attention", kind) for kind, _ in parts]
    worst = 0.0
    for record, (kind, rows) in zip(recording, parts, strict=True):
        assert kind == "channel" or record.keys.grid == GRID
        assert isinstance(record.operator, MatrixOperator if name == "talking heads" else SoftmaxOperator)  # the latter is fused
        worst = max(worst, float((record.operator.dense() - weights[:, :, rows]).abs().max()))
    figures(f"{name}: captured weights against the module's own", worst, "<= 1e-5")
    assert worst <= 1e-5
