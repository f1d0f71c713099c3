"""Checkpoint layouts of other implementations: one `Layout` per class maps its tensor names to ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from visattn.nn.channel.eca import ECA
from visattn.nn.channel.global_context import GlobalContext
from visattn.nn.channel.se import SqueezeExcite
from visattn.nn.channel.sk import SelectiveKernel
from visattn.nn.spatial.bam import BAM
from visattn.nn.spatial.cbam import CBAM
from visattn.nn.spatial.coordinate import CoordinateAttention
from visattn.nn.spatial.scse import SCSE
from visattn.nn.spatial.triplet import TripletAttention
from visattn.nn.tokens.class_attention import ClassAttention
from visattn.nn.tokens.cross_covariance import CrossCovarianceAttention
from visattn.nn.tokens.multi_head import MultiHeadAttention
from visattn.nn.tokens.non_local import NonLocal
from visattn.nn.tokens.talking_heads import TalkingHeadsAttention
from visattn.nn.tokens.window import WindowAttention

Names = Mapping[str, str]
Change = Callable[[Any, str, Tensor], Tensor]
OWN: Names = {"": ""}


@dataclass(frozen=True)
class Layout:
    """Tensor names of a class in another implementation.

    Attributes:
        name: Name of the layout: package and class.
        module: Our class.
        names: Regular expressions for the beginnings of their names, and the replacements in ours.
        options: Options with which our module computes the same as theirs, each with a check whether a module has it.
        change: Conversion of a tensor whose values are in another order: from our module, our name and the tensor to our tensor.
        note: Further requirements, for the table in the documentation.
        lacks: Reason why none of our options computes the same as theirs; empty if one does.
        told: Check, for names that several classes share, whether tensors under our names may belong to this one.
    """

    name: str
    module: type[nn.Module]
    names: Names
    options: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    change: Change = lambda _module, _name, tensor: tensor
    note: str = ""
    lacks: str = ""
    told: Callable[[Any, Mapping[str, Tensor]], bool] = lambda _module, _tensors: True


_OFFICIAL: Mapping[str, Callable[[Any], bool]] = {'variant="official"': lambda module: module.variant == "official"}
_TIMM_CBAM = {
    r"channel\.fc": "fc",
    r"spatial\.conv\.conv\.": "conv.",
    r"spatial\.conv\.bn\.": "norm.",
}
_TIMM_SK = {
    r"paths\.(\d+)\.conv\.": r"convs.\1.",
    r"paths\.(\d+)\.bn\.": r"norms.\1.",
    r"attn\.fc_reduce\.": "squeeze.",
    r"attn\.bn\.": "norm.",
    r"attn\.fc_select\.": "select.",
}
_TIMM_NON_LOCAL = {r"t\.": "query.", r"p\.": "key.", r"g\.": "value.", r"z\.": "output.", r"norm\.": "norm."}
_TIMM_NON_LOCAL_OPTIONS: Mapping[str, Callable[[Any], bool]] = {
    'variant="embedded_gaussian"': lambda module: module.variant == "embedded_gaussian",
    "pool=False": lambda module: not module.pool,
}
_TIMM_EPS: Mapping[str, Callable[[Any], bool]] = {"eps=1e-6": lambda module: module.norm.eps == 1e-6}
_TRIPLET = {  # of the module in the repository, and of its ImageNet networks
    rf"{theirs}\.(?:conv|spatial)\.{part}\.": f"{ours}.{axis}."
    for axis, theirs in enumerate(("(?:hw|SpatialGate)", "(?:cw|ChannelGateH)", "(?:hc|ChannelGateW)"))
    for part, ours in (("conv", "convs"), ("bn", "norms"))
}


def _exchanged(module: CBAM, name: str, tensor: Tensor) -> Tensor:
    """Reorder the kernel for our order of planes: timm's order is mean, max; ours is so only with `variant="paper"`."""
    return tensor.flip(1) if name == "conv.weight" and module.variant == "official" else tensor


def _split(module: SelectiveKernel, tensors: Mapping[str, Tensor]) -> bool:
    """Check whether each branch may get only a share of the channels."""
    inputs, branches = tensors["convs.0.weight"].shape[1], len(module.convs)
    return module.channels % (inputs * branches) == 0


