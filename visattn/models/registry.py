"""Registration of the models in timm: `timm.create_model("visattn_cbam_resnet18", num_classes=10)`.

Names are such as `visattn_resnet50` and, with attention, `visattn_se_resnet50`, for each of `se`, `cbam`, `eca`, `bam` and each depth.
Importing `visattn.models` registers them. There are no published weights. `features_only=True` returns the feature maps of the stem and of
each stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from visattn.errors import OptionError
from visattn.models.conv_stem_vit import vit_c
from visattn.models.local_features import LocalFeatures
from visattn.models.local_vit import predictive_vit, sliding_vit
from visattn.models.resnet import ResNet, resnet14, resnet18, resnet20, resnet50, resnet56
from visattn.nn import translate

_CIFAR = {  # mean and standard deviation of CIFAR-10's training pixels
    "input_size": (3, 32, 32),
    "mean": (0.4914, 0.4822, 0.4465),
    "std": (0.2470, 0.2435, 0.2616),
    "crop_pct": 1.0,
    "num_classes": 10,
    "pool_size": (8, 8),
}
_SCENES = _CIFAR | {"input_size": (3, 64, 64)}
_VIT = {"input_size": (3, 64, 64), "fixed_input_size": True, "crop_pct": 1.0, "num_classes": 10, "classifier": "head"}
_IMAGENET = {"interpolation": "bilinear", "pool_size": (7, 7)}  # the rest is timm's default

default_cfgs: dict[str, Any] = {}  # timm looks here


def _register(build: Callable[..., ResNet], attention: str | None, config: dict[str, Any]) -> None:
    """Register one model in timm: its name, constructor and preprocessing."""
    name = "_".join(filter(None, ("visattn", attention, build.__name__)))
    maps = tuple(range(5 if config is _IMAGENET else 4))  # stem and stages

    def adapted(in_chans: int = 3, drop_rate: float = 0.0, **options: Any) -> ResNet:  # noqa: ANN401
        if drop_rate:  # timm's training script always passes it
            raise OptionError(f"{name} has no dropout, got drop_rate={drop_rate}. Leave it at 0.")
        return build(attention=attention, in_channels=in_chans, **options)

    def entry(pretrained: bool = False, **options: Any) -> Any:  # noqa: ANN401 - a ResNet, or its features
        return build_model_with_cfg(
            adapted, name, pretrained, feature_cfg={"out_indices": maps}, pretrained_filter_fn=_translated, **options
        )

    entry.__name__ = name
    default_cfgs.update(generate_default_cfgs({name: config | {"first_conv": "conv1", "classifier": "fc"}}))
    globals()[name] = register_model(entry)  # timm puts the name into `__all__`


def _translated(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Translate names of the authors' networks and of timm into ours; timm passes the checkpoint first."""
    return translate(model, state)


for _attention in (None, "se", "cbam", "eca", "bam"):
    for _build in (resnet18, resnet50):
        _register(_build, _attention, _IMAGENET)
    for _build in (resnet20, resnet56):
        _register(_build, _attention, _CIFAR)
    _register(resnet14, _attention, _SCENES)

default_cfgs.update(
    generate_default_cfgs(
        {
            "visattn_vit_c": _VIT | {"first_conv": "patch_embed.proj.0"},
            **{f"visattn_{build.__name__}": _VIT | {"first_conv": "stem.0"} for build in (sliding_vit, predictive_vit)},
            "visattn_local_features": _SCENES | {"first_conv": "features.0", "classifier": "fc"},
        }
    )
)


def _register_vit(build: Callable[..., nn.Module]) -> None:
    """Register a small vision transformer in timm."""
    name = f"visattn_{build.__name__}"

    def entry(pretrained: bool = False, **options: Any) -> Any:  # noqa: ANN401
        return build_model_with_cfg(build, name, pretrained, **options)

    entry.__name__ = name
    globals()[name] = register_model(entry)


for _make in (vit_c, sliding_vit, predictive_vit):
    _register_vit(_make)


def _local_features(pretrained: bool = False, **options: Any) -> Any:  # noqa: ANN401
    def adapted(in_chans: int = 3, **rest: Any) -> LocalFeatures:  # noqa: ANN401
        return LocalFeatures(in_channels=in_chans, **rest)

    return build_model_with_cfg(adapted, "visattn_local_features", pretrained, **options)


_local_features.__name__ = "visattn_local_features"
visattn_local_features = register_model(_local_features)
