"""Command `visattn caption`: captions of images, and where the decoder attends for each word."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from visattn._support.checks import printable
from visattn._support.files import is_folder
from visattn._support.types import By, Interpolation, Sampling
from visattn._support.whole_files import check_outputs, result_names, write_whole
from visattn.core.command_line.each import Each
from visattn.core.command_line.late import Command
from visattn.core.command_line.questions import short_name
from visattn.core.command_line.shared_options import photo_options, talk_options
from visattn.core.command_line.talk import note
from visattn.core.images.sources import as_file
from visattn.core.loading.networks import CAPTIONERS, captioner_folder
from visattn.errors import OptionError, VisattnError, WeightsError

if TYPE_CHECKING:  # these import torch
    from PIL import Image

    from visattn.captioning import Caption, Captioner

_AT_ONCE = 16  # images per batch
_FACTS = "model.json"  # repeated from `visattn.families.trained`, which imports torch
_KINDS = (".png", ".webp")
_SAMPLINGS = [way for way in get_args(Sampling) if way != "gumbel"]  # gumbel is for training only


@click.command("caption", cls=Command)
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    required=True,
    help=f"Folder of a trained captioner, RUN/final, or the name of one that comes with visattn: {', '.join(CAPTIONERS)}.",
)
@click.option(
    "--beam-size",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Number of hypotheses in beam search; 1 decodes greedily.",
)
@click.option("--max-length", type=click.IntRange(1, 200), default=50, show_default=True, help="Maximum number of words.")
@click.option(
    "--length-normalization",
    is_flag=True,
    help="Rank hypotheses by mean log-probability per word, which does not favor short captions.",
)
@click.option(
    "--sampling",
    type=click.Choice(_SAMPLINGS),
    help="Context of hard attention: the most probable location (argmax, the default), a sampled one, or the expected context.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Random seed of --sampling sample.")
@click.option(
    "--by",
    type=click.Choice(get_args(By)),
    default="attention",
    show_default=True,
    help="What the map of a word shows: the attention before it, or the gradient of its log-probability at each cell.",
)
@click.option("--caption", "text", help="Score this caption, and draw its words, instead of generating one.")
@click.option(
    "--filmstrip",
    type=click.Path(path_type=Path),
    help="Draw one panel per word: a .png file, an animated .webp file, or a folder for several images.",
)
@click.option(
    "--interpolation",
    type=click.Choice(get_args(Interpolation)),
    default="nearest",
    show_default=True,
    help="Interpolation between grid cells. nearest shows the grid unchanged; any other is stated on the figure.",
)
@click.option("--shared-scale", is_flag=True, help="Use one color scale for all words. By default each word has its own.")
@click.option(
    "--opacity",
    type=click.FloatRange(0, 1),
    default=0.6,
    show_default=True,
    help="Weight of the colors: 0 shows only the photo, 1 only the colors.",
)
@click.option("--panel", type=click.IntRange(64, 1024), default=160, show_default=True, help="Width of a panel in pixels.")
@click.option("--device", default="cpu", show_default=True, help="Device to run on: cpu, cuda or cuda:N.")
@photo_options
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write the captions, with details of each word, to this .json file."
)
@click.option("--overwrite", is_flag=True, help="Replace existing files.")
@talk_options
def caption_command(
    images: tuple[Path, ...],
    checkpoint: Path,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    debug: bool,
    **options: Any,  # noqa: ANN401 - click's
) -> int:
    """Caption IMAGES, and draw where the decoder attends for each word.

    \b
    visattn caption scene:7 --checkpoint captions_soft
    visattn caption scene.png --checkpoint runs/hard/final --beam-size 5 --filmstrip scene.caption.png
    visattn caption scene.png --checkpoint runs/soft/final --by gradient --filmstrip scene.gradient.png
    visattn caption *.jpg --checkpoint runs/flickr/final --filmstrip strips --json
    """  # noqa: D301 - \b keeps click from wrapping the examples
    from visattn._support.tables import to_json

    checkpoint = captioner_folder(checkpoint)
    strips = _strips(images, options["filmstrip"], checkpoint)
    targets = [*strips, *([_json_file(output)] if output else [])]
    check_outputs(targets, overwrite=overwrite, inputs=(*images, *checkpoint.glob("*")))
    _check_there(checkpoint)
    each, rows = Each(len(images) > 1, debug), []
    for i, caption in _captions(images, checkpoint, each, options):
        name = printable(str(images[i]))
        row = _row(caption, name)
        if strips and caption.words:
            with each.photo(images[i]):
                row["filmstrip"] = printable(str(write_whole(strips[i], _drawn(caption, strips[i], options))))
        rows.append(row)
        if not as_json:
            told = printable(caption.text)
            click.echo(f"{name}: {told}" if len(images) > 1 else told)
        note(quiet, *(f"{word:<12} {fact}" for word, fact in zip(caption.words, caption.word_notes, strict=True)))
        note(quiet, *(f"{name}: {text}" for text in row["notes"]))
        for text in row["warnings"]:
            click.echo(f"visattn: warning: {name}: {printable(text)}", err=True)
        note(quiet or caption.finished, f"{name}: {caption.cut_off}; a larger --max-length allows more")
        if not caption.words:
            end = "; no filmstrip is drawn" if strips else ""
            click.echo(f"visattn: warning: {name}: the generated caption is empty{end}", err=True)
    if as_json and rows:
        click.echo(to_json(rows))
    if output and rows:
        write_whole(output, to_json(rows).encode())
    return each.exit_code(len(rows))


def _check_there(checkpoint: Path) -> None:
    """Check that a folder contains a captioner, before anything is loaded.

    Raises:
        WeightsError: If it contains none.
    """
    if not os.path.lexists(checkpoint):
        raise WeightsError(f"{printable(str(checkpoint))}: no such folder. Pass one that `visattn train caption` wrote.")
    if not any(os.path.lexists(place / _FACTS) for place in (checkpoint, checkpoint / "final")):
        raise WeightsError(
            f"{printable(str(checkpoint))}: contains no captioner; pass a folder that `visattn train caption` wrote."
        )


def _captions(images: Sequence[Path], checkpoint: Path, each: Each, options: dict[str, Any]) -> Iterator[tuple[int, Caption]]:
    """Yield the index and the caption of each image that can be captioned."""
    photos = each.readable(images, options)
    together = dict(islice(photos, _AT_ONCE))
    if not together:
        return
    import torch  # takes seconds, so it is imported only once there is an image

    from visattn.captioning import load_captioner
    from visattn.core.loading import check_device

    with torch.random.fork_rng():
        torch.manual_seed(options["seed"])
        captioner = load_captioner(checkpoint)
        captioner.model.to(check_device(options["device"]))
        while together:
            try:
                yield from zip(together, _told(captioner, list(together.values()), options), strict=True)
            except VisattnError:  # one image failed; caption them one by one to find out which
                for i, photo in together.items():
                    with each.photo(images[i]):
                        yield i, _told(captioner, [photo], options)[0]
            together = dict(islice(photos, _AT_ONCE))


def _told(captioner: Captioner, photos: Sequence[Image.Image], options: dict[str, Any]) -> list[Caption]:
    """Score the given caption for each photo, or generate a caption for each."""
    sampling, text = options["sampling"], options["text"]
    if text is not None:
        return captioner.score(photos, [text] * len(photos), sampling=sampling, by=options["by"])
    return captioner.generate(
        photos,
        beam_size=options["beam_size"],
        max_length=options["max_length"] + 1,
        sampling=sampling,
        length_normalization=options["length_normalization"],
        by=options["by"],
    )


def _row(caption: Caption, name: str) -> dict[str, Any]:
    """Convert a caption to JSON values."""
    each = zip(caption.words, caption.betas, caption.entropies, caption.chosen_cells, strict=True)
    return {
        "image": name,
        "caption": caption.text,
        "log_probability": caption.score,
        "finished": caption.finished,
        "words": [{"word": word, "beta": beta, "entropy": entropy, "cell": cell} for word, beta, entropy, cell in each],
        "notes": list(caption.map.provenance.notes),
        "warnings": list(caption.map.provenance.warnings),
        "filmstrip": None,
    }


def _strips(images: Sequence[Path], filmstrip: Path | None, checkpoint: Path) -> list[Path]:
    """Return a distinct filmstrip file for each image, in a folder named by image and captioner; an empty list without --filmstrip."""
    if filmstrip is None:
        return []
    if len(images) == 1 and filmstrip.suffix.lower() in _KINDS:
        return [filmstrip]
    if filmstrip.suffix and not is_folder(filmstrip):
        kinds = " or ".join(_KINDS)
        raise OptionError(
            f"{filmstrip.name}: --filmstrip must be a {kinds} file for one image, or a folder for several. Choose another name."
        )
    captioner = short_name(str(checkpoint))
    return [filmstrip / f"{name}.{captioner}.caption.png" for name in result_names([as_file(image) for image in images])]


def _json_file(output: Path) -> Path:
    if output.suffix.lower() != ".json":
        raise OptionError(f"{output.name}: -o/--output writes JSON. Choose a name that ends in .json.")
    return output


def _drawn(caption: Caption, target: Path, options: dict[str, Any]) -> bytes:
    from visattn.core.drawing.pictures import to_png

    look = {name: options[name] for name in ("interpolation", "shared_scale", "opacity")}
    if target.suffix.lower() == ".webp":
        return caption.animation(**look, panel=max(options["panel"], 320))
    strip = caption.filmstrip(**look, panel=options["panel"])
    provenance = strip.provenance
    if options["sampling"] == "sample":
        provenance = provenance.but(parameters=provenance.parameters | {"seed": options["seed"]})
    return to_png(strip, provenance)
