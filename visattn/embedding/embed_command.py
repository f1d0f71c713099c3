"""Command `visattn embed`: queries and keys of every head for the photos in a folder, as one page or as numbers."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from visattn._support.checks import printable
from visattn._support.types import Criterion, Layout
from visattn._support.untrusted import check_own_folder
from visattn._support.whole_files import check_output
from visattn.core.command_line.late import Command
from visattn.core.command_line.number_lists import numbers_of
from visattn.core.command_line.shared_options import (
    files_read,
    model_options,
    output_options,
    photo_options,
    preparing,
    reading,
    refuse_beside,
)
from visattn.core.command_line.talk import describe, note, result
from visattn.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL import Image

    from visattn.batch import Item
    from visattn.embedding import Space

_SUFFIXES = ".html", ".htm", ".npz"
_STATES = ".states"  # ending of the folder from which an interrupted run goes on
_PLACES = "first", "second"  # folders in it, one for each model
MAX_MB = 60.0  # repeated from `visattn.viewer.page`, which imports torch
_DIMENSIONS = "2", "3"
_OF_IMAGES = "groups", "labels", "masks", "texts"  # options of `gather` that have an entry for each image


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
    help="Patches shown for each head, over all images.",
)
@click.option(
    "--crops", type=click.IntRange(0), default=0, show_default=True, help="Random crops of each image besides the image itself."
)
@click.option("--compare", help="A second model, whose heads are shown beside those of the first.")
@click.option(
    "--compare-weights", default="auto", show_default=True, help="Weights of the second model, such as another checkpoint."
)
@click.option("--masks", type=click.Path(path_type=Path), help="Mask of an object for each image: a folder with the same names.")
@click.option(
    "--texts",
    type=click.Path(path_type=Path),
    help="Text of each image, for a model such as CLIP: a folder with NAME.txt for each. Words are then shown beside patches.",
)
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
    if options["masks"]:
        refuse_beside("--masks", ("crops",))
    if not options["compare"]:
        refuse_beside("one model", ("compare_weights",))
    check_output(target, overwrite=overwrite, inputs=[*images, *files_read(options)])
    heads = numbers_of(options["heads"])
    from visattn.batch import apart, items_of, masks_of, texts_of
    from visattn.embedding import save_html, save_npz
    from visattn.embedding.keeping import continuing
    from visattn.embedding.saving import laid_out

    items = items_of(images, but=apart(images, options["masks"]))
    photos = _cropped(items, options)
    told = {**preparing(options), **{name: options[name] for name in ("layers", "points", "seed")}}
    told["groups"] = [number for number in range(len(items)) for _ in range(1 + options["crops"])]
    labels = [item.path.parent.name for item in items]
    if len(set(labels)) > 1:
        told["labels"] = [labels[number] for number in told["groups"]]
    if options["texts"]:
        texts = texts_of(items, options["texts"])
        told["texts"] = [texts[number] for number in told["groups"]]
    if options["masks"]:
        told["masks"] = masks_of(items, options["masks"])
    states = target.with_name(target.name + _STATES)
    check_own_folder(states)
    how: Any = {"method": options["layout"], "dimensions": int(options["dimensions"]), "criterion": options["criterion"]}
    how |= {"heads": heads, "seed": options["seed"]}
    with continuing(states, _PLACES) as places:
        space, *others = [
            _gathered(name, weights, options, photos, heads, {**told, "keep": place})
            for name, weights, place in (
                (options["model"], options["weights"], places[0]),
                (options["compare"], options["compare_weights"], places[1]),
            )
            if name
        ]
        if target.suffix.lower() == ".npz":
            save_npz(space, target, overwrite=True, **how)
        else:
            save_html(space, target, compare=next(iter(others), None), overwrite=True, max_mb=options["max_mb"], **how)
    shown = laid_out(space, how)
    result(as_json, [(target, shown)])
    describe(quiet, shown)
    note(quiet, f"{target}: {target.stat().st_size / 1e6:.1f} MB")


def _named(target: Path) -> Path:
    """Return the file to write, after checking its ending."""
    if target.suffix.lower() not in _SUFFIXES:
        raise OptionError(f"{printable(target.name)}: a page is .html, and points .npz. Choose a name with one of these endings.")
    return target


def _cropped(items: Sequence[Item], options: dict[str, Any]) -> Sequence[Image.Image]:
    """Return the photos, each followed by its random crops. One photo is in memory at a time."""
    from visattn._support.lazily import Lazily
    from visattn.embedding.crops import crops_of

    each = 1 + options["crops"]

    @lru_cache(1)
    def own(number: int) -> list[Image.Image]:
        photo = items[number].photo(**reading(options))
        return [photo, *crops_of(photo, options["crops"], seed=options["seed"] + number)]

    return Lazily(each * len(items), lambda at: own(at // each)[at % each])


def _gathered(
    name: str,
    weights: str,
    options: dict[str, Any],
    photos: Sequence[Image.Image],
    heads: Sequence[int] | None,
    told: dict[str, Any],
) -> Space:
    """Gather the photos with one model; a wrong head is told after the first one."""
    from visattn.core.loading import load_model
    from visattn.embedding import gather

    model = load_model(name, weights=weights, **{key: options[key] for key in ("seed", "img_size", "device")})
    if heads is not None:
        one = {key: value[:1] if key in _OF_IMAGES else value for key, value in told.items() if key != "keep"}
        for states in gather(model, photos[:1], **one).layers:
            for head in heads:
                states.head(head)
    return gather(model, photos, **told)
