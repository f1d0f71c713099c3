"""Small random models of all families with attention, and the input sizes at which they are tested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import timm
from timm.models import byoanet, byobnet, metaformer, mobilenetv3, mobilevit
from timm.models.byobnet import ByoBlockCfg, ByobNet
from timm.models.gcvit import GlobalContextVit
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from timm.models.nest import Nest
from timm.models.volo import VOLO
from torch import nn
from torchvision.models import maxvit, swin_transformer, vision_transformer

Size = tuple[int, int]

SQUARE, WIDE = (64, 64), (64, 96)
_LARGE = ((128, 192),)


@dataclass(frozen=True)
class Family:
    """Model family with a build function and the properties that tests rely on.

    Attributes:
        build: Function from `(height, width)` to a model.
        sizes: Input sizes to test.
        kinds: All kinds of attention that its recordings must contain.
        leak: Largest share of a change that may reach other tokens; gates read the whole image.
        doubling: Whether each stage pads and halves its grid, so that cells have 4, 8, 16... pixels at any input size.
        core: Whether patches overlap so far that only the center of a cell is its own.
        halving: Whether stages are connected by attention alone, with every second row and column as queries.
        asks_elsewhere: Suffix of the names of layers whose queries are computed at other locations than their outputs belong to.
    """

    build: Callable[[Size], nn.Module]
    sizes: tuple[Size, ...] = (WIDE,)  # a square could hide rows and columns that are exchanged
    kinds: frozenset[str] = frozenset({"self"})
    leak: float = 1e-6
    doubling: bool = False
    core: bool = False
    halving: bool = False
    asks_elsewhere: str = "none"


def _kinds(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _timm(name: str, sized: bool = True, **options: Any) -> Callable[[Size], nn.Module]:
    return lambda size: timm.create_model(name, num_classes=4, **options, **({"img_size": size} if sized else {}))


def _of(kind: Callable[..., nn.Module], **options: Any) -> Callable[[Size], nn.Module]:
    return lambda size: kind(img_size=size, num_classes=4, **options)


def _byo(config: Any, sized: bool = False, **options: Any) -> Callable[[Size], nn.Module]:
    return lambda size: ByobNet(replace(config, **options), num_classes=4, **({"img_size": size} if sized else {}))


def _block(kind: str, channels: int, stride: int = 2, depth: int = 1) -> ByoBlockCfg:
    return ByoBlockCfg(type=kind, d=depth, c=channels, s=stride, gs=0, br=0.5)


def _metaformer(_: Size) -> nn.Module:
    model: nn.Module = metaformer.MetaFormer(
        num_classes=4,
        depths=[1, 1, 1, 1],
        dims=[16, 16, 32, 32],
        token_mixers=[metaformer.SepConv, metaformer.SepConv, metaformer.Attention, metaformer.Attention],
        norm_layers=[metaformer.LayerNorm2dNoBias] * 2 + [metaformer.LayerNormNoBias] * 2,
    )
    return model


def _torchvision_swin(version: int, window: list[int]) -> Callable[[Size], nn.Module]:
    second: dict[str, Any] = {
        "block": swin_transformer.SwinTransformerBlockV2,
        "downsample_layer": swin_transformer.PatchMergingV2,
    }
    options = second if version == 2 else {}
    return lambda _: swin_transformer.SwinTransformer([4, 4], 16, [2, 2, 2], [1, 2, 2], window, num_classes=4, **options)


def _mobilevit_stage() -> Any:
    return mobilevit._mobilevit_block(d=1, c=16, s=2, transformer_dim=16, transformer_depth=1, patch_size=2, br=2.0)


_VIT: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2}
_SWIN: dict[str, Any] = {"embed_dim": 16, "depths": (2, 2, 2), "num_heads": (1, 2, 2)}
_FOUR: dict[str, Any] = {"embed_dims": (16, 16, 32, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)}
_LEVIT: dict[str, Any] = {"embed_dim": (16, 32, 32), "key_dim": 8, "depth": (1, 1, 1), "num_heads": (1, 2, 2)}
_GATED = 1e-2  # models with squeeze-and-excitation gates

_nextvit = _timm("nextvit_small", sized=False, stem_chs=(16, 16, 16), depths=(1, 1, 5, 1))

FAMILIES: dict[str, Family] = {
    "vit": Family(_timm("vit_tiny_patch16_224", **_VIT)),
    "vit of any size": Family(_timm("vit_tiny_patch16_224", sized=False, dynamic_img_size=True, **_VIT), (WIDE,)),
    "vit with registers": Family(_timm("vit_tiny_patch16_224", reg_tokens=4, **_VIT)),
    "deit distilled": Family(_timm("deit_tiny_distilled_patch16_224", **_VIT)),
    "eva": Family(_timm("eva02_tiny_patch14_224", patch_size=16, **_VIT)),
    "beit": Family(_timm("beit_base_patch16_224", **_VIT)),
    "vit with relative positions": Family(_timm("vit_relpos_small_patch16_224", **_VIT), (WIDE,)),
    "vit with rotary positions": Family(_timm("vit_small_patch16_dinov3", **_VIT), (WIDE,)),
    "vit with pooling by attention": Family(_timm("vit_base_patch16_siglip_224", **_VIT), (WIDE,), _kinds("self pool")),
    "vit hybrid": Family(_timm("vit_tiny_r_s16_p8_224", **_VIT), _LARGE),
    "naflexvit": Family(_timm("naflexvit_base_patch16_gap", sized=False, **_VIT)),
    "vitamin": Family(_timm("vitamin_small_224", depth=1)),
    "sam": Family(
        _timm("samvit_base_patch16", **_VIT, window_size=3, global_attn_indexes=(1,), neck_chans=8),
    ),
    "swin": Family(_timm("swin_tiny_patch4_window7_224", **_SWIN, window_size=4)),
    "swin padded": Family(
        _timm("swin_tiny_patch4_window7_224", **_SWIN, window_size=3, strict_img_size=False), ((40, 56), (40, 40)), doubling=True
    ),
    "swin with oblong windows": Family(
        _timm("swin_tiny_patch4_window7_224", **_SWIN, window_size=(2, 5), strict_img_size=False), ((56, 40),), doubling=True
    ),
    "swin v2 padded": Family(
        _timm("swinv2_tiny_window8_256", **_SWIN, window_size=3, strict_img_size=False), ((40, 56),), doubling=True
    ),
    "swin v2": Family(_timm("swinv2_tiny_window8_256", **_SWIN, window_size=4)),
    "swin v2 cr": Family(_timm("swinv2_cr_tiny_224", **_SWIN, window_size=4)),
    "maxvit": Family(
        _timm(
            "maxvit_pico_rw_256",
            embed_dim=(32, 32),
            depths=(1, 1),
            block_type=("M", "M"),
            stem_width=16,
            transformer_window_size=(4, 4),
        ),
        leak=_GATED,
    ),
    "maxvit of tensorflow": Family(
        _timm(
            "maxvit_tiny_tf_224",
            embed_dim=(32, 32),
            depths=(1, 1),
            block_type=("M", "M"),
            stem_width=16,
            transformer_window_size=(4, 2),
            transformer_grid_size=(2, 4),
        ),
        ((128, 64),),
        leak=_GATED,
    ),
    "coatnet": Family(_timm("coatnet_nano_rw_224", embed_dim=(32, 32, 32, 32), depths=(1, 1, 1, 1), stem_width=16), leak=_GATED),
    "hiera": Family(_timm("hiera_tiny_224", embed_dim=16, stages=(1, 1, 2, 1)), ((64, 64), (64, 128)), _kinds("self cross")),
    "sam2 hiera": Family(
        _timm(
            "sam2_hiera_tiny",
            sized=False,
            embed_dim=16,
            stages=(1, 2, 2, 1),
            window_spec=(4, 4, 4, 2),
            global_att_blocks=(4,),
            global_pos_size=(4, 4),
        ),
        ((128, 128), (96, 160)),
        _kinds("self cross"),
    ),
    "davit": Family(
        _timm("davit_tiny", sized=False, embed_dims=(16, 32, 32), depths=(1, 1, 1), num_heads=(1, 2, 2), window_size=3),
        kinds=_kinds("self channel"),
    ),
    "tiny_vit": Family(_timm("tiny_vit_5m_224", sized=False, **_FOUR, window_sizes=(3, 3, 3, 2)), (SQUARE, (96, 128))),
    "nest": Family(_of(Nest, embed_dims=(16, 16, 32), num_heads=(1, 1, 2), depths=(1, 1, 2)), (SQUARE, (128, 128))),
    "gcvit": Family(
        _of(GlobalContextVit, embed_dim=16, depths=(2, 2, 2, 2), num_heads=(1, 1, 2, 2), window_ratio=(16, 16, 16, 32)),
        leak=_GATED,
        asks_elsewhere="blocks.1.attn",
    ),
    "twins svt": Family(
        _timm("twins_svt_small", **_FOUR | {"depths": (2, 2, 2, 1)}, wss=(4, 4, 2, 2)), kinds=_kinds("self cross")
    ),
    "twins pcpvt": Family(_timm("twins_pcpvt_small", **_FOUR), kinds=_kinds("self cross")),
    "pvt v2": Family(_timm("pvt_v2_b0", sized=False, **_FOUR), kinds=_kinds("self cross")),
    "pvt v2 linear": Family(_timm("pvt_v2_b2_li", sized=False, **_FOUR), ((224, 224),), _kinds("self cross")),
    "mvit v2": Family(
        lambda size: MultiScaleVit(MultiScaleVitCfg(depths=(1, 1, 2, 1), embed_dim=16), img_size=size, num_classes=4),
        (SQUARE,),
        _kinds("self cross"),
    ),
    "mvit v2 with cls": Family(
        lambda size: MultiScaleVit(
            MultiScaleVitCfg(depths=(1, 1, 2, 1), embed_dim=16, use_cls_token=True), img_size=size, num_classes=4
        ),
        (SQUARE,),
        _kinds("self cross"),
    ),
    "halonet": Family(
        _byo(
            byoanet.model_cfgs["halonet26t"],
            stem_chs=8,
            blocks=(_block("bottle", 32, 1), _block("self_attn", 32, 1), _block("self_attn", 32)),
            self_attn_kwargs={"block_size": 4, "halo_size": 1},
        ),
        kinds=_kinds("self cross"),
    ),
    "botnet": Family(
        _byo(byoanet.model_cfgs["botnet26t"], True, stem_chs=8, blocks=(_block("bottle", 32, 1), _block("self_attn", 32, 2, 2))),
    ),
    "resnet clip": Family(
        _byo(
            byobnet.model_cfgs["resnet50_clip"],
            True,
            stem_chs=(8, 8, 16),
            blocks=(_block("bottle", 32, 1), _block("bottle", 32), _block("bottle", 64)),
        ),
    ),
    "gcresnext": Family(
        _byo(byobnet.model_cfgs["gcresnext26ts"], stem_chs=16, blocks=(_block("bottle", 32, 1), _block("bottle", 32))),
        kinds=_kinds("pool"),
    ),
    "mobilevit": Family(
        _byo(
            mobilevit.model_cfgs["mobilevit_xxs"],
            stem_chs=8,
            num_features=32,
            blocks=(_mobilevit_stage(), _mobilevit_stage(), _mobilevit_stage()),
        ),
    ),
    "levit": Family(_timm("levit_128s", **_LEVIT), _LARGE, _kinds("self cross"), halving=True),
    "levit with odd grids": Family(_timm("levit_128s", **_LEVIT), ((80, 112),), _kinds("self cross"), halving=True, core=True),
    "levit conv": Family(_timm("levit_conv_128s", **_LEVIT), _LARGE, _kinds("self cross"), halving=True),
    "efficientformer": Family(
        _timm("efficientformer_l1", embed_dims=(16, 16, 16, 32), depths=(1, 1, 1, 2), num_vit=1), ((224, 224),)
    ),
    "efficientformer v2": Family(
        _timm("efficientformerv2_s0", embed_dims=(16, 16, 16, 32), depths=(1, 1, 2, 2), num_vit=1),
        kinds=_kinds("self cross"),
        leak=_GATED,
    ),
    "efficientvit": Family(
        _timm(
            "efficientvit_m0",
            embed_dim=(16, 16, 32),
            key_dim=(8, 8, 8),
            depth=(1, 1, 1),
            num_heads=(2, 2, 2),
            window_size=(3, 3, 3),
            kernels=(3, 3, 3, 3),
        ),
        ((128, 128), (128, 192)),
        leak=_GATED,
    ),
    "cait": Family(
        _timm("cait_xxs24_224", embed_dim=32, depth=2, num_heads=2, depth_token_only=1), kinds=_kinds("self pool"), leak=_GATED
    ),
    "xcit": Family(_timm("xcit_nano_12_p16_224", **_VIT), kinds=_kinds("channel pool")),
    "volo": Family(
        _of(
            VOLO,
            layers=(1, 1, 1, 1),
            embed_dims=(32, 32, 32, 32),
            num_heads=(2, 2, 2, 2),
            stem_hidden_dim=16,
        ),
        kinds=_kinds("self pool unplaced"),
    ),
    "crossvit": Family(
        _timm("crossvit_9_240", embed_dim=(16, 32), depth=((1, 1, 0), (1, 1, 0)), num_heads=(2, 2)),
        ((120, 120), (120, 240)),
        _kinds("self pool"),
    ),
    "convit": Family(
        _timm("convit_tiny", embed_dim=32, depth=2, num_heads=2, local_up_to_layer=1), (SQUARE,), leak=0.2
    ),  # divides its weights by their sum, so scaling them down has no effect
    "pit": Family(
        _timm("pit_ti_224", base_dims=(16, 16, 16), depth=(1, 1, 1), heads=(1, 2, 2)), (SQUARE, (96, 128), (72, 104)), core=True
    ),
    "pit distilled": Family(
        _timm("pit_ti_distilled_224", base_dims=(16, 16, 16), depth=(1, 1, 1), heads=(1, 2, 2)), (SQUARE,), core=True
    ),
    "tnt": Family(
        _timm("tnt_s_patch16_224", embed_dim=32, inner_dim=8, depth=2, num_heads_inner=2, num_heads_outer=2),
    ),
    "iformer": Family(
        _timm("iformer_t", sized=False, depths=(1, 1, 3, 3), attn_groups=(0, 0, 1, 1), dims=(16, 16, 32, 32)),
    ),
    "mobilenet v4": Family(
        lambda _: mobilenetv3._gen_mobilenet_v4("mobilenetv4_hybrid_medium", 0.25, num_classes=4), kinds=_kinds("self cross")
    ),
    "nextvit": Family(_nextvit, (SQUARE,), _kinds("cross self")),
    "nextvit wide": Family(_nextvit, (WIDE,), _kinds("self unplaced")),  # its pooled runs of tokens are no rectangles
    "shvit": Family(
        _timm("shvit_s1", sized=False, embed_dim=(32, 64, 64), depth=(1, 1, 1), partial_dim=(8, 16, 16)), leak=_GATED
    ),
    "visformer": Family(_timm("visformer_tiny", init_channels=8, embed_dim=32, depth=(1, 1, 1), num_heads=2)),
    "fastvit": Family(_timm("fastvit_sa12", sized=False, layers=(1, 1, 1, 1), embed_dims=(32, 32, 32, 64))),
    "cpubone": Family(_timm("cpubone_nano", sized=False, head_widths=(16, 16)), _LARGE),
    "lowformer": Family(_timm("lowformer_b0", sized=False, head_widths=(16, 16)), _LARGE),
    "caformer": Family(_metaformer),
    "torchvision vit": Family(
        lambda size: vision_transformer.VisionTransformer(size[0], 16, 2, 2, 32, 64, num_classes=4), (SQUARE,)
    ),
    "torchvision swin": Family(_torchvision_swin(1, [4, 6])),
    "torchvision swin padded": Family(_torchvision_swin(1, [3, 3]), ((40, 56),), doubling=True),
    "torchvision swin v2": Family(_torchvision_swin(2, [4, 4])),
    "torchvision maxvit": Family(
        lambda size: maxvit.MaxVit(size, 16, 4, [16, 32], [1, 2], 8, 0.0, num_classes=4), (SQUARE,), leak=_GATED
    ),
}
