"""Ways to call attention: arguments of the fused kernels, `nn.MultiheadAttention`, dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torchvision.models import VisionTransformer

import visattn
from tests import tiny
from tests.capturing import own
from visattn.core.records import Recording
from visattn.errors import UnsupportedModel

TOKENS = 7
BOOLEAN = torch.rand(2, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)) > 0.4
EMPTY_ROW = BOOLEAN.clone()
EMPTY_ROW[:, :, 3] = False
PER_HEAD = torch.randn(1, 4, TOKENS, TOKENS, generator=torch.Generator().manual_seed(1))
TABLE = torch.randn(2, TOKENS, TOKENS, generator=torch.Generator().manual_seed(2))


def run(model: nn.Module, x: Tensor, **options: Any) -> tuple[Tensor, Recording]:
    with torch.no_grad(), visattn.capture(model, values=True, **options) as recording:
        out = model(x)
    return out, recording


def noting(attend: own.Attend) -> tuple[own.Attend, list[Tensor]]:
    """Return the same attention function and the list in which it stores its results."""
    outs: list[Tensor] = []

    def noted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs.append(attend(q, k, v))
        return outs[-1]

    return noted, outs


def sdpa(**options: Any) -> own.Attend:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


# the fused kernel

SDPA: dict[str, dict[str, Any]] = {
    "plain": {},
    "boolean mask": {"attn_mask": BOOLEAN},
    "mask of one image": {"attn_mask": BOOLEAN[0, 0]},
    "mask of floats": {"attn_mask": PER_HEAD[:, :1]},
    "mask of each head": {"attn_mask": PER_HEAD},
    "a fully masked row": {"attn_mask": EMPTY_ROW},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.7},
    "scale of 0": {"scale": 0.0},
}


@pytest.mark.parametrize("name", list(SDPA))
@pytest.mark.parametrize("groups", [4, 2, 1], ids=["as many keys", "grouped queries", "one head of keys"])
def test_weights_times_values_equal_the_kernels_output(name: str, groups: int) -> None:
    attend, outs = noting(sdpa(**SDPA[name], enable_gqa=groups < 4))
    _, recording = run(own.vit(attend, heads=4, groups=groups), tiny.pixels(2))
    assert recording.layers == own.LAYERS
    for record, out in zip(recording, outs, strict=True):
        assert record.operator.shape == (2, 4, TOKENS, TOKENS)
        assert record.value is not None
        assert record.value.shape == (2, 4, TOKENS, 8)
        torch.testing.assert_close(own.mixture(record).float(), out, rtol=0, atol=1e-5)
        assert (record.kind, record.queries, record.keys) == ("self", tiny.layout(), tiny.layout())


@pytest.mark.parametrize("images", [1, 2, 3])
def test_heads_may_come_before_images(images: int) -> None:
    weights: list[Tensor] = []

    def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (operand.transpose(0, 1) for operand in (q, k, v))
        weights.append((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1).transpose(0, 1))
        return F.scaled_dot_product_attention(q, k, v).transpose(0, 1)

    _, recording = run(own.vit(heads_first), torch.randn(images, 3, 48, 64))
    for record, expected in zip(recording, weights, strict=True):
        torch.testing.assert_close(record.operator.dense(), expected)


def test_weights_of_a_fully_masked_row_are_zero() -> None:
    _, recording = run(own.vit(sdpa(attn_mask=EMPTY_ROW)), tiny.pixels(2))
    weights = recording[0].operator.dense()
    assert bool((weights[:, :, 3] == 0).all())
    torch.testing.assert_close(weights[:, :, :3].sum(-1), torch.ones(2, 2, 3), rtol=0, atol=1e-6)


@pytest.mark.parametrize("positional", [True, False], ids=["positional", "by name"])
def test_arguments_may_be_positional_or_keywords(positional: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if positional:
            return F.scaled_dot_product_attention(q, k, v, PER_HEAD, 0.0, False)
        return F.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=PER_HEAD)

    noted, outs = noting(attend)
    _, recording = run(own.vit(noted, heads=4), tiny.pixels(2))
    assert recording[0].keys == tiny.layout()
    torch.testing.assert_close(own.mixture(recording[1]).float(), outs[1], rtol=0, atol=1e-5)


# flex_attention

FLEX: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "relative positions": {"score_mod": lambda score, b, h, q, k: score + 0.1 * (q - k)},
    "a table of each head": {"score_mod": lambda score, b, h, q, k: score + TABLE[h, q, k]},
    "a table indexed step by step": {"score_mod": lambda score, b, h, q, k: score + TABLE[h][q][k]},
    "a mask by score": {"score_mod": lambda score, b, h, q, k: torch.where(q >= k, score, -float("inf"))},
    "a mask by block": {
        "block_mask": create_block_mask(lambda b, h, q, k: (q - k).abs() <= 2 + b, 2, None, TOKENS, TOKENS, device="cpu")
    },
    "both": {
        "score_mod": lambda score, b, h, q, k: score + h + k,
        "block_mask": create_block_mask(lambda b, h, q, k: q >= k, None, None, TOKENS, TOKENS, device="cpu"),
    },
}
flex_warns = pytest.mark.filterwarnings("ignore:flex_attention called without")  # torch warns even if flex_attention is compiled
flex_compiled = torch.compile(flex_attention, backend="eager")


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Reset the compiler after each test, so that tests do not share compiled sizes."""
    yield
    torch.compiler.reset()


