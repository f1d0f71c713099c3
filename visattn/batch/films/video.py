"""Maps over the frames of a film, on one scale."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import nn

from visattn._support.checks import printable
from visattn._support.options import with_options
from visattn._support.progress import progress
from visattn._support.typed import typed
from visattn._support.types import View
from visattn._support.whole_files import check_output
from visattn.batch.films.encoder import check_name, writing
from visattn.batch.films.frames import Film
from visattn.batch.films.mapping import FilmOptions, Looks, Shown, chosen, exact, maps_of, smoothed
from visattn.batch.films.walking import Walk, check_film, start_of
from visattn.core.drawing.overlays import on_scale, rgb_components
from visattn.core.drawing.style import Style
from visattn.core.drawing.style_options import StyleOptions
from visattn.core.maps import AttentionMap, value_range
from visattn.core.maps.scaling import range_words, resolved, shows_nothing
from visattn.core.methods.method_table import MethodName
from visattn.core.pipeline.asking import Asked, asked_of, model_of
from visattn.core.pipeline.outputs import noun_of
from visattn.core.pipeline.preprocessing import Preprocessing, PreprocessingOptions
from visattn.core.pipeline.question import parameter_names
from visattn.core.pipeline.targets import Of, TargetOptions
from visattn.core.provenance import Provenance
from visattn.errors import ImageError

_PANEL = 240  # width of a panel of a head
_GAP = 4


class Made(NamedTuple):
    """A film that was written.

    Attributes:
        path: The file.
        frames: Number of its frames.
        lost: Damaged parts of the source that could not be decoded.
        provenance: Origin of its maps, with the value range of the color scale.
    """

    path: Path
    frames: int
    lost: int
    provenance: Provenance


@with_options(PreprocessingOptions, TargetOptions, StyleOptions, FilmOptions, more=parameter_names)
@typed(but=("weights", "method"))
def explain_video(
    model: nn.Module | str,
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    method: MethodName | str = "auto",
    target: Of = None,
    overwrite: bool = True,
    weights: str | os.PathLike[str] = "auto",
    seed: int = 0,
    device: str | torch.device = "cpu",
    **options: Any,  # noqa: ANN401 - as in `explain`
) -> Made:
    """Draw where a model looks in each frame of a film, on one color scale for all frames.

    The film is read twice: for the maps, from all of which the scale is computed, and for the pictures. So of all frames only the maps
    are in memory, with 4 bytes for each patch, or for each pixel of the model's input; WebP and GIF files are too while they are made.

    Args:
        model: Name of a timm model, or a model.
        source: A film (needs the extra `video`), or an animated GIF, WebP or APNG; with `walk`, a photo, see `load_image`.
        output: File to write: `.mp4` (H.264), `.webm` (VP9), `.webp` or `.gif`.
        method: See `explain`. Each frame is explained alone, except for `pca`, whose components are those of all frames, and `similarity`,
            whose query lies in the first frame.
        target: See `explain`. The top class of each frame, unless one is given.
        overwrite: Whether a file may be replaced.
        weights: See `load_model`; only if `model` is a name.
        seed: See `explain`.
        device: Device of a model that is given by name.
        options: `view`, `rate`, `smooth`, `batch_size` and `walk`, see `visattn.batch.films.Looks`; options of preprocessing, target and
            method, see `explain`; and of the colors, see `visattn.drawing.Style`.

    Returns:
        The file and the number of frames.

    Raises:
        ImageError: If the source is no film, or no frame can be decoded.
        OptionError: If an option is out of range, or the view does not fit the map.
        OutputError: If the file exists and `overwrite` is false, or it cannot be written.
        VisattnError: Any error of `explain`.
    """
    file = check_output(Path(output), overwrite=overwrite, inputs=[Path(source)])
    check_name(file)
    looks = Looks(**{name: options.pop(name) for name in FilmOptions.__annotations__ if name in options})
    style = Style(**{name: options.pop(name) for name in StyleOptions.__annotations__ if name in options}).opaque()
    asked = asked_of(method, target, {**options, **start_of(looks.walk, method, options.get("query"))}, seed)
    film = opened(source, asked.how, looks)
    bare, notes = model_of(model, asked.how, weights=weights, seed=seed, device=device)
    made = write_film(bare, film, file, asked, looks, style)
    return made._replace(provenance=made.provenance.but(notes=notes))


def opened(source: str | os.PathLike[str], how: Preprocessing, looks: Looks) -> Film | Walk:
    """Open a film, or the photo of a walk."""
    if looks.walk is None:
        check_film(source)
        return Film(source, max_pixels=how.max_pixels, color_profile=how.color_profile)
    return Walk(source, looks.walk, how, None if looks.rate is None else exact(looks.rate))


def write_film(model: nn.Module, film: Film | Walk, file: Path, asked: Asked, looks: Looks, style: Style) -> Made:
    """Write the film of `explain_video`, for a question that was asked."""
    maps = smoothed(maps_of(model, film, asked, looks), looks.smooth)
    signed = any(one.map.signed for one in maps)
    maps = [one._replace(map=replace(one.map, signed=signed)) for one in maps]  # one color map for all frames
    scales, style = _scales([one.map for one in maps], style), replace(style, colormap=style.colors(signed))
    rate = film.rate if looks.rate is None else min(exact(looks.rate), film.rate)
    with progress("film", "frame") as bar, writing(file, rate) as add:
        for frame, one in zip_longest(chosen(film, looks.rate), maps):
            if frame is None or one is None:
                raise ImageError(f"{printable(str(film.path))}: was changed while it was read. Try again when it is whole.")
            add(frame.at, _drawn(frame.image, one, looks.view, scales, style))
            bar.update()
    made = _common([one.map.provenance for one in maps])
    told = {
        f"{film.lost} damaged part{'s' * (film.lost > 1)} of the film could not be decoded": bool(film.lost),
        "the film is HDR; its colors are read as if it were not": film.hdr,
        f"all maps are nearly even ({range_words(*scales[0])}); the frames are unchanged": len(scales) == 1
        and shows_nothing(style.normalize, *scales[0]),
    }
    if looks.walk:
        parameters = {**made.parameters, "query": f"{looks.walk} pixels in turn"}
        made = replace(made, parameters=parameters, notes=tuple(note for note in made.notes if not note.startswith("query ")))
    made = made.but(
        image=printable(film.path.name),
        normalization="one scale for the film",
        value_range=scales[0] if len(scales) == 1 else None,
        drawing=style.facts(signed) | asdict(looks),
        warnings=tuple(text for text, true in told.items() if true),
    )
    return Made(file, len(maps), film.lost, made)


def _common(every: Sequence[Provenance]) -> Provenance:
    """Return what is true of the maps of all frames; what is true of some, such as a class and its score, is left out."""
    first = every[0]
    own: dict[str, Any] = {"image_sha256": None, "scores": (), "sinks": ()}
    own = {name: none for name, none in own.items() if any(getattr(one, name) != getattr(first, name) for one in every)}
    targets = {text.partition(" = ")[0] for one in every for text in one.target}  # without the score
    noun = noun_of(first.scores[0]["outputs"]) if first.scores else "class"
    top = "the top class of each frame" if noun == "class" else f"the largest {noun} of each frame"
    target = tuple(targets) if len(targets) == 1 else (top,) * bool(targets)
    return replace(first, target=target, warnings=_each_once([one.warnings for one in every]), **own)


def _each_once(every: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the warnings of frames, each kind once: those of all frames, and one of each other kind with the number of its frames."""
    found = Counter(text for one in every for text in one)
    of_all = [text for text, times in found.items() if times == len(every)]
    kinds: dict[frozenset[str], list[str]] = {}
    for one in every:
        for kind, text in {_kind(text): text for text in one if text not in of_all}.items():
            kinds.setdefault(kind, []).append(text)
    return (*of_all, *(f"{some[0]} (in {len(some)} of {len(every)} frames{_own(some)})" for some in kinds.values()))


