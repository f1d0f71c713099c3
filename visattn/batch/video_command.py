"""Command `visattn video`: maps over the frames of a film."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click

from visattn._support.types import View
from visattn._support.whole_files import check_output
from visattn.core.command_line.late import LateCommand, method_options
from visattn.core.command_line.questions import kind_of, model_of, question_of
from visattn.core.command_line.shared_options import (
    batch_size_option,
    files_read,
    method_option,
    model_options,
    output_options,
    photo_options,
    preparing,
    reading,
    style_of,
    style_options,
    target_options,
)
from visattn.core.command_line.talk import describe, note, result
from visattn.core.drawing.style import Style
from visattn.core.images.sources import as_file


@click.command("video", cls=LateCommand, late=method_options, before="view", spare=True)
@click.argument("film", type=click.Path(path_type=Path))
@model_options
@method_option
@target_options
@click.option(
    "--view",
    type=click.Choice(get_args(View)),
    default="overlay",
    show_default=True,
    help="Draw over the frames, beside them, or a panel for each head (--method attention).",
)
@click.option(
    "--rate", type=click.FloatRange(0, min_open=True), help="Most frames a second; of a walk, steps a second.  [default: all; 12]"
)
@click.option("--walk", type=click.IntRange(2, 10_000), metavar="STEPS", help="FILM is a photo, over which the query walks.")
@click.option(
    "--smooth",
    type=click.FloatRange(0, 0.99),
    default=0.0,
    show_default=True,
    help="Weight of the last map in a running mean of the maps.",
)
@batch_size_option("Frames")
@style_options()
@photo_options
@output_options
def video_command(
    film: Path,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    debug: bool,
    **options: Any,  # noqa: ANN401 - click's
) -> None:
    """Draw where a model looks in each frame of FILM, on one color scale for all frames.

    FILM is a film in any format of FFmpeg, or an animated GIF, WebP or APNG. The output is .mp4 (H.264), .webm (VP9), .webp or .gif.

    \b
    visattn video film.mp4 -o maps.mp4
    visattn video film.mp4 --method rollout --view beside --rate 10 -o maps.webm
    visattn video film.mp4 --method attention --view heads -o heads.mp4
    visattn video photo.jpg --walk 48 --method attention -o walk.webp
    """  # noqa: D301 - \b keeps click from wrapping the examples
    style = Style(**style_of(options)).opaque()  # raises for values out of range before any file is read
    target = output or Path(f"{as_file(film).stem}.{model_of(options)}{kind_of(options)}.mp4")
    check_output(target, overwrite=overwrite, inputs=[film, *files_read(options)])
    from visattn.batch.films import Looks, write_film
    from visattn.batch.films.encoder import check_name
    from visattn.batch.films.video import opened
    from visattn.batch.films.walking import check_film, start_of
    from visattn.core.families.wrappers import unwrapped
    from visattn.core.loading import load_model
    from visattn.core.pipeline.asking import Asked
    from visattn.core.pipeline.preprocessing import Preprocessing

    if options["walk"] is None:
        check_film(film)
    check_name(target)
    question = question_of(options, **start_of(options["walk"], options["method"], options.get("query")))
    looks = Looks(options["view"], options["rate"], options["smooth"], options["batch_size"], options["walk"])
    asked = Asked(question, Preprocessing(**preparing(options), **reading(options)), options["seed"])
    source = opened(film, asked.how, looks)
    model = load_model(options["model"], **{name: options[name] for name in ("weights", "seed", "img_size", "device")})
    made = write_film(unwrapped(model), source, target, asked, looks, style)
    result(as_json, [(made.path, made.provenance)])
    describe(quiet, made.provenance)
    note(quiet, f"{target}: {made.frames} frames, {target.stat().st_size / 1e6:.1f} MB")
