"""Command `visattn heads`: many attention heads, or the gates of a CNN, in one figure or as a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import click

from visattn._support.checks import printable, whole_number
from visattn._support.tables import Row, to_csv, to_json, to_text, without_nan
from visattn._support.types import Property
from visattn._support.whole_files import check_output, check_png, write_whole
from visattn.cli.effects_of_heads import FIGURES, TARGET, contributed, recovered
from visattn.core.command_line.late import Command
from visattn.core.command_line.questions import choices_of, model_of
from visattn.core.command_line.shared_options import (
    files_read,
    model_options,
    output_options,
    photo_options,
    preparing,
    reading,
    refuse_beside,
    style_of,
    style_options,
    target_options,
)
from visattn.core.command_line.study_files import is_study, only_view
from visattn.core.command_line.talk import describe, note, result
from visattn.core.drawing.style import Style
from visattn.core.drawing.style_options import PAGE
from visattn.core.images.sources import as_file
from visattn.errors import NoAttentionCaptured, OptionError

_Shown = Literal["attention", "gates"]
_QUERIES = {"cls": "the class token", "mean": "the mean of the patches"}  # as titles name them


@click.command("heads", cls=Command)
@click.argument("image", type=click.Path(path_type=Path))
@model_options
@click.option(
    "--method",
    type=click.Choice(get_args(_Shown)),
    default="attention",
    show_default=True,
    help="Draw attention heads, or the gates of attention modules.",
)
@click.option("--layer", help="Index or dotted name of a layer, or all for a layers x heads grid.  [default: -1; for gates: all]")
@click.option("--head", default="all", show_default=True, help="Index of a head, all, or mean.")
@click.option(
    "--query", default="auto", show_default=True, help="Query token: auto, cls, mean, pixel:X,Y, patch:ROW,COL or register:N."
)
@click.option("--by-layer", is_flag=True, help="Draw one query in all layers: the mean over heads, or one --head.")
@click.option("--matrix", is_flag=True, help="Draw the query x key matrix of one --head of one --layer.")
@click.option(
    "--steps",
    is_flag=True,
    help="Draw how the attention of one query in one --head comes about: dot product, score, weight, output. Prints what the scale does.",
)
@click.option(
    "--stats",
    is_flag=True,
    help="Print a table of each head's entropy, attention distance and attention by token type; with -o, write CSV.",
)
@click.option(
    "--contributions",
    is_flag=True,
    help="Print what each head adds directly to the score of --target, and what the score loses without it; with -o, write CSV, or a "
    "PNG. IMAGE may then be a folder.",
)
@click.option(
    "--from",
    "donor",
    type=click.Path(path_type=Path),
    help="Use the output of each head for this photo instead of its output for IMAGE, and print which share of the difference between "
    "the scores of --target follows; with -o, write CSV, or a PNG.",
)
@target_options
@click.option(
    "--find",
    type=click.Choice(get_args(Property)),
    help="Print the heads in the order in which they attend by this property, with a null. IMAGE may then be a folder.",
)
@click.option(
    "--masks",
    type=click.Path(path_type=Path),
    help="For --find object: the mask of IMAGE, or a folder with a mask for each photo.",
)
@click.option(
    "--mass",
    type=float,
    help="Outline the smallest region that holds this share of the map; by default 0.6 for the heads of one layer.",
)
@click.option("--shared-scale", is_flag=True, help="Use one color scale for all panels.")
@style_options(PAGE)
@click.option("--panel", type=click.IntRange(48, 2000), help="Width of a panel in pixels.")
@photo_options
@output_options
def heads_command(
    image: Path,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    debug: bool,
    **options: Any,  # noqa: ANN401 - click's
) -> None:
    """Draw the attention heads of a model for IMAGE in one figure. IMAGE may be a study, STUDY.attn, which needs no model.

    \b
    visattn heads photo:chelsea                                  the last layer
    visattn heads photo:chelsea --layer all                      every layer and head
    visattn heads photo:chelsea --query pixel:120,80 --by-layer  one query through the layers
    visattn heads photo:chelsea --layer 5 --head 2 --matrix      query x key
    visattn heads photo:chelsea --layer 5 --head 2 --steps       from dot products to the output
    visattn heads photo:chelsea --layer all --stats              every head in numbers
    visattn heads photos --find hue                              heads that attend to patches of the same hue
    visattn heads photo:chelsea --contributions                  what each head adds to the score of a class
    visattn heads scene:7 --model scenes_vit --from scene:3      which heads turn the score into that of another photo
    visattn heads photo:chelsea --model seresnet50 --method gates
    """  # noqa: D301 - \b keeps click from wrapping the examples
    if options["find"]:
        _found(image, output, overwrite, as_json, quiet, options)
        return
    if options["contributions"] or options["donor"]:
        _effects(image, output, overwrite, as_json, quiet, options)
        return
    refuse_beside("the figures and tables without --find", ("masks",))
    refuse_beside("the figures and tables without --contributions or --from", TARGET)
    gated = options["method"] == "gates"
    if options["by_layer"]:
        refuse_beside("--by-layer", ("layer",))
    chosen = _chosen(options)
    options["layer"] = options["layer"] or ("all" if gated else "-1")
    kind = _kind_of_gates(options) if gated else _kind(options)
    Style(**style_of(options)).opaque()  # raises for values out of range before any file is read
    _check_head(options["head"], kind)
    if kind in ("matrix", "stats"):
        refuse_beside(f"--{kind}", tuple(style_of(options)))
    target = output or Path(".".join([f"{as_file(image).stem}.{model_of(options)}{kind}", *chosen, "png"]))
    if not options["stats"]:
        check_png(target)
    if output is not None or not options["stats"]:
        check_output(target, overwrite=overwrite, inputs=[image, *files_read(options)])
    from dataclasses import replace

    from visattn.core.drawing.pictures import to_png
    from visattn.core.images import image_facts
    from visattn.core.pipeline.answering import answer
    from visattn.core.pipeline.question import ask

    layer = "all" if kind in ("grid", "layers") else _number(options["layer"])
    question = ask("gates") if gated else None
    if kind in ("heads", "grid", "layers"):
        question = ask("attention", {"layer": layer, "query": options["query"]})
    if is_study(image):
        prepared, recording = _of_study(image)
    else:
        prepared, recording = _of_model(image, options, question, values=kind == "steps")
    if gated or kind in ("stats", "matrix", "steps"):
        source = image_facts(prepared.photo)
        seen = recording.provenance.but(image=source.name, image_sha256=source.sha256, notes=source.notes)
        method = "gates" if gated else {"stats": "statistics"}.get(kind, "attention")
        if kind in ("matrix", "steps"):
            seen = seen.but(geometry=prepared.geometry)
        seen = prepared.noted(seen).but(method=method, parameters={"layer": options["layer"]})
        recording = replace(recording, provenance=seen)
    if kind == "stats":
        rows = _gate_stats(recording, options["layer"]) if gated else _stats(recording, options["layer"], quiet)
        describe(quiet, seen)
        _print_stats(rows, output, as_json)
        return
    lines: tuple[str, ...] = ()
    if gated:
        page = _gates(recording, prepared, options)
    elif kind == "matrix":
        page = _matrix(recording, _number(options["layer"]), options["head"])
    elif kind == "steps":
        page, lines = _steps(recording, prepared, options)
    else:
        assert question is not None  # noqa: S101 - only statistics, matrices and steps have none
        page = _page(answer(recording, prepared, question), kind, options)
    written = write_whole(target, to_png(page))
    result(as_json, [(written, page.provenance)])
    describe(quiet, seen if gated else page.provenance)
    note(quiet, *lines)


def _effects(image: Path, output: Path | None, overwrite: bool, as_json: bool, quiet: bool, options: dict[str, Any]) -> None:
    """Print what each head does to a score, or write it."""
    effect = "--contributions" if options["contributions"] else "--from"
    refuse_beside(effect, (*FIGURES, "find", "masks", *(["donor"] if options["contributions"] else [])))
    refuse_beside(effect, tuple(style_of(options)))
    from visattn.batch import items_of
    from visattn.core.drawing.pictures import to_png

    if output is not None:
        read = [item.path for item in items_of([path for path in (image, options["donor"]) if path is not None])]
        check_output(output, overwrite=overwrite, inputs=[*read, *files_read(options)])
    found, page = contributed(image, options) if options["contributions"] else recovered(image, options)
    describe(quiet, found.provenance)
    if output is not None and output.suffix.lower() == ".png":
        result(as_json, [(write_whole(output, to_png(page(), found.provenance)), found.provenance)])
    else:
        _print_stats(found.rows(), output, as_json)


def _found(image: Path, output: Path | None, overwrite: bool, as_json: bool, quiet: bool, options: dict[str, Any]) -> None:
    """Print the heads that attend by a property, or write them as CSV."""
    refuse_beside("--find", (*FIGURES, "contributions", "donor", *TARGET))
    refuse_beside("--find", tuple(style_of(options)))
    if options["masks"] and options["find"] != "object":
        refuse_beside(f"--find {options['find']}", ("masks",))
    if output is not None:
        check_output(output, overwrite=overwrite, inputs=[image, *files_read(options)])
    from visattn._support.lazily import Lazily
    from visattn.batch import apart, items_of, masks_of
    from visattn.evaluation import find_heads

    items = items_of([image], but=apart([image], options["masks"]))
    if output is not None:
        check_output(output, overwrite=overwrite, inputs=[item.path for item in items])
    photos = Lazily(len(items), lambda number: items[number].photo(**reading(options)))
    given = {name: options[name] for name in ("weights", "seed", "device")}
    masks = masks_of(items, options["masks"]) if options["masks"] else None
    found = find_heads(options["model"], photos, options["find"], masks=masks, **given, **preparing(options))
    describe(quiet, found.provenance)
    _print_stats(found.rows(), output, as_json)


def _of_study(image: Path) -> tuple[Any, Any]:
    """Return the photo of a study with its place in the model's input, and the recording."""
    view = only_view(image)
    return view.prepared, view.recording


