"""Default layer of class activation maps in small models: one of each file of timm, and torchvision's classifiers.

Prints a table with the layer, the number of its features and their grid. A further column states which layers follow, found from the
gradient: `linear` is a mean and one linear layer (the mean of CAM is then the logit without its bias), `average` is a mean and more
layers. The last column is the difference between Grad-CAM and HiResCAM, which are the same map if a mean follows. Weights are random.
Exits 1 if the features of a layer cannot be placed on the image, but those of `REFUSED`, or if both maps differ although a mean follows.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from typing import Any

import torch
from timm.models._registry import _model_to_module
from torch import Tensor, nn

import visattn
from visattn._support.tables import to_text
from visattn.core import methods
from visattn.core.families import cam_layer, input_spec
from visattn.core.methods.taps import feature_of, placed
from visattn.errors import OptionError, VisattnError

NAMES = """
    beit_base_patch16_224 botnet26t_256 cait_xxs24_224 coat_tiny coatnet_nano_rw_224 convit_tiny convmixer_768_32 convnext_zepto_rms
    cpubone_nano crossvit_tiny_240 cs3darknet_focus_s cspnext_tiny csatv2 davit_tiny deit_tiny_patch16_224 densenet121 dla46x_c dpn48b
    edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientnet_b0 efficientvim_m1 efficientvit_b0 efficientvit_m0
    ese_vovnet19b_slim_dw eva02_tiny_patch14_224 fasternet_t0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny gernet_s ghostnet_050
    gmlp_ti16_224 hardcorenas_b hgnetv2_b0 hiera_tiny_224 hrnet_w18_small iformer_t inception_next_atto inception_resnet_v2 inception_v3
    inception_v4 lcnetv2_small legacy_seresnet18 legacy_xception levit_128s lowformer_b0 mambaout_femto maxvit_pico_rw_256 mnasnet_small
    mobilenetv3_small_050 mobilenetv4_conv_small mobilevit_xxs mobilevitv2_050 mvitv2_tiny nest_tiny nextvit_small nf_regnet_b0
    pit_ti_224 poolformerv2_s12 pvt_v2_b0 rdnet_tiny regnetx_002 repghostnet_050 repvit_m1 res2next50 resnest14d resnet10t resnet50_clip
    resnetv2_18 rexnet_100 sam2_hiera_tiny samvit_base_patch16_224 selecsls42 sequencer2d_s shvit_s1 skresnet18 starnet_s050
    swiftformer_xs swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 swinv2_tiny_window8_256 tiny_vit_5m_224 tnt_s_legacy_patch16_224
    tresnet_m twins_svt_small vgg11 visformer_tiny vit_srelpos_small_patch16_224 vit_tiny_patch16_224 vit_tiny_r_s16_p8_224
    vitamin_small_224 volo_d1_224 xception41p xcit_nano_12_p8_224
    tv:alexnet tv:convnext_tiny tv:densenet121 tv:efficientnet_b0 tv:efficientnet_v2_s tv:googlenet tv:inception_v3 tv:maxvit_t
    tv:mnasnet0_5 tv:mobilenet_v2 tv:mobilenet_v3_small tv:regnet_x_400mf tv:regnet_y_400mf tv:resnet18 tv:resnet50
    tv:resnext50_32x4d tv:shufflenet_v2_x0_5 tv:squeezenet1_0 tv:swin_t tv:swin_v2_t tv:vgg11 tv:vgg11_bn tv:vit_b_32
    tv:wide_resnet50_2
""".split()  # noqa: SIM905 - one name after another reads best
REFUSED = {
    "csatv2"
}  # one of its kernels leans to one side, and one of its layers multiplies the images of a batch with each other
BOUND = 1e-4
CLASS = 3


def main() -> int:
    """Run the sweep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="names of models, as for load_model; by default those listed in this file")
    names = parser.parse_args().names or NAMES
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = []
    for name in names:
        started = time.perf_counter()
        rows.append(examined(name))
        print(f"{time.perf_counter() - started:6.1f} s  {name}", file=sys.stderr, flush=True)
        gc.collect()
    print(to_text(rows))
    named = [row for row in rows if row["layer"]]
    averaged = sum(bool(row["behind"]) for row in named)
    print(f"{len(rows)} models; a layer is named in {len(named)}; in {averaged} its features are averaged at once")
    return int(any(row["wrong"] for row in rows))


def examined(name: str) -> dict[str, Any]:
    """Return the row of one model."""
    model = visattn.load_model(name, weights="none")
    for parameter in model.parameters():
        if parameter.ndim > 1 and not bool(parameter.any()):  # heads that are initialized to 0 would give no gradient
            nn.init.normal_(parameter, std=0.02)
    spec, started = input_spec(model), time.perf_counter()
    layer = cam_layer(model)
    row: dict[str, Any] = {
        "file": _model_to_module.get(name, "torchvision"),
        "model": name,
        "layer": layer,
        "found in": f"{time.perf_counter() - started:.2f} s",
        **dict.fromkeys(("features", "grid", "behind", "apart", "wrong"), ""),
    }
    if layer is None:
        return row
    pixels = torch.randn(2, spec.channels, *spec.size, generator=torch.Generator().manual_seed(1))
    calibrate(model, pixels)
    try:
        with visattn.capture(model, features=[layer], gradients=True) as recording:
            logits: Tensor = model(pixels)
        graded = recording.gradients(logits[:, CLASS])
        feature = feature_of(graded)
        row |= {
            "features": " x ".join(map(str, feature.value.shape[1:])),
            "grid": " x ".join(map(str, placed(feature).grid)),
        }
        weighed, own = methods.gradcam(graded).values, methods.hirescam(graded).values
    except VisattnError as error:
        return row | ({"apart": "refused"} if name in REFUSED else {"wrong": str(error)})
    apart = float((weighed - own).abs().max() / (own.abs().max() or 1))  # with random weights a map may be zero everywhere
    row["apart"] = f"{apart:.1e}"
    try:
        mean = methods.cam(graded).values.mean((1, 2))
    except OptionError:
        return row
    rest = logits.detach()[:, CLASS] - mean  # for a linear head this is its bias, for every image
    linear = bool((rest[0] - rest[1]).abs() <= BOUND * logits.detach().abs().max())
    return row | {"behind": "linear" if linear else "average", "wrong": "" if apart <= BOUND else "the maps differ"}


def calibrate(model: nn.Module, pixels: Tensor) -> None:
    """Estimate batch-norm statistics from some pixels; without them, activations of random weights vanish or explode."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.train().momentum = 1.0
    with torch.no_grad():
        model(pixels)
    model.eval()


if __name__ == "__main__":
    sys.exit(main())
