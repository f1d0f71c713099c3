"""Recording and editing of attention during forward passes. The model is not modified; hooks are removed when the `with` block ends."""

from visattn.core.capturing.description import ModelDescription, Placement
from visattn.core.capturing.intercept.owners import module_names
from visattn.core.capturing.interventions import AttentionCall, Edit, intervene, masked, permuted, scaled
from visattn.core.capturing.recording import record
from visattn.core.capturing.trace.tape import forget

__all__ = [
    "AttentionCall",
    "Edit",
    "ModelDescription",
    "Placement",
    "forget",
    "intervene",
    "masked",
    "module_names",
    "permuted",
    "record",
    "scaled",
]
