"""Lines of text on pages: the font, its sizes, breaking and cutting."""

from __future__ import annotations

from functools import cache

from PIL import ImageFont

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@cache
def font_of(size: int) -> Font:
    """The font of all pages, in a size in pixels."""
    return ImageFont.load_default(size)


def text_width(text: str, font: Font) -> int:
    """Width of a line in pixels."""
    return int(font.getlength(text)) + 1


def line_height(font: Font) -> int:
    """Height of a line in pixels."""
    box = font.getbbox("Ag|")
    return int(box[3] - box[1]) + 2


def wrap_text(text: str, font: Font, width: int) -> list[str]:
    """A text in lines of at most `width` pixels, broken between words."""
    lines, line = [], ""
    for word in text.split():
        if line and text_width(f"{line} {word}", font) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return [*lines, line] if line else lines


def lines_of(text: str) -> list[str]:
    """The lines of a text; an empty one has none."""
    return text.split("\n") if text else []


def clip_text(text: str, font: Font, width: int) -> str:
    """A line cut to `width` pixels, with an ellipsis where it was longer."""
    text = text if len(text) <= width else text[:width] + "…"  # hardly a character is narrower than a pixel
    while len(text) > 1 and text_width(text, font) > width:
        text = text[:-2].rstrip() + "…"
    return text
