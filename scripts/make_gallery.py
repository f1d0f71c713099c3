"""Script that draws the pictures of README and docs in `assets/gallery/`, from the photos and weights of the demo."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gallery.captions import caption_pictures
from gallery.colors import profiles_sheet
from gallery.contributions import contribution_pictures
from gallery.evaluation import causes_screen, evaluation_screen
from gallery.even import even_sheet
from gallery.film import film_picture, walk_picture
from gallery.house import house
from gallery.layer import layer_sheet
from gallery.libraries import sampled_sheet, twins_sheet
from gallery.mechanisms import mechanism_pictures
from gallery.networks import network_pictures
from gallery.readout import readout_sheet
from gallery.regions import means_sheet, regions_sheet
from gallery.scenes import causes_sheet, known_truth_sheet, scenes_sheet, training_pictures
from gallery.space import space_pictures
from gallery.viewer import viewer_film, viewer_screen
from PIL import Image
from torch import Tensor, nn
from train_gates import gated

import visattn
from visattn import data
from visattn.cli.demo_command import PROBES, demo_page
from visattn.core.drawing.gate_pages import gate_page
from visattn.core.drawing.marks import ring, spotlight
from visattn.core.drawing.matrices import matrix_page
from visattn.core.drawing.pages import Cell, sheet
from visattn.core.drawing.plots import head_statistics
from visattn.core.drawing.sheets import contact_sheet
from visattn.core.methods.sinks import find_sinks
from visattn.core.pipeline.answering import answer
from visattn.core.pipeline.explanation import Explanation
from visattn.core.pipeline.passes import look
from visattn.core.pipeline.question import ask
from visattn.evaluation.survey import Survey

ASSETS = Path(__file__).parents[1] / "assets"
FOLDER = ASSETS / "gallery"
PHOTOS = data.photo_path("chelsea").parent
HEADS = {"astronaut": 4, "coffee": 1, "rocket": 5}  # heads shown in the strip, chosen by eye


def main() -> None:
    """Write every picture and print its path."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    (ASSETS / "house.svg").write_text(house())
    model = visattn.load_model(data.OFFLINE_MODEL, weights=data.offline_weights())
    _save("quickstart", visattn.explain(model, "photo:chelsea").contact_sheet())
    rows = []
    for name, head in HEADS.items():
        prepared = visattn.prepare(visattn.load_image(data.photo_path(name)), model)
        recording = look(model, prepared)
        heads = answer(recording, prepared, ask("attention"))
        x, y = PROBES[name]
        alike = answer(recording, prepared, ask("similarity", {"query": f"pixel:{x},{y}"})).overlay()
        rows.append(
            [
                Cell(_landscape(picture))
                for picture in (
                    prepared.photo,
                    heads.at(head=head).overlay(marks=False),
                    _mask(heads, head),
                    answer(recording, prepared, ask("pca")).overlay(),
                    alike,
                    answer(recording, prepared, ask("rollout")).overlay(),
                )
            ]
        )
        if name == "coffee":
            grid = answer(recording, prepared, ask("attention", {"layer": "all"}))
            _save("grid", contact_sheet(prepared.photo, grid.map, prepared.geometry, rows="layer", columns="head", panel=150))
            record = recording.select(kind="self", layer=5)[0]
            weights = record.operator.dense()[0, 2].numpy()
            _save("matrix", matrix_page(weights, record.keys.prefix, title="coffee.png, blocks.5.attn, head 2"))
            query = answer(recording, prepared, ask("attention", {"layer": "all", "query": f"pixel:{x},{y}"}))
            layers = query.map.mean("head")
            _save(
                "layers",
                contact_sheet(prepared.photo, layers, prepared.geometry, title="one patch through 12 layers"),
            )
    titles = [
        "photo",
        "one head",
        "60% of its attention",
        "patch features",
        "similarity to ringed patch",
        "rollout, sinks ringed",
    ]
    _save("strip", sheet(rows, panel=240, column_labels=titles))
    _save("masked", _masked(model))
    _save("holes", _holes(model))
    _save("color_profile", profiles_sheet(model))
    _save("layer", layer_sheet(model))
    _save("even", even_sheet())
    _save("regions", regions_sheet())
    _save("means", means_sheet())
    _save("readout", readout_sheet(model))
    _save("windows", _windows())
    targets = _targets(model)
    _save("targets", _upright(targets))
    _save("evidence", _in_short(targets))
    _save("remedies", _remedies(model))
    _save("attributions", _attributions())
    _save("cams", _cams())
    _save("stages", visattn.stage_page(visattn.explain_stages("tf_efficientnet_lite0", "photo:coffee")))
    _save("gates", _gates())
    _save("scenes", scenes_sheet())
    _save("known_truth", known_truth_sheet())
    _save("causes", causes_sheet())
    _save("two_libraries", twins_sheet(model))
    _save("sampled", sampled_sheet())
    _save("evaluation_page", evaluation_screen())
    _save("causes_page", causes_screen())
    _save("viewer", viewer_screen(model))
    viewer_film(model, FOLDER / "viewer.webp")
    for name, picture in (mechanism_pictures() | network_pictures() | space_pictures() | contribution_pictures()).items():
        _save(name, picture)
    film_picture(model, FOLDER / "film.webp")
    walk_picture(model, FOLDER / "walk.webp")
    training_pictures(FOLDER)
    caption_pictures(FOLDER)
    _distance(model)
    for name in data.PHOTOS:
        _save(f"demo_{name}", demo_page(model, f"photo:{name}", PROBES[name]))


