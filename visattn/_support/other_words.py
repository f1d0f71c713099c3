"""Words of other libraries and of everyday speech for options and their values, and the word that visattn has for each.

They are suggestions in the message for a name that is unknown; nothing is understood by them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from numbers import Integral
from types import MappingProxyType
from typing import Any

from visattn._support.language import option, worded

# other names of an option, in lower case with underscores
OPTIONS = {
    own: frozenset(others.split())
    for own, others in {
        "opacity": "alpha transparency image_weight",
        "colormap": "cmap color_map colour_map colourmap",
        "interpolation": "interp resample resampling upsample upsampling",
        "normalize": "norm normalization normalisation normalise scaling",
        "contours": "contour levels",
        "target": "class class_idx class_index class_id target_class target_category category label",
        "labels": "class_names classes categories",
        "layer": "layers layer_name layer_index layer_num target_layer target_layers block",
        "head": "heads head_index",
        "fusion": "head_fusion",
        "query": "token point pixel position",
        "img_size": "image_size input_size size resolution",
        "mean": "image_mean",
        "std": "image_std",
        "weights": "checkpoint ckpt pretrained checkpoint_path",
        "steps": "n_steps",
        "samples": "n_samples nsamples num_samples",
        "method": "algorithm technique explainer",
        "model": "arch architecture model_name backbone net",
        "output": "out output_dir output_path save save_path destination",
        "overwrite": "force replace",
        "device": "dev",
    }.items()
}

# values of options, compared without case, spaces, hyphens and underscores
VALUES: dict[str, dict[str, str]] = {
    "weights": dict.fromkeys(("true", "pretrained", "default", "imagenet"), "auto") | dict.fromkeys(("false", "random"), "none"),
    "method": {
        "attentionrollout": "rollout",
        "rawattention": "attention",
        "selfattention": "attention",
        "cheferrelevance": "relevance",
        "attentionrelevance": "relevance",
        "ig": "captum.integrated_gradients",
        "intgrad": "captum.integrated_gradients",
        "gradient": "captum.saliency",
        "vanillagradient": "captum.saliency",
        "gradxinput": "captum.input_x_gradient",
        "gradientxinput": "captum.input_x_gradient",
        "shap": "captum.kernel_shap",
        "kernelshap": "captum.kernel_shap",
        "gradcampp": "gradcam_plus_plus",
        "cosinesimilarity": "similarity",
        "flow": "attention_flow",
    },
    "query": dict.fromkeys(("class", "[cls]", "clstoken", "classtoken"), "cls"),
    "colormap": {
        "grey": "gray",
        "greys": "gray",
        "grays": "gray",
        "bwr": "blue-white-red",
        "rdbur": "blue-white-red",
    },
    "interpolation": {"linear": "bilinear", "cubic": "bicubic", "nearestneighbor": "nearest", "none": "nearest"},
    "normalization": {"false": "none", "true": "auto", "01": "minmax", "maxmin": "minmax", "zerocentered": "symmetric"},
}
_COLORMAPS = {
    1: "bone",
    2: "jet",
    13: "magma",
    14: "inferno",
    15: "plasma",
    16: "viridis",
    17: "cividis",
    20: "turbo",
}  # OpenCV's


def option_meant(name: str, known: Collection[str]) -> str | None:
    """Return the option in `known` that a name stands for, or None."""
    plain = name.lower().replace("-", "_")
    return next((own for own, others in OPTIONS.items() if own in known and (plain in others or plain == own)), None)


def instead_of(name: str) -> str | None:
    """Return what to do instead of an option of another library that stands for no option here; None if nothing is known."""
    order = worded("images are RGB: pass image[..., ::-1]", "files are read as RGB")
    gpu = f"pass {option('device', 'cuda')}"
    outline = f"the outline of the region that holds 60 % of the map is {option('mass', 0.6)}"
    hints = {
        **dict.fromkeys(("bgr", "channel_order", "color_order"), order),
        **dict.fromkeys(("gpu", "cuda", "use_cuda"), gpu),
        "threshold": outline,
        "top_k": f"explain one class at a time: {option('target', 'CLASS')}",
        "batch_size": "photos are explained one by one",
        "discard_ratio": f"see {option('discard')} of method 'rollout'",
        "eigen_smooth": "use method 'eigencam', or captum.smoothgrad",
        "aug_smooth": "use method 'captum.smoothgrad'",
        **dict.fromkeys(("dpi", "figsize"), "pictures have the photo's own size"),
    }
    return hints.get(name.lower().replace("-", "_"))


def value_meant(of: str, value: Any, known: Collection[str], also: Mapping[str, str] = MappingProxyType({})) -> str | None:  # noqa: ANN401
    """Return the name that a value stands for, or None.

    Args:
        of: Name of the option.
        value: Text, a boolean, a number of OpenCV, or an object with a `name` (a color map of matplotlib).
        known: Names that the option takes.
        also: Other names for some of them.
    """
    if of == "colormap" and type(value) is not bool and isinstance(value, Integral):
        return _COLORMAPS.get(int(value))
    text = value if isinstance(value, str) else str(value) if isinstance(value, bool) else getattr(value, "name", None)
    if not isinstance(text, str):
        return None
    plain = _squeezed(text.removeprefix("cv2.").removeprefix("COLORMAP_"))
    others = {_squeezed(name): own for name, own in ({name: name for name in known} | dict(also)).items()}
    return VALUES.get(of, {}).get(plain) or others.get(plain)


def _squeezed(text: str) -> str:
    """Return a name in lower case, without spaces, hyphens and underscores."""
    return re.sub(r"[\s_-]", "", text.lower())
