"""Provenance of pictures, which every PNG file of them stores."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import nn

import visattn
from tests import tiny
from tests.captioning.test_folder import kept
from tests.cli.test_commands import TINY, Run, photo, run
from tests.cli.test_gates import CBAM
from tests.methods.test_signed import glimpsing
from visattn.cli.demo_command import demo_page
from visattn.core.drawing.marks import outline, ring, spotlight
from visattn.core.drawing.overlays import colorize
from visattn.core.drawing.pictures import Picture
from visattn.core.maps import normalize
from visattn.core.provenance import Provenance
from visattn.errors import VisattnWarning
from visattn.training import AttentionLogger

__all__ = ["photo", "run"]

NOISE = Image.fromarray(np.random.default_rng(1).integers(0, 256, (60, 90, 3), np.uint8))
COLORED = {"opacity", "blend", "colormap"}


def facts(png: Path | str | bytes) -> dict[str, Any]:
    with Image.open(io.BytesIO(png) if isinstance(png, bytes) else png) as picture:
        found: dict[str, Any] = json.loads(picture.info["visattn"])
    return found


def saved(picture: Image.Image, **options: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "PNG", **options)
    return stream.getvalue()


@pytest.fixture
def explanation() -> visattn.Explanation:
    return visattn.explain(tiny.vit(), NOISE, method="attention")


def interpolation_of(made: dict[str, Any]) -> str:
    """Return the interpolation: a single picture stores it in the map's parameters, a figure also with the colors."""
    found: str = made["parameters"].get("interpolation") or made["drawing"]["interpolation"]
    return found


# commands

OVERLAYS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "attention": ("--method", "attention", "--mass", "0.6", "--legend", "--caption"),
    "similarity": ("--method", "similarity", "--query", "patch:0,1"),
    "pca": ("--method", "pca"),
    "saliency": ("--method", "saliency"),
    "gradcam": ("--method", "gradcam"),
}
PAGES: dict[str, tuple[str, ...]] = {
    "heads": (),
    "wall": ("--layer", "all", "--shared-scale"),
    "layers": ("--by-layer",),
    "matrix": ("--layer", "0", "--head", "0", "--matrix"),
}


@pytest.mark.parametrize("kind", OVERLAYS)
def test_overlay_files_store_their_provenance(kind: str, run: Run, photo: Path) -> None:
    given = ("--opacity", "0.25", "--blend", "value", "--colormap", "viridis", "--interpolation", "bicubic")
    code, out, err = run("overlay", photo, *TINY, *OVERLAYS[kind], *given, "--json", "-o", "made.png")
    assert code == 0, err
    made = facts("made.png")
    assert made == json.loads(out)[0]["provenance"]
    if kind == "pca":
        assert made["drawing"] == {"opacity": 1.0, "blend": "constant", "colormap": "components as red, green and blue"}
        assert (made["normalization"], interpolation_of(made)) == ("percentile of each component", "nearest")
        return
    asked = {"opacity": 0.25, "blend": "value", "colormap": "viridis", "interpolation": "bicubic", "contours": [], "marks": True}
    asked |= {
        "ground": "gray",
        "transparent": False,
        "mass": 0.6 if kind == "attention" else None,
        "box": None,
        "legend": kind == "attention",
        "caption": kind == "attention",
        "enlarged": 3 if kind == "attention" else 1,
    }
    assert made["drawing"] == asked
    assert interpolation_of(made) == "bicubic"
    how = {"saliency": "percentile"}.get(kind, "minmax")
    assert made["normalization"] == how
    assert made["value_range"][0] < made["value_range"][1]


@pytest.mark.parametrize("name", ["map.npz", "map.npy"])
def test_overlay_of_a_saved_map_stores_its_provenance(name: str, run: Run, photo: Path) -> None:
    assert run("overlay", photo, *TINY, "--method", "attention", "--save-map", "map.npz", "-o", "first.png")[0] == 0
    np.save("map.npy", np.random.default_rng(0).random((60, 90)))
    assert run("overlay", photo, "--map", name, "--opacity", "0.75", "-o", "made.png")[0] == 0
    made = facts("made.png")
    assert (made["drawing"]["opacity"], made["drawing"]["colormap"], made["normalization"]) == (0.75, "inferno", "minmax")
    assert made["method"] == ("attention" if name == "map.npz" else "a map given as an array")
    assert made["image"] == "dog.png"


