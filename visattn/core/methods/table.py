"""Table of methods, read by `explain`, the command line, `inspect` and error messages.

Each method's file describes its own methods; its entry in `MODULES` adds them to the table. `MethodName` lists their names.
"""

from importlib import import_module
from typing import Literal

from visattn._support.checks import one_of
from visattn._support.spellings import value_of
from visattn.core.methods.method import Method

__all__ = ["MethodName"]

MODULES = (
    "from_attention.attention",
    "from_features.similarity",
    "from_features.pca",
    "from_attention.rollout",
    "from_attention.norm",
    "from_attention.flow",
    "from_attention.relevance",
    "from_attention.legrad",
    "from_attention.gradients",
    "from_attention.transition",
    "from_gradients.gradcam",
    "from_gradients.hirescam",
    "from_features.cam",
    "from_features.eigencam",
    "by_perturbation.cams",
    "gate_maps",
    "glimpse_paths",
    "from_gradients.saliency",
    "by_perturbation.captum",
)

MethodName = Literal[
    "auto",
    "attention",
    "similarity",
    "pca",
    "rollout",
    "norm_attention",
    "attention_flow",
    "relevance",
    "legrad",
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


class _Table(dict[str, Method]):
    """Methods by name."""

    def __repr__(self) -> str:
        """Return the number of methods and the first names."""
        return f"<{len(self)} methods: {', '.join([*self][:8])}, ...>"


METHODS: dict[str, Method] = _Table(
    (name, method) for module in MODULES for name, method in import_module(f"visattn.core.methods.{module}").METHODS.items()
)


def name_of(method: str) -> str:
    """Return the name of a method from its name, an alias, or another spelling of either (`GradCAM`, `Attention Rollout`).

    Raises:
        OptionError: If the name is unknown; the message suggests the closest one.
    """
    names = {alias: name for name, known in METHODS.items() for alias in known.aliases}
    if method in names:
        return names[method]
    names |= {name.rpartition(".")[2]: name for name in METHODS}  # captum's without the prefix
    return one_of(value_of("method", method, tuple(METHODS), names), tuple(METHODS), "method")
