"""Whether a map can be trusted: how much of it lies on the object, beside what chance and habit would reach."""

from visattn.evaluation._localisation import centre_prior, lift, shifted_copies

__all__ = ["centre_prior", "lift", "shifted_copies"]