def _of_model(image: Path, options: dict[str, Any], question: Any, *, values: bool) -> tuple[Any, Any]:  # noqa: ANN401 - a Question or None
    """Run the model on the photo; return the prepared photo, and a recording of what the question needs, or of all attention."""
    from visattn.core.families import provenance_of
    from visattn.core.images.sources import load_image
    from visattn.core.loading import load_model
    from visattn.core.pipeline.inputs import prepare
    from visattn.core.pipeline.running import looked

    photo = load_image(image, **reading(options))
    model = load_model(options["model"], **{name: options[name] for name in ("weights", "seed", "img_size", "device")})
    prepared = prepare(photo, model, **preparing(options))
    try:
        (recording,) = looked(model, [prepared], question, seed=options["seed"], values=values)
    except NoAttentionCaptured as nothing:
        fix = "visattn overlay draws the evidence of a model without attention, and --method gates its gates"
        raise NoAttentionCaptured(f"{provenance_of(model).model} has no attention, so no heads; {fix}.") from nothing
    return prepared, recording


def _chosen(options: Mapping[str, Any]) -> list[str]:
    """Return the parts of the output's file name that state layer, head and query, where they are not the default ones."""
    every = {"layer": "all", "head": "all", "query": "auto"}
    return choices_of({name: None if options[name] == whole else options[name] for name, whole in every.items()}, every)