@pytest.mark.full
@flex_warns
@pytest.mark.parametrize("name", list(FLEX))
@pytest.mark.parametrize(("compiled", "groups"), [(False, 2), (True, 1)], ids=["plain", "compiled, grouped queries"])
def test_flex_attention_is_captured(name: str, compiled: bool, groups: int) -> None:
    function: Callable[..., Tensor] = flex_compiled if compiled else flex_attention
    attend, outs = noting(lambda q, k, v: function(q, k, v, **FLEX[name], enable_gqa=groups == 1))
    model, x = own.vit(attend, groups=groups), tiny.pixels(2)
    out, recording = run(model, x)
    for record, result in zip(recording, outs, strict=True):
        torch.testing.assert_close(own.mixture(record).float(), result, rtol=0, atol=1e-5)
        assert (record.kind, record.queries, record.keys) == ("self", tiny.layout(), tiny.layout())
    assert recording.layers == own.LAYERS
    with torch.no_grad():
        torch.testing.assert_close(model(x), out, rtol=0, atol=1e-5)


@flex_warns
def test_flex_attention_equals_the_fused_kernel() -> None:
    def relative(score: Tensor, _b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + 0.1 * (q - k)

    bias = 0.1 * (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS))
    flexible = own.vit(lambda q, k, v: flex_attention(q, k, v, score_mod=relative))
    (_, flex), (_, fused) = run(flexible, tiny.pixels(2)), run(own.vit(sdpa(attn_mask=bias)), tiny.pixels(2))
    for one, other in zip(flex, fused, strict=True):
        torch.testing.assert_close(one.operator.dense(), other.operator.dense(), rtol=0, atol=1e-6)


SQUASHED: dict[str, Callable[..., Tensor]] = {
    "soft cap": lambda score, b, h, q, k: 3 * torch.tanh(score / 3),
    "only positive scores": lambda score, b, h, q, k: score.relu(),
    "temperature": lambda score, b, h, q, k: score * 2 + k,
}


@flex_warns
@pytest.mark.parametrize("name", list(SQUASHED))
def test_flex_attention_that_does_more_than_add_is_refused(name: str) -> None:
    model = own.vit(lambda q, k, v: flex_attention(q, k, v, score_mod=SQUASHED[name]))
    with pytest.raises(UnsupportedModel, match=r"blocks\.0\.attn: flex_attention's score_mod must add a bias"):
        run(model, tiny.pixels())


# nn.MultiheadAttention


class Multihead(nn.Module):
    """Model with one `nn.MultiheadAttention` over a class token and patches."""

    def __init__(self, batch_first: bool, **options: Any) -> None:
        super().__init__()
        self.patches, self.cls_token = nn.Conv2d(3, 32, tiny.PATCH, tiny.PATCH), nn.Parameter(torch.randn(1, 1, 32))
        self.attn, self.options = nn.MultiheadAttention(32, 2, batch_first=batch_first), options

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], 1)
        tokens = tokens if self.attn.batch_first else tokens.transpose(0, 1)
        out, weights = self.attn(tokens, tokens, tokens, **self.options)
        return (out if self.attn.batch_first else out.transpose(0, 1)), weights


