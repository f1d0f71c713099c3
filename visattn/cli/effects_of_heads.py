"""What `visattn heads` prints and draws of the effects of heads on a score: direct contributions, and shares of another photo's score."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visattn.core.command_line.shared_options import preparing, reading

if TYPE_CHECKING:
    from PIL import Image

    from visattn.evaluation import HeadEffects, PatchedHeads

TARGET = ("target", "versus", "target_space", "labels", "prompt", "task")
FIGURES = ("method", "layer", "head", "query", "by_layer", "matrix", "steps", "stats", "mass", "shared_scale", "panel")


def contributed(image: Path, options: dict[str, Any]) -> tuple[HeadEffects, Callable[[], Image.Image]]:
    """Return what each head adds directly to a score, over a photo or a folder, and a function that draws it."""
    from visattn.batch import items_of
    from visattn.core.drawing.head_tables import head_table
    from visattn.evaluation import head_effects

    photos = [item.photo(**reading(options)) for item in items_of([image])]
    found = head_effects(options["model"], photos, **_given(options))

    def page() -> Image.Image:
        rows = [row for row in found.rows() if row["head"] is not None]
        numbers = {(str(row["layer"]), int(row["head"])): float(row["direct"]) for row in rows}
        notes = ["Direct contributions, in units of the score." if len(photos) == 1 else f"Means over {len(photos)} photos."]
        marked = [key for key, row in zip(numbers, rows, strict=True) if row["opposite"]]
        notes += ["*: without this head the score changes the other way, as later layers make up for it."] if marked else []
        return head_table(numbers, meaning="direct contribution", title=found.provenance.title, notes=notes, marked=marked)

    return found, page


def recovered(image: Path, options: dict[str, Any]) -> tuple[PatchedHeads, Callable[[], Image.Image]]:
    """Return which share of another photo's score each head brings with it, and a function that draws it."""
    from visattn.core.drawing.head_tables import head_table
    from visattn.core.images.sources import load_image
    from visattn.evaluation import patched_heads

    photo, donor = (load_image(source, **reading(options)) for source in (image, options["donor"]))
    found = patched_heads(options["model"], photo, donor, **_given(options))

    def page() -> Image.Image:
        told = f"Score {found.score:.4g}, of {found.donor} {found.of_donor:.4g}"
        notes = (f"{told}: share of the difference that follows each head of {found.donor}.",)
        return head_table(found.shares, meaning="recovered share", title=found.provenance.title, notes=notes)

    return found, page


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the model, the target and the preprocessing."""
    from visattn.core.pipeline.label_files import read_labels

    given = {name: options[name] for name in ("weights", "seed", "device", *TARGET)}
    given["labels"] = None if options["labels"] is None else read_labels(options["labels"])
    return given | preparing(options)
