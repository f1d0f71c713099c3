"""Attaching to many models: `test_attach.py` checks a few, `scripts/attach_sweep.py` all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import timm
import torch
import torchvision
from torch import Tensor, nn

from visattn.nn import Attachment, WithAttention, attach

TIMM = """
resnet18 resnet50d seresnet18 ecaresnet26t resnext26ts skresnet18 resnest14d res2net50_14w_8s resnetv2_18 resnetv2_50 nf_regnet_b0
eca_nfnet_l0 regnetx_002 regnety_002 efficientnet_b0 efficientnet_lite0 mobilenetv2_050 mobilenetv3_small_050
mobilenetv4_conv_small_050 mnasnet_small ghostnet_050 fbnetc_100 rexnet_100:stage convnext_atto convnextv2_atto
inception_next_atto edgenext_xx_small poolformer_s12 caformer_s18:stage focalnet_tiny_srf mambaout_femto fastvit_t8 repvit_m0_9
starnet_s050 densenet121:stage vgg11_bn:stage inception_v3:stage dla34 dpn68b hrnet_w18_small cs3darknet_s cspresnet50 darknet53
tresnet_m legacy_xception xception41 hgnetv2_b0 ese_vovnet19b_dw:stage legacy_seresnet18 repvgg_a0:stage
mobileone_s0:stage pnasnet5large coatnet_nano_rw_224 swin_tiny_patch4_window7_224:stage mobilevit_xxs
""".split()  # noqa: SIM905 - a plain list of names reads best
TORCHVISION = """
resnet18 resnet50 resnext50_32x4d wide_resnet50_2 convnext_tiny efficientnet_b0 efficientnet_v2_s mobilenet_v2 mobilenet_v3_small
mnasnet0_5 regnet_x_400mf regnet_y_400mf densenet121:stage squeezenet1_1:stage shufflenet_v2_x0_5:stage vgg11_bn:stage
googlenet:stage inception_v3:stage swin_t:stage efficientnet_b0:depthwise
fasterrcnn_mobilenet_v3_large_320_fpn fasterrcnn_resnet50_fpn ssdlite320_mobilenet_v3_large retinanet_resnet50_fpn:stage
lraspp_mobilenet_v3_large deeplabv3_mobilenet_v3_large fcn_resnet50 deeplabv3_resnet50:stage
""".split()  # noqa: SIM905
BACKBONES = [*(f"timm/{name}" for name in TIMM), *(f"torchvision/{name}" for name in TORCHVISION)]


@dataclass(frozen=True)
class Examined:
    """Results of attaching to one model; the last three are guarantees."""

    name: str
    sites: int
    parameters: int
    macs: int | None
    change: float
    plain_checkpoint_loads: bool
    detached_is_identical: bool

    @property
    def kept(self) -> bool:
        """True if all guarantees hold."""
        return self.sites > 0 and self.change == 0 and self.plain_checkpoint_loads and self.detached_is_identical


def build(name: str) -> tuple[nn.Module, object]:
    """Build a model with random weights, and a small input for it."""
    library, model = name.partition(":")[0].split("/")
    if library == "timm":
        fixed = "swin" in model or "coatnet" in model
        size = 224 if fixed else 128 if "inception" in model or "xception" in model or "pnas" in model else 64
        return timm.create_model(model), torch.randn(1, 3, size, size)
    options: dict[str, object] = {}
    if any(kind in model for kind in ("rcnn", "ssd", "retina", "lraspp", "deeplab", "fcn")):
        options["weights_backbone"] = None
    if model in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    size = 96 if "inception" in model else 64
    pixels = torch.randn(1, 3, size, size)
    detects = any(kind in model for kind in ("rcnn", "ssd", "retina"))
    if "rcnn" in model or "retina" in model:
        options |= {"min_size": 96, "max_size": 128}
    return torchvision.models.get_model(model, weights=None, **options), [pixels[0]] if detects else pixels


def logits(model: nn.Module, example: object) -> list[Tensor]:
    """Return all tensors in a model's output."""
    with torch.no_grad():
        return [leaf for leaf in torch.utils._pytree.tree_leaves(model(example)) if isinstance(leaf, Tensor)]


def difference(before: list[Tensor], after: list[Tensor]) -> float:
    """Return the largest difference; infinite if shapes differ or a value is not finite."""
    if [one.shape for one in before] != [one.shape for one in after] or not all(one.isfinite().all() for one in before):
        return float("inf")
    return max(
        (float((one.double() - two.double()).abs().max()) for one, two in zip(before, after, strict=True) if one.numel()),
        default=0,
    )


def examine(name: str, then: Callable[[nn.Module, object, Attachment], object] = lambda *_: None) -> Examined:
    """Attach CBAM to a model, load the original checkpoint, and detach."""
    torch.manual_seed(0)
    model, example = build(name)
    model.eval()
    plain = copy.deepcopy(model.state_dict())
    objects, before = list(model.modules()), logits(model, example)
    handle = attach(model, "cbam", name.partition(":")[2] or "residual", example=example)
    change = difference(before, logits(model, example))
    then(model, example, handle)
    model.load_state_dict(plain, strict=True)
    loads = len(handle.supplied) == len(handle.state_dict()) and difference(before, logits(model, example)) == 0
    loads &= list(handle.base_state_dict()) == list(plain)
    rows = handle.rows()
    handle.detach()
    same = all(one is two for one, two in zip(objects, model.modules(), strict=True)) and not any(
        isinstance(one, WithAttention) for one in objects
    )
    identical = same and difference(before, logits(model, example)) == 0
    return Examined(name, len(handle.sites), rows[-1]["parameters"], rows[-1]["macs"], change, loads, identical)
