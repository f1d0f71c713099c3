"""Cosine similarity of position embeddings."""

from __future__ import annotations

import torch.nn.functional as F

from visattn._support.language import worded
from visattn._support.modes import in_own_modes
from visattn.core.maps import AttentionMap, MapFacts
from visattn.core.methods.method import Method, needs
from visattn.core.methods.queries import named, token_of
from visattn.core.methods.result import to_map
from visattn.core.methods.selection import one_forward
from visattn.core.records import Recording
from visattn.errors import OptionError

NO_POSITIONS = (
    "no single table of positions, with a row for each token, was found among what is added to the tokens before the first attention: the "
    "model may add several, rotate queries and keys, bias scores, or tell positions by convolutions"
)


@in_own_modes
def positions(recording: Recording, *, query: str = "auto") -> AttentionMap:
    """Compute the cosine similarity between the position embedding of one token and those of all patches.

    The embedding is the parameter, or the fixed table, that the model adds to its tokens. It does not depend on the image.

    Args:
        recording: Recording with `capture(model, features="positions")`.
        query: Token to compare: `patch:ROW,COL`, `cls` or `register:N`; for photos also `pixel:X,Y`. `auto` is the patch in the middle.

    Returns:
        Map with the axis `batch` of length 1; values in [-1, 1], with 1 at the query patch itself.

    Raises:
        OptionError: If the model adds no such table, or has no such token.

    Reference:
        Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021, arXiv:2010.11929, figure 7.
    """
    found = next((one for one in one_forward(recording).features if one.role == "positions"), None)
    if found is None or found.layout is None:
        raise OptionError(_refused())
    layout = found.layout
    rows, columns = layout.grid
    chosen = f"patch:{rows // 2},{columns // 2}" if query == "auto" else named(query, layout)
    unit = F.normalize(found.value.double(), dim=-1)
    cosine = (unit @ unit[0, token_of(chosen, layout)]).clamp(-1, 1).float()  # (1, N)
    parameters = {"query": chosen, "layer": found.layer}
    return to_map(
        recording, "positions", "cosine similarity of positions", cosine, layout, parameters, facts=MapFacts(interval=True)
    )


def refusal(recording: Recording) -> str | None:
    """Return why there are no position embeddings to compare, or None if there are."""
    return None if any(feature.role == "positions" for feature in recording.features) else _refused()


def _refused() -> str:
    """Return why there are none, and in the shell what draws the model's attention instead."""
    return f"{NO_POSITIONS}.{worded('', ' visattn inspect MODEL --positions FILE draws what these do.')}"


METHODS = {
    "positions": Method(function=positions, needs=needs("positions"), accepts=refusal, lacking=f"{NO_POSITIONS}."),
}
