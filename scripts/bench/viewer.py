"""Size and speed of the viewer's page for DINOv2 ViT-S/14, as JSON: `python -m bench.viewer HOVERS`. Chromium runs without a window."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

import visattn
from bench.measuring import load

SIDES = 224, 518
_START = "performance.now()"
_HOVER = """async (count) => {
  const { state, view } = viewer.page;
  const times = [];
  for (let i = 0; i < count; i++) {
    const query = { y: ((i * 7919) % 997) / 997 * view.size[0], x: ((i * 104729) % 991) / 991 * view.size[1] };
    state.set({ query });
    const start = performance.now();
    state.flush();
    viewer.drawPanel();
    viewer.image.canvas.getContext("2d").getImageData(0, 0, 1, 1);  // waits until it is painted
    times.push(performance.now() - start);
    if (i % 20 === 0) await new Promise(requestAnimationFrame);
  }
  return times;
}"""
_DRAG = """async (count) => {
  const canvas = viewer.image.canvas;
  const box = canvas.getBoundingClientRect();
  const frames = [];
  let last = performance.now();
  for (let i = 0; i < count; i++) {
    const at = { clientX: box.left + (0.1 + 0.8 * i / count) * box.width, clientY: box.top + (0.3 + 0.3 * Math.sin(i / 9)) * box.height };
    canvas.dispatchEvent(new PointerEvent("pointermove", { ...at, bubbles: true }));
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    frames.push(now - last);
    last = now;
  }
  return frames;
}"""


def main(hovers: int) -> dict[str, Any]:
    """Return for each side the megabytes of the page, seconds until it can be used, milliseconds of hovers and frames, and growth."""
    model, found = load(), {}
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("bench.viewer: error: no Chromium is installed; on Debian: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        options = ["--no-sandbox", "--disable-gpu", "--enable-precise-memory-info", "--js-flags=--expose-gc"]
        browser = running.chromium.launch(executable_path=chromium, args=options)
        for side in SIDES:
            photo = visattn.load_image("photo:coffee").resize((side, side))
            file = visattn.study(model, photo, methods=["rollout"], img_size=side).save_html(Path(folder) / f"{side}.html")
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(file.as_uri())
            page.wait_for_selector("html[data-ready]", state="attached")
            ready = page.evaluate(_START) / 1e3
            page.evaluate(_HOVER, 20)
            times = sorted(page.evaluate(_HOVER, hovers))
            frames = sorted(page.evaluate(_DRAG, 200))
            memory = "(gc(), performance.memory.usedJSHeapSize)"
            before = page.evaluate(memory)
            for _ in range(3):
                page.evaluate(_HOVER, hovers)
            found[str(side)] = {
                "megabytes": file.stat().st_size / 1e6,
                "ready": ready,
                "hover": times[len(times) // 2],
                "frame": frames[int(0.95 * len(frames))],
                "growth": (page.evaluate(memory) - before) / 1e6,
            }
            print(f"{side}: {found[str(side)]}", file=sys.stderr, flush=True)
            page.close()
        browser.close()
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