def _context_block(fusion: str, theirs: str) -> Layout:
    """Return the layout of GCNet's block with one of its two fusions."""
    names = {
        r"conv_mask\.": "score.",
        **{rf"{theirs}_conv\.{at}\.": f"{ours}." for at, ours in ((0, "fc1"), (1, "norm"), (3, "fc2"))},
    }
    options = {f'fusion="{fusion}"': lambda module: module.fusion == fusion, "eps=1e-5": lambda module: module.norm.eps == 1e-5}
    note = "the same width; not its `avg` pooling, and not both of its fusions"
    return Layout(f"GCNet.ContextBlock({theirs})", GlobalContext, names, options, note=note)


def _non_local_block(theirs: str, variant: str, *, pool: bool) -> Layout:
    """Return the layout of `NONLocalBlock2D` in one of its files. Max pooling is the second part of an `nn.Sequential`."""
    pooled = r"\.0\." if pool else r"\.(?=weight|bias)"
    names = {r"theta\.": "query.", f"phi{pooled}": "key.", f"g{pooled}": "value.", r"W\.0\.": "output.", r"W\.1\.": "norm."}
    embedded = variant != "gaussian"
    return Layout(
        f"Non-local_pytorch.{theirs}(sub_sample={pool})",
        NonLocal,
        {**names, r"W\.(?=weight|bias)": "output."},
        {
            f'variant="{variant}"': lambda module: module.variant == variant,
            f"pool={pool}": lambda module: module.pool is pool,
            "scale=None": lambda module: module.scale == 1,
        },
        note="`norm=False` for its `bn_layer=False`",
        told=lambda _module, tensors: ("query.weight" in tensors) is embedded,
    )


