"""Gallery picture of the page of an evaluation: a screenshot of its first part in Chromium."""

from __future__ import annotations

import io
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

import visattn
from visattn.data.scenes import Scenes
from visattn.evaluation import evaluate
from visattn.evaluation.evaluation_page import evaluation_page

METHODS = "relevance", "rollout", "attention", "gradcam", "eigencam", "captum.saliency", "legrad", "gradient_rollout"
SCENES, SEED = 12, 5
WIDTH, HEIGHT = 1180, 1260


def evaluation_screen() -> Image.Image:
    """Return the upper part of the page of an evaluation by deletion."""
    model, scenes = visattn.load_model("scenes_vit"), Scenes(SCENES, (64, 64), seed=SEED)
    photos = [Image.fromarray(scenes.scene(index).image) for index in range(SCENES)]
    found = evaluate(model, photos, METHODS, metrics=["deletion"], nulls=3)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        file = Path(folder) / "evaluation.html"
        file.write_text(evaluation_page(found, "scenes_vit", "trained"), encoding="utf-8")
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(file.as_uri())
        taken = page.screenshot()
        browser.close()
    return Image.open(io.BytesIO(taken)).convert("RGB")
