"""Methods: functions from a recording to a map on the token grid. No model in them, and no picture.

`METHODS` is the one table that explain, the command line, `inspect` and the messages of refusal read.
"""

from visattn.methods import compat, diagnostics, replayed
from visattn.methods._attention import attention
from visattn.methods._cam import cam
from visattn.methods._eigencam import eigencam
from visattn.methods._flow import attention_flow
from visattn.methods._gates import gates
from visattn.methods._glimpses import glimpses
from visattn.methods._gradcam import gradcam, gradcam_plus_plus, xgradcam
from visattn.methods._gradient import attention_gradient, gradient_rollout
from visattn.methods._hirescam import hirescam, layercam
from visattn.methods._legrad import legrad
from visattn.methods._norm import norm_attention
from visattn.methods._pca import pca
from visattn.methods._query import SPELLINGS as QUERY_SPELLINGS
from visattn.methods._relevance import relevance
from visattn.methods._rollout import rollout
from visattn.methods._similarity import similarity
from visattn.methods._table import METHODS, Method, method_of

__all__ = [
    "METHODS",
    "QUERY_SPELLINGS",
    "Method",
    "attention",
    "attention_flow",
    "attention_gradient",
    "cam",
    "compat",
    "diagnostics",
    "eigencam",
    "gates",
    "glimpses",
    "gradcam",
    "gradcam_plus_plus",
    "gradient_rollout",
    "hirescam",
    "layercam",
    "legrad",
    "method_of",
    "norm_attention",
    "pca",
    "relevance",
    "replayed",
    "rollout",
    "similarity",
    "xgradcam",
]
