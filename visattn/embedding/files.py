"""Points of a space as a NumPy file."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from visattn._support.files import check_output, write_whole
from visattn.embedding.space import Projection, Space

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from visattn._support.tables import Row


def save_points(
    path: str | os.PathLike[str],
    space: Space,
    points: Sequence[Projection],
    numbers: Sequence[Row] = (),
    *,
    overwrite: bool = False,
) -> Path:
    """Write the points of `lay_out` as an NPZ file, which numpy.load reads without pickles.

    For layer `L` (its number): `L/queries` and `L/keys` `(heads, S, dimensions)`; `L/query_*` and `L/key_*` `(S,)` for `image`, `row`,
    `column` (-1 without a place), `sink`; `L/query_color` `(S, 3)` and `L/query_object`; `L/factors` and `L/shares`. `facts` is JSON with
    the names of layers and images, the numbers of the heads, and the provenance.

    Args:
        path: File to write.
        space: Queries and keys.
        points: Points of the drawn tokens.
        numbers: Rows of `head_numbers`.
        overwrite: Whether a file may be replaced.

    Returns:
        The path.

    Raises:
        OutputError: If the file exists, or cannot be written.
    """
    target = check_output(Path(path), overwrite=overwrite)
    arrays: dict[str, NDArray[Any]] = {}
    for number, (states, one) in enumerate(zip(space.layers, points, strict=True)):
        arrays |= {f"{number}/{key}": getattr(one, key).numpy() for key in ("queries", "keys", "shares", "factors")}
        for side, tokens, some in (("query", states.of_queries, states.some), ("key", states.of_keys, states.some_keys)):
            arrays |= {f"{number}/{side}_{key}": getattr(tokens, key)[some].numpy() for key in ("image", "row", "column", "sink")}
        arrays |= {f"{number}/query_{key}": getattr(states.of_queries, key)[states.some].numpy() for key in ("color", "object")}
    facts = {
        "layers": [{"name": states.layer, "notes": states.notes} for states in space.layers],
        "images": space.images,
        "labels": space.labels,
        "groups": space.groups,
        "numbers": [dict(row) for row in numbers],
        "provenance": space.provenance.to_dict(),
    }
    stream = io.BytesIO()
    np.savez_compressed(stream, facts=np.array(json.dumps(facts)), allow_pickle=False, **arrays)
    return write_whole(target, stream.getvalue())
