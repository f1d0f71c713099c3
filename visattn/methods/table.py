"""The table of methods: how each is called, what it needs, and when it applies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from visattn._support.checks import one_of
from visattn.maps import AttentionMap
from visattn.methods.by_perturbation.cams import ablationcam, scorecam
from visattn.methods.by_perturbation.captum import integrated_gradients, kernel_shap, lime, occlusion, smoothgrad
from visattn.methods.from_attention.attention import attention
from visattn.methods.from_attention.flow import attention_flow, refusal as flow_refusal
from visattn.methods.from_attention.gradients import attention_gradient, gradient_rollout
from visattn.methods.from_attention.legrad import legrad
from visattn.methods.from_attention.norm import norm_attention
from visattn.methods.from_attention.relevance import refusal as relevance_refusal, relevance
from visattn.methods.from_attention.rollout import rollout
from visattn.methods.from_attention.transition import transition_attention
from visattn.methods.from_features.cam import cam
from visattn.methods.from_features.eigencam import eigencam
from visattn.methods.from_features.pca import pca
from visattn.methods.from_features.similarity import similarity
from visattn.methods.from_gradients.gradcam import gradcam, gradcam_plus_plus, xgradcam
from visattn.methods.from_gradients.hirescam import hirescam, layercam
from visattn.methods.from_gradients.saliency import input_x_gradient, saliency
from visattn.methods.gate_maps import gates, refusal as gates_refusal
from visattn.methods.glimpse_paths import glimpses, refusal as glimpses_refusal
from visattn.methods.selection import chain_refusal, chain_refusal_of_any_rows, spatial_refusal
from visattn.methods.taps import refusal as tap_refusal
from visattn.records import Recording

Need = Literal[
    "attention", "gradients", "layer gradients", "values", "features", "cam layer", "gates", "glimpses", "replay", "score"
]


@dataclass(frozen=True)
class Method:
    """One method: how to call it, and when it applies.

    Attributes:
        function: From a recording and its own parameters to a map.
        needs: What the recording must hold; `cam layer`: features of one layer, by default of that which `families.cam_layer` names;
            `replay` and `score` are arguments of their own, see `visattn.methods`.
        targeted: Whether it explains a class.
        accepts: Why it does not apply to a recording, or None.
        sinks: Whether sinks can show in its map as bright spots.
        aliases: Other names it is known by.
    """

    function: Callable[..., AttentionMap]
    needs: frozenset[Need]
    targeted: bool
    accepts: Callable[[Recording], str | None]
    sinks: bool = False
    aliases: tuple[str, ...] = ()


def _features_refusal(recording: Recording) -> str | None:
    return None if any(feature.role == "tokens" for feature in recording.features) else "no token features were recorded."


def _norm_refusal(recording: Recording) -> str | None:
    if reason := spatial_refusal(recording):
        return reason
    known = any(record.output_weight is not None for record in recording if record.keys.grid)
    return None if known else "the projection behind the heads is not known. Use method 'attention'."


def _never(_recording: Recording) -> None:
    """Pixels and a score are all that it needs."""


def _needs(*names: Need) -> frozenset[Need]:
    return frozenset(names)


_SLOPES = _needs("features", "cam layer", "gradients")

METHODS: dict[str, Method] = {
    "attention": Method(attention, _needs("attention"), False, spatial_refusal, True, ("raw",)),
    "similarity": Method(similarity, _needs("features"), False, _features_refusal),
    "pca": Method(pca, _needs("features"), False, _features_refusal),
    "rollout": Method(rollout, _needs("attention"), False, chain_refusal, True),
    "norm_attention": Method(norm_attention, _needs("attention", "values"), False, _norm_refusal),
    "attention_flow": Method(attention_flow, _needs("attention"), False, flow_refusal, True),
    "relevance": Method(relevance, _needs("attention", "gradients"), True, relevance_refusal, True, ("chefer",)),
    "legrad": Method(legrad, _needs("attention", "layer gradients"), True, chain_refusal_of_any_rows),
    "gradient_rollout": Method(gradient_rollout, _needs("attention", "gradients"), True, chain_refusal_of_any_rows, True),
    "attention_gradient": Method(attention_gradient, _needs("attention", "gradients"), True, spatial_refusal, True, ("gradsam",)),
    "transition_attention": Method(
        transition_attention, _needs("attention", "gradients", "replay"), True, chain_refusal, True, ("tam",)
    ),
    "gradcam": Method(gradcam, _SLOPES, True, tap_refusal, aliases=("grad-cam",)),
    "gradcam_plus_plus": Method(gradcam_plus_plus, _SLOPES, True, tap_refusal, aliases=("gradcam++", "grad-cam++")),
    "xgradcam": Method(xgradcam, _SLOPES, True, tap_refusal, aliases=("xgrad-cam",)),
    "hirescam": Method(hirescam, _SLOPES, True, tap_refusal, aliases=("hires-cam",)),
    "layercam": Method(layercam, _SLOPES, True, tap_refusal, aliases=("layer-cam",)),
    "cam": Method(cam, _SLOPES, True, tap_refusal),
    "eigencam": Method(eigencam, _needs("features", "cam layer"), False, tap_refusal, aliases=("eigen-cam",)),
    "scorecam": Method(scorecam, _needs("features", "cam layer", "score"), True, tap_refusal, aliases=("score-cam",)),
    "ablationcam": Method(ablationcam, _needs("features", "cam layer", "score"), True, tap_refusal, aliases=("ablation-cam",)),
    "gates": Method(gates, _needs("gates"), False, gates_refusal),
    "glimpses": Method(glimpses, _needs("glimpses"), False, glimpses_refusal),
    "captum.saliency": Method(saliency, _needs("score"), True, _never, aliases=("saliency",)),
    "captum.input_x_gradient": Method(input_x_gradient, _needs("score"), True, _never, aliases=("input_x_gradient",)),
    "captum.integrated_gradients": Method(integrated_gradients, _needs("score"), True, _never, aliases=("ig",)),
    "captum.smoothgrad": Method(smoothgrad, _needs("score"), True, _never, aliases=("smoothgrad",)),
    "captum.occlusion": Method(occlusion, _needs("score"), True, _never, aliases=("occlusion",)),
    "captum.kernel_shap": Method(kernel_shap, _needs("score"), True, _never, aliases=("shap",)),
    "captum.lime": Method(lime, _needs("score"), True, _never, aliases=("lime",)),
}


def method_of(name: str) -> Method:
    """A method by name or alias.

    Raises:
        OptionError: If there is none; the message names the nearest.
    """
    aliases = {alias: known for known, method in METHODS.items() for alias in method.aliases}
    return METHODS[one_of(aliases.get(name, name), tuple(METHODS), "method")]
