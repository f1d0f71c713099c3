"""Methods that run the model again: each takes one more argument.

`replay(edit)` runs the model on the same pixels after `edit` and gives the recording with the gradient of the target's score. `scored`
is a `Scored`: the pixels, and the target's score of any others; these methods need no attention, two of them features of a layer.
"""

from visattn.methods.replayed._cam import ablationcam, scorecam
from visattn.methods.replayed._captum import (
    integrated_gradients,
    kernel_shap,
    lime,
    occlusion,
    smoothgrad,
)
from visattn.methods.replayed._saliency import input_x_gradient, saliency
from visattn.methods.replayed._scored import Scored
from visattn.methods.replayed._transition import transition_attention

__all__ = [
    "Scored",
    "ablationcam",
    "input_x_gradient",
    "integrated_gradients",
    "kernel_shap",
    "lime",
    "occlusion",
    "saliency",
    "scorecam",
    "smoothgrad",
    "transition_attention",
]
