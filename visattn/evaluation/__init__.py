"""Whether a map can be trusted: how much of it lies on the object, beside what chance and habit would reach."""

from visattn.evaluation._baselines import centre_prior, shifted_copies, smooth_random
from visattn.evaluation._localisation import lift, mass_on
from visattn.evaluation._pointing import pointing_game
from visattn.evaluation._ranking import auroc, average_precision

__all__ = [
    "auroc",
    "average_precision",
    "centre_prior",
    "lift",
    "mass_on",
    "pointing_game",
    "shifted_copies",
    "smooth_random",
]
