"""The page on a phone: photo and heads are on one screen."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page
from torch import nn

import visattn
from tests.viewer.conftest import Opened
from tests.viewer.driving import settled, state
from visattn.studies import Study

PHONE: dict[str, Any] = {"width": 390, "height": 844, "has_touch": True}


def in_sight(page: Page, selector: str) -> bool:
    """Return whether an element lies within the window, with nothing over its middle."""
    said: bool = page.locator(selector).first.evaluate(
        """(one) => {
            const { left, top, right, bottom } = one.getBoundingClientRect();
            const inside = left >= 0 && top >= 0 && right <= window.innerWidth && bottom <= window.innerHeight;
            return inside && document.elementFromPoint((left + right) / 2, (top + bottom) / 2) === one;
        }"""
    )
    return said


@pytest.mark.parametrize("size", [(112, 168), (168, 84)])  # photos that are wider or higher
def test_the_photo_stays_in_sight_above_the_heads(size: tuple[int, int], dinov2: nn.Module, opened: Opened) -> None:
    photo = visattn.load_image("photo:chelsea").resize(size[::-1])
    page = opened(visattn.study(dinov2, photo, methods=[], img_size=size), **PHONE)
    wall = page.locator("#panel-heads canvas")
    assert in_sight(page, "figure.image canvas")
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    settled(page)
    assert in_sight(page, "figure.image canvas")
    seen, heads = page.locator(".pair").bounding_box(), wall.bounding_box()
    assert seen is not None
    assert heads is not None
    assert seen["height"] <= 844 / 2
    assert heads["y"] + heads["height"] - (seen["y"] + seen["height"]) >= 0.35 * 844  # what is seen of the heads
    x, y = page.evaluate("(({ x, y, side, tall }) => [x + side / 2, y + tall / 2])(viewer.panels.heads.boxes.at(-1))")
    page.touchscreen.tap(heads["x"] + x, heads["y"] + y)
    settled(page)
    assert state(page, "head") == 5


def test_two_photos_are_beside_each_other(study: Study, opened: Opened) -> None:
    page = opened(study, **PHONE)
    page.get_by_label("compare with").select_option("0")
    settled(page)
    first, second = (page.locator("figure.image canvas:first-child").nth(number).bounding_box() for number in (0, 1))
    assert first is not None
    assert second is not None
    assert first["y"] == second["y"]
    assert first["x"] + first["width"] <= second["x"]
    assert page.locator(".scale").first.evaluate("(one) => one.clientHeight") < 30  # numbers are not broken


def test_the_display_is_folded_away_only_where_it_is_narrow(study: Study, opened: Opened) -> None:
    page = opened(study, **PHONE)
    opacity, summary = page.get_by_label("opacity"), page.locator("summary")
    assert not opacity.is_visible()
    summary.click()
    assert opacity.is_visible()
    page.set_viewport_size({"width": 1280, "height": 900})
    settled(page)
    assert opacity.is_visible()
    assert not summary.is_visible()
