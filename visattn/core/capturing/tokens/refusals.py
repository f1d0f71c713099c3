"""Reasons for which an attention call is not located in the image."""

from __future__ import annotations

from visattn.core.capturing.tokens.points import Drift


class Unplaced(Exception):
    """Error: a call cannot be located in the image. The message is the reason.

    Attributes:
        of_places: Whether the reason is where the tokens lie, which may be because they mix several places.
        drift: How far values were read from their tokens, if this is the reason.
    """

    def __init__(self, reason: str, *, of_places: bool = False, drift: Drift | None = None) -> None:
        """Store the reason."""
        super().__init__(reason)
        self.of_places, self.drift = of_places, drift


class WithoutImage(Unplaced):
    """Error: no token comes from the image."""