def _kind(warning: str) -> frozenset[str]:
    """Return what warnings share that differ in their numbers alone: the words, in the singular."""
    return frozenset(word.removesuffix("s") for word in re.findall("[A-Za-z]{2,}", warning))


def _own(texts: Sequence[str]) -> str:
    return ", each with its own numbers" if len(set(texts)) > 1 else ""


def _scales(maps: Sequence[AttentionMap], style: Style) -> list[tuple[float, float]]:
    """Return the raw values that are mapped to 0 and 1 in all frames; of components, those of each."""
    every = torch.stack([one.values.detach().float().cpu() for one in maps]).numpy()  # (frames, *axes, rows, columns)
    if "component" in maps[0].axes:
        return [value_range(every[:, number], "percentile", holes=True) for number in range(every.shape[1])]
    signed = maps[0].signed
    pixelwise = any(one.facts.pixelwise for one in maps)
    mode = "percentile" if style.normalize == "auto" and pixelwise else resolved(style.normalize, every, signed)
    return [value_range(every, mode, signed, holes=True)]


def _drawn(image: Image.Image, one: Shown, view: View, scales: list[tuple[float, float]], style: Style) -> Image.Image:
    if view != "heads":
        picture = _colored(image, one, scales, style)
        return picture if view == "overlay" else _tiled([image, picture], 2 if image.width <= 2 * image.height else 1)
    height = max(1, round(image.height * _PANEL / image.width))
    small, place = image.resize((_PANEL, height), Image.Resampling.BICUBIC), one.geometry.resized((height, _PANEL))
    panels = [_colored(small, Shown(one.map.at(head=head), place), scales, style) for head in range(one.map.values.shape[0])]
    return _tiled(panels, math.ceil(math.sqrt(len(panels) * height / _PANEL)))


def _colored(image: Image.Image, one: Shown, scales: list[tuple[float, float]], style: Style) -> Image.Image:
    if "component" in one.map.axes:
        return rgb_components(image, one.map.to_heatmap(one.geometry, "nearest"), scales)
    return on_scale(image, one.map.to_heatmap(one.geometry, style.interpolation), *scales[0], style)


def _tiled(pictures: Sequence[Image.Image], columns: int) -> Image.Image:
    """Put pictures of one size in rows, with a gap."""
    width, height = pictures[0].size
    rows = math.ceil(len(pictures) / columns)
    whole = Image.new("RGB", (columns * width + (columns - 1) * _GAP, rows * height + (rows - 1) * _GAP), "white")
    for number, picture in enumerate(pictures):
        whole.paste(picture, (number % columns * (width + _GAP), number // columns * (height + _GAP)))
    return whole
