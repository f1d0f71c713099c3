"""Command `visattn stats`: statistics of every head of a model over a folder of photos."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from visattn._support.checks import printable
from visattn._support.files import base_name, exists, is_folder
from visattn._support.tables import STATISTICS, to_json
from visattn._support.whole_files import check_folder, write_folder_whole
from visattn.core.command_line.each import Each
from visattn.core.command_line.faults import complain
from visattn.core.command_line.late import Command
from visattn.core.command_line.shared_options import model_options, photo_options, preparing, talk_options
from visattn.core.command_line.talk import describe
from visattn.errors import ImageError, NoAttentionCaptured, OptionError, UnsupportedModel, VisattnError

if TYPE_CHECKING:
    pass


@click.command("stats", cls=Command)
@click.argument("folder", type=click.Path(path_type=Path))
@model_options
@click.option("--limit", type=click.IntRange(1), help="Use only this many photos, evenly spaced among the sorted names.")
@photo_options
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("stats"), show_default=True, help="Folder to write to."
)
@click.option("--overwrite", is_flag=True, help="Replace the folder of an earlier run.")
@talk_options
def stats_command(
    folder: Path,
    output: Path,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    debug: bool,
    limit: int | None,
    **options: Any,  # noqa: ANN401 - click's
) -> int:
    """Compute statistics of every head of a model over the photos in FOLDER, and write tables and plots.

    \b
    visattn stats photos
    visattn stats photos --limit 200 -o stats_dinov2
    """  # noqa: D301 - \b keeps click from wrapping the examples
    from visattn.evaluation.survey_output import survey_files

    check_folder(output, STATISTICS, overwrite=overwrite)
    paths, failed = _photos(folder, output)
    if limit is not None and limit < len(paths):
        paths = [paths[i * len(paths) // limit] for i in range(limit)]
    each = Each(True, debug, fatal=(UnsupportedModel, NoAttentionCaptured, OptionError))
    survey = _survey(folder, paths, each, quiet, options)
    if survey is None:
        return each.exit_code(0)
    provenance = survey.provenance(printable(base_name(str(folder))))
    content = survey_files(survey, provenance, quiet)
    written = [printable(str(path)) for path in write_folder_whole(output, content, STATISTICS)]
    describe(quiet, provenance)
    whole = json.loads(content["stats.json"])
    click.echo(to_json({"output": written, **whole}) if as_json else "\n".join(written))
    return each.exit_code(len(survey.photos)) or (VisattnError.exit_code if failed else 0)


def _photos(folder: Path, output: Path) -> tuple[list[Path], int]:
    """Return the sorted image files in a folder and its subfolders, and the number of unreadable folders.

    Images are recognized by their file extension. Hidden files and folders and the output folder are skipped.

    Raises:
        ImageError: If the folder does not exist or contains no image files.
    """
    from visattn.core.images import FORMATS
    from visattn.core.images.image_folders import photos_in

    name = printable(str(folder))
    if not is_folder(folder):
        cause = "a file, not a folder; pass the folder that contains it" if exists(folder) else "no such folder; check the path"
        raise ImageError(f"{name}: {cause}")
    found, refused = photos_in(folder, output)
    for error in refused:
        complain(
            f"{printable(str(error.filename))}: cannot be read ({(error.strerror or str(error)).lower()}); check its permissions"
        )
    if not found:
        raise ImageError(
            f"{name}: no visible photos ({', '.join(FORMATS)}) in this folder or its subfolders; pass another folder"
        )
    return found, len(refused)


def _survey(folder: Path, paths: list[Path], each: Each, quiet: bool, options: dict[str, Any]) -> Any:  # noqa: ANN401
    """Compute the statistics over all usable photos; None if there is none."""
    from tqdm import tqdm

    from visattn.core.loading import load_model
    from visattn.evaluation.survey import Survey

    def beside_the_bar(text: str) -> None:
        with tqdm.external_write_mode():
            complain(text)

    each.tell, survey = beside_the_bar, None
    for i, photo in each.readable(tqdm(paths, unit="photo", disable=True if quiet else None), options):
        if survey is None:
            model = load_model(options["model"], **{key: options[key] for key in ("weights", "seed", "img_size", "device")})
            survey = Survey(model, seed=options["seed"], **preparing(options))
        with each.photo(paths[i]):
            survey.add(photo, printable(str(paths[i].relative_to(folder))))
    return survey if survey and survey.photos else None