@pytest.mark.parametrize("kind", PAGES)
def test_pages_of_heads_store_their_provenance(kind: str, run: Run, photo: Path) -> None:
    options = () if kind == "matrix" else ("--opacity", "0.25", "--colormap", "jet")
    code, out, err = run("heads", photo, *TINY, *PAGES[kind], *options, "--json")
    assert code == 0, err
    (entry,) = json.loads(out)
    made = facts(entry["output"])
    assert made == entry["provenance"]
    opacity, colormap = (1.0, "viridis") if kind == "matrix" else (0.25, "jet")
    assert (made["drawing"]["opacity"], made["drawing"]["colormap"]) == (opacity, colormap)
    assert interpolation_of(made) == "nearest"
    scope = {"wall": "percentile, one scale over layer and head", "matrix": "lowest to 99.5th percentile"}
    assert made["normalization"] == scope.get(kind, "minmax, each panel on its own scale")
    assert (made["method"], made["image"], made["geometry"]["photo"]) == ("attention", "dog.png", [60, 90])


def test_pages_of_gates_store_their_provenance(run: Run, photo: Path) -> None:
    code, out, err = run("heads", photo, *CBAM, "--opacity", "0.25", "--json")
    assert code == 0, err
    (entry,) = json.loads(out)
    made = facts(entry["output"])
    assert made == entry["provenance"]
    assert made["drawing"] == {
        "opacity": 0.25,
        "blend": "constant",
        "ground": "photo",
        "colormap": "inferno",
        "contours": [],
        "marks": True,
        "transparent": False,
        "panel": 240,
        "interpolation": "nearest",
    }
    assert made["normalization"] == "minmax, each map on its own scale"
    assert made["geometry"]["photo"] == [60, 90]


def test_filmstrips_store_their_provenance(run: Run, photo: Path, tmp_path: Path) -> None:
    folder = kept(tmp_path / "captioner")
    given = (
        "--checkpoint",
        folder,
        "--filmstrip",
        "strip.png",
        "--opacity",
        "0.25",
        "--interpolation",
        "bilinear",
        "--shared-scale",
    )
    assert run("caption", photo, *given)[0] == 0
    made = facts("strip.png")
    assert {name: made["drawing"][name] for name in COLORED} == {"opacity": 0.25, "blend": "constant", "colormap": "inferno"}
    assert interpolation_of(made) == "bilinear"
    assert made["normalization"] == "minmax, one scale over word"
    assert made["image"] == "dog.png"


def test_the_demo_page_stores_its_provenance() -> None:
    page = demo_page(tiny.vit(dynamic_img_size=True), "photo:coffee", (300, 170))
    made = facts(saved(page))
    assert made["image"] == "coffee.png"
    assert made["drawing"]["opacity"] == 0.8


def test_maps_of_a_training_run_store_their_provenance(tmp_path: Path) -> None:
    logger = AttentionLogger(tiny.vit(), torch.rand(2, 3, *tiny.INPUT), to=tmp_path, method="attention", style={"opacity": 0.25})
    logger(0)
    made = facts(tmp_path / "step_00000000.png")
    assert {name: made["drawing"][name] for name in COLORED} == {"opacity": 0.25, "blend": "constant", "colormap": "inferno"}
    assert made["normalization"] == "minmax, one scale for each row"
    assert facts(saved(logger.draw(3)))["weights"] == "in training, step 3"


# Python


@pytest.mark.parametrize("name", ["dog.png", "dog.PNG"])
def test_a_picture_saved_by_pillow_stores_its_provenance(name: str, explanation: visattn.Explanation, tmp_path: Path) -> None:
    picture = explanation.overlay(opacity=0.25, blend="value", colormap="jet", normalize="percentile", interpolation="nearest")
    picture.save(tmp_path / name)
    made = facts(tmp_path / name)
    assert Provenance.from_dict(made) == picture.provenance
    assert {name: made["drawing"][name] for name in COLORED} == {"opacity": 0.25, "blend": "value", "colormap": "jet"}
    assert (made["normalization"], interpolation_of(made)) == ("percentile", "nearest")
    explanation.save(
        tmp_path / "saved.png", opacity=0.25, blend="value", colormap="jet", normalize="percentile", interpolation="nearest"
    )
    assert facts(tmp_path / "saved.png") == made
    with Image.open(tmp_path / "saved.png") as one, Image.open(tmp_path / name) as other:
        assert one.tobytes() == other.tobytes() == picture.tobytes()


