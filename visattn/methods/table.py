"""Table of methods, read by `explain`, the command line, `inspect` and error messages.

Each method's file describes its own methods; its entry in `MODULES` adds them to the table.
"""

from importlib import import_module

from visattn._support.checks import one_of
from visattn.methods.method import Method

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
METHODS: dict[str, Method] = {
    name: method for module in MODULES for name, method in import_module(f"visattn.methods.{module}").METHODS.items()
}


def method_of(name: str) -> Method:
    """Return a method by name or alias.

    Raises:
        OptionError: If the name is unknown; the message suggests the closest one.
    """
    aliases = {alias: known for known, method in METHODS.items() for alias in method.aliases}
    return METHODS[one_of(aliases.get(name, name), tuple(METHODS), "method")]
