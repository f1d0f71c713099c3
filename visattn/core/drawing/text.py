"""Text in figures: font, text size, line wrapping and clipping."""

from __future__ import annotations

from functools import cache

from PIL import ImageFont

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@cache
def font_of(size: int) -> Font:
    """Load the font of all figures in a size in pixels."""
    return ImageFont.load_default(size)


def text_width(text: str, font: Font) -> int:
    """Return the width of a line in pixels."""
    return int(font.getlength(text)) + 1


def line_height(font: Font) -> int:
    """Return the height of a line in pixels."""
    box = font.getbbox("Ag|")
    return int(box[3] - box[1]) + 2


def wrap_text(text: str, font: Font, width: int) -> list[str]:
    """Wrap a text between words into lines of at most `width` pixels."""
    lines, line = [], ""
    for word in text.split():
        if line and text_width(f"{line} {word}", font) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return [*lines, line] if line else lines


def lines_of(text: str) -> list[str]:
    """Split a text into lines; an empty text has none."""
    return text.split("\n") if text else []


def clip_text(text: str, font: Font, width: int) -> str:
    """Cut a line to `width` pixels; a longer one ends in an ellipsis."""
    text = text if len(text) <= width else text[:width] + "…"  # characters are at least about a pixel wide
    while len(text) > 1 and text_width(text, font) > width:
        text = text[:-2].rstrip() + "…"
    return text
