"""Command `visattn inspect`: the attention layers of a model, and which methods apply to it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from visattn._support.checks import printable
from visattn._support.reprs import in_pixels
from visattn._support.tables import to_json, to_text
from visattn._support.whole_files import check_outputs, check_png, write_whole
from visattn.core.command_line.late import Command
from visattn.core.command_line.shared_options import Size, talk_options
from visattn.core.command_line.talk import describe, result

if TYPE_CHECKING:
    from visattn.core.methods import Method
    from visattn.core.pipeline.inputs import Prepared
    from visattn.core.records import Recording, TokenLayout


@click.command("inspect", cls=Command)
@click.argument("model")
@click.argument("photo", required=False)
@click.option(
    "--weights", help="Weights: auto, none (random) or a FILE.  [default: none; with PHOTO, or if the name brings its own: auto]"
)
@click.option("--img-size", type=Size(), help="Size of the model's input in pixels: a side, or height x width as HxW.")
@click.option(
    "--kernels",
    type=click.Path(path_type=Path),
    help="Draw the kernels of the first layer to this .png file, and print nothing else.",
)
@click.option(
    "--positions",
    type=click.Path(path_type=Path),
    help="Draw how alike the position embeddings are to this .png file, or without them attention on a plain picture.",
)
@click.option("--overwrite", is_flag=True, help="Replace existing files.")
@talk_options
def inspect_command(
    model: str,
    photo: str | None,
    weights: str | None,
    img_size: int | tuple[int, int] | None,
    kernels: Path | None,
    positions: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    debug: bool,
) -> None:
    """Show the attention layers of MODEL, which methods apply to it, and which targets it takes, with an example of each.

    MODEL is a name of `visattn.load_model`: of timm, tv:NAME, hf:REPOSITORY, clip:NAME, or file.py:factory. No pretrained weights are
    needed: one forward pass with random weights is enough. With a PHOTO, the examples are those of this photo.

    \b
    visattn inspect vit_base_patch16_224
    visattn inspect tf_efficientnet_lite0 photo:chelsea
    visattn inspect vit_small_patch14_dinov2.lvd142m --positions positions.png
    """  # noqa: D301 - \b keeps click from wrapping the examples
    import torch

    from visattn.core.families import input_spec
    from visattn.core.families.wrappers import unwrapped
    from visattn.core.images.sources import load_image
    from visattn.core.loading import brings_weights, load_model
    from visattn.core.methods import METHODS
    from visattn.core.methods.gate_maps import GATES
    from visattn.core.pipeline.captures import capture
    from visattn.core.pipeline.embeddings import with_words
    from visattn.core.pipeline.inputs import Prepared, prepare
    from visattn.core.pipeline.passes import answer_of, as_the_model
    from visattn.core.pipeline.preprocessing import Preprocessing
    from visattn.core.pipeline.recordings import last_map
    from visattn.core.pipeline.target_choices import choices_of, queries_of
    from visattn.core.records import split_call
    from visattn.errors import NoAttentionCaptured

    pictures = {"kernels": kernels, "positions": positions}
    targets = list(filter(None, pictures.values()))
    for target in targets:
        check_png(target)
    check_outputs(targets, overwrite=overwrite, inputs=[Path(photo)] if photo else [])
    image = None if photo is None else load_image(photo)
    usual = "auto" if photo is not None or any(pictures.values()) or brings_weights(model) else "none"
    net = unwrapped(load_model(model, weights=weights or usual, img_size=img_size))
    spec = input_spec(net, img_size)
    if image is None:
        noise = torch.randn(1, spec.channels, *spec.size, generator=torch.Generator().manual_seed(0))
        prepared = Prepared(noise, (), (), spec=spec, how=Preprocessing(img_size=img_size))
    else:
        prepared = prepare(image, net, img_size=img_size)
    prepared = with_words(net, prepared)
    if any(pictures.values()):
        _draw(net, prepared, pictures, as_json, quiet)
        return
    known = last_map(net, prepared)
    output: Any = None
    features = "last" if known is None else [split_call(known)[0]]
    with suppress(NoAttentionCaptured), capture(net, features=features, gradients=True) as recording:  # for the column `error`
        output = answer_of(net, as_the_model(net, prepared.pixels), prepared)
    choices = [*choices_of(net, prepared, output), *queries_of(recording)]
    layers = [
        {
            "layer": record.layer,
            "call": record.call,
            "kind": record.kind,
            "heads": record.operator.shape[1],
            "queries": record.operator.shape[2],
            "keys": record.operator.shape[3],
            "query_grid": list(record.queries.grid),
            "grid": list(record.keys.grid),
            "holes": len(record.keys.holes),
            "prefix": list(record.keys.prefix) if record.kind in ("self", "cross", "pool") else [],
            "windows": 1 if record.operator.query_index is None else len(record.operator.query_index),
            "error": record.error(),
            "reason": record.reason,
        }
        for record in recording
    ]
    gates = [
        {"layer": feature.layer, "gate": feature.role, "size": " x ".join(map(str, feature.value.shape[1:]))}
        for feature in recording.features
        if feature.role in GATES
    ]
    methods = [{"method": name, "applies": _applies(method, net, prepared, recording)} for name, method in METHODS.items()]
    facts: dict[str, Any] = {
        "model": model,
        "input": list(spec.size),
        "assumed": spec.assumed(),
        "any_size": spec.dynamic,
        "patch": list(spec.stride),
        "classifier": spec.classifier,
        "readout": recording.reads,
        "unseen": [{"layer": unseen.layer, "reason": unseen.reason} for unseen in recording.unseen],
        "cam_layer": known,
        "targets": [choice._asdict() for choice in choices],
    }
    if as_json:
        click.echo(to_json({**facts, "layers": layers, "gates": gates, "methods": methods}))
        return
    size = in_pixels(spec.size) + (f" (any multiple of {in_pixels(spec.stride)})" if spec.dynamic else "")
    size += " (assumed)" if "size" in spec.assumed() else ""
    head = "classifier" if spec.classifier else "no classification head"
    reading = recording.reading
    how = f"read-out: {reading.query or reading.reason or 'could not be traced'}" if len(recording) else "no attention"
    click.echo(f"{printable(model)}: input {size}, {head}, {how}; Grad-CAM layer: {known or 'unknown, name it with --layer'}\n")
    rows = [
        {
            "layer": record.name,
            "kind": record.kind,
            "heads": layer["heads"],
            "queries": _size(record.queries),
            "keys": _size(record.keys),
            "windows": layer["windows"],
            "error": f"{layer['error']:.1e}",
            "note": record.reason,
        }
        for record, layer in zip(recording, layers, strict=True)
    ]
    for unseen in recording.unseen:
        click.echo(f"not recorded: {printable(unseen.layer or 'the model itself')} {printable(unseen.reason)}\n")
    for table in (rows, gates):
        if table:
            click.echo(to_text(table))
    click.echo(to_text([row | {"applies": row["applies"].partition(". ")[0].rstrip(".")} for row in methods]))
    examples = [{"target": f"--{choice.option} {quote(choice.example)}", "what": choice.what} for choice in choices]
    click.echo(to_text(examples).rstrip())


def _draw(net: Any, prepared: Any, targets: Mapping[str, Path | None], as_json: bool, quiet: bool) -> None:  # noqa: ANN401
    """Draw the figures that were asked for, and print their paths."""
    from visattn._support.modes import evaluating
    from visattn.core.drawing.pictures import to_png
    from visattn.core.families import provenance_of
    from visattn.core.pipeline.learned_pictures import kernels_picture, positions_picture

    title, written = provenance_of(net).title, []
    for name, draw in (("kernels", kernels_picture), ("positions", positions_picture)):
        target = targets[name]
        if target is not None:
            with evaluating(net):
                page = draw(net, prepared, title)
            written.append((write_whole(target, to_png(page)), page.provenance))
    result(as_json, written)
    for _, made in written:
        describe(quiet, made)


def _applies(method: Method, net: Any, prepared: Prepared, recording: Recording) -> str:  # noqa: ANN401 - of torch, which loads late
    from visattn.core.pipeline.summable import terms_refusal

    if reason := terms_refusal(net, prepared) if "terms" in method.needs else method.accepts(recording):
        return reason
    if method.targeted and not prepared.spec_of(net).classifier:
        return "in Python, with a function of the output as target: the model has no classification head"
    return "yes"


def _size(layout: TokenLayout) -> str:
    registers = sum(name.startswith("register") for name in layout.prefix)
    named = [name for name in layout.prefix if not name.startswith("register")]
    parts = [*named, *([f"{registers} registers"] if registers else [])]
    if len(parts) > 3:  # channels, or unnamed tokens
        parts = [str(len(layout.prefix))]
    dropped = f" without {len(layout.holes)}" if layout.holes else ""
    return " + ".join([*parts, *([" x ".join(map(str, layout.grid)) + dropped] if layout.grid else [])])
