"""Pointing at a page of the viewer, and reading what it shows."""

from __future__ import annotations

import time
from typing import Any

import torch
from playwright.sync_api import Page

from visattn.studies import View


def on_patch(page: Page, view: View, row: int, column: int) -> tuple[float, float]:
    """Return the place on the screen of the center of a patch, from the geometry of Python."""
    record = view.recording[-1]
    box = view.geometry.patch_box(row, column, record.queries.grid, record.queries.box)  # type: ignore[arg-type]
    seen = page.locator("figure.image canvas").first.bounding_box()
    assert seen is not None
    y, x = (box.top + box.bottom) / 2 / view.photo.height, (box.left + box.right) / 2 / view.photo.width
    return seen["x"] + x * seen["width"], seen["y"] + y * seen["height"]


def settled(page: Page) -> None:
    """Wait until what changed is drawn."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def wait_until(page: Page, condition: str, seconds: float = 30) -> None:
    """Wait until a JavaScript expression is true.

    `Page.wait_for_function` looks again from inside the page, where its policy forbids `eval`:
    it works only if the first look finds the condition true.
    """
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"not true after {seconds} s: {condition}"
        page.wait_for_timeout(20)


def state(page: Page, name: str) -> Any:
    """Return a value of the page's state."""
    return page.evaluate("(name) => viewer.page.state.get(name)", name)


def row_shown(page: Page, side: str = "first") -> torch.Tensor:
    """Return the row that an image shows."""
    return torch.tensor(page.evaluate(f"Array.from(viewer.page.shown(viewer.page.{side}).row)"))
