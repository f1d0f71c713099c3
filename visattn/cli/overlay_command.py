"""Command `visattn overlay`: a map over each photo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from visattn._support.checks import printable
from visattn._support.files import is_folder
from visattn._support.reprs import in_pixels
from visattn._support.types import MapFormat
from visattn._support.whole_files import check_outputs, check_png, result_names, write_whole
from visattn.core.command_line.each import Each
from visattn.core.command_line.input_options import input_options, inputs_of, with_photo
from visattn.core.command_line.late import LateCommand, method_options
from visattn.core.command_line.questions import kind_of, model_of, parameters, question_of, short_name
from visattn.core.command_line.shared_options import (
    drawing_of,
    explaining_options,
    files_read,
    model_options,
    output_options,
    photo_options,
    preparing,
    refuse_beside,
    style_of,
)
from visattn.core.command_line.study_files import is_study, views_of
from visattn.core.command_line.talk import describe, result
from visattn.core.images.sources import as_file
from visattn.core.provenance import Provenance
from visattn.errors import MapError, OptionError

if TYPE_CHECKING:
    from PIL import Image
    from torch import nn

    from visattn.core.pipeline.question import Question

_Drawn = tuple[bytes, Provenance, Callable[[], bytes]]  # PNG, its provenance, content of the map file

_TARGET = ("target", "versus", "target_space", "labels", "prompt", "task")
_OF_MODEL = ("model", "weights", "img_size", "resize", "mean", "std", "device", "seed", "inputs", "image")
_OF_MODELS = (*_OF_MODEL, "method", "compare", "check", "legend", "caption", *_TARGET)


@click.command("overlay", cls=LateCommand, late=method_options, before="mass", spare=True)
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path))
@model_options
@input_options
@explaining_options
@photo_options
@click.option("--compare", help="A second model, with its published weights: the maps of both side by side, on one color scale.")
@click.option("--map", "map_file", type=click.Path(path_type=Path), help="Draw this saved map instead of running a model.")
@click.option(
    "--save-map",
    type=click.Path(path_type=Path),
    help=f"Also save the raw map to this file: .{', .'.join(get_args(MapFormat))}.",
)
@click.option(
    "--check", type=click.FloatRange(0), metavar="SECONDS", help="Test how far each map can be trusted, and note it; 20 is usual."
)
@output_options
def overlay_command(
    images: tuple[Path, ...],
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    debug: bool,
    **options: Any,  # noqa: ANN401 - click's
) -> int:
    """Draw a model's attention over IMAGES and write one PNG for each. A study, STUDY.attn, needs no model.

    \b
    visattn overlay photo:chelsea
    visattn overlay dog.jpg --method rollout --opacity 0.7 -o dog_rollout.png
    visattn overlay dog.jpg --method similarity --query pixel:120,80
    visattn overlay photo:chelsea --model tf_efficientnet_lite0 --target "tiger cat"
    visattn overlay photo:chelsea --model tf_efficientnet_lite0 --method gradcam --layer all
    visattn overlay rgb.png --model net.py:build --image-input rgb --input depth=depth.npy
    visattn overlay scene:7 --model scenes_vit --compare scenes_cnn
    visattn overlay photo:chelsea --box mass:0.5
    """  # noqa: D301 - \b keeps click from wrapping the examples
    drawing_of(options)  # raises for values out of range before any file is read
    if options["map_file"]:
        refuse_beside("--map", (*_OF_MODELS, *parameters()))
    if any(map(is_study, images)):
        return _draw_study(images, output, overwrite, as_json, quiet, options)
    compared = f"compare_{short_name(options['compare'])}." if options["compare"] else ""
    targets = _targets(images, output, "map" if options["map_file"] else model_of(options) + compared + kind_of(options))
    extra = _map_target(images, options)
    check_outputs([*targets, *extra], overwrite=overwrite, inputs=[*images, *files_read(options)])
    each, draw, done = Each(len(images) > 1, debug), None, 0
    rows: list[tuple[Path, Provenance]] = []
    told: set[str] = set()
    for i, photo in each.readable(images, options):
        if draw is None:  # load the model only once there is a readable photo
            draw = _drawing_saved(options) if options["map_file"] else _drawing_model(options, question_of(options))
        drawn: list[tuple[Path, Provenance]] = []
        with each.photo(images[i]):
            drawn.append(_written(draw(photo), targets[i], options["save_map"]))
        del photo  # frees memory before the next photo is read
        if as_json:
            rows += drawn
        else:
            result(False, drawn)
        for _, provenance in drawn:
            describe(quiet, provenance, told)
        done += len(drawn)
    if as_json:
        result(True, rows)
    return each.exit_code(done)


def _draw_study(
    images: tuple[Path, ...], output: Path | None, overwrite: bool, as_json: bool, quiet: bool, options: dict[str, Any]
) -> int:
    """Draw each view of a study: the map that has the name of the method, or one that the recording gives."""
    if len(images) > 1 or any(options[name] for name in ("map_file", "save_map", "compare")):
        raise OptionError("a study is drawn alone. Pass one .attn file, without other images, --map, --save-map and --compare.")
    refuse_beside("a study", ("inputs", "image", "check"))
    from visattn.core.drawing.pictures import to_png

    name, views = options["method"], views_of(images[0])
    plain = all(options[parameter] is None for parameter in parameters())
    stored = [next(iter(view.maps), "attention") if name == "auto" else name for view in views]
    shown = [plain and of_view in view.maps for of_view, view in zip(stored, views, strict=True)]
    asked = [None if known else question_of(options | {"method": of_view}) for of_view, known in zip(stored, shown, strict=True)]
    targets = _targets(tuple(Path(view.provenance.image or images[0].stem) for view in views), output, kind_of(options))
    check_outputs(targets, overwrite=overwrite, inputs=images)
    rows: list[tuple[Path, Provenance]] = []
    told: set[str] = set()
    for view, target, of_view, question in zip(views, targets, stored, asked, strict=True):
        found = view.explanation(of_view) if question is None else view.answer(question)
        picture, provenance = found.draw(**drawing_of(options))
        rows.append((write_whole(target, to_png(picture, provenance)), provenance))
        if not as_json:
            result(False, rows[-1:])
        describe(quiet, provenance, told)
    if as_json:
        result(True, rows)
    return 0


def _written(drawn: _Drawn, target: Path, map_file: Path | None) -> tuple[Path, Provenance]:
    png, provenance, raw = drawn
    if map_file:
        write_whole(map_file, raw())
    return write_whole(target, png), provenance


def _map_target(images: tuple[Path, ...], options: dict[str, Any]) -> list[Path]:
    if not options["save_map"]:
        return []
    if len(images) > 1 or options["map_file"]:
        raise OptionError("--save-map saves the map that a model computed for one image. Pass one image and no --map.")
    from visattn.core.maps.map_formats import map_format

    map_format(options["save_map"])
    return [options["save_map"]]


_PICTURES = ".png", ".jpg", ".jpeg", ".webp"


def _targets(images: tuple[Path, ...], output: Path | None, kind: str) -> list[Path]:
    """Return a distinct PNG file for each image, inside the output folder if there are several."""
    names = [f"{name}.{kind}.png" for name in result_names([as_file(image) for image in images])]
    if output is None:
        return [Path(name) for name in names]
    if len(images) > 1 and output.suffix.lower() in _PICTURES and not is_folder(output):
        raise OptionError(f"-o names one file, {printable(str(output))}, but there are {len(images)} images. Pass a folder.")
    if len(images) > 1 or is_folder(output) or not output.suffix:
        return [output / name for name in names]
    return [check_png(output)]


def _drawing_model(options: dict[str, Any], question: Question) -> Callable[[Image.Image], _Drawn]:
    from visattn.core.drawing.pictures import to_png
    from visattn.core.loading import load_model
    from visattn.core.maps import save_map
    from visattn.core.maps.map_formats import map_format
    from visattn.core.pipeline.inputs import prepare_with
    from visattn.core.pipeline.preprocessing import Preprocessing
    from visattn.core.pipeline.running import explained
    from visattn.core.pipeline.stages import by_stages, stage_page
    from visattn.core.pipeline.tensors import prepare_inputs

    method, how = question.method, Preprocessing(**preparing(options))
    inputs = inputs_of(options) if options["inputs"] or options["image"] else None
    needs = method.needs if method is not None else ()
    every = "cam layer" in needs and question.parameters.get("layer") == "all"
    each_layer = "patch" in needs and question.parameters.get("layer", "all") == "all"
    if every or each_layer:
        refuse_beside(
            "--layer all" if every else "a page of all layers",
            ("mass", "box", "legend", "caption", "transparent", "save_map", "check"),
        )
    model = load_model(options["model"], **{name: options[name] for name in ("weights", "seed", "img_size", "device")})
    if options["compare"]:
        return _drawing_two(model, options, question)

    def draw(photo: Image.Image) -> _Drawn:
        if inputs is None:
            prepared = prepare_with([photo], model, how)
        else:
            prepared = prepare_inputs(with_photo(inputs, photo, options["image"]), options["image"] or photo, model, how)
        if every:
            page = stage_page(by_stages(model, prepared, question, seed=options["seed"]), **style_of(options))
            return to_png(page), page.provenance, bytes
        (found,) = explained(model, [prepared], question, seed=options["seed"])
        if options["check"] is not None:
            found = found.checked(seconds=options["check"])
        if each_layer:
            said = [*found.provenance.notes, *(f"warning: {text}" for text in found.provenance.warnings)]
            page = found.contact_sheet(columns="layer", notes=said, **style_of(options))
            return to_png(page), page.provenance, bytes
        picture, provenance = found.draw(**drawing_of(options))
        return (
            to_png(picture, provenance),
            provenance,
            lambda: save_map(found.map, found.geometry, map_format(options["save_map"])),
        )

    return draw


def _drawing_two(model: nn.Module, options: dict[str, Any], question: Question) -> Callable[[Image.Image], _Drawn]:
    """Return a function that draws the maps of two models on one scale."""
    from visattn.core.drawing.pictures import to_png
    from visattn.core.loading import load_model
    from visattn.core.pipeline.comparisons import comparison_page
    from visattn.core.pipeline.inputs import prepare
    from visattn.core.pipeline.running import explained

    refuse_beside("--compare", ("mass", "box", "legend", "caption", "transparent", "save_map", "inputs", "image", "check"))
    if question.parameters.get("layer") == "all":
        raise OptionError("--compare draws one map of each model. Name a layer, or leave --layer out.")
    names = [options["model"], options["compare"]]
    models = [model, load_model(options["compare"], **{name: options[name] for name in ("seed", "img_size", "device")})]

    def draw(photo: Image.Image) -> _Drawn:
        both = [explained(one, [prepare(photo, one, **preparing(options))], question, seed=options["seed"])[0] for one in models]
        page = comparison_page(both, names, title=both[0].provenance.image or "", **style_of(options))
        return to_png(page), page.provenance, bytes

    return draw


def _drawing_saved(options: dict[str, Any]) -> Callable[[Image.Image], _Drawn]:
    from visattn.core.drawing.overlays import overlay
    from visattn.core.drawing.pictures import to_png
    from visattn.core.images import image_facts
    from visattn.core.maps import load_map
    from visattn.core.pipeline.explanation import Explanation

    loaded = load_map(options["map_file"])

    def draw(photo: Image.Image) -> _Drawn:
        source = image_facts(photo)
        if isinstance(loaded, tuple):
            attention_map, geometry = loaded
            if geometry.photo != (size := (photo.height, photo.width)):
                if attention_map.provenance.image_sha256 == source.sha256:
                    told = f"belongs to this photo with {in_pixels(geometry.photo)} pixels"
                    raise MapError(f"{source.name}: the map {told}, got {in_pixels(size)}. Compute the map again.")
                geometry = geometry.resized(size)
            made_for = attention_map.provenance
            if made_for.image_sha256 not in ("", None, source.sha256):
                other = f"the map was computed for another file ({made_for.image}); it is only right if this is a copy of that picture"
                attention_map = replace(attention_map, provenance=made_for.but(warnings=(other,)))
            picture = Explanation(photo, geometry, attention_map).overlay(**drawing_of(options))
        else:
            refuse_beside("an array of --map", ("interpolation", "mass", "box"))
            colors: Any = {name: value for name, value in style_of(options).items() if name != "interpolation"}
            picture = overlay(photo, loaded, **colors)
        provenance = picture.provenance.but(image=source.name, image_sha256=source.sha256)
        return to_png(picture, provenance), provenance, bytes

    return draw
