"""Small test inputs: random timm models and synthetic recordings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from tests.oracles import maps as oracles
from visattn.core.geometry import Box
from visattn.core.operators import Operator, SoftmaxOperator
from visattn.core.records import AttentionRecord, FeatureRecord, Recording, TokenLayout

PATCH = 16
GRID = (2, 3)
INPUT = (GRID[0] * PATCH, GRID[1] * PATCH)
LAYERS, HEADS = 2, 2

_SIZES: dict[str, Any] = {
    "img_size": INPUT,
    "patch_size": PATCH,
    "embed_dim": 32,
    "depth": LAYERS,
    "num_heads": HEADS,
    "num_classes": 4,
}


M = TypeVar("M", bound=nn.Module)


class Tiny(NamedTuple):
    """Small model: its build function and the names of its prefix tokens."""

    build: Callable[[], nn.Module]
    prefix: tuple[str, ...]


def centered(model: M) -> M:
    """Make each kernel of a model symmetric, so that it leans to no side, whatever random numbers a version of torch draws."""
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, nn.Conv2d):
                part.weight += part.weight.flip(2)
                part.weight += part.weight.flip(3)
                part.weight /= 4
    return model


def vit(seed: int = 0, **options: Any) -> nn.Module:
    """Build a timm vision transformer with peaked attention."""
    return _sharp(VisionTransformer, seed, **options)


def _sharp(kind: Callable[..., nn.Module], seed: int, **options: Any) -> nn.Module:
    """Build a model in evaluation mode with peaked attention: query and key weights are large, token parameters are not zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(**_SIZES | options)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("qkv.weight", "attn.q_proj.weight", "attn.k_proj.weight")):
                    parameter.copy_(torch.randn(parameter.shape) * 0.3)
                elif any(part in name for part in ("token", "pos_embed", "relative_position", "latent")):
                    parameter.copy_(torch.randn(parameter.shape))
    return model.eval()


REGISTERS = tuple(f"register{i}" for i in range(4))
MODELS: dict[str, Tiny] = {
    "no prefix": Tiny(lambda: vit(class_token=False, global_pool="avg"), ()),
    "cls": Tiny(vit, ("cls",)),
    "cls and distillation": Tiny(lambda: _sharp(VisionTransformerDistilled, 0), ("cls", "distillation")),
    "cls and 4 registers": Tiny(lambda: vit(reg_tokens=4), ("cls", *REGISTERS)),
    "registers only": Tiny(lambda: vit(reg_tokens=4, class_token=False, global_pool="avg"), REGISTERS),
    "map pooling": Tiny(lambda: vit(class_token=False, global_pool="map"), ()),
    "map pooling beside cls": Tiny(lambda: vit(global_pool="map"), ("cls",)),
    "query and key norm": Tiny(lambda: vit(qk_norm=True), ("cls",)),
    "eva with rope": Tiny(lambda: _sharp(Eva, 0, use_rot_pos_emb=True, ref_feat_shape=GRID), ("cls",)),
    "beit with relative positions": Tiny(lambda: _sharp(Beit, 0, use_rel_pos_bias=True, use_abs_pos_emb=False), ("cls",)),
}


def pixels(batch: int = 1, size: tuple[int, int] = INPUT, seed: int = 0) -> Tensor:
    """Return a batch of random pixels."""
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(seed))


def layout(prefix: Sequence[str] = ("cls",), grid: tuple[int, int] = GRID, space: str = "tokens") -> TokenLayout:
    """Return a layout with 16-pixel patches."""
    return TokenLayout(space, tuple(prefix), grid, Box(0, 0, grid[0] * PATCH, grid[1] * PATCH))


def operands(
    tokens: int, *, batch: int = 1, heads: int = HEADS, dim: int = 8, sharpness: float = 2.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return random queries and keys `(batch, heads, tokens, dim)`."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(batch, heads, tokens, dim, generator=generator) * sharpness for _ in range(2))
    return query, key


def recording(
    *,
    batch: int = 1,
    heads: int = HEADS,
    layers: int = LAYERS,
    prefix: Sequence[str] = ("cls",),
    grid: tuple[int, int] = GRID,
    readout: str = "cls",
    seed: int = 0,
) -> Recording:
    """Build a recording of random self-attention with values and features."""
    place = layout(prefix, grid)
    generator = torch.Generator().manual_seed(seed)
    made = Recording(readout=readout, input_size=(grid[0] * PATCH, grid[1] * PATCH))
    for i in range(layers):
        operator = SoftmaxOperator(*operands(len(place), batch=batch, heads=heads, seed=100 * seed + i))
        value = torch.randn(batch, heads, len(place), 8, generator=generator)
        made.records.append(record(operator, place, layer=f"blocks.{i}.attn", value=value))
        tokens = torch.randn(batch, len(place), 16, generator=generator)
        made.features.append(FeatureRecord(f"blocks.{i}", 0, "tokens", tokens, layout=place))
    return made


def record(operator: Operator, place: TokenLayout, layer: str = "blocks.0.attn", **options: Any) -> AttentionRecord:
    """Build a record of self-attention over one layout."""
    return AttentionRecord(layer=layer, call=0, forward=0, kind="self", operator=operator, queries=place, keys=place, **options)


def matrices(record: AttentionRecord) -> Tensor:
    """Compute the attention weights of a record, `(B, heads, Q, K)` in float64, with nested loops."""
    operator = record.operator
    assert isinstance(operator, SoftmaxOperator)
    query, key = oracles.array(operator.query), oracles.array(operator.key)
    bias = None
    if operator.bias is not None:
        bias = oracles.array(operator.bias.expand(*query.shape[:4], key.shape[3]))
    return torch.from_numpy(oracles.block_weights(query, key, bias, operator.scale)[:, :, 0])
