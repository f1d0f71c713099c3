"""Reference architectures, one short file each. Import them as `visattn.models`.

Residual networks take `attention="se"`, or another name in `visattn.nn.ATTENTION`. Importing this package registers the models in timm:
`timm.create_model("visattn_cbam_resnet18", num_classes=10)`.
"""

from visattn.models import registry as registry
from visattn.models.conv_stem_vit import vit_c
from visattn.models.draw import Draw
from visattn.models.local_features import LocalFeatures
from visattn.models.local_vit import LocalViT, predictive_vit, sliding_vit
from visattn.models.ram import RAM
from visattn.models.resnet import ResNet, resnet14, resnet18, resnet20, resnet50, resnet56
from visattn.models.show_attend_tell import Objective, ShowAttendTell
from visattn.models.stn import TransformedClassifier
from visattn.models.vit import VisionTransformer

__all__ = [
    "RAM",
    "Draw",
    "LocalFeatures",
    "LocalViT",
    "Objective",
    "ResNet",
    "ShowAttendTell",
    "TransformedClassifier",
    "VisionTransformer",
    "predictive_vit",
    "resnet14",
    "resnet18",
    "resnet20",
    "resnet50",
    "resnet56",
    "sliding_vit",
    "vit_c",
]
