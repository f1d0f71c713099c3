"""Names that models have on hubs and in their authors' code, and the names that `load_model` has for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from visattn._support.faces import Later
from visattn._support.files import is_folder
from visattn._support.notes import note
from visattn.core.loading.prefixes import OPEN_CLIP, TORCHVISION, TRANSFORMERS

if TYPE_CHECKING:
    from visattn.core.loading import transformers_models
else:
    transformers_models = Later(f"{__package__}.transformers_models")

_SIZES = {"s": "small", "b": "base", "l": "large", "g": "giant", "h": "huge", "t": "tiny"}
_RULES = [  # pattern of the whole name, and timm's name; {size} is the size in words
    (r"(facebook/)?dinov2-(?P<size>small|base|large|giant)", "vit_{size}_patch14_dinov2.lvd142m"),
    (r"(facebook/)?dinov2-with-registers-(?P<size>small|base|large|giant)", "vit_{size}_patch14_reg4_dinov2.lvd142m"),
    (r"dinov2_vit(?P<size>[sblg])14", "vit_{size}_patch14_dinov2.lvd142m"),
    (r"dinov2_vit(?P<size>[sblg])14_reg", "vit_{size}_patch14_reg4_dinov2.lvd142m"),
    (r"(facebook/dino-|dino_)vit(?P<size>[sb])(?P<patch>16|8)", "vit_{size}_patch{patch}_224.dino"),
    (r"(facebook/)?dinov3-vit(?P<size>[sbl])16-pretrain-lvd1689m", "vit_{size}_patch16_dinov3.lvd1689m"),
    (r"dinov3_vit(?P<size>[sbl])16", "vit_{size}_patch16_dinov3.lvd1689m"),
    (r"facebook/deit-(?P<size>tiny|small|base)-patch16-224", "deit_{size}_patch16_224.fb_in1k"),
    (r"facebook/deit-(?P<size>tiny|small|base)-distilled-patch16-224", "deit_{size}_distilled_patch16_224.fb_in1k"),
    (r"microsoft/swin-(?P<size>tiny|small)-patch4-window7-224", "swin_{size}_patch4_window7_224.ms_in1k"),
    (r"google/vit-(?P<size>base|large)-patch(?P<patch>16|32)-384", "vit_{size}_patch{patch}_384.orig_in21k_ft_in1k"),
    (r"openai/clip-vit-base-patch(?P<patch>16|32)", "vit_base_patch{patch}_clip_224.openai"),
    (r"openai/clip-vit-large-patch14", "vit_large_patch14_clip_224.openai"),
]
_FILES = (".py", ".pt", ".pth", ".safetensors", ".bin", ".onnx", ".json")  # endings of files, which a missing path may have
_PREFIXES = ("hf-hub:timm/", "hf_hub:timm/", "timm/", "timm:", "timm.")


def usual_name(name: str) -> str:
    """Return the name that `load_model` has for a model which is called otherwise elsewhere; any other name is returned as it is.

    The weights are those that timm publishes under its own name, converted by timm from the authors' files. Models that timm does not
    have are loaded with transformers.
    """
    own = name
    for prefix in _PREFIXES:
        own = own.removeprefix(prefix)
    for prefix in ("torchvision.models.", "torchvision:", "torchvision/"):
        own = f"{TORCHVISION}{own.removeprefix(prefix)}" if own.startswith(prefix) else own
    for prefix in ("open_clip:", "openclip:", "open_clip/"):
        own = f"{OPEN_CLIP}{own.removeprefix(prefix)}" if own.startswith(prefix) else own
    bare = re.sub(r"^(hf-hub:|hf_hub:|huggingface:|https://huggingface\.co/)", "", own)
    for pattern, timm_name in _RULES:
        if found := re.fullmatch(pattern, bare):
            given = found.groupdict()
            size = given.get("size") or ""
            own = timm_name.format(size=_SIZES.get(size, size), patch=given.get("patch"))
            break
    else:
        if bare != own or _is_of_transformers(bare):
            own = f"{TRANSFORMERS}{bare}"
    if own != name:
        note(f"model {name} is understood as {own}")
    return own


def _is_of_transformers(name: str) -> bool:
    """Check whether a name is a repository of the hub or a folder with a model of transformers."""
    if is_folder(Path(name)):
        return transformers_models.holds_model(name)
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name)) and not Path(name).exists() and not name.endswith(_FILES)