def _masked(model: nn.Module) -> Image.Image:
    """Draw attention with sinks masked in every layer: the last layer hardly changes, and other patches become sinks."""
    rows = []
    for name in HEADS:
        prepared = visattn.prepare(visattn.load_image(data.photo_path(name)), model)
        before = look(model, prepared)
        layout = before[0].keys
        sinks = [layout.patch(sink.row, sink.column) for sink in find_sinks(before)[0]]
        with torch.inference_mode(), visattn.capture(model) as after, visattn.intervene(model, "blocks.*", mask=sinks):
            model(prepared.pixels)
        cells = [prepared.photo]
        for recording in (before, after):
            for method, options in (("attention", {"fusion": "mean"}), ("rollout", {})):
                cells.append(answer(recording, prepared, ask(method, options)).overlay())
        rows.append([Cell(_landscape(cell)) for cell in cells])
    titles = ["photo", "last layer", "rollout, sinks ringed", "last layer, sinks masked", "rollout, sinks masked"]
    return sheet(rows, panel=240, column_labels=titles)


def _holes(model: nn.Module) -> Image.Image:
    """Draw maps of a model that drops patches: at random before the first block, or by class-token attention after the third."""
    rows = []
    for name in HEADS:
        prepared = visattn.prepare(visattn.load_image(data.photo_path(name)), model)
        whole = look(model, prepared)
        prefix, count = len(whole[0].keys.prefix), whole[0].keys.cells
        seen = whole.select(kind="self", layer=2)[0].operator.dense()[0, :, 0, prefix:].mean(0)
        generator = torch.Generator().manual_seed(0)
        kept = {"pos_drop": torch.randperm(count, generator=generator)[: count // 2], "blocks.2": seen.topk(count // 2).indices}
        cells = [prepared.photo, answer(whole, prepared, ask("attention", {"fusion": "mean"})).overlay(marks=False)]
        for layer, patches in kept.items():
            tokens = torch.cat([torch.arange(prefix), prefix + patches.sort().values])
            handle = model.get_submodule(layer).register_forward_hook(lambda _, __, out, tokens=tokens: out[:, tokens])
            found = answer(look(model, prepared), prepared, ask("attention", {"fusion": "mean"}))
            handle.remove()
            cells.append(found.overlay(interpolation="nearest", marks=False))
        rows.append([Cell(_landscape(cell)) for cell in cells])
    titles = ["photo", "last layer", "half dropped at random", "half dropped by attention"]
    return sheet(rows, panel=300, column_labels=titles)


TARGETED = {
    "relevance": "relevance",
    "LeGrad": "legrad",
    "gradient rollout": "gradient_rollout",
    "transition attention": "transition_attention",
    "Grad-CAM": "gradcam",
}


def _targets(model: nn.Module) -> list[list[Cell]]:
    """Draw which patches make a pair of photos more similar to one of them, a row for each; rollout does not depend on this target."""
    photos = [_square(visattn.load_image(ASSETS / "objects" / f"{name}.jpg")) for name in ("macaw", "moose")]
    pair = Image.new("RGB", (photos[0].width * 2, photos[0].height))
    for number, photo in enumerate(photos):
        pair.paste(photo, (number * photo.width, 0))
    macaw, moose = (F.normalize(_embedding(model, photo), dim=-1) for photo in photos)

    def like_the_macaw(output: Tensor) -> Tensor:
        return F.normalize(output, dim=-1) @ (macaw - moose)

    def like_the_moose(output: Tensor) -> Tensor:
        return -like_the_macaw(output)

    rows = []
    for target in (like_the_macaw, like_the_moose):
        cells = [Cell(pair)]
        found = [visattn.explain(model, pair, method=method, target=target, resize="fit") for method in TARGETED.values()]
        found.append(visattn.explain(model, pair, method="rollout", resize="fit"))
        cells += [Cell(one.overlay(marks=False)) for one in found]
        rows.append(cells)
    return rows


def _upright(targets: list[list[Cell]]) -> Image.Image:
    return sheet(
        [list(column) for column in zip(*targets, strict=True)],
        panel=480,
        row_labels=["photo", *TARGETED, "rollout"],
        column_labels=["similarity to the macaw", "similarity to the moose"],
    )


def _in_short(targets: list[list[Cell]]) -> Image.Image:
    columns = {"photo": 0, "relevance": 1, "Grad-CAM": 5}
    rows = [[row[column] for column in columns.values()] for row in targets]
    return sheet(rows, panel=360, row_labels=["macaw", "moose"], column_labels=[*columns])


def _square(photo: Image.Image) -> Image.Image:
    side = min(photo.size)
    left = (photo.width - side) // 2
    return photo.crop((left, 0, left + side, side)).resize((480, 480), Image.Resampling.LANCZOS)


def _embedding(model: nn.Module, photo: Image.Image) -> Tensor:
    with torch.inference_mode():
        output: Tensor = model(visattn.prepare(photo, model, resize="fit").pixels)
    return output[0].clone()


REMEDIES: dict[str, dict[str, Any]] = {
    "rollout, sinks ringed": {},
    "sinks dropped": {"sinks": "drop"},
    "redistributed": {"sinks": "redistribute"},
    "from layer 6": {"start_layer": 6},
    "from layer 10": {"start_layer": 10},
    "residual measured": {"residual": "measured"},
}


def _remedies(model: nn.Module) -> Image.Image:
    """Draw rollout with its sinks, and with the options that reduce them."""
    rows = []
    for path in (data.photo_path("coffee"), data.photo_path("astronaut"), ASSETS / "objects" / "pika.jpg"):
        prepared = visattn.prepare(visattn.load_image(path), model)
        recording = look(model, prepared, values=True)
        cells = [prepared.photo]
        cells += [answer(recording, prepared, ask("rollout", options)).overlay() for options in REMEDIES.values()]
        rows.append([Cell(_landscape(cell)) for cell in cells])
    return sheet(rows, panel=240, column_labels=["photo", *REMEDIES])


WINDOWS = {
    "a window of Swin": ("swin_tiny_patch4_window7_224", "layers.1.blocks.0.attn"),
    "shifted": ("swin_tiny_patch4_window7_224", "layers.1.blocks.1.attn"),
    "grid attention of MaxViT": ("maxvit_tiny_tf_224", "stages.1.blocks.1.attn_grid.attn"),
    "a mask unit of Hiera": ("hiera_tiny_224", "blocks.0.attn"),
    "keys pooled, PVT v2": ("pvt_v2_b0", "stages.0.blocks.0.attn"),
}


def _windows() -> Image.Image:
    """Draw the patches that one query can attend to, whose weights are nonzero. Weights are random; layouts are the models' own."""
    cells = []
    x, y = PROBES["astronaut"]
    for name, layer in WINDOWS.values():
        model = visattn.load_model(name, weights="none")
        prepared = visattn.prepare(visattn.load_image(data.photo_path("astronaut")), model)
        question = ask("attention", {"layer": layer, "fusion": "mean", "query": f"pixel:{x},{y}"})
        found = answer(look(model, prepared), prepared, question)
        seen = replace(found.map, values=(found.map.values > 0).float())
        picture = spotlight(prepared.photo, seen.to_heatmap(found.geometry, "nearest"))
        cells.append(Cell(ring(picture, [(y, x)])))
    return sheet([cells], panel=240, column_labels=list(WINDOWS))


def _distance(model: nn.Module) -> None:
    """Draw the distance plot of `visattn stats`, over the photos of the demo and those with one object."""
    survey = Survey(model)
    for path in sorted((*PHOTOS.glob("*.[jp][pn]g"), *(ASSETS / "objects").glob("*.[jp][pn]g"))):
        survey.add(visattn.load_image(path), path.name)
    plot = head_statistics.distance(
        survey.heads(), survey.layers(), len(survey.photos), survey.provenance("visattn/core/shipped/photos, assets/objects")
    )
    path = FOLDER / "distance.png"
    path.write_bytes(plot or b"")
    print(path)
    print("numbers for docs/methods.md: mean over photos (95 % interval)")
    for row in survey.heads():
        figures = (f"{row[name]:.1f}" for name in ("distance_px", "distance_if_uniform_px", "effective_keys", "keys"))
        print(
            "layer {}, head {}: attention distance {} px (uniform attention {} px), {} effective keys of {}".format(
                row["layer"], row["head"], *figures
            )
        )
    for row in survey.layers():
        shares = (row[f"to_sinks{end}"] for end in ("", "_low", "_high"))
        print("layer {}: {:.1%} ({:.1%} to {:.1%}) to sinks".format(row["layer"], *shares))


ATTRIBUTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "saliency": ("captum.saliency", {}),
    "input x gradient": ("captum.input_x_gradient", {}),
    "integrated gradients": ("captum.integrated_gradients", {}),
    "SmoothGrad": ("captum.smoothgrad", {}),
    "occlusion, 14 x 14": ("captum.occlusion", {}),
    "Kernel SHAP, 5 x 5": ("captum.kernel_shap", {}),
    "LIME, SLIC segments": ("captum.lime", {"segments": "slic"}),
}


def _attributions() -> Image.Image:
    """Draw attributions of EfficientNet-Lite0, which has no attention, over the crop of each photo in gray."""
    name = "tf_efficientnet_lite0"
    model = visattn.load_model(name, weights=data.offline_weights(name))
    rows = []
    for photo in ("coffee", "chelsea"):
        found = [
            visattn.explain(model, data.photo_path(photo), method=method, **options) for method, options in ATTRIBUTIONS.values()
        ]
        seen = tuple(int(side) for side in found[0].heatmap().seen)
        gray = [replace(one, photo=one.photo.convert("L").convert("RGB")) for one in found]
        pictures = [found[0].photo, *(one.overlay(interpolation="nearest") for one in gray)]
        words = ["logit of " + found[0].provenance.target[0].split(" of ")[1].split(" (")[0]]
        ends = [one.draw()[1].value_range or (0, 0) for one in found]
        words += [
            f"colors: up to ±{high:.2g}" if one.map.signed else f"colors: {low:.2g} to {high:.2g}"
            for one, (low, high) in zip(found, ends, strict=True)
        ]
        cut = (seen[1], seen[0], seen[3], seen[2])
        rows.append([Cell(picture.crop(cut), text) for picture, text in zip(pictures, words, strict=True)])
    notes = (
        "red: evidence for the class, blue: against it, gray: zero; saliency has no sign, bright: large gradient. Each panel has its own "
        "scale, in units of the logit; for saliency and SmoothGrad, per unit of a normalized pixel. Baseline: blurred image.",
    )
    return sheet(rows, panel=240, column_labels=["model input", *ATTRIBUTIONS], notes=notes)


CAMS: dict[str, dict[str, Any]] = {
    "Grad-CAM": {"method": "gradcam"},
    "Grad-CAM++": {"method": "gradcam_plus_plus"},
    "CAM, signed": {"method": "cam"},
    "Layer-CAM, blocks.4": {"method": "layercam", "layer": "blocks.4"},
    "Eigen-CAM": {"method": "eigencam"},
}


def _cams() -> Image.Image:
    """Draw class activation maps of EfficientNet-Lite0 over the crop of each photo."""
    name = "tf_efficientnet_lite0"
    model = visattn.load_model(name, weights=data.offline_weights(name))
    rows = []
    for photo in ("coffee", "chelsea"):
        found = [visattn.explain(model, data.photo_path(photo), **options) for options in CAMS.values()]
        seen = tuple(int(side) for side in found[0].heatmap().seen)
        words = [found[0].provenance.target[0].split(" of ")[1].split(" (")[0]]
        words += ["{:.2g} to {:.2g}".format(*one.draw()[1].value_range or (0, 0)) for one in found]
        pictures = [found[0].photo, *(one.overlay() for one in found)]
        cut = (seen[1], seen[0], seen[3], seen[2])
        rows.append([Cell(picture.crop(cut), text) for picture, text in zip(pictures, words, strict=True)])
    return sheet(rows, panel=220, column_labels=["model input", *CAMS])


def _gates(name: str = "rocket") -> Image.Image:
    """Draw the gates of a CNN whose CBAM modules were trained on other photos."""
    model = gated()
    prepared = visattn.prepare(visattn.load_image(data.photo_path(name)), model)
    recording = look(model, prepared, features="none")
    facts = recording.provenance.but(model="EfficientNet-Lite0 and CBAM", weights="gates trained on other photos", image=name)
    return gate_page(replace(recording, provenance=facts), prepared.photo, prepared.geometry, panel=280)


def _mask(heads: Explanation, head: int) -> Image.Image:
    one = heads.at(head=head)
    return spotlight(one.photo, one.map.mass(0.6).to_heatmap(one.geometry, "nearest"))


def _landscape(picture: Image.Image) -> Image.Image:
    """Crop the top of a picture to 3:2, so that all rows have the same height."""
    return picture.crop((0, 0, picture.width, min(picture.height, picture.width * 2 // 3)))


def _save(name: str, picture: Image.Image) -> None:
    path = FOLDER / f"{name}.jpg"
    picture.save(path, quality=88)
    print(path)


if __name__ == "__main__":
    main()
