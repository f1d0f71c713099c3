"""`visattn caption`: what photos show, in words, and where each word looked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from visattn._files import check_output, write_whole
from visattn.cli._main import complain
from visattn.cli._options import output_options, photo_options
from visattn.cli._talk import note
from visattn.errors import ImageError, OptionError, VisattnError

_AT_ONCE = 16  # photos that are captioned together
_KINDS = (".png", ".webp")


@click.command("caption")
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--checkpoint", type=click.Path(path_type=Path), required=True, help="Folder of a captioner: RUN/final.")
@click.option("--beam", type=click.IntRange(1), default=5, show_default=True, help="Hypotheses that are followed; 1: greedy.")
@click.option("--longest", type=click.IntRange(1), default=50, show_default=True, help="Most words.")
@click.option("--normalise", is_flag=True, help="Compare hypotheses by their mean log-probability; else short ones win.")
@click.option("--how", type=click.Choice(["argmax", "expected", "sample"]), help="What hard attention takes: argmax by default.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of --how sample.")
@click.option("--caption", "text", help="Show where the words of this caption look, in the place of telling one.")
@click.option(
    "--filmstrip", type=click.Path(path_type=Path), help="A panel for each word: .png, or .webp that moves; a folder for several."
)
@click.option(
    "--interpolation",
    type=click.Choice(["nearest", "bilinear", "bicubic"]),
    default="nearest",
    show_default=True,
    help="nearest shows places as they are; others are stated on the page.",
)
@click.option("--shared", is_flag=True, help="One colour scale for all words; each has its own by default.")
@click.option("--opacity", type=click.FloatRange(0, 1), default=0.6, show_default=True, help="0: the photo, 1: the colours.")
@click.option("--panel", type=click.IntRange(64, 1024), default=160, show_default=True, help="Width of a panel in pixels.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@photo_options
@output_options
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
    from visattn._tables import to_json
    from visattn.cli._overlay import _photos

    strips = _strips(images, options["filmstrip"])
    for target in (*strips, *([output] if output else [])):
        check_output(target, overwrite=overwrite, inputs=images)
    photos, failed = _photos(images, options["max_pixels"])
    if not photos:
        return ImageError.exit_code
    captions = _told(list(photos.values()), checkpoint, options)
    rows = []
    for i, caption in zip(photos, captions, strict=True):
        row = {
            "image": str(images[i]),
            "caption": caption.text,
            "log_probability": caption.score,
            "finished": caption.finished,
            "words": [
                {"word": word, "beta": beta, "entropy": entropy, "cell": cell}
                for word, beta, entropy, cell in zip(caption.words, caption.betas, caption.entropies, caption.cells, strict=True)
            ],
        }
        if not caption.words:
            complain(f"{images[i]}: the captioner says nothing of it; no filmstrip is drawn.")
        elif strips:
            row["filmstrip"] = str(write_whole(strips[i], _drawn(caption, strips[i], options)))
        rows.append(row)
        if not as_json:
            click.echo(f"{images[i]}: {caption.text}" if len(images) > 1 else caption.text)
        for word, fact in zip(caption.words, caption.facts, strict=True):
            note(quiet, f"{word:<12} {fact}")
    if as_json:
        click.echo(to_json(rows))
    if output:
        write_whole(output, to_json(rows).encode())
    return VisattnError.exit_code if failed else 0


def _told(photos: Sequence[Any], checkpoint: Path, options: dict[str, Any]) -> list[Any]:
    """A caption of each photo."""
    import torch

    from visattn.captioning import load_captioner
    from visattn.families import check_device

    captioner = load_captioner(checkpoint)
    captioner.model.to(check_device(options["device"]))
    captions = []
    with torch.random.fork_rng():
        torch.manual_seed(options["seed"])
        for start in range(0, len(photos), _AT_ONCE):
            some = photos[start : start + _AT_ONCE]
            if options["text"] is not None:
                captions += captioner.score(some, [options["text"]] * len(some), how=options["how"])
            else:
                captions += captioner.tell(
                    some, beam=options["beam"], longest=options["longest"] + 1, how=options["how"], normalise=options["normalise"]
                )
    return captions


def _strips(images: Sequence[Path], filmstrip: Path | None) -> list[Path]:
    """A file for each image; none where none is asked for."""
    if filmstrip is None:
        return []
    if len(images) == 1 and filmstrip.suffix.lower() in _KINDS:
        return [filmstrip]
    if filmstrip.suffix:
        kinds = " or ".join(_KINDS)
        raise OptionError(
            f"{filmstrip.name}: --filmstrip of one image is a {kinds} file, of several a folder. Choose another name."
        )
    stems = [image.stem for image in images]
    return [filmstrip / f"{image.stem if stems.count(image.stem) == 1 else image.name}.caption.png" for image in images]


def _drawn(caption: Any, target: Path, options: dict[str, Any]) -> bytes:  # noqa: ANN401
    from visattn import render

    look = {name: options[name] for name in ("interpolation", "shared", "opacity")}
    if target.suffix.lower() == ".webp":
        moving: bytes = caption.animation(**look, panel=max(options["panel"], 320))
        return moving
    return render.to_png(caption.filmstrip(**look, panel=options["panel"]), caption.map.provenance)