def _kind(options: dict[str, Any]) -> str:
    """Return the kind of figure for attention: `heads`, `grid`, `layers`, `matrix`, `steps` or `stats`."""
    chosen = [name for name in ("by-layer", "matrix", "steps", "stats") if options[name.replace("-", "_")]]
    if len(chosen) > 1:
        raise OptionError(f"--{chosen[0]} and --{chosen[1]} cannot be combined. Choose one.")
    if options["stats"]:
        if options["query"] != "auto" or options["head"] != "all":
            raise OptionError("--stats covers all queries of all heads. Leave --query and --head out.")
        return "stats"
    if options["matrix"]:
        if options["layer"] == "all" or options["head"] == "all":
            raise OptionError("--matrix draws one head. Pass --layer N and --head N (or --head mean).")
        return "matrix"
    if options["steps"]:
        if options["layer"] == "all" or whole_number(options["head"]) is None:
            raise OptionError("--steps draws one head. Pass --layer N and --head N.")
        if options["mass"] is not None or options["shared_scale"]:
            raise OptionError("--steps draws quantities of different units. Leave --mass and --shared-scale out.")
        return "steps"
    return "layers" if options["by_layer"] else "grid" if options["layer"] == "all" else "heads"


def _check_head(head: str, kind: str) -> None:
    """Check that `--head` is a number or a word that this kind of figure takes.

    Raises:
        OptionError: If it is not.
    """
    if head not in ("all", "mean") and whole_number(head) is None:
        raise OptionError(f"--head must be all, mean or the index of one head, got {printable(head)}.")
    if head != "all" and kind in ("heads", "grid"):
        over = "--fusion mean" if head == "mean" else f"--head {head}"
        raise OptionError(
            f"--head {head} needs --by-layer, --matrix or --steps. To draw it over the photo: visattn overlay IMAGE {over}."
        )


