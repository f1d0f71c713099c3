"""Attention modules for your own networks, one short file each.

Modules for CNNs map `(B, C, H, W)` to `(B, C, H, W)`, channels first. `ATTENTION` maps the names that `attach` accepts to
classes. These need only the number of channels, and keep the shape.
"""

from visattn._support.publish import publish
from visattn.nn.attaching.attached import Attachment, Site
from visattn.nn.attaching.foreign_weights import load_checkpoint, translate
from visattn.nn.attaching.insertion import Init, attach
from visattn.nn.attaching.with_attention import WithAttention
from visattn.nn.channel.eca import ECA
from visattn.nn.channel.ge import GatherExcite
from visattn.nn.channel.global_context import GlobalContext
from visattn.nn.channel.se import SqueezeExcite
from visattn.nn.channel.sk import SelectiveKernel
from visattn.nn.decoder.draw import DrawRead, DrawWrite
from visattn.nn.decoder.retina import Retina
from visattn.nn.decoder.soft_hard import Glimpse, HardAttention, Reduction, SoftAttention, doubly_stochastic, reinforce
from visattn.nn.module_table import ATTENTION
from visattn.nn.spatial.attention_gate import AttentionGate
from visattn.nn.spatial.bam import BAM
from visattn.nn.spatial.cbam import CBAM
from visattn.nn.spatial.coordinate import CoordinateAttention
from visattn.nn.spatial.scse import SCSE
from visattn.nn.spatial.simam import SimAM
from visattn.nn.spatial.spatial_transformer import SpatialTransformer
from visattn.nn.spatial.triplet import TripletAttention
from visattn.nn.tokens.addressing import ContentLocationAddressing
from visattn.nn.tokens.augmented import AttentionAugmentedConv2d
from visattn.nn.tokens.class_attention import ClassAttention
from visattn.nn.tokens.cross_covariance import CrossCovarianceAttention
from visattn.nn.tokens.external import ExternalAttention
from visattn.nn.tokens.local import LocalMonotonic, LocalPredictive
from visattn.nn.tokens.multi_head import MultiHeadAttention
from visattn.nn.tokens.non_local import NonLocal
from visattn.nn.tokens.sagan import SelfAttention2d
from visattn.nn.tokens.score_functions import (
    AdditiveScore,
    CosineScore,
    DotScore,
    GeneralScore,
    LocationScore,
    ScaledDotScore,
    attend,
)
from visattn.nn.tokens.sliding_window import SlidingWindowAttention
from visattn.nn.tokens.stand_alone import StandAloneSelfAttention
from visattn.nn.tokens.talking_heads import TalkingHeadsAttention
from visattn.nn.tokens.window import WindowAttention

__all__ = [
    "ATTENTION",
    "BAM",
    "CBAM",
    "ECA",
    "SCSE",
    "AdditiveScore",
    "Attachment",
    "AttentionAugmentedConv2d",
    "AttentionGate",
    "ClassAttention",
    "ContentLocationAddressing",
    "CoordinateAttention",
    "CosineScore",
    "CrossCovarianceAttention",
    "DotScore",
    "DrawRead",
    "DrawWrite",
    "ExternalAttention",
    "GatherExcite",
    "GeneralScore",
    "Glimpse",
    "GlobalContext",
    "HardAttention",
    "Init",
    "LocalMonotonic",
    "LocalPredictive",
    "LocationScore",
    "MultiHeadAttention",
    "NonLocal",
    "Reduction",
    "Retina",
    "ScaledDotScore",
    "SelectiveKernel",
    "SelfAttention2d",
    "SimAM",
    "Site",
    "SlidingWindowAttention",
    "SoftAttention",
    "SpatialTransformer",
    "SqueezeExcite",
    "StandAloneSelfAttention",
    "TalkingHeadsAttention",
    "TripletAttention",
    "WindowAttention",
    "WithAttention",
    "attach",
    "attend",
    "doubly_stochastic",
    "load_checkpoint",
    "publish",
    "reinforce",
    "translate",
]