PADDED = torch.zeros(2, TOKENS, dtype=torch.bool)
PADDED[1, 4:] = True
MULTIHEAD: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded keys": {"key_padding_mask": PADDED},
    "masked": {"attn_mask": ~BOOLEAN[0, 0] & ~torch.eye(TOKENS, dtype=torch.bool)},
    "masked and padded": {"attn_mask": torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), "key_padding_mask": PADDED},
}


@pytest.fixture
def slow_path() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("name", list(MULTIHEAD))
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "tokens first"])
@pytest.mark.parametrize("need_weights", [True, False], ids=["with weights", "without"])
def test_multihead_attention_is_captured(name: str, batch_first: bool, need_weights: bool, slow_path: None) -> None:
    torch.manual_seed(0)
    model, x = Multihead(batch_first, **MULTIHEAD[name], need_weights=need_weights).eval(), tiny.pixels(2)
    (out, weights), recording = run(model, x)
    with torch.no_grad():
        plain, _ = model(x)
        model.options["need_weights"] = True
        _, expected = model(x)
    assert torch.equal(plain, out)
    assert recording.layers == ["attn"]
    assert (recording[0].kind, recording[0].keys) == ("self", tiny.layout())
    assert (weights is not None) == need_weights
    torch.testing.assert_close(recording[0].operator.dense().mean(1), expected, rtol=0, atol=1e-6)


def encoder(**options: Any) -> nn.Module:
    """Build a model of patches and `nn.TransformerEncoder`."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, **options)
    return nn.Sequential(
        nn.Conv2d(3, 32, tiny.PATCH, tiny.PATCH),
        nn.Flatten(2),
        _Turn(),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
    ).eval()


class _Turn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


@pytest.mark.parametrize("norm_first", [True, False], ids=["norm first", "norm last"])
def test_captured_encoder_equals_its_output_without_the_fast_path(norm_first: bool) -> None:
    model, x = encoder(norm_first=norm_first), tiny.pixels(2)
    out, recording = run(model, x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), out, rtol=0, atol=1e-5)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert torch.equal(model(x), out)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert recording.layers == ["3.layers.0.self_attn", "3.layers.1.self_attn"]
    assert {record.keys for record in recording} == {tiny.layout(())}


def test_vision_transformer_of_torchvision_is_captured(slow_path: None) -> None:
    torch.manual_seed(0)
    model = VisionTransformer(48, 16, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=4).eval()
    x = tiny.pixels(2, (48, 48))
    out, recording = run(model, x)
    with torch.no_grad():
        assert torch.equal(model(x), out)
    assert recording.layers == [f"encoder.layers.encoder_layer_{i}.self_attention" for i in range(2)]
    assert {record.keys for record in recording} == {tiny.layout(("cls",), (3, 3))}
    assert {record.kind for record in recording} == {"self"}


# dtypes


@pytest.mark.parametrize("written_out", [False, True], ids=["fused", "written out"])
def test_rows_under_autocast_sum_to_one(written_out: bool) -> None:
    def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).mul(q.shape[-1] ** -0.5).softmax(-1) @ v

    model = own.vit(written if written_out else F.scaled_dot_product_attention)
    with torch.autocast("cpu", torch.bfloat16):
        out, recording = run(model, tiny.pixels(2))
        rows = recording[0].operator.dense().sum(-1)
        plain = model(tiny.pixels(2))
    assert torch.equal(out, plain)
    assert recording[0].keys == tiny.layout()
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows, torch.ones_like(rows), rtol=0, atol=1e-6 if not written_out else 4e-3)


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float64, 1e-12)], ids=["bf16", "fp16", "float64"]
)
def test_model_of_another_dtype_is_captured(dtype: torch.dtype, close: float) -> None:
    attend, outs = noting(F.scaled_dot_product_attention)
    model, x = own.vit(attend).to(dtype), tiny.pixels(2).to(dtype)
    out, recording = run(model, x)
    weights = recording[0].operator.dense()
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, TOKENS), rtol=0, atol=1e-6)
    torch.testing.assert_close(own.mixture(recording[1]), outs[1].double(), rtol=close, atol=close)
    with torch.no_grad():
        assert torch.equal(model(x), out)
