"""Command `visattn view`: photos under a model, or a study, as one interactive page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from visattn._support.checks import between, printable
from visattn._support.whole_files import check_output, write_whole
from visattn.core.command_line.late import Command
from visattn.core.command_line.number_lists import numbers_of
from visattn.core.command_line.questions import model_of, short_name
from visattn.core.command_line.shared_options import (
    files_read,
    model_options,
    output_options,
    photo_options,
    preparing,
    reading,
    refuse_beside,
    target_options,
)
from visattn.core.command_line.study_files import check_settled, is_study
from visattn.core.command_line.talk import describe, note, result
from visattn.core.images.sources import as_file
from visattn.errors import OptionError

if TYPE_CHECKING:
    from visattn.studies import Study

_SUFFIXES = ".html", ".htm", ".attn"
MAX_MB = 60.0  # repeated from `visattn.viewer.page`, which imports torch


@click.command("view", cls=Command)
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path))
@model_options
@click.option(
    "--methods",
    help="Maps beside the attention: names separated by commas. By default rollout, relevance, Grad-CAM and gates, as far as they apply.",
)
@click.option("--compare", help="A second model, which sees the same images.")
@target_options
@click.option("--max-mb", type=click.FloatRange(0.1), default=MAX_MB, show_default=True, help="Largest size of the page in MB.")
@click.option(
    "--layers", default="*", show_default=True, help="Glob of the layers whose attention is in the page, such as 'blocks.1*'."
)
@click.option("--heads", help="Numbers of the heads that are in the page, such as 0,3-5.  [default: all]")
@click.option("--check", type=click.FloatRange(0), metavar="SECONDS", help="Test how far each map can be trusted; 20 is usual.")
@photo_options
@output_options
def view_command(
    images: tuple[Path, ...],
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    debug: bool,
    **options: Any,  # noqa: ANN401 - click's
) -> None:
    """Write a page that shows every head for any patch of IMAGES: open it in a browser, and point.

    The page is one file. It needs no network and no visattn, so it can be sent to anybody. IMAGES may be studies, STUDY.attn. With
    -o NAME.attn, the study itself is saved.

    \b
    visattn view photo:chelsea
    visattn view cat.jpg --model deit_tiny_patch16_224 --methods rollout,relevance
    visattn view cat.jpg -o cat.attn
    visattn view cat.attn -o cat.html
    """  # noqa: D301 - \b keeps click from wrapping the examples
    between(options["max_mb"], 0.1, 1e9, "max_mb")  # click lets NaN pass
    compared = f"compare_{short_name(options['compare'])}." if options["compare"] else ""
    target = _named(output or Path(f"{as_file(images[0]).stem}.{model_of(options)}{compared}view.html"))
    check_output(target, overwrite=overwrite, inputs=[*images, *files_read(options)])
    page = {"max_mb": options["max_mb"], "layers": options["layers"], "heads": numbers_of(options["heads"])}
    if target.suffix.lower() == ".attn":
        refuse_beside("-o NAME.attn", tuple(page))
    study = _study(images, options)
    if target.suffix.lower() == ".attn":
        study.save(target, overwrite=True)
    else:
        from visattn.studies import html_of

        write_whole(target, html_of(study, **page).encode())
    result(as_json, [(target, study[0].provenance)])
    told: set[str] = set()
    for view in study:
        maps = {"maps": ", ".join(view.maps)} if view.maps else {}
        describe(quiet, view.provenance.but(method="view", parameters={"model": view.provenance.model, **maps}), told)
    note(quiet, f"{target}: {target.stat().st_size / 1e6:.1f} MB")


def _named(target: Path) -> Path:
    """Return the file to write, after checking its ending."""
    if target.suffix.lower() not in _SUFFIXES:
        raise OptionError(
            f"{printable(target.name)}: a page is .html, and a study .attn. Choose a name with one of these endings."
        )
    return target


def _study(images: tuple[Path, ...], options: dict[str, Any]) -> Study:
    """Load the studies among the images, or make one."""
    from visattn.studies import Study, load_study

    if any(map(is_study, images)):
        if not all(map(is_study, images)) or options["methods"] or options["compare"] or options["check"] is not None:
            raise OptionError("studies are shown as they are. Pass .attn files alone, without --methods, --compare and --check.")
        check_settled()
        return Study(tuple(view for image in images for view in load_study(image)))
    from visattn import studies
    from visattn.core.images.sources import load_image
    from visattn.core.pipeline.label_files import read_labels

    photos = [load_image(image, **reading(options)) for image in images]
    methods = None if options["methods"] is None else [name.strip() for name in options["methods"].split(",") if name.strip()]
    told: dict[str, Any] = {name: options[name] for name in ("target", "versus", "target_space", "prompt", "task")}
    told["labels"] = None if options["labels"] is None else read_labels(options["labels"])
    common = {name: options[name] for name in ("seed", "device", "check")} | {"methods": methods, **told, **preparing(options)}
    made = studies.study(options["model"], photos, weights=options["weights"], **common)
    return made + studies.study(options["compare"], photos, **common) if options["compare"] else made
