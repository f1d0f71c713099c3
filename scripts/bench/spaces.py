"""Page of all heads of DINOv2 ViT-S/14: time, memory, size and frames, as JSON: `python -m bench.spaces IMAGES`."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from embedding import photos
from PIL import Image
from playwright.sync_api import sync_playwright

from bench.measuring import load
from bench.memory import status
from visattn.data.scenes import Scenes
from visattn.embedding import crops_of, gather, lay_out, save_html

SIDE, CROPS, SHARE = 224, 9, 0.25  # share of generated scenes among the images
POINTS = 1_000  # as queries and as keys
HEAD = 5
_ZOOM = """async (count) => {
  const { width, height } = app.matrix.size;
  const frames = [];
  let last = performance.now();
  for (let i = 0; i < count; i++) {
    app.matrix.zoomAt(width / 2, height / 2, i % 20 < 10 ? 1.005 : 1 / 1.005);
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    frames.push(now - last);
    last = now;
  }
  return frames;
}"""


def main(count: int) -> dict[str, Any]:
    """Return seconds and gigabytes of the whole run, megabytes of the page, points and frames, and seconds of other layouts."""
    model = load()
    images, groups = _images(count)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        space = gather(model, images, img_size=SIDE, points=POINTS, groups=groups)
        page = save_html(space, Path(folder) / "space.html")
        found: dict[str, Any] = {
            "images": len(images),
            "tokens": space.layers[0].tokens.per_image,
            "heads": sum(len(states.queries) for states in space.layers),
            "minutes": (time.perf_counter() - start) / 60,
            "gigabytes": status("VmHWM") / 1e9,
            "megabytes": page.stat().st_size / 1e6,
        }
        found |= _frames(page)
    last = replace(space, layers=space.layers[-1:])
    for method in ("tsne", "umap"):
        start = time.perf_counter()
        (one,) = lay_out(last, method, heads=[HEAD])
        found[method] = time.perf_counter() - start
        found["laid out"] = 2 * one.queries.shape[1]
    return found


def _images(count: int) -> tuple[list[Image.Image], list[int]]:
    """Return the photos with their crops, then generated scenes, and the photo of each image."""
    images: list[Image.Image] = []
    groups: list[int] = []
    for number, (photo, _) in enumerate(photos()):
        own = [photo, *crops_of(photo, CROPS, seed=number)]
        images += own
        groups += [number] * len(own)
    images, groups = images[: round(count * (1 - SHARE))], groups[: round(count * (1 - SHARE))]
    scenes = Scenes(count - len(images), (SIDE, SIDE), seed=0)
    return [*images, *(scenes[i][0] for i in range(len(scenes)))], [*groups, *range(1_000, 1_000 + len(scenes))]


def _frames(file: Path) -> dict[str, Any]:
    """Return the points of the page, and the 95th percentile of the time of a frame while the matrix of all heads is zoomed."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("bench.spaces: error: no Chromium is installed; on Debian: apt-get install chromium")
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        page.evaluate(_ZOOM, 20)
        frames = sorted(page.evaluate(_ZOOM, 200))
        points = page.evaluate("app.space.points")
        browser.close()
    return {"points": points, "frame": frames[int(0.95 * len(frames))]}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
