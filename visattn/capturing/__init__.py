"""Recording a forward pass: nothing is changed on the model, and what is hung on it inside the `with` is taken off after."""

from visattn.capturing.description import Anatomy, Placement
from visattn.capturing.intercept.owners import module_names
from visattn.capturing.interventions import Attended, Edit, intervene, masked, permuted, scaled
from visattn.capturing.recording import record
from visattn.capturing.trace.tape import forget

__all__ = [
    "Anatomy",
    "Attended",
    "Edit",
    "Placement",
    "forget",
    "intervene",
    "masked",
    "module_names",
    "permuted",
    "record",
    "scaled",
]
