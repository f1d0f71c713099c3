"""Spellings of other libraries and of everyday speech, and the one name that visattn has for each.

They are understood at the door only: in the keywords of `explain` and of the drawing functions, in options of commands, and in names of
models. Each is reported by a note. Signatures, docs and provenance have only the one name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from inspect import Parameter, signature
from numbers import Integral
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from visattn._support.checks import printable, shown, suggest
from visattn._support.language import option, worded
from visattn._support.notes import note
from visattn.errors import OptionError

# other spellings of an option, in lower case with underscores
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
    "normalize": {"false": "none", "true": "auto", "01": "minmax", "maxmin": "minmax", "zerocentered": "symmetric"},
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


P = ParamSpec("P")
R = TypeVar("R")


def spelled(*kinds: type, more: Callable[[], Collection[str]] = tuple) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function to take its keywords in any spelling of `OPTIONS`, and to refuse unknown keywords with a suggestion.

    Args:
        kinds: `TypedDict`s of the function's `**options`.
        more: Function that returns the names of further options.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        named = Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD
        own = [name for name, one in signature(function).parameters.items() if one.kind in named and name != "self"]
        own += [name for kind in kinds for name in kind.__annotations__]

        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            if all(name in own for name in kwargs):
                return function(*args, **kwargs)
            known = [*own, *more()]
            given = understood(kwargs, known)
            for name in given:
                if name not in known:
                    raise unknown(name, known, function.__name__)
            return function(*args, **given)

        return called

    return decorated


def understood(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return options under the names that visattn has for them; a note is issued for each that was spelled otherwise.

    Args:
        given: Options by name.
        known: Names that the caller takes.

    Raises:
        OptionError: If two spellings of one option were given.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        own = name if name in known else option_of(name, known) or name
        if own in found or (own != name and own in given):
            raise OptionError(f"{name} and {own} are one option. Pass {own} only.")
        if own != name:
            note(f"{name} is understood as {own}")
        found[own] = value
    return found


def option_of(name: str, known: Collection[str]) -> str | None:
    """Return the option in `known` that a spelling stands for, or None."""
    plain = name.lower().replace("-", "_")
    return next((own for own, others in OPTIONS.items() if own in known and (plain in others or plain == own)), None)


_MANY = 25  # options that a message does not list


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


def unknown(name: str, known: Sequence[str], what: str) -> OptionError:
    """Return the error for an option that nothing takes; it says what to do instead, or names the closest option."""
    near = suggest(name, known, 1)
    instead = instead_of(name)
    hint = (
        f"; {instead}."
        if instead
        else f"; did you mean {near[0]}?"
        if near
        else f". It has: {', '.join(dict.fromkeys(known))}."
        if len(known) < _MANY
        else f". Its docstring, help(visattn.{what}), lists them."
    )
    return OptionError(f"{what} has no option {printable(name)}{hint}")


def value_of(of: str, value: Any, known: Sequence[str], also: Mapping[str, str] = MappingProxyType({})) -> Any:  # noqa: ANN401
    """Return a value as visattn spells it; a note is issued if that differs. What is not understood is returned as it is.

    Args:
        of: Name of the option.
        value: The value: text, a boolean, a number of OpenCV, or an object with a `name` (a color map of matplotlib).
        known: Names that the option takes.
        also: Other names for some of them.
    """
    if (isinstance(value, str) and value in known) or isinstance(value, os.PathLike):  # a path has a `name`, too
        return value
    own: str | None = None
    if of == "colormap" and type(value) is not bool and isinstance(value, Integral):
        own = _COLORMAPS.get(int(value))
    else:
        text = value if isinstance(value, str) else str(value) if isinstance(value, bool) else getattr(value, "name", None)
        if isinstance(text, str):
            plain = squeezed(text.removeprefix("cv2.").removeprefix("COLORMAP_"))
            others = {squeezed(name): own for name, own in ({name: name for name in known} | dict(also)).items()}
            own = VALUES.get(of, {}).get(plain) or others.get(plain)
    if own is None:
        return value
    note(f"{option(of)} {shown(value)} is understood as '{own}'")
    return own


def squeezed(text: str) -> str:
    """Return a name in lower case, without spaces, hyphens and underscores."""
    return re.sub(r"[\s_-]", "", text.lower())
