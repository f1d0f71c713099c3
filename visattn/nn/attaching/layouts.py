"""By which names the code of others knows what our modules hold: one `Layout` for each class of theirs."""

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
    """How a class of somebody else names its tensors.

    Attributes:
        name: Of the layout: package and class.
        module: Our class.
        names: Beginnings of their names, as patterns, and what stands for them in ours.
        options: What must be said when our module is built to compute what theirs does, and whether a module was built so.
        change: Of a tensor whose numbers are in another order: our module, our name for it and the tensor to what we hold.
        note: What else must be the same, as the documentation's table says it.
        lacks: Why no option of our module computes what theirs does; empty where one does.
        told: For such a class: whether tensors, by our names, are of it and not of a class that loads.
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
    'kind="embedded_gaussian"': lambda module: module.kind == "embedded_gaussian",
    "pool=False": lambda module: not module.pool,
}
_TIMM_EPS: Mapping[str, Callable[[Any], bool]] = {"eps=1e-6": lambda module: module.norm.eps == 1e-6}


def _exchanged(module: CBAM, name: str, tensor: Tensor) -> Tensor:
    """The kernel for the planes in our order: timm's is mean, max, and ours only with `paper`."""
    return tensor.flip(1) if name == "conv.weight" and module.variant == "official" else tensor


def _split(module: SelectiveKernel, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the convolutions may each see a share of the channels only."""
    inputs, branches = tensors["convs.0.weight"].shape[1], len(module.convs)
    return module.channels % (inputs * branches) == 0


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
        note='`variant="paper"`; of `mlp_bias=True` `variant="official"`, for which its two planes are exchanged',
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
    Layout("timm.SqueezeExciteCl", SqueezeExcite, OWN, note="as `timm.SEModule`; linear layers become 1 x 1 convolutions"),
    Layout(
        "torchvision.SqueezeExcitation",
        SqueezeExcite,
        OWN,
        note="ReLU and sigmoid, which are not those of its MobileNetV3 and EfficientNet",
    ),
    Layout(
        "senet.pytorch.SELayer",
        SqueezeExcite,
        {r"fc\.0\.": "fc1.", r"fc\.2\.": "fc2."},
        note="`bias=False`; linear layers become 1 x 1 convolutions",
    ),
    Layout("timm.EcaModule", ECA, OWN, note="a `kernel` as its `kernel_size`; not its `use_mlp`"),
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
        lacks="each of its branches sees a share of the channels",
        told=_split,
    ),
    Layout(
        "torch.MultiheadAttention",
        MultiHeadAttention,
        {r"in_proj_weight$": "qkv.weight", r"in_proj_bias$": "qkv.bias", r"out_proj\.": "proj."},
        note="as many heads; its `bias=True`, not its `kdim`, `vdim`, `add_bias_kv`",
    ),
    Layout("timm.Attention", MultiHeadAttention, OWN, note="as many heads; not its `qk_norm` and `scale_norm`"),
    Layout("timm.ClassAttn", ClassAttention, OWN, note="as many heads"),
    Layout("timm.TalkingHeadAttn", TalkingHeadsAttention, OWN, note="as many heads"),
    Layout("timm.XCA", CrossCovarianceAttention, OWN, note="as many heads"),
    Layout("timm.WindowAttention", WindowAttention, OWN, note="the same window and heads"),
    Layout(
        "torchvision.ShiftedWindowAttention",
        WindowAttention,
        {r"relative_position_index$": "offsets", "": ""},
        note="the same window and heads; its list of offsets is compared and left out",
    ),
)
"""What loads, and what has no counterpart, in the order of the documentation's table."""
