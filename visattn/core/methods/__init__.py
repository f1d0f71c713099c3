"""Methods: functions that turn a recording into a map on the token grid. They hold neither the model nor a picture.

`METHODS` is the table that `explain`, the command line, `inspect` and error messages read. Methods that run the model again take one
more argument. `replay(edit)` runs the model on the edited pixels and returns a recording with the gradient of the target's score.
`scored` is a `ScoredImages`, which holds the pixels and computes the target's score for any other pixels. Methods with `scored` need no
attention; two of them need the features of a layer.
"""

from typing import TYPE_CHECKING

from visattn._support.faces import face
from visattn.core.methods.method_table import MODULES

if TYPE_CHECKING:
    from visattn.core.methods.by_perturbation.cams import ablationcam as ablationcam, scorecam as scorecam
    from visattn.core.methods.by_perturbation.captum import (
        integrated_gradients as integrated_gradients,
        kernel_shap as kernel_shap,
        lime as lime,
        occlusion as occlusion,
        smoothgrad as smoothgrad,
    )
    from visattn.core.methods.from_attention.attention import attention as attention
    from visattn.core.methods.from_attention.attention_steps import (
        AttentionSteps as AttentionSteps,
        attention_steps as attention_steps,
    )
    from visattn.core.methods.from_attention.contributions import contributions as contributions
    from visattn.core.methods.from_attention.flow import attention_flow as attention_flow
    from visattn.core.methods.from_attention.gradients import (
        attention_gradient as attention_gradient,
        gradient_rollout as gradient_rollout,
    )
    from visattn.core.methods.from_attention.legrad import legrad as legrad
    from visattn.core.methods.from_attention.norm import norm_attention as norm_attention
    from visattn.core.methods.from_attention.patching import patching as patching
    from visattn.core.methods.from_attention.relevance import relevance as relevance
    from visattn.core.methods.from_attention.rollout import rollout as rollout
    from visattn.core.methods.from_attention.transition import transition_attention as transition_attention
    from visattn.core.methods.from_features.cam import cam as cam
    from visattn.core.methods.from_features.eigencam import eigencam as eigencam
    from visattn.core.methods.from_features.pca import pca as pca
    from visattn.core.methods.from_features.position_similarity import positions as positions
    from visattn.core.methods.from_features.similarity import similarity as similarity
    from visattn.core.methods.from_gradients.gradcam import (
        gradcam as gradcam,
        gradcam_plus_plus as gradcam_plus_plus,
        xgradcam as xgradcam,
    )
    from visattn.core.methods.from_gradients.hirescam import hirescam as hirescam, layercam as layercam
    from visattn.core.methods.from_gradients.saliency import input_x_gradient as input_x_gradient, saliency as saliency
    from visattn.core.methods.gate_maps import gates as gates
    from visattn.core.methods.glimpse_paths import glimpses as glimpses
    from visattn.core.methods.method import Method as Method
    from visattn.core.methods.method_table import METHODS as METHODS, name_of as name_of
    from visattn.core.methods.queries import QUERY_SPELLINGS as QUERY_SPELLINGS
    from visattn.core.methods.scored import ScoredImages as ScoredImages
else:
    functions = {f".{module}": [] for module in MODULES.values()}
    for name, module in MODULES.items():
        functions[f".{module}"].append(name.rpartition(".")[2])  # a function has the name of its method
    __getattr__, __dir__, __all__ = face(
        __name__,
        functions
        | {
            ".from_attention.attention_steps": ["AttentionSteps", "attention_steps"],
            ".method": ["Method"],
            ".queries": ["QUERY_SPELLINGS"],
            ".scored": ["ScoredImages"],
            ".method_table": ["METHODS", "name_of"],
        },
    )