LAYOUTS: tuple[Layout, ...] = (
    Layout(
        "attention-module.CBAM",
        CBAM,
        {
            r"ChannelGate\.mlp\.1\.": "fc1.",
            r"ChannelGate\.mlp\.3\.": "fc2.",
            r"SpatialGate\.spatial\.conv\.": "conv.",
            r"SpatialGate\.spatial\.bn\.": "norm.",
        },
        _OFFICIAL,
        note="not its `no_spatial`",
    ),
    Layout(
        "timm.CbamModule",
        CBAM,
        _TIMM_CBAM,
        change=_exchanged,
        note='`variant="paper"`; with `mlp_bias=True`, `variant="official"` (the two planes are swapped on loading)',
    ),
    Layout(
        "timm.LightCbamModule",
        CBAM,
        _TIMM_CBAM,
        lacks="it adds mean and maximum before its layers",
        told=lambda _, tensors: tensors["conv.weight"].shape[1] == 1,
    ),
    Layout(
        "attention-module.BAM",
        BAM,
        {
            r"channel_att\.gate_c\.gate_c_fc_0\.": "fc1.",
            r"channel_att\.gate_c\.gate_c_bn_1\.": "norm.",
            r"channel_att\.gate_c\.gate_c_fc_final\.": "fc2.",
            r"spatial_att\.gate_s\.gate_s_conv_reduce0\.": "convs.0.",
            r"spatial_att\.gate_s\.gate_s_bn_reduce0\.": "norms.0.",
            r"spatial_att\.gate_s\.gate_s_conv_di_0\.": "convs.1.",
            r"spatial_att\.gate_s\.gate_s_bn_di_0\.": "norms.1.",
            r"spatial_att\.gate_s\.gate_s_conv_di_1\.": "convs.2.",
            r"spatial_att\.gate_s\.gate_s_bn_di_1\.": "norms.2.",
            r"spatial_att\.gate_s\.gate_s_conv_final\.": "plane.",
        },
        {**_OFFICIAL, "dilation=4": lambda module: module.convs[1].dilation == (4, 4)},
    ),
    Layout("timm.SEModule", SqueezeExcite, OWN, note="ReLU and sigmoid; not its `norm_layer` and `add_maxpool`"),
    Layout("timm.SqueezeExciteCl", SqueezeExcite, OWN, note="same as `timm.SEModule`; linear layers become 1 x 1 convolutions"),
    Layout(
        "torchvision.SqueezeExcitation",
        SqueezeExcite,
        OWN,
        note="ReLU and sigmoid; its MobileNetV3 and EfficientNet use others",
    ),
    Layout(
        "senet.pytorch.SELayer",
        SqueezeExcite,
        {r"fc\.0\.": "fc1.", r"fc\.2\.": "fc2."},
        note="`bias=False`; linear layers become 1 x 1 convolutions",
    ),
    Layout("timm.EcaModule", ECA, OWN, note="the same `kernel_size`; not its `use_mlp`"),
    Layout("timm.CoordAttn", CoordinateAttention, OWN, note="its `bias=True`; not its `has_skip`"),
    Layout(
        "timm.GlobalContext(fuse_add)",
        GlobalContext,
        {r"conv_attn\.": "score.", r"mlp_add\.": ""},
        {'fusion="add"': lambda module: module.fusion == "add", **_TIMM_EPS},
    ),
    Layout(
        "timm.GlobalContext(fuse_scale)",
        GlobalContext,
        {r"conv_attn\.": "score.", r"mlp_scale\.": ""},
        {'fusion="scale"': lambda module: module.fusion == "scale", **_TIMM_EPS},
    ),
    _context_block("add", "channel_add"),
    _context_block("scale", "channel_mul"),
    Layout(
        "segmentation_models_pytorch.SCSEModule",
        SCSE,
        {r"cSE\.1\.": "fc1.", r"cSE\.3\.": "fc2.", r"sSE\.0\.": "conv."},
        {'fusion="add"': lambda module: module.fusion == "add"},
        note="the same width",
    ),
    Layout(
        "squeeze_and_excitation.ChannelSpatialSELayer",
        SCSE,
        {r"cSE\.fc": "fc", r"sSE\.conv\.": "conv."},
        {'fusion="max"': lambda module: module.fusion == "max"},
        note="linear layers become 1 x 1 convolutions",
    ),
    Layout("triplet-attention.TripletAttention", TripletAttention, _TRIPLET, note="not its `no_spatial`"),
    *(
        _non_local_block(theirs, variant, pool=pool)
        for theirs, variant in (("embedded_gaussian", "embedded_gaussian"), ("dot_product", "dot"), ("gaussian", "gaussian"))
        for pool in (True, False)
    ),
    Layout(
        "timm.NonLocalAttn(use_scale=True)",
        NonLocal,
        _TIMM_NON_LOCAL,
        {**_TIMM_NON_LOCAL_OPTIONS, 'scale="channels"': lambda module: module.scale == module.channels**-0.5},
    ),
    Layout(
        "timm.NonLocalAttn(use_scale=False)",
        NonLocal,
        _TIMM_NON_LOCAL,
        {**_TIMM_NON_LOCAL_OPTIONS, "scale=None": lambda module: module.scale == 1},
    ),
    Layout("timm.SelectiveKernel(split_input=False)", SelectiveKernel, _TIMM_SK, note="its `keep_3x3=True`"),
    Layout(
        "timm.SelectiveKernel(split_input=True)",
        SelectiveKernel,
        _TIMM_SK,
        lacks="each of its branches gets only a share of the channels",
        told=_split,
    ),
    Layout(
        "torch.MultiheadAttention",
        MultiHeadAttention,
        {r"in_proj_weight$": "qkv.weight", r"in_proj_bias$": "qkv.bias", r"out_proj\.": "proj."},
        note="the same number of heads; its `bias=True`; not its `kdim`, `vdim`, `add_bias_kv`",
    ),
    Layout("timm.Attention", MultiHeadAttention, OWN, note="the same number of heads; not its `qk_norm` and `scale_norm`"),
    Layout("timm.ClassAttn", ClassAttention, OWN, note="the same number of heads"),
    Layout("timm.TalkingHeadAttn", TalkingHeadsAttention, OWN, note="the same number of heads"),
    Layout("timm.XCA", CrossCovarianceAttention, OWN, note="the same number of heads"),
    Layout("timm.WindowAttention", WindowAttention, OWN, note="the same window and heads"),
    Layout(
        "torchvision.ShiftedWindowAttention",
        WindowAttention,
        {r"relative_position_index$": "offsets", "": ""},
        note="the same window and heads; its index buffer is compared and left out",
    ),
)
"""All layouts, including those that cannot be loaded, in the order of the table in the documentation."""
