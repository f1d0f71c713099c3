"""Names of models as people say them, for titles of pictures: `vit_small_patch14_dinov2.lvd142m` is DINOv2 ViT-S/14."""

from __future__ import annotations

import re

_SIZES = {
    "atto": "A",
    "femto": "F",
    "pico": "P",
    "nano": "N",
    "tiny": "T",
    "small": "S",
    "base": "B",
    "large": "L",
    "huge": "H",
    "giant": "g",
    "gigantic": "G",
    "so400m": "So400m",
    "xlarge": "XL",
}
_TRAININGS = {"dinov2": "DINOv2 ", "dinov3": "DINOv3 ", "dino": "DINO ", "siglip": "SigLIP ", "clip": "CLIP ", "mae": "MAE "}
_SIZE = f"(?P<size>{'|'.join(_SIZES)})"
_RULES = [  # patterns of names without their tag, and the title; the first that fits is taken
    (rf"vit_{_SIZE}_patch(?P<patch>\d+)(?P<rest>.*)", "{training}ViT-{size}/{patch}{registers}"),
    (rf"deit3_{_SIZE}_patch(?P<patch>\d+).*", "DeiT III-{size}/{patch}"),
    (rf"deit_{_SIZE}(?P<rest>_distilled)?_patch(?P<patch>\d+).*", "DeiT-{size}/{patch}"),
    (rf"(?P<name>swin|swinv2|convnext|convnextv2|maxvit|hiera|cait|beit|eva02)_{_SIZE}(_.*)?", "{name}-{size}"),
    (r"seresnet(?P<depth>\d+)", "SE-ResNet-{depth}"),
    (r"(visattn_)?resnet(?P<depth>\d+)", "ResNet-{depth}"),
    (r"(tf_)?efficientnet_(?P<kind>b\d|lite\d)", "EfficientNet-{kind}"),
    (r"visattn_vit_c", "ViT-C"),
    (r"visattn_ram", "RAM"),
    (r"visattn_stn", "STN"),
    (r"visattn_sliding_vit", "ViT with sliding windows"),
    (r"visattn_predictive_vit", "ViT with predicted windows"),
]
_NAMES = {
    "swin": "Swin",
    "swinv2": "Swin V2",
    "convnext": "ConvNeXt",
    "convnextv2": "ConvNeXt V2",
    "maxvit": "MaxViT",
    "hiera": "Hiera",
    "cait": "CaiT",
    "beit": "BEiT",
    "eva02": "EVA-02",
}


def model_title(name: str) -> str:
    """Return the name of a model as people say it; a name that no rule fits is returned as it is.

    Args:
        name: Name in timm, in torchvision (with or without `tv:`) or of `visattn.models`.
    """
    plain = name.removeprefix("tv:").partition(".")[0]
    for pattern, title in _RULES:
        if found := re.fullmatch(pattern, plain):
            given = found.groupdict()
            rest = given.get("rest") or ""
            registers = re.search(r"_reg(\d+)", rest)
            return title.format(
                name=_NAMES.get(given.get("name", ""), ""),
                size=_SIZES.get(given.get("size", ""), ""),
                patch=given.get("patch", ""),
                depth=given.get("depth", ""),
                kind=given.get("kind", "").capitalize(),
                training=next((said for tag, said in _TRAININGS.items() if re.search(rf"_{tag}(_|$)", rest)), ""),
                registers=f" with {registers[1]} registers" if registers else "",
            )
    return name