def _kind_of_gates(options: dict[str, Any]) -> str:
    """Return the kind of output for gates: `gates` or `stats`."""
    defaults = {"head": "all", "query": "auto", "by-layer": False, "matrix": False, "steps": False, "mass": None}
    for name, default in defaults.items():
        if options[name.replace("-", "_")] != default:
            raise OptionError(f"--{name} applies to attention heads only. Leave it out with --method gates.")
    return "stats" if options["stats"] else "gates"


def _gates(recording: Any, prepared: Any, options: dict[str, Any]) -> Any:  # noqa: ANN401
    from visattn.core.drawing.gate_pages import gate_page

    return gate_page(
        recording,
        prepared.photo,
        prepared.geometry,
        layer=_number(options["layer"]),
        panel=options["panel"] or 240,
        shared_scale=options["shared_scale"],
        **style_of(options),
    )


def _gate_stats(recording: Any, layer: str) -> list[Row]:  # noqa: ANN401
    """Return one row per gate, of all layers or of one."""
    from visattn.core.methods.gate_maps import NO_GATES, layer_of
    from visattn.evaluation import gate_statistics

    every = gate_statistics(recording)
    if not every:
        raise OptionError(NO_GATES)
    chosen = layer if layer == "all" else layer_of(_number(layer), [found.layer for found in every], also="all or ")
    return [
        {
            "layer": found.layer,
            "gate": found.role,
            "count": found.values.shape[1],
            **{name: float(value[0]) for name, value in found.numbers().items()},
        }
        for found in every
        if chosen in ("all", found.layer)
    ]


def _page(found: Any, kind: str, options: dict[str, Any]) -> Any:  # noqa: ANN401
    from visattn.core.drawing.sheets import contact_sheet

    shown = found.map
    if kind == "layers":
        shown = shown.mean("head") if options["head"] in ("all", "mean") else shown.at(head=_number(options["head"]))
    grid = kind == "grid"
    mass = options["mass"] if options["mass"] is not None else 0.6 if kind == "heads" else None
    facts = found.provenance
    which = {"all": "", "mean": ", mean over heads"}.get(options["head"], f", head {options['head']}")
    layer = f", {shown.facts.layer}" if shown.facts.layer else ""
    title = f"{facts.title}: attention of {_QUERIES.get(shown.facts.query, shown.facts.query)}{which}{layer}"
    return contact_sheet(
        found.photo,
        shown,
        found.geometry,
        rows="layer" if grid else None,
        columns="head" if grid else None,
        panel=options["panel"] or (150 if grid else 300),
        shared_axes=shown.axes if options["shared_scale"] else (),
        **style_of(options),
        mass=mass,
        title=title,
        notes=(*facts.notes, *(f"warning: {text}" for text in facts.warnings)),
    )


