"""Recording a forward pass: nothing is changed on the model, and what is hung on it inside the `with` is taken off after."""

from visattn._capture._anatomy import Anatomy, Placement
from visattn._capture._intervene import Attended, Edit, intervene, masked, permuted, scaled
from visattn._capture._owner import module_names
from visattn._capture._record import record
from visattn._capture._tape import forget

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
