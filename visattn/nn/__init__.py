"""Attention as modules, one readable page each, for any network of your own.

Those for CNNs take and give `(B, C, H, W)`, channels first. `ATTENTION` holds, by the name that `attach` knows, those that are built
from the number of channels alone and keep the shape.
"""

from torch import nn

from visattn._support.publish import publish
from visattn.nn._attach import attach
from visattn.nn._attached import Attached, Site
from visattn.nn._attention_gate import AttentionGate
from visattn.nn._augmented import AttentionAugmentedConv2d
from visattn.nn._bam import BAM
from visattn.nn._cbam import CBAM
from visattn.nn._checkpoints import load_checkpoint, translate
from visattn.nn._class_attention import ClassAttention
from visattn.nn._coordinate import CoordinateAttention
from visattn.nn._cross_covariance import CrossCovarianceAttention
from visattn.nn._draw import DrawRead, DrawWrite
from visattn.nn._eca import ECA
from visattn.nn._external import ExternalAttention
from visattn.nn._ge import GatherExcite
from visattn.nn._global_context import GlobalContext
from visattn.nn._local import LocalMonotonic, LocalPredictive
from visattn.nn._multi_head import MultiHeadAttention
from visattn.nn._non_local import NonLocal
from visattn.nn._plugged import Plugged
from visattn.nn._retina import Retina
from visattn.nn._sagan import SelfAttention2d
from visattn.nn._scores import AdditiveScore, CosineScore, DotScore, GeneralScore, LocationScore, ScaledDotScore, attend
from visattn.nn._scse import SCSE
from visattn.nn._se import SqueezeExcite
from visattn.nn._simam import SimAM
from visattn.nn._sk import SelectiveKernel
from visattn.nn._sliding import SlidingWindowAttention
from visattn.nn._soft_hard import Glimpse, HardAttention, SoftAttention, doubly_stochastic, reinforce
from visattn.nn._stand_alone import StandAloneSelfAttention
from visattn.nn._talking_heads import TalkingHeadsAttention
from visattn.nn._transformer2d import SpatialTransformer
from visattn.nn._triplet import TripletAttention
from visattn.nn._window import WindowAttention

ATTENTION: dict[str, type[nn.Module]] = {
    "bam": BAM,
    "cbam": CBAM,
    "coord": CoordinateAttention,
    "eca": ECA,
    "gc": GlobalContext,
    "ge": GatherExcite,
    "nl": NonLocal,
    "sagan": SelfAttention2d,
    "scse": SCSE,
    "se": SqueezeExcite,
    "simam": SimAM,
    "sk": SelectiveKernel,
    "triplet": TripletAttention,
}

__all__ = [
    "ATTENTION",
    "BAM",
    "CBAM",
    "ECA",
    "SCSE",
    "AdditiveScore",
    "Attached",
    "AttentionAugmentedConv2d",
    "AttentionGate",
    "ClassAttention",
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
    "LocalMonotonic",
    "LocalPredictive",
    "LocationScore",
    "MultiHeadAttention",
    "NonLocal",
    "Plugged",
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
    "attach",
    "attend",
    "doubly_stochastic",
    "load_checkpoint",
    "publish",
    "reinforce",
    "translate",
]
