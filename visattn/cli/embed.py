"""Command `visattn embed`: queries and keys of every head for the photos in a folder, as one page or as numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from visattn._support.checks import printable
from visattn._support.files import check_output
from visattn._support.types import Criterion, Layout
from visattn.cli.late import Command
from visattn.cli.numbers import numbers_of
from visattn.cli.options import files_read, model_options, output_options, photo_options, preparing, reading, refuse_beside
from visattn.cli.talk import describe, note, result
from visattn.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL import Image

_SUFFIXES = ".html", ".htm", ".npz"
_STATES = ".states"  # ending of the folder from which an interrupted run goes on
MAX_MB = 60.0  # repeated from `visattn.viewer.page`, which imports torch
_DIMENSIONS = "2", "3"


@click.command("embed", cls=Command)
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path))
@model_options
@click.option("--layers", default="*", show_default=True, help="Glob of the layers, such as 'blocks.1*'.")
@click.option("--heads", help="Numbers of the heads, such as 0,3-5.  [default: all]")
@click.option("--layout", type=click.Choice(get_args(Layout)), default="pca", show_default=True, help="Layout of the points.")
@click.option("--dimensions", type=click.Choice(_DIMENSIONS), default="2", show_default=True, help="Dimensions of the layout.")
@click.option(
    "--criterion",
    type=click.Choice(get_args(Criterion)),
    default="norms",
    show_default=True,
    help="Choice of the scale of queries and keys: equal median norms, or one of the two of AttentionViz.",
)
@click.option(
    "--points",
    type=click.IntRange(1),
    default=700,
    show_default=True,
    help="Patches that each head draws, over all images.",
)
@click.option(
    "--crops", type=click.IntRange(0), default=0, show_default=True, help="Random crops of each image besides the image itself."
)
@click.option("--compare", help="A second model, whose heads are shown beside those of the first.")
@click.option(
    "--compare-weights", default="auto", show_default=True, help="Weights of the second model, such as another checkpoint."
)
@click.option("--masks", type=click.Path(path_type=Path), help="Mask of an object for each image: a folder with the same names.")
@click.option("--max-mb", type=click.FloatRange(0.1), default=MAX_MB, show_default=True, help="Largest size of the page in MB.")
@photo_options
@output_options
def embed_command(
    images: tuple[Path, ...],
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    debug: bool,
    **options: Any,  # noqa: ANN401 - click's
) -> None:
    """Put queries and keys of every head into one space, over IMAGES or the photos in a folder, and write a page: open it in a browser.

    In that space, a query lies close to the keys that it attends to (AttentionViz). With -o NAME.npz, the points are written as numbers.
    A run that is interrupted goes on if the same command is run again.

    \b
    visattn embed photos -o space.html
    visattn embed photos --layers 'blocks.11.*' --layout tsne -o last.html
    visattn embed photos --compare deit_small_patch16_224 -o two.html
    visattn embed photos -o space.npz
    """  # noqa: D301 - \b keeps click from wrapping the examples
    target = _named(output or Path("space.html"))
    if target.suffix.lower() == ".npz":
        refuse_beside("-o NAME.npz", ("compare", "max_mb"))
    if not options["compare"]:
        refuse_beside("one model", ("compare_weights",))
    check_output(target, overwrite=overwrite, inputs=[*images, *files_read(options)])
    numbers_of(options["heads"])  # raises before any file is read
    from visattn.batch import items_of
    from visattn.embedding import gather, save_html, save_npz
    from visattn.embedding.gathering import forget

    paths = [item.path for item in items_of(images)]
    labels = [path.parent.name for path in paths]
    photos, groups = _cropped(paths, options)
    masks = None
    if options["masks"]:
        from visattn.cli.masks import masks_of

        refuse_beside("--masks", ("crops",))
        masks = masks_of(paths, options["masks"])
    states = target.with_name(target.name + _STATES)
    told = {
        "layers": options["layers"],
        "points": options["points"],
        "masks": masks,
        "labels": [labels[group] for group in groups] if len(set(labels)) > 1 else None,
        "groups": groups,
        **{name: options[name] for name in ("seed", "device")},
        **preparing(options),
    }
    space = gather(options["model"], photos, weights=options["weights"], keep=states / "first", **told)
    other = None
    if options["compare"]:
        other = gather(options["compare"], photos, weights=options["compare_weights"], keep=states / "second", **told)
    how = {"method": options["layout"], "dimensions": int(options["dimensions"]), "criterion": options["criterion"]}
    made: dict[str, Any] = {**how, "heads": numbers_of(options["heads"]), "seed": options["seed"]}
    if target.suffix.lower() == ".npz":
        save_npz(space, target, overwrite=True, **made)
    else:
        save_html(space, target, compare=other, overwrite=True, max_mb=options["max_mb"], **made)
    for kept in (states / "first", states / "second", states):
        forget(kept)
    shown = space.provenance.but(parameters={**how, "points": options["points"]})
    describe(quiet, shown)
    note(quiet, f"{target}: {target.stat().st_size / 1e6:.1f} MB")
    result(as_json, [(target, shown)])


def _named(target: Path) -> Path:
    """Return the file to write, after checking its ending."""
    if target.suffix.lower() not in _SUFFIXES:
        raise OptionError(f"{printable(target.name)}: a page is .html, and points .npz. Choose a name with one of these endings.")
    return target


def _cropped(paths: Sequence[Path], options: dict[str, Any]) -> tuple[list[Image.Image], list[int]]:
    """Load the photos, each followed by its random crops, and return the photo of each image."""
    from visattn.data.sources import load_image
    from visattn.embedding.crops import crops_of

    photos: list[Image.Image] = []
    groups: list[int] = []
    for number, path in enumerate(paths):
        photo = load_image(path, **reading(options))
        own = [photo, *crops_of(photo, options["crops"], seed=options["seed"] + number)]
        photos += own
        groups += [number] * len(own)
    return photos, groups
