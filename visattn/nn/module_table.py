"""Table of attention modules by the name that `attach` accepts: those that need only the number of channels and keep the shape."""

from torch import nn

from visattn.nn.channel.eca import ECA
from visattn.nn.channel.ge import GatherExcite
from visattn.nn.channel.global_context import GlobalContext
from visattn.nn.channel.se import SqueezeExcite
from visattn.nn.channel.sk import SelectiveKernel
from visattn.nn.spatial.bam import BAM
from visattn.nn.spatial.cbam import CBAM
from visattn.nn.spatial.coordinate import CoordinateAttention
from visattn.nn.spatial.scse import SCSE
from visattn.nn.spatial.simam import SimAM
from visattn.nn.spatial.triplet import TripletAttention
from visattn.nn.tokens.non_local import NonLocal
from visattn.nn.tokens.sagan import SelfAttention2d

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
