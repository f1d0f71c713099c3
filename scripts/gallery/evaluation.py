"""Gallery pictures of the pages of an evaluation and of known causes: screenshots of their first parts in Chromium."""

from __future__ import annotations

import io
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

import visattn
from visattn.data.scenes import Scenes
from visattn.evaluation import Protocol, evaluate, find_causes
from visattn.evaluation.causes.causes_page import causes_page
from visattn.evaluation.causes.networks import cause_networks
from visattn.evaluation.evaluation_page import evaluation_page

METHODS = "relevance", "rollout", "attention", "gradcam", "eigencam", "captum.saliency", "legrad", "gradient_rollout"
SCENES, SEED = 12, 5
SCENES_OF_CAUSES = 30  # with fewer there is no verdict
TESTED = "captum.saliency", "relevance", "rollout", "gradcam"
WIDTH, HEIGHT, HEIGHT_OF_CAUSES = 1180, 1260, 1260


def evaluation_screen() -> Image.Image:
    """Return the upper part of the page of an evaluation by deletion."""
    model, scenes = visattn.load_model("scenes_vit"), Scenes(SCENES, (64, 64), seed=SEED)
    photos = [Image.fromarray(scenes.scene(index).image) for index in range(SCENES)]
    found = evaluate(model, photos, METHODS, metrics=["deletion"], nulls=3)
    return _screen(evaluation_page(found, "scenes_vit", "trained", Protocol()), HEIGHT)


def causes_screen() -> Image.Image:
    """Return the upper part of the page of known causes."""
    names = [network.name for network in cause_networks() if network.cause in ("ground", "mark") and network.kind == "vit"]
    found = find_causes(TESTED, networks=names, scenes=SCENES_OF_CAUSES, seed=SEED)
    return _screen(causes_page(found, SCENES_OF_CAUSES, SEED), HEIGHT_OF_CAUSES)


def _screen(page: str, height: int) -> Image.Image:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        file = Path(folder) / "page.html"
        file.write_text(page, encoding="utf-8")
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        window = browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme="light")
        window.goto(file.as_uri())
        taken = window.screenshot()
        browser.close()
    return Image.open(io.BytesIO(taken)).convert("RGB")