def _matrix(recording: Any, layer: int | str, chosen: str) -> Any:  # noqa: ANN401
    from visattn.core.drawing.matrices import matrix_page
    from visattn.core.drawing.pictures import carrying

    record = recording.select(kind="self", layer=layer)[0]
    heads = record.operator.dense()[0]
    if chosen == "mean":
        weights = heads.mean(0)
    else:
        head = _number(chosen)
        if not isinstance(head, int) or not -len(heads) <= head < len(heads):
            raise OptionError(f"head must lie in [{-len(heads)}, {len(heads) - 1}] or be mean, got {chosen}.")
        weights = heads[head]
    made = recording.provenance
    page = matrix_page(weights.cpu().numpy(), record.keys.prefix, title=f"{made.title}: {record.layer}, head {chosen}")
    drawing = {"opacity": 1.0, "blend": "constant", "colormap": "viridis", "interpolation": "nearest"}
    parameters = {"layer": record.layer, "head": chosen, "query": "all"}
    return carrying(page, made.but(parameters=parameters, normalization="lowest to 99.5th percentile", drawing=drawing))


def _steps(recording: Any, prepared: Any, options: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:  # noqa: ANN401
    """Return the figure of the steps, and what the scale does as lines of text."""
    from visattn.core.drawing.step_pages import step_page
    from visattn.core.methods import attention_steps

    head = whole_number(options["head"]) or 0
    found = attention_steps(recording, layer=_number(options["layer"]), head=head, query=options["query"])
    facts = found.map.facts
    page = step_page(
        prepared.photo,
        found.map,
        prepared.geometry,
        found.weights.numpy(),
        panel=options["panel"] or 300,
        title=f"{recording.provenance.title}: {facts.layer}, head {options['head']}, query {facts.query}",
        notes=("output: what each key adds to the length of the output", *found.facts),
        style=Style(**style_of(options)),
    )
    return page, found.facts


def _stats(recording: Any, layer: str, quiet: bool) -> list[Row]:  # noqa: ANN401
    """Return one row per head of the layers whose attention rows sum to 1."""
    from dataclasses import replace

    from visattn.evaluation import statistics

    chosen = recording if layer == "all" else recording.select(layer=_number(layer))
    signed = [record.layer for record in chosen if not record.probability]
    if signed:
        note(quiet, f"layers left out because their attention rows do not sum to 1: {', '.join(signed)}")
    rows: list[Row] = []
    for found in statistics(replace(chosen, records=[record for record in chosen if record.probability])):
        numbers = found.numbers()
        rows += [
            {
                "layer": found.name,
                "head": head,
                **{name: float(value[0, head]) for name, value in numbers.items()},
                "keys": found.keys,
                "distance_if_uniform_px": found.uniform_distance,
            }
            for head in range(found.entropy.shape[1])
        ]
    if not rows:
        raise OptionError(f"--layer {layer}: its attention rows do not sum to 1. Choose another layer, or --layer all.")
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def _print_stats(rows: list[Row], target: Path | None, as_json: bool) -> None:
    if target is not None:
        write_whole(target, to_csv(rows).encode())
        click.echo(printable(str(target)))
    else:
        click.echo(to_json(without_nan(rows)) if as_json else to_text(rows).rstrip())


def _number(text: str) -> int | str:
    number = whole_number(text)
    return text if number is None else number
