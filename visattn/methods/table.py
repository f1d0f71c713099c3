"""The table of methods: how each is called, what it needs, and when it applies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, Literal

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
from visattn.methods.gate_maps import NO_GATES, gates, refusal as gates_refusal
from visattn.methods.glimpse_paths import NO_GLIMPSES, glimpses, refusal as glimpses_refusal
from visattn.methods.selection import chain_refusal, chain_refusal_of_any_rows, spatial_refusal
from visattn.methods.taps import refusal as tap_refusal
from visattn.records import Recording

Need = Literal[
    "attention", "gradients", "layer gradients", "values", "features", "cam layer", "gates", "glimpses", "replay", "score"
]


_RUN_AGAIN = "replay", "scored"  # arguments that the pipeline gives


def _nothing_more(_parameters: Mapping[str, Any]) -> frozenset[Need]:
    return frozenset()


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method: how to call it, and when it applies.

    Attributes:
        function: From a recording and its own parameters to a map.
        needs: What the recording must hold, whatever the parameters; `cam layer`: features of one layer, by default of that which
            `families.cam_layer` names; `replay` and `score` are arguments of their own, see `visattn.methods`.
        accepts: Why it does not apply to a recording, or None.
        targeted: Whether it explains a class.
        sinks: Whether sinks can show in its map as bright spots.
        more: What the recording must hold beside that, given the parameters.
        lacking: What is said where a model has nothing of what is needed.
        aliases: Other names it is known by.
    """

    function: Callable[..., AttentionMap]
    needs: frozenset[Need]
    accepts: Callable[[Recording], str | None]
    targeted: bool = False
    sinks: bool = False
    more: Callable[[Mapping[str, Any]], frozenset[Need]] = _nothing_more
    lacking: str | None = None
    aliases: tuple[str, ...] = ()

    def wants(self, parameters: Mapping[str, Any]) -> frozenset[Need]:
        """What the recording must hold, given the parameters."""
        return self.needs | self.more(parameters)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of its own parameters."""
        return tuple(name for name in list(signature(self.function).parameters)[1:] if name not in _RUN_AGAIN)

    @property
    def required(self) -> tuple[str, ...]:
        """Those of them that have no default."""
        own = signature(self.function).parameters
        return tuple(name for name in self.parameters if own[name].default is Parameter.empty)


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


def _values_of(parameters: Mapping[str, Any]) -> frozenset[Need]:
    """Value vectors are compared, or weigh what is attended to."""
    asked = parameters.get("of") == "values" or parameters.get("weights_by") == "norm" or parameters.get("residual") == "measured"
    return _needs("values") if asked else frozenset()


def _attends(function: Callable[..., AttentionMap], accepts: Callable[[Recording], str | None], **facts: Any) -> Method:  # noqa: ANN401
    """A method that reads attention alone."""
    return Method(function=function, needs=_needs("attention"), accepts=accepts, **facts)


def _graded(function: Callable[..., AttentionMap], accepts: Callable[[Recording], str | None], **facts: Any) -> Method:  # noqa: ANN401
    """A method that reads attention and the gradient of a score."""
    return Method(function=function, needs=_needs("attention", "gradients"), accepts=accepts, targeted=True, sinks=True, **facts)


def _cam(function: Callable[..., AttentionMap], *aliases: str) -> Method:
    """A class activation map: features of one layer and their gradient."""
    needs = _needs("features", "cam layer", "gradients")
    return Method(function=function, needs=needs, accepts=tap_refusal, targeted=True, aliases=aliases)


def _measured_cam(function: Callable[..., AttentionMap], *aliases: str) -> Method:
    """A class activation map whose weights are measured."""
    needs = _needs("features", "cam layer", "score")
    return Method(function=function, needs=needs, accepts=tap_refusal, targeted=True, aliases=aliases)


def _attribution(function: Callable[..., AttentionMap], *aliases: str) -> Method:
    """An attribution of the pixels."""
    return Method(function=function, needs=_needs("score"), accepts=_never, targeted=True, aliases=aliases)


METHODS: dict[str, Method] = {
    "attention": _attends(attention, spatial_refusal, sinks=True, aliases=("raw",)),
    "similarity": Method(function=similarity, needs=_needs("features"), accepts=_features_refusal, more=_values_of),
    "pca": Method(function=pca, needs=_needs("features"), accepts=_features_refusal),
    "rollout": _attends(rollout, chain_refusal, sinks=True, more=_values_of),
    "norm_attention": Method(function=norm_attention, needs=_needs("attention", "values"), accepts=_norm_refusal),
    "attention_flow": _attends(attention_flow, flow_refusal, sinks=True),
    "relevance": _graded(relevance, relevance_refusal, aliases=("chefer",)),
    "legrad": Method(
        function=legrad, needs=_needs("attention", "layer gradients"), accepts=chain_refusal_of_any_rows, targeted=True
    ),
    "gradient_rollout": _graded(gradient_rollout, chain_refusal_of_any_rows),
    "attention_gradient": _graded(attention_gradient, spatial_refusal, aliases=("gradsam",)),
    "transition_attention": Method(
        function=transition_attention,
        needs=_needs("attention", "gradients", "replay"),
        accepts=chain_refusal,
        targeted=True,
        sinks=True,
        aliases=("tam",),
    ),
    "gradcam": _cam(gradcam, "grad-cam"),
    "gradcam_plus_plus": _cam(gradcam_plus_plus, "gradcam++", "grad-cam++"),
    "xgradcam": _cam(xgradcam, "xgrad-cam"),
    "hirescam": _cam(hirescam, "hires-cam"),
    "layercam": _cam(layercam, "layer-cam"),
    "cam": _cam(cam),
    "eigencam": Method(function=eigencam, needs=_needs("features", "cam layer"), accepts=tap_refusal, aliases=("eigen-cam",)),
    "scorecam": _measured_cam(scorecam, "score-cam"),
    "ablationcam": _measured_cam(ablationcam, "ablation-cam"),
    "gates": Method(function=gates, needs=_needs("gates"), accepts=gates_refusal, lacking=NO_GATES),
    "glimpses": Method(function=glimpses, needs=_needs("glimpses"), accepts=glimpses_refusal, lacking=NO_GLIMPSES),
    "captum.saliency": _attribution(saliency, "saliency"),
    "captum.input_x_gradient": _attribution(input_x_gradient, "input_x_gradient"),
    "captum.integrated_gradients": _attribution(integrated_gradients, "ig"),
    "captum.smoothgrad": _attribution(smoothgrad, "smoothgrad"),
    "captum.occlusion": _attribution(occlusion, "occlusion"),
    "captum.kernel_shap": _attribution(kernel_shap, "shap"),
    "captum.lime": _attribution(lime, "lime"),
}


def method_of(name: str) -> Method:
    """A method by name or alias.

    Raises:
        OptionError: If there is none; the message names the nearest.
    """
    aliases = {alias: known for known, method in METHODS.items() for alias in method.aliases}
    return METHODS[one_of(aliases.get(name, name), tuple(METHODS), "method")]
