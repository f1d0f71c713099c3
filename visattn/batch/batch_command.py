"""Command `visattn batch`: folders and lists of images, batch by batch, with a journal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from warnings import simplefilter

import click

from visattn._support.checks import printable
from visattn._support.files import base_name, exists, is_folder
from visattn._support.tables import to_json
from visattn._support.types import Engine, MapFormat, MeanBy
from visattn._support.whole_files import refusal, write_whole
from visattn.core.command_line.faults import complain
from visattn.core.command_line.late import LateCommand, method_options
from visattn.core.command_line.questions import kind_of, question_of
from visattn.core.command_line.shared_options import (
    batch_size_option,
    drawing_of,
    explaining_options,
    files_read,
    model_options,
    photo_options,
    preparing,
    reading,
    refuse_beside,
    talk_options,
)
from visattn.core.command_line.talk import note
from visattn.errors import OptionError, OutputError, VisattnError, VisattnWarning

if TYPE_CHECKING:
    from torch import nn

    from visattn.batch import Asked, Entry, Wanted


@click.command("batch", cls=LateCommand, late=method_options, before="mass", spare=True)
@click.argument("images", nargs=-1, required=True)
@model_options
@explaining_options
@click.option("--maps", is_flag=True, help="Also save each raw map.")
@click.option(
    "--map-format", type=click.Choice(get_args(MapFormat)), default="npz", show_default=True, help="Format of the maps of --maps."
)
@click.option("--pack-maps", is_flag=True, help="Save the raw maps of each batch in one .tar file.")
@click.option("--stats", is_flag=True, help="Also write the statistics of every head over all images.")
@click.option(
    "--mean-by",
    type=click.Choice(get_args(MeanBy)),
    help="Also write the mean map of all images, of each predicted class, or of each folder.",
)
@click.option("--studies", is_flag=True, help="Also save each image as a study (.attn).")
@click.option("--no-pictures", is_flag=True, help="Write no pictures.")
@batch_size_option("Images")
@click.option(
    "--workers", type=click.IntRange(1, 256), help="Threads that decode, and threads that draw: 2; 1 in an actor of Ray."
)
@click.option(
    "--accept-changes",
    is_flag=True,
    help="Go on although settings or the model have changed, and write the change into the journal.",
)
@click.option("--shard", help="Compute part I of N, such as 0/4: run the command for each part, on one machine or several.")
@click.option(
    "--engine", type=click.Choice(get_args(Engine)), default="local", show_default=True, help="This machine, or a cluster of Ray."
)
@click.option("--actors", type=click.IntRange(1), help="Processes on the cluster; by default as many as fit.")
@click.option("--gpus-per-actor", type=click.FloatRange(0), help="GPUs for each of them, such as 0.5; by default none.")
@photo_options
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write to.")
@talk_options
def batch_command(
    images: tuple[str, ...],
    output: Path,
    as_json: bool,
    quiet: bool,
    debug: bool,
    **options: Any,  # noqa: ANN401 - click's
) -> int:
    """Explain many IMAGES, and write a picture for each.

    IMAGES are files, folders, patterns, lists (.txt, or .csv with a column image), tar files (WebDataset) and zip files, addresses such
    as s3://bucket/photos (of fsspec), or file.py:function, which returns a dataset.

    The journal in the folder says what is done. A run that is interrupted goes on if the same command is run again, and images that have
    changed are computed again.

    \b
    visattn batch photos -o maps
    visattn batch photos --method rollout --maps -o maps
    visattn batch list.txt --shard 0/4 -o maps
    visattn batch 'shards/*.tar' --no-pictures --pack-maps --stats -o maps
    visattn batch photos --engine ray --gpus-per-actor 0.5 -o maps
    """  # noqa: D301 - \b keeps click from wrapping the examples
    drawing = drawing_of(options)  # raises for values out of range before any file is read
    shard = _shard(options["shard"])
    question = question_of(options)
    _check(output, options)
    simplefilter("once", VisattnWarning)  # not for each of many images
    from tqdm import tqdm

    from visattn.batch import Asked, Batches, Journal, Ledger, Wanted, Work, check_outputs, items_of, other_lists, run
    from visattn.batch.same import check_model
    from visattn.batch.settings import maker, settings_of
    from visattn.core.pipeline.preprocessing import Preprocessing

    items = items_of(images, but=output)
    on_ray = options["engine"] == "ray"
    loading = {name: options[name] for name in ("weights", "seed", "img_size", "device")}
    model = _loaded(options["model"], **{**loading, "device": "cpu"} if on_ray else loading)
    products = {
        "raw": options["maps"],
        "raw_ending": options["map_format"],
        "packed": options["pack_maps"],
        "study": options["studies"],
        "statistics": options["stats"],
        "means": options["mean_by"],
    }
    wanted = Wanted(output, kind_of(options), not options["no_pictures"], **products, drawing=drawing)
    asked = Asked(question, Preprocessing(**preparing(options), **reading(options)), options["seed"])
    name = "journal.jsonl" if options["shard"] is None else f"journal.{shard[0]}-of-{shard[1]}.jsonl"
    batches = Batches(options["batch_size"], *shard)
    mine = sum(len(items[first : first + batches.size]) for first in batches.first(len(items)))
    work = Work(asked, wanted, options["workers"] or (1 if on_ray else 2))
    settings = settings_of(work, model, options["model"], batches.size)
    with (
        _made_folder(output),
        Journal(output / name, settings, maker(model), accept=options["accept_changes"]) as journal,
        tqdm(total=mine, unit="image", disable=True if quiet else None) as bar,
    ):
        check_outputs(wanted, items, batches, journal, inputs=[*images, *files_read(options)])
        for line in journal.damaged:
            click.echo(
                f"visattn: warning: {printable(str(output / name))}: line {line} is damaged; its image is computed again",
                err=True,
            )
        telling = _Telling(bar)
        ledger = Ledger(items, journal, batches, telling, asked.how, wanted)
        for text in check_model(model, ledger, journal, work, accept=options["accept_changes"]):
            note(quiet, text)
        journal.start()
        if on_ray:
            from visattn.batch.cluster import Actors, run_on_ray

            actors = Actors(options["actors"], options["gpus_per_actor"] or 0.0)
            loading["device"] = options["device"] if not actors.gpus or "cuda" in options["device"] else "cuda"
            outcome = run_on_ray(partial(_loaded, options["model"], **loading), settings["weights"], ledger, work, actors)
        else:
            outcome = run(model, ledger, work)
    sources = [item.source for item in items]
    if wanted.statistics:
        _write_tables(output, sources, asked, quiet)
    if wanted.means:
        _write_means(wanted, sources, quiet)
    for text in (*sorted(telling.common or ()), *other_lists(output / name, sources)):
        click.echo(f"visattn: warning: {printable(text)}", err=True)
    earlier = f", {outcome.kept} from an earlier run" if outcome.kept else ""
    warned = f", {telling.warned} with warnings" if telling.warned else ""
    count = f"{outcome.written} image{'s' * (outcome.written != 1)}"
    note(quiet, f"{printable(str(output))}: {count}{earlier}, {outcome.failed} failed{warned}; {name} names each")
    click.echo(to_json({"output": printable(str(output)), **outcome._asdict()}) if as_json else printable(str(output / name)))
    return VisattnError.exit_code if outcome.failed else 0


class _Telling:
    """Function that tells of each image: a bar with the number of failures, and their errors.

    Attributes:
        warned: Number of images with warnings.
        common: Warnings of all images; None before the first.
    """

    def __init__(self, bar: Any) -> None:  # noqa: ANN401 - of tqdm
        self.warned = 0
        self.common: set[str] | None = None
        self._bar, self._failed = bar, 0

    def __call__(self, entry: Entry) -> None:
        if text := entry.error:
            self._failed += 1
            self._bar.set_postfix(failed=self._failed)
            with self._bar.external_write_mode():
                complain(text if text.startswith(printable(entry.image)) else f"{printable(entry.image)}: {text}")
        else:
            self.warned += bool(entry.warnings)
            self.common = set(entry.warnings) if self.common is None else self.common & set(entry.warnings)
        self._bar.update()


def _loaded(name: str, **options: Any) -> nn.Module:  # noqa: ANN401
    from visattn.core.families.wrappers import unwrapped
    from visattn.core.loading import load_model

    return unwrapped(load_model(name, **options))


@contextmanager
def _made_folder(output: Path) -> Iterator[None]:
    """Create the output folder; a run that is refused leaves none behind."""
    missing = [place for place in (output, *output.parents) if not exists(place)]
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refused = refusal(error, output)
        raise refused from error
    try:
        yield
    except BaseException:
        with suppress(OSError):  # not empty: something was written
            for place in missing:
                place.rmdir()
        raise


def _write_tables(output: Path, sources: list[str], asked: Asked, quiet: bool) -> None:
    """Write the tables of the statistics of all images in the folder, those of other parts of the run too."""
    from visattn.batch.statistics import collected, in_turn
    from visattn.evaluation import survey_files

    with in_turn(output):
        survey = collected(output, sources, asked.seed, asked.how.resize)
        if not survey.photos:
            return
        found = survey_files(survey, survey.provenance(printable(base_name(str(output)))), quiet)
        for name, data in found.items():
            write_whole(output / name, data)
    note(
        quiet,
        f"{printable(str(output))}: statistics of {len(survey.photos)} image{'s' * (len(survey.photos) != 1)} in {', '.join(found)}",
    )


def _write_means(wanted: Wanted, sources: list[str], quiet: bool) -> None:
    """Write the mean maps of all images in the folder, those of other parts of the run too."""
    from visattn.batch.means import collected, contents, files_of_run
    from visattn.batch.statistics import in_turn

    assert wanted.means is not None  # noqa: S101 - they are wanted
    with in_turn(wanted.folder):
        groups = collected(wanted.folder, sources)
        if not groups:
            return
        *files, without = contents(groups, wanted.means)
        for name, data in zip(files_of_run(wanted.kind), files, strict=True):
            write_whole(wanted.folder / name, data)
    count = sum(one.maps for one in groups.values())
    note(
        quiet,
        f"{printable(str(wanted.folder))}: mean maps of {count} of {len(sources)} images in {len(groups) - len(without)} groups, in "
        + ", ".join(files_of_run(wanted.kind)),
        *(f"{group}: has no mean, as its maps are zero everywhere" for group in without),
    )


def _check(output: Path, options: dict[str, Any]) -> None:
    """Check that something is written, into a folder, and that options fit the engine.

    Raises:
        OptionError: If nothing is written, an option is for another engine, or out of range.
        OutputError: If the output is a file.
    """
    if options["engine"] == "local" and (options["actors"] is not None or options["gpus_per_actor"] is not None):
        raise OptionError("--actors and --gpus-per-actor are options of --engine ray. Pass it too.")
    gpus = options["gpus_per_actor"] or 0.0
    if not (0 <= gpus <= 1 or gpus.is_integer()):
        raise OptionError(f"--gpus-per-actor must be a part of a GPU, such as 0.5, or a whole number of them, got {gpus:g}.")
    if not options["maps"]:
        refuse_beside("no --maps", ("map_format",))
    if options["no_pictures"] and not any(options[name] for name in ("maps", "pack_maps", "stats", "studies", "mean_by")):
        raise OptionError("--no-pictures leaves nothing to write. Pass --maps, --pack-maps, --stats, --studies or --mean-by too.")
    if exists(output) and not is_folder(output):
        raise OutputError(f"{printable(str(output))}: is a file, not a folder. Choose another name (-o/--output).")


def _shard(text: str | None) -> tuple[int, int]:
    """Return number and count of parts.

    Raises:
        OptionError: If the text is not `I/N` with I below N.
    """
    if text is None:
        return 0, 1
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
    if not found or int(found[1]) >= int(found[2]):
        raise OptionError(f"--shard must be I/N with I from 0 to N - 1, such as 0/4, got '{printable(text)}'.")
    return int(found[1]), int(found[2])
