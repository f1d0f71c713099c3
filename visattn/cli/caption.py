"""`visattn caption`: what photos show, in words, and where each word looked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from visattn._support.checks import printable
from visattn._support.files import check_outputs, is_folder, result_names, write_whole
from visattn._support.types import How, Interpolation
from visattn.cli.each import Each
from visattn.cli.options import photo_options, talk_options
from visattn.cli.talk import note
from visattn.errors import OptionError, VisattnError, WeightsError

if TYPE_CHECKING:  # torch is loaded when it is needed
    from PIL import Image

    from visattn.captioning import Caption, Captioner

_AT_ONCE = 16  # photos that are captioned together
_FACTS = "model.json"  # of `visattn.families.trained`, which imports torch
_KINDS = (".png", ".webp")
_HOWS = [how for how in get_args(How) if how != "gumbel"]  # which is for trainings


@click.command("caption")
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--checkpoint", type=click.Path(path_type=Path), required=True, help="Folder of a captioner: RUN/final.")
@click.option("--beam", type=click.IntRange(1), default=5, show_default=True, help="Hypotheses that are followed; 1: greedy.")
@click.option("--longest", type=click.IntRange(1, 200), default=50, show_default=True, help="Most words.")
@click.option("--normalize", is_flag=True, help="Compare hypotheses by their mean log-probability; else short ones win.")
@click.option("--how", type=click.Choice(_HOWS), help="What hard attention takes: argmax by default.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of --how sample.")
@click.option("--caption", "text", help="Show where the words of this caption look, in the place of telling one.")
@click.option(
    "--filmstrip", type=click.Path(path_type=Path), help="A panel for each word: .png, or .webp that moves; a folder for several."
)
@click.option(
    "--interpolation",
    type=click.Choice(get_args(Interpolation)),
    default="nearest",
    show_default=True,
    help="nearest shows places as they are; others are stated on the page.",
)
@click.option("--shared", is_flag=True, help="One color scale for all words; each has its own by default.")
@click.option("--opacity", type=click.FloatRange(0, 1), default=0.6, show_default=True, help="0: the photo, 1: the colors.")
@click.option("--panel", type=click.IntRange(64, 1024), default=160, show_default=True, help="Width of a panel in pixels.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@photo_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Captions, and facts of each word, as a .json file.")
@click.option("--overwrite", is_flag=True, help="Replace what exists.")
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
    """Tell what IMAGES show, and draw where each word looked.

    \b
    visattn caption scene.png --checkpoint runs/soft/final
    visattn caption scene.png --checkpoint runs/hard/final --beam 5 --filmstrip scene.caption.png
    visattn caption *.jpg --checkpoint runs/flickr/final --filmstrip strips --json
    """  # noqa: D301 - \b keeps click from wrapping the examples
    from visattn._support.tables import to_json

    strips = _strips(images, options["filmstrip"])
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
        note(quiet, *(f"{word:<12} {fact}" for word, fact in zip(caption.words, caption.facts, strict=True)))
        note(quiet, *(f"{name}: {text}" for text in row["notes"]))
        if not caption.words:
            end = "; no filmstrip is drawn" if strips else ""
            click.echo(f"visattn: warning: {name}: the captioner tells no word of it{end}", err=True)
    if as_json and rows:
        click.echo(to_json(rows))
    if output and rows:
        write_whole(output, to_json(rows).encode())
    return each.exit_code(len(rows))


def _check_there(checkpoint: Path) -> None:
    """Refuse a folder without a captioner before anything is loaded.

    Raises:
        WeightsError: If it is none.
    """
    if not any(os.path.lexists(place / _FACTS) for place in (checkpoint, checkpoint / "final")):
        raise WeightsError(f"{printable(str(checkpoint))}: holds no captioner; pass a folder that visattn train caption wrote.")


def _captions(images: Sequence[Path], checkpoint: Path, each: Each, options: dict[str, Any]) -> Iterator[tuple[int, Caption]]:
    """A caption of each image that can be captioned, by its number."""
    photos = each.readable(images, options)
    together = dict(islice(photos, _AT_ONCE))
    if not together:
        return
    import torch  # not before there is a photo: it takes seconds

    from visattn.captioning import load_captioner
    from visattn.loading import check_device

    with torch.random.fork_rng():
        torch.manual_seed(options["seed"])
        captioner = load_captioner(checkpoint)
        captioner.model.to(check_device(options["device"]))
        while together:
            try:
                yield from zip(together, _told(captioner, list(together.values()), options), strict=True)
            except VisattnError:  # of one of them: which one it is shows when each is captioned alone
                for i, photo in together.items():
                    with each.photo(images[i]):
                        yield i, _told(captioner, [photo], options)[0]
            together = dict(islice(photos, _AT_ONCE))


def _told(captioner: Captioner, photos: Sequence[Image.Image], options: dict[str, Any]) -> list[Caption]:
    """A caption of each photo: the one that was given, or the likeliest."""
    how, text = options["how"], options["text"]
    if text is not None:
        return captioner.score(photos, [text] * len(photos), how=how)
    return captioner.tell(photos, beam=options["beam"], longest=options["longest"] + 1, how=how, normalize=options["normalize"])


def _row(caption: Caption, name: str) -> dict[str, Any]:
    """A caption as JSON values."""
    each = zip(caption.words, caption.betas, caption.entropies, caption.cells, strict=True)
    return {
        "image": name,
        "caption": caption.text,
        "log_probability": caption.score,
        "finished": caption.finished,
        "words": [{"word": word, "beta": beta, "entropy": entropy, "cell": cell} for word, beta, entropy, cell in each],
        "notes": list(caption.map.provenance.notes),
        "filmstrip": None,
    }


def _strips(images: Sequence[Path], filmstrip: Path | None) -> list[Path]:
    """A file for each image, no two alike; none where none is asked for."""
    if filmstrip is None:
        return []
    if len(images) == 1 and filmstrip.suffix.lower() in _KINDS:
        return [filmstrip]
    if filmstrip.suffix and not is_folder(filmstrip):
        kinds = " or ".join(_KINDS)
        raise OptionError(
            f"{filmstrip.name}: --filmstrip of one image is a {kinds} file, of several a folder. Choose another name."
        )
    return [filmstrip / f"{name}.caption.png" for name in result_names(images)]


def _json_file(output: Path) -> Path:
    if output.suffix.lower() != ".json":
        raise OptionError(f"{output.name}: -o/--output takes the captions as JSON. Choose a name that ends in .json.")
    return output


def _drawn(caption: Caption, target: Path, options: dict[str, Any]) -> bytes:
    from visattn.drawing.pictures import to_png

    look = {name: options[name] for name in ("interpolation", "shared", "opacity")}
    if target.suffix.lower() == ".webp":
        return caption.animation(**look, panel=max(options["panel"], 320))
    strip = caption.filmstrip(**look, panel=options["panel"])
    provenance = strip.provenance
    if options["how"] == "sample":
        provenance = provenance.but(parameters=provenance.parameters | {"seed": options["seed"]})
    return to_png(strip, provenance)
