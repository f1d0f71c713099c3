"""Table of methods, read by `explain`, the command line, `inspect` and error messages.

Each method's file describes its own methods; `MODULES` says in which file each is described. `MethodName` lists the names.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Literal

from visattn._support.checks import one_of
from visattn.core.methods.method import Method

__all__ = ["MODULES", "MethodName"]

MODULES = {
    "attention": "from_attention.attention",
    "similarity": "from_features.similarity",
    "pca": "from_features.pca",
    "positions": "from_features.position_similarity",
    "rollout": "from_attention.rollout",
    "norm_attention": "from_attention.norm",
    "attention_flow": "from_attention.flow",
    "relevance": "from_attention.relevance",
    "legrad": "from_attention.legrad",
    "contributions": "from_attention.contributions",
    "patching": "from_attention.patching",
    "gradient_rollout": "from_attention.gradients",
    "attention_gradient": "from_attention.gradients",
    "transition_attention": "from_attention.transition",
    "gradcam": "from_gradients.gradcam",
    "gradcam_plus_plus": "from_gradients.gradcam",
    "xgradcam": "from_gradients.gradcam",
    "hirescam": "from_gradients.hirescam",
    "layercam": "from_gradients.hirescam",
    "cam": "from_features.cam",
    "eigencam": "from_features.eigencam",
    "scorecam": "by_perturbation.cams",
    "ablationcam": "by_perturbation.cams",
    "gates": "gate_maps",
    "glimpses": "glimpse_paths",
    "captum.saliency": "from_gradients.saliency",
    "captum.input_x_gradient": "from_gradients.saliency",
    "captum.integrated_gradients": "by_perturbation.captum",
    "captum.smoothgrad": "by_perturbation.captum",
    "captum.occlusion": "by_perturbation.captum",
    "captum.kernel_shap": "by_perturbation.captum",
    "captum.lime": "by_perturbation.captum",
}

MethodName = Literal[
    "auto",
    "attention",
    "similarity",
    "pca",
    "positions",
    "rollout",
    "norm_attention",
    "attention_flow",
    "relevance",
    "legrad",
    "contributions",
    "patching",
    "gradient_rollout",
    "attention_gradient",
    "transition_attention",
    "gradcam",
    "gradcam_plus_plus",
    "xgradcam",
    "hirescam",
    "layercam",
    "cam",
    "eigencam",
    "scorecam",
    "ablationcam",
    "gates",
    "glimpses",
    "captum.saliency",
    "captum.input_x_gradient",
    "captum.integrated_gradients",
    "captum.smoothgrad",
    "captum.occlusion",
    "captum.kernel_shap",
    "captum.lime",
]  # for editors


class _Table(Mapping[str, Method]):
    """Methods by name; a method's file is imported when the method is first asked for."""

    def __getitem__(self, name: str) -> Method:
        """Return a method."""
        method: Method = import_module(f"visattn.core.methods.{MODULES[name]}").METHODS[name]
        return method

    def __contains__(self, name: object) -> bool:
        """Check whether a method has this name."""
        return name in MODULES

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(MODULES)

    def __len__(self) -> int:
        """Return the number of methods."""
        return len(MODULES)

    def __repr__(self) -> str:
        """Return the number of methods and the first names."""
        return f"<{len(self)} methods: {', '.join([*self][:8])}, ...>"


METHODS = _Table()


def name_of(method: str) -> str:
    """Return the name of a method from its name or an alias (`chefer`).

    Raises:
        OptionError: If the name is unknown; the message suggests the closest one.
    """
    if method in METHODS:
        return method
    names = {alias: name for name, known in METHODS.items() for alias in known.aliases}
    if method in names:
        return names[method]
    names |= {name.rpartition(".")[2]: name for name in METHODS}  # captum's without the prefix
    return one_of(method, tuple(METHODS), "method", also=names)
