"""Methods: functions from a recording to a map on the token grid. No model in them, and no picture.

`METHODS` is the one table that explain, the command line, `inspect` and the messages of refusal read. Methods that run the model again
take one more argument. `replay(edit)` runs it on the same pixels after `edit` and gives the recording with the gradient of the target's
score. `scored` is a `Scored`: the pixels, and the target's score of any others; these methods need no attention, two of them features of
a layer.
"""

from visattn.methods import compat
from visattn.methods.by_perturbation.cams import ablationcam, scorecam
from visattn.methods.by_perturbation.captum import integrated_gradients, kernel_shap, lime, occlusion, smoothgrad
from visattn.methods.from_attention.attention import attention
from visattn.methods.from_attention.flow import attention_flow
from visattn.methods.from_attention.gradients import attention_gradient, gradient_rollout
from visattn.methods.from_attention.legrad import legrad
from visattn.methods.from_attention.norm import norm_attention
from visattn.methods.from_attention.relevance import relevance
from visattn.methods.from_attention.rollout import rollout
from visattn.methods.from_attention.transition import transition_attention
from visattn.methods.from_features.cam import cam
from visattn.methods.from_features.eigencam import eigencam
from visattn.methods.from_features.pca import pca
from visattn.methods.from_features.similarity import similarity
from visattn.methods.from_gradients.gradcam import gradcam, gradcam_plus_plus, xgradcam
from visattn.methods.from_gradients.hirescam import hirescam, layercam
from visattn.methods.from_gradients.saliency import input_x_gradient, saliency
from visattn.methods.gate_maps import gates
from visattn.methods.glimpse_paths import glimpses
from visattn.methods.queries import SPELLINGS as QUERY_SPELLINGS
from visattn.methods.scored import Scored
from visattn.methods.table import METHODS, Method, method_of

__all__ = [
    "METHODS",
    "QUERY_SPELLINGS",
    "Method",
    "Scored",
    "ablationcam",
    "attention",
    "attention_flow",
    "attention_gradient",
    "cam",
    "compat",
    "eigencam",
    "gates",
    "glimpses",
    "gradcam",
    "gradcam_plus_plus",
    "gradient_rollout",
    "hirescam",
    "input_x_gradient",
    "integrated_gradients",
    "kernel_shap",
    "layercam",
    "legrad",
    "lime",
    "method_of",
    "norm_attention",
    "occlusion",
    "pca",
    "relevance",
    "rollout",
    "saliency",
    "scorecam",
    "similarity",
    "smoothgrad",
    "transition_attention",
    "xgradcam",
]
