"""Command `visattn evaluate`: how well maps of photos tell what a score depends on, beside maps that know nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from visattn._support.checks import printable
from visattn._support.files import is_folder
from visattn._support.tables import to_csv, to_json, to_text, without_nan
from visattn._support.types import LARGEST_BATCH
from visattn._support.whole_files import write_whole
from visattn.core.command_line.each import Each
from visattn.core.command_line.late import Command
from visattn.core.command_line.run_folders import prepared_folder
from visattn.core.command_line.shared_options import (
    model_options,
    photo_options,
    preparing,
    reading,
    talk_options,
    target_options,
)
from visattn.core.command_line.talk import note
from visattn.errors import OptionError, OutputError, UnsupportedModel, VisattnError
from visattn.evaluation.choices import By, LocatedName, MetricName, Replacement

if TYPE_CHECKING:
    from visattn.evaluation import Evaluator

_JOURNAL, _TABLE, _WHOLE, _PAGE = "evaluation.jsonl", "evaluation.csv", "evaluation.json", "evaluation.html"
_SHOWN = "metric", "better", "map", "photos", "value", "beaten"


@click.command("evaluate", cls=Command)
@click.argument("photos", nargs=-1, required=True)
@model_options
@click.option("--methods", default="auto", show_default=True, help="Methods, separated by commas.")
@click.option(
    "--maps",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Folder of maps of other origin, named like the photos; repeat it.",
)
@click.option("--masks", type=click.Path(path_type=Path), help="Folder of object masks, named like the photos.")
@click.option(
    "--metrics",
    default="deletion,insertion,saco",
    show_default=True,
    help=f"Metrics, separated by commas: {', '.join(get_args(MetricName))}; with --masks also {', '.join(get_args(LocatedName))}.",
)
@click.option(
    "--nulls",
    type=click.IntRange(0),
    default=5,
    show_default=True,
    help="Shifted copies, and maps of noise, for each map; 0: no nulls.",
)
@click.option("--steps", type=click.IntRange(1), default=32, show_default=True, help="Steps of deletion and insertion.")
@click.option(
    "--by",
    type=click.Choice(get_args(By)),
    default="pixels",
    show_default=True,
    help="What is removed: pixels, or cells of a map.",
)
@click.option(
    "--baseline",
    type=click.Choice(get_args(Replacement)),
    help="What replaces pixels; by default that of each metric.",
)
@click.option(
    "--batch-size", type=click.IntRange(1, LARGEST_BATCH), default=32, show_default=True, help="Changed inputs in a batch."
)
@target_options
@photo_options
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("evaluation"), show_default=True, help="Folder to write to."
)
@click.option("--overwrite", is_flag=True, help="Forget the results of an earlier run.")
@talk_options
def evaluate_command(
    photos: tuple[str, ...],
    methods: str,
    maps: tuple[Path, ...],
    masks: Path | None,
    metrics: str,
    output: Path,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    debug: bool,
    **options: Any,  # noqa: ANN401 - click's
) -> int:
    """Measure how well maps tell what the model's score depends on, each beside maps that know nothing.

    PHOTOS are files or folders. A run that was interrupted goes on where it stopped.

    \b
    visattn evaluate photos --model resnet50 --methods gradcam,layercam
    visattn evaluate photos --model resnet50 --methods "" --maps my_maps
    """  # noqa: D301 - \b keeps click from wrapping the examples
    sources = _sources(photos, output)
    if maps or masks is not None:
        _check_names(sources)
    journal = prepared_folder(output, _JOURNAL)
    evaluator = _evaluator(methods, maps, metrics, masks, journal, overwrite, options)
    each = Each(True, debug, fatal=(UnsupportedModel, OptionError, OutputError))
    _measure(evaluator, sources, maps, masks, each, quiet, options)
    if not evaluator.numbers:
        return each.exit_code(0)
    from visattn.evaluation.evaluation_page import evaluation_page

    rows = evaluator.evaluation.rows()
    whole: dict[str, Any] = {
        "model": evaluator.provenance.model,
        "weights": evaluator.provenance.weights,
        "rows": without_nan(rows),
        "numbers": [without_nan({"map": one.map, **vars(one)}) for one in evaluator.numbers],
    }
    page = evaluation_page(evaluator.evaluation, whole["model"], whole["weights"], evaluator.how)
    written = [
        write_whole(output / _TABLE, to_csv(rows).encode()),
        write_whole(output / _WHOLE, to_json(whole).encode()),
        write_whole(output / _PAGE, page.encode()),
    ]
    for text in dict.fromkeys(f"{one.map} is left out: {one.left_out}" for one in evaluator.numbers if one.left_out):
        note(quiet, text)
    shown = to_text([{name: row[name] for name in _SHOWN} for row in rows])
    click.echo(to_json({"output": [printable(str(path)) for path in written], **whole}) if as_json else shown)
    note(quiet, *(f"wrote {path}" for path in written))
    measured = sum(not one.left_out for one in evaluator.numbers)
    return each.exit_code(measured) if measured else VisattnError.exit_code


def _sources(photos: tuple[str, ...], output: Path) -> list[str]:
    """Return the photos, those in folders too.

    Raises:
        OptionError: If a folder holds none.
    """
    from visattn.core.images.image_folders import photos_in

    sources = list[str]()
    for name in photos:
        if not is_folder(Path(name)):
            sources.append(name)
            continue
        paths, refused = photos_in(Path(name), output)
        if refused or not paths:
            raise OptionError(f"{printable(name)}: a folder without photos that can be read. Pass another folder.")
        sources += map(str, paths)
    return sources


def _check_names(sources: list[str]) -> None:
    """Raise OptionError if two photos have one name, by which their maps and masks are found."""
    names = Counter(Path(source).stem for source in sources)
    name, count = names.most_common(1)[0]
    if count > 1:
        raise OptionError(f"{count} photos are called {printable(name)}, so their maps cannot be told apart. Rename them.")


def _evaluator(
    methods: str,
    maps: tuple[Path, ...],
    metrics: str,
    masks: Path | None,
    journal: Path,
    overwrite: bool,
    options: dict[str, Any],
) -> Evaluator:
    from visattn.evaluation import Evaluator, Protocol
    from visattn.evaluation.stored_maps import name_of

    how = Protocol(**{name: options[name] for name in ("steps", "by", "batch_size", "seed", "nulls", "baseline")})
    asked = {name: options[name] for name in ("versus", "prompt", "task") if options[name] is not None}
    context = click.get_current_context()
    if context.get_parameter_source("target_space") is click.core.ParameterSource.COMMANDLINE:
        asked["target_space"] = options["target_space"]
    if options["labels"] is not None:
        from visattn.core.pipeline.label_files import read_labels

        asked["labels"] = read_labels(options["labels"])
    return Evaluator(
        options["model"],
        _list(methods),
        [name_of(folder) for folder in maps],
        _list(metrics),
        how,
        masked=masks is not None,
        journal=journal,
        anew=overwrite,
        target=options["target"],
        weights=options["weights"],
        device=options["device"],
        **asked,
        **preparing(options),
        **reading(options),
    )


def _measure(
    evaluator: Evaluator,
    sources: list[str],
    maps: tuple[Path, ...],
    masks: Path | None,
    each: Each,
    quiet: bool,
    options: dict[str, Any],
) -> None:
    from tqdm import tqdm

    from visattn.core.images.sources import load_image
    from visattn.evaluation.stored_maps import MAPS, MASKS, map_of, mask_of, name_of, stored

    for place, source in enumerate(tqdm(sources, unit="photo", disable=True if quiet else None)):
        with each.photo(Path(source)):
            photo = Path(source)
            own = {name_of(folder): map_of(stored(photo, folder, MAPS)) for folder in maps}
            mask = None if masks is None else mask_of(stored(photo, masks, MASKS))
            evaluator.add(load_image(source, **reading(options)), own, mask, place)


def _list(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