def test_overlays_of_heatmaps_store_their_provenance(explanation: visattn.Explanation) -> None:
    heat = explanation.panel.to_heatmap(explanation.geometry, "bicubic")
    for raw in (heat, normalize(heat, "percentile")):
        made = facts(saved(visattn.overlay(NOISE, raw, opacity=0.75)))
        assert (made["drawing"]["opacity"], interpolation_of(made), made["method"]) == (0.75, "bicubic", "attention")
        assert made["normalization"] == ("minmax" if raw is heat else "percentile")
        assert made["value_range"][1] == pytest.approx(
            float(heat.grid.max()) if raw is heat else np.percentile(heat.grid, 99), rel=1e-5
        )
    assert facts(saved(colorize(heat)))["drawing"]["opacity"] == 1


def test_drawing_on_a_picture_keeps_its_provenance(explanation: visattn.Explanation) -> None:
    picture = explanation.overlay()
    mask = explanation.panel.mass(0.5).to_heatmap(explanation.geometry, "nearest")
    for drawn in (outline(picture, mask), ring(picture, [(20, 20)]), picture.copy()):
        assert facts(saved(drawn)) == facts(saved(picture))
    assert facts(saved(spotlight(NOISE, mask)))["parameters"]["mass"] == 0.5
    assert not isinstance(outline(NOISE, mask), Picture)  # an array has no provenance


def test_contact_sheets_store_their_provenance(explanation: visattn.Explanation) -> None:
    heads = explanation.map
    page = visattn.contact_sheet(NOISE, heads, explanation.geometry, opacity=0.25, mass=0.5, normalize="symmetric")
    made = facts(saved(page))
    assert (made["drawing"]["opacity"], made["drawing"]["mass"]) == (0.25, 0.5)
    assert made["drawing"]["colormap"] == "blue-white-red"
    assert made["normalization"] == "symmetric, each panel on its own scale"


def test_a_path_of_glimpses_stores_its_provenance() -> None:
    made = facts(saved(visattn.explain(glimpsing(), NOISE, method="glimpses").overlay()))
    assert made["method"] == "glimpses"
    assert len(made["parameters"]["path"]) == 2


def test_pnginfo_given_to_pillow_replaces_provenance_and_other_formats_have_none(
    explanation: visattn.Explanation, tmp_path: Path
) -> None:
    own = PngInfo()
    own.add_text("author", "me")
    with Image.open(io.BytesIO(saved(explanation.overlay(), pnginfo=own))) as picture:
        assert picture.info["author"] == "me"
        assert "visattn" not in picture.info
    for name in ("dog.jpg", "dog.webp", "dog.tiff", "dog.bmp", "dog.gif"):
        explanation.overlay().save(tmp_path / name)
        with Image.open(tmp_path / name) as picture:
            assert "visattn" not in picture.info


def test_a_picture_is_a_pillow_image_that_can_be_pickled_and_resized(explanation: visattn.Explanation) -> None:
    picture = explanation.overlay()
    again = pickle.loads(pickle.dumps(picture))
    assert again.tobytes() == picture.tobytes()
    assert facts(saved(again)) == facts(saved(picture))
    for other in (picture.resize((9, 6)), picture.crop((0, 0, 9, 6)), picture.convert("L")):
        with Image.open(io.BytesIO(saved(other))) as back:
            assert "visattn" not in back.info  # another picture


# names


def test_heads_refuse_file_names_that_do_not_end_in_png(run: Run, photo: Path) -> None:
    code, out, err = run("heads", photo, *TINY, "-o", "page.jpg")
    assert (code, out) == (2, "")
    assert err == "visattn: error: page.jpg: figures are written as PNG. Choose a name that ends in .png.\n"


def test_overlays_of_constant_maps_store_their_provenance() -> None:
    class Blind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, pixels: Any) -> Any:
            return (pixels * 0).mean((2, 3)) * self.scale

    with pytest.warns(VisattnWarning, match="the photo is unchanged"):
        picture = visattn.explain(Blind(), NOISE, method="saliency").overlay()
    assert facts(saved(picture))["method"] == "captum.saliency"
