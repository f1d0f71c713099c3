"""Recording (`record`) and editing (`interventions`) of attention in forward passes. The model is not modified, and hooks are removed."""

from visattn.core.capturing.description import ModelDescription, Placement
from visattn.core.capturing.recorder import record
from visattn.core.capturing.trace.tape import forget

__all__ = [
    "ModelDescription",
    "Placement",
    "forget",
    "record",
]
