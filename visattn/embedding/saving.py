"""Files of a space: the page, and points as numbers."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from visattn._support.options import with_options
from visattn._support.tables import Row, without_nan
from visattn._support.typed import typed
from visattn._support.whole_files import check_output, write_whole
from visattn.core.provenance import Provenance
from visattn.embedding.dimensions import Laid, lay_out, lay_out_images
from visattn.embedding.numbers_of_heads import head_numbers
from visattn.embedding.space import Space
from visattn.embedding.space_page import space_html
from visattn.embedding.space_payload import Part
from visattn.errors import OptionError
from visattn.viewer import MAX_MB


@with_options(Laid)
@typed()
def save_html(
    space: Space,
    path: str | os.PathLike[str],
    *,
    compare: Space | None = None,
    overwrite: bool = True,
    max_mb: float = MAX_MB,
    **how: Unpack[Laid],
) -> Path:
    """Write the page of a space. It refers to nothing outside of itself.

    Args:
        space: Queries and keys, from `gather`.
        path: File to write.
        compare: Another space of the same images, of another model or other weights, to show beside it. If both have the same grid of
            patches, a token that is chosen in one is chosen in the other.
        overwrite: Whether a file may be replaced.
        max_mb: Largest size of the page in MB.
        how: Options of `lay_out`.

    Returns:
        The path.

    Raises:
        OptionError: If an option is out of range, the spaces have other images, or the page exceeds `max_mb`.
        OutputError: If the file exists and `overwrite` is false, or if it cannot be written.
        MissingExtra: If the layout needs a library that is not installed.
    """
    target = check_output(Path(path), overwrite=overwrite)
    spaces = [space] if compare is None else [space, compare]
    if compare is not None and compare.digests != space.digests:
        raise OptionError("spaces that are compared must have the same images in the same order. Gather both from one list.")
    method, seed = how.get("method", "pca"), how.get("seed", 0)
    parts = [Part(one, lay_out(one, **how), _numbers(one, how), lay_out_images(one, method, seed=seed)) for one in spaces]
    criterion = how.get("criterion", "norms")
    return write_whole(target, space_html(parts, method=method, criterion=criterion, max_mb=max_mb).encode())


@with_options(Laid)
@typed()
def save_npz(space: Space, path: str | os.PathLike[str], *, overwrite: bool = True, **how: Unpack[Laid]) -> Path:
    """Write the points of a space as an NPZ file, which numpy.load reads without pickles.

    For the layer at place `L` of the file: `L/queries` and `L/keys` `(heads, S, dimensions)`; of the tokens `L/image`, `L/row`, `L/column`
    (-1 without a place), `L/sink` and `L/object` `(S,)`, and `L/color` `(S, 3)`; `L/factors` `(heads,)` and `L/shares`
    `(heads, dimensions)`. `facts` is JSON with the layers, the names of the images, the numbers of the heads, their scores by property,
    and the provenance. A layer has its name, and if its tokens are words, those of each image's text. Stored activations can be inverted
    to images.

    Args:
        space: Queries and keys, from `gather`.
        path: File to write.
        overwrite: Whether a file may be replaced.
        how: Options of `lay_out`.

    Returns:
        The path.

    Raises:
        OptionError: If an option is out of range.
        OutputError: If the file exists and `overwrite` is false, or if it cannot be written.
        MissingExtra: If the layout needs a library that is not installed.
    """
    target = check_output(Path(path), overwrite=overwrite)
    arrays: dict[str, Any] = {}
    for number, (states, one) in enumerate(zip(space.layers, lay_out(space, **how), strict=True)):
        arrays |= {f"{number}/{key}": getattr(one, key).numpy() for key in ("queries", "keys", "shares", "factors")}
        for key in ("image", "row", "column", "sink", "color", "object"):
            arrays[f"{number}/{key}"] = getattr(states.tokens, key)[states.some].numpy()
    facts = {
        "layers": [
            {"name": states.layer, "number": states.number, "notes": states.notes, "words": states.tokens.words}
            for states in space.layers
        ],
        "images": space.images,
        "labels": space.labels,
        "groups": space.groups,
        "numbers": [dict(row) for row in _numbers(space, how)],
        "scores": {scores.name: [dict(row) for row in scores.rows()] for scores in space.scores},
        "provenance": laid_out(space, how).to_dict(),
    }
    stream = io.BytesIO()
    np.savez_compressed(stream, facts=np.array(json.dumps(without_nan(facts), allow_nan=False)), **arrays)
    return write_whole(target, stream.getvalue())


def laid_out(space: Space, how: Laid) -> Provenance:
    """Return the provenance of a space whose points were laid out with these options of `lay_out`."""
    told = {"method": "pca", "dimensions": 2, "criterion": "norms", **how}
    return space.provenance.with_parameters({key: value for key, value in told.items() if value is not None})


def _numbers(space: Space, how: Laid) -> list[Row]:
    return head_numbers(space, how.get("criterion", "norms"), heads=how.get("heads"), seed=how.get("seed", 0))
